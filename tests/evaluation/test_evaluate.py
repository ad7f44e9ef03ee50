"""Counting answers: categories, votes, several answers to a problem, two models side by side."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import refuses
from trainer.config.resolve import resolve
from trainer.config.settings import Reward
from trainer.errors import MergeError
from trainer.evaluation import best, results
from trainer.evaluation.evaluate import Evaluation, Outcome, Sampled, evaluate, keep_base, kept_base, majority
from trainer.evaluation.merge_check import agreement
from trainer.evaluation.results import Comparison
from trainer.plan.read_data import read_held_out
from trainer.problem.prompts import Prompter
from trainer.records import Completion, Draws, Problem, Prompt, Sampling, Score, Segment, Turn
from trainer.reward.built_in import Rules
from trainer.reward.scorer import Scorer
from trainer.run.assemble import evaluate_model
from trainer.run.closing import of_samples
from trainer.run.evaluate_models import must_be_rounding
from trainer.stats import pass_at, wilson
from trainer.watch.footer import Progress
from trainer.watch.measure import LENIENT, REWARD, STRICT


def outcome(strict: str | None, gold: str = "18", **completion) -> Outcome:
    given = {"tokens": (1, 2), "logprobs": (-0.5, -0.5), "text": f"#### {strict}", "truncated": False, **completion}
    right = strict == gold
    return Outcome("p", "q", gold, Completion(**given), Score(float(right), {}, strict, strict, right, right))


def evaluation(name: str, answers: str) -> Evaluation:
    """`y` is a right answer, `n` a wrong one, `-` none."""
    given = {"y": "18", "n": "7", "-": None}
    return Evaluation(name, tuple(outcome(given[answer]) for answer in answers))


def test_every_accuracy_has_an_interval():
    summary = evaluation("model", "yyn-").summary()
    assert (summary["accuracy"], summary["lenient_accuracy"]) == (0.5, 0.5)
    assert summary["interval"] == summary["lenient_interval"] == pytest.approx(list(wilson(2, 4)))
    assert summary["categories"] == {"correct": 2, "wrong answer": 1, "no answer": 1}
    assert summary["category_shares"] == {"correct": 0.5, "wrong answer": 0.25, "no answer": 0.25}
    long = outcome("18", tokens=(1,) * 10, logprobs=(-1.0,) * 10, truncated=True)
    summary = Evaluation("model", (long, outcome("18"))).summary()
    assert (summary["truncated"], summary["mean_tokens"]) == (0.5, 6.0)


def test_problems_that_were_left_out_are_named_wherever_the_accuracy_stands():
    some = replace(evaluation("model", "yyn-"), left_out=3)
    assert "(3 more" in some.asked
    for text in (best.describe(some), results.title([some]), results.markdown({}, [some])):
        assert some.asked in text
    assert (some.summary()["left_out"], best.metrics_of(some)["eval/left_out"]) == (3, 3)


@pytest.mark.parametrize(("measure", "row"), [(STRICT, "correct"), (LENIENT, "in any format")])
def test_the_parts_of_a_mixture_stand_below_the_accuracy_that_is_paid(measure, row):
    loose = replace(outcome(None), part="b", score=Score(0.0, {}, None, "18", False, True))
    seen = Evaluation("model", (replace(outcome("18"), part="a"), loose), measure=measure)
    below = [name for name, _ in results.rows([seen])]
    assert below[below.index(row) + 1 :][:2] == ["  a", "  b"]
    assert best.metrics_of(seen)["eval/part/b"] == (measure == LENIENT)
    assert (seen.summary()["accuracy"], seen.summary()["lenient_accuracy"]) == (0.5, 1.0)
    ungraded = replace(outcome("18"), part="c", score=replace(outcome("18").score, reward=None))
    assert [*replace(seen, outcomes=(*seen.outcomes, ungraded), measure=REWARD).parts] == ["a", "b"]
    before = Evaluation("before", (replace(outcome("18"), part="a"), replace(outcome(None), part="b")))
    compared = Comparison(before, seen).summary()
    assert (compared["gained"], compared["lenient"]["gained"]) == (0, 1)


def test_long_problems_are_evaluated_unless_the_context_is_too_short(tiny_model, tokenizer):
    settings = [f"model.name={tiny_model}", "prompt.max_tokens=33", "eval.problems=16", "rollout.max_new_tokens=4"]
    config, model = resolve("nano", None, settings), AutoModelForCausalLM.from_pretrained(tiny_model)
    data = read_held_out(config)
    prompter = Prompter(tokenizer, config.prompt, data.task)
    lengths = [len(prompter.prompt(one).tokens) for one in data.held_out]
    assert min(lengths) < 33 < max(lengths)
    every = evaluate_model("all", model, tokenizer, config, data)
    assert (len(every.outcomes), every.left_out) == (16, 0)
    model.config.max_position_embeddings = sorted(lengths)[8] + 4
    some = evaluate_model("some", model, tokenizer, config, data)
    fitting = sum(length <= sorted(lengths)[8] for length in lengths)
    assert (len(some.outcomes), some.left_out) == (fitting, 16 - fitting)
    model.config.max_position_embeddings = 30
    with refuses("rollout.max_new_tokens", names="16"):
        evaluate_model("none", model, tokenizer, config, data)


VOTES = [(["7", "18", "18"], "18"), (["7", "18"], "7"), (["18", "7", "7", "18"], "18")]  # a tie goes to the first seen
VOTES += [(["7", "$18.00", "18 dollars"], "$18.00"), (["1/2", "3", "3", "0.5", "\\frac{1}{2}"], "1/2")]  # in two forms
VOTES += [([None, None, "18"], "18"), ([None, None], None)]  # no answer is no vote


@pytest.mark.parametrize(("answers", "winner"), VOTES)
def test_the_majority_is_of_equal_answers(answers, winner):
    voted = majority([outcome(answer) for answer in answers])
    assert (voted and voted.score.strict) == winner


def sampled(*trials: list[str], samples: int) -> Sampled:
    groups = [tuple(evaluation("", answers).outcomes for answers in trial) for trial in trials]
    return Sampled(Draws(samples, 0.7, len(trials), seed=0), tuple(groups))


def test_the_mean_of_trials_is_of_the_measure_that_avg_is_of():
    """Also where the reward reads answers leniently, and one is right in the wrong place."""
    right = outcome("18")
    elsewhere = replace(right, score=replace(right.score, correct_strict=False, strict=None))
    trials = Sampled(Draws(2, 0.7, 1, seed=0), (((right, elsewhere),),))
    summary = Evaluation("model", (right,), sampled=trials, measure=LENIENT).summary()["sampled"]
    assert (summary["mean"], summary["trial_accuracies"]) == (0.5, [0.5])


def test_avg_maj_and_pass_of_one_trial():
    shares = sampled(["yyyn", "nnny", "----"], samples=4).shares()
    assert list(shares) == ["avg@4", "avg@4 lenient", "maj@4", "pass@2", "pass@4"]
    assert shares["avg@4"].value == pytest.approx(4 / 12)
    assert shares["maj@4"].value == pytest.approx(1 / 3)
    assert shares["pass@2"].value == pytest.approx((pass_at(2, 4, 3) + pass_at(2, 4, 1)) / 3)
    assert shares["pass@4"].value == pytest.approx(2 / 3)
    assert all(low < value < high for value, low, high in shares.values())


def test_an_evaluation_of_the_base_is_kept_for_these_problems_and_draws(tmp_path):
    lone = chr(0xD800)  # half a character, which a model may write
    told = Evaluation("base", (outcome("18", logprobs=(), text=lone),), sampled(["yn"], ["ny"], samples=2), 3)
    keep_base(tmp_path, told, 12.5)
    asked, draws = [Prompt(Problem("p", "q", "18"), "", ())], Draws(2, 0.7, 2, seed=0)
    found, seconds = kept_base(tmp_path, asked, draws)
    assert (found.outcomes, found.left_out, found.measure, seconds) == (told.outcomes, 3, told.measure, 12.5)
    assert found.sampled.shares() == told.sampled.shares()
    others = [Prompt(Problem("p", "q", "19"), "", ())]
    assert (kept_base(tmp_path, asked, None), kept_base(tmp_path, others, draws)) == (None, None)
    assert kept_base(tmp_path, asked, draws, REWARD) is None
    assert kept_base(tmp_path / "none", asked, draws) is None


def test_the_end_of_a_run_has_one_number_of_the_sampled_answers():
    given = {"base": "nn", "trained": "yn"}
    models = [replace(evaluation(name, "y"), sampled=sampled([said], samples=2)) for name, said in given.items()]
    assert of_samples([*models, evaluation("merged", "y")]) == "pass@2: base 0.0%, trained 100.0%"
    assert of_samples([evaluation("base", "y")]) == ""


def test_trials_are_pooled_by_problem_but_vote_apart():
    two = sampled(["yyn", "nnn"], ["nnn", "nny"], samples=3)
    assert two.means() == pytest.approx([2 / 6, 1 / 6])
    summary = two.summary()
    assert (summary["mean"], summary["deviation"]) == pytest.approx((0.25, 0.117851), abs=1e-6)
    assert summary["maj@3"]["value"] == pytest.approx((1 + 0 + 0 + 0) / 4)
    assert summary["pass@3"]["value"] == pytest.approx((pass_at(3, 6, 2) + pass_at(3, 6, 1)) / 2)
    assert summary["categories"]["correct"] == 3
    alike = sampled(["yn", "yn"], ["ny", "ny"], samples=2).shares()
    answers = {"avg@2": 8, "avg@2 lenient": 8, "maj@2": 4, "pass@2": 4}  # all are independent if problems are alike
    assert {name: [*one] for name, one in alike.items()} == {
        name: [alike[name].value, *wilson(alike[name].value * count, count)] for name, count in answers.items()
    }


class Echo:
    """Answers the question's own text, and for the sampled ones its seed; prompts come back in another order."""

    def __init__(self) -> None:
        self.seen: list[Sampling] = []

    def sample(self, prompts, sampling):
        self.seen.append(sampling)
        for index in reversed(range(len(prompts))):
            said = prompts[index].text if sampling.temperature == 0 else str(sampling.seed)
            completion = Completion((1,), (-1.0,), f"#### {said}", truncated=False)
            yield index, [completion] * sampling.group


