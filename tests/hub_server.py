"""A hub on this machine: folders, served over HTTP in the protocol that huggingface_hub and datasets speak."""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """`repositories` are folders by their names, such as `models/octet/tiny`."""

    daemon_threads = True

    def __init__(
        self, repositories: Mapping[str, Path], token: str | None = None, certificate: Path | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.scheme = "https" if certificate else "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.repositories = dict(repositories)
        self.token = token  # when there is one, nothing is given without it
        self.downloads: list[tuple[str, str]] = []  # each file sent, and the range that was asked for
        self.delay_s = 0.0  # before each answer
        self.cut_after: int | None = None  # bytes after which a download breaks off, once

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Let this process, which has read its environment already, ask the hub at `url` and keep its cache in `home`."""
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that what a test makes of it is undone
    places = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_TOKEN_PATH": home / "token", "ENDPOINT": url}
    for name, value in places.items():
        monkeypatch.setattr(constants, name, str(value))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@contextmanager
def serving(
    repositories: Mapping[str, Path], token: str | None = None, certificate: Path | None = None
) -> Iterator[Hub]:
    hub = Hub(repositories, token, certificate)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(self.server.delay_s)
        path = unquote(urlsplit(self.path).path)
        if api := API.fullmatch(path):
            self._describe(api)
        elif file := FILE.fullmatch(path):
            self._send_file(f"{file[1] or 'models'}/{file[2]}", file[3], file[4])
        else:
            self._reply(200 if path == "/" else 404, b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Only `paths-info` is asked in this way."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = (
            json.loads(asked)["paths"]
            if asked.startswith("{")
            else [
                unquote(part.partition("=")[2]).replace("+", " ")
                for part in asked.split("&")
                if part.startswith("paths=")
            ]
        )
        api = API.fullmatch(unquote(urlsplit(self.path).path))
        assert api, self.path
        folder = self._repository(f"{api[1]}/{api[2]}", api[4])
        if folder:
            self._reply_json([_entry(folder, folder / path) for path in paths if (folder / path).exists()])

    def _describe(self, api: re.Match[str]) -> None:
        kind, name, question, revision, below = api.groups()
        folder = self._repository(f"{kind}/{name}", revision or "main")
        if folder is None:
            return
        if question == "tree":
            start = folder / (below or "")
            if not start.is_dir():
                self._refuse(404, "EntryNotFound")
                return
            entries = sorted(start.rglob("*") if "recursive=True" in self.path else start.iterdir())
            self._reply_json([_entry(folder, path) for path in entries])
        else:
            files = [{"rfilename": str(path.relative_to(folder))} for path in folder.rglob("*") if path.is_file()]
            self._reply_json({"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": files})

    def _repository(self, name: str, revision: str) -> Path | None:
        """The folder; None when the answer has been given already."""
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._refuse(401, "GatedRepo")
        elif name not in self.server.repositories:
            self._refuse(401, "RepoNotFound")  # as the hub answers strangers
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return self.server.repositories[name]
        return None

    def _send_file(self, repository: str, revision: str, name: str) -> None:
        folder = self._repository(repository, revision)
        if folder is None:
            return
        if not (folder / name).is_file():
            self._refuse(404, "EntryNotFound")
            return
        content, wanted = (folder / name).read_bytes(), self.headers.get("Range", "")
        start = int(wanted[len("bytes=") :].partition("-")[0]) if wanted else 0
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.server.downloads.append((name, wanted))
        self._reply(206 if wanted else 200, content[start:], headers)

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _reply_json(self, facts: object) -> None:
        self._reply(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.server.cut_after
        if limit is not None and len(body) > limit:
            self.server.cut_after, self.close_connection = None, True
            body = body[:limit]
        self.wfile.write(body)


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": _oid(name.encode()), "size": 0}
    content = path.read_bytes()
    entry: dict[str, object] = {"type": "file", "path": name, "oid": _oid(content), "size": len(content)}
    if path.suffix == ".safetensors":  # large files are kept elsewhere, and known by another sum
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _oid(content: bytes) -> str:
    """Return the name that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
