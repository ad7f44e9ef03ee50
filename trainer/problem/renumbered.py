"""GSM8K with new numbers in its held-out problems, so that memorised answers do not help.

The annotations of a GSM8K solution say what it calculates: `She sold 48/2 = <<48/2=24>>24 clips`. A problem is
renumbered by replacing numbers and calculating its solution again. Equal numbers get the same new number, so the new
answer is right whichever of them an operand stood for. A number keeps its value

- in a percentage, a fraction, a date, a time, a name ("Room 12") or a compound ("3-foot"),
- before a word that fixes its number by nature or convention ("4 legs", "5 days a week", "a $20 bill"),
- if a word may stand for it ("twice" for 2, "week" for 7, "dozen" for 12),
- if it is small and the solution uses it more often than the question has it: it may then be two numbers.

A problem is left out if its solution has a number that is not in the question, not calculated before, and not implied
by a word; if a number is in its question more often than in the calculation, or is also a result; if its annotations
do not lead to its answer; or if no draw preserves the order of the numbers and of the results, keeps every result
positive and of a similar size, and keeps whole results whole.
"""

import operator
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import combinations_with_replacement, pairwise
from math import ceil, floor
from pathlib import Path

from trainer.answers.arithmetic import UNCALCULATED, worth
from trainer.answers.number_words import SPOKEN
from trainer.config.read_yaml import read_yaml
from trainer.errors import DataError
from trainer.problem.published import Gsm8kTask
from trainer.problem.sources import Record
from trainer.records import Problem

Numbers = Mapping[Fraction, Fraction]  # old number -> new number

DRAWS = 100  # attempts at new numbers before a problem is left out
NEAR, SIMILAR = Fraction(2), Fraction(5, 2)  # the largest factors between old and new numbers, and old and new results
SMALL = 12  # a problem may easily have a number up to this for two reasons
NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+", re.ASCII)
GLUED = re.compile(rf"(?<=[A-Za-z])(?:{NUMBER.pattern})|(?:{NUMBER.pattern})(?=[A-Za-z%]|\s%)")  # 2x, x2, 60%
ANNOTATION = re.compile(r"<<([^=<>]*)=([^=<>]*)>>")
_SIGN = re.compile(r"[^\d+*/() \t-]|\*\*|//|(?:^|[-+*/(])[ \t]*[-+]")  # anything but + - * / between two numbers


class RenumberedTask(Gsm8kTask):
    name = "gsm8k-renumbered"

    def test(self) -> list[Problem]:
        if not self._new:
            reason = "no held-out problem can be renumbered, which needs annotations like those of GSM8K, <<48/2=24>>"
            raise DataError(self.sources["test"] or self.sources["train"], reason, "Write task.name=gsm8k")
        return self._new

    def notes(self) -> list[str]:
        left_out = len(self.held_out()) - len(self._new)
        return [*super().notes(), f"held-out problems left out because they cannot be renumbered: {left_out}"]

    @cached_property
    def _new(self) -> list[Problem]:
        return [new for problem in self.held_out() if (new := self._renumbered(problem))]

    def _renumbered(self, problem: Problem) -> Problem | None:
        """Return the problem with new numbers and the id of its origin, or None if it cannot be renumbered."""
        origin = problem.id.replace(self.name, Gsm8kTask.name, 1)
        question, answer = self.settings.question or "question", self.settings.answer or "answer"
        try:
            template = read(problem.question, problem.extra[answer])
            numbers = template.drawn(random.Random(f"{self.settings.seed}/{origin}"))
            new = {
                question: written(problem.question, numbers, template.places),
                answer: written(problem.extra[answer], numbers),
            }
        except Unsuitable:
            return None
        return self.problem(problem.id, Record(origin, {**problem.extra, **new, "origin": origin}))


class Unsuitable(Exception):
    """The problem cannot be renumbered, or not with these numbers."""


@dataclass(frozen=True, slots=True)
class Step:
    """An annotation: an expression of numbers, + - * / and brackets, and the result that the solution gives."""

    expression: str
    operands: Sequence[Fraction]
    result: Fraction

    def calculated(self, numbers: Numbers) -> Fraction:
        """Return the value of the expression with new numbers. Raise Unsuitable if it has none."""
        text = NUMBER.sub(lambda found: f"({numbers[_value(found[0])]})", self.expression)
        if _SIGN.search(text):
            raise Unsuitable("an expression cannot be read")
        try:
            return Fraction(worth(text))
        except UNCALCULATED:
            raise Unsuitable("an expression cannot be calculated") from None