def prompts(count: int) -> list[Prompt]:
    return [Prompt(Problem(f"id{n}", f"question {n}", str(n)), str(n), (n,)) for n in range(count)]


def test_answers_belong_to_their_problems_and_trials_differ_by_their_seed_alone():
    shown = []

    def progress(task, total):
        shown.append(Progress(task, total))
        return shown[-1]

    greedy = evaluate("model", Echo(), Scorer(Rules(Reward(), "gsm8k", 9)), prompts(5), 9, progress=progress)
    assert [(one.done, one.total) for one in shown] == [(5, 5)]
    assert [one.problem_id for one in greedy.outcomes] == [f"id{n}" for n in range(5)]
    assert (greedy.accuracy, greedy.sampled) == (1.0, None)
    sampler, other = Echo(), Echo()
    draws = Draws(samples=4, temperature=0.7, trials=3, seed=1)
    evaluate("model", other, Scorer(Rules(Reward(), "gsm8k", 9)), prompts(2), 9, replace(draws, seed=2))
    result = evaluate("model", sampler, Scorer(Rules(Reward(), "gsm8k", 9)), prompts(2), 9, draws)
    greedy, *trials = sampler.seen
    assert (greedy.group, greedy.temperature) == (1, 0.0)
    assert {(one.group, one.temperature, one.max_new_tokens) for one in trials} == {(4, 0.7, 9)}
    assert len({one.seed for one in [*trials, *other.seen[1:]]}) == 6
    assert result.sampled is not None
    assert [[len(group) for group in trial] for trial in result.sampled.trials] == [[4, 4]] * 3


