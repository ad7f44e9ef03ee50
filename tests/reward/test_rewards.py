"""The built-in rewards, their weighted sum, and what is measured beside them."""

import threading
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import pytest

from tests.conftest import refuses
from tests.rewarding import PROBLEM, PROMPT, MadeUp, answer, scorer_of, scores_of
from tests.samplers import Scripted
from trainer.answers import compare, symbolic
from trainer.config.resolve import resolve
from trainer.config.sections.reward import REWARDS
from trainer.records import Completion, Prompt, Sampling, Segment
from trainer.reward.built_in import COMPONENTS, Rules, read
from trainer.reward.scorer import Meter, Scorer
from trainer.rollout.collect import collect
from trainer.watch.measure import REWARD, STRICT
from trainer.watch.tally import Tally

PHRASE = "one two three four "


def value(name: str, text: str, *overrides: str, tokens: int = 3, prompt: Prompt = PROMPT) -> float | None:
    scorer = scorer_of(f"reward.weights={{{name}: 1.0}}", *overrides)
    return scorer.score(prompt, [answer(text, tokens)]).scores[0].components[name]


@pytest.mark.parametrize("name, worth", [
    ("correct", {"#### 12": 1.0, "#### 13": 0.0, "The answer is 12.": 0.0}),  # right, but not in its place
    ("format", {"#### 13": 1.0, "The answer is 12.": 0.0}),
    ("length", {"x" * 49: 0.0, "x" * 50: 1.0, "x" * 500: 1.0, "x" * 501: 0.0}),
    ("repetition", {"": 0.0, "one two three": 0.0, "a b c d e f g": 0.0, PHRASE * 400: -(1597 - 4) / 1597}),
    ("repetition", {"a b c d a b c d": -0.2, "A b c d a B c d": -0.2}),  # of five phrases the last is the first
    ("think_tags", {"<think>3 * 4</think>#### 12": 1.0, "  <think>\n3 * 4\n</think>\n\n#### 12": 1.0}),
    ("think_tags", {"<think>3 * 4</think>": 0.0, "<think> </think>#### 12": 0.0}),  # no answer, and no thought
    ("think_tags", {"So <think>3 * 4</think>#### 12": 0.0, "<think>a</think>b<think>c</think>d": 0.0}),
    ("think_tags", {"<think><think>a</think>b": 0.0, "</think>a<think>b": 0.0, "3 * 4</think>#### 12": 0.0}),
])  # fmt: skip
def test_component(name, worth):
    assert {text: value(name, text) for text in worth} == pytest.approx(worth, abs=1e-12)


OPENED = replace(PROMPT, text="<|im_start|>assistant\n<think>\n")
CLOSED = replace(PROMPT, text="<|im_start|>assistant\n<think>\n\n</think>\n\n")
CONVERSATION = replace(PROMPT, problem=replace(PROBLEM, messages=({"role": "user", "content": "3 * 4?"},)))
R1_ZERO = "prompt.style=r1_zero"  # opens a thought itself, but in no conversation


@pytest.mark.parametrize("name, text, prompt, settings, worth", [
    ("think_tags", "3 * 4</think>#### 12", OPENED, [], 1.0),
    ("think_tags", "<think>3 * 4</think>#### 12", OPENED, [], 0.0),
    ("think_tags", "<think>3 * 4</think>#### 12", CONVERSATION, [R1_ZERO], 1.0),
    ("correct", "#### 12", OPENED, [], 0.0),
    ("correct", "3 * 4\n#### 12", OPENED, [], 0.0),
    ("correct", "3 * 4</think>\n#### 12", OPENED, [], 1.0),
    ("correct", "#### 12</think>", OPENED, [], 0.0),
    ("correct", "#### 12", CLOSED, [], 1.0),
    ("correct", "<answer>12</answer>", PROMPT, [R1_ZERO], 0.0),
    ("correct", "3 * 4</think> <answer>12</answer>", PROMPT, [R1_ZERO], 1.0),
    ("correct", "<answer>12</answer>", CONVERSATION, [R1_ZERO], 1.0),
])  # fmt: skip
def test_a_thought_that_the_prompt_has_opened_has_to_end(name, text, prompt, settings, worth):
    assert value(name, text, *settings, prompt=prompt) == worth


@pytest.mark.parametrize(("setting", "worth"), [("false", 0.0), ("true", 1.0)])
@pytest.mark.parametrize("gold", ["Bras\u00edlia", "Brasi\u0301lia"])  # both forms in which Unicode writes an accent
def test_accents_are_an_option(setting, worth, gold):
    prompt = replace(PROMPT, problem=replace(PROBLEM, gold=gold))
    assert value("correct", "#### Brasilia", f"reward.ignore_accents={setting}", prompt=prompt) == worth


