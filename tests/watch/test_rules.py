"""The rules about a run's health: each is raised by its own metrics, and none by those of healthy runs."""

import json
import re
from dataclasses import replace

import pytest

from scripts import make_troubleshooting_page
from tests.conftest import ROOT
from tests.e2e import faulty_runs
from trainer.config.resolve import resolve
from trainer.config.settings import Config, fields
from trainer.watch.alarms import diagnose
from trainer.watch.history import History
from trainer.watch.rules import RULES

STEPS = 20
HEALTHY = {"accuracy/strict": 0.4, "accuracy/lenient": 0.45, "reward/mean": 0.4, "reward/correct": 0.4}
HEALTHY |= {"dead_groups": 0.3, "dead_groups/wrong": 0.2, "dead_groups/right": 0.1, "distinct": 0.9, "length": 200.0}
HEALTHY |= {"groups": 8.0, "truncated": 0.05, "entropy": 0.4, "clipped/low": 0.0, "clipped/high": 0.0, "grad_norm": 0.5}
HEALTHY |= {"sampler_difference": 0.01, "update_size": 0.005, "lr": 5e-5, "time/rollout": 10.0}


def run(*settings: str, steps: int = STEPS, problems: int = 7000, evaluated=(), **metrics) -> History:
    """A run with the metrics of a healthy one, but for those given: a number, or a function of the step."""
    records = []
    for step in range(1, steps + 1):
        record = {"step": step, **HEALTHY, **metrics}
        records.append({name: value(step) if callable(value) else value for name, value in record.items()})
    for record, value in zip(records[steps - len(evaluated) :], evaluated):
        record["eval/accuracy"] = value
    return History(resolve("8gb", None, list(settings)), records, problems, memory=8.0)


def rising(low: float, high: float):
    return lambda step: low + (high - low) * (step - 1) / (STEPS - 1)


CASES = {"cut off": run(truncated=0.6), "thinking fills the limit": run(truncated=0.6, unfinished_thinking=0.5)}
CASES |= {"answers alike": run(distinct=0.2, dead_groups=0.8), "repetition": run(repetitive=0.5)}
CASES |= {"tools fail": run(tool_errors=0.98)}
CASES |= {"answers grow": run(length=rising(100, 400)), "answers shrink": run(length=rising(400, 40))}
CASES |= {"all wrong": run(**{"dead_groups/wrong": 0.95}), "all right": run(**{"dead_groups/right": 0.98})}
CASES |= {"small groups": run("rollout.group_size=2", dead_groups=0.8, **{"accuracy/strict": 0.2})}
CASES |= {"few problems": run(problems=8), "empty answers": run(empty=0.5)}
CASES |= {"form never seen": run(**{"accuracy/strict": 0.01}), "form alone": run(**{"reward/format": rising(0.1, 0.9)})}
CASES |= {"paid by length": run(**{"reward_length/correlation": 0.9, "reward_length/share": 0.8})}
CASES |= {"shaping decides": run(**{"advantage/shaping": 0.3}), "constant reward": run(**{"reward/length": 1.0})}
CASES |= {"a part dominates": run("reward.weights.format=5", **{"reward/format": rising(0.8, 0.9)})}
CASES |= {"reward against accuracy": run(**{"reward/mean": rising(0.2, 0.6), "accuracy/lenient": rising(0.5, 0.2)})}
CASES |= {"accuracy falls": run(**{"accuracy/lenient": rising(0.6, 0.05)})}
CASES |= {"held-out accuracy falls": run(evaluated=(0.5, 0.6, 0.4), **{"reward/mean": rising(0.4, 0.6)})}
CASES |= {"plateau": run("run.steps=400", steps=100, **{"reward/std": 0.5}), "clipping": run(**{"clipped/high": 0.4})}
CASES |= {"entropy collapse": run(entropy=lambda step: 0.5 if step < 8 else 0.005)}
CASES |= {"entropy explosion": run(entropy=rising(0.5, 5.0)), "far from the reference": run(kl=0.9)}
CASES |= {"gradient at its limit": run(grad_norm=80.0), "no gradient": run(grad_norm=0.0)}
CASES |= {"learning rate too large": run(update_size=0.5), "learning rate too small": run(update_size=1e-5)}
CASES |= {"sampler and trainer apart": run(sampler_difference=0.3), "nothing trained": run(unchanged=True)}
CASES |= {"another policy samples": run(sampler_difference=lambda step: 1.5 if step == STEPS else 0.01)}
CASES |= {"dead by correct": run("reward.weights.correct=0", **{"dead_groups/unequal": 0.6})}
CASES |= {"gradients not finite": run(bad_updates=3, bad_updates_allowed=3)}
CASES |= {"memory leak": run(steps=60, **{"memory/held": lambda step: 3 + step / 100})}
CASES |= {"slower": run(steps=60, **{"time/rollout": lambda step: 10.0 if step < 30 else 60.0})}
SILENT = run()


def without(name: str, steps: int, *settings: str, begun: int = 0, **metrics) -> History:
    """A run that has not logged a metric after the steps that it had begun with."""
    history = run(*settings, steps=steps, **metrics)
    kept = [{key: one[key] for key in one if key != name or one["step"] <= begun} for one in history.records]
    return replace(history, records=kept)


