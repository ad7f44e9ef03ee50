"""When alarms are printed, and when they were seen: a run says the same as a page about it, in time linear in steps."""

import random

import pytest

from tests.conftest import refuses
from tests.watch.test_rules import rising, run
from trainer.config.resolve import resolve
from trainer.errors import EndedByAlarm, TrainingError
from trainer.run_folder.reader import facts_of, read_run
from trainer.watch.alarms import MOST_LOOKS, Alarms, alarms_of, interval, lasting
from trainer.watch.history import EARLY, LATE, History

METRICS = ["truncated", "empty", "entropy", "length", "accuracy/lenient", "accuracy/strict", "reward/mean"]
EVALUATED = ("eval/accuracy",)
METRICS += ["reward/std", "grad_norm", "update_size", "lr", "time/rollout", "groups", "dead_groups", "kl"]


def live(history: History, begun: int = 0, *settings: str) -> list[str]:
    """Return what a run prints while it goes on, or continues after some steps."""
    said: list[str] = []
    alarms = Alarms(History(resolve("8gb", None, list(settings)), history.records[:begun]), said.append)
    for record in history.records[begun:]:
        alarms.step(record["step"], {name: value for name, value in record.items() if name not in EVALUATED})
        alarms.evaluation({name: record[name] for name in EVALUATED if name in record})
    return said


def test_an_alarm_is_printed_once_while_it_lasts_and_again_when_it_returns():
    cut_off = {*range(1, 9), 13, 14, *range(33, 41)}  # a short break is none
    history = run(steps=40, truncated=lambda step: 0.9 * (step in cut_off))
    for begun, steps in ((0, ["step 5", "step 34"]), (35, ["step 36"])):
        assert [text.split(": ")[:2] for text in live(history, begun)] == [[step, "cut off"] for step in steps]
    (said,) = live(run(evaluated=(0.5, 0.6, 0.4, 0.4), **{"reward/mean": rising(0.4, 0.6)}))
    assert said.startswith("step 20: held-out accuracy falls")
    assert live(run(), 0, "run.strict_health=true") == []


ENDING = [({"sampler_difference": number}, "another policy samples") for number in (1.5, float("nan"))]
ENDING += [({"bad_updates": 3, "bad_updates_allowed": 3}, "gradients not finite")]


@pytest.mark.parametrize(("metrics", "rule"), [*ENDING, ({"unchanged": True}, "nothing trained")])
def test_a_run_that_cannot_go_on_is_ended_on_every_rank(metrics, rule):
    with refuses("step 1", TrainingError, names=rule) as raised:
        live(run(**metrics))
    assert raised.value.is_of_all
    assert not isinstance(raised.value, EndedByAlarm)


def test_the_rules_see_the_first_and_the_last_steps_and_evaluations():
    records = [{"step": step} | ({"eval/accuracy": step % 100} if step % 50 == 0 else {}) for step in range(501)]
    kept = History(resolve("8gb"), []).kept
    assert kept(records[:31]) == records[:31]
    assert [one["step"] for one in kept(records)] == [*range(EARLY), 150, 250, 350, 400, *range(501 - LATE, 501)]
    window = []
    for record in records:
        window = kept([*window, record])
    assert window == kept(records)  # however a run is read


@pytest.mark.parametrize(("steps", "since"), [(30, "since step 12: "), (100, "since step 50 or earlier: ")])
def test_an_alarm_that_lasts_says_since_when(steps, since):
    (alarm,) = lasting(run(steps=steps, empty=lambda step: 0.9 if step >= 11 else 0.0))
    assert alarm.startswith(f"{since}empty answers: ")


def test_alarms_that_last_come_first():
    found = alarms_of(run(steps=30, truncated=lambda step: 0.9 * (step < 9), empty=lambda step: 0.9 * (step > 11)))
    assert [(alarm.finding.name, alarm.when) for alarm in found] == [
        ("empty answers", "since step 13"),
        ("cut off", "steps 5 to 11"),
    ]


def test_every_alarm_has_its_first_and_last_step():
    (alarm,) = alarms_of(run(steps=40, empty=lambda step: 0.9 if 11 <= step <= 20 else 0.0))
    assert (alarm.finding.name, alarm.when) == ("empty answers", "steps 12 to 23")
    assert [interval(steps) for steps in (0, 1, MOST_LOOKS, 2000)] == [1, 1, 1, 4]


class Counted(dict):
    """A record that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, name):
        Counted.looks += 1
        return super().__getitem__(name)

    def get(self, *name):
        Counted.looks += 1
        return super().get(*name)


@pytest.mark.parametrize("use", [lambda run: alarms_of(run.history), facts_of])
def test_the_work_grows_with_the_steps_and_not_with_their_square(use, tmp_path):
    """The run has an evaluation after each step."""
    draw, looks, names = random.Random(1), [], [*METRICS, "eval/accuracy", "eval/low", "eval/high"]
    for steps in (150, 600):
        (tmp_path / "config.yaml").write_text(resolve("nano", None, [f"run.steps={steps}"]).to_yaml())
        run = read_run(tmp_path)
        values = ({name: draw.random() for name in names} | {"step": step} for step in range(steps + 1))
        run.__dict__["metrics"] = [*map(Counted, values)]
        Counted.looks = 0
        use(run)
        looks.append(Counted.looks)
    assert looks[1] < 5 * looks[0]
