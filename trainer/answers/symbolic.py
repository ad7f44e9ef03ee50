r"""Symbolic equality for MATH, through math-verify in child processes that can be killed.

    with SymbolicPool(workers=2, deadline_s=5.0) as pool:
        pool.equal("x+1", "1+x")          # True
        pool.equal("9^{9^{9^9}}", "1")    # False after five seconds; pool.hangs is 1

math-verify may compute forever on what a model wrote (`99999999!`), and its own time limit is a signal handler, which
only the main thread may set and which any `except Exception` below it can swallow. So it runs in another process, which
is killed at the deadline:

    parent  one line of JSON, [answer, gold]  ->  child
    parent  <-  one byte: equal, different, or failed    child

A child is started when it is first needed, by a fresh interpreter, so it inherits neither torch nor CUDA. It ends when
its input closes, and therefore when the parent dies; if it is computing at that moment, its own alarm ends it a second
after the deadline. Only the LaTeX parser of math-verify is used, because its other parser calls Python's `eval`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from queue import LifoQueue
from types import TracebackType

from trainer.answers import compare, notation, number
from trainer.errors import ConfigError, RewardError

READY, EQUAL, DIFFERENT, FAILED = b"r", b"1", b"0", b"!"
START_S = 60.0  # importing sympy from a cold network disk
GRACE_S = 1.0  # the parent kills first; the child's own alarm is for a parent that died
MEMORY_BYTES = 2 << 30  # a tower of powers fills any memory
# Decimals of an irrational number that count as equal to it: 1.414214 is not the square root of two.
DECIMALS = 12

_SIGNS = re.compile(r"[0-9\\^_=<>+*/|()\[\]{}√π-]")
_COMMAND = re.compile(r"\\(?:begin|end)\{[A-Za-z*]+\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{4,}")
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_CAPITAL = re.compile(r"[A-Z]|\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,4}")  # xy, which no word looks like
_MISREAD = re.compile(r"[0-9]\}?\s*_|(?<![_0-9])[0-9]+\s+[0-9]|(?<![_^0-9.])[0-9.]+\s*\{|^\{[^{}]*\}\s*\{")
_LOST = re.compile(r"'|\\prime(?![A-Za-z])|[0-9]\s*:\s*[0-9]")  # what math-verify leaves out, or takes for a fraction
_CONSTANTS = frozenset("ie")
_QUAD = re.compile(r"\\q?quad(?![A-Za-z])")
_LAST_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{1,2}(?=\s*$)")  # which math-verify drops if they are a unit
# What is no product of numbers, although math-verify takes it for one: the names of figures, and matrices.
_FIGURE = re.compile(r"\\(?:angle|triangle|overrightarrow|vec|widehat)\s*\{?([A-Z]{2,})")
_MATRIX = re.compile(r"[A-Z]\s*\^\s*\{?\s*(?:T|-1|\*|\\top|\\intercal|\\dagger)(?![A-Za-z0-9])")


class SymbolicPool:
    """Compares answers as mathematics. It may be called from several threads; each call has a child to itself."""

    def __init__(self, workers: int = 1, deadline_s: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "symbolic comparison needs math-verify, which is not installed. Run: pip install 'octet-grpo[math]', "
                "or write reward.symbolic=false."
            )
        self.deadline_s = deadline_s
        self.hangs = 0  # calls ended by the deadline
        self.failures = 0  # calls in which the child died or math-verify raised
        self._workers = workers
        self._counting = threading.Lock()
        self._closed = False
        # None stands for a child that is not running. Last in, first out: running children are used first.
        self._children: LifoQueue[_Child | None] = LifoQueue()
        for _ in range(workers):
            self._children.put(None)

    def __enter__(self) -> SymbolicPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all children, after waiting for the calls that are running."""
        if self._closed:
            return
        self._closed = True
        for child in [self._children.get() for _ in range(self._workers)]:
            if child is not None:
                child.kill()

    def equal(self, answer: str, gold: str) -> bool:
        """Return True if the answers are equal by `compare.equal` or by math-verify. Return False at the deadline."""
        if compare.equal(answer, gold):
            return True
        answer, gold = notation.without_styling(answer), notation.without_styling(gold)
        pairs = compare.pairs(_QUAD.sub(", ", answer), _QUAD.sub(", ", gold))
        return bool(pairs) and all(
            compare.equal(*pair) or (is_worth_asking(*pair) and self._ask(*_with_letters_apart(*pair)))
            for pair in pairs
        )

    def _ask(self, answer: str, gold: str) -> bool:
        assert not self._closed, "the pool is closed"
        child = self._children.get()
        reply: bytes | None = b""
        try:
            child = child or _Child(self.deadline_s)
            reply = child.ask(answer, gold)
        finally:
            if child is not None and reply not in (EQUAL, DIFFERENT, FAILED):  # it hangs, died, or was interrupted
                child.kill()
                child = None
            self._children.put(child)
        if reply not in (EQUAL, DIFFERENT):
            self._count(hang=reply is None)
        return reply == EQUAL

    def _count(self, hang: bool) -> None:
        with self._counting:
            self.hangs += hang
            self.failures += not hang


