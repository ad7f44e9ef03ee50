"""Define what a task is, make the one that the settings name, and draw the problems of a step from it."""

import random
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from trainer.config.sections.task import BUILT_IN
from trainer.config.settings import TaskSettings
from trainer.errors import DataError, counted
from trainer.problem.sources import ENDINGS, HubSet, MissingColumn, Record, Source, is_unicode, locate
from trainer.records import Problem
from trainer.stats import what_shows

T = TypeVar("T")
LEFT_OUT = "records left out"
HELD_OUT = "held out"
ENOUGH = 60  # held-out problems; fewer show only large gains
LARGEST_SHARE = 0.3  # the largest share of a small data set that is held out by default
# The parts of a reason that differ between records with the same flaw.
_PARTICULARS = re.compile(r"\d+|'.*?'|(?<=the question of ).*(?= again)")


class Task(ABC):
    """A source of problems."""

    name: str
    prompt_style: str  # the default of prompt.style; see `prompts.py`
    answer_style: str  # how an answer is marked; see `trainer/answers/`
    decimal = "point"  # the decimal mark of its answers; see `task.decimal`
    symbolic = False  # the default of reward.symbolic: whether x(x+1) equals x^2+x
    read: Callable[[Problem, str], str | None] | None = None  # finds the answer in what a model wrote
    score: Callable[[Problem, str], float] | None = None  # the worth of an answer; an answer worth 1 is correct
    environment: Callable[[Problem], Any] | None = None  # makes what replies to the model; see `environment.py`
    functions: Callable[[str, float], Any] | None = None  # the same for TRL's ones (`foreign_environments.py`)
    columns: Iterable[str] = ()  # of the parts of a mixture, which do not all have the same ones
    in_words = False  # whether most gold answers are not numbers, which changes the example in the prompt

    @abstractmethod
    def train(self) -> Sequence[Problem]: ...

    @abstractmethod
    def test(self) -> Sequence[Problem]: ...

    @property
    def parts(self) -> "Sequence[Task]":
        """Return the tasks of a mixture, or the task itself."""
        return [self]

    def part(self, problem: Problem) -> "Task":
        return self

    def later(self, passes: int) -> "Task | None":
        """Return the task with the problems of a later pass, or None if every pass has the same problems."""
        return None

    def notes(self) -> list[str]:
        """Return remarks about the data, such as what was left out while it was read."""
        return []

    def hub_sets(self) -> list[HubSet]:
        sources = [source for part in self.parts if isinstance(part, DataTask) for source in part.sources.values()]
        return [source for source in sources if isinstance(source, HubSet)]


