"""GSM8K with new numbers in its held-out problems, which a model that has memorised the old ones does not know.

A solution of GSM8K says what it calculates: `She sold 48/2 = <<48/2=24>>24 clips`. A problem is renumbered by replacing
numbers, the same one everywhere by the same new one, and by calculating its solution again. So the new answer is right
whichever of two equal numbers an operand stood for. A number keeps its value

- in a percentage, a fraction, a date, a time, a name ("Room 12") or a compound ("3-foot"),
- before a word that has its number by nature or convention ("4 legs", "5 days a week", "a $20 bill"),
- if a word may mean it ("twice" is 2, a week 7, a dozen 12),
- if it is small and the solution uses it more often than the question says it: it may then be two numbers.

A problem is left out if its solution has a number that is neither in the question, nor calculated before, nor meant by
a word; if a number is in its question more often than in the calculation, or is a result as well; if its annotations do
not lead to its answer; or if no draw keeps the order of its numbers and of its results, and every result positive, of a
similar size, and whole where it was whole.
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
from trainer.answers.words import SPOKEN
from trainer.config.read_yaml import read_yaml
from trainer.errors import DataError
from trainer.problem.published import Gsm8kTask
from trainer.problem.sources import Record
from trainer.records import Problem

Numbers = Mapping[Fraction, Fraction]  # from each number of a problem to its new one

DRAWS = 100  # of new numbers, before a problem is left out
NEAR, SIMILAR = Fraction(2), Fraction(5, 2)  # the largest factors between the old and the new number, or result
SMALL = 12  # a number up to here is easily in a problem for two reasons
NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+", re.ASCII)
GLUED = re.compile(rf"(?<=[A-Za-z])(?:{NUMBER.pattern})|(?:{NUMBER.pattern})(?=[A-Za-z%]|\s%)")  # 2x, x2, 60%
ANNOTATION = re.compile(r"<<([^=<>]*)=([^=<>]*)>>")
_SIGN = re.compile(r"[^\d+*/() \t-]|\*\*|//|(?:^|[-+*/(])[ \t]*[-+]")  # other signs than + - * / between two numbers


class RenumberedTask(Gsm8kTask):
    name = "gsm8k-renumbered"

    def test(self) -> list[Problem]:
        if not self._new:
            reason = "no held-out problem can be renumbered: that takes annotations like those of GSM8K, <<48/2=24>>"
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
            asked = written(problem.question, numbers, template.places)
            solution = written(problem.extra[answer], numbers)
        except Unsuitable:
            return None
        values = {**problem.extra, question: asked, answer: solution, "origin": origin}
        return self.problem(problem.id, Record(origin, values))


class Unsuitable(Exception):
    """The problem cannot be renumbered, or not in this way."""


@dataclass(frozen=True, slots=True)
class Step:
    """An annotation: an expression of numbers, + - * / and brackets, and the result that the solution gives."""

    expression: str
    operands: Sequence[Fraction]
    result: Fraction

    def calculated(self, numbers: Numbers) -> Fraction:
        """Return the value of the expression with other numbers. Raise Unsuitable if it has none."""
        text = NUMBER.sub(lambda found: f"({numbers[_value(found[0])]})", self.expression)
        if _SIGN.search(text):
            raise Unsuitable("an expression cannot be read")
        try:
            return Fraction(worth(text))
        except UNCALCULATED:
            raise Unsuitable("an expression cannot be calculated") from None


def steps_of(solution: str) -> list[Step]:
    """Return the annotations of a solution. Raise Unsuitable if one is wrong, or the last is not the answer."""
    found = ANNOTATION.findall(solution)
    gold = solution.rpartition("####")[2].strip()
    if solution.count("<<") != len(found) or not all(map(NUMBER.fullmatch, [gold, *(result for _, result in found)])):
        raise Unsuitable("an annotation or the answer cannot be read")
    steps = [Step(expression, [*_values(expression)], _value(result)) for expression, result in found]
    same = {value: value for value in _values(solution)}
    are_right = all(one.calculated(same) == one.result for one in steps)
    if not steps or not are_right or steps[-1].result != _value(gold):
        raise Unsuitable("the annotations do not lead to the answer")
    return steps


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _values(text: str) -> Iterator[Fraction]:
    return map(_value, NUMBER.findall(text))


_NAMED = re.compile(  # what stands before a number of a name or a date
    r"(?:[\w/:.#^-]|\b(?:day|week|month|year|grade|level|room|chapter|page|team|group|class|step|phase|round|route|"
    r"highway|number|no\.|box|bus|store|shop|house|type|size|game|lot|part|section|lane|gate|stage|set|in the|"
    r"january|february|march|april|may|june|july|august|september|october|november|december) )\Z",
    re.IGNORECASE,
)
_MEANT = re.compile(  # what stands behind a number that is more than a number
    r"(?:[\w/:%°¢^-]|,\d|\s*(?:percent|%|[ap]\.?m\b|o'clock|(?:and )?\d+/\d|and (?:a|one) (?:half|quarter|third)|"
    r"years? (?:old|of age)|(?:-|dollar )?bills?\b|cents?\b|coins?\b|grade|star\b|"
    r"(?:legs?|wheels?|tires?|eyes?|ears?|wings?|arms?|hands?|sides?|strings?|fingers?|toes?|paws?|hooves|teeth|"
    r"tentacles|faces?|corners?|halves|quarters?|innings|periods?|suits?|parents|twins|letters|bedrooms|stories|"
    r"floors|weekdays)\b))",
    re.IGNORECASE,
)
_WORDS = read_yaml(Path(__file__).with_suffix(".yaml").read_bytes())
_DEPENDENT = re.compile(
    r"\b(?:hundred|thousand|million|billion|ratio|average|mean|remainder|prime|odd|digit)", re.IGNORECASE
)


def read(question: str, solution: str) -> "Template":
    """Find what may be new in a problem. Raise Unsuitable if that is nothing, or cannot be known."""
    if _DEPENDENT.search(question):
        raise Unsuitable("a word depends on the numbers")
    steps = steps_of(solution)
    found = [(match.start(), _value(match[0]), _stays(question, match)) for match in NUMBER.finditer(question)]
    used = Counter(operand for step in steps for operand in step.operands)
    calculated = Counter(step.result for step in steps)  # a result is used later, but for the last
    results = {value for value, times in calculated.items() if used[value] <= times - (value == steps[-1].result)}
    text = ANNOTATION.sub("", solution)
    fixed = {value for _, value, stays in found if stays} | (_meant(question, text) - results)
    said = Counter(value for _, value, _ in found if value not in fixed)
    free = frozenset(value for value in said if value > SMALL or used[value] <= said[value])
    if not free:
        raise Unsuitable("no number may be new")
    if any(used[value] < times for value, times in said.items()):
        raise Unsuitable("the question has a number more often than the calculation")
    if calculated.keys() & said.keys() or not fixed.issuperset(map(_value, GLUED.findall(text))):
        raise Unsuitable("a number may be two")
    _must_be_known({*_values(solution)}, steps, free, fixed | {*said} - free)
    asked = sorted({value for _, value, _ in found})
    kept = [value for value in (fixed | {*said}) - free if value in asked or value in {*_values(solution)}]
    return Template(steps, free, kept, asked, [place for place, value, _ in found if value in free])


def _must_be_known(used: set[Fraction], steps: Sequence[Step], free: Iterable[Fraction], fixed: set[Fraction]) -> None:
    """Raise Unsuitable if a number of the solution is not known where it is used, or should stay and cannot."""
    known, moving = {*fixed, *free}, {*free}
    for step in steps:
        if not known.issuperset(step.operands):
            raise Unsuitable("a number comes from nowhere")
        if moving.intersection(step.operands):
            moving.add(step.result)
        known.add(step.result)
    if not known.issuperset(used):
        raise Unsuitable("a number comes from nowhere")
    if moving & fixed or steps[-1].result not in moving:
        raise Unsuitable("a result cannot be new")


def _stays(question: str, found: re.Match[str]) -> bool:
    """Return True if a number of a question keeps its value because of what stands around it."""
    before, behind = question[: found.start()], question[found.end() :].lower()
    if _value(found[0]) < 2 or _NAMED.search(before) or _MEANT.match(behind):
        return True
    if re.fullmatch(r"(?:1[5-9]|20)\d\d", found[0]) and not before.endswith("$"):
        return True  # a year
    counted = re.match(r"\s*(?:more |extra |full |straight |work |working |school |of )?([a-z]+)", behind)
    limits = _WORDS["calendar"].get(counted[1].removesuffix("s"), "") if counted else ""
    return bool(limits and re.search(rf"\b(?:{limits})\b", question.lower()))


def _meant(question: str, solution: str) -> set[Fraction]:
    """Return the numbers that words, percentages and fractions of a question, or words of its solution, may mean."""
    words = {*re.findall("[a-z]+", f"{question} {solution}".lower())}
    words |= {word.removesuffix("s") for word in words}
    found = {Fraction(1), *(Fraction(value) for word, value in SPOKEN.items() if word in words)}
    implied = " ".join(values for values, named in _WORDS["implied"].items() if words & {*named.split()})
    found |= {Fraction(value) for value in implied.split()}
    for percent in (_value(text) for text in re.findall(rf"({NUMBER.pattern})(?=%|\s*percent)", question)):
        of_hundred = {Fraction(100), percent, 100 - percent, 100 + percent}
        found |= of_hundred | {value / 100 for value in of_hundred}
    for top, bottom in re.findall(r"(\d+)/([1-9]\d*)", question):
        share = Fraction(int(top), int(bottom))
        found |= {Fraction(top), Fraction(bottom), Fraction(bottom) - Fraction(top), share, 1 - share, 1 + share}
    return found


@dataclass(frozen=True, slots=True)
class Template:
    """A problem with what may be new in it, what stays, and how its answer is calculated."""

    steps: Sequence[Step]
    free: Collection[Fraction]
    kept: Collection[Fraction]
    asked: Sequence[Fraction]  # the numbers of the question, in order
    places: Collection[int]  # where in the question a free number begins

    def drawn(self, rng: random.Random) -> Numbers:
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
        """Draw the numbers of the question, each one larger than the one before."""
        numbers = {value: value for value in self.kept}
        low = Fraction(0)
        for index, value in enumerate(self.asked):
            if value in self.free:
                high = next((one for one in self.asked[index:] if one not in self.free), None)
                numbers[value] = _drawn(value, low, high, rng)
            low = numbers[value]
        return numbers

    def _calculated(self, numbers: dict[Fraction, Fraction]) -> Numbers:
        """Add the results. Raise Unsuitable if one of them is another kind of number than before."""
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
    """Draw another number between two: with as many digits, as round, and within a factor of two."""
    step, digits = _grain(value), len(str(int(value)))
    low = ceil(max(value / NEAR, above + step, Fraction(10 ** (digits - 1)), Fraction(2)) / step)
    high = floor(min(value * NEAR, 10**digits - step, *([] if below is None else [below - step])) / step)
    own = value / step
    count = high - low + 1 - (low <= own <= high)
    if count < 1:
        raise Unsuitable("no room between its neighbours")
    drawn = low + rng.randrange(count)
    new = step * (drawn + (low <= own <= drawn))
    if (new.denominator == 1) != (value.denominator == 1):
        raise Unsuitable("a number of another kind")
    return new


def _grain(value: Fraction) -> Fraction:
    """Return the steps in which a number varies: 50 for 1,200, 5 for 20, 1 for 7, a half for 2.5, a cent for 1.99."""
    if value.denominator == 1:
        zeros = len(str(value)) - len(str(value).rstrip("0"))
        return Fraction(5 * 10 ** (zeros - 1)) if zeros else Fraction(1)
    return next(Fraction(1, parts) for parts in (2, 4, 10, 100, 10**9) if parts % value.denominator == 0)


def written(text: str, numbers: Numbers, places: Collection[int] | None = None) -> str:
    """Write a text with new numbers, or only with those that begin at these places."""

    def new(found: re.Match[str]) -> str:
        old = _value(found[0])
        value = numbers.get(old, old)
        if value == old or (places is not None and found.start() not in places):
            return found[0]
        decimals = len(found[0].partition(".")[2])
        if (value * 10**decimals).denominator > 1:
            raise Unsuitable("a number with more decimals")
        return f"{Decimal(value.numerator) / value.denominator:{',' if ',' in found[0] else ''}.{decimals}f}"

    return NUMBER.sub(new, text)
