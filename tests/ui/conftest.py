"""`octet ui` as a person starts it, and a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.ui.browser import browsing


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Start the server in a folder, and yield the address that it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
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


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
