r"""Find the answer in a text. Standard library only; what a model wrote is never evaluated.

`strict(text, style, gold)` looks only where the format asked for puts the answer (`STYLES`). `lenient(text, gold)`
looks everywhere, in this order, and returns the first answer that it finds:

    1. the marks `\\boxed{}`, `####` and `<answer>`: whichever of them comes last in the text
    2. "the answer is ..." (also "Answer: ..."), the last one
    3. a choice that ends the last line: "so it is (C)."
    4. the last number of the text, unless it is a part of something else: "17, 18", "2^18", "not 18"

Both look after the thinking (`said.py`) first. Only `lenient` looks into it, if it finds nothing after it. As long as
the thinking has not ended, there is no strict answer.

A number is picked out of the words around it (`phrase.py`) only if the gold answer is a plain number, or if none is
given. Otherwise the answer is all that stands there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trainer.answers.choice import choice_letter, closing_choice, named_choice, named_letters
from trainer.answers.compare import equal
from trainer.answers.notation import LONGEST_ANSWER
from trainer.answers.number import is_plain, number
from trainer.answers.phrase import CORRECTION, DIGIT, last_number, offered, tidy
from trainer.answers.said import after_thinking

MOST_TRIES = 8  # earlier marks looked at when the last one holds nothing
GOLD = ""  # in place of the gold answer, where it is the one to be found
THOUGHT, THOUGHT_END = "<think>", "</think>"  # what prompts of our own write
Found = tuple[int, str]  # the position, and the answer


def _pick(phrase: str, wanted: str | None) -> str | None:
    """Return the answer in a phrase: `18` for "$18 per day, because 3*6=18".

    `wanted` is the gold answer if it is no plain number: then the answer is the whole phrase."""
    if len(phrase) > LONGEST_ANSWER:
        return None
    if wanted is not None:
        for whole in (tidy(phrase), phrase.strip()):
            if equal(whole, wanted):
                return whole
    if "\\boxed" in phrase and (box := _boxed(phrase, wanted)):
        return box[1]
    if number(phrase) is None and (label := _LABEL.match(phrase)):
        phrase = phrase[label.end() :]
    return offered(phrase) if wanted is None else tidy(phrase) or None


# A box right before another one: "\\boxed{2} and \\boxed{3}", "$x = \\boxed{2}, y = "
_BESIDE = re.compile(
    r"\\boxed\{([^{}\n]*)\}[ \t$]*(?:[,;/&]|or\b|and\b)?[ \t$]*(?:or\b|and\b)?[ \t$]*(?:[A-Za-z][ \t]*=[ \t]*)?\Z"
)
_BRACE = re.compile(r"\\[{}]|[{}]")  # { and \{


def _boxed(text: str, wanted: str | None) -> Found | None:
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    after = text[start + 5 : start + LONGEST_ANSWER + 10].removeprefix("d").lstrip()
    inner = _braced(after) if after.startswith("{") else re.split(r"[\s$.,]", after, maxsplit=1)[0]
    beside = _BESIDE.search(text, max(0, start - LONGEST_ANSWER), start)
    if inner and beside and not equal(beside[1], inner):
        inner = f"{beside[1]}, {inner}"
    picked = _pick(inner, wanted) if inner else None
    return (start, picked) if picked else None


def _braced(text: str) -> str | None:
    """Return the text between its first brace and the matching one."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[1 : brace.start()]
    return None


_ANSWER_IS = re.compile(  # nswer is, nswer to the question is: **, NSWER:
    r"""nswers?(?:\s+(?:to|for|of|in)\b[^\n.:=?]{0,80}?)?[*_\s]*
    (?::|\b(?:is|are|equals|(?:would|will|should|must)\s+be)\b)
    (?:[*_]+(?=\s))?\s*(?:[:=]|simply\b|therefore\b|thus\b)?(?:[*_]+(?=\s))?\s*""",
    re.VERBOSE | re.IGNORECASE,
)
_LABEL = re.compile(  # So the final answer is, Answer:
    r"[*_#\s]*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+|my\s+)?(?:final\s+|correct\s+)?a" + _ANSWER_IS.pattern,
    re.VERBOSE | re.IGNORECASE,
)
_HEADING = re.compile(  # Step 2, Final Answer, Explanation, but not Answer: 18
    r"(?:final\s+)?(?:steps?|parts?|cases?|answers?|solutions?|conclusion|explanation|summary|methods?|approach|reasoning|"
    r"calculations?|verification|check|problem|question|notes?|given|results?)\b(?!\s*[:=]\s*\S*\d)",
    re.IGNORECASE,
)


def _hashes(text: str, wanted: str | None) -> Found | None:
    end = len(text)
    for _ in range(MOST_TRIES):
        start = text.rfind("####", 0, end)
        if start < 0:
            return None
        line = text[start + 4 : min(end, start + 2 * LONGEST_ANSWER)].partition("\n")[0]
        line = _with_those_before(text, start, line.partition("</")[0]).strip().lstrip(": ")
        if line and not _is_heading(line, wanted) and (picked := _pick(line, wanted)):
            return start, picked
        end = start
    return None


def _with_those_before(text: str, start: int, last: str) -> str:
    """Return `17, 18` for `#### 17 #### 18`, and 18 for `#### 18 ####`."""
    line = text[max(text.rfind("\n", 0, start) + 1, start - LONGEST_ANSWER) : start]
    if "####" not in line:
        return last
    parts = [part.strip("# ") for part in (*line.split("####")[1:], last)]
    return ", ".join(dict.fromkeys(filter(None, parts)))