class DataTask(Task):
    """A task on a data set. A subclass turns a record into a problem and names where the data set is published."""

    prompt_style = answer_style = "gsm8k"
    published: ClassVar[Mapping[str, HubSet]] = {}

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self.skipped: list[str] = []  # the reason for each record that was left out
        self.bad = 0  # the number of these that would end a run with task.on_bad_record=error
        self.encodings = dict[str, None]()  # remarks about files that are not UTF-8, each once
        self.overlap = 0  # the number of training problems that the test set has too
        self._read: dict[str, list[Problem]] = {}

    @cached_property
    def sources(self) -> dict[str, Any]:
        return {split: locate(self.settings, split, self.published) for split in ("train", "test")}

    @abstractmethod
    def problem(self, name: str, record: Record) -> Problem:
        """Return the problem in a record. Raise DataError if the record cannot be used."""

    def train(self) -> list[Problem]:
        problems = self._problems("train") if self.sources["test"] else self._halves[0]
        held_out = {asked(problem) for problem in self.held_out()}
        kept = [problem for problem in problems if asked(problem) not in held_out]
        self.overlap = len(problems) - len(kept)
        return kept

    def test(self) -> list[Problem]:
        return self.held_out()

    def held_out(self) -> list[Problem]:
        """Return the held-out problems as they were read; `test` of a subclass may change them."""
        return self._problems("test") if self.sources["test"] else self._halves[1]

    def notes(self) -> list[str]:
        overlap = f"training problems left out because the test set asks them too: {self.overlap}"
        bad = [f"{LEFT_OUT}: {count}; the first: {first}" for count, first in self.left_out()]
        training, held_out = self.__dict__.get("_halves", ((), ()))  # of a test file, its author knows the size
        return [*self.encodings, *([overlap] if self.overlap else []), *few(held_out if training else ()), *bad]

    def left_out(self) -> list[tuple[int, str]]:
        """Return how many records were left out for each kind of reason, and the first reason of that kind."""
        firsts = {_PARTICULARS.sub("", reason): reason for reason in reversed(self.skipped)}
        counts = Counter(_PARTICULARS.sub("", reason) for reason in self.skipped)
        return [(count, firsts[kind]) for kind, count in counts.most_common()]

    @cached_property
    def _halves(self) -> tuple[list[Problem], list[Problem]]:
        """Split one set into training and held-out problems, which are the same for every seed of the run."""
        problems = self._problems("train")
        size, share = len(problems), self.settings.holdout
        count = max(1, round(max(size * 0.1, min(ENOUGH, size * LARGEST_SHARE)) if share is None else size * share))
        chosen = set(random.Random(0).sample(range(size), count))
        training = [problem for index, problem in enumerate(problems) if index not in chosen]
        held_out = [problem for index, problem in enumerate(problems) if index in chosen]
        return training, [replace(one, id=one.id.replace("/train/", "/held-out/")) for one in held_out]

    def _problems(self, split: str) -> list[Problem]:
        if split not in self._read:
            if (source := self.sources[split]) is None:
                name, folder = self.settings.name, self.settings.data_dir
                place = f"task.name={name}" if folder is None else f"task.data_dir={folder}"
                path = "FILE" if folder is None else f"{folder} for Parquet files in parts or a set of `datasets`"
                remedy = f"Write task.path={path}, or task.data_dir=FOLDER with a {split} file in it ({ENDINGS})"
                raise DataError(place, f"there is no {split} data", remedy)
            self._read[split] = self._read_all(split, source)
        return self._read[split]

    def _read_all(self, split: str, source: Source) -> list[Problem]:
        problems: list[Problem] = []
        seen: dict[str, Problem] = {}  # by normalised question
        skipped_before = len(self.skipped)
        for index, record in enumerate(source.records()):
            try:
                if record.note:
                    self.encodings[record.note] = None
                if record.flaw:
                    raise DataError(record.where, record.flaw)
                problem = replace(self.problem(f"{self.name}/{split}/{index}", record), where=record.where)
                said = " ".join(message["content"] for message in problem.messages)  # with the system message
                if not is_unicode(problem.solution + said):
                    raise DataError(record.where, "it has a lone surrogate; expected UTF-8 text")
                first = seen.setdefault(normalised(said or problem.question), problem)
                other = "" if problem.gold == first.gold else " with another answer"
                repeated = f"{record.where}: the question of {first.where} again{other}; expected each one once."
                if first is problem:
                    problems.append(problem)
                elif not other or isinstance(source, HubSet):  # the user cannot correct a published set
                    self.skipped.append(repeated)
                else:
                    raise DataError(repeated)
            except DataError as error:
                if self.settings.on_bad_record == "error":
                    is_everywhere = isinstance(error, MissingColumn) and index == 0
                    remedy = "" if is_everywhere else " task.on_bad_record=skip leaves such records out."
                    raise DataError(f"{error}{remedy}") from None
                self.skipped.append(str(error))
                self.bad += 1
        if not problems:
            bad = self.skipped[skipped_before:]
            raise DataError(source, f"no record can be used: {bad[0]}" if bad else "it has no records")
        names = dict.fromkeys(name for one in problems for name in one.extra)  # JSON lines may omit some
        return [one if len(one.extra) == len(names) else replace(one, extra={**names, **one.extra}) for one in problems]


def make_task(settings: TaskSettings) -> Task:
    """Make the task that the settings name: a built-in one, or one from a user's file."""
    place = BUILT_IN.get(settings.name.partition(":")[0], "trainer.problem.own_records:own_task")
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)(settings)


def few(held_out: Sequence[Problem]) -> list[str]:
    """Return a warning if the held-out problems are too few to show much."""
    if len(held_out) >= ENOUGH or not any(one.gold for one in held_out):
        return []
    seen = f"{HELD_OUT}: only {counted(len(held_out), 'problem')}, {what_shows(len(held_out))}"
    return [f"{seen}; take more records, or a larger task.holdout"]


def asked(problem: Problem) -> str:
    """Return the normalised question without its choices. Two problems that ask the same count as one."""
    return normalised(problem.stem or problem.question)


def normalised(question: str) -> str:
    """Return a question in a form that does not depend on case, spaces and the encoding of accents."""
    return " ".join(unicodedata.normalize("NFC", question).casefold().split())


def training_problems(task: Task, settings: TaskSettings, seed: int) -> list[Problem]:
    """Return the training problems in an order given by the seed, without questions of the test set."""
    held_out = {asked(problem) for problem in task.test()}
    problems = [problem for problem in task.train() if asked(problem) not in held_out]
    random.Random(seed).shuffle(problems)
    if not problems:
        reason = "no training problem is left: the held-out set has all their questions"
        left_out = [note for note in task.notes() if note.startswith(LEFT_OUT)]
        remedy = "Write a smaller task.holdout" if settings.holdout else "Add training problems"
        raise DataError(f"task.name={task.name}", "; ".join([reason, *left_out]), remedy)
    return problems[: settings.limit]


def evaluation_problems(task: Task, count: int) -> list[Problem]:
    """Return `count` held-out problems, which are the same for every seed of the run."""
    problems = list(task.test())
    random.Random(0).shuffle(problems)
    return problems[:count]


@lru_cache(maxsize=2)  # a step may end one pass and begin another
def _order(seed: int, passes: int, size: int) -> list[int]:
    return random.Random(f"{seed}/{passes}").sample(range(size), size)


def draw(problems: Sequence[T], step: int, count: int, seed: int) -> list[T]:
    """Return the problems of a step, from 0, which depend only on the arguments. Each pass over the set has its own
    order."""
    size = len(problems)
    places = (divmod(place, size) for place in range(step * count, (step + 1) * count))
    return [problems[_order(seed, passes, size)[place]] for passes, place in places]
