"""The real vLLM is in its own environment: `bash tests/run.sh vllm` makes it.

`OCTET_VLLM_PYTHON=vllm-env/bin/python bash tests/run.sh vllm` has servers of another environment, and with it of
another version, answer the same tests; those with the engine in the trainer's process are skipped."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.serving import ALLOWED, ARGUMENTS, PROCESSED, PYTHON, RealServer

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment: without triton, torch warns about its compiler."""
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:unclosed file.*lock:ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="there is no vLLM in this environment: bash tests/run.sh vllm")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            is_served = item.path.name != "test_colocate.py"
            if find_spec("vllm") is None and not (is_served and sys.executable != PYTHON):
                item.add_marker(missing)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with RealServer(tmp_path_factory.mktemp("server") / "log", [*ARGUMENTS, *PROCESSED], ALLOWED).running() as server:
        yield server
