"""The reward `code`: the program in an answer runs in the sandbox against the tests of its problem.

The column `reward.code.tests` of a record holds one of these:

    [{"input": "3", "output": "6"}, ...]   what a program reads and prints; or {"inputs": [...], "outputs": [...]}
    [{"input": [3], "output": 6}, ...]     calls of a function, which the column `entry_point` names
    ["assert double(3) == 6", ...]         Python, as in MBPP; the function that it does not define is tested
    "def check(candidate): ..."            Python, as in HumanEval

Expected outputs are compared here and never enter the sandbox. Tests in Python are not trusted either, so they also run
in the sandbox, in a different process than the program; see `trainer/sandbox/run_program.py`.
"""

import ast
import builtins
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.answers.find import program
from trainer.config.settings import Code
from trainer.errors import ConfigError, DataError
from trainer.machine import threads
from trainer.machine.hardware import cores_of_rank
from trainer.machine.user_code import must_be_named, names_in
from trainer.records import Problem
from trainer.reward.built_in import Reading
from trainer.reward.scorer import Grader, Meter
from trainer.sandbox.confine import Held, Limits
from trainer.sandbox.pool import Assertions, Sandbox

ANOTHER_COLUMN = "Name another column: reward.code.tests=COLUMN."
EXPECTED = "expected inputs with outputs, or Python with assertions: see docs/sandbox.md"


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a problem: inputs with outputs, or Python source that calls the function `name`."""

    pairs: tuple[tuple[bytes, bytes], ...] = ()
    source: str = ""
    name: str = ""


class Programs(Grader):
    """A grader that runs the programs of a group in parallel."""

    name = "code"

    def __init__(self, settings: Code) -> None:
        self.settings = settings
        limits = (settings.seconds, settings.memory_mb, settings.processes, settings.file_mb, settings.output_kb)
        self.sandbox = Sandbox(Limits(*limits), settings.command)
        refuse_unheld(settings, self.sandbox.held)
        self.at_once = cores_of_rank() + 1  # one more keeps all busy during a fork or a read
        self._grading = threading.Lock()  # the programs of several groups would use up each other's time limits

    def grade(self, readings: Sequence[Reading], meter: Meter) -> list[float | None]:
        problems = {id(one.problem): one.problem for one in readings}  # ids of problems may occur twice in a file
        tests = {key: read_tests(problem, self.settings) for key, problem in problems.items()}
        work = [partial(self._result, one, tests[id(one.problem)]) for one in readings]
        with self._grading:
            results = [result for _, result in sorted(threads.each(work, self.at_once))]  # by the index of the reading
        meter.add("code/timeouts", sum(result.timed_out for result in results), len(results))
        meter.add("code/faults", sum(bool(result.fault) for result in results), len(results))
        if self.settings.score == "all":
            return [float(0 < result.total == result.passed) for result in results]
        return [result.passed / result.total if result.total else 0.0 for result in results]

    def rehearse(self, reading: Reading) -> None:
        """Run the tests of a problem once before the run, and raise DataError if they cannot run."""
        problem = reading.problem
        result = self._result(reading, read_tests(problem, self.settings))
        if result.fault:
            reason = f"`{self.settings.tests}`: {result.fault}"
            raise DataError(problem.where or problem.id, reason, "Leave the record out")

    def _result(self, reading: Reading, tests: Tests) -> Assertions:
        """Run a program on each input, or with its tests. All inputs share the time limit of one program."""
        source, stops = program(reading.completion.text), self.settings.score == "all"
        if not tests.pairs:
            return self.sandbox.judge(source, tests.source, tests.name, first=stops)
        deadline, passed = time.monotonic() + self.settings.seconds, 0
        for count, (given, expected) in enumerate(tests.pairs, start=1):
            ran = self.sandbox.run(source, given, max(0.0, deadline - time.monotonic()))
            passed += ran.status == 0 and not ran.cut and same_text(ran.output, expected)
            if ran.timed_out or (stops and passed < count):
                return Assertions(passed, len(tests.pairs), timed_out=ran.timed_out)
        return Assertions(passed, len(tests.pairs))


def refuse_unheld(settings: Code, held: Held) -> None:
    """Raise ConfigError if this machine cannot contain a program."""
    if settings.command is not None and not (held.namespaces and held.counted):
        reason = f"it needs a private folder and processes, which this machine cannot contain. It has {held}"
        remedy = "Allow user namespaces, or take another machine"
        raise ConfigError(f"reward.code.command={settings.command}", reason, remedy)
    if settings.unsafe:
        must_be_named("reward.code.unsafe=true")
    elif not held.is_enough:
        reason = f"this machine cannot contain a program. It has {held}, and needs Landlock and seccomp (Linux 5.13)"
        remedy = "Take another machine, or write reward.code.unsafe=true to allow anything that a model writes to run"
        raise ConfigError("reward.weights.code", reason, remedy)


def same_text(output: bytes, expected: bytes) -> bool:
    """Return True if the lines are equal, apart from spaces at their ends and empty lines at the end."""
    first, second = ([line.rstrip() for line in text.rstrip().split(b"\n")] for text in (output, expected))
    return first == second


def read_tests(problem: Problem, settings: Code) -> Tests:
    """Return the tests of a problem. Raise DataError if there are none, or if they cannot be read."""
    columns, column, where = problem.extra, settings.tests, problem.where or problem.id
    if columns.get(column) is None:
        there = ", ".join(str(name) for name, value in columns.items() if value is not None) or "none"
        raise DataError(where, f"there is no column `{column}`; there are: {there}", ANOTHER_COLUMN)
    try:
        tests = _in_any_form(columns[column], columns)
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        reason = str(error) if isinstance(error, DataError) else f"{EXPECTED}; {type(error).__name__}: {error}"
        raise DataError(where, f"`{column}`: {reason}", ANOTHER_COLUMN) from None
    if tests.source and settings.command is not None:
        reason = f"`{column}` holds tests in Python, and reward.code.command={settings.command} runs other programs"
        raise DataError(where, reason, "Test them with inputs and outputs")
    return tests


def _in_any_form(value: Any, columns: Mapping[str, Any]) -> Tests:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = json.loads(value)
    if isinstance(value, Mapping):
        columns = {**columns, "entry_point": value.get("fn_name") or columns.get("entry_point")}
        pairs = zip(value["inputs"], value["outputs"], strict=True)
        value = [{"input": given, "output": output, "may_be_wrapped": True} for given, output in pairs]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise DataError(EXPECTED)
    if all(isinstance(one, str) for one in value):
        before = [*(columns.get("test_imports") or ()), columns.get("test_setup_code") or ""]
        return _python("\n".join([*before, *value]), columns)
    if all(isinstance(one["input"], str) and one.get("testtype") != "functional" for one in value):
        return Tests(tuple((one["input"].encode(), one["output"].encode()) for one in value))
    return _calls(value, columns)


def _calls(value: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> Tests:
    """Write calls with arguments and results as assertions. In LiveCodeBench both are text, one argument per line."""
    metadata = columns.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = _function(columns.get("entry_point") or metadata.get("func_name"))
    if not name.isidentifier():
        raise DataError("calls need the name of the function, in a column `entry_point`")
    lines = []
    for one in value:
        given, output = one["input"], one["output"]
        if one.get("testtype") == "functional":
            given, output = [json.loads(line) for line in given.splitlines()], json.loads(output)
        is_wrapped = isinstance(output, list) and len(output) == 1 and one.get("may_be_wrapped")
        accepted = [output, *(output if is_wrapped else [])]
        accepted += [tuple(value) for value in accepted if isinstance(value, list)]  # JSON has no tuples
        lines.append(f"assert {name}(*{list(given)!r}) in {accepted!r}")
    return _python("\n".join(lines), {"entry_point": name})


def _python(source: str, columns: Mapping[str, Any]) -> Tests:
    if not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(source))):
        raise DataError("there is no assertion in it")
    defined, read = map(set, names_in(source))
    missing = sorted(read - defined - set(dir(builtins)))
    name = _function(columns.get("entry_point")) or (missing[0] if len(missing) == 1 else "")
    if name and not name.isidentifier():
        raise DataError(f"the column `entry_point` is {name!r:.60}, and no function has such a name")
    if name in defined:
        raise DataError(f"the tests define `{name}` themselves, so no answer would be tested")
    if not name or set(missing) - {name}:
        used = ", ".join(missing) or "nothing"
        reason = f"the tests use {used} without a definition, and only one function can be tested"
        raise DataError(f"{reason}. Name it in a column `entry_point`, and define others in `test_setup_code`")
    if "check" in defined - read:  # defined and never called: HumanEval leaves that to its harness
        source = f"{source}\ncheck({name})\n"
    return Tests(source=source, name=name)


def _function(entry_point: Any) -> str:
    """Return the name of a function: `f` for `Solution().f`, which LeetCodeDataset writes."""
    return str(entry_point or "").rpartition(".")[2]