def test_text_is_compared_as_text_and_letters_may_be_small_in_the_data():
    apollo = replace(PROMPT, problem=replace(PROBLEM, gold="Apollo 11"))
    assert [value("correct", text, prompt=apollo) for text in ("#### Apollo 11", "#### 11")] == [1.0, 0.0]
    small = replace(PROMPT, problem=replace(PROBLEM, gold="c"))
    assert value("correct", "Answer: C", "prompt.style=letter", prompt=small) == 1.0


@pytest.mark.parametrize("tokens, expected", [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)])
def test_overlong_falls_over_the_buffer(tokens, expected):
    assert value("overlong", "x", "rollout.max_new_tokens=100", tokens=tokens) == pytest.approx(expected)


def test_overlong_with_a_buffer_of_its_own():
    settings = ("rollout.max_new_tokens=100", "reward.overlong_buffer=50")
    assert value("overlong", "x", *settings, tokens=75) == pytest.approx(-0.5)
    with refuses("reward.overlong_buffer", names=20):
        value("overlong", "x", "rollout.max_new_tokens=100", "reward.overlong_buffer=101")


def test_overlong_measures_each_reply_to_an_agent():
    written = [tuple([True] * 40 + [False] * 5 + [True] * last) for last in (50, 90)]
    short, long = (Segment((5,), (6,) * len(own), (0.0,) * len(own), own) for own in written)
    scorer = scorer_of("reward.weights={overlong: 1.0}", "rollout.max_new_tokens=100")
    answers = [replace(answer("x", 190), segments=(short, last)) for last in (short, long)]
    assert [one.reward for one in scorer.score(PROMPT, answers).scores] == pytest.approx([0.0, -0.5])


def test_overlong_counts_what_an_environment_said_as_the_limit_does_and_knows_nothing_without_tokens():
    rules = Rules(resolve("nano").reward, "gsm8k", 100)
    told = Completion((1,) * 100, (0.0,) * 100, "x", True, written=(True,) * 50 + (False,) * 49 + (True,))
    assert COMPONENTS["overlong"](read(PROMPT, told, rules), rules) == -1.0
    assert value("overlong", "some text", tokens=0) is None
    assert value("overlong", "", tokens=0) == 0.0


def test_settings_of_correct_length_and_repetition():
    assert value("correct", "The answer is 12.", "reward.answer=lenient") == 1.0
    assert value("length", "xx", "reward.length_band=[1, 2]") == 1.0
    assert value("repetition", "a a", "reward.repetition_words=1") == pytest.approx(-0.5)
    assert value("repetition", "a a", "reward.repetition_words=999999999") == 0.0  # at once, and in little memory


def test_the_reward_is_the_weighted_sum_of_which_a_missing_part_leaves_nothing_unless_it_does_not_count():
    scorer = scorer_of("reward.weights={correct: 1.0, format: 0.1, length: 0.05}")
    right, wrong = scores_of(scorer, "x" * 60 + "\n#### 12", "#### 13")
    assert (right.reward, wrong.reward) == (pytest.approx(1.15), pytest.approx(0.1))
    assert wrong.components == {"correct": 0.0, "format": 1.0, "length": 0.0}
    assert (right.shaping, wrong.shaping) == (pytest.approx(0.15), pytest.approx(0.1))
    assert scores_of(scorer_of("reward.weights={format: 0.1}"), "#### 13")[0].shaping == 0.0  # it is the whole reward
    bare = [(PROMPT, answer("#### 12", tokens=0))]
    assert scorer_of("reward.weights={correct: 1, overlong: 1}").scores(bare)[0].reward is None
    assert scorer_of("reward.weights={correct: 1, overlong: 0}").scores(bare)[0].reward == 1.0


def test_every_name_in_the_settings_is_a_reward():
    assert set(REWARDS) == {*COMPONENTS, "judge", "code"}


