"""Compare evaluations of the same problems, write them into four files (see `FILES`), and format them for printing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from trainer.config.settings import Config
from trainer.evaluation.evaluate import Evaluation, Outcome
from trainer.machine import disk
from trainer.records import Completion
from trainer.run_folder.reader import table_rows
from trainer.stats import SIGNIFICANT, Share
from trainer.watch.measure import LENIENT, Measure, number
from trainer.watch.verdict import evidence_of

SHOWN_FLIPS = 3  # in each direction; eval_flips.jsonl has all of them
FILES = "eval.json, eval.md, eval_answers.jsonl, eval_flips.jsonl"


class Comparison(NamedTuple):
    before: Evaluation
    after: Evaluation

    @property
    def names(self) -> str:
        return f"{self.before.name} -> {self.after.name}"

    @property
    def measure(self) -> Measure:
        return self.before.measure

    @property
    def both(self) -> list[tuple[Outcome, Outcome, float, float]]:
        """Return both answers to each problem with their values, if neither value is missing."""
        pairs, name = zip(self.before.outcomes, self.after.outcomes, strict=True), self.measure.of_answer
        measured = [(old, new, getattr(old.score, name), getattr(new.score, name)) for old, new in pairs]
        return [row for row in measured if None not in row]

    @property
    def test(self) -> tuple[int, int, float, Share]:
        """Return the numbers of problems gained and lost, p of the paired test, and the difference."""
        return self.measure.compared([value for *_, value, _ in self.both], [value for *_, value in self.both])

    @property
    def flips(self) -> list[dict[str, Any]]:
        """Return the problems that only one model solves, or whose rewards differ, the most different ones first."""
        read = "lenient" if self.measure == LENIENT else "strict"
        name, attribute = ("reward", "reward") if self.measure.is_reward else ("answer", read)
        flips = []
        for old, new, a, b in sorted(self.both, key=lambda row: -abs(row[3] - row[2])):
            asked = {"problem": old.problem_id, "question": old.question, "gold": old.gold}
            answers = {f"before_{name}": getattr(old.score, attribute), f"after_{name}": getattr(new.score, attribute)}
            texts = {"before_completion": _text(old.completion), "after_completion": _text(new.completion)}
            if a != b:
                flips.append({"direction": "gained" if b > a else "lost", **asked, **answers, **texts})
        return flips

    @property
    def sentence(self) -> str:
        """Return whether the second model is better, worse, or within the noise, with the evidence."""
        *_, p, difference = self.test
        kind = "within the noise" if p >= SIGNIFICANT else "better" if difference.value > 0 else "worse"
        before, after = self.means
        return f"{kind}: {evidence_of(before, after, len(self.both), difference, p, self.measure)}"

    @property
    def means(self) -> list[float]:
        """Return the mean values before and after of the problems that have both."""
        values = [*zip(*(row[2:] for row in self.both), strict=True)] or [(0.0,)] * 2
        return [self.measure.mean(one).value for one in values]

    def summary(self) -> dict[str, Any]:
        gained, lost, p, (value, *interval) = self.test
        summary: dict[str, Any] = {"before": self.before.name, "after": self.after.name, "gained": gained, "lost": lost}
        summary |= {"p": p, "sentence": self.sentence}
        if self.measure.is_reward:
            paired = {"problems": len(self.both), "rewards": self.means}  # that are graded in both evaluations
            return {**summary, "difference": value, "interval": interval, **paired}
        lenient = LENIENT.compared(self.before.values(LENIENT), self.after.values(LENIENT))
        return {**summary, "lenient": dict(zip(("gained", "lost", "p"), lenient))}


def _text(answer: Completion) -> str:
    """Return the text of an answer. If it has several turns, those of the environment begin with `>`."""
    return "\n".join("> " * (role != "model") + text for role, text in answer.turns) or answer.text


def all_pairs(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    """Compare each model with every earlier one: base and adapter, base and merged, adapter and merged."""
    return [Comparison(*pair) for pair in combinations(evaluations, 2)]


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that the numbers depend on."""
    settings: dict[str, Any] = {"model": config.model.name}
    settings |= {"quantize": config.model.quantize} if config.model.quantize != "none" else {}
    settings |= {"task": config.task.name, "prompt_style": config.prompt.style}
    settings |= {"template": config.prompt.template} if config.prompt.template else {}
    return settings | {"max_new_tokens": config.rollout.max_new_tokens}


