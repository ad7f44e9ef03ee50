r"""Find the answer in a text. Standard library only; what a model wrote is never evaluated.

`strict(text, style)` looks only where the format asked for puts the answer (`STYLES`). `lenient(text)` looks
everywhere, in this order, and returns the first answer that it finds:

    1. the marks `\boxed{}`, `####` and `<answer>`: whichever of them comes last in the text
    2. "the answer is ..." (also "Answer: ..."), the last one
    3. a choice that ends the last line: "so it is (C)."
    4. the last number of the text

Both look after the thinking (`</think>`) first. Only `lenient` looks into it, if it finds nothing after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trainer.answers.notation import BOLD, LONGEST_ANSWER, VULGAR_FRACTIONS, WRAPPERS, clean, to_ascii
from trainer.answers.number import CURRENCY, DECIMAL, is_unit, number

LONGEST_TEXT = 200_000  # of a completion the end is read, where answers are
MOST_TRIES = 8  # earlier marks looked at when the last one holds nothing
WINDOWS = (60, 2_000)  # characters before the last digit in which the last number begins; the short one is fast
_ANSWER_IS = re.compile(
    r"""nswers?(?:\s+(?:to|for|of|in)\b[^\n.:=?]{0,80}?)?[*_\s]*
    (?::|\b(?:is|are|equals|(?:would|will|should|must)\s+be)\b)
    (?:[*_]+(?=\s))?\s*(?:[:=]|simply\b|therefore\b|thus\b)?(?:[*_]+(?=\s))?\s*""",
    re.VERBOSE | re.IGNORECASE,
)
_LABEL = re.compile(
    r"[*_#\s]*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+|my\s+)?(?:final\s+|correct\s+)?a" + _ANSWER_IS.pattern,
    re.VERBOSE | re.IGNORECASE,
)
_HEADING = re.compile(
    r"(?:final\s+)?(?:steps?|parts?|cases?|answers?|solutions?|conclusion|explanation|summary|methods?|approach|reasoning|"
    r"calculations?|verification|check|problem|question|notes?|given|results?)\b(?!\s*[:=]\s*\S*\d)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|;\s|,?\s+(?:because|since)\b|,\s+(?:which|so|where|as|but)\b|\n")
_HEDGE = re.compile(r"(?:\bor\b|/)[^0-9]{0,30}[0-9]", re.IGNORECASE)
_DOUBT = re.compile(r"\b(?:not|wrong|incorrect|maybe|perhaps|if|otherwise|least|most|than)\b|n't\b", re.IGNORECASE)
_COMPOUND = re.compile(  # 5 feet 6 inches, 5 weeks and 3 days, 18 dollars and 50 cents, 18 % of 50, 2 dollars million
    r"""\s*(?:(?:years?|months?|weeks?|days?|hours?|hrs?|minutes?|mins?|feet|foot|ft|yards?|miles?)\s+(?:and\s+)?[0-9]
    |(?:dollars?|euros?|pounds?)\s+(?:and\s+)?[0-9]+\s+(?:cents?|pence)
    |%?\s*(?:percent\s+)?of\s+[0-9]
    |and\s+a\s+(?:half|quarter)
    |[A-Za-z]+\s+(?:hundred|thousand|[mb]illion)s?\b)""",
    re.VERBOSE | re.IGNORECASE,
)
_HEDGED_BARE = re.compile(r"\s*(?:,|-|–|to|and|&|through|between)\s*[$€£]?[0-9]", re.IGNORECASE)
_PROSE_TAIL = re.compile(r"%?(?:\s*[,;:(\[]+|[.]?\s)\s*[A-Za-z(]")
_FORMULA = re.compile(r"[\\^=<>+*_{}|]")
_IN_TEXT = re.compile(
    rf"""(?<!\w)(?<![0-9]/)(?:(?<!\))-\s?(?=[$€£\\])|(?<!\))[-+](?=[0-9.]))?
    (?:[0-9]*\\[dt]?frac\{{-?{DECIMAL}\}}\{{{DECIMAL}\}}
      |(?:{CURRENCY}\s?-?)?[0-9]+[ ][0-9]+/[0-9]+(?![0-9])
      |(?:{CURRENCY}\s?-?)?{DECIMAL}(?:\s?/\s?[0-9]+(?![0-9])|[eE][-+]?[0-9]+(?!\w)|\s?(?:\*|x|\\times|\\cdot)\s?10\^\{{?-?[0-9]+\}}?)?)
    (?:\s?\\?%)?""",
    re.VERBOSE,
)
_ANY_DIGIT = re.compile(f"[\\d{''.join(VULGAR_FRACTIONS)}]")
Found = tuple[int, str]  # the position, and the answer


def _tidy(phrase: str) -> str:
    """Strip what surrounds an answer, and leave the answer as it was written."""
    phrase = BOLD.sub(r"\2", phrase.strip().lstrip("# "))
    for _ in range(3):  # **$18$**. has three layers
        phrase = phrase.rstrip(".,;: ").strip(WRAPPERS)
        if phrase.startswith("$") and phrase.endswith("$") and len(phrase) > 2:
            phrase = phrase.strip("$").strip()
        elif phrase.startswith(("\\(", "\\[")) and phrase.endswith(("\\)", "\\]")):
            phrase = phrase[2:-2].strip()
    return phrase


def _pick(phrase: str) -> str | None:
    """Return the answer in a phrase: `18` for "$18 per day, because 3*6=18"."""
    if len(phrase) > LONGEST_ANSWER:
        return None
    if number(phrase) is None and (label := _LABEL.match(phrase)):
        phrase = phrase[label.end() :]
    if "\\boxed" in phrase and (box := _boxed(phrase)):
        return box[1]
    phrase = _tidy(phrase)
    if not phrase or number(phrase) is not None:
        return phrase or None
    return _number_of_prose(phrase) or phrase


def _number_of_prose(phrase: str) -> str | None:
    plain = to_ascii(phrase)
    numbers = list(_IN_TEXT.finditer(plain))
    if not numbers or _HEDGE.search(plain):
        return None
    first = numbers[0]
    rest = plain[first.end() :]
    if first.start() == 0:
        leads = _PROSE_TAIL.match(rest) and not _HEDGED_BARE.match(rest) and not _opens_with_formula(rest)
        return _tidy(first[0]) if leads and not (_COMPOUND.match(rest) or _DOUBT.search(rest)) else None
    is_sentence = re.match(r"[A-Za-z']{2,}[\s:]", plain) and not _FORMULA.search(plain)
    if len(numbers) == 1 and is_sentence and not (_DOUBT.search(plain) or re.search(r"\bhalf\b", plain)):
        return _tidy(first[0])
    return None


def _opens_with_formula(rest: str) -> bool:
    word = re.match(r"[\s,;:(\[%.]*([A-Za-z']+)", rest)
    return word is not None and not is_unit(word[1])


def _boxed(text: str) -> Found | None:
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    after = text[start + 5 : start + LONGEST_ANSWER + 10].removeprefix("d").lstrip()
    inner = _braced(after) if after.startswith("{") else re.split(r"[\s$.,]", after, maxsplit=1)[0]
    picked = _pick(inner) if inner else None
    return (start, picked) if picked else None


def _braced(text: str) -> str | None:
    """Return the text between its first brace and the matching one."""
    depth = 0
    for brace in re.finditer(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[1 : brace.start()]
    return None


def _hashes(text: str) -> Found | None:
    end = len(text)
    for _ in range(MOST_TRIES):
        start = text.rfind("####", 0, end)
        if start < 0:
            return None
        line = text[start + 4 : min(end, start + 2 * LONGEST_ANSWER)].partition("\n")[0]
        line = line.partition("</")[0].strip("# \t\r").lstrip(": ")
        if line and not _is_heading(line) and (picked := _pick(line.rstrip("!"))):
            return start, picked
        end = start
    return None


def _is_heading(line: str) -> bool:
    """Return True for a markdown heading, such as `#### Step 2: add`, which is no answer."""
    if number(line) is not None:
        return False
    if _HEADING.match(line.lstrip("* ")):
        return True
    return line.endswith(":") or (not _ANY_DIGIT.search(line) and "\\" not in line and len(line.split()) > 4)


def _tags(text: str) -> Found | None:
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, close) if close >= 0 else -1
    if start < 0:
        return None
    picked = _pick(text[start + len("<answer>") : close])
    return (start, picked) if picked else None


_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations, which models learn to write


def _phrase(text: str) -> str | None:
    """Return what follows the last "the answer is", up to the end of the sentence."""
    end = len(text)
    for _ in range(MOST_TRIES):
        start = max(text.rfind("nswer", 0, end), text.rfind("NSWER", 0, end))
        if start < 0:
            return None
        window = text[start : start + LONGEST_ANSWER]
        if lead := _ANSWER_IS.match(window):
            rest = _CALCULATION.sub("", window[lead.end() :])
            return rest[: stop.start()] if (stop := _SENTENCE_END.search(rest)) else rest
        end = start
    return None


def _answer_is(text: str) -> str | None:
    phrase = _phrase(text)
    picked = _pick(phrase) if phrase else None
    if picked is None or number(picked) is not None:
        return picked
    if re.match(r"not\b", picked, re.IGNORECASE):
        return None
    is_sentence = re.match(r"(?:I\s|[A-Za-z']{2,}\b)", picked) and (
        _ANY_DIGIT.search(picked) or len(picked.split()) > 3
    )
    return None if is_sentence else picked


_CHOICE = re.compile(r"(?:[Oo]ption\s+|[Cc]hoice\s+)?\(?([A-J])\)?(?:\s*[.):]\s.*|\s*[.):]?)", re.DOTALL)
_LOWER_CHOICE = re.compile(r"\(([a-j])\)[.:]?|([a-j])[.):]?")
_STATED_CHOICE = re.compile(r"(?:(?:option|choice|letter)\s+)?['\"(]?([A-J])['\")]?(?=[\s.,:;]|$)")
_TWO_CHOICES = re.compile(r"\(?[A-J]\)?\s*(?:or|and|/|,|&)\s*\(?[A-J]\b")
_NAMED_CHOICE = re.compile(r"\b(?:[Oo]ption|[Cc]hoice)\s+\(?([A-J])\b")


def choice_letter(phrase: str) -> str | None:
    """Return C for `C`, `(C)`, `C) Paris`, `\\text{(C)}` and `(c)`."""
    phrase = clean(phrase)
    if _TWO_CHOICES.match(phrase):
        return None
    if upper := _CHOICE.fullmatch(phrase):
        return upper[1]
    lower = _LOWER_CHOICE.fullmatch(phrase)
    return (lower[1] or lower[2]).upper() if lower else None


def _stated_choice(text: str) -> str | None:
    phrase = clean(_phrase(text) or "")
    if _TWO_CHOICES.match(phrase):
        return None
    stated = _STATED_CHOICE.match(phrase)
    if stated is None or re.match(r"I\s+[a-z]", phrase):  # "Answer: I think ..."
        return choice_letter(phrase)
    return stated[1]


def _last_line(text: str) -> str:
    return text[-LONGEST_ANSWER:].rstrip().rpartition("\n")[2]


_MAY_CLOSE = re.compile(r"\([A-J]\)|^\W*[A-Ja-j]\W*$")


def _closing_choice(text: str) -> str | None:
    """Return a choice in brackets at the end of the last line, or a choice that is the whole line."""
    line = _last_line(text)
    if not _MAY_CLOSE.search(line):
        return None
    line = clean(line)
    if closing := re.search(r"\(([A-J])\)[.!]?$", line):
        return None if re.search(r"\([A-J]\)\s*(?:or|and|,)\s*\([A-J]\)[.!]?$", line) else closing[1]
    return choice_letter(line) if len(line) <= 4 and line[:1] in "(ABCDEFGHIJ" else None


def _letter(text: str) -> str | None:
    for found in (_boxed(text), _tags(text)):
        if found and (choice := choice_letter(found[1])):
            return choice
    if choice := _stated_choice(text) or _closing_choice(text) or choice_letter(_last_line(text)):
        return choice
    named = _NAMED_CHOICE.findall(_last_line(text))
    return named[0] if len(set(named)) == 1 else None


def _last_number(text: str) -> str | None:
    last_digit = _ANY_DIGIT.search(text[::-1])
    if last_digit is None:
        return None
    end = len(text) - last_digit.start()
    for window in WINDOWS:
        start = max(0, end - window)
        numbers = [
            found[0] for found in _IN_TEXT.finditer(to_ascii(text[start : end + 2])) if found.start() or not start
        ]
        if numbers and len(numbers[-1]) <= LONGEST_ANSWER:
            return _tidy(numbers[-1])
    return None


def _last_mark(text: str) -> str | None:
    marks = [found for found in (_boxed(text), _hashes(text), _tags(text)) if found]
    return max(marks)[1] if marks else None


def _answer_of(find: Callable[[str], Found | None]) -> Callable[[str], str | None]:
    def style(text: str) -> str | None:
        found = find(text)
        return found[1] if found else None

    return style


STYLES: dict[str, Callable[[str], str | None]] = {
    "gsm8k": _answer_of(_hashes),
    "boxed": _answer_of(_boxed),
    "tags": _answer_of(_tags),
    "letter": _letter,
}


def strict(text: str, style: str) -> str | None:
    """Return the answer, as written, from the place that the format asks for, or None if there is none."""
    return STYLES[style](_after_thinking(text))


def lenient(text: str) -> str | None:
    """Return the answer wherever it stands. The order of places is at the top of this file."""
    thought = text[-LONGEST_TEXT:].rpartition(_THOUGHT_END)[0]
    for part in (_after_thinking(text), thought) if thought else (_after_thinking(text),):
        for find in (_last_mark, _answer_is, _closing_choice, _last_number):
            if (found := find(part)) is not None:
                return found
    return None


_THOUGHT_END = "</think>"
_STOP = re.compile(r"<\|(?:endoftext|end_of_text|im_end|eot_id|eom_id|end|return)\|>|<eos>|<end_of_turn>|</s>")
_STOP_TOKENS = re.compile(r"(?:<\|[A-Za-z_]{1,40}\|>|</s>|<eos>|\s)+$")


def _after_thinking(text: str) -> str:
    """Return what comes after the thinking, up to the stop token: a number in a thought is not yet an answer."""
    text = text[-LONGEST_TEXT:].rpartition(_THOUGHT_END)[2]
    if (stop := _STOP.search(text)) and not (stop[0] == "</s>" and "<s>" in text):  # <s>17</s> is struck out
        text = text[: stop.start()]
    if text.endswith(">") and (stop := _STOP_TOKENS.search(text, max(0, len(text) - 100))):
        text = text[: stop.start()]
    return text
