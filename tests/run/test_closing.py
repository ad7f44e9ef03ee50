"""The end of a run: ten lines, commands that can be copied, and three lines last."""

import errno
import io
import json
import os
import shlex
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, refuses
from trainer.config.request import parse_command_line
from trainer.config.resolve import resolve
from trainer.errors import CheckpointError
from trainer.machine.console import Console
from trainer.records import Problem, Prompt
from trainer.run import closing, job, opening
from trainer.watch.screen import Screen
from trainer.watch.verdict import CANNOT_TELL, LEARNED, NOT_LEARNED, Verdict

OWN = ["task.name=records", "task.path=my own.csv", "reward.custom=mine.py:brief", "algorithm.loss=cispo"]
OF_THE_SMALL_RUN = ["prompt.style=chat", "run.steps=4", "run.merge=false", "run.dir=it", "eval.problems=16"]
OF_THE_SMALL_RUN += ["algorithm.lr=1e-3", "lora.r=8", "rollout.problems=4", "optim.tokens_per_micro_batch=4096"]
OF_THE_SMALL_RUN += ["teacher.adapter=it", "rollout.vllm.urls=http://node1:30000", "rollout.ahead=1"]
OF_A_TEACHER = ["teacher.name=nano", "teacher.form=loss", "algorithm.kl.coef=1", "algorithm.kl.estimator=k2"]


def ending(folder, capsys, *overrides) -> list[str]:
    (folder / "metrics.jsonl").touch()
    closing.conclude(parse_command_line(["--preset", "nano", *overrides]), folder, Screen(), {})
    return capsys.readouterr().out.strip().splitlines()


@pytest.mark.parametrize(
    "overrides", [(), OF_A_TEACHER, OWN, [*OWN, *OF_THE_SMALL_RUN], [*OWN, "prompt.style=boxed", "run.steps=4"]]
)
def test_the_command_for_a_card_has_the_settings_of_the_task_and_none_of_the_small_run(tmp_path, capsys, overrides):
    said = ending(tmp_path, capsys, *overrides)
    assert len(said) <= 10
    *before, empty, _, where, last = said
    assert (empty, where, f"  {last}" in before) == ("", f"run folder {tmp_path}, with no model", False)
    command = before[-1].strip()
    assert "'\"'\"'" not in command
    kept = [*OWN, "prompt.style=boxed"] if "prompt.style=boxed" in overrides else OWN if OWN[0] in overrides else []
    start, *settings = shlex.split(command.partition(" --preset 8gb")[2]) or [""]
    assert sorted([start, *settings] if start else []) == sorted(kept)


def test_the_command_after_a_warm_up_has_its_settings_and_makes_no_second_one(tmp_path, capsys):
    own = ["lora.r=8", "task.tools=[calculator]", "task.calls=inline", "model.name=smollm2"]
    warmup = ["warmup.only=true", "warmup.lr=1e-3", "warmup.every=5", "warmup.problems=4"]
    for preset, none in (("nano", []), ("smollm2-gsm8k", ["warmup.steps=0"])):
        said = ending(tmp_path, capsys, "--preset", preset, *own, *warmup, "warmup.steps=9", f"run.dir={tmp_path}")
        command = next(line for line in said if "lora.start=" in line)
        settings = shlex.split(command.partition(f" --preset {preset} ")[2])
        assert sorted(settings) == sorted([*own, *none, f"lora.start={tmp_path}/adapter"])


def first_words(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("  ") or line is lines[-1]]


def test_the_commands_can_be_typed_where_the_run_was_started(tmp_path, capsys, monkeypatch):
    for prefix, octet in (("/usr", "octet"), (f"{ROOT}/.venv", os.path.relpath(f"{ROOT}/.venv/bin/octet", tmp_path))):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "prefix", prefix)
        assert first_words(ending(tmp_path, capsys)) == [octet] * 4
        monkeypatch.chdir(ROOT)
        here = octet[-len(".venv/bin/octet") :]
        assert first_words(ending(tmp_path, capsys)) == [here, here, "./run_deepspeed.sh", here]


@pytest.mark.parametrize(("family", "to"), [("qwen3", "ollama"), ("gpt_oss", "safetensors"), ("mamba", "safetensors")])
def test_what_llama_cpp_does_not_know_is_exported_otherwise(tmp_path, capsys, family, to):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 9, **sizes}))
    assert f"octet export {tmp_path} --to {to}\n" in "\n".join(ending(tmp_path, capsys, f"model.name={tmp_path}"))


@pytest.mark.parametrize(
    ("kind", "colour", "look"), [(LEARNED, "32", "chat"), (NOT_LEARNED, "31", "report"), (CANNOT_TELL, "33", "report")]
)
def test_three_lines_are_the_result_in_colour_the_run_and_the_next_command(tmp_path, kind, colour, look):
    folder = tmp_path / "my run"
    (folder / "adapter").mkdir(parents=True)
    result, where, command = closing.three_lines(Verdict(kind, "48.2% -> 93.9%."), folder)
    console = Console(force_terminal=True, color_system="standard", file=io.StringIO(), width=200)
    console.print(result)
    assert console.file.getvalue() == f"\x1b[1;{colour}mverdict: {kind}: 48.2% -> 93.9%.\x1b[0m\n"
    assert where == f"run folder {folder}, with adapter/"
    assert shlex.split(command)[-2:] == [look, str(folder)]


def test_an_output_that_fills_its_disk_is_an_error_without_a_path(tmp_path, monkeypatch):
    request = parse_command_line(["--preset", "nano"])
    log = SimpleNamespace(folder=tmp_path, config=request.config, close=lambda: None)
    run = SimpleNamespace(log=log, evaluator=None, rollouts=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(job.teaching, "built", lambda *_: (run, None))
    full = OSError(errno.ENOSPC, "it is full")
    monkeypatch.setattr(job.opening, "introduce", lambda *_: (_ for _ in ()).throw(full))
    with refuses("while writing", CheckpointError, names="Nothing is saved yet"):
        job._train_and_evaluate(request, None)


def test_what_a_right_answer_earns_is_left_out_where_none_is_known():
    settings = ["task.name=records", "task.path=a.jsonl", "task.answer=none", "reward.weights={code: 1}"]
    prompter = SimpleNamespace(prompt=lambda problem: Prompt(problem, "Write it.", ()))
    curriculum = SimpleNamespace(problems=[Problem("a", "Write it.", "")])
    rollouts = SimpleNamespace(config=resolve("nano", None, settings), prompter=prompter, curriculum=curriculum)
    assert opening._example(SimpleNamespace(rollouts=rollouts)) == "a prompt ends with 'Write it.'"
