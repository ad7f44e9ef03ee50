"""`octet ui` as a person starts it, and a browser."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import ROOT
from tests.ui.browser import browsing


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[str]:
    """Start the server in a folder, and yield the address that it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    with (folder / "server.log").open("w") as log:
        options = {"cwd": folder, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen([sys.executable, "-m", "octet", "ui"], **options)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the folder in which the server is started. The runs are in its folder `runs`."""
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def address(folder):
    with serving(folder) as address:
        yield address


@pytest.fixture
def asked(address):
    return asking(address)


def asking(address: str):
    """Return a function that sends a request with the key of the address, and returns status, headers and text."""
    where = urlsplit(address)

    def ask(method: str, path: str, body: bytes | str | None = None, key: str = where.path, **headers: str):
        connection = HTTPConnection(where.hostname, where.port, timeout=300)
        connection.request(method, f"{key}{path}", body, {name.replace("_", "-"): one for name, one in headers.items()})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    return ask


def does(asked, action: str, **given: object) -> str:
    status, _, text = asked("POST", f"do/{action}", json.dumps(given))
    assert status == 200
    return text


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
