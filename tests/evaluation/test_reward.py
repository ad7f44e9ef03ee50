"""Runs whose answers nobody can call right or wrong, with TRL's kind of reward: the reward is what is measured."""

import json
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from tests.conftest import lines_of, refuses, said_by, write_lines
from tests.e2e.short_job import train
from tests.evaluation.test_evaluate import Echo, outcome, prompts
from trainer.config.resolve import resolve
from trainer.config.settings import Reward
from trainer.errors import RewardError
from trainer.evaluation import results
from trainer.evaluation.best import EvaluationHistory, describe, metrics_of
from trainer.evaluation.evaluate import Evaluation, evaluate
from trainer.records import Draws
from trainer.reports.report import ranked
from trainer.reward.built_in import Rules
from trainer.reward.scorer import Scorer
from trainer.run_folder.reader import read_run
from trainer.stats import Share, mean_of, wilson
from trainer.watch.alarms import diagnose
from trainer.watch.history import History
from trainer.watch.measure import LENIENT, REWARD, STRICT, chosen, number
from trainer.watch.verdict import CANNOT_TELL, LEARNED, NOT_LEARNED, verdict_of

MINE = """
def brief(completions, **kwargs):
    return [1.0 if len(completion[0]["content"]) < 12 else 0.0 for completion in completions]

class Mine:
    def train(self):
        asked = [f"Ann has {one} apples and buys {one + 2} more. How many has she?" for one in range(2, 242)]
        return [{"prompt": [{"role": "user", "content": text}]} for text in asked]

def build(settings):
    return Mine()
"""
OWN = ["task.name=mine.py:build", "task.answer=none", "reward.custom=mine.py:brief", "reward.weights.correct=0"]
FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "run.steps=9", "eval.every=3"]
FEW += ["eval.problems=24", "eval.patience=2", "run.dir=demo"]
ACCURACY = re.compile(r"accurac|correct|wrong|right|gold\b| points\b|McNemar", re.IGNORECASE)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The run of docs/bring.md with the embedded model, and what it prints."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MINE)
    return folder / "demo", train(folder, "--preset", "nano", *OWN, *FEW)


def test_a_run_measures_the_reward_of_held_out_answers(job):
    folder, said = job
    document = json.loads((folder / "eval.json").read_text())
    base, trained, merged = document["evaluations"]
    answers = lines_of(folder / "eval_answers.jsonl")
    paid = {name: [one["reward"] for one in answers if one["model"] == name] for name in ("base", "trained", "merged")}
    for one in (base, trained, merged):
        assert one["reward"] == pytest.approx(sum(paid[one["name"]]) / 24)
    assert paid["base"] == [float(len(one["completion"]) < 12) for one in answers if one["model"] == "base"]
    assert 0 < base["reward"] < trained["reward"] == merged["reward"]
    pair = document["comparisons"][0]
    assert pair["difference"] == pytest.approx(trained["reward"] - base["reward"])
    assert pair["interval"][0] < pair["difference"] < pair["interval"][1]
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["verdict"] == LEARNED
    before, after = number(base["reward"]), number(trained["reward"])
    assert verdict["evidence"].startswith(f"held-out reward {before} -> {after} on 24 problems, +")
    assert f"\nverdict: {LEARNED}: {verdict['evidence']}\n" in said
    assert f"base model: mean reward {before} [" in said


def test_the_best_step_and_the_early_stop_follow_the_reward(job):
    folder, said = job
    seen = [(one["step"], one["eval/reward"]) for one in lines_of(folder / "metrics.jsonl") if "eval/reward" in one]
    best = max(seen[1:], key=lambda one: one[1])  # the first of equals; the base is no candidate
    kept = json.loads((folder / "best/best.json").read_text())
    assert (kept["step"], kept["reward"]) == best
    last = dict(seen)
    assert max(last) == min(9, best[0] + 6)  # two evaluations without a new best
    assert ("(eval.patience=2)" in said) == (max(last) < 9)


