"""What runs in a process of the sandbox: a program, a function under test, or the tests of a function.

A function and its tests are in two processes. The tests call a stand-in, which writes the arguments to one pipe and
reads the result from another, both as Python literals. So the code under test never shares memory with an expected
value, and only its plain values, never its objects, reach the process that compares results:

    the tests  -- ([3, 1, 2],), {} -->  the function
    the tests  <--   =[1, 2, 3]    ---  the function        or !ValueError, if it raises one

The verdict goes through a third pipe, to which the function has no access.
"""

import ast
import atexit
import builtins
import json
import math
import os
import random
import sys
import threading
import typing
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

LONGEST_LINE = 1 << 20  # bytes of the arguments or the result of a call
CHECK = "__octet_check__"  # the name that an assert calls
NONE = {None: False}  # none of the assertions hold; their number is unknown, because the tests ended early
ENDS_A_LOOP = (StopIteration, StopAsyncIteration)  # raised by a function, these would end a loop of the tests silently
BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("{", "}")}


class NotPlain(BaseException):
    """A value that cannot be sent. It is no Exception, so tests that catch errors of a function do not catch it."""


class Enough(BaseException):
    """Raised after the first assertion that fails if the others need not run."""


def run_program(source: str) -> int:
    """Run a program as `python program.py` does, and return its exit status."""
    status = 0
    try:
        _run(source, "__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and ends those of executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return status


def _run(source: str, name: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run source code as a module, which may use the names of `typing` in `known`, and return its names."""
    module = ModuleType(name)
    module.__dict__.update((one, getattr(typing, one)) for one in known)
    module.__file__, sys.argv = "program.py", ["program.py"]
    sys.modules[name] = module
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.__dict__


def serve_function(source: str, name: str, requests: int, results: int) -> None:
    """Run source code, and answer requests with its function, which may be a method of a class `Solution`."""
    names = _run(source, "program", tuple(typing.__all__))  # LeetCode's stubs use List without an import
    function = names[name] if name in names else getattr(names["Solution"](), name)
    with open(requests, "rb") as lines, open(results, "wb", buffering=0) as replies:
        for line in lines:
            arguments, keywords = ast.literal_eval(line.decode())
            replies.write(_reply(function, arguments, keywords).encode() + b"\n")


def _reply(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    try:
        return f"={literal(function(*arguments, **keywords))}"
    except (Exception, NotPlain) as error:
        return f"!{type(error).__name__}"


def literal(value: Any) -> str:
    """Return a plain value as a Python literal. NumPy arrays become lists, and a subclass becomes its base class."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    for kind, (begin, end) in BRACKETS.items():
        if isinstance(value, kind):
            inside = "".join(f"{literal(item)}, " for item in value)
            return "set()" if begin == "{" and not inside else f"{begin}{inside}{end}"
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            raise NotPlain("nan")
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # decimal numbers have at most 4,300 digits
    for plain in (bool, float, complex, str, bytes, type(None)):
        if isinstance(value, plain):
            return plain.__repr__(value)  # type: ignore[call-arg]
    raise NotPlain(type(value).__name__)


class AssertionCount:
    """Records for each assertion that was reached whether it held every time. Others do not count, such as an `assert
    False` after a call that has to raise. `fault` says what is wrong with the tests themselves."""

    def __init__(self, first: bool) -> None:
        self.first, self.fault = first, ""
        self.held: dict[Any, bool] = {}  # by the code object of the assertion

    def check(self, holds: Callable[[], Any]) -> None:
        """Evaluate an assertion. With `first`, stop if it does not hold."""
        place, held = holds.__code__, False
        with suppress(Exception):
            held = bool(holds())
        self.held[place] = held and self.held.get(place, True)
        if self.first and not held:
            raise Enough


def judge(source: str, name: str, results: int, requests: int, first: bool) -> AssertionCount:
    """Run tests and count assertions. An error outside of an assertion counts as if none of them held."""
    tally = AssertionCount(first)
    stand_in = StandIn(requests, results)
    names = {"__name__": "tests", CHECK: tally.check, name: stand_in}
    try:
        exec(compile(ast.fix_missing_locations(Asserts().visit(ast.parse(source))), "tests.py", "exec"), names)
    except Enough:
        pass
    except NotPlain as error:
        tally.held, tally.fault = NONE, f"a call has an argument that is not a plain value: {error}"
    except Exception as error:
        tally.held = NONE
        if not stand_in.was_called:
            tally.fault = f"they end before they call `{name}`: {type(error).__name__}: {str(error)[:200]}"
    return tally


class Asserts(ast.NodeTransformer):
    """Makes every assert count instead of raise."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(ast.Name(CHECK, ast.Load()), [ast.Lambda(nothing, node.test)], [])
        return ast.copy_location(ast.Expr(call), node)


class StandIn:
    """Stands for the function in the other process."""

    def __init__(self, requests: int, results: int) -> None:
        self._requests = os.fdopen(requests, "wb", buffering=0)
        self._results = os.fdopen(results, "rb")
        self.was_called = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.was_called = True
        self._requests.write(f"({literal(arguments)}, {literal(keywords)})\n".encode())
        line = self._results.readline(LONGEST_LINE).decode()
        if not line.endswith("\n"):
            raise RuntimeError("the function's process has ended, or its result is too long")
        if line.startswith("="):
            return ast.literal_eval(line[1:])
        kind = getattr(builtins, line[1:-1], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, ENDS_A_LOOP):
            raise RuntimeError(line[1:-1])
        raise kind


def run(kind: str, name: str, first: bool) -> NoReturn:
    """Run the source code in descriptor 3. The descriptors from 4 on are pipes, which depend on the kind."""
    with open(3, encoding="utf-8", errors="replace", newline="") as file:
        source = file.read()
    random.Random.__init__.__defaults__, random.Random.seed.__defaults__ = (0,), (0, 2)  # the default seed is 0
    random.seed()
    random._urandom = os.urandom = random.Random(0).randbytes  # type: ignore[attr-defined]  # for `secrets` and numpy
    status = 1
    with suppress(BaseException):
        if kind == "program":
            status = run_program(source)
        elif kind == "function":
            serve_function(source, name, 4, 5)
        else:
            tally = judge(source, name, 4, 5, first)
            os.write(6, json.dumps([sum(tally.held.values()), len(tally.held), tally.fault]).encode())
    os._exit(status)
