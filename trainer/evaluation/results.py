"""Write an evaluation into four files (see `FILES`), and format what is printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trainer.config.settings import Config
from trainer.evaluation.comparison import Comparison, Flip, all_pairs
from trainer.evaluation.evaluate import Evaluation
from trainer.machine import disk
from trainer.run_folder.evaluation_table import rows as numbers

SHOWN_FLIPS = 3  # of each direction; all of them are in eval_flips.jsonl
FILES = "eval.json, eval.md, eval_answers.jsonl, eval_flips.jsonl"


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that the numbers depend on."""
    quantised = {"quantize": config.model.quantize} if config.model.quantize != "none" else {}
    return {
        "model": config.model.name,
        **quantised,
        "task": config.task.name,
        "prompt_style": config.prompt.style,
        **({"template": config.prompt.template} if config.prompt.template else {}),
        "max_new_tokens": config.rollout.max_new_tokens,
    }


def merged_against(other: str, config: Config) -> str:
    """Return what is compared. A merged model never has a quantised base, so this is no check then."""
    kind = config.model.quantize
    other_base = f" (clean base against {kind} base, so they differ by quantisation too, and no limit is set)"
    return f"merged against {other}" + (other_base if kind != "none" else "")


def document(settings: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    return {
        "settings": dict(settings),
        "evaluations": [evaluation.summary() for evaluation in evaluations],
        "comparisons": [comparison.summary() for comparison in all_pairs(evaluations)],
    }


def write(folder: Path, settings: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    answers = [record for evaluation in evaluations for record in evaluation.records()]
    flips = [{"models": one.names, **flip.record()} for one in all_pairs(evaluations) for flip in one.flips]
    disk.replace(folder / "eval.json", (json.dumps(document(settings, evaluations), indent=2) + "\n").encode())
    disk.replace(folder / "eval.md", markdown(settings, evaluations).encode())
    for name, records in (("eval_answers.jsonl", answers), ("eval_flips.jsonl", flips)):
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        disk.replace(folder / name, text.encode())


# ------------------------------------------------------------------------------------------------------- side by side


def rows(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """Return the table: a row for each number, a column for each model."""
    found = document({}, evaluations)
    return numbers(found["evaluations"], found["comparisons"])


def title(evaluations: Sequence[Evaluation]) -> str:
    text = f"Greedy answers to {evaluations[0].asked}"
    if (sampled := evaluations[0].sampled) is None:
        return f"{text}, with 95 % intervals"
    draws = sampled.draws
    times = f", {draws.trials} times" if draws.trials > 1 else ""
    return f"{text}; {draws.samples} sampled of each at temperature {draws.temperature:g}{times}"


def verdicts(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a sentence for each pair of models. The verdict on a run is `trainer/watch/verdict.py`'s."""
    return [f"{comparison.names}: {comparison.sentence}" for comparison in all_pairs(evaluations)]


def flip_lines(comparison: Comparison) -> Iterator[str]:
    """Yield some of the problems that flipped, in both directions."""
    for direction, label in (("gained", "now right"), ("lost", "no longer right")):
        flips = [flip for flip in comparison.flips if flip.direction == direction]
        more = f", {SHOWN_FLIPS} of them" if len(flips) > SHOWN_FLIPS else ""
        if flips:
            yield f"{comparison.names}, {label}: {len(flips)}{more}"
        yield from (f"  {_flip_line(flip, comparison)}" for flip in flips[:SHOWN_FLIPS])


def _flip_line(flip: Flip, comparison: Comparison) -> str:
    question = shorten(flip.before.question, 70, placeholder=" ...")
    answers = [
        f"{model.name} {'no answer' if outcome.score.strict is None else shorten(outcome.score.strict, 30)}"
        for model, outcome in ((comparison.before, flip.before), (comparison.after, flip.after))
    ]
    return f"{flip.before.problem_id}: {question} (gold {flip.before.gold}; {', '.join(answers)})"


# ------------------------------------------------------------------------------------------------------------ eval.md

LEGEND = """`correct`: the right answer in the requested format. `in any format`: the right answer in any format.
`wrong answer`: the requested format with another answer. `no answer found`: nothing in the requested format.
Brackets contain 95 % intervals in percent. `gained/lost`: problems that flipped against the first model.
"""


def markdown(settings: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> str:
    names = [evaluation.name for evaluation in evaluations]
    head = [["", *names], ["---"] + ["---:"] * len(names)]
    lines = [*head, *rows(evaluations)]
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines]
    sentences = [f"- {line}" for line in verdicts(evaluations)]
    flips = [line for comparison in all_pairs(evaluations)[:1] for line in flip_lines(comparison)]
    facts = ", ".join(f"{name} `{value}`" for name, value in settings.items() if value is not None)
    parts = [f"# {title(evaluations)}", facts, "\n".join(table), LEGEND.rstrip()]
    parts += ["\n".join(sentences)] if sentences else []
    parts += ["```\n" + "\n".join(flips).replace("```", "'''") + "\n```"] if flips else []
    return "\n\n".join(parts) + "\n"


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """Return the models side by side; gained and lost problems are counted against the first."""
    table = Table(title=title(evaluations), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for evaluation in evaluations:
        table.add_column(evaluation.name, justify="right", no_wrap=True)
    for row in rows(evaluations):
        table.add_row(*row)
    return table
