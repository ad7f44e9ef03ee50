"""The commands that README.md and docs/ print are run over the embedded model, in a folder with the files they name.

A training that begins anew is run by test_printed.py, and the blocks of the pages for new users by test_pages.py.
"""

import os
import re
import shutil
import subprocess

import pytest
import yaml

from tests.commands.test_printed import LINES, training
from tests.conftest import ROOT, write_lines
from tests.e2e.short_job import train
from tests.forks import forked
from tests.run.test_study import sums

# What cannot be run here, and why.
NOT_RUN = {
    r"octet fetch .*|python scripts/smollm2.*|python -m scripts\.gemma3 .*|octet push .* --yes": "the network",
    r"python bench/svamp\.py .*": "a clone from the network, which tests/test_bench.py writes instead",
    r"(sbatch|deepspeed|torchrun) .*": "Slurm, or several machines",
    r"octet eval .*rollout\.vllm\.urls=.*|python -m (llama_cpp|venv).*": "a server, or another program",
    r"octet plan --model NAME .*": "the end of an answer",
    r"python (make_table|ask)\.py": "test_pages.py runs them where the page has written them",
    r"octet ui.*": "a server, which tests/ui starts",
    r"bash tests/.*|python bench/soak.*|python -m tests.*": "tests, which are run by themselves",
}
# How a command runs here: what names a card or a model that is not here, and what would take long.
INSTEAD = {
    r"(octet (?:doctor|eval)\b.*)--preset 8gb(?: model\.quantize=nf4)?": r"\1--preset nano",
    r"--model Qwen/\S+(?= --task)": "--model nano",
    r"(octet eval.* (?:--task gsm8k|task\.name=gsm8k-renumbered)\b.*)": r"\1 task.data_dir=gsm8k",
    r"(task\.mix=.*) -n 0": r"\1 task.data_dir=gsm8k -n 0",
    r"--card NAME": "--card H100",
    r"(run\.steps=(?:100|200)\b)": r"\1 run.steps=3",
    r"(octet slurm .*run\.dir=runs/)first": r"\1new",  # a run with other settings is in `first`
}
MORE = {
    "eval": ["--problems", "2"],
    "merge": ["--problems", "2"],
    "repro": ["--steps", "1"],
    "slurm": ["--dry-run"],
    "study bench": ["--dry-run"],
    "study my_study.yaml --slurm": ["--dry-run"],
}
# What ends with another status than 0, as its page says.
STATUS = {
    "octet reward test": 1,
    "octet task show records task.path=shop.csv -n 1": 2,
    "octet task show records task.path=messy.csv": 2,
    "octet train task.name=gsm8k task.path=bad.jsonl": 2,
}
FEW = ["--preset", "nano", "rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "run.steps=2"]
FEW += ["eval.problems=4", "eval.every=1", "run.dir=runs/demo", "run.threads=1"]
RUNS = {name: {} for name in ("first", "shop", "sweep/00", "sweep/01", "rates/00", "rates/01", "seed0")}
RUNS |= {"seed1": {"run": {"seed": 1}}, "large-rate": {"algorithm": {"lr": 0.01}}}
FILES = {
    "shop.csv": "Question;Answer\n" + "".join(f"What is {n} + 2?;{n + 2}\n" for n in range(80)),
    "my.csv": "vraag,antwoord\nWat is 3 + 4?,7\nWat is 4 + 5?,9\nWat is 5 + 3?,8\n",
    "messy.csv": "question,answer\n1 + 1?,2\n2 + 2?,\n3 + 3?,n/a\n4 + 4?,8\n",
    "bad.jsonl": '{"question": "a?", "answer": "1 = 1\\n#### 1"}\n{"question": "b?", "answer": "#### five"}\n',
    "mine.py": "def score(completions, gold, **columns):\n"
    "    return [float(answer in text) for text, answer in zip(completions, gold)]\n",
    "my_rewards.py": "def brevity(completions, **columns):\n    return [1.0 for _ in completions]\n",
    "my_study.yaml": "preset: nano\nseeds: 1\narms: {grpo: {}, small: {lora.r: 4}}\nsettings: {run.steps: 1, "
    "rollout.problems: 4, rollout.group_size: 4, rollout.max_new_tokens: 8, eval.problems: 4}\n",
}


def commands():
    """Yield what is run. A training is, if it names a run, or ends with a message."""
    for _, words in LINES:
        line = " ".join(words)
        begins_anew = training(words) is not None and "runs/demo/" not in line and "--resume runs/" not in line
        if not any(re.fullmatch(pattern, line) for pattern in NOT_RUN) and (not begins_anew or line in STATUS):
            yield pytest.param(words, id=line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the pages name: a run with copies of it under other names, tables, functions."""
    folder = tmp_path_factory.mktemp("printed") / "work"
    folder.mkdir()
    for name in ("examples", "slurm", "bench"):
        (folder / name).symlink_to(ROOT / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "gsm8k").mkdir()
    for name, first in {"train": 10, "test": 50}.items():
        (folder / f"gsm8k/{name}.jsonl").write_text(sums(first))
    shutil.copytree(folder / "gsm8k", folder.parent / "shared/gsm8k")
    write_lines(folder / "labelled.jsonl", [{"completion": "#### 18", "answer": "18", "question": "9 * 2?"}])
    code = {"completion": "def largest(numbers):\n    return max(numbers)", "tests": "assert largest([1, 3, 2]) == 3"}
    write_lines(folder / "answers.jsonl", [code])
    train(folder, *FEW)
    for name, changes in RUNS.items():
        run = shutil.copytree(folder / "runs/demo", folder / "runs" / name)
        settings = yaml.safe_load((run / "config.yaml").read_text())
        for section, values in changes.items():
            settings[section] |= values
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("words", list(commands()))
def test_a_printed_command_runs(words, folder):
    line = "\0".join(words)
    for pattern, other in INSTEAD.items():
        line = re.sub(pattern.replace(" ", "\0"), other.replace(" ", "\0"), line)
    program, *rest = line.split("\0")
    rest += next((more for name, more in MORE.items() if " ".join(rest).startswith(name)), [])
    rest = [path for word in rest for path in (sorted(map(str, folder.glob(word))) if word[-1:] == "*" else [word])]
    for written in folder.glob("runs/*/export-*"):  # of the line before, which this one must not find
        shutil.rmtree(written)
    is_octet, environment = program == "octet", os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*forked(), *(["-m", "trainer.commands.main"] if is_octet else []), *rest]
    where, pipes = folder if is_octet else ROOT, {"input": "", "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, cwd=where, env=environment, timeout=590, **pipes)
    status = next((status for name, status in STATUS.items() if " ".join(words).startswith(name)), 0)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