CASES |= {"no reward": without("reward/mean", STEPS), "nothing to learn from": without("lr", 50)}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_raised_by_its_own_metrics_alone(rule):
    (finding,) = diagnose(CASES[rule])
    assert finding.name == rule


def test_every_rule_has_a_case():
    assert {*CASES} == {rule.name for rule in RULES}


# 2,000 steps to a GB; one longer prompt, and a larger cache; up and down
NO_LEAKS = (lambda step: 3 + step / 2000, lambda step: 3 + (step > 30), lambda step: 3 + (step % 7) / 10)
THREE_OF_40 = {"reward/mean": rising(0.4, 0.6), "eval/problems": 40}
AHEAD = ("rollout.ahead=1", "rollout.vllm.urls=[http://127.0.0.1:8000]")
TAUGHT = ("teacher.adapter=a", "algorithm.loss=reinforce_baseline", "rollout.group_size=2")
ALONE = ("algorithm.loss=reinforce", "reward.weights={correct: 1, format: null, length: null}")
JUDGED = ("task.name=records", "task.path=a.jsonl", "task.answer=none", "reward.custom=a.py:z")
OF_100 = {"reward/mean": rising(40, 42), "reward/std": 30.0}
ALL_Z = ("reward.custom=a.py:z", "reward.weights={z: 1, correct: 0, format: 0, length: 0}")
PAIRS = ("rollout.group_size=2",)
BAD = ("reward.custom=a.py:bad", "reward.weights.bad=-0.5")
GENERATED = "task.mix={reasoning_gym:chain_sum: 1, reasoning_gym:gcd: 1}"
OTHERS = {"reward/mean": rising(0.4, 0.6), "eval/problems": lambda step: 64 if step < STEPS else 1000}
PAID_MORE = {"eval/lenient": rising(0.5, 0.7), "reward/mean": rising(0.4, 0.6)}


@pytest.mark.parametrize("history", [
    SILENT,
    run(length=rising(200, 500), **{"accuracy/lenient": rising(0.2, 0.7)}),  # longer, and better
    run(entropy=rising(0.4, 0.06)),
    run(update_size=0.0001, lr=5e-6),  # in the warm-up
    run(update_size=lambda step: 0.5 if step == 3 else 0.005),  # one large update
    run(steps=9, length=lambda step: 100.0 if step < 6 else 400.0),  # too few steps to compare
    run(truncated=lambda step: 0.9 if step == 10 else 0.05),  # one bad step
    run(evaluated=(0.5, 0.56, 0.54), **{"reward/mean": rising(0.4, 0.6)}),  # within the noise
    run("eval.problems=1000", evaluated=(0.6, 0.675, 0.6), **THREE_OF_40),
    run(steps=60, length=lambda step: 200.0 if step < 30 else 50.0, **{"accuracy/lenient": rising(0.2, 0.7)}),
    run("task.curriculum=difficulty", **{"accuracy/lenient": rising(0.6, 0.05)}),
    run("task.curriculum=difficulty", length=rising(100, 400)),
    run("task.curriculum=solve_rate", "run.steps=400", steps=100, **{"reward/std": 0.5}),
    run("task.name=reasoning_gym:chain_sum", problems=8),  # each pass has new ones
    run(**{"reward/format": lambda step: 0.9 if step < 5 else 1.0}),  # learned
    run("eval.problems=64", evaluated=(1.0, 1.0, 62 / 64), **{"reward/mean": rising(0.4, 0.6)}),
    run(*AHEAD, steps=60, **{"time/rollout": lambda step: 10.0 if step < 30 else 60.0}),  # it waits while it trains
    run(steps=80, **{"reward/std": 0.5}),  # flat, and there were few steps before
    run("run.steps=120", steps=100, **{"reward/std": 0.5}),  # flat, and nearly done
    run(steps=100, evaluated=(0.5, *[0.0] * 97, 0.55), **{"reward/std": 0.5}),  # still better on held-out problems
    run(steps=100, **{"reward/std": 0.5, "reward/mean": lambda step: step / 100}),
    run(steps=3, truncated=1.0),  # too early to say
    run(bad_updates=2, bad_updates_allowed=3),
    without("lr", 49),
    run(*ALL_Z, **{"reward/z": 0.0, "reward/std": 0.9}),
    without(
        "reward/mean", 9, *PAIRS, begun=6, dead_groups=0.8, **{"accuracy/strict": 0.2}
    ),  # no grades for a while
    *(run(steps=60, **{"memory/held": held}) for held in NO_LEAKS),
    run("reward.answer=lenient", evaluated=(0.5, 0.6, 0.4), **PAID_MORE),
    run("reward.weights.overlong=0.5", **{"reward/overlong": 0.0}),  # no answer is too long
    run(*BAD, **{"reward/bad": lambda step: 0.5 if step < 5 else 0.0}),  # a penalty that is avoided now
    run(*TAUGHT, dead_groups=0.9, **{"dead_groups/wrong": 0.9, "accuracy/strict": 0.2}),  # a teacher grades tokens
    run(*TAUGHT, dead_groups=0.98, **{"dead_groups/right": 0.98}),
    run(*ALONE, dead_groups=0.98, **{"dead_groups/right": 0.98}),
    run("algorithm.loss=cispo", **{"clipped/high": 0.4}),  # its clipped tokens have a gradient
    run("rollout.weights=int8", sampler_difference=0.2),  # as docs/training.md expects
    run(*JUDGED, **{"reward/format": rising(0.1, 0.9), "reward/std": 0.5}),  # no answer is right or wrong
    run(GENERATED, problems=8),
    run(evaluated=(0.8, 0.8, 0.62), **OTHERS),  # resumed with other problems
    run("warmup.only=true", "warmup.problems=2", "warmup.steps=20", problems=8),
    History(SILENT.config, []),
    History(SILENT.config, [{"step": 0, "eval/accuracy": 0.5}]),
    History(SILENT.config, [{"step": 1, "time/rollout": 10.0}]),  # no answer was counted
])  # fmt: skip
def test_a_healthy_run_is_left_alone(history):
    assert diagnose(history) == []


