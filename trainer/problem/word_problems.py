"""The tasks that are made up here: word problems of one to three steps in GSM8K's own format, and sums.

A template is a story and the calculation that solves it:

    bags    {who} buys {a} bags of {b} {item} and gives {c} away. How many {item} are left?
            a * b = x; x - c = y

The numbers of a problem are drawn again until every result of the calculation is a whole number from 1 to 99:

    Amy buys 3 bags of 4 apples and gives 5 away. How many apples are left?
    3 * 4 = 12
    12 - 5 = 7
    #### 7

A checksum of the question decides whether it is a training or a test question, so the two never meet.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import add, floordiv, mul, sub

from trainer.config.settings import TaskSettings
from trainer.problem.task import Task
from trainer.records import Problem

_TEMPLATES = """
find    {who} has {m} {item} and finds {k} more. How many {item} does {who} have now?
        m + k = x
lose    {who} had {m} {item} and lost {n}. How many {item} are left?
        m - n = x
boxes   There are {a} boxes with {k} {item} in each box. How many {item} are there?
        a * k = x
share   {who} shares {m} {item} equally among {a} friends. How many {item} does each friend get?
        m / a = x
compare {who} has {m} {item} and {other} has {n}. How many more {item} does {who} have than {other}?
        m - n = x
bags    {who} buys {a} bags of {b} {item} and gives {c} away. How many {item} are left?
        a * b = x; x - c = y
market  {who} had {m} {item}, sold {n} and then bought {k} more. How many {item} does {who} have now?
        m - n = x; x + k = y
change  A toy costs {a} dollars. {who} buys {b} toys and pays with {m} dollars. How many dollars does {who} get back?
        a * b = x; m - x = y
more    {who} has {k} {item} and {other} has {a} more than {who}. How many {item} do they have together?
        k + a = x; k + x = y
fewer   {who} has {k} {item} and {other} has {a} fewer than {who}. How many {item} do they have together?
        k - a = x; k + x = y
times   {who} has {a} {item} and {other} has {b} times as many. How many {item} do they have together?
        a * b = x; a + x = y
teams   {who} puts {k} girls and {m} boys into {a} equal teams. How many children are in each team?
        k + m = x; x / a = y
book    A book has {m} pages. {who} reads {a} pages a day for {b} days. How many pages are left?
        a * b = x; m - x = y
savings {who} has {k} dollars and saves {a} dollars a week for {b} weeks. How many dollars does {who} have then?
        a * b = x; k + x = y
rest    {who} had {m} {item}, kept {a} and shared the rest equally among {b} friends. How many did each friend get?
        m - a = x; x / b = y
hall    {who} sets up {a} rows of {k} chairs. {m} chairs are taken. How many chairs are free?
        a * k = x; x - m = y
shop    {who} buys {a} pens for {b} dollars each and {c} books for {d} dollars each. How many dollars is that?
        a * b = x; c * d = y; x + y = z
garden  {who} plants {a} rows of {b} roses and {c} rows of {d} tulips. How many more roses than tulips are there?
        a * b = x; c * d = y; x - y = z
bus     A bus has {m} riders. First {a} get off, then {k} get on, then {b} get off. How many riders are left?
        m - a = x; x + k = y; y - b = z
wage    {who} works {a} hours a day for {b} days at {c} dollars an hour and spends {k} dollars. How much is left?
        a * b = x; c * x = y; y - k = z
bakery  {who} bakes {a} trays of {b} rolls, eats {c} and packs the rest in boxes of {d}. How many boxes is that?
        a * b = x; x - c = y; y / d = z
cards   {who} has {a} packs of {b} cards and {k} single cards, and loses {c} cards. How many cards are left?
        a * b = x; x + k = y; y - c = z
fair    {who} earns {m} dollars and {other} earns {n}. They spend {k} and halve the rest. How much does each get?
        m + n = x; x - k = y; y / 2 = z
legs    {who} has {k} hens with 2 legs and {a} cows with 4 legs each. How many legs do the animals have?
        k * 2 = x; a * 4 = y; x + y = z
