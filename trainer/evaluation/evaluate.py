"""Evaluate a model on held-out problems: greedy answers always, sampled ones on request (docs/evaluation.md)."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from pydantic import TypeAdapter

from trainer.answers import compare
from trainer.errors import RewardError
from trainer.machine import disk
from trainer.ranks import distributed
from trainer.records import Completion, Draws, Prompt, Sampling, Score, ScoredGroup
from trainer.reward.scorer import Scorer
from trainer.rollout.collect import collect, report_missing
from trainer.rollout.interface import Sampler
from trainer.stats import Share, pass_at, share_of
from trainer.watch.footer import Progress
from trainer.watch.measure import LENIENT, STRICT, Measure

ShowProgress = Callable[[str, int], Progress]  # of the name of a task and the number of its parts


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer to one problem, scored."""

    problem_id: str
    question: str
    gold: str
    completion: Completion
    score: Score
    part: str = ""  # the part of a mixture that the problem is from

    @property
    def category(self) -> str:
        if self.score.correct_strict:
            return "correct"
        return "wrong answer" if self.score.strict is not None else "no answer"

    def record(self, measure: Measure) -> dict[str, Any]:
        asked = {"problem": self.problem_id, "question": self.question, "gold": self.gold}
        score, answer = self.score, self.completion
        scored: dict[str, Any] = {}
        if self.gold or not measure.is_reward:
            scored = {"category": self.category, "strict": score.strict, "lenient": score.lenient}
            scored |= {"correct_strict": score.correct_strict, "correct_lenient": score.correct_lenient}
        if measure.is_reward:
            scored |= {"reward": score.reward, **{f"reward/{name}": part for name, part in score.components.items()}}
        size = {"truncated": answer.truncated, "tokens": answer.length}
        return {**asked, "completion": answer.text, **scored, **size, **answer.transcript}


