"""An HTTP server on this machine that answers as a test says."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A status; bytes, a text, or what is sent as JSON; and headers.
Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


class Handler(BaseHTTPRequestHandler):
    """Has the server's `get` and `post` answer."""

    server: Any

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.answer(*self.server.get(self.path))

    def do_POST(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.answer(*self.server.post(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def answer(self, status: int, said: Any, headers: dict[str, str] | None = None) -> None:
        text = said if isinstance(said, str | bytes) else json.dumps(said)
        with suppress(BrokenPipeError, ConnectionResetError):  # the client did not wait
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode() if isinstance(text, str) else text)

    def log_message(self, *arguments: Any) -> None: ...


class Double(ThreadingHTTPServer):
    def __init__(self, port: int = 0, handler: type[BaseHTTPRequestHandler] = Handler) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.headers: list[dict[str, str]] = []  # of all requests

    @contextmanager
    def serving(self) -> Iterator[Any]:
        """Answer from a thread."""
        with self:
            thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.shutdown()
                thread.join()