needs_math = pytest.mark.skipif(symbolic.importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
MATHS = MadeUp(name="maths", prompt_style="boxed", answer_style="boxed", symbolic=True)


def algebra(scorer: Scorer, text: str, gold: str) -> float:
    prompt = Prompt(replace(PROBLEM, gold=gold), "", ())
    return scorer.score(prompt, [answer(text)]).scores[0].components["correct"]


@needs_math
def test_a_task_can_ask_for_a_second_opinion():
    assert not compare.equal("x+1", "1+x")
    assert algebra(scorer_of(task=MATHS), r"\boxed{x+1}", "1+x") == 1.0
    assert algebra(scorer_of("reward.symbolic=false", task=MATHS), r"\boxed{x+1}", "1+x") == 0.0
    assert scorer_of().symbolic is None


@needs_math
def test_a_hang_scores_nothing_is_counted_and_not_repeated():
    scorer = scorer_of("reward.symbolic_s=0.5", task=MATHS)
    for _ in range(2):
        assert algebra(scorer, r"\boxed{9^{9^{9^9}}}", "1") == 0.0
    assert scorer.drain()["symbolic/hangs"] == (1,)
    assert scorer.drain()["symbolic/hangs"] == (0,)


def test_symbolic_without_math_verify_says_what_to_install(monkeypatch):
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    with refuses("reward.symbolic", names="octet-grpo[math]"):
        scorer_of("reward.symbolic=true")


def test_seconds_of_each_reward_are_measured_and_then_forgotten():
    scorer = scorer_of("reward.weights={correct: 1, format: 1}")
    began = perf_counter()
    scores_of(scorer, "#### 12")
    took, measured = perf_counter() - began, scorer.drain()
    assert {"time/reward/answers", "time/reward/correct", "time/reward/format"} == set(measured)
    assert all(0 < seconds < took and weight == 1 for seconds, weight in measured.values())
    assert scorer.drain() == {}


def test_requests_of_several_ranks_are_added_up_and_seconds_are_not():
    ranks = []
    for requests in (3, 1):
        meter, tally = Meter(), Tally()
        for number in range(requests):
            meter.add("requests", 1)
            meter.add("missing", number == 0, 1)
            meter.add("time/reward/judge", 1)
        tally.merge(meter.drain())
        ranks.append(tally.packed())
    assert Tally().means(lambda _: ranks) == {"requests": 4, "missing": 0.5, "time/reward/judge": 2}


class Meeting:
    """A grader that answers only when two groups are with it at the same time."""

    name, parallel = "meeting", 2

    def __init__(self) -> None:
        self.together = threading.Barrier(2, timeout=240)

    def grade(self, readings, meter):
        self.together.wait()
        return [1.0] * len(readings)


@pytest.fixture
def right(tokenizer):
    """A sampler of right answers."""
    return Scripted(tokenizer, lambda prompt, number: "#### 12")


def test_several_groups_are_scored_at_once_where_a_grader_wants_it_and_a_verifier_asks_nobody(right):
    scorer = Scorer(scorer_of().rules, [Meeting()])
    groups = collect(right, scorer, [PROMPT] * 4, Sampling(2, 1.0, 8, 0))
    assert [score.components["meeting"] for group in groups for score in group.scores] == [1.0] * 8
    assert scores_of(scorer.verifier(), "#### 12")[0].components == {"correct": 1.0}


def test_evaluation_in_the_loop_asks_graders_only_where_the_reward_is_what_is_measured(monkeypatch):
    from trainer.evaluation import best

    monkeypatch.setattr(best, "evaluate", lambda name, sampler, scorer, *_, **__: scorer)
    scorer, policy = Scorer(scorer_of().rules, [Meeting()]), SimpleNamespace(gathered=nullcontext)
    for measure, graders in ((STRICT, ()), (REWARD, scorer.graders)):
        history = SimpleNamespace(measure=measure)
        assert best.Evaluator(policy, None, scorer, [], 8, history, None).evaluate("step 1").graders == graders


class Counting:
    """A grader whose measure is how many it has graded."""

    name, parallel = "counting", 1

    def grade(self, readings, meter):
        meter.add("counting/graded", len(readings))
        return [1.0] * len(readings)


def test_the_metrics_of_a_step_are_of_its_own_answers(right):
    """Also where those of the next one are graded before this one is written down, and not of an evaluation between."""
    from trainer.rollout.collect import Rollouts

    class Growing(Rollouts):
        def prompts_of(self, step):
            return [PROMPT] * (step + 1)

    steps, curriculum = 3, SimpleNamespace(observe=lambda rates: None)
    scorer = Scorer(scorer_of().rules, [Counting()])
    config = resolve(None, None, ["rollout.ahead=1", "rollout.vllm.urls=http://a", "rollout.group_size=2"])
    rollouts = Growing(config, curriculum, None, right, scorer, PROMPT)
    for step in range(steps):
        scorer.meter.add("counting/graded", 100)  # of an evaluation
        tally = Tally()
        rollouts.scored_groups(rollouts.prompts_of(step), step, tally, samples_ahead=step < steps - 1)
        if step < steps - 1:
            wait(rollouts.under_way.values())
        assert tally.sums["counting/graded"] == (2 * (step + 1),)
        assert tally.sums["time/reward/counting"][0] > 0