def merged_against(other: str, base: str) -> str:
    """Describe the comparison. The base of a merged model is never quantised, so with a quantised base in the other
    model this is not a check."""
    other_base = f" (clean base against {base} base, so they differ by quantisation too, and no limit is set)"
    return f"merged against {other}" + (other_base if base != "none" else "")


def document(settings: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    summaries = [evaluation.summary() for evaluation in evaluations]
    pairs = [comparison.summary() for comparison in all_pairs(evaluations)]
    return {"settings": dict(settings), "evaluations": summaries, "comparisons": pairs}


def write(folder: Path, settings: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    answers = [record for evaluation in evaluations for record in evaluation.records()]
    flips = [{"models": one.names, **flip} for one in all_pairs(evaluations) for flip in one.flips]
    disk.replace(folder / "eval.json", (json.dumps(document(settings, evaluations), indent=2) + "\n").encode())
    disk.replace(folder / "eval.md", markdown(settings, evaluations).encode())
    for name, records in (("eval_answers.jsonl", answers), ("eval_flips.jsonl", flips)):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        disk.replace(folder / name, text.encode())


def rows(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    content = document({}, evaluations)
    return table_rows(content["evaluations"], content["comparisons"])


def title(evaluations: Sequence[Evaluation]) -> str:
    text = f"Greedy answers to {evaluations[0].asked}"
    if (sampled := evaluations[0].sampled) is None:
        return f"{text}, with 95 % intervals"
    draws = sampled.draws
    times = f", {draws.trials} times" if draws.trials > 1 else ""
    return f"{text}; {draws.samples} sampled of each at temperature {draws.temperature:g}{times}"


def verdicts(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a sentence for each pair of models. `trainer/watch/verdict.py` has the verdict on a run."""
    return [f"{comparison.names}: {comparison.sentence}" for comparison in all_pairs(evaluations)]


def flip_lines(comparison: Comparison) -> Iterator[str]:
    """Yield some of the problems that flipped, in both directions."""
    for direction, label in zip(("gained", "lost"), comparison.measure.flipped):
        flips = [flip for flip in comparison.flips if flip["direction"] == direction]
        more = f", {SHOWN_FLIPS} of them" if len(flips) > SHOWN_FLIPS else ""
        if flips:
            yield f"{comparison.names}, {label}: {len(flips)}{more}"
        for flip in flips[:SHOWN_FLIPS]:
            if comparison.measure.is_reward:
                change = f"{number(flip['before_reward'])} -> {number(flip['after_reward'])}"
            else:
                sides = ((comparison.before, flip["before_answer"]), (comparison.after, flip["after_answer"]))
                said = [f"{model.name} {'no answer' if text is None else shorten(text, 30)}" for model, text in sides]
                change = f"gold {' '.join(flip['gold'].split())}; {', '.join(said)}"
            yield f"  {flip['problem']}: {shorten(flip['question'], 70, placeholder=' ...')} ({change})"


LEGEND = """`correct`: the right answer in the requested format. `in any format`: the right answer in any format.
`wrong answer`: the requested format with another answer. `no answer found`: nothing in the requested format.
Brackets contain 95 % intervals in percent. `gained/lost`: problems that flipped against the first model.
"""
OF_REWARDS = """`reward`: the mean reward of the answers, with a 95 % interval in brackets. `difference`: from the first
model, on the same problems. `higher/lower`: problems whose answer earns more and less than that of the first model.
"""


def markdown(settings: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> str:
    names = [evaluation.name for evaluation in evaluations]
    head = [["", *names], ["---"] + ["---:"] * len(names)]
    lines = [*head, *rows(evaluations)]
    cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    sentences = [f"- {line}" for line in verdicts(evaluations)]
    flips = [line for comparison in all_pairs(evaluations)[:1] for line in flip_lines(comparison)]
    facts = ", ".join(f"{name} `{value}`" for name, value in settings.items())
    legend = OF_REWARDS if evaluations[0].measure.is_reward else LEGEND
    parts = [f"# {title(evaluations)}", facts, "\n".join(cells), legend.rstrip()]
    parts += ["\n".join(sentences)] if sentences else []
    parts += ["```\n" + "\n".join(flips).replace("```", "'''") + "\n```"] if flips else []
    return "\n\n".join(parts) + "\n"
