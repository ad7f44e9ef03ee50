"""Who may use the page: programs of this machine that have the key, and no page of another origin."""

import re
from hmac import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UPLOAD = "/upload"
LARGEST_UPLOAD, LARGEST = 200_000_000, 1_000_000  # bytes of a request
HOST = r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?"  # any port, because it may be forwarded
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
POLICY += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
HEADERS |= {"Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin"}
HEADERS |= {"Cross-Origin-Opener-Policy": "same-origin", "X-Frame-Options": "DENY"}


class Access:
    """Checks each request before its route runs. uvicorn opens no web sockets, for which there is no route either."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif refused := self._refused(scope):
            await PlainTextResponse(f"{refused}\n", 403, HEADERS)(scope, receive, send)
        else:
            path = scope["path"].removeprefix(f"/{self.key}")
            bounded = _bounded(receive, LARGEST_UPLOAD if path == UPLOAD else LARGEST)
            await self.app({**scope, "path": path, "raw_path": path.encode()}, bounded, _with_headers(send))

    def _refused(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        key, slash, _ = scope["path"].removeprefix("/").partition("/")
        if len(hosts) != 1 or not re.fullmatch(HOST, hosts[0]):
            return "This page is for programs of this machine, which call it localhost."
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "This request comes from another page."
        if not compare_digest(key.encode(), self.key.encode()) or not slash:
            return "The key in the address is not that of this server. `octet ui` prints the address."
        return ""


def _bounded(receive: Receive, limit: int) -> Receive:
    left = limit

    async def bounded() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"More than {limit:,} bytes: write the path of the file instead of sending it.")
        return message

    return bounded


def _with_headers(send: Send) -> Send:
    """Add the headers that a response does not set itself. A report sets a stricter policy."""

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            for name, value in HEADERS.items():
                MutableHeaders(scope=message).setdefault(name, value)
        await send(message)

    return guarded