def test_nothing_speaks_of_right_answers(job, capsys, monkeypatch):
    folder, said = job
    monkeypatch.chdir(folder.parent)
    names = {name for line in lines_of(folder / "metrics.jsonl") for name in line}
    found = {name for name in names if ACCURACY.search(name)}
    assert found == {"reward/correct", "time/reward/correct", "sampler_ratio/corrected"}  # the first has weight 0
    said_by(capsys, "report", "demo")
    page = re.sub(r"<(style|pre|code|svg).*?</\1>", "", (folder / "report.html").read_text(), flags=re.DOTALL)
    page = page.partition(">Settings<")[0]
    lowest = re.findall(r"<td>(0|1)</td>", page[page.index("Lowest rewards") : page.index("<h2>Curves")])
    assert lowest == sorted(lowest) != []
    pages = {"said": said.partition("next\n")[0], "report": page, "eval.md": (folder / "eval.md").read_text()}
    for command in (("watch", "--once", "demo"), ("compare", "demo", "demo"), ("push", "demo", "--to", "me/demo")):
        status, pages[command[0]], err = said_by(capsys, *command)
        assert (status, err) == (0, ""), err
    pages["push"] = pages["push"].partition("## Evaluation")[2].partition("## Training")[0]
    pages["push"] = pages["push"].replace("no answer is known to be right", "")
    shown = {name: [line for line in text.splitlines() if ACCURACY.search(line)] for name, text in pages.items()}
    assert [line for lines in shown.values() for line in lines] == []
    for name in ("report", "eval.md", "compare", "push"):
        assert "1.00 [" in pages[name] or number(read_run(folder).evaluation["evaluations"][1]["reward"]) in pages[name]
    assert "held-out, 95 %" in (folder / "report.html").read_text()


def test_the_same_evaluation_afterwards(job, capsys, monkeypatch):
    folder, _ = job
    monkeypatch.chdir(folder.parent)
    status, out, _ = said_by(capsys, "eval", "demo", "eval.samples=2", "--trials", "2", "--json")
    assert status == 0
    once, again = (json.loads((folder / name / "eval.json").read_text()) for name in ("", "eval"))
    assert [one["reward"] for one in again["evaluations"]] == [one["reward"] for one in once["evaluations"][:2]]
    assert len(json.loads(out)["evaluations"][0]["sampled"]["trial_rewards"]) == 2
    assert [name for name in json.loads(out)["evaluations"][0]["sampled"] if "@" in name] == ["avg@2"]


def paid(name: str, *rewards: float | None) -> Evaluation:
    one = outcome(None, gold="")
    answers = tuple(replace(one, score=replace(one.score, reward=reward)) for reward in rewards)
    return Evaluation(name, answers, measure=REWARD)


@cache
def config():
    return resolve("nano", None, OWN)


@pytest.mark.parametrize(("before", "after", "kind"), [
    ([0.1, 0.2, 0.3, 0.2] * 8, [0.5, 0.4, 0.8, 0.5] * 8, LEARNED),
    ([0.5, 0.4, 0.8, 0.5] * 8, [0.1, 0.2, 0.3, 0.2] * 8, NOT_LEARNED),
    ([0.1, 0.9, 0.3, 0.2] * 8, [0.1, 0.9, 0.3, 0.2] * 8, NOT_LEARNED),
    ([0.0] * 16, [0.0] * 16, NOT_LEARNED),
    ([0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0], CANNOT_TELL),
    ([0.0, 0.0], [1.0, 1.0], CANNOT_TELL),  # two problems that rise by the same say little about others
    ([0.5], [0.7], CANNOT_TELL),
    ([-50.0, -40.0, None, -60.0] * 4, [-5.0, -4.0, 0.0, None] * 4, LEARNED),
    ([0.5, None], [None, 0.5], CANNOT_TELL),
])  # fmt: skip
def test_the_verdict_about_rewards(before, after, kind):
    both = [paid("base", *before), paid("trained", *after)]
    verdict = verdict_of(results.document({}, both), [], config())
    ungraded = verdict.evidence == "no held-out problem has a grade in both evaluations."
    assert (verdict.kind, ungraded) == (kind, None in before[1:2])


