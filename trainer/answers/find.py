r"""Find the answer in a text. Standard library only; what a model wrote is never evaluated.

`strict(text, style, gold)` reads only the place that the prompt asks for (`STYLES`). `lenient(text, gold)` reads these
places in turn and returns the first answer that it finds:

    1. the marks `\\boxed{}`, `####` and `<answer>`: whichever of them comes last in the text
    2. the last "the answer is ..." or "Answer: ..."
    3. a choice that ends the last line: "so it is (C)."
    4. the last number of the text, unless it is part of something else: "17, 18", "2^18", "not 18"

Both read what follows the thinking (`strip_thinking.py`). `lenient` also reads the thinking if nothing after it is an
answer. There is no strict answer if the thinking has not ended.

A number is picked out of the words around it (`phrase.py`) only if the gold answer is a plain number or is not given.
Otherwise the answer is the whole text in that place.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from trainer.answers.choice import LETTER, LETTERS, choice_letter, closing_choice, named_choice, named_letters
from trainer.answers.compare import equal
from trainer.answers.grammar import ANOTHER, CORRECTING, HEDGING, SEEMS, SO
from trainer.answers.notation import LONGEST_ANSWER
from trainer.answers.number import MYRIADS, is_plain, number
from trainer.answers.number_words import SCALE, in_digits
from trainer.answers.patterns import any_of
from trainer.answers.phrase import CORRECTION, DIGIT, TURNED, last_number, offered, states, tidy
from trainer.answers.strip_thinking import after_thinking

MOST_MARKS = 16  # marks to read from the end of a text
MOST_TRIES = 8  # sentences to read that say what the answer is, and ends of the last of them
NEAR = 40  # characters before a mark in which a word may deny it
GOLD = ""  # passed as `wanted` to read the gold answer itself
THOUGHT, THOUGHT_END = "<think>", "</think>"  # the marks in Octet's own prompts


class Mark(NamedTuple):
    """A mark: the positions at which it begins and ends, and the text that it marks."""

    start: int
    end: int
    text: str


Before = Callable[[str, int, str | None], Mark | None]  # finds the last mark of a kind before a position


def _pick(phrase: str, wanted: str | None) -> str | None:
    """Return the answer in a phrase: `18` for "$18 per day, because 3*6=18". `wanted` is a gold answer that is not a
    plain number: with it, return the whole phrase, or `wanted` itself if the phrase states it."""
    if len(phrase) > LONGEST_ANSWER:
        return None
    if wanted:
        for whole in (tidy(phrase), phrase.strip(), in_digits(tidy(phrase))):
            if equal(whole, wanted):
                return whole
        if (wanted in "ABCD" and tidy(phrase).upper() == wanted) or states(phrase, wanted):  # but e is not E
            return wanted
    phrase = _CALCULATION.sub("", phrase)
    if entry := _JSON.fullmatch(phrase.strip()):
        phrase = entry[1]
    if box := _marked(phrase, wanted, _box_before):
        return box.text
    if number(phrase) is None and (label := _LABEL.match(phrase)):
        phrase = phrase[label.end() :]
    return offered(phrase) if wanted is None else tidy(phrase) or None


_CALCULATION = re.compile(r"<<[^<>]*>>")  # the calculator annotations of GSM8K, which models learn to write
_JSON = re.compile(r"""\{\s*["'][\w ]{1,30}["']\s*:\s*["']?([^"'{}]*)["']?\s*\}""")  # {"answer": 18}
_JOINED = re.compile(  # between two marks: "or", "\\quad\\text{and}", "**, maybe **"
    rf"(?i)(?:[\s$*_,;/&.()\[\]{{}}\\]|\b(?:q?quad|text|or|and|also|either|{HEDGING})\b)*"
)
_CORRECTED = re.compile(rf"(?i)\b(?:no|rather|{CORRECTING})\b")
_OPERAND_BEFORE = re.compile(
    r"""(?x)(?:-|[0-9]\s?|[0-9)}][)}]\s?  # 2\boxed{18}, (2 + 1)\boxed{18}
    |\\(?:[dt]?frac|sqrt)\{[^{}]*\}(?:\{[^{}]*\})?\s?  # \frac{1}{2}\boxed{18}, but not \text{Answer:} \boxed{18}
    |[0-9)}]\s?(?:\\(?:cdot|times|div)|[-+*/x×·÷])\s?)\Z"""  # 2 \cdot \boxed{18}
)
_JOINED_BEFORE = re.compile(  # about \boxed{18}, x \approx \boxed{18}
    r"(?i)(?:\b(?:or|except|than|about|approximately|roughly)|(?:\A|[^0-9.}\s])\s?(?:\\approx|≈))[\s$*_({\[\\]*\Z"
)
_DENIED_AFTER = re.compile(  # in the examples, [18] is a mark
    rf"""(?xi)(?:
    \.?[0-9]|[a-fijknp-rt-z]\b|_[0-9{{]|[ \t]?\^(?!\s*\{{?\s*\\circ)  # [18]5, [18]x, [18]_8, [18]^2
    |[ \t]?\\(?:pi|sqrt|times|cdot|div|pm)\b|[ \t]?[-+*/<>][ \t]?[0-9(\\]  # [18] \times 2, [18] + 2
    |[ \t$]+to[ \t$]+[0-9]|\$?[-–][$0-9]  # [18] to 20, [18]-20
    |[ \t]?\\?%[ \t$]*of[ \t$]+(?:the\s)?[0-9]  # [18]% of 20
    |(?:[ \t~$]|\\(?:[)\], ]|text\{{)){{0,4}}(?:{SCALE}s?\b|{MYRIADS})  # [18] million
    |(?:\\[)\]]|\\text\{{|[ \t$*_,(){{}}\]])*(?:\?|(?:wrong|incorrect)\b  # [18]?, [18] (wrong)
        |(?:{SEEMS}\b[^.!?\n]{{0,20}}?\b(?:not|wrong|incorrect|false|too|guess)|(?:is|was|ca)n't|cannot)\b
        |(?:or|(?:but\s+)?{HEDGING})\b(?P<other>(?:[^.!?\n]|\.(?=[0-9]))*)  # [18] or 20
    ))"""
)
_SENTENCE_START = re.compile(r"[.!?]\s|\n")
_BRACE = re.compile(r"\\[{}]|[{}]")  # { and \{


def _marks(text: str, wanted: str | None, before: Before) -> Iterator[Mark]:
    """Yield the marks of a kind, the last one first."""
    start = len(text)
    for _ in range(MOST_MARKS):
        if (mark := before(text, start, wanted)) is None:
            return
        yield mark
        start = mark.start


@lru_cache(maxsize=8)  # a completion is read twice, strictly and leniently
def _marked(text: str, wanted: str | None, before: Before) -> Mark | None:
    """Return the last mark of a kind with its answer, together with different answers in marks next to it. Marks are
    next to each other if they are in one paragraph (`####`: in one line) or have only words such as "or" between them,
    unless the first is taken back. If the words around a mark deny its answer, the whole sentence is the answer."""
    marks = _marks(text, wanted, before)
    for last in marks:
        if picked := _pick(last.text, wanted):
            break
    else:
        return None
    parts, start = [last.text], last.start
    for mark in marks:
        if not _are_beside(text[mark.end : start], wanted, by_line=before is _hashes_before):
            break
        if mark.end <= start and mark.text and not any(equal(mark.text, part) for part in parts):
            parts.insert(0, mark.text)
        start = mark.start
    if len(parts) > 1:
        picked = _pick(", ".join(parts), wanted) or picked
    elif wanted != GOLD and (sentence := _denied(text, start, last)):
        picked = sentence
    if wanted != GOLD and _is_taken_back(text[last.end : last.end + LONGEST_ANSWER], picked, wanted):
        return None
    return Mark(last.start, last.end, picked)


def _are_beside(between: str, wanted: str | None, by_line: bool) -> bool:
    """Return True if two marks are one statement. With `by_line` a mark on a later line is a later answer."""
    if len(between) > LONGEST_ANSWER or _CORRECTED.search(between):
        return False
    is_joined = _JOINED.fullmatch(between) is not None
    return is_joined or (wanted != GOLD and ("\n" if by_line else "\n\n") not in between)


def _denied(text: str, start: int, mark: Mark) -> str | None:
    """Return the sentence around a mark if it denies the marked answer or offers another one."""
    near = text[max(0, start - NEAR) : start].rpartition("\n")[2]
    after = _DENIED_AFTER.match(text, mark.end, mark.end + LONGEST_ANSWER)
    if after and after["other"] and equal(tidy(after["other"]), mark.text):
        after = None
    is_product = text[start] == "\\" and _OPERAND_BEFORE.search(near)
    if after is None and not is_product and not _JOINED_BEFORE.search(near) and not TURNED.search(near):
        return None
    before = text[max(0, start - LONGEST_ANSWER) : start]
    before = before[max((stop.end() for stop in _SENTENCE_START.finditer(before)), default=0) :]
    return before + text[start : after.end() if after else mark.end]


def _box_before(text: str, end: int, wanted: str | None) -> Mark | None:
    start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
    if start < 0:
        return None
    after = text[start + 5 : start + LONGEST_ANSWER + 10]
    shown = after.removeprefix("d").lstrip()
    inner = _braced(shown) if shown.startswith("{") else re.split(r"[\s$.,]", shown, maxsplit=1)[0]
    skipped = start + 5 + len(after) - len(shown)
    return Mark(start, skipped + len(inner) + 2 * shown.startswith("{"), inner)


def _braced(text: str) -> str:
    """Return the text between the brace that begins a text and the matching one, or nothing if none matches."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[1 : brace.start()]
    return ""


_ANSWER_IS = re.compile(
    r"""(?xi)nswers?(?:\s+(?:to|for|of|in)\b[^\n.:=?]{0,80}?)?[*_\s]*  # "Answer to the question"
    (?:[:：]|\b(?:is|are|equals|(?:would|will|should|must)\s+be)\b)(?:[*_]+(?=\s))?\s*
    (?:[:=]|(?:simply|therefore|thus|clearly|definitely)\b)?(?:[*_]+(?=\s))?\s*"""
)
_LABEL = re.compile(  # "So the final answer is", "Answer:"
    rf"(?xi)[*_\#\s]*(?:{SO},?\s+)?(?:the\s+|my\s+)?(?:final\s+|correct\s+)?a"
    + _ANSWER_IS.pattern.removeprefix("(?xi)")
)
_HEADING = re.compile(  # "Step 2", "Final Answer", "Explanation", but not "Answer: 18"
    r"""(?xi)(?:final\s+)?(?:step|part|case|answer|solution|conclusion|explanation|summary|method|approach|reasoning
    |calculation|verification|check|problem|question|note|given|result)s?\b(?!\s*[:=]\s*\S*\d|(?<=answer)\s+\$?\d)"""
)
# What follows #### on its line, with the next line if a displayed formula begins here.
_LINE = re.compile(r"(?:\s*(?:\\\[|\$\$)[ \t]*\n(?=[^\n]+\n\s*(?:\\\]|\$\$)))?[^\n]*")


def _hashes_before(text: str, end: int, wanted: str | None) -> Mark | None:
    start = text.rfind("####", 0, end)
    if start < 0:
        return None
    line = _LINE.findall(text[start + 4 : min(end, start + 2 * LONGEST_ANSWER)])[0]
    inner = line.partition("</")[0].rstrip("# ").lstrip(": ")
    return Mark(start, start + 4 + len(line), "" if _is_heading(inner, wanted) else inner)


def _is_heading(line: str, wanted: str | None) -> bool:
    """Return True for a Markdown heading such as `#### Step 2: add`, which is not an answer."""
    if wanted == GOLD or number(line) is not None or (wanted and equal(tidy(line), wanted)):
        return False
    if line.endswith(":") or (_HEADING.match(line.lstrip("* ")) and not _LABEL.match(line)):
        return True
    return wanted is None and not DIGIT.search(in_digits(line)) and "\\" not in line and len(line.split()) > 4


def _tag_before(text: str, end: int, wanted: str | None) -> Mark | None:
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>", 0, end)))
    if start < 0:
        return None
    stop = text.find("</answer>", start)
    return Mark(start, stop + len("</answer>"), text[start + len("<answer>") : stop])


_SENTENCE_END = re.compile(  # "18. Then", "18! Great", "18, because", but not "4! = 24"
    r"[.?](?=\s|$)|!(?=\s*[^\s=*/^+-]|\s*$)|;\s|,?\s+(?:because|since)\b|,\s+(?:which|so|where|as|but)\b|\n"
)
_GOES_ON = re.compile(  # another answer, or a correction, after the end of a sentence
    rf"""(?xi)\s{{0,9}}{ANOTHER}\b  # "18. Or 20"
    |(?:(?<!\n)[ \t]{{0,9}}\n)?[ \t]{{0,9}}[*_(]*(?-i:[A-J])[*_]*(?:[).:,;?!\n]|$)  # "A. B", but not after a blank line
    |(?<=\bbut|.\bso)[^.!?\n]*\b(?:or|maybe|perhaps|possibl[ey]|could|might|may|also|better)\b"""  # "A, but C may be"
)


def _phrases(text: str) -> list[str]:
    """Return what follows the last "the answer is": up to the end of the sentence, of the next sentence, and so on."""
    end = len(text)
    for _ in range(MOST_TRIES):
        start = max(text.rfind("nswer", 0, end), text.rfind("NSWER", 0, end))
        if start < 0:
            return []
        window = text[start : start + LONGEST_ANSWER]
        if lead := _ANSWER_IS.match(window):
            rest = _CALCULATION.sub("", window[lead.end() :])
            ends = [stop.start() for stop in _SENTENCE_END.finditer(rest) if not _GOES_ON.match(rest, stop.end())]
            return [rest[: stop + rest.startswith("?", stop)] for stop in ends[:MOST_TRIES]] or [rest]
        end = start
    return []


def _answer_is(phrases: list[str], wanted: str | None) -> str | None:
    if wanted is not None:  # not every full stop ends a sentence, as in "U.S. Grant"
        phrases = sorted(phrases, key=lambda phrase: not equal(tidy(phrase), wanted))
    picked = _pick(phrases[0], wanted) if phrases else None
    if picked is None or number(picked) is not None or (wanted and equal(picked, wanted)):
        return picked
    begins_with_word = picked.startswith("I ") or picked[:2].isalpha()
    is_sentence = begins_with_word and (DIGIT.search(picked) or len(picked.split()) > 3)
    return None if is_sentence or picked[:4].lower() == "not " else picked


_ANSWER = any_of("antwort réponse respuesta risposta resposta svar ответ 答案? 回答 정답 답")
_ANSWER_WITH_VERB = rf"(?:\b(?:die|la)\s)?{_ANSWER}(?:\s?[:：]|\s(?:ist|es|est|è|é)\b|是)"
_THEREFORE = re.compile(  # "Hence, D.", "Antwort: B", "La respuesta es C"
    rf"(?i)(?:{SO}\b[,:]?\s+|{_ANSWER_WITH_VERB}\s*)(?=\W*[A-J]\b\W*\Z)"
)


def _letter(text: str, wanted: str | None) -> str | None:
    phrase, line = next(iter(_phrases(text)), ""), _THEREFORE.sub("", _last_line(text).lstrip("# "))
    for mark in (_marked(text, wanted, _box_before), _marked(text, wanted, _tag_before)):
        if mark and (choice := choice_letter(mark.text)):
            return choice if choice_letter(phrase) in (None, choice) else None
    if named_letters(phrase) or re.match(r"[A-J]\b(?! [a-z])", phrase):
        return choice_letter(phrase)
    before = _last_line(text.rstrip()[: -len(line)]) if line else ""
    if named_letters(before[:4]) and named_letters(line[:4]):
        return None  # the end of a list of choices
    if choice := choice_letter(phrase) or closing_choice(line) or choice_letter(line) or named_choice(line):
        return choice
    opening, _, rest = text.strip().partition("\n\n")
    return None if _GOES_ON.match(rest) or LETTER.search(rest) else choice_letter(opening[:LONGEST_ANSWER])


def _last_line(text: str) -> str:
    return text[-LONGEST_ANSWER:].rstrip().rpartition("\n")[2]


_MARKS = {"gsm8k": _hashes_before, "boxed": _box_before, "tags": _tag_before}
STYLES = (*_MARKS, "letter", "alone")


def _in_place(text: str, style: str, wanted: str | None) -> str | None:
    if style == "letter":
        return _letter(text, wanted)
    if style == "alone":
        return (tidy(text) or None) if len(text.strip()) <= LONGEST_ANSWER and "\n" not in text.strip() else None
    mark = _marked(text, wanted, _MARKS[style])
    return mark.text if mark else None


def strict(text: str, style: str, gold: str = "", opened: bool = False) -> str | None:
    """Return the answer, as written, from the place that the prompt asks for, or None if there is none. If the prompt
    has `opened` a thought, the text has to close it."""
    thought, rest, is_open = after_thinking(text)
    if is_open or (opened and thought is None):
        return None
    wanted = gold if gold and not is_plain(gold) else None  # None: pick numbers out of words
    return _settled(_in_place(rest, style, wanted), wanted)


def lenient(text: str, gold: str = "") -> str | None:
    """Return the answer from any place, in the order given at the top of this file."""
    wanted = gold if gold and not is_plain(gold) else None
    thought, rest, _ = after_thinking(text)
    return _settled(_anywhere(rest, wanted) or (_anywhere(thought, wanted) if thought else None), wanted)


def marked(text: str, style: str) -> str | None:
    """Return the whole text in the place of an answer, which is how gold answers are read from worked solutions."""
    return _in_place(text, style, GOLD)


_OTHER = r"(?:\$?[0-9]|\(?(?-i:[A-J])\)?[*.!]*(?:\n|\Z))"
_MISTAKE = any_of(r"was_wrong made_an?_(?!effort) forgot mis[a-z]+ should_have\b(?!_(?:exactly_)?\$?[0-9])")
_CLAIM = r"(?:that|this|it|which|(?:my|the|this|that)\s(?:\w+\s)?(?:answer|result|solution)(?:\sabove)?)"
_WRONG = any_of("wrong incorrect false an?_(?:mistake|error) not_(?:right|correct|the_answer)")
_TAKEN_BACK = re.compile(  # "#### 18\n\nWait, that is wrong. The answer is 20."
    rf"""(?xi)(?:\A|[.!?\n,;])[\s*_$]{{0,9}}
    (?:(?P<corrected>(?:no|{CORRECTING})\b
        (?:[^\n]{{0,200}}?\b(?:should|answer\s+is|it\s+is|it's)\b|[\s:,.!-]{{1,4}}{_OTHER}|\s?:))  # "Sorry, it is 20"
    |(?:(?!if\b)\w+,?\s)?(?:I\s+{_MISTAKE}  # "Oh, I made a mistake"
        |{_CLAIM}(?:(?:\s+(?:is|was)|'s)\s+(?:actually\s+)?{_WRONG}  # "My first answer was wrong"
            |\s+(?:isn't|can't\sbe|cannot\sbe)\s+(?:right|correct)))\b)"""
)


def _is_taken_back(rest: str, answer: str, wanted: str | None) -> bool:
    """Return True if what follows a mark calls its answer wrong, or corrects it to another one."""
    match = _TAKEN_BACK.search(rest)
    other = _unmarked(rest, wanted) if match and match["corrected"] and number(answer) is not None else None
    return match is not None and not (other and equal(other, answer))


def _anywhere(text: str, wanted: str | None) -> str | None:
    marks = [mark for before in _MARKS.values() if (mark := _marked(text, wanted, before))]
    return max(marks).text if marks else _unmarked(text, wanted)


def _unmarked(text: str, wanted: str | None) -> str | None:
    if wanted is None and _TAKEN_BACK.search(DIGIT.split(text)[-1][:LONGEST_ANSWER]):  # "18. That is wrong."
        return None
    answer = _answer_is(_phrases(text), wanted) or closing_choice(_last_line(text)) or last_number(text)
    return answer or (_letter(text, wanted) if wanted and wanted in LETTERS else None)


def _settled(answer: str | None, wanted: str | None) -> str | None:
    """Return the 20 of "18, no wait, 20", because an answer that is taken back does not count."""
    if answer is None or wanted is not None or number(answer) is not None:
        return answer
    parts = [phrase for phrase in CORRECTION.split(answer) if DIGIT.search(phrase)]
    return offered(parts[-1].lstrip(" ,.:;!")) if len(parts) > 1 else answer


_FENCED = re.compile(r"```(?:[^\n`]+```|[^\n`]*\n(.*?)(?:```|\Z))", re.DOTALL)  # the first, ```f(3)```, is no block


def fenced(text: str) -> str | None:
    """Return the last fenced block after the thinking, or None if there is none."""
    blocks = [block[1] for block in _FENCED.finditer(after_thinking(text)[1]) if block[1] is not None]
    return blocks[-1] if blocks else None


def program(text: str) -> str:
    """Return the last fenced block, or all of the text after the thinking."""
    block = fenced(text)
    return after_thinking(text)[1] if block is None else block
