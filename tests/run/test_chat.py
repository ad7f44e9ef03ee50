"""`octet chat`: the models of a run answer side by side, while they write."""

import json
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import group
from tests.e2e.short_job import octet, train
from tests.forks import forked
from tests.terminal import Terminal, on_a_terminal, read
from trainer.config.resolve import resolve
from trainer.model.load import load_tokenizer
from trainer.problem.task import make_task
from trainer.records import Problem, Sampling, Turn
from trainer.run import chat
from trainer.run.data import prompter_of
from trainer.run_folder.model_source import Source

FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=40", "run.steps=1", "eval.problems=4"]
FEW += ["task.limit=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run of one step, which is called `it`."""
    folder = tmp_path_factory.mktemp("chat")
    train(folder, "--preset", "nano", *FEW, "run.dir=it")
    return folder


def chat_in(folder: Path, *arguments: str, run: str = "it", **options: Any) -> str:
    """Chat with the models of the run, and return what is said."""
    return octet(folder, "chat", run, *arguments, check=True, **options).stdout


def test_the_models_answer_a_question_and_a_held_out_problem(folder):
    said = chat_in(folder, input=f"{'3 ' * 300}\nWhat is 3 + 4?\n\n")
    assert "the context of this model, 256. Write a shorter prompt" in " ".join(said.split())
    assert said.startswith("Ask, or press Enter for a held-out problem.")
    by_hand, _, held_out = said.partition("adapter ─")
    by_hand += held_out.partition("base ─")[0]
    assert "read:" not in by_hand  # the answer is not known
    for name in ("base", "adapter"):
        assert said.count(f"\n{name} ─") == 2
    assert said.count("\nread: ") == 2


@pytest.mark.parametrize("run", ["it", "it/adapter"])
def test_a_question_on_the_command_line_is_answered_once(run, folder):
    asked = ("--json", "x=3.", "What is x + 4?", "rollout.max_new_tokens=8")
    said = json.loads(chat_in(folder, *asked, run=run, input="2 + 2?\n"))
    assert [(one["model"], one["right"]) for one in said["answers"]] == [("base", None), ("adapter", None)]


def test_long_answers_stay_on_a_small_terminal(folder, tmp_path):
    (tmp_path / "asked").write_text("\n")
    with (tmp_path / "asked").open() as asked:
        command = [*forked(), "-m", "trainer.commands.main", "chat", "it"]
        process, terminal = on_a_terminal(command, folder, 30, 4, stdin=asked)
    said = b""
    while part := read(terminal):
        said += part
    os.close(terminal)
    assert process.wait(60) == 0
    assert not re.search(rb"\x1b\[\d*[A-HJ]", said)  # nothing moves up to what was printed before
    left = Terminal(30).feed(said.decode()).text
    assert left.rstrip() == Terminal(30).feed(chat_in(folder, columns=30, input="\n")).text.rstrip()
    assert left.count("read: ") == 2


@pytest.mark.slow
def test_samples_of_the_same_question_differ_and_bytes_that_are_no_text_are_asked_as_such(folder):
    question = "Amy has \udcff 3 bags of 4 apples. How many is that?\n"
    said = chat_in(folder, "--temperature", "2", input=4 * question, errors="surrogateescape")
    answers = said.split("\nbase ─")[1:]
    assert len(answers) == 4
    assert len({answer.partition("\nadapter ─")[0] for answer in answers}) > 1


@pytest.mark.parametrize("stop", ["[]", '["#### 6"]', '["\\n####"]'])
def test_what_is_printed_grows_to_the_answer(monkeypatch, stop):
    """Also to one that a stop string ends: with it, or before it if it begins a line."""
    config = resolve("nano", None, [f"rollout.stop={stop}"])
    prompter = prompter_of(config, make_task(config.task), load_tokenizer(config.model))
    _, sampler = chat._load(config, prompter)
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    prompt = prompter.prompt(Problem("chat", "Tom has 3 cards and finds 4 more. How many cards has Tom now?", ""))
    answer = chat._stream(chat.ChatModel("base", sampler, nullcontext), prompt, Sampling(1, 0.0, 40, 0))
    assert "".join(written) == answer.text
    assert len(list(filter(None, written))) > 5
    assert not answer.truncated


def test_every_line_of_a_reply_is_marked(capsys):
    turns = (Turn("model", "look"), Turn("environment", "a wall\na door"), Turn("model", "north"))
    answer = replace(group([1.0]).completions[0], text="north", turns=turns)
    sampler = SimpleNamespace(sample=lambda prompts, sampling: [(prompts[0], (answer,))])
    chat._stream(chat.ChatModel("base", sampler, nullcontext), group([1.0]).prompt, Sampling(1, 0.0, 40, 0))
    assert capsys.readouterr().out == "look\n> a wall\n> a door\nnorth"


def test_a_model_without_room_beside_the_base_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chat, "fits", lambda folder, device: False)
    config = resolve("nano", None, ["lora.enabled=false"])
    prompter = prompter_of(config, make_task(config.task), load_tokenizer(config.model))
    assert [one.name for one in chat._models(Source(tmp_path), config, prompter)] == ["base"]
    assert f"{tmp_path} is left out" in capsys.readouterr().err
