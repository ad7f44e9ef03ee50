"""The commands on the pages for new users: each block is run in its order, all blocks of a page in one folder.

A block that begins with `# needs ...` needs what a test does not have, such as a card. Bash only reads it then.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PAGES = ["own_data.md", "windows.md", "troubleshooting.md"]
MINUTES = 10


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def bash(script: str, folder, *options: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", *options, "-c", script]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240 * MINUTES, check=False
    )


@pytest.fixture
def folder(tmp_path):
    """An empty folder, with `octet` and `python` of this environment on the PATH."""
    (tmp_path / "bin").mkdir()
    for name, start in (("octet", "-m trainer.commands.main"), ("python", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(folder, page):
    assert blocks(page)
    for block in blocks(page):
        answer = bash(block, folder, *(["-n"] if block.startswith("# needs ") else []))
        assert answer.returncode == 0, f"{block}\n{answer.stdout}\n{answer.stderr}"
    if page == "own_data.md":
        assert answer.returncode == 0
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


def messages() -> list[str]:
    """The parts of messages in the first columns of docs/troubleshooting.md."""
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## What else you may see")[2]
    firsts = [line.split("|")[1] for line in page.partition("### Elsewhere")[0].splitlines() if line.startswith("|")]
    named = {text for first in firsts for text in re.findall("`([^`]*)`", first)}
    return sorted(named - {"Killed"})  # which is the shell's


@pytest.fixture(scope="module")
def source() -> str:
    """All sources, with the pieces of a text that goes over several lines put together."""
    files = [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "slurm").glob("*.sh")]
    return re.sub(r'"\n\s+f?"', "", "\n".join(path.read_text() for path in files))


@pytest.mark.parametrize("message", messages())
def test_a_message_that_is_explained_is_one_that_octet_says(source, message):
    pattern = r"\{[^}]*\}".join(re.escape(part) for part in message.split("..."))
    assert re.search(pattern, source)
