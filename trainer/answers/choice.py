"""Read the letter of a choice. A text that names two choices, or takes its choice back, has no letter."""

import re

from trainer.answers.grammar import ANOTHER, SEEMS, SO
from trainer.answers.notation import DECORATION, clean
from trainer.answers.patterns import any_of

LETTERS = "ABCDEFGHIJ"
_BLANK_LINE = re.compile(rf"(?i)\n[ \t\r]*\n(?!\s*{ANOTHER}\b)")  # an explanation may follow
_STATED = re.compile(  # "C", "(C)", "Option C: Paris"
    r"(?:(?:[Oo]ption|[Cc]hoice|[Ll]etter)\s+)?['\"(\[{]?([A-J])['\"\]}]?(?P<mark>\)?[.:]?)(?=[\s,;/&]|$)"
)
_LABEL = re.compile(r"\(([A-J])\)|(?<![\w'])([A-J])(?=[).:](?:\s|$))|\b(?:[Oo]ption|[Cc]hoice)\s+\(?([A-J])\b")
LETTER = re.compile(r"(?<![\w'$\\-])[A-J](?![\w'-])")
_OTHER = re.compile(r"\b(?:not|than|over|unlike)\s+(?:[Oo]ption\s+|[Cc]hoice\s+)?\(?[A-J]\b\)?")  # the B of "C, not B"
_BESIDE = re.compile(rf"(?i)[,;/&]|(?:and|also|{ANOTHER})\b")
_RIGHT = any_of("right correct true best answer choice option one likely accurate appropriate")
_IS_RIGHT = re.compile(  # after a letter without a mark: "C", "C, because ...", "C is the best answer", "C\nThe reason"
    r"\s*(?:$|[,;–(-]|(?:because|since|as|which|rather)\b|(?!(?:Wait|Oops|Sorry|Hmm)\b)[A-Z]"
    r"|(?:is|as|being|seems|must\s+be|would\s+be)\s+(?:the\s+|my\s+|most\s+)?"
    rf"(?:final\s+|only\s+|best\s+|most\s+)?{_RIGHT}\b)"
)
_DOUBTED = re.compile(  # after a label; but "D) incorrect" and "D) cannot be determined" are choices
    r"(?:wrong|incorrect)\b(?=\s*[,;]|\s+(?:so|and|but)\b)"
    rf"|{SEEMS}\b.*\b(?:wrong|incorrect|false|not|also|too)\b"
)
_DOTTED = re.compile(r"(?<![\w'(])[A-J](?=[.:]\s)")
_LOWER = re.compile(r"\(([a-j])\)[.:]?|([a-j])[.):]?")


def choice_letter(phrase: str) -> str | None:
    """Return C for `C`, `(C)`, `C) Paris`, `C, because ...`, `\\text{(C)}` and `(c)`."""
    phrase = clean(DECORATION.sub(" ", _BLANK_LINE.split(phrase.strip(), maxsplit=1)[0]))
    stated = _STATED.match(phrase)
    if stated is None:
        lower = _LOWER.fullmatch(phrase)
        return (lower[1] or lower[2]).upper() if lower else None
    rest = _OTHER.sub("", phrase[stated.end() :]).strip().rstrip(".!")
    return None if _is_taken_back(stated[1], rest, stated["mark"]) else stated[1]


def _is_taken_back(letter: str, rest: str, mark: str) -> bool:
    """Return True if the rest names another letter, or does not say that the letter is the answer. If the letter has a
    mark, the rest is the text of the choice, which may name other letters: `D) both A and B`, `A) E. coli`."""
    labels = named_letters(_DOTTED.sub("", rest) if ")" in mark else rest) - {letter}
    letters = set(LETTER.findall(rest)) - {letter}
    if labels or (letters and (not mark or _BESIDE.match(rest) or (")" not in mark and LETTER.fullmatch(rest)))):
        return True
    return _DOUBTED.match(rest) is not None if mark else _IS_RIGHT.match(rest) is None


def named_letters(line: str) -> set[str]:
    """Return the letters of all choices that a line names: `(B)`, `B)`, `option B`."""
    return {label[1] or label[2] or label[3] for label in _LABEL.finditer(line)}


_CLOSING = re.compile(r"\(([A-J])\)[.!]?$")
_CLAUSE = re.compile(rf"[,.;:]|\b{SO}\b")
_DENYING = any_of(
    "neither nor not never cannot false wrong incorrect rul(?:e|es|ed|ing)_out eliminat[a-z]+ exclud[a-z]+ reject[a-z]*"
)
_DOUBTING = any_of("or either doubt[a-z]* if unless otherwise could might may maybe perhaps least than")
_RULED_OUT = re.compile(  # 不, 非, 错 and 排除, but not 不难 (not hard to see) and 非常 (very)
    rf"(?i)n't\b|\b(?:and|{_DENYING}|{_DOUBTING})\b|[.,;!] {ANOTHER}\b|不(?!难)|非(?!常)|错|排除"
)
_CHOSEN = any_of("[Oo]ption [Cc]hoice [Cc]hoose [Pp]ick [Ss]elect go_with [Ii]t_is [Ii]t's [Ii]t_must_be")
_NAMED = re.compile(  # "option B", "The choice is **B**", but not the A of "I choose A good one"
    rf"\b{_CHOSEN}(?::|\s+is|(?=\s))[\s*]*\(?([A-J])\b(?!(?<=A) (?!is|because|since|as)[a-z])"
    r"|(?<![\w'])([A-J])\W* is the (?:(?:correct|right|best) )?(?:answer|choice|option)\b"
)


def closing_choice(line: str) -> str | None:
    """Return the letter of a choice in brackets at the end of a line, or of a line that is nothing but a choice."""
    line = clean(line)
    if closing := _CLOSING.search(line):
        clause = _CLAUSE.split(line[: closing.start()])[-1]
        return None if _RULED_OUT.search(clause) or named_letters(clause) else closing[1]
    return choice_letter(line) if len(line) <= 4 and line[:1] in "(ABCDEFGHIJ" else None


def named_choice(line: str) -> str | None:
    """Return B for "option B is right", "I choose B", "The best choice is **B**" and "B is the right answer"."""
    named = {first or second for first, second in _NAMED.findall(line)}
    return named.pop() if len(named) == 1 and not _RULED_OUT.search(line) else None