def _is_heading(line: str, wanted: str | None) -> bool:
    """Return True for a markdown heading, such as `#### Step 2: add`, which is no answer."""
    if wanted == GOLD or number(line) is not None or (wanted and equal(tidy(line), wanted)):
        return False
    if line.endswith(":") or (_HEADING.match(line.lstrip("* ")) and not _LABEL.match(line)):
        return True
    return wanted is None and not DIGIT.search(line) and "\\" not in line and len(line.split()) > 4


def _tags(text: str, wanted: str | None) -> Found | None:
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    picked = _pick(text[start + len("<answer>") : text.find("</answer>", start)], wanted)
    return (start, picked) if picked else None


_SENTENCE_END = re.compile(  # 18. Then, 18! Great, 18, because; but not 4! = 24
    r"[.?](?=\s|$)|!(?=\s*[^\s=*/^+-]|\s*$)|;\s|,?\s+(?:because|since)\b|,\s+(?:which|so|where|as|but)\b|\n"
)
# After the end of a sentence: another answer, or one that takes the first back: "18. Or 20", "A. B"
_GOES_ON = re.compile(
    r"""\s{0,9}(?:or|no|wait|maybe|perhaps|possibly|alternatively|actually|sorry|oops|correction)\b
    |\s{0,9}[*_(]*(?-i:[A-J])[*_]*(?:[).:,;?!\n]|$)
    |(?:(?<=\bbut)|(?<=\bso))[^.!?\n]*\b(?:or|maybe|perhaps|possibl[ey]|could|might|may|also)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations, which models learn to write


def _phrases(text: str) -> list[str]:
    """Return what follows the last "the answer is": up to the end of the sentence, of the next one, and so on."""
    end = len(text)
    for _ in range(MOST_TRIES):
        start = max(text.rfind("nswer", 0, end), text.rfind("NSWER", 0, end))
        if start < 0:
            return []
        window = text[start : start + LONGEST_ANSWER]
        if lead := _ANSWER_IS.match(window):
            rest = _CALCULATION.sub("", window[lead.end() :])
            ends = [stop.start() for stop in _SENTENCE_END.finditer(rest) if not _GOES_ON.match(rest, stop.end())]
            return [rest[:stop] for stop in ends[:MOST_TRIES]] or [rest]
        end = start
    return []


def _answer_is(phrases: list[str], wanted: str | None) -> str | None:
    if wanted is not None:  # U.S. Grant: not every full stop ends a sentence
        phrases = sorted(phrases, key=lambda phrase: not equal(tidy(phrase), wanted))
    picked = _pick(phrases[0], wanted) if phrases else None
    if picked is None or number(picked) is not None or (wanted and equal(picked, wanted)):
        return picked
    begins_with_word = picked.startswith("I ") or picked[:2].isalpha()
    is_sentence = begins_with_word and (DIGIT.search(picked) or len(picked.split()) > 3)
    return None if is_sentence or picked[:4].lower() == "not " else picked


def _letter(text: str, wanted: str | None) -> str | None:
    for found in (_boxed(text, wanted), _tags(text, wanted)):
        if found and (choice := choice_letter(found[1])):
            return choice
    phrase, line = next(iter(_phrases(text)), ""), _last_line(text)
    if named_letters(phrase) or re.match(r"[A-J]\b(?! [a-z])", phrase):
        return choice_letter(phrase)
    before = _last_line(text.rstrip()[: -len(line)]) if line else ""
    if named_letters(before[:4]) and named_letters(line[:4]):
        return None  # the end of a list of choices
    return choice_letter(phrase) or closing_choice(line) or choice_letter(line) or named_choice(line)


def _last_line(text: str) -> str:
    return text[-LONGEST_ANSWER:].rstrip().rpartition("\n")[2]


_MARKS: dict[str, Callable[[str, str | None], Found | None]] = {"gsm8k": _hashes, "boxed": _boxed, "tags": _tags}
STYLES = (*_MARKS, "letter")


def _in_place(text: str, style: str, wanted: str | None) -> str | None:
    if style == "letter":
        return _letter(text, wanted)
    found = _MARKS[style](text, wanted)
    return found[1] if found else None


def strict(text: str, style: str, gold: str = "", opened: bool = False) -> str | None:
    """Return the answer, as written, from the place that the format asks for, or None if there is none.

    `opened` says that the prompt has opened a thought, which the text has to close."""
    thought, said, is_open = after_thinking(text)
    if is_open or (opened and thought is None):
        return None
    wanted = _wanted(gold)
    return _settled(_in_place(said, style, wanted), wanted, 0)


def lenient(text: str, gold: str = "") -> str | None:
    """Return the answer wherever it stands. The order of places is at the top of this file."""
    wanted = _wanted(gold)
    thought, said, _ = after_thinking(text)
    return _settled(_anywhere(said, wanted) or (_anywhere(thought, wanted) if thought else None), wanted, -1)


def marked(text: str, style: str) -> str | None:
    """Return all that stands in the place of an answer: how a gold answer is read from a worked solution."""
    return _in_place(text, style, GOLD)


def _wanted(gold: str) -> str | None:
    """Return None if numbers are to be picked out of words: if the gold answer is a plain number, or not given."""
    return gold if gold and not is_plain(gold) else None


def _anywhere(text: str, wanted: str | None) -> str | None:
    if marks := [found for mark in _MARKS.values() if (found := mark(text, wanted))]:
        return max(marks)[1]
    return _answer_is(_phrases(text), wanted) or closing_choice(_last_line(text)) or last_number(text)


def _settled(found: str | None, wanted: str | None, part: int) -> str | None:
    """Return the first or the last part of "18, no wait, 20": the strict reading goes by the first answer."""
    if found is None or wanted is not None or number(found) is not None:
        return found
    parts = [phrase for phrase in CORRECTION.split(found) if DIGIT.search(phrase)]
    return offered(parts[part]) if len(parts) > 1 else found