SAID = [("nnnnnnyy", "yyyyyyyy", "better: 25.0% -> 100.0%"), ("yyyyyyyy", "nnnnnnyy", "worse: 100.0% -> 25.0%")]
SAID += [("nnnnnyyy", "yyyyyyyy", "within the noise: 37.5% -> 100.0%")]


@pytest.mark.parametrize(("before", "after", "said"), SAID)
def test_the_sentence_about_two_models_is_honest(before, after, said):
    assert Comparison(evaluation("base", before), evaluation("adapter", after)).sentence.startswith(said)
    flips = Comparison(evaluation("base", "yn-y"), evaluation("adapter", "ynyn")).flips
    found = [(one["direction"], one["before_answer"], one["after_answer"]) for one in flips]
    assert found == [("gained", None, "18"), ("lost", "18", "7")]


def test_models_are_compared_in_the_form_that_is_paid():
    in_no_format = replace(outcome("18"), score=replace(outcome("18").score, strict=None, correct_strict=False))
    sides = ((outcome("7"),) * 8, (in_no_format,) * 8)
    one = Comparison(*(Evaluation(name, answers, measure=LENIENT) for name, answers in zip("ab", sides)))
    assert one.sentence.startswith("better: 0.0% -> 100.0%")
    assert [(flip["before_answer"], flip["after_answer"]) for flip in one.flips] == [("7", "18")] * 8


def test_a_flip_is_one_line_also_if_its_answers_have_several():
    long = "1" * 40
    sides = (("base", "7"), ("new", f"{long}\n2"))
    before, after = (Evaluation(name, (outcome(said, gold=f"{long}\n2"),)) for name, said in sides)
    _, line = results.flip_lines(Comparison(before, after))
    assert line == f"  p: q (gold {long} 2; base 7, new [...])"


