"""The user's own data, from a file or a function. `task.question` and `task.answer` name the columns; a question may be
text or a conversation.

All columns except that of the question go into `Problem.extra` under their own names, where a custom reward finds them.
"""

import inspect
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, get_args

from trainer.answers import find
from trainer.answers.choice import LETTERS
from trainer.answers.number import has_comma, number, with_points
from trainer.config.sections.task import PROMPT_STYLES, PromptSettings
from trainer.config.settings import TaskSettings
from trainer.errors import ConfigError, DataError, counted
from trainer.machine import user_code
from trainer.problem.environment import is_number
from trainer.problem.foreign_environments import Functions
from trainer.problem.sources import Record, Source
from trainer.problem.task import DataTask, Task
from trainer.records import Problem

NO_ANSWER = "none"
MOST = 5_000_000  # records that a function may return; it may be an endless generator
_ONE_AT_A_TIME = threading.Lock()  # most users' methods are not thread-safe, and groups are scored in threads
METHODS = ("train", "test", "read", "score", "environment")
STYLES = {"prompt_style": PROMPT_STYLES, "answer_style": get_args(PromptSettings.model_fields["answer"].annotation)}
_THOUSANDS = re.compile(r"[^\d,]*[1-9]\d{0,2}\.\d{3}[^\d,]*")  # 1.234 is read as a decimal and may mean a thousand


class RecordsTask(DataTask):
    name = "records"
    needs_answers = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self.decimal = settings.decimal
        self.asked = settings.question or "prompt"  # the column of the question
        if settings.answer == NO_ANSWER:
            self.prompt_style = "chat"  # the other styles ask for a marked answer

    @cached_property
    def in_words(self) -> bool:  # type: ignore[override]
        golds = [problem.gold for problem in self.train() if problem.gold] if self.name == "records" else []
        return sum(number(gold) is None for gold in golds) > len(golds) / 2

    def problem(self, name: str, record: Record) -> Problem:
        # data sets for TRL often have both columns; a conversation in `prompt` then has precedence
        only_prompt = "prompt" in record.values and "question" not in record.values
        reads_prompt = only_prompt or isinstance(_listed(record.values.get("prompt")), list)
        column = self.settings.question or ("prompt" if reads_prompt else "question")
        answer = self.settings.answer or "answer"
        has_answer = answer != NO_ANSWER and (self.needs_answers or answer in record.values)
        record.must_have({column: "task.question"} | ({answer: "task.answer"} if has_answer else {}))
        self.asked, messages = column, conversation(record, column)
        solution = self._solution(record)
        messages = messages[:-1] if column == self.settings.solution else messages
        said = "\n\n".join(message["content"].strip() for message in messages if message["role"] != "system")
        question = said or record.text(column, "task.question")
        gold, solution = self._gold(record, solution) if has_answer else ("", solution)
        return Problem(name, question, gold, solution, record.others(column), messages)

    def notes(self) -> list[str]:
        problems, notes = [one for read in self._read.values() for one in read], super().notes()
        if begun := sum(one.messages[-1]["role"] == "assistant" for one in problems if one.messages):
            what = f"{counted(begun, 'conversation')} with an answer at the end, which the model continues"
            notes.append(f"{what}; if it is the solution, write task.solution={self.asked}")
        golds = [problem.gold for problem in problems]
        values = {gold: number(gold) for gold in golds if has_comma(gold) or re.search(r"\d\.\d", gold)}
        odd = [gold for gold in golds if gold in values and (values[gold] is None or _THOUSANDS.fullmatch(gold))]
        if 2 * len(odd) > sum(gold in values for gold in golds):
            note = f"decimal commas in {counted(len(odd), 'answer')}, such as {odd[0]!r}? Then write task.decimal=comma"
            notes.append(f"{note}; without it 3,5 is a text, and 1.234 is less than 2")
        return notes

    def _read_all(self, split: str, source: Source) -> list[Problem]:
        problems, column = super()._read_all(split, source), self.settings.solution
        if column and split == "train" and not any(column in (self.asked, *one.extra) for one in problems):
            raise DataError(source, f"no record has a column `{column}`", "Write task.solution=COLUMN")
        for name in problems[0].extra if self.name == "records" else ():
            behind = {_choices_behind(one, name) for one in problems}
            if None not in behind and 0 in behind:  # a list of tags beside answers of 0 and 1 has unused places
                reason = f"the answers are places in the list `{name}`, which the questions do not show"
                raise DataError(source, reason, f"Write task.name=multiple_choice task.choices={name}")
        return problems

    def _solution(self, record: Record) -> str:
        """Return the worked solution: a text, or the last message of a conversation, which must be the assistant's."""
        column = self.settings.solution
        messages = _listed(record.values.get(column)) if column else None  # JSON lines may omit the column
        if column is None or messages is None or (isinstance(messages, str) and not messages.strip()):
            return ""  # a warm-up leaves it out
        if not isinstance(messages, list):
            return record.text(column, "task.solution")
        if not messages or not all(map(_is_message, messages)) or messages[-1]["role"] != "assistant":
            reason = f"`{column}` is not a conversation that ends with a message of the role `assistant`"
            raise DataError(record.where, reason)
        return str(messages[-1]["content"]).strip()

    def _gold(self, record: Record, solution: str) -> tuple[str, str]:
        """Return the gold answer and the worked solution. The answer column may hold both, as in GSM8K and MATH."""
        text = record.answer(self.settings.answer or "answer", "task.answer")
        if "\\boxed" not in text and "####" not in text:
            is_written = isinstance(record.values.get(self.settings.answer or "answer"), str)  # a number has a point
            return gold_of(text, self.decimal if is_written else "point"), solution
        gold = gold_of(text)
        if not gold:
            raise DataError(record.where, f"there is no answer after the mark in {text[-40:]!r}")
        return gold, solution or text