@dataclass(frozen=True, slots=True)
class Sampled:
    """Several answers to each problem, in trials that differ only in their seed: `trials[trial][problem][answer]`."""

    draws: Draws
    trials: tuple[tuple[tuple[Outcome, ...], ...], ...]

    @property
    def by_problem(self) -> list[list[Outcome]]:
        return [[outcome for group in groups for outcome in group] for groups in zip(*self.trials, strict=True)]

    def means(self, measure: Measure = STRICT) -> list[float]:
        """Return the mean accuracy or reward of each trial."""
        return [fmean(measure.values(one.score for group in trial for one in group)) for trial in self.trials]

    def shares(self, measure: Measure = STRICT) -> dict[str, Share]:
        """Return avg@k, maj@k and pass@k, each a mean over problems with its interval. Rewards only have avg@k."""
        k, problems = self.draws.samples, self.by_problem
        each = len(problems[0])
        if measure.is_reward:
            graded = [values for group in problems if (values := measure.values(one.score for one in group))]
            return {f"avg@{k}": measure.mean([*map(fmean, graded)])}
        strict = [fmean(outcome.score.correct_strict for outcome in group) for group in problems]
        lenient = [fmean(outcome.score.correct_lenient for outcome in group) for group in problems]
        shares = {f"avg@{k}": share_of(strict, each), f"avg@{k} lenient": share_of(lenient, each)}
        if k > 1:
            voted = [[majority(group) for group in groups] for groups in zip(*self.trials, strict=True)]
            won = [fmean(one is not None and one.score.correct_strict for one in winners) for winners in voted]
            shares[f"maj@{k}"] = share_of(won, len(self.trials))
        right = [sum(outcome.score.correct_strict for outcome in group) for group in problems]
        for j in sorted({*(2**n for n in range(1, k.bit_length())), k}) if k > 1 else []:
            shares[f"pass@{j}"] = share_of([pass_at(j, each, correct) for correct in right], each / j)
        return shares

    def summary(self, measure: Measure = STRICT) -> dict[str, Any]:
        means = self.means(measure)
        spread = {"trial_rewards" if measure.is_reward else "trial_accuracies": means, "mean": fmean(means)}
        spread |= {"deviation": stdev(means)} if len(means) > 1 else {}
        shares = {name: _as_json(share) for name, share in self.shares(measure).items()}
        described = counts_of([outcome for group in self.by_problem for outcome in group], measure)
        return {**asdict(self.draws), **shares, **spread, **described}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The answers of one model: `strict` is the accuracy in the requested format, `lenient` in any format. `left_out`
    counts the held-out problems that were not asked because they exceed the context."""

    name: str
    outcomes: tuple[Outcome, ...]
    sampled: Sampled | None = None
    left_out: int = 0
    loss: float | None = None  # in a warm-up, the loss per token of held-out solutions
    measure: Measure = STRICT

    @property
    def asked(self) -> str:
        others = f" ({self.left_out} more exceed the context)" if self.left_out else ""
        return f"{len(self.outcomes)} held-out problems{others}"

    @property
    def has_accuracy(self) -> bool:
        """Return True if right answers are known: they are paid, or the problems have gold answers."""
        return not self.measure.is_reward or any(outcome.gold for outcome in self.outcomes)

    @property
    def accuracy(self) -> float:
        return self.strict.value

    @property
    def strict(self) -> Share:
        return self.mean(STRICT)

    @property
    def lenient(self) -> Share:
        return self.mean(LENIENT)

    def values(self, measure: Measure) -> list[float]:
        return measure.values(outcome.score for outcome in self.outcomes)

    def mean(self, measure: Measure) -> Share:
        return measure.mean(self.values(measure))

    @property
    def result(self) -> Share:
        """Return the mean reward if rewards are measured, otherwise the accuracy in the requested format."""
        return self.mean(self.measure.reported)

    @property
    def parts(self) -> dict[str, Share]:
        """Return the result for each part of a mixture of tasks, in the format that is paid."""
        values: dict[str, list[float]] = defaultdict(list)
        for outcome in self.outcomes:
            values[outcome.part] += self.measure.values([outcome.score])
        return {name: self.measure.mean(values[name]) for name in sorted(values) if name and values[name]}

    def summary(self) -> dict[str, Any]:
        """Return the numbers that are printed and stored; `records` returns the single answers."""
        summary = {"name": self.name, "problems": len(self.outcomes), "left_out": self.left_out}
        (value, *interval), measure = self.result, self.measure
        if measure.is_reward:
            summary |= {"reward": value, "interval": interval, "deviation": pstdev(self.values(measure))}
        if self.has_accuracy:
            key = "accuracy_interval" if measure.is_reward else "interval"
            summary |= {"accuracy": self.strict.value, key: list(self.strict[1:])}
            summary |= {"lenient_accuracy": self.lenient.value, "lenient_interval": list(self.lenient[1:])}
        summary |= {} if self.loss is None else {"loss": self.loss}
        parts = {name: _as_json(share) for name, share in self.parts.items()}
        summary |= {f"{measure.prefix}parts": parts} if parts else {}
        sampled = {"sampled": self.sampled.summary(measure.reported)} if self.sampled else {}
        return summary | counts_of(self.outcomes, measure) | sampled

    def records(self) -> list[dict[str, Any]]:
        """Return every answer. Greedy answers have temperature 0; sampled ones are numbered within their trial."""
        name, measure = self.name, self.measure
        records = [{"model": name, "temperature": 0.0, **outcome.record(measure)} for outcome in self.outcomes]
        if self.sampled:
            temperature = self.sampled.draws.temperature
            records += [
                {"model": name, "temperature": temperature, "trial": trial, "sample": sample, **outcome.record(measure)}
                for trial, groups in enumerate(self.sampled.trials)
                for group in groups
                for sample, outcome in enumerate(group)
            ]
        return records


SCORED = TypeAdapter(list[list[tuple[Completion, Score]]])  # the answers to each problem, to and from JSON
STORED = TypeAdapter(Evaluation)


def counts_of(outcomes: Sequence[Outcome], measure: Measure) -> dict[str, Any]:
    """Return the three categories as counts and shares, the share of truncated answers, and the mean length."""
    found = [outcome.category for outcome in outcomes]
    counts = {name: found.count(name) for name in ("correct", "wrong answer", "no answer")}
    shares = {name: count / len(outcomes) for name, count in counts.items()}
    truncated = fmean(outcome.completion.truncated for outcome in outcomes)
    length = fmean(outcome.completion.length for outcome in outcomes)
    categories = {} if measure.is_reward else {"categories": counts, "category_shares": shares}
    return {**categories, "truncated": truncated, "mean_tokens": length}


def majority(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the first outcome with the most frequent answer; ties go to the answer seen first."""
    ballots: list[list[Outcome]] = []
    for outcome in (outcome for outcome in outcomes if outcome.score.strict is not None):
        for ballot in ballots:
            if compare.equal(str(outcome.score.strict), str(ballot[0].score.strict)):
                ballot.append(outcome)
                break
        else:
            ballots.append([outcome])
    return max(ballots, key=len)[0] if ballots else None  # max returns the first of equals