def test_an_answer_of_several_turns_is_shown_as_a_whole():
    turns = (Turn("model", "5"), Turn("environment", "too low"), Turn("model", "18"))
    (flip,) = Comparison(evaluation("base", "n"), Evaluation("adapter", (outcome("18", turns=turns),))).flips
    assert [flip[f"{side}_completion"] for side in ("before", "after")] == ["#### 7", "5\n> too low\n18"]


def test_agreement_looks_at_log_probs_up_to_the_first_other_token():
    one = Evaluation("one", (outcome("1", tokens=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0)), outcome("1")))
    other = Evaluation("other", (outcome("1", tokens=(5, 6, 8), logprobs=(-1.5, -2.25, -9.0)), outcome("1")))
    alike = agreement(one, other)
    assert (alike.identical, alike.problems, alike.largest_difference) == (1, 2, 0.5)
    assert (alike.mean_difference, alike.partings) == ((0.5 + 0.25 + 0 + 0) / 4, (6.0,))


@pytest.mark.parametrize(("dtype", "one", "other", "explained"), [
    ("fp32", ((5, 7), (-1.0, -3.0)), ((5, 7), (-1.0, -3.00001)), True),
    ("fp32", ((5, 7), (-1.0, -3.0)), ((5, 7), (-1.0, -3.02)), False),  # the same tokens, with other probabilities
    ("fp32", ((5, 7), (-1.0, -3.0)), ((5, 8), (-1.0, -3.001)), True),  # two tokens that are equally likely
    ("fp32", ((5, 7), (-1.0, -3.0)), ((5, 8), (-1.0, -3.04)), False),
    ("bf16", ((5, 7), (-1.0, -3.0)), ((5, 8), (-1.0, -3.04)), True),
    ("bf16", ((5, 7), (-1.0, -3.0)), ((5, 8), (-1.0, -3.6)), False),
    # also if these tokens are the first, before which there is nothing to compare
    ("fp32", ((5,), (-0.7,)), ((6,), (-0.7,)), True),  # two tokens of a half each
    ("fp32", ((5,), (-0.68,)), ((6,), (-0.68,)), False),
    ("bf16", ((5,), (-0.5,)), ((6,), (-0.5,)), True),
    ("bf16", ((5,), (-0.4,)), ((6,), (-0.4,)), False),  # two thirds for the one token leave a third for the other
    ("bf16", ((5,), (0.0,)), ((6,), (0.0,)), False),
])  # fmt: skip
def test_a_merged_model_may_differ_by_rounding_only(dtype, one, other, explained):
    first, second = (outcome("1", tokens=tokens, logprobs=logprobs) for tokens, logprobs in (one, other))
    alike = agreement(Evaluation("one", (first,) * 50), Evaluation("other", (second,) * 50))
    with nullcontext() if explained else pytest.raises(MergeError):
        alike.must_be_rounding(dtype)
    if not explained and first.completion.tokens != second.completion.tokens:  # one answer in a hundred may differ
        mixed = Evaluation("other", (second,) * 2 + (first,) * 198)
        agreement(Evaluation("one", (first,) * 200), mixed).must_be_rounding(dtype)


@pytest.mark.parametrize("rounds", ["model.quantize=nf4", "rollout.engine=vllm_colocate", ""])
def test_a_merged_model_may_differ_where_its_base_or_its_sampler_is_another(rounds):
    config = resolve("nano", None, [rounds] if rounds else [])
    trained, merged = (Evaluation("one", (outcome("1", logprobs=(-1.0, one)),) * 50) for one in (-3.0, -4.0))
    with nullcontext() if rounds else pytest.raises(MergeError):
        must_be_rounding(config, [trained, trained, merged])


def test_conversations_of_an_agent_are_compared_in_any_order_and_but_for_what_it_says():
    first = Segment((1,), (5, 6), (-1.0, -2.0), (True, True))
    second, told = (Segment((2,), (7, said, 9), (-3.0, 0.0, -said), (True, False, True)) for said in (8, 4))
    pairs = ((first, second, first), (told, first, first))  # two may begin alike
    one, other = (outcome("1", tokens=a.tokens + b.tokens + c.tokens, segments=(a, b, c)) for a, b, c in pairs)
    alike = agreement(Evaluation("one", (one,) * 50), Evaluation("other", (other,) * 50))
    assert (alike.identical, alike.largest_difference, {*alike.partings}) == (0, 0.0, {0.0})
    alike.must_be_rounding("fp32")
    segments = (told, first._replace(logprobs=(-1.0, -2.2)), first)
    other = outcome("1", tokens=other.completion.tokens, segments=segments)
    with pytest.raises(MergeError):
        agreement(Evaluation("one", (one,) * 50), Evaluation("other", (other,) * 50)).must_be_rounding("fp32")
