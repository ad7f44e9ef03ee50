"""The tasks whose problems are generated here: word problems of one to three steps in GSM8K's format, and sums.

A template of word_problems.txt is a story and the calculation that solves it:

    bags    {who} buys {a} bags of {b} {item} and gives {c} away. How many {item} are left?
            a * b = x; x - c = y

The numbers of a problem are drawn again until every result of the calculation is a whole number from 1 to 99:

    Amy buys 3 bags of 4 apples and gives 5 away. How many apples are left?
    3 * 4 = 12
    12 - 5 = 7
    #### 7

A checksum of the question decides whether it is a training or a test question, so the two never meet.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import add, floordiv, mul, sub
from pathlib import Path
from typing import Any

from trainer.config.settings import TaskSettings
from trainer.problem.task import Task
from trainer.records import Problem

_TEMPLATES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
TEMPLATES = {name: texts for name, *texts in re.findall(r"^(\w+) +(.*)\n +(.*)$", _TEMPLATES, re.MULTILINE)}
RANGES = {"a": (2, 9), "b": (2, 9), "c": (2, 9), "d": (2, 9), "k": (10, 30), "m": (20, 90), "n": (20, 90)}
NAMES = ["Amy", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah"]
ITEMS = ["apples", "balls", "beads", "cards", "coins", "eggs", "kites", "pears", "pens", "plums", "shells", "stamps"]
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv}
Drawn = tuple[str, str, str, dict[str, Any]]  # the question, its answer, its worked solution, and what it is made of
LARGEST = 99
TEST_SHARE = 10  # one question in ten is a test question


def drawn(story: str, working: str, rng: random.Random) -> tuple[str, str, str]:
    """Return a question with new numbers, names and things, its answer, and its worked solution."""
    lines, ranges = _parsed(working)
    values: dict[str, int] = {}
    while not values or not all(_solve(values, *line) for line in lines):
        values = {letter: low + int(rng.random() * (high - low + 1)) for letter, (low, high) in ranges.items()}
        values |= {"2": 2, "4": 4}
    who, other = rng.sample(NAMES, 2)
    question = story.format(who=who, other=other, item=rng.choice(ITEMS), **values)
    shown = [f"{values[left]} {sign} {values[right]} = {values[result]}" for left, sign, right, result in lines]
    answer = str(values[lines[-1][-1]])
    return question, answer, "\n".join([*shown, f"#### {answer}"])


@cache
def _parsed(working: str) -> tuple[list[list[str]], dict[str, tuple[int, int]]]:
    """Return the lines of a calculation, such as ["a", "*", "b", "x"], and the ranges of the numbers to draw for it."""
    lines = [line.replace("=", "").split() for line in working.split(";")]
    return lines, {letter: ends for letter, ends in RANGES.items() if letter in working}


def _solve(values: dict[str, int], left: str, sign: str, right: str, result: str) -> bool:
    """Add the result of a line to the values. Return False if it is not a whole number from 1 to LARGEST."""
    values[result] = value = OPERATORS[sign](values[left], values[right])
    return 0 < value <= LARGEST and (sign != "/" or values[left] % values[right] == 0)


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
        splits, draws = self._generated()
        while len(splits[split]) < size:
            question, gold, solution, made_of = next(draws)
            name = "test" if is_test(question) else "train"
            splits[name].append(Problem(f"nano/{name}/{len(splits[name])}", question, gold, solution, made_of))
        return splits[split][:size]

    @cache  # noqa: B019  a command makes one task and reads its problems several times
    def _generated(self) -> tuple[dict[str, list[Problem]], Iterator[Drawn]]:
        """Return the problems generated so far for each split, and the iterator that generates more."""
        return {"train": [], "test": []}, self._draws()

    def _draws(self) -> Iterator[Drawn]:
        """Yield problems from each template in turn, every question once."""
        rng, seen = random.Random(self.seed), set[str]()
        while True:
            for name, (story, working) in TEMPLATES.items():
                question, answer, solution = drawn(story, working, rng)
                if question not in seen:
                    seen.add(question)
                    yield question, answer, solution, {"steps": working.count("="), "template": name}


def nano(settings: TaskSettings) -> NanoTask:
    return NanoTask()


class AdditionTask(Task):
    """Sums of two two-digit numbers, for a small pretrained model, which solves some of them and can learn the rest."""

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
