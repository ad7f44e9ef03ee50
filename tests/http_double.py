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
    """Has subclasses say what they answer, by `get` and `post`."""

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


class OfVllm(Double):
    """Says of itself what vLLM does, and has adapters by name, one request after the other. What it loads, and what it
    says to other requests, is for subclasses: `load` and `say`."""

    def __init__(self, name: str, context: int, port: int = 0) -> None:
        super().__init__(port)
        self.name, self.context, self.lock = name, context, threading.Lock()
        self.adapters: dict[str, Any] = {}
        self.facts = {"logprobs_mode": "processed_logprobs", "max_loras": 2, "replicas": 1, "version": "0.32.0"}

    def get(self, path: str) -> Reply:
        cards = [{"id": self.name, "parent": None, "max_model_len": self.context}]
        cards += [{"id": name, "parent": self.name} for name in self.adapters]
        settings = {"model_config": {"logprobs_mode": self.facts["logprobs_mode"]}}
        settings["lora_config"] = {"max_loras": self.facts["max_loras"]}
        settings["parallel_config"] = {"data_parallel_size": self.facts["replicas"]}
        known = {"/v1/models": {"data": cards}, "/version": {"version": self.facts["version"]}}
        known["/server_info?config_format=json"] = {"vllm_config": settings}
        return (200, known[path]) if path in known else (404, {"detail": "Not Found"})

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        with self.lock:
            if path == "/v1/unload_lora_adapter":
                return (200, "removed") if self.adapters.pop(body["lora_name"], None) else (404, "cannot be found")
            if path != "/v1/load_lora_adapter":
                return self.say(path, body)
            if body["lora_name"] in self.adapters:
                return 400, "has already been loaded"
            return self.load(body["lora_name"], body["lora_path"])
