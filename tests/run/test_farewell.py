"""The end of a run: ten lines, and commands that can be copied."""

import os
import shlex

import pytest

from trainer.config.command_line import parse_command_line
from trainer.run import farewell
from trainer.watch.screen import Screen

OWN = ["task.name=records", "task.path=my own.csv", "reward.custom=['mine.py:brief']", "algorithm.loss=cispo"]
OF_THE_SMALL_RUN = ["prompt.style=chat", "run.steps=4", "run.merge=false", "run.dir=it", "eval.problems=16"]
OF_THE_SMALL_RUN += ["algorithm.lr=1e-3", "lora.r=8", "rollout.problems=4", "optim.tokens_per_micro_batch=4096"]


def ending(folder, capsys, *overrides) -> list[str]:
    (folder / "metrics.jsonl").touch()
    request = parse_command_line(["--preset", "nano", *overrides])
    farewell.conclude(request, folder, Screen(), {})
    return capsys.readouterr().out.strip().splitlines()


@pytest.mark.parametrize("overrides", [(), OWN, [*OWN, *OF_THE_SMALL_RUN], [*OWN, "prompt.style=boxed", "run.steps=4"]])
def test_the_command_for_a_card_has_the_settings_of_the_task_and_none_of_the_small_run(tmp_path, capsys, overrides):
    said = ending(tmp_path, capsys, *overrides)
    assert len(said) <= 10
    command = said[-1].strip()
    assert "'\"'\"'" not in command
    kept = [*OWN, "prompt.style=boxed"] if "prompt.style=boxed" in overrides else OWN if overrides else []
    start, *settings = shlex.split(command.partition(" --preset 8gb")[2]) or [""]
    assert sorted([start, *settings] if start else []) == sorted(kept)


def test_the_commands_can_be_typed_where_the_run_was_started(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [line.split()[0] for line in ending(tmp_path, capsys) if line.startswith("  ")] == ["octet"] * 4
    for name in ("run_deepspeed.sh", ".venv/bin/octet"):  # a clone, with its own environment
        os.makedirs((tmp_path / name).parent, exist_ok=True)
        (tmp_path / name).touch()
    starts = [line.split()[0] for line in ending(tmp_path, capsys) if line.startswith("  ")]
    assert starts == [*[".venv/bin/octet"] * 3, "./run_deepspeed.sh"]
