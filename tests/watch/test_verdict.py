"""What is said of a run at its end, from its evaluation or else from its rewards."""

import random

import pytest

from trainer.config.resolve import resolve
from trainer.errors import NotLearned
from trainer.watch.verdict import CANNOT_TELL, LEARNED, NOT_LEARNED, Verdict, verdict_of

STRICT = resolve("nano", None, ["reward.answer=strict"])


def evaluation(gained: int, lost: int, p: float, problems: int = 200) -> dict:
    flips = {"gained": gained, "lost": lost, "p": p}
    before = {"problems": problems, "accuracy": 0.5, "lenient_accuracy": 0.6}
    after = {"problems": problems, "accuracy": 0.5 + (gained - lost) / problems, "lenient_accuracy": 0.6}
    return {"evaluations": [before, after, after], "comparisons": [{**flips, "lenient": flips}]}


def steps(rise: float, count: int = 60, right: float = 0.0) -> list[dict]:
    draw, found = random.Random(1), []
    for step in range(1, count + 1):
        found.append({"step": step, "reward/mean": 0.3 + rise * step / count + draw.gauss(0, 0.02)})
        found[-1] |= {"reward/std": 0.4, "accuracy/strict": 0.5 + right * step / count + draw.gauss(0, 0.02)}
    return found


VERDICTS = [(evaluation(30, 10, 0.002), LEARNED, "50.0% -> 60.0% of 200 "), (steps(0.3), LEARNED, "+0.1")]
VERDICTS += [(evaluation(11, 8, 0.65), CANNOT_TELL, "p = 0.65"), ([], CANNOT_TELL, "30")]
VERDICTS += [(evaluation(10, 30, 0.002), NOT_LEARNED, "-10.0 points"), (steps(-0.3), NOT_LEARNED, "-0.2")]
VERDICTS += [(evaluation(3, 3, 1.0, problems=1000), NOT_LEARNED, "-0.6 to +0.6")]
VERDICTS += [(steps(0.0), NOT_LEARNED, "20 steps"), (steps(0.3, right=-0.3), NOT_LEARNED, "-2")]
VERDICTS += [(steps(0.3, count=20), CANNOT_TELL, "30")]
VERDICTS += [([one | {"reward/std": 0.02} for one in steps(0.0)], CANNOT_TELL, "20 steps")]  # rewards too noisy to tell
WRONG = {"problems": 30, "accuracy": 0.0, "lenient_accuracy": 0.0}
IN_NO_FORMAT = WRONG | {"lenient_accuracy": 0.5}
WRONG = evaluation(0, 0, 1.0, problems=30) | {"evaluations": [WRONG] * 3}
VERDICTS += [
    (WRONG, CANNOT_TELL, "No answer is right"),
    (WRONG | {"evaluations": [IN_NO_FORMAT] * 3}, CANNOT_TELL, "narrow the interval"),
    (evaluation(0, 0, 1.0, 30), CANNOT_TELL, "narrow the interval"),
]


@pytest.mark.parametrize(("given", "kind", "number"), VERDICTS)
def test_the_verdict_of_an_evaluation_or_of_the_rewards(given, kind, number):
    verdict = verdict_of(*(({}, given) if isinstance(given, list) else (given, [])), STRICT)
    assert (verdict.kind, number in verdict.evidence) == (kind, True)


def test_a_warm_up_without_gold_answers_is_not_judged_by_a_reward_that_nothing_earns():
    config = resolve("nano", None, ["task.name=records", "task.path=a.csv", "task.answer=none"])
    base = {"problems": 32, "reward": 0.0, "deviation": 0.0, "loss": 0.158}
    pair = {"gained": 0, "lost": 0, "p": 1.0, "difference": 0.0, "interval": [0.0, 0.0]}
    given = {"evaluations": [base, base | {"loss": 0.089}], "comparisons": [pair]}
    verdict = verdict_of(given, [], config)
    assert (verdict.kind, "from 0.158 to 0.089" in verdict.evidence) == (CANNOT_TELL, True)


@pytest.mark.parametrize("curriculum", ["difficulty", "solve_rate"])
@pytest.mark.parametrize("gain", [0.3, -0.3])
def test_rewards_of_other_problems_say_nothing(curriculum, gain):
    config = resolve("nano", None, [f"task.curriculum={curriculum}"])
    verdict = verdict_of({}, steps(gain, right=gain), config)
    assert verdict.kind == CANNOT_TELL
    assert f"task.curriculum={curriculum}" in verdict.evidence
    assert verdict_of(evaluation(30, 10, 0.002), [], config).kind == LEARNED


@pytest.mark.parametrize(("kind", "status"), [(NOT_LEARNED, 3), (CANNOT_TELL, 4)])
def test_every_verdict_has_its_exit_status(kind, status):
    with pytest.raises(NotLearned) as raised:
        Verdict(kind, "because").must_be_learned()
    assert raised.value.status == status
    Verdict(LEARNED, "because").must_be_learned()