@dataclass(frozen=True, slots=True)
class Rows:
    """A source of problems: the records that a method of the user's task returns."""

    setting: str
    method: Callable[[], Iterable[Any]]

    def __str__(self) -> str:
        return f"{self.setting}, {self.method.__name__}()"

    def records(self) -> Iterator[Record]:
        path = user_code.find("task.name", self.setting)
        rows = user_code.call(f"task.name={self}: ", path, lambda: list(islice(self.method(), MOST + 1)), DataError)
        if len(rows) > MOST:
            raise DataError(f"task.name={self}", f"it returns more than {MOST:,} records", "Return fewer")
        for index, row in enumerate(rows):
            where, flaw = f"{self}[{index}]", f"{row!r:.60} is not a record such as those of frame.to_dict('records')"
            yield Record(where, row) if isinstance(row, Mapping) else Record(where, flaw=flaw)


class OwnTask(RecordsTask):
    """A task from a user's file: an object whose `train()` returns records, with up to four more methods.

    test()                    returns the held-out records; without it, a share `task.holdout` of train() is held out
    read(problem, text)       returns the answer in what a model wrote, or None
    score(problem, answer)    returns the worth of an answer, 0 to 1; without it, answers are compared with `answer`
    environment(problem)      returns the environment that replies to the model; see environment.py

    Instead of `environment` it may have TRL's `environment_factory` and `tools` as attributes.
    """

    def __init__(self, settings: TaskSettings, own: Any) -> None:
        super().__init__(settings)
        for method in METHODS:
            if not callable(getattr(own, method, None)) and (method == "train" or hasattr(own, method)):
                reason = f"it returns an object of type {type(own).__name__}, which has no method `{method}`"
                remedy = "Return an object whose train() returns records; see docs/tasks.md"
                raise ConfigError(f"task.name={settings.name}", reason, remedy)
        self.own = own
        self.name = user_code.find("task.name", settings.name).stem
        methods = {split: getattr(own, split, None) for split in ("train", "test")}
        self.sources = {split: Rows(settings.name, method) if method else None for split, method in methods.items()}
        for name, (_, *known) in STYLES.items():  # the first of them is `auto`
            style = getattr(own, name, getattr(self, name))
            if style not in known and not (name == "prompt_style" and os.path.isfile(style)):
                reason = f"its {name} is {style!r}"
                raise ConfigError(f"task.name={settings.name}", reason, f"Known: {', '.join(known)}")
            setattr(self, name, style)
        self.needs_answers = not hasattr(own, "score")
        for method in RESULTS:
            if hasattr(own, method):
                setattr(self, method, partial(self._call, method))
        self.environment = getattr(own, "environment", None)
        factory, tools = inspect.getattr_static(own, "environment_factory", None), getattr(own, "tools", ())
        if factory or tools:
            if self.environment or isinstance(factory, dict):
                what = "several environments" if isinstance(factory, dict) else "an `environment` beside TRL's"
                raise ConfigError(f"task.name={settings.name}", f"it has {what}", "Keep only one")
            self.environment = self.functions = partial(Functions, factory, tools)

    def _call(self, method: str, problem: Problem, text: str) -> Any:
        own, path = self.own, user_code.find("task.name", self.settings.name)
        named, what = f"task.name={self.settings.name}", f"{method}() of {text[-60:]!r}, an answer to {problem.id},"
        raised = f"{named}: {what} raised "
        with _ONE_AT_A_TIME:
            result = user_code.call(raised, path, lambda: getattr(own, method)(problem, text), DataError)
        is_usable, expected = RESULTS[method]
        if not is_usable(result):
            raise DataError(named, f"{what} returned {result!r:.60}", f"Return {expected}")
        return result


RESULTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "read": (lambda answer: answer is None or isinstance(answer, str), "text, or None"),
    "score": (lambda worth: is_number(worth) and 0 <= worth <= 1, "a number from 0 to 1"),
}


def own_task(settings: TaskSettings) -> Task:
    """Return the task that the function of a user's file builds, wrapped in an `OwnTask` unless it is a `DataTask`."""
    path, build = user_code.find("task.name", settings.name), user_code.load("task.name", settings.name)
    built = user_code.call(f"task.name={settings.name}: it raised ", path, lambda: build(settings))
    return built if isinstance(built, DataTask) else OwnTask(settings, built)


def gold_of(answer: str, decimal: str = "point") -> str:
    r"""Return the content of the last mark of a solution, `#### 7` or `\boxed{7}`, or all of it if it has no mark."""
    hashes, box = answer.rfind("####"), answer.rfind("\\boxed")
    if hashes == box:
        return with_points(answer.strip()) if decimal == "comma" else answer.strip()
    return (find.marked(answer, "boxed") if box > hashes else find.marked(answer[hashes:], "gsm8k")) or ""


def _choices_behind(problem: Problem, column: str) -> int | None:
    """Return how many choices follow the one whose index or letter is the gold answer, in a list of three or more that
    the question does not show; None if there is no such list."""
    value = problem.extra[column]
    listed = _listed(value.get("text") if isinstance(value, Mapping) else value)  # ARC has labels beside the texts
    if not isinstance(listed, list) or not 3 <= len(listed) <= len(LETTERS):
        return None
    names = [*map(str, range(len(listed))), *LETTERS[: len(listed)]]
    if problem.gold not in names or all(str(one) in problem.question for one in listed):
        return None
    return len(listed) - 1 - names.index(problem.gold) % len(listed)


def conversation(record: Record, column: str) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a column that holds a conversation, or no messages if it holds text."""
    value = _listed(record.values.get(column))
    if value is None or isinstance(value, str):
        return ()
    is_conversation = isinstance(value, list) and all(map(_is_message, value))
    if not is_conversation or not any(message["role"] == "user" for message in value):
        expected = 'text, or a conversation with a question: [{"role": "user", "content": "..."}]'
        raise DataError(record.where, f"`{column}` is {str(value)[:60]}; expected {expected}")
    # in a Parquet file, every message has the keys of all messages, filled with None
    return tuple({key: part for key, part in message.items() if part is not None} for message in value)


def _listed(value: Any) -> Any:
    """Return a list in place of a tuple, or of an array, which pandas makes of a list in Parquet."""
    return list(value) if isinstance(value, tuple) or type(value).__name__ == "ndarray" else value


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(isinstance(value.get(key), str) for key in ("role", "content")):
        return False
    return bool(value["content"].strip()) or value["role"] != "user"
