"""Describe the answers of a data set: their kinds, and the odd ones that somebody should look at."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from trainer.answers.number import has_comma, number
from trainer.config.resolve import overrides_of
from trainer.config.settings import TaskSettings
from trainer.errors import Finding
from trainer.problem.task import HELD_OUT, LEFT_OUT, DataTask, Task, make_task
from trainer.records import Problem
from trainer.stats import visible_gain, what_shows

WIDTH = 80
SHOWN = 10  # odd answers to print
EXAMPLES = 3  # examples of each kind
LONG = 60  # a text of more characters is hardly ever answered in the same words
NUMBERS = ("whole numbers", "decimals", "fractions", "numbers with units")
COUNTED = {"train": "training problems", "test": "held-out problems"}
# A kind is odd if its share of the answers is smaller than this.
RARE = 0.05
RARE_AND_SUSPECT = {"no answer": 0.5, "doubtful": 0.5}

_KINDS = {
    "no answer": r"[-?.…_/*–—!\s]+|#.+[!?]|\W*(?:n\W?a|none|null|nan|tbd|todo|unknown|idk|missing|empty|error|no answer"
    r"|not (?:known|given|available)|(?:see|siehe|s\.) ?(?:above|below|oben|unten|o\.|u\.)|keine ahnung)\W*",
    # a spreadsheet turns 3/4 and 3.5 into dates
    "dates": r"\d{1,2}[-. ]+(?:jan|feb|m[aär]r|apr|ma[iy]|jun|jul|aug|sep|o[ck]t|nov|de[cz])\w*\W*\d*"
    r"|\d{4}-\d\d-\d\d.*|\d{1,2}\.\d{1,2}\.(?:\d{4})?",
    "doubtful": r"(?:about|around|approx|roughly|circa|ca\.? |etwa|ungefähr|maybe|probably|at least|at most|[~≈<>]).*"
    r"|.*\?|\d\S* (?:or|oder) [-±]?\d.*|.*\d\s?[-–]\s?\d+\s*[^\W\d]*",
    "choices": r"\(?[A-J][).]?|yes|no|true|false|ja|nein",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE | re.DOTALL) for kind, pattern in _KINDS.items()}
_UNIT = re.compile(r"(?!(?<=\d)e[-+]?\d+$)[^\W\d_]|[%°$€£¥]", re.IGNORECASE)  # an exponent is none
_FOLDER = re.compile(r"(?<!\S)\S*/(?=[^/\s]+[:\[]\d)")


def kind_of(gold: str) -> str:
    value = number(gold)
    if len(gold) > LONG:
        return "long texts" if value is None else "fractions"
    for kind, pattern in _PATTERNS.items():
        if pattern.fullmatch(gold):
            return kind
    if value is None:
        return "decimal commas" if has_comma(gold) else "texts with digits" if re.search(r"\d", gold) else "texts"
    if "/" in gold or "\\" in gold:
        return "fractions"
    return "numbers with units" if _UNIT.search(gold) else "whole numbers" if value.denominator == 1 else "decimals"


def facts_of(task: Task, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the kinds of the gold answers, odd ones with their places, and what gain the held-out problems show."""
    kinds: dict[str, Counter[str]] = {}
    for gold, count in Counter(problem.gold for problem in problems if problem.gold).items():
        kinds.setdefault(kind_of(gold), Counter())[gold] = count
    sizes = Counter({kind: golds.total() for kind, golds in kinds.items()})
    shares = {kind: sizes[kind] / sizes.total() for kind in kinds}
    shares |= {kind: sum(shares.get(name, 0.0) for name in NUMBERS) for kind in kinds if kind in NUMBERS}
    rarest = dict.fromkeys([*RARE_AND_SUSPECT, *sorted(kinds, key=sizes.__getitem__)])
    odd = [kind for kind in rarest if shares.get(kind, 1.0) < RARE_AND_SUSPECT.get(kind, RARE)]
    first = {problem.gold: problem.where or problem.id for problem in reversed(problems)}
    parts = [part for part in task.parts if isinstance(part, DataTask)]
    return {
        "answers": {
            kind: {"count": count, "such_as": [gold for gold, _ in kinds[kind].most_common(EXAMPLES)]}
            for kind, count in sizes.most_common()
        },
        "odd": [
            {"where": first[gold], "gold": gold, "count": count, "kind": kind}
            for kind in odd
            for gold, count in kinds[kind].most_common()
        ],
        "visible_gain": visible_gain(len(task.test())) if kinds else None,
        "bad": sum(part.bad for part in parts),
        "left_out": [{"count": count, "first": first} for part in parts for count, first in part.left_out()],
    }


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe the data of a task, for a terminal of `WIDTH` columns."""
    data, notes = facts["data"], [note for note in facts["notes"] if not note.startswith(LEFT_OUT)]
    yield f"{facts['task']}: " + ", ".join(f"{facts[key]:,} {what}" for key, what in COUNTED.items() if key in facts)
    if data["answers"] and not any(note.startswith(HELD_OUT) for note in notes):
        yield f"{HELD_OUT}: {facts['test']:,} problems, {what_shows(facts['test'])}"
    yield from (wrapped(f"note: {note}") for note in notes)
    if data["left_out"]:
        yield f"{LEFT_OUT}: {_sum(data['left_out'])}; the first of each kind:"
    yield from (_cut(f"  {one['count']:>7,}  {one['first'].partition('; expected')[0]}") for one in data["left_out"])
    if data["answers"]:
        yield "answers:"
    for kind, found in data["answers"].items():
        yield _cut(f"  {found['count']:>7,}  {kind:<18}  {'; '.join(found['such_as'])}")
    if data["odd"]:
        yield f"answers unlike the others: {_sum(data['odd'])}; are they right?"
    for one in data["odd"][:SHOWN]:
        times = f" ({one['count']} times)" if one["count"] > 1 else ""
        yield _cut(f"  {_FOLDER.sub('', one['where']):<24}  {one['gold']!r:.30}{times}")
    if (more := len(data["odd"]) - SHOWN) > 0:
        yield f"  and {more} more; --json has them all"


def finding(settings: TaskSettings) -> Finding:
    """Return a finding about the user's own data: a note if nobody needs to look at the data."""
    task = make_task(settings.model_copy(update={"on_bad_record": "skip"}))
    training, held_out = task.train(), task.test()
    facts = facts_of(task, [*training, *held_out])
    left_out, odd = _sum(facts["left_out"]), _sum(facts["odd"])
    shows = f", {what_shows(len(held_out))}" if facts["answers"] else ""
    seen = f"{task.name}: {len(training):,} problems, and {len(held_out):,} held out{shows}"
    if not left_out and not odd:
        return Finding("note", "data", seen)
    seen += f"; {LEFT_OUT}: {left_out}, answers unlike the others: {odd}"
    changed = settings.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    named = overrides_of({f"task.{key}": value for key, value in changed.items()})
    remedy = f"See them: {shlex.join(['octet', 'task', 'show', settings.name, *named, '-n', '0'])}"
    return Finding("end" if facts["bad"] and settings.on_bad_record == "error" else "warn", "data", seen, remedy)


def wrapped(text: str) -> str:
    return "\n".join(wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def _sum(found: Sequence[Mapping[str, Any]]) -> int:
    return sum(one["count"] for one in found)


def _cut(text: str) -> str:
    text = _FOLDER.sub("", text.replace("\n", " "))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