def test_the_means_before_and_after_are_of_problems_with_both_rewards():
    both = [paid("base", 0.5, 0.25, None, 0.75), paid("trained", 0.75, 0.5, 1.0, None)]
    assert describe(both[0]).endswith(" on 3 graded of 4 held-out problems")
    said = "held-out reward 0.375 -> 0.625 on 2 problems, +0.250 ("
    assert said in results.all_pairs(both)[0].sentence
    assert verdict_of(results.document({}, both), [], config()).evidence.startswith(said)


def test_a_comparison_of_rewards_counts_what_is_higher_and_lower_and_names_the_largest_first():
    both = [paid("base", 0.5, 0.5, 0.5, 0.5, None), paid("trained", 0.75, 0.25, 1.5, 0.5, 1.0)]
    (pair,) = results.document({}, both)["comparisons"]
    assert (pair["gained"], pair["lost"], pair["difference"]) == (2, 1, pytest.approx(1 / 4))
    (found,) = results.all_pairs(both)
    assert [flip["after_reward"] for flip in found.flips] == [1.5, 0.75, 0.25]
    assert results.rows(both)[0] == ["reward", "0.500 [0.500, 0.500]", "0.800 [0.203, 1.40]"]


@pytest.mark.parametrize(("answer", "weights", "measure"), [
    ("none", {"brief": 1, "correct": 1}, REWARD),
    ("none", {"code": 1}, STRICT),
    (None, {"brief": 1, "correct": 0}, REWARD),
    (None, {"judge": 1}, REWARD),
    (None, {"brief": 1, "correct": 0.1}, STRICT),
])  # fmt: skip
def test_what_is_paid_is_measured(answer, weights, measure):
    assert chosen(answer, weights, "strict") is measure
    assert chosen(answer, weights, "lenient") is (LENIENT if measure is STRICT else REWARD)


GOLD = ["task.name=records", "task.path=a.jsonl", "reward.custom=mine.py:brief"]


def test_the_accuracy_stands_beside_the_reward_where_answers_are_known():
    def of(name: str, right: str, reward: float) -> Evaluation:
        one = outcome(right)
        return Evaluation(name, (replace(one, score=replace(one.score, reward=reward)),) * 16, measure=REWARD)

    both = [of("base", "18", 0.25), of("trained", "7", 0.75)]
    document = results.document({}, both)
    assert [row[:2] for row in results.rows(both)[:2]] == [
        ["reward", "0.250 [0.250, 0.250]"],
        ["correct", "100.0% (80.6-100.0)"],
    ]
    assert describe(both[1]) == "mean reward 0.750 [0.750, 0.750] on 16 held-out problems, 0.0% (0.0-19.4) correct"
    logged = metrics_of(both[0])
    assert (logged["eval/reward"], logged["eval/accuracy"], logged["eval/low"]) == (0.25, 1.0, 0.25)
    assert {"reward", "correct_strict"} <= both[0].records()[0].keys()
    settings = resolve("nano", None, GOLD)
    assert verdict_of(document, [], settings).kind == LEARNED
    falling = [{"step": step, "reward/mean": step / 60, "accuracy/strict": 1 - step / 60} for step in range(60)]
    assert verdict_of({}, falling, settings).kind == LEARNED
    assert not ACCURACY.search(verdict_of({}, [{**one, "reward/mean": -one["step"]} for one in falling], settings).text)


def test_a_run_of_an_earlier_version_keeps_the_accuracy_by_which_it_was_judged():
    settings = resolve("nano", None, GOLD)
    both = [Evaluation("base", (outcome("7"),) * 16), Evaluation("trained", (outcome("18"),) * 16)]
    assert verdict_of(results.document({}, both), [], settings).evidence.startswith("0.0% -> 100.0% of 16")
    records = [{"step": 0, **metrics_of(both[0])}]
    assert History(settings, records).measure is STRICT
    assert History(settings, [*records, {"step": 1, "reward/mean": 0.5}]).measure is STRICT
    assert History(settings, []).measure is REWARD


