"""The commands on the pages for new users: each block is run in its order, all blocks of a page in one folder.

A block that begins with `# needs ...` needs what a test does not have, such as a card. Bash only reads it then.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT, launch, program
from trainer.problem.prompts import STYLES

PAGES = ["own_data.md", "windows.md", "troubleshooting.md"]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def bash(script: str, folder, *options: str) -> subprocess.CompletedProcess:
    command = ["bash", "-euo", "pipefail", *options, "-c", script]
    return launch(*command, folder=folder, timeout=2400, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def folder(tmp_path):
    """An empty folder, with `octet` and `python` of this environment on the PATH."""
    for name, start in (("octet", "-m trainer.commands.main"), ("python", "")):
        program(tmp_path / "bin" / name, f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(folder, page):
    assert blocks(page)
    for block in blocks(page):
        answer = bash(block, folder, *(["-n"] if block.startswith("# needs ") else []))
        assert answer.returncode == 0, f"{block}\n{answer.stdout}\n{answer.stderr}"
    if page == "own_data.md":
        assert "#### 37" in bash("python ask.py", folder).stdout
        assert '"verdict": "learned"' in (folder / "runs/shop/verdict.json").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_says_what_it_needs(page):
    """Every block is one that is run, or one of these; and no command hides in an unmarked block."""
    text = (ROOT / "docs" / page).read_text()
    needs = {line for block in blocks(page) for line in block.splitlines() if line.startswith("# needs ")}
    assert needs <= {"# needs a card", "# needs a cluster", "# needs a clone", "# needs root", "# needs vLLM"}
    others = re.findall(r"^```\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert not [block for block in others if re.match(r"(octet|sbatch|python) ", block)]


def test_the_page_has_the_request_of_the_style_gsm8k():
    request = STYLES["gsm8k"].request.replace("{question}", "{{question}}").replace("\n", "\\n")
    assert f'`"{request}"`' in (ROOT / "docs/use.md").read_text()
