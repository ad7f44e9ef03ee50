"""reward.custom: the user's reward functions, called as TRL calls them; see docs/rewards.md.

    def score(prompts, completions, **columns) -> list[float | None]

Each call runs in its own thread, which is abandoned after `reward.timeout`. A call that never releases the interpreter,
such as a regular expression with catastrophic backtracking, cannot be abandoned; the process then ends with a
traceback.
"""

import asyncio
import dis
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from trainer.config.settings import Config, function_name
from trainer.errors import RewardError
from trainer.machine.safe_text import without_keys
from trainer.machine.user_code import Call, contained, find, load, where
from trainer.problem.environment import is_number
from trainer.problem.task import Task
from trainer.records import Problem
from trainer.reward.built_in import Reading
from trainer.reward.scorer import Grader, Meter

KEY = "reward.custom"
REHEARSED = 4  # completions in a rehearsal, to detect a function that returns one number for all of them
SHOWN = 200  # characters of a completion in an error
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
NOT_PASSED = ("prompt", "completion")  # columns that TRL keeps to itself
# Most users' functions are not thread-safe, and faulthandler has only one timer.
_ONE_AT_A_TIME = threading.Lock()


class Custom(Grader):
    """A grader that calls one function of the user. A failure ends the run."""

    def __init__(self, setting: str, config: Config, task: Task) -> None:
        self.setting, self.name = setting, function_name(setting)
        self.question, self.columns = config.task.question or "question", task.columns
        self.timeout, self.format = config.reward.timeout, config.reward.custom_format
        self.path = find(KEY, setting)
        self.function = load(KEY, setting, RewardError)

    def grade(self, readings: Sequence[Reading], meter: Meter) -> list[float | None]:
        with _ONE_AT_A_TIME:
            call = self._run(readings)
            if call.error is not None and not isinstance(call.error, RewardError):
                alone = ([one] for one in readings if len(readings) > 1 and self._run([one]).error is not None)
                culprit = next(alone, readings)  # the first completion that causes an error by itself, or all of them
                what = f"it raised {where(call.error, self.path)}.".replace("raised SystemExit: it called", "called")
                if isinstance(call.error, TypeError | AttributeError):
                    given, other = ("messages", "text") if self._is_chat(readings[0].problem) else ("texts", "chat")
                    what += f" Completions are {given} here; reward.custom_format={other} passes TRL's other form."
                if isinstance(call.error, IndexError) and not all(one.completion.tokens for one in culprit):
                    what += " `completion_ids` is empty if an agent never called the model, or a file has no `tokens`."
                raise self._error(what, culprit)
        if call.error is not None:
            raise call.error
        return list(call.result)

    def rehearse(self, reading: Reading) -> None:
        self.grade([reading] * REHEARSED, Meter())

    def may_read_prompts(self, problem: Problem) -> bool:
        """Return False if the function certainly does not use the text of prompts, which needs a tokenizer."""
        code = getattr(self.function, "__code__", None)
        if self._is_chat(problem) or code is None:
            return code is None
        takes_completions = "completions" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return not takes_completions or any("prompts" in str(one.argval) for one in dis.get_instructions(code))

    def _run(self, readings: Sequence[Reading]) -> Call:
        call = Call(lambda: self._grades(readings))
        with contained:
            ended = call.within(self.timeout)
        if not ended:
            what = f"no result after {self.timeout:g} seconds. Make it faster, or raise reward.timeout."
            raise self._error(what, readings)
        return call

    def _grades(self, readings: Sequence[Reading]) -> list[float | None]:
        result = self.function(**self._arguments(readings))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        is_one = isinstance(result, str | bytes | Mapping) or getattr(result, "ndim", 1) == 0  # a tensor of one number
        if is_one or not isinstance(result, Iterable):
            raise self._error(f"it returned {shown(result)}. Return a list with one number for each completion.")
        grades = list(result)
        if len(grades) != len(readings):
            what = f"it returned {len(grades)} rewards for {len(readings)} completions. Return one for each."
            raise self._error(what)
        return [self._number(grade, reading) for grade, reading in zip(grades, readings, strict=True)]

    def _number(self, grade: Any, reading: Reading) -> float | None:
        if grade is None:
            return None
        if is_number(grade):
            return float(grade)
        raise self._error(f"it returned {shown(grade)}, which is not a number. Return a number, or None.", [reading])

    def _arguments(self, readings: Sequence[Reading]) -> dict[str, Any]:
        """Return the arguments that TRL passes, but only those that the function accepts."""
        asked = [[*map(dict, one.problem.messages)] or one.problem.question for one in readings]
        known = dict.fromkeys(self.columns, [None] * len(readings)) | {self.question: asked} | columns(readings)
        known = {name: known[name] for name in known if name not in NOT_PASSED} | self._texts(readings)
        parameters = inspect.signature(self.function).parameters.values()
        wanted = {one.name for one in parameters if one.kind in NAMED}
        if missing := {*required(self.function)} - known.keys():
            what = f"it asks for `{'`, `'.join(sorted(missing))}`, which is not a column of the data"
            raise self._error(f"{what}. There are: {', '.join(sorted(known))}.")
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        return known if takes_all else {name: column for name, column in known.items() if name in wanted}

    def _texts(self, readings: Sequence[Reading]) -> dict[str, Any]:
        texts = [reading.completion.text for reading in readings]
        ids = [list(compress(one.tokens, one.mask)) for one in (reading.completion for reading in readings)]
        if not self._is_chat(readings[0].problem):
            prompts = [reading.prompt.text for reading in readings]
            return {"prompts": prompts, "completions": texts, "completion_ids": ids}
        asked = [one.problem.messages or [{"role": "user", "content": one.problem.question}] for one in readings]
        conversations = [[*map(dict, messages)] for messages in asked]
        answers = [[{"role": "assistant", "content": text}] for text in texts]
        return {"prompts": conversations, "completions": answers, "completion_ids": ids}

    def _is_chat(self, problem: Problem) -> bool:
        return bool(problem.messages) if self.format == "auto" else self.format == "chat"

    def _error(self, what: str, readings: Sequence[Reading] = ()) -> RewardError:
        if readings:
            first = f"problem {readings[0].problem.id}, completion {shown(readings[0].completion.text)}"
            what += f" Sample: {first}" + (f", and {len(readings) - 1} more." if len(readings) > 1 else ".")
        return RewardError(f"{KEY}={self.setting}", what)


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind in NAMED and one.default is one.empty]


def columns(readings: Sequence[Reading]) -> dict[str, list[Any]]:
    """Return the columns of the data, with None where a record does not have one."""
    records = []
    for problem in (reading.problem for reading in readings):
        gold = problem.gold or None  # an empty text is in every completion
        known = {"question": problem.question, "answer": gold, "gold": gold}
        records.append({**known, "solution": problem.solution, "problem_id": problem.id, **problem.extra})
    names = {name: None for record in records for name in record}  # a set that keeps its order
    return {name: [record.get(name) for record in records] for name in names}


def shown(value: Any) -> str:
    text = without_keys(repr(value))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
