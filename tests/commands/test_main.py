"""The command `octet`, and octet eval and octet merge on an adapter of a real run."""

import json
import os
import re
import sys

import pytest

from tests.conftest import ran, said_by
from tests.e2e.short_job import octet
from tests.forks import forked
from tests.run.test_job import FEW, train
from tests.terminal import shown
from trainer.commands.main import COMMANDS


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    train(folder, *FEW, "run.steps=1", "run.dir=it", "run.merge=false", "eval.problems=0", f"run.seed={2**63}")
    return folder / "it/adapter"


def test_merge_writes_a_model_that_answers_alike(adapter):
    out = adapter.parent / "whole"
    answer = octet(adapter.parent, "merge", adapter.parent, "--out", out, "--problems", 8, "--json")
    assert f"octet: merging {adapter} into the base, and writing {out}\n" in answer.stderr
    result = json.loads(answer.stdout)
    assert (result["identical"], result["problems"]) == (8, 8)
    assert result["largest_difference"] < 1e-4
    assert (out / "model.safetensors").is_file()
    link = adapter.parent / "link"
    link.symlink_to(adapter)
    assert "it is a link" in octet(adapter.parent, "merge", "--adapter", adapter, "--out", link).stderr


@pytest.mark.slow
def test_the_largest_seed_trains_and_samples(adapter):
    answer = octet(adapter.parent, "eval", "--adapter", adapter, "--problems", 4, "--samples", 2, "--json", check=True)
    seeds = {one["name"]: one["sampled"]["seed"] for one in json.loads(answer.stdout)["evaluations"]}
    assert seeds == {"base": 2**63, "adapter": 2**63}


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["-h"], 0), (["help"], 0)])
def test_the_help_lists_every_command_in_its_group(capsys, arguments, status):
    ended, page, errors = said_by(capsys, *arguments)
    assert (ended, errors) == (status, "")
    assert [line for line in page.splitlines() if line.endswith(":")] == ["train:", "look:", "prepare:", "share:"]
    assert [line.split()[0] for line in page.splitlines() if line.startswith("  ")] == [*COMMANDS]
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example(capsys, name):
    status, page, _ = asked = said_by(capsys, name, "--help")
    assert (status, said_by(capsys, "help", name)) == (0, asked)
    assert page.startswith(f"usage: octet {name} ")
    assert f"example: octet {name} " in " ".join(page.split())
    assert "\n  run " not in page, "a run folder is called RUN"


def test_the_help_of_train_imports_no_settings():
    """It answers at once: neither the launcher nor pydantic is imported for it."""
    code = "import sys; from trainer.commands.main import main\ntry: main(['train', '--help'])\n"
    code += "finally: sys.stderr.write(str([name for name in ('pydantic', 'trainer.plan') if name in sys.modules]))"
    answer = ran(sys.executable, "-c", code, check=True)
    assert (answer.stderr, "octet train" in answer.stdout) == ("[]", True)


@pytest.mark.parametrize("program", ["train.py", "-m trainer.commands.main train", "-m trainer.commands.main plan"])
def test_a_python_without_the_packages_is_told_in_one_line(program):
    """-S leaves out site-packages."""
    done = ran(sys.executable, "-S", *program.split(), "--preset", "nano", env={"PATH": os.environ["PATH"]})
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"octet: \S+ has no package \w+\. Start with \./run_deepspeed\.sh, .*\n", done.stderr)


TYPED = ["--help", "doctor", "doctor --preset 8gb", "plan --card A100", "chat nowhere " + "and so/" * 30]


@pytest.mark.parametrize("arguments", [line.split() for line in TYPED], ids=[line[:16] for line in TYPED])
def test_a_terminal_of_80_columns_cuts_no_word(arguments, tmp_path):
    said = re.sub("\x1b\\[[0-9;]*m", "", shown([*forked(), "-m", "trainer.commands.main", *arguments], tmp_path))
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80, said
    assert "\u241b" not in said  # a code that was made visible
    assert "\u2026" not in said  # where a table leaves something out
