"""Symbolic equality for MATH, through math-verify in a child process that can be killed.

math-verify may compute forever on what a model wrote (`99999999!`). Its own time limit is a signal handler, which only
the main thread may set, and whose exception any `except Exception` may swallow. It therefore runs in a child process
(`child_process.py`), which is killed at the deadline. Only its LaTeX parser is used, because its other parser calls
Python's `eval`.
"""

import importlib.util
import re
from collections.abc import Callable
from functools import lru_cache

from trainer.answers import compare, notation, number
from trainer.answers.child_process import Child, Died
from trainer.answers.grammar import kind, unit
from trainer.errors import ConfigError

DECIMALS = 12  # that have to agree with an irrational number: 1.414214 does not equal the square root of two

_SIGNS = re.compile(r"[0-9\\^_=<>+*/|()\[\]{}√π-]")
_COMMAND = re.compile(r"\\(?:begin|end|operatorname)\{[A-Za-z*]+\}|\\[A-Za-z]+|sqrt")
_WORD = re.compile(r"[A-Za-z]+")
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_CAPITAL = re.compile(r"[A-Z]|\\(?:Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,4}")  # xy; letters without a vowel are not a word
_MISREAD = re.compile(r"[0-9]\}?\s*_|(?<![_0-9])[0-9]+\s+[0-9]|(?<![_^0-9.])[0-9.]+\s*\{|^\{[^{}]*\}\s*\{")
_LOST = re.compile(r"'|\\prime(?![A-Za-z])")  # math-verify ignores these
_TIME = re.compile(r":|[0-9] [ap]m\b|\\colon(?![A-Za-z])")  # math-verify takes these for a fraction or a product
_WITH_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23])?|(?<![A-Za-z\\])[A-Za-z]{4,}")
_CONSTANTS = frozenset("ie")
_QUAD = re.compile(r"\\q?quad(?![A-Za-z])")
_LAST_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{1,2}(?=\s*$)")  # math-verify drops them if they are a unit
# The names of figures, and matrices, which math-verify takes for products of numbers.
_FIGURE = re.compile(r"\\(?:angle|triangle|overrightarrow|vec|widehat)\s*\{?([A-Z]{2,})")
_MATRIX = re.compile(r"[A-Z]\s*\^\s*\{?\s*(?:T|-1|\*|\\top|\\intercal|\\dagger)(?![A-Za-z0-9])")


class Symbolic:
    """Compares answers as mathematics. It may be called from several threads."""

    def __init__(self, deadline_s: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            remedy = "Run: pip install 'octet-grpo[math]', or write reward.symbolic=false"
            raise ConfigError("reward.symbolic=true", "it needs math-verify, which is not installed", remedy)
        self.child = Child(f"{__name__}:comparer", deadline_s)
        # The answers of a group are often the same, so verdicts and hangs are cached. The death of the child is not.
        self._verdict = lru_cache(maxsize=4_096)(lambda pair: bool(self.child.ask(pair)))

    def equal(self, answer: str, gold: str) -> bool:
        """Return True if the answers are equal by `compare.equal` or by math-verify. Return False at the deadline."""
        if compare.equal(answer, gold):
            return True
        answer, gold = notation.without_styling(answer), notation.without_styling(gold)
        pairs = compare.pairs(_QUAD.sub(", ", answer), _QUAD.sub(", ", gold))
        try:
            return bool(pairs) and all(
                compare.equal(*pair) or (is_worth_asking(*pair) and self._verdict(_with_letters_apart(*pair)))
                for pair in pairs
            )
        except Died:
            return False


def is_worth_asking(answer: str, gold: str) -> bool:
    """Return True if both look like mathematics of one kind, unless both are numbers, which are compared exactly."""
    if not (_looks_like_maths(answer) and _looks_like_maths(gold)) or len(answer.strip()) == len(gold.strip()) == 1:
        return False
    cleaned = [notation.clean(text) for text in (answer, gold)]
    if any(_MISREAD.search(text) or _TIME.search(text) for text in cleaned) or not compare.same_structure(answer, gold):
        return False
    if len(_LOST.findall(answer)) != len(_LOST.findall(gold)) or _ordered(answer) != _ordered(gold):
        return False
    units = [number.units_in(notation.clean(" ".join(_WITH_UNITS.findall(text)))) for text in (answer, gold)]
    return number.agree(*units) and (number.number(answer) is None or number.number(gold) is None)


def _ordered(text: str) -> tuple[list[str], list[str]]:
    """Return the names of figures, where CBA equals ABC, and if there is a matrix, all capital letters in order."""
    figures = [min(name, name[::-1]) for name in _FIGURE.findall(text)]
    return sorted(figures), re.findall("[A-Z]", text) if _MATRIX.search(text) else []


def _with_letters_apart(answer: str, gold: str) -> tuple[str, str]:
    """Rename letters that math-verify misreads: capital letters that also occur in lower case, as it takes `2A` for
    `2a`, and last letters that it takes for a unit, as in `5m`."""
    symbols = set(_SYMBOL.findall(f"{answer} {gold}"))
    clash = {symbol for symbol in symbols if _CAPITAL.fullmatch(symbol) and symbol.lower() in symbols}
    last = [match[0] for text in (answer, gold) if (match := _LAST_LETTERS.search(text))]
    variables = {letter for letters in last if number.number(f"1{letters}") is None for letter in letters}

    def rename(match: re.Match[str]) -> str:
        symbol = match[0]
        if symbol in clash:
            return f"{{{symbol.lower()}_{{99}}}}"
        return f"{{{symbol}_{{98}}}}" if symbol in variables - _CONSTANTS else symbol

    return _SYMBOL.sub(rename, answer), _SYMBOL.sub(rename, gold)


def _looks_like_maths(text: str) -> bool:
    if not text.strip() or len(text) > notation.LONGEST_ANSWER:
        return False
    words = _WORD.findall(_COMMAND.sub(" ", text))
    if "\\boxed" in text or any(kind(word) in "qQ" for word in words if word != "or"):  # denied, doubted or changed
        return False
    is_short = len(text.strip()) == 1 or _PRODUCT.fullmatch(text.strip()) is not None
    return sum(len(word) > 3 and not unit(word) for word in words) < 2 and (is_short or _SIGNS.search(text) is not None)


# ------------------------------------------------------------------------------------------------------- in the child


def comparer() -> Callable[[tuple[str, str]], bool]:
    """Return the function that compares two answers by math-verify."""
    import sympy  # type: ignore[import-untyped]
    from math_verify import LatexExtractionConfig, parse, verify

    # What math-verify makes of the imaginary unit: in 4+2i it is a real variable, in 2(2+i) it is not.
    units = [(sympy.Symbol("i", real=is_real), sympy.I) for is_real in (True, False)]
    # Without it, math-verify would take the 5 out of `7 \\cup $5$`, because it cannot read the whole.
    only_whole = LatexExtractionConfig(try_extract_without_anchor=False)

    def read(text: str) -> list[object]:
        parsed = parse(f"\\boxed{{{text}}}", [only_whole], "no_fallback", parsing_timeout=None)
        return [one.subs(units) if hasattr(one, "subs") else one for one in parsed]

    def same(pair: tuple[str, str]) -> bool:
        answer, gold = pair
        options = {"float_rounding": DECIMALS, "allow_set_relation_comp": True}  # x > 5 equals (5, oo)
        return bool(verify(read(gold), read(answer), timeout_seconds=None, **options))

    return same