def evaluate(
    name: str,
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    draws: Draws | None = None,
    progress: ShowProgress | None = None,
    left_out: int = 0,
    measure: Measure = STRICT,
) -> Evaluation:
    """Evaluate greedy answers, and sampled ones if `draws` are given. Every rank returns the whole evaluation."""

    def answered(what: str, sampling: Sampling) -> tuple[tuple[Outcome, ...], ...]:
        mine = distributed.mine(prompts)
        with progress(f"{name}, {what} {len(prompts)} problems", len(mine)) if progress else nullcontext() as shown:
            report = [shown.advance] if shown else []
            groups = gathered(prompts, collect(sampler, scorer, mine, sampling, *report))
        report_missing(scorer, scorer.drain(), always=True)
        if not measure.reported.values(outcome.score for group in groups for outcome in group):
            remedy = "Repair the judge or the function, or write eval.problems=0"
            raise RewardError(f"evaluation of {name}", "no held-out answer has a reward", remedy).of_all()
        return groups

    greedy = answered("greedy answers to", Sampling(1, temperature=0.0, max_new_tokens=max_new_tokens, seed=0))
    evaluation = Evaluation(name, tuple(outcome for (outcome,) in greedy), left_out=left_out, measure=measure)
    if draws is None:
        return evaluation
    what = f"{draws.samples} sampled answers to each of"
    trials = [
        answered(what, Sampling(draws.samples, draws.temperature, max_new_tokens, draws.seed * 1_009 + trial))
        for trial in range(draws.trials)
    ]
    return replace(evaluation, sampled=Sampled(draws, tuple(trials)))


def gathered(prompts: Sequence[Prompt], groups: Sequence[ScoredGroup]) -> tuple[tuple[Outcome, ...], ...]:
    """Return the scored answers to each prompt of all ranks, in the order of the prompts."""
    scored = [list(zip(group.completions, group.scores, strict=True)) for group in groups]
    everywhere = SCORED.validate_python(distributed.dealt(SCORED.dump_python(scored, mode="json")))
    answered = []
    for prompt, answers in zip(prompts, everywhere, strict=True):
        problem, asked = prompt.problem, (prompt.problem.id, prompt.problem.question, prompt.problem.gold)
        answered.append(tuple(Outcome(*asked, *one, problem.part) for one in answers))
    return tuple(answered)


def keep_base(folder: Path, evaluation: Evaluation, seconds: float) -> None:
    """Store the evaluation of the base and its seconds in the run folder, so that a resumed run need not repeat it."""
    if not distributed.is_main():
        return
    if sampled := evaluation.sampled:
        sampled = replace(sampled, trials=tuple(tuple(map(_without_logprobs, trial)) for trial in sampled.trials))
    stored = replace(evaluation, outcomes=_without_logprobs(evaluation.outcomes), sampled=sampled)
    document = {"seconds": seconds, "evaluation": STORED.dump_python(stored, mode="json")}
    disk.replace(folder / "base.json", json.dumps(document).encode())


def kept_base(
    folder: Path, prompts: Sequence[Prompt], draws: Draws | None, measure: Measure = STRICT
) -> tuple[Evaluation, float] | None:
    """Return the stored evaluation and its seconds, or None if it has other problems or another measure. Every rank
    calls it."""

    def read() -> Any:
        with suppress(OSError, ValueError, RecursionError):
            return disk.parsed((folder / "base.json").read_bytes())

    document: Any = distributed.on_main(read)
    with suppress(LookupError, TypeError, ValueError):
        evaluation, seconds = STORED.validate_python(document["evaluation"]), float(document["seconds"])
        answered = [(one.problem_id, one.question, one.gold) for one in evaluation.outcomes]
        asked = [(one.problem.id, one.problem.question, one.problem.gold) for one in prompts]
        drawn = evaluation.sampled.draws if evaluation.sampled else None
        if (answered, drawn, evaluation.measure) == (asked, draws, measure):
            return evaluation, seconds
    return None


def _without_logprobs(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Drop the log-probs and segments, which take the most space and are not compared."""
    return tuple(replace(one, completion=replace(one.completion, logprobs=(), segments=())) for one in outcomes)


def _as_json(share: Share) -> dict[str, Any]:
    return {"value": share.value, "interval": [share.low, share.high]}
