r"""Compare two answers. Standard library only; what a model wrote is never evaluated.

`equal` compares normal forms: an exact number if possible, else an interval, a tuple or a set of these, else a text.
If a text can be read in several ways, docs/rewards.md says which one counts; tests/data/answers.yaml has the cases.
"""

import re
import unicodedata
from collections.abc import Hashable

from trainer.answers.choice import choice_letter
from trainer.answers.equation import parted
from trainer.answers.grammar import PEOPLE
from trainer.answers.notation import DECORATION, LONGEST_ANSWER, PICTURE, clean, normalise
from trainer.answers.number import exact, is_plain, is_rounded, number, same_quantity, with_words
from trainer.answers.number_words import same_rank

_SHELL = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}|\$(.+)\$|\s")  # markup around a symbol
_LATIN_WORD = re.compile("[A-Za-z]{3,}")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_ROUGHLY = re.compile(r"((?:\\[A-Za-z]+|[^A-Za-z])+?)(?:\\approx(?![A-Za-z])|≈)(.*)", re.DOTALL)  # \frac13 \approx 0.33
_RELATION = re.compile(r"[=≈∈]|\\(?:approx|in)(?![A-Za-z])")
_UNION = re.compile(r"\\cup")
_SEPARATOR = re.compile(r"(?: ?[,;]| (?:and|or)(?=[ ,]))+ ?")
_AND = re.compile(r",?\s(?:and|&)\s|,\s?")
_BARE_NUMBER = re.compile(r"(?:[-+0-9.,/{} ]|\\frac)+")
_DEPTH = 3  # how deep lists may be nested


def equal(answer: str, gold: str) -> bool:
    """Return True if two answers are the same as exact numbers, lists of numbers, choices, or text."""
    is_long = max(len(answer), len(gold)) > LONGEST_ANSWER
    if answer.strip() == gold.strip() or (not is_long and same_rank(answer, gold)):
        return True
    has_names = all(map(_RELATION.search, (answer, gold)))
    if is_long or (has_names and _are_named_apart(answer, gold)):
        return False
    bare = [_bare(text) for text in (answer, gold)]
    if PICTURE.search(gold) or not any(map(_LETTER_OR_DIGIT.search, bare)):
        return bare[0] == bare[1]  # the normal form would not distinguish a dot from a cross
    answer = DECORATION.sub(" ", answer)
    if is_plain(gold):
        rough = _ROUGHLY.fullmatch(answer)  # 1/3 ≈ 0.333 equals both 1/3 and 0.333
        rounded = number(rough[2]) if rough and is_rounded(rough[1], rough[2]) else None
        return same_quantity(answer, gold) or rounded == number(gold)
    named = "=" in gold
    looser = (_is_without_its_noun, _are_together)
    if _key(answer, named, _DEPTH) == _key(gold, named, _DEPTH) or any(same(answer, gold) for same in looser):
        return True
    choice = choice_letter(gold) if len(clean(gold)) <= 5 and (")" in gold or not gold.islower()) else None
    is_variable = len(answer.strip()) == len(gold.strip()) == 1  # e is not E, but (e) is the choice E
    return choice is not None and not is_variable and choice_letter(answer) == choice


def _bare(text: str) -> str:
    """Return a text without `\\text{}`, dollars and spaces, and with its words in lower case. Symbols are kept."""
    text = _SHELL.sub(r"\1\2", _SHELL.sub(r"\1\2", normalise(text)))
    return _LATIN_WORD.sub(lambda word: word[0].lower(), text)


def without_accents(text: str) -> str:
    """Return a text without the accents on its letters: Brasilia for Brasília."""
    parts = unicodedata.normalize("NFD", text)
    return "".join(char for char in parts if not unicodedata.combining(char))


def _are_named_apart(answer: str, gold: str) -> bool:
    """Return True if both have labels and none in common: for `y = 2` and `x = 2`, but not for `x = y = 2`."""
    texts = (clean(answer), clean(gold))
    names = [{name for item in _split(text, _SEPARATOR) or [text] for name in _names(item)} for text in texts]
    return all(names) and names[0].isdisjoint(names[1])


def _names(text: str) -> list[str]:
    names = [label.rpartition(" is ")[2] for label in parted(text)[0]]  # The solution is x
    return [re.sub(r"[\s{}]", "", name) for name in names]


def _is_without_its_noun(answer: str, gold: str) -> bool:
    """Return True for `7` if the gold answer is "7 dwarfs", but not if it is a name such as "7 Up"."""
    read = with_words(gold)
    if read is None or not " ".join(read[1]).islower() or {*read[1]} & {"am", "pm"}:
        return False
    return _BARE_NUMBER.fullmatch(clean(answer)) is not None and number(answer) == read[0]


def _are_together(answer: str, gold: str) -> bool:
    """Return True if both list the same people or things in any order. The title War and Peace is not a list."""
    if " and " not in gold:
        return False
    parts = [_AND.split(clean(text)) for text in (answer, gold)]
    is_list = all(part.islower() or part in PEOPLE for part in parts[1])
    return is_list and sorted(map(str.casefold, parts[0])) == sorted(map(str.casefold, parts[1]))


