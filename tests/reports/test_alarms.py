"""Alarms of long runs: what the rules see does not depend on how the run is read, and reading it takes a pass."""

import random
from dataclasses import replace

import pytest

from trainer.config.command_line import resolve
from trainer.reports.alarms import Alarm, Run, alarms_of, holding, looked_at
from trainer.run_folder.reader import facts_of, read_run
from trainer.watch.diagnosis import EARLY, EVALUATED, LATE, History, diagnose

METRICS = [
    "truncated",
    "empty",
    "entropy",
    "length",
    "accuracy/lenient",
    "accuracy/strict",
    "reward/mean",
    "reward/std",
]
METRICS += ["grad_norm", "update_size", "lr", "time/rollout", "groups", "dead_groups", "kl", "sampler_difference"]


def drawn(steps: int, every: int, missing: float, seed: int) -> History:
    """A run whose metrics drift and are missing in some steps."""
    draw, records = random.Random(seed), [{"step": 0, EVALUATED: 0.3}]
    height = {name: draw.random() for name in METRICS}
    for step in range(1, steps + 1):
        height = {name: max(0.0, value + draw.gauss(0, 0.1)) for name, value in height.items()}
        record = {"step": step, **{name: value for name, value in height.items() if draw.random() > missing}}
        records.append(record | ({EVALUATED: draw.random()} if step % every == 0 else {}))
    return History(resolve("nano", None, [f"run.steps={steps}"]), records, problems=64)


def read_anew(history: History, step: int) -> History:
    """What the rules look at after a step, from all records: the first, the last, and every evaluation."""
    until = [record for record in history.records if record["step"] <= step]
    late = len(until) - LATE
    kept = [one for place, one in enumerate(until) if place < EARLY or place >= late or EVALUATED in one]
    return replace(history, records=kept)


CASES = [
    (3, 1, 0.0),
    (12, 2, 0.3),
    (19, 1, 0.0),
    (81, 1, 0.0),
    (90, 7, 0.6),
    (300, 1, 0.2),
    (400, 9, 0.9),
    (700, 50, 0.0),
]


@pytest.mark.parametrize("steps, every, missing", CASES)
def test_alarms_are_those_of_a_run_that_is_read_anew_after_each_step(steps, every, missing):
    history = drawn(steps, every, missing, seed=steps)
    ends, found = looked_at([record["step"] for record in history.records[1:]]), {}
    run = Run(history)
    for step in ends:
        now = diagnose(read_anew(history, step))
        assert diagnose(run.seen_after(step)) == now
        for finding in now:
            first = found[finding.name].first if finding.name in found else step
            found[finding.name] = Alarm(finding, first, step, step == ends[-1])
    assert sorted(alarms_of(history), key=str) == sorted(found.values(), key=str)
    assert [text.partition(": ")[2] for text in holding(history)] == [str(finding) for finding in diagnose(history)]


class Counted(dict):
    """A record that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, name):
        Counted.looks += 1
        return super().__getitem__(name)

    def __iter__(self):
        Counted.looks += 1
        return super().__iter__()

    def get(self, *name):
        Counted.looks += 1
        return super().get(*name)


@pytest.mark.parametrize("use", [lambda run: alarms_of(run.history), facts_of])
def test_the_work_grows_with_the_steps_and_not_with_their_square(use, tmp_path):
    """Of a run with an evaluation after each step, which the rules look at for ever."""
    looks = []
    for steps in (1000, 4000):
        (tmp_path / "config.yaml").write_text(resolve("nano", None, [f"run.steps={steps}"]).to_yaml())
        run, history = read_run(tmp_path), drawn(steps, 1, 0.0, seed=1)
        evaluated = {"eval/low": 0.0, "eval/high": 1.0}
        run.__dict__["metrics"] = [Counted(record | evaluated) for record in history.records]
        Counted.looks = 0
        use(run)
        looks.append(Counted.looks)
    assert looks[1] < 5 * looks[0]
