r"""Compare two answers. Standard library only; what a model wrote is never evaluated.

`equal` brings both sides to one normal form: an exact number, else intervals, tuples and sets of these, else text.
Where more than one reading is possible, these are the decisions (tests/data/answers.yaml has a case for each):

    percent      50% is 50, as GSM8K writes it; it is not 0.5
    units        are dropped: 18 dollars, $18 and 18 are one; 3 hours 20 minutes is no single number
    scale words  2 million is 2000000, but a dozen is a unit: 2 dozen is 2
    commas       part thousands and never decimals: 1,234 is a number, 1,23 is a list, (1,234) is a pair
    algebra      5x, 5m and 3 pi are no numbers; names before an equals sign are dropped: x = 5 is 5
    lists        (1, 2) keeps its order; {1, 2} and the bare 1, 2 do not
    hedging      "18 or 20" is not 18; "5 apples and 3 left over" is 5, as GSM8K's own scorer reads it
    case         counts in formulas, not in words: Yes is yes
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from trainer.answers.find import choice_letter
from trainer.answers.notation import LONGEST_ANSWER, clean
from trainer.answers.number import number

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_AND = re.compile(r"\s(?:and|or)\s")
_NAME = re.compile(r"^\s*[A-Za-z](?:\([a-z]\))?\s*(?:=|\\in(?![a-z]))\s*(?=\S)")
_DEPTH = 3  # of lists within lists


def equal(answer: str, gold: str) -> bool:
    """Return True if two answers are the same as exact numbers, lists of numbers, choices, or text."""
    if answer.strip() == gold.strip():
        return True
    if max(len(answer), len(gold)) > LONGEST_ANSWER:
        return False
    if _key(answer, _DEPTH) == _key(gold, _DEPTH):
        return True
    choice = choice_letter(gold) if len(gold) <= 5 else None
    return choice is not None and choice_letter(answer) == choice


def _key(text: str, depth: int) -> Hashable:
    """Return the normal form: equal answers have equal keys."""
    value = number(text)
    if value is not None:
        return value
    text = _NAME.sub("", clean(text))
    if depth and (pieces := _split(text, "\\cup")):
        return "union", _unordered(pieces, depth - 1)
    opening, inner, closing = _brackets(text)
    items = _split(inner, ",") if depth and inner else None
    if items is None and depth and not opening:
        items = [item for item in _AND.split(text) if item.strip()] if _AND.search(text) else None
    if items is None:
        return _text_key(text)
    if opening in ("", "\\{"):
        return "set", _unordered(items, depth - 1)
    return opening, tuple(_key(item, depth - 1) for item in items), closing


def _unordered(items: list[str], depth: int) -> tuple[Hashable, ...]:
    return tuple(sorted((_key(item, depth) for item in items), key=repr))


def _brackets(text: str) -> tuple[str, str, str]:
    """Split `[1, 2)` into bracket, inside and bracket. The brackets are empty if none encloses the whole text."""
    size = 2 if text.startswith("\\{") and text.endswith("\\}") else 1
    if len(text) < 2 * size or text[size - 1] not in "([{" or text[-1] not in ")]}":
        return "", text, ""
    depth = 0
    for position in range(size - 1, len(text) - 1):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return "", text, ""
    return text[:size], text[size:-size], text[-size:]


def _split(text: str, separator: str) -> list[str] | None:
    """Split at separators outside all brackets. Return None if there is none, or if a piece would be empty."""
    if separator not in text:
        return None
    pieces, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and text.startswith(separator, position):
            pieces.append(text[start:position])
            start = position + len(separator)
    pieces.append(text[start:])
    return pieces if len(pieces) > 1 and all(piece.strip() for piece in pieces) else None


_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*|[^\W\d_]")
_ONE_IN_BRACES = re.compile(r"(?<=[\^_])\{([0-9A-Za-z])\}")
_BARE_ROOT = re.compile(r"\\sqrt([0-9A-Za-z])")


def _text_key(text: str) -> str:
    text = text.strip().rstrip(".")
    if _WORDS.fullmatch(text):
        return " ".join(text.casefold().split())
    text = "".join(text.split())
    return _BARE_ROOT.sub(r"\\sqrt{\1}", _ONE_IN_BRACES.sub(r"\1", text))