def is_worth_asking(answer: str, gold: str) -> bool:
    """Return True if both look like mathematics of one kind and are not two numbers, which are compared exactly."""
    if not (_looks_like_maths(answer) and _looks_like_maths(gold)) or len(answer.strip()) == len(gold.strip()) == 1:
        return False
    if any(_MISREAD.search(notation.clean(text)) for text in (answer, gold)) or not compare.same_structure(
        answer, gold
    ):
        return False
    if len(_LOST.findall(answer)) != len(_LOST.findall(gold)):
        return False
    if _ordered(answer) != _ordered(gold):
        return False
    return number.number(answer) is None or number.number(gold) is None


def _ordered(text: str) -> tuple[list[str], list[str]]:
    """Return the names of figures, where CBA is ABC, and all capital letters in their order if there is a matrix."""
    figures = [min(name, name[::-1]) for name in _FIGURE.findall(text)]
    return sorted(figures), re.findall("[A-Z]", text) if _MATRIX.search(text) else []


def _with_letters_apart(answer: str, gold: str) -> tuple[str, str]:
    """Rename capital letters that also occur as small ones, and last letters, for which math-verify knows units.

    It takes `2A` for `2a`, and `5m` for 5.
    """
    symbols = set(_SYMBOL.findall(f"{answer} {gold}"))
    clash = {symbol for symbol in symbols if _CAPITAL.fullmatch(symbol) and symbol.lower() in symbols}
    last = [found[0] for text in (answer, gold) if (found := _LAST_LETTERS.search(text))]
    variables = {letter for letters in last if number.number(f"1{letters}") is None for letter in letters}

    def rename(found: re.Match[str]) -> str:
        symbol = found[0]
        if symbol in clash:
            return f"{{{symbol.lower()}_{{99}}}}"
        return f"{{{symbol}_{{98}}}}" if symbol in variables - _CONSTANTS else symbol

    return _SYMBOL.sub(rename, answer), _SYMBOL.sub(rename, gold)


def _looks_like_maths(text: str) -> bool:
    if not text.strip() or len(text) > notation.LONGEST_ANSWER:
        return False
    words = _WORD.findall(_COMMAND.sub(" ", text))
    is_short = len(text.strip()) == 1 or _PRODUCT.fullmatch(text.strip()) is not None
    return len(words) < 2 and (is_short or _SIGNS.search(text) is not None)


class _Child:
    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # With the parent's sys.path, the child finds what the parent finds, however that was installed.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({deadline_s + GRACE_S})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        if self._read(START_S) != READY:
            self.kill()
            raise RewardError(
                f"the process that compares mathematics did not start. To see why, run: "
                f"{sys.executable} -c 'from {__name__} import serve; serve(1)'"
            )

    def ask(self, answer: str, gold: str) -> bytes | None:
        """Return the reply: empty if the child died, None if it took too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
        except BrokenPipeError:
            return b""
        return self._read(self._deadline_s)

    def _read(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        return self._process.stdout.read(1) if wait([self._process.stdout.fileno()], seconds) else None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


# ------------------------------------------------------------------------------------------------------- in the child


def serve(alarm_s: float) -> None:
    """Answer requests from standard input until it closes."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    _limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, and no handler can swallow that
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process; only ranks act on it
    same = _math_verify()
    os.write(replies, READY)
    for request in iter(sys.stdin.buffer.readline, b""):
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        reply = _reply(same, *json.loads(request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, reply)


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _math_verify() -> Callable[[str, str], bool]:
    import sympy  # type: ignore[import-untyped]
    from math_verify import LatexExtractionConfig, parse, verify

    i = sympy.Symbol("i", real=False)  # as math-verify reads it

    def read(text: str) -> list[object]:
        found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], "no_fallback", parsing_timeout=None)
        return [one.subs(i, sympy.I) if hasattr(one, "subs") else one for one in found]

    def same(answer: str, gold: str) -> bool:
        return bool(
            verify(
                read(gold),
                read(answer),
                float_rounding=DECIMALS,
                allow_set_relation_comp=True,  # x > 5 is (5, oo)
                timeout_seconds=None,
            )
        )

    return same


def _reply(same: Callable[[str, str], bool], answer: str, gold: str) -> bytes:
    try:
        return EQUAL if same(answer, gold) else DIFFERENT
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ):
        return FAILED  # sympy raises nearly anything on nonsense; RecursionError is a RuntimeError
