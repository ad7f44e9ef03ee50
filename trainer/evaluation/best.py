"""The evaluations after steps of a run: which one was the best, and whether they still improve.

    <run folder>/best/            the adapter (or model) with the highest `eval.metric` so far
                      best.json   its step and accuracy or reward

The evaluations are read back from `metrics.jsonl` and `best.json`, so a resumed run continues as if it had not been
interrupted.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.settings import Eval
from trainer.evaluation.evaluate import Evaluation, ShowProgress, evaluate
from trainer.machine import disk, manifest
from trainer.machine.safe_text import visible
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import Draws, Prompt
from trainer.reward.scorer import Scorer
from trainer.rollout.interface import Sampler
from trainer.run_folder.journal import read_records
from trainer.watch.measure import STRICT, Measure, percent


class Milestone(NamedTuple):
    step: int
    value: float  # of eval.metric; a loss is negated, so that larger is always better


@dataclass(eq=False)
class EvaluationHistory:
    """The evaluations after the steps of a run. That of the base model cannot be the best."""

    folder: Path
    settings: Eval
    problems: int
    first_step: int
    total_steps: int
    run: str = ""  # identifies the run in best.json, to detect one of another run
    measure: Measure = STRICT

    def __post_init__(self) -> None:
        folder, settings, first_step, named = self.folder, self.settings, self.first_step, self.measure.noted
        chosen = self.measure.logged.removeprefix("eval/")  # as `reward.answer` says
        follows = settings.metric == "accuracy" or (self.measure.is_reward and settings.metric != "loss")
        self.metric = chosen if follows else settings.metric
        records = distributed.on_main(lambda: _evaluated(folder, first_step, named))
        kept, self.lost = distributed.on_main(lambda: _kept(folder, self.run, named))
        self.kept = kept  # the content of best.json, about the model in `best/`
        by_step = {record["step"]: record for record in records}
        if kept and (kept["step"] < first_step or kept["step"] in by_step):  # otherwise its step is evaluated again
            by_step[kept["step"]] = {name if name == "step" else f"eval/{name}": value for name, value in kept.items()}
        self.milestones = [
            Milestone(step, _worth(record, self.metric))
            for step, record in sorted(by_step.items())
            if record["eval/problems"] == self.problems
        ]
        if settings.every and self.milestones and not kept:
            self.lost = self.lost or f"{folder / 'best'} is not there"
        self.is_seen = any(record["step"] == first_step for record in records)  # whatever its number of problems
        self.spares_best = first_step >= self.total_steps and kept is not None
        self.last: Evaluation | None = None
        self.goal = inf  # the run stops at this value; `octet speedrun` sets it

    def is_due(self, step: int) -> bool:
        every = self.settings.every
        return bool(self.problems) and (step == self.total_steps or (every is not None and step % every == 0))

    def was_interrupted_at(self, step: int) -> bool:
        """Return True if the run was interrupted during the evaluation after this step, which is then repeated."""
        return step > 0 and self.is_due(step) and not self.is_seen

    def add(self, step: int, evaluation: Evaluation) -> bool:
        """Add an evaluation, and return True if it is a new best that has to be kept. An equal value is not a new best.
        A run that had already finished, and has no comparable evaluations, keeps its earlier best."""
        best, value = self.best, _worth(metrics_of(evaluation), self.metric)
        self.milestones.append(Milestone(step, value))
        self.last = evaluation
        is_better = value > best.value if best else not self.spares_best
        return is_better and (self.settings.every is not None or (self.folder / "best").is_dir())

    @property
    def best(self) -> Milestone | None:
        return max(self.milestones, key=lambda milestone: milestone.value, default=None)  # the first of equals

    @property
    def has_stopped_rising(self) -> bool:
        """True if the last `eval.patience` evaluations brought no new best, or if the best has reached the goal."""
        patience, best = self.settings.patience, self.best
        if best and best.value >= self.goal:
            return True
        if patience is None or best is None:
            return False
        return len(self.milestones) - 1 - self.milestones.index(best) >= patience

    def keep(self, export: Callable[[Path], None]) -> None:
        """Export the model of the last evaluation into `best/`, completely or not at all. Call this on rank 0 only."""
        assert self.last is not None, "keep() follows an evaluation"
        shares: dict[str, Any] = {"accuracy": self.last.strict.value, "lenient": self.last.lenient.value}
        if self.measure.is_reward:
            value, *interval = self.last.result
            shares = {"reward": value, "interval": interval}
        note: dict[str, Any] = {"step": self.milestones[-1].step, **shares, "problems": self.problems, "run": self.run}
        note |= {} if self.last.loss is None else {"loss": self.last.loss}
        note |= {"left_out": self.last.left_out} if self.last.left_out else {}
        remedy = "Free some space; `--resume` then continues the run."
        with manifest.replacing(self.folder / "best", "the best of the run", remedy) as folder:
            export(folder)
            (folder / "best.json").write_text(json.dumps(note, indent=2) + "\n")
        self.kept, self.lost = note, ""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the policy on the held-out problems, and keeps the best adapter or model in the run folder."""

    policy: Policy
    sampler: Sampler  # one that does not merge the adapter, so that a merged model is compared with the adapter itself
    scorer: Scorer
    held_out: Sequence[Prompt]
    max_new_tokens: int
    history: EvaluationHistory
    progress: ShowProgress
    left_out: int = 0  # held-out problems that exceed the context
    loss: Callable[[], float | None] | None = None  # in a warm-up, the loss per token of held-out solutions
    draws: Draws | None = None  # how to sample answers of the base, and at the end

    def evaluate(self, name: str, draws: Draws | None = None) -> Evaluation:
        """Return the evaluation of the current policy. Every rank calls it."""
        with self.policy.gathered():
            measure = self.history.measure
            scorer = self.scorer if measure.is_reward else self.scorer.verifier()
            how = (self.max_new_tokens, draws, self.progress, self.left_out, measure)
            evaluation = evaluate(name, self.sampler, scorer, self.held_out, *how)
            return replace(evaluation, loss=self.loss()) if self.loss else evaluation

    def keep_if_best(self, step: int, evaluation: Evaluation) -> bool:
        """Add the evaluation after a step to the history, and write the policy into `best/` if it is the best."""
        is_best = self.history.add(step, evaluation)
        if is_best:
            with self.policy.gathered():
                if distributed.is_main():
                    self.history.keep(self.policy.write_model)
        return is_best