def steps_of(solution: str) -> list[Step]:
    """Return the annotations of a solution. Raise Unsuitable if one is wrong, or the last is not the answer."""
    pairs = ANNOTATION.findall(solution)
    gold = solution.rpartition("####")[2].strip()
    if solution.count("<<") != len(pairs) or not all(map(NUMBER.fullmatch, [gold, *(result for _, result in pairs)])):
        raise Unsuitable("an annotation or the answer cannot be read")
    steps = [Step(expression, [*_values(expression)], _value(result)) for expression, result in pairs]
    unchanged = {value: value for value in _values(solution)}
    are_right = all(step.calculated(unchanged) == step.result for step in steps)
    if not steps or not are_right or steps[-1].result != _value(gold):
        raise Unsuitable("the annotations do not lead to the answer")
    return steps


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _values(text: str) -> Iterator[Fraction]:
    return map(_value, NUMBER.findall(text))


_WORDS = read_yaml(Path(__file__).with_suffix(".yaml").read_bytes())
_ANY_OF = {kind: "|".join(_WORDS[kind].split()) for kind in ("before", "after", "dependent")}
_NAMED = re.compile(rf"(?:[\w/:.#^-]|\b(?:{_ANY_OF['before']}|in the) )\Z", re.IGNORECASE)
_MEANT = re.compile(  # what stands after a number that cannot be another one
    r"(?:[\w/:%°¢^-]|,\d|\s*(?:percent|%|[ap]\.?m\b|o'clock|(?:and )?\d+/\d|and (?:a|one) (?:half|quarter|third)|"
    rf"years? (?:old|of age)|(?:-|dollar )?bills?\b|cents?\b|coins?\b|grade|star\b|(?:{_ANY_OF['after']})\b))",
    re.IGNORECASE,
)
_DEPENDENT = re.compile(rf"\b(?:{_ANY_OF['dependent']})", re.IGNORECASE)


def read(question: str, solution: str) -> "Template":
    """Find which numbers of a problem may be new. Raise Unsuitable if none may be, or if that cannot be known."""
    if _DEPENDENT.search(question):
        raise Unsuitable("a word depends on the numbers")
    steps = steps_of(solution)
    found = [(match.start(), _value(match[0]), _stays(question, match)) for match in NUMBER.finditer(question)]
    used = Counter(operand for step in steps for operand in step.operands)
    calculated = Counter(step.result for step in steps)
    # the numbers that are only ever used as results; every result but the last is used later
    results = {value for value, times in calculated.items() if used[value] <= times - (value == steps[-1].result)}
    text = ANNOTATION.sub("", solution)
    fixed = {value for _, value, stays in found if stays} | (_meant(question, text) - results)
    counts = Counter(value for _, value, _ in found if value not in fixed)
    free = frozenset(value for value in counts if value > SMALL or used[value] <= counts[value])
    if not free:
        raise Unsuitable("no number may be new")
    if any(used[value] < times for value, times in counts.items()):
        raise Unsuitable("the question has a number more often than the calculation")
    if calculated.keys() & counts.keys() or not fixed.issuperset(map(_value, GLUED.findall(text))):
        raise Unsuitable("a number may be two")
    fixed |= counts.keys() - free
    in_solution = {*_values(solution)}
    _must_be_known(in_solution, steps, free, fixed)
    asked = sorted({value for _, value, _ in found})
    kept = [value for value in fixed - free if value in asked or value in in_solution]
    return Template(steps, free, kept, asked, [place for place, value, _ in found if value in free])


def _must_be_known(used: set[Fraction], steps: Sequence[Step], free: Iterable[Fraction], fixed: set[Fraction]) -> None:
    """Raise Unsuitable if the solution uses a number that is not known yet, or changes one that has to stay."""
    known, changed = {*fixed, *free}, {*free}
    for step in steps:
        if not known.issuperset(step.operands):
            raise Unsuitable("a number comes from nowhere")
        if changed.intersection(step.operands):
            changed.add(step.result)
        known.add(step.result)
    if not known.issuperset(used):
        raise Unsuitable("a number comes from nowhere")
    if changed & fixed or steps[-1].result not in changed:
        raise Unsuitable("a result cannot be new")


def _stays(question: str, match: re.Match[str]) -> bool:
    """Return True if a number of a question keeps its value because of what stands around it."""
    before, after = question[: match.start()], question[match.end() :].lower()
    if _value(match[0]) < 2 or _NAMED.search(before) or _MEANT.match(after):
        return True
    if re.fullmatch(r"(?:1[5-9]|20)\d\d", match[0]) and not before.endswith("$"):
        return True  # a year
    noun = re.match(r"\s*(?:more |extra |full |straight |work |working |school |of )?([a-z]+)", after)
    limits = _WORDS["calendar"].get(noun[1].removesuffix("s"), "") if noun else ""
    return bool(limits and re.search(rf"\b(?:{limits})\b", question.lower()))