def test_the_best_is_that_of_the_reward_after_a_restart_too(tmp_path):
    settings = config().eval.model_copy(update={"every": 1})
    rewards = enumerate([9.0, -0.5, -0.25, -0.4])
    lines = ({"step": step, "eval/reward": reward, "eval/problems": 2} for step, reward in rewards)
    write_lines(tmp_path / "metrics.jsonl", lines)
    run = EvaluationHistory(tmp_path, settings, 2, 3, 9, measure=REWARD)
    assert (run.best.step, run.best.value, run.metric) == (2, -0.25, "reward")
    assert [run.add(4, paid("", -0.5, -0.1)), run.add(5, paid("", -0.1, -0.1))] == [False, True]


def test_the_alarms_look_at_the_reward():
    def seen(rewards: list[float], **metrics: float) -> set[str]:
        steps = [{"step": step, "reward/mean": 0.3 + step / 100, "reward/std": 0.3, **metrics} for step in range(1, 21)]
        for record, value in zip(steps[-len(rewards) :], rewards, strict=True):
            record |= {"eval/reward": value, "eval/low": value - 0.05, "eval/high": value + 0.05}
        return {finding.name for finding in diagnose(History(config(), steps))}

    assert seen([0.5, 0.6, 0.58]) == set()
    assert seen([0.5, 0.6, 0.5]) == {"held-out accuracy falls"}


def test_runs_of_different_rewards_have_no_order(tmp_path):
    runs = []
    for name, weight in (("one", 1.0), ("other", 2.0), ("control", 1.0)):
        (tmp_path / name).mkdir()
        text = resolve("nano", None, [*OWN, f"reward.weights.brief={weight}"]).to_yaml()
        text = text.replace("control: none", "control: random") if name == "control" else text
        (tmp_path / name / "config.yaml").write_text(text)
        runs.append(read_run(tmp_path / name))
    assert [[run.name for run, _ in these] for these in ranked(runs)] == [["one", "control"], ["other"]]


@pytest.mark.parametrize("graded", [0, 3])
def test_an_evaluation_without_a_single_reward_is_an_error(graded):
    """Also if the grader falls silent between the greedy answers and the sampled ones."""
    given = iter([0.5] * graded)
    judge = SimpleNamespace(name="judge", parallel=1, grade=lambda read, meter: [next(given, None) for _ in read])
    scorer = Scorer(Rules(Reward(weights={"judge": 1.0}), "gsm8k", 9), [judge])
    with refuses("evaluation of base", RewardError):
        evaluate("base", Echo(), scorer, prompts(3), 9, Draws(2, 1.0, 1, 0), measure=REWARD)


def test_an_evaluation_says_how_many_grades_are_missing(capsys):
    def grade(readings, meter):
        grades = [0.5 if one.problem.id == "id0" else None for one in readings]
        meter.add("judge/missing", grades.count(None), len(grades))
        return grades

    judge = SimpleNamespace(name="judge", parallel=1, grade=grade, last_failure="HTTP 503 busy.")
    scorer = Scorer(Rules(Reward(weights={"judge": 1.0}), "gsm8k", 9), [judge])
    for _ in range(2):  # each time, although their share has not doubled
        evaluate("base", Echo(), scorer, prompts(3), 9, measure=REWARD)
        assert "octet: the judge gave no grade for 2 of 3 completions: HTTP 503 busy." in capsys.readouterr().err


def test_the_interval_of_rewards_that_are_0_or_1_is_that_of_a_share():
    assert REWARD.mean([1.0] * 24) == Share(1.0, *wilson(24, 24))
    assert REWARD.mean([0.0, 0.0, 1.0, 0.0]).low > 0
    assert REWARD.mean([0.0, 0.5, 1.0]) == mean_of([0.0, 0.5, 1.0])[0]
