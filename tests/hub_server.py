"""A hub on this machine: folders, served over HTTP in the protocol that huggingface_hub and datasets speak."""

import base64
import hashlib
import json
import re
import ssl
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import ModelCard, constants

from tests.http_double import Double

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
PUSH = re.compile(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git/info/lfs)?/(preupload|commit|objects)/(?:main|batch)")
LARGE = (".safetensors", ".gguf")  # what is sent beside the commit


class Hub(Double):
    """`repositories` are folders by their names, such as `models/octet/tiny`."""

    def __init__(
        self, repositories: Mapping[str, Path], token: str | None = None, certificate: Path | None = None
    ) -> None:
        super().__init__(handler=_Answer)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = self.url.replace("http", "https")
        self.repositories = dict(repositories)
        self.token = token  # when there is one, nothing is given without it
        self.downloads: list[tuple[str, str]] = []  # each file sent, and the range that was asked for
        self.delay_s = 0.0  # before each answer
        self.uploads: dict[str, dict[str, bytes]] = {}  # files that were pushed
        self.private: dict[str, object] = {}
        self.large: dict[str, bytes] = {}
        self.cut_after: int | None = None  # bytes after which a download breaks off, once


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Let this process, which has read its environment already, ask the hub at `url` and keep its cache in `home`."""
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that what a test makes of it is undone
    places = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_TOKEN_PATH": home / "token", "ENDPOINT": url}
    for name, value in places.items():
        monkeypatch.setattr(constants, name, str(value))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def serving(*arguments: Any, **options: Any) -> AbstractContextManager[Hub]:
    return Hub(*arguments, **options).serving()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None: ...

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
        asked = self._body().decode()
        path = unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            self._reply_json({"errors": [], "warnings": []})
        elif path == "/api/repos/create" and not self._has_token():
            self._refuse(401, "")
        elif path == "/api/repos/create":
            self._create(json.loads(asked))
        elif push := PUSH.fullmatch(path):
            self._take(push[1], push[2], asked)
        else:
            self._answer_paths(path, asked)

    def do_PUT(self) -> None:
        """Take a large file, whose name is its sum."""
        self.server.large[self.path.rpartition("/")[2]] = self._body()
        self._reply(200, b"")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def _create(self, asked: Mapping[str, object]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        self.server.uploads[name] = {}
        self.server.private[name] = asked["private"] if "private" in asked else asked.get("visibility") == "private"
        self._reply_json({"url": f"{self.server.url}/{name}", "id": name, "name": name})

    def _take(self, name: str, what: str, asked: str) -> None:
        """Take a part of a push: what is large, where to put that, and the commit."""
        if what == "objects":
            objects = json.loads(asked)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}}
            self._reply_json({"transfer": "basic", "objects": objects})
        elif what == "preupload":
            paths = [one["path"] for one in json.loads(asked)["files"]]
            modes = {path: "lfs" if Path(path).suffix in LARGE else "regular" for path in paths}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self._reply_json({"files": files})
        else:
            for line in map(json.loads, asked.splitlines()):
                if line["key"] == "file":
                    self.server.uploads[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.server.uploads[name][line["value"]["path"]] = self.server.large[line["value"]["oid"]]
            url = f"{self.server.url}/{name}/commit/{COMMIT}"
            self._reply_json({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def _answer_paths(self, path: str, asked: str) -> None:
        paths = json.loads(asked)["paths"] if asked.startswith("{") else parse_qs(asked).get("paths", [])
        api = API.fullmatch(path)
        assert api, path
        folder = self._repository(f"{api[1]}/{api[2]}", api[4])
        if folder:
            self._reply_json([_entry(folder, folder / one) for one in paths if (folder / one).exists()])

    def _describe(self, api: re.Match[str]) -> None:
        kind, name, question, revision, below = api.groups()
        folder = self._repository(f"{kind}/{name}", revision or "main")
        if folder is None:
            return
        start = folder / (below or "")
        if question == "tree" and not start.is_dir():
            self._refuse(404, "EntryNotFound")
        elif question == "tree":
            entries = sorted(start.rglob("*") if "recursive=True" in self.path else start.iterdir())
            self._reply_json([_entry(folder, path) for path in entries])
        else:
            files = [{"rfilename": str(path.relative_to(folder))} for path in folder.rglob("*") if path.is_file()]
            card = folder / "README.md"
            said = ModelCard.load(card).data.to_dict() if card.is_file() else {}
            facts = {"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": files, "cardData": said}
            self._reply_json(facts)

    def _repository(self, name: str, revision: str) -> Path | None:
        """The folder; None when the answer has been given already."""
        if self.server.token and not self._has_token():
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