"""
TEMPLATES = {name: texts for name, *texts in re.findall(r"^(\w+) +(.*)\n +(.*)$", _TEMPLATES, re.MULTILINE)}
RANGES = {"a": (2, 9), "b": (2, 9), "c": (2, 9), "d": (2, 9), "k": (10, 30), "m": (20, 90), "n": (20, 90)}
NAMES = ["Amy", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah"]
ITEMS = ["apples", "balls", "beads", "cards", "coins", "eggs", "kites", "pears", "pens", "plums", "shells", "stamps"]
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}
LARGEST = 99
TEST_SHARE = 10  # one question in ten is a test question


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a calculation in letters: `a * b = x`."""

    left: str
    sign: str
    right: str
    result: str

    def solve(self, values: dict[str, int]) -> bool:
        """Add the result to the values. Return False if it is not a whole number from 1 to LARGEST."""
        left, right = values[self.left], values[self.right]
        values[self.result] = result = OPERATORS[self.sign](left, right)
        return 0 < result <= LARGEST and (self.sign != "/" or left % right == 0)

    def show(self, values: dict[str, int]) -> str:
        return f"{values[self.left]} {self.sign} {values[self.right]} = {values[self.result]}"


@dataclass(frozen=True, slots=True)
class Template:
    name: str
    story: str
    lines: tuple[Line, ...]
    letters: tuple[str, ...]  # of the numbers that are drawn; the other letters are results

    @classmethod
    def parse(cls, name: str, story: str, working: str) -> Template:
        lines = tuple(Line(*line.replace("=", "").split()) for line in working.split(";"))
        return cls(name, story, lines, tuple(letter for letter in RANGES if letter in working))

    def draw(self, rng: random.Random) -> tuple[str, str, str]:
        values: dict[str, int] = {}
        while not values or not all(line.solve(values) for line in self.lines):
            values = {"2": 2, "4": 4}
            for letter in self.letters:
                low, high = RANGES[letter]
                values[letter] = low + int(rng.random() * (high - low + 1))
        who, other = rng.sample(NAMES, 2)
        question = self.story.format(who=who, other=other, item=rng.choice(ITEMS), **values)
        answer = str(values[self.lines[-1].result])
        return question, "\n".join([*(line.show(values) for line in self.lines), f"#### {answer}"]), answer


@dataclass(frozen=True)
class NanoTask(Task):
    """The embedded task. The problems depend on the seed alone, so they are the same on every machine.

    >>> task = NanoTask()
    >>> task.train()[0].id, len(task.test())
    ('nano/train/0', 1024)
    """

    train_size: int = 20_000
    test_size: int = 1_024
    seed: int = 0
    name = "nano"
    prompt_style = "chat"
    answer_style = "gsm8k"

    def train(self) -> list[Problem]:
        return self._split("train", self.train_size)

    def test(self) -> list[Problem]:
        return self._split("test", self.test_size)

    def _split(self, split: str, size: int) -> list[Problem]:
        made, draws = self._made()
        while len(made[split]) < size:
            template, question, solution, answer = next(draws)
            name = "test" if is_test(question) else "train"
            problems, extra = made[name], {"steps": len(template.lines), "template": template.name}
            problems.append(Problem(f"nano/{name}/{len(problems)}", question, answer, solution, extra))
        return made[split][:size]

    @cache  # noqa: B019  a command makes one task, and asks it several times
    def _made(self) -> tuple[dict[str, list[Problem]], Iterator[tuple[Template, str, str, str]]]:
        """Return the problems of both splits that are made so far, and what makes more."""
        return {"train": [], "test": []}, self._draws()

    def _draws(self) -> Iterator[tuple[Template, str, str, str]]:
        """Draw from the templates in turn, and every question once."""
        rng, seen = random.Random(self.seed), set[str]()
        templates = [Template.parse(name, *text) for name, text in TEMPLATES.items()]
        while True:
            for template in templates:
                question, solution, answer = template.draw(rng)
                if question not in seen:
                    seen.add(question)
                    yield template, question, solution, answer


def nano(settings: TaskSettings) -> NanoTask:
    return NanoTask()


class AdditionTask(Task):
    """Sums of two numbers of two digits, for a small pretrained model: it half knows them, and can learn the rest."""

    name = "addition"
    prompt_style = "chat"
    answer_style = "alone"

    def __init__(self, settings: TaskSettings) -> None: ...

    def train(self) -> list[Problem]:
        return [problem for problem in self._problems() if not is_test(problem.question)]

    def test(self) -> list[Problem]:
        return [problem for problem in self._problems() if is_test(problem.question)]

    def _problems(self) -> Iterator[Problem]:
        for a, b in product(range(10, 100), repeat=2):
            question = f"What is {a} + {b}? Reply with the number only."
            yield Problem(f"addition/{a}+{b}", question, str(a + b), str(a + b))


def is_test(question: str) -> bool:
    return zlib.crc32(question.encode()) % TEST_SHARE == 0
