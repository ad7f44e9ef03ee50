"""`octet chat`: the models of a run answer side by side, while they write."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forks import forked
from trainer.config.command_line import resolve
from trainer.records import Problem, Sampling
from trainer.run import assemble, chat

FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=40", "run.steps=1", "eval.problems=4"]


@pytest.fixture(scope="module")
def octet(tmp_path_factory):
    """A run of one step, and a function that runs a program beside it."""
    folder = tmp_path_factory.mktemp("chat")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    pipes = {"capture_output": True, "text": True, "timeout": 580}
    run = partial(subprocess.run, cwd=folder, env=environment, check=True, **pipes)
    run([*forked(), str(ROOT / "train.py"), "--preset", "nano", *FEW, "run.dir=it"])
    command = [*forked(), "-m", "trainer.commands.main", "chat", "it"]
    return lambda *arguments, **options: run([*command, *arguments], **options)


def test_the_models_answer_a_question_and_a_held_out_problem(octet):
    said = octet(input="What is 3 + 4?\n\n").stdout
    assert said.startswith("Ask, or press Enter for a held-out problem.")
    by_hand, _, _ = said.partition("╯\n")
    assert "read:" not in by_hand  # the answer is not known
    for name in ("base", "adapter", "merged"):
        assert said.count(f" {name} ─") == 2
    assert said.count("read: ") == 3
    assert said.endswith("╯\n")


def test_a_question_that_is_too_long_does_not_end_the_chat(octet):
    said = octet(input=f"{'3 ' * 300}\n\n").stdout
    assert "exceeds the context of this model, 256. Ask a shorter question" in " ".join(said.split())
    assert said.count("read: ") == 3


def test_samples_of_the_same_question_differ_and_bytes_that_are_no_text_are_asked_as_such(octet):
    question = b"Amy has \xff 3 bags of 4 apples. How many is that?\n"
    said = octet("--temperature", "2", input=4 * question, text=False).stdout.decode()
    panels = said.split(" base ─")[1:]
    assert len(panels) == 4
    assert len({panel.partition("╰")[0] for panel in panels}) > 1


def test_what_is_heard_grows_to_the_answer():
    config = resolve("nano")
    task = assemble.make_task(config.task)
    prompter = assemble.prompter_of(config, task, assemble.load_tokenizer(config.model))
    _, sampler = chat._load(config, prompter)
    heard = []
    sampler.on_tokens = heard.append
    prompt = prompter.prompt(Problem("chat", "Tom has 3 cards and finds 4 more. How many cards has Tom now?", ""))
    ((_, (completion,)),) = sampler.sample([prompt], Sampling(1, 0.0, 40, 0))
    tokens = list(completion.tokens)
    assert len(heard) > 5
    assert all(part == tokens[: len(part)] for part in heard)
    assert heard[-1] == tokens


def test_a_folder_without_a_run_is_refused(tmp_path):
    command = [*forked(), "-m", "trainer.commands.main", "chat", str(Path(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 2
    assert "there is no config.yaml in it. Name the folder of a run." in done.stderr