def describe(evaluation: Evaluation) -> str:
    """Return the headline of an evaluation. It begins with the accuracy that `reward.answer` selects."""
    loss = "" if evaluation.loss is None else f", {evaluation.loss:.3f} the loss of a token of their solutions"
    if (measure := evaluation.measure).is_reward:
        value, *interval = evaluation.result
        graded = len(evaluation.values(measure))
        of_some = "" if graded == len(evaluation.outcomes) else f"{graded} graded of "
        right = f", {percent(evaluation.strict.value, evaluation.strict[1:])} correct" * evaluation.has_accuracy
        return f"mean reward {measure.text(value, interval)} on {of_some}{evaluation.asked}{right}{loss}"
    strict, count = percent(evaluation.strict.value, evaluation.strict[1:]), f"of {evaluation.asked} correct"
    if measure == STRICT:
        return f"{strict} {count}{loss}"
    lenient = percent(evaluation.lenient.value, evaluation.lenient[1:])
    return f"{lenient} {count} in any format, {strict} in the one asked for{loss}"


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation for `metrics.jsonl`."""
    left_out = evaluation.left_out
    metrics: dict[str, float] = {"eval/left_out": left_out} if left_out else {}
    metrics |= {} if evaluation.loss is None else {"eval/loss": evaluation.loss}
    value, low, high = evaluation.result
    metrics |= {"eval/reward": value} if evaluation.measure.is_reward else {}
    if evaluation.has_accuracy:
        metrics |= {"eval/accuracy": evaluation.accuracy, "eval/lenient": evaluation.lenient.value}
    metrics |= {"eval/low": low, "eval/high": high, "eval/problems": len(evaluation.outcomes)}
    return metrics | {f"eval/part/{name}": share.value for name, share in evaluation.parts.items()}


def _worth(metrics: Mapping[str, float], metric: str) -> float:
    return -metrics["eval/loss"] if metric == "loss" else metrics[f"eval/{metric}"]


def _kept(folder: Path, run: str, named: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
    """Return the content of best.json. If something is wrong with `best/`, move it aside and return what is wrong."""
    best, partial = folder / "best", folder / "best.partial"
    if not best.exists():
        return None, ""
    wrong = manifest.damage(best)
    if wrong and (partial / manifest.NAME).exists():  # the run was killed while it moved files here, this one last
        manifest.replace(best, partial)
        wrong = manifest.damage(best)
    was_whole = not os.path.lexists(best / manifest.NAME)  # only the manifest is missing
    why = f"is damaged ({visible(wrong)[:200]})" if wrong else "is of another run"
    if not wrong or was_whole:
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            kept = dict(disk.parsed((best / "best.json").read_bytes()))
            if kept["run"] == run and kept.keys() >= {"step", "problems", *named}:
                if was_whole:
                    manifest.seal(best)
                return kept, ""
            why = "was chosen by another measure" if kept["run"] == run else why
    names = chain(["best.damaged"], (f"best.damaged-{number}" for number in count(2)))
    aside = next(path for path in (folder / name for name in names) if not path.exists())
    best.rename(aside)
    return None, f"{best} {why} and was moved to {aside.name}"


def _evaluated(folder: Path, first_step: int, named: Sequence[str]) -> list[dict[str, Any]]:
    """Return the metrics of steps 1 to `first_step` that contain an undamaged evaluation."""
    names = ["eval/problems", *(f"eval/{name}" for name in named)]
    records = read_records(folder / "metrics.jsonl")
    whole = [record for record in records if all(type(record.get(name)) in (int, float) for name in names)]
    return [record for record in whole if 0 < record["step"] <= first_step]