def _key(text: str, named: bool, depth: int) -> Hashable:
    """Return the normal form: equal answers have equal keys. `named` keeps the labels of a list if they differ."""
    if read := with_words(text):
        value, words, _ = read
        return (value, *(word.lower().rstrip("s") for word in words)) if words else value
    text = " ".join(clean(text).split())
    if depth and (pieces := _split(text, _UNION)):
        return "union", tuple(sorted((_key(piece, named, depth - 1) for piece in pieces), key=repr))
    items = _split(text, _SEPARATOR) if depth else None
    if items is None:
        sides = exact(parted(text)[1])
        text = sides[0] if len(sides) == 1 else text
    opening, inner, closing = _brackets(text)
    items = items or (_split(inner, _SEPARATOR) if depth and opening else None)
    if items is None or (opening == "" and any(map(_is_words, items))):
        return _text_key(text)
    keys = [_key(item, named, depth - 1) for item in items]
    names = ["=".join(_names(item)) for item in items]
    if named and len(set(names)) > 1 and all(names):
        keys = list(zip(names, keys))
    return (opening, tuple(keys), closing) if opening in ("(", "[") else ("set", tuple(sorted(keys, key=repr)))


def pairs(answer: str, gold: str) -> list[tuple[str, str]]:
    """Return the pairs that all have to be equal: each side of `x = 2\\sqrt2 = \\sqrt8` with `\\sqrt8`. Two equations
    are one pair if one of them begins without a label. There are none if the labels differ: nothing is equal then."""
    if not _RELATION.search(answer + gold):
        return [(answer, gold)]
    if _are_named_apart(answer, gold):
        return []
    (names, sides), (gold_names, gold_sides) = parted(clean(answer)), parted(clean(gold))
    if "=" in answer and "=" in gold and not (names and gold_names):
        return [(answer, gold)]
    return [(side, other) for side in exact(sides) for other in exact(gold_sides)]


def same_structure(answer: str, gold: str) -> bool:
    """Return False for lists of different lengths or brackets: `{1, 2}` is neither `(1, 2)` nor `{1, 2, 3}` nor 3."""
    shapes = [_shape(" ".join(clean(text).split())) for text in (answer, gold)]
    return None in shapes or shapes[0] == shapes[1]


def _shape(text: str) -> tuple[str, int, str] | None:
    """Return the brackets of a list and its number of items, or None for a formula and for `x = 2, y = 3`."""
    if number(text) is not None:
        return "", 1, ""
    opening, inner, closing = _brackets(text)
    items = _split(inner, _SEPARATOR)
    if items is None or all(parted(item)[0] for item in items):
        return None
    return (opening, len(items), closing) if opening in ("(", "[") else ("{", len(items), "}")


def _brackets(text: str) -> tuple[str, str, str]:
    """Split `[1, 2)` into `[`, the inside and `)`. The brackets are empty if none enclose the whole text."""
    size = 2 if text.startswith("\\{") and text.endswith("\\}") else 1
    if len(text) < 2 * size or text[size - 1] not in "([{" or text[-1] not in ")]}":
        return "", text, ""
    depth = 0
    for position in range(size - 1, len(text) - 1):
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return "", text, ""
    return text[:size], text[size:-size], text[-size:]


def _split(text: str, separator: re.Pattern[str]) -> list[str] | None:
    """Split at separators outside all brackets. Return None if there are none, or if a piece would be empty."""
    pieces, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and position >= start and (match := separator.match(text, position)):
            pieces.append(text[start:position])
            start = match.end()
    pieces.append(text[start:])
    return pieces if len(pieces) > 1 and all(piece.strip() for piece in pieces) else None


_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
_FORMULA = re.compile(r"[\\^_=<>+*/|{}\[\]()]|\b(?:sin|cos|tan|sec|csc|cot|log|ln|exp|mod)\b")
_LONG_WORD = re.compile(r"\b[^\W\d_]{3,}\b|[0-9] [A-Za-z][a-z]+$")
_ONE_IN_BRACES = re.compile(r"(?<=[\^_])\{([0-9A-Za-z])\}")
_EARLY = re.compile(r"(?<![0-9:.,])0(?=[0-9]:[0-9]{2})")  # 03:30
ORDINAL = re.compile(r"(?:(?<=[a-z] [0-9])|(?<=[a-z] [0-9][0-9]))(?:st|nd|rd|th)\b")  # June 15th
_BARE_ROOT = re.compile(r"\\sqrt([0-9A-Za-z])")


def _is_words(text: str) -> bool:
    """Return True if case and spaces do not matter: for Yes, "7 Up" and "Smith", but not for n, 2A and sin x."""
    return bool((_WORDS.fullmatch(text) or _LONG_WORD.search(text)) and not _FORMULA.search(text))


def _text_key(text: str) -> str:
    text = ORDINAL.sub("", _EARLY.sub("", text.strip().rstrip(".")))
    if _is_words(text.rstrip("!")):
        return " ".join(text.rstrip("!").casefold().split())
    text = "".join(text.split())
    return _BARE_ROOT.sub(r"\\sqrt{\1}", _ONE_IN_BRACES.sub(r"\1", text))
