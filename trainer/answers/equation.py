r"""Split an equation such as `x = 3 * 6 = 18` into labels, which name what is asked for, and sides, which are equal.

A label is `x`, `f(3)`, `\theta`, `\angle ABC`, `Total cost` or `(x, y)`. `2x`, `x^2`, `|x|` and `x + 2` are not labels:
`2x = 18` does not say that the answer is 18, and is compared as a whole.
"""

import re

from trainer.answers.patterns import any_of

_EQUALS = re.compile(r"(?<![<>!:=\\])=(?![=>])(?![^()=]*\))|\\in(?![A-Za-z])")  # but not the sign in P(X = 2)
_REASON = any_of(r"because since as so where which that when if for means from i\.e\.")
_EXPLANATION = re.compile(rf"\b{_REASON}(?![a-z])|:\s")
_SEPARATOR = r"(?:,(?![0-9]{3}(?![0-9]))|[;\n&]|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))"
_SEVERAL = re.compile(rf"(?:=[^=]*|[0-9][%)}}]*\s*(?:[A-Za-z]+\s*){{0,2}}){_SEPARATOR}")  # "x = 18, y", "2 eggs and 3"
_NEXT_NAME = re.compile(r"\s*-?[0-9.,]+[\s\\]+[A-Za-z](?:_\w+)?\s*")  # in the middle of x = 18 x = 20
_IN_BRACKETS = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_WRITTEN = r"\\?[A-Za-z](?:[A-Za-z']|-(?=[a-z]{3}))*(?![A-Za-z'])[0-9]{0,2}"  # x, \theta, Total, push-ups, x1
_ACCENTED = r"\\(?:overline|vec|hat|bar)\s?\{[A-Za-z']+\}"
_NAME = rf"(?:{_WRITTEN}|{_ACCENTED})(?:_(?:\w|\{{\w+\}}))?'*"  # x_1, x'
_ARGUMENT = r"(?:(?:\^\{?-1\}?)?\s?\([^()+*/^-]*\))"  # of f(3) and f^{-1}(x)
_LABEL = re.compile(rf"{_NAME}(?:(?:[\s,]+|(?=\\)){_NAME})*{_ARGUMENT}?|\((?:{_NAME},?\s*)+\)|\[[A-Z]+\]")  # also [ABC]
_LETTERS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega"
GREEK = re.compile(f"(?:var)?{any_of(_LETTERS)}")  # but pi is a number
_FUNCTIONS = any_of(
    "sin cos tan cot sec csc log ln exp mod minus plus times over half twice squared cubed? factorial sqrt frac"
)
FUNCTION = re.compile(rf"(?<![A-Za-z]){_FUNCTIONS}(?![A-Za-z])")
_WORD = re.compile(r"\\?([A-Za-z']+)")


def parted(text: str) -> tuple[list[str], list[str]]:
    """Return the labels and the sides of an equation, or no labels and the whole text if it is not one equation."""
    *lefts, _ = parts = _EQUALS.split(text)
    left = "=".join(lefts)
    if _EXPLANATION.search(left) or _SEVERAL.search(_IN_BRACKETS.sub("", left)):
        return [], [text]
    if any(map(_NEXT_NAME.fullmatch, lefts[1:])):
        return [], [text]
    labels = []
    while len(parts) > 1 and is_label(parts[0]):
        labels.append(parts.pop(0))
    return labels, [part.strip() for part in parts]


def is_label(text: str) -> bool:
    """Return True for a name and for words, but not for a product such as `x y`."""
    text = text.strip()
    if not _LABEL.fullmatch(text) or FUNCTION.search(text) or text in ("\\pi", "\\infty"):
        return False
    names = _WORD.findall(text.partition("(")[0])
    return len(names) < 2 or any(len(name) > 1 and not GREEK.fullmatch(name) for name in names)