WARMUP = run("warmup.only=true", "warmup.steps=20", steps=1)
LARGE = {**WARMUP.records[0], "update_size": 0.8, "lr": WARMUP.config.algorithm.lr}
OTHER_LIMITS = "rollout.max_new_tokens=256 or another limit, such as rollout.turns.most=3"
CORRECT = "reward.weights={correct: 1}"
NAMED = [  # a function counts without a weight
    (run("reward.custom=a.py:z", **{"reward/z": 0.0}), "constant reward", "reward.weights.z pays 0"),
    (run("reward.custom=a.py:z", CORRECT, **{"reward/z": rising(3, 5)}), "a part dominates", "reward.weights.z pays"),
    (run("rollout.turns.most=3", truncated=0.6, turns=3.0), "cut off", OTHER_LIMITS),
    (run(*JUDGED, length=rising(100, 400), **OF_100), "answers grow", "earn hardly more"),
    (History(WARMUP.config, [LARGE]), "learning rate too large", "warmup.lr"),
]


@pytest.mark.parametrize(("history", "rule", "said"), NAMED)
def test_a_finding_names_the_settings_of_this_run(history, rule, said):
    (finding,) = diagnose(history)
    text = f"{finding.seen} {finding.remedy}"
    assert (finding.name, said in text, "algorithm.lr" in text) == (rule, True, False)


def test_one_update_that_makes_the_adapter_another_one_is_enough():
    def measured(size: float) -> History:
        records = run(steps=1).records
        return History(SILENT.config, [{**records[0], "update_size": size, "lr": SILENT.config.algorithm.lr}])

    assert [finding.name for finding in diagnose(measured(0.8))] == ["learning rate too large"]
    assert diagnose(measured(0.2)) == []  # one update may be large by chance


def falling(by: float) -> History:
    return run("run.steps=400", steps=100, **{"reward/std": 0.5, "reward/mean": lambda step: 0.4 - by * step / 100})


SELDOM = run(**{"advantage/shaping": lambda step: 0.02 if step % 5 else 1.0})  # a step without right answers has 100 %
BETTER = run("run.steps=400", steps=100, **{"reward/std": 0.5, "eval/accuracy": lambda step: step / 100})  # held out
ALIKE = {"plateau": [falling(0.4), falling(0.1), BETTER], "shaping decides": [SELDOM]}


@pytest.mark.parametrize(("history", "rule"), [(one, rule) for rule, histories in ALIKE.items() for one in histories])
def test_what_looks_alike_is_no_reason(history, rule):
    assert rule not in {finding.name for finding in diagnose(history)}


def test_the_page_is_made_from_the_rules_and_the_runs():
    command = "python -m scripts.make_troubleshooting_page"
    page, runs = (ROOT / name for name in ("docs/troubleshooting.md", "bench/results/alarms.md"))
    assert page.read_text() == make_troubleshooting_page.page(), f"{command} > docs/troubleshooting.md"
    assert runs.read_text() == make_troubleshooting_page.runs(), f"{command} --runs > bench/results/alarms.md"


def test_in_the_runs_of_the_page_every_fault_is_named_and_no_healthy_run():
    found = json.loads(make_troubleshooting_page.RESULTS.read_text())
    assert {*found} == {*faulty_runs.FAULTS, *faulty_runs.HEALTHY}
    for name, (_, (own, *others), _) in faulty_runs.FAULTS.items():
        assert own in found[name]
        assert {*found[name]} <= {own, *others}
    assert not any(found[name] for name in faulty_runs.HEALTHY)


def test_every_remedy_names_settings_that_exist():
    """`section.key`, or a key below it."""
    known = {*fields()}
    for rule in RULES:
        for name in re.findall(r"\b[a-z]+\.[a-z_]+(?:\.[a-z_]+)*", f"{rule.why} {rule.remedy}"):
            if name.partition(".")[0] in Config.model_fields:
                below = (one for one in known if f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}."))
                assert any(below), name
