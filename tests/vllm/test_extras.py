"""All extras of the package at once. Only this tier has uv, and time for an index of packages."""

import os
import shutil

import pytest

from tests.conftest import ran, setup_cfg


@pytest.mark.parametrize("python", ["3.10", "3.13"])
def test_all_extras_resolve_together(python, tmp_path):
    """uv resolves them without constraints.txt, as pip does for `octet-grpo[vllm,...]`, and reads metadata only."""
    if (uv := shutil.which("uv")) is None:
        pytest.skip("uv is not installed")
    setup = setup_cfg()
    extras = setup["options.extras_require"]
    names = [setup["options"]["install_requires"], *(extras[one] for one in extras if one not in ("dev", "track"))]
    (tmp_path / "all.in").write_text("\n".join(names))
    links = ["--find-links", os.environ["PIP_FIND_LINKS"]] if "PIP_FIND_LINKS" in os.environ else []
    command = [uv, "pip", "compile", "--quiet", "--python-version", python, *links, str(tmp_path / "all.in")]
    answer = ran(*command, timeout=580)
    if "error sending request" in answer.stderr:
        pytest.skip("no index of packages can be reached")
    assert answer.returncode == 0, answer.stderr
    assert {"vllm", "wandb", "trackio", "gguf"} <= {line.partition("==")[0] for line in answer.stdout.splitlines()}
