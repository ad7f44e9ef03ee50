"""Requires the API key on every route of a server that the run has started. vLLM itself requires it only below /v1, but
other routes can load weights.

vLLM imports this file in its own environment, so the file imports nothing of Octet.
"""

import os
import secrets
from collections.abc import Callable
from typing import Any


class KeyCheck:
    """An ASGI middleware. Without the key, requests are answered with status 401, and other connections closed."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(given, self._expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"this server asks for the key of its run"})
        else:
            await send({"type": f"{scope['type']}.close", "code": 1008})