def _meant(question: str, solution: str) -> set[Fraction]:
    """Return the numbers that may be meant by words of the problem, or by percentages and fractions of its question."""
    words = {*re.findall("[a-z]+", f"{question} {solution}".lower())}
    words |= {word.removesuffix("s") for word in words}
    meant = {Fraction(1), *(Fraction(value) for word, value in SPOKEN.items() if word in words)}
    implied = " ".join(values for values, names in _WORDS["implied"].items() if words & {*names.split()})
    meant |= {Fraction(value) for value in implied.split()}
    for percent in map(_value, re.findall(rf"({NUMBER.pattern})(?=%|\s*percent)", question)):
        of_hundred = {Fraction(100), percent, 100 - percent, 100 + percent}
        meant |= of_hundred | {value / 100 for value in of_hundred}
    for top, bottom in re.findall(r"(\d+)/([1-9]\d*)", question):
        share = Fraction(int(top), int(bottom))
        meant |= {Fraction(top), Fraction(bottom), Fraction(bottom) - Fraction(top), share, 1 - share, 1 + share}
    return meant


@dataclass(frozen=True, slots=True)
class Template:
    """A problem as the numbers that may be new, those that stay, and the calculation of its answer."""

    steps: Sequence[Step]
    free: Collection[Fraction]
    kept: Collection[Fraction]
    asked: Sequence[Fraction]  # the numbers of the question, in ascending order
    places: Collection[int]  # the positions in the question at which free numbers begin

    def drawn(self, rng: random.Random) -> Numbers:
        """Return new numbers. A large number that is the sum or product of two others stays their sum or product."""
        agree = [
            (a, b, combined)
            for a, b in combinations_with_replacement(self.asked, 2)
            for combined in (operator.add, operator.mul)
            if combined(a, b) in self.asked and combined(a, b) > SMALL
        ]
        for _ in range(DRAWS):
            try:
                numbers = self._ordered(rng)
                if all(numbers[combined(a, b)] == combined(numbers[a], numbers[b]) for a, b, combined in agree):
                    return self._calculated(numbers)
            except Unsuitable:
                continue
        raise Unsuitable("no draw keeps what has to be kept")

    def _ordered(self, rng: random.Random) -> dict[Fraction, Fraction]:
        """Draw the numbers of the question in ascending order, each one larger than the last."""
        numbers = {value: value for value in self.kept}
        low = Fraction(0)
        for index, value in enumerate(self.asked):
            if value in self.free:
                high = next((other for other in self.asked[index:] if other not in self.free), None)
                numbers[value] = _drawn(value, low, high, rng)
            low = numbers[value]
        return numbers

    def _calculated(self, numbers: dict[Fraction, Fraction]) -> Numbers:
        """Add the new results. Raise Unsuitable if they are too unlike the old ones, or if the answer stays."""
        for step in self.steps:
            old, new = step.result, step.calculated(numbers)
            is_alike = new > 0 and not old.denominator % new.denominator and 1 / SIMILAR <= new / old <= SIMILAR
            if numbers.setdefault(old, new) != new or not is_alike:
                raise Unsuitable("a result is another kind of number")
        results = sorted({step.result for step in self.steps})
        if any(numbers[low] >= numbers[high] for low, high in pairwise(results)):
            raise Unsuitable("the results are in another order")
        if numbers[self.steps[-1].result] == self.steps[-1].result:
            raise Unsuitable("the answer is the old one")
        return numbers


def _drawn(value: Fraction, above: Fraction, below: Fraction | None, rng: random.Random) -> Fraction:
    """Draw another number between two bounds, with the same number of digits, as round, and within a factor of two."""
    step, digits = _grain(value), len(str(int(value)))
    low = ceil(max(value / NEAR, above + step, Fraction(10 ** (digits - 1)), Fraction(2)) / step)
    high = floor(min(value * NEAR, 10**digits - step, *([] if below is None else [below - step])) / step)
    old = value / step
    count = high - low + 1 - (low <= old <= high)
    if count < 1:
        raise Unsuitable("no room between its neighbours")
    drawn = low + rng.randrange(count)
    new = step * (drawn + (low <= old <= drawn))  # skips the old number
    if (new.denominator == 1) != (value.denominator == 1):
        raise Unsuitable("a number of another kind")
    return new


def _grain(value: Fraction) -> Fraction:
    """Return the step in which a number varies: 50 for 1,200, 5 for 20, 1 for 7, a half for 2.5, a cent for 1.99."""
    if value.denominator == 1:
        zeros = len(str(value)) - len(str(value).rstrip("0"))
        return Fraction(5 * 10 ** (zeros - 1)) if zeros else Fraction(1)
    return next(Fraction(1, parts) for parts in (2, 4, 10, 100, 10**9) if parts % value.denominator == 0)


def written(text: str, numbers: Numbers, places: Collection[int] | None = None) -> str:
    """Return a text with new numbers in all places, or only in those that are given."""

    def new(match: re.Match[str]) -> str:
        old = _value(match[0])
        value = numbers.get(old, old)
        if value == old or (places is not None and match.start() not in places):
            return match[0]
        decimals = len(match[0].partition(".")[2])
        if (value * 10**decimals).denominator > 1:
            raise Unsuitable("a number with more decimals")
        return f"{Decimal(value.numerator) / value.denominator:{',' if ',' in match[0] else ''}.{decimals}f}"

    return NUMBER.sub(new, text)
