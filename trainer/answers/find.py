r"""Find the answer in a text. Standard library only; what a model wrote is never evaluated.

`strict(text, style, gold)` looks only where the format asked for puts the answer (`STYLES`). `lenient(text, gold)`
looks everywhere, in this order, and returns the first answer that it finds:

    1. the marks `\boxed{}`, `####` and `<answer>`: whichever of them comes last in the text
    2. "the answer is ..." (also "Answer: ..."), the last one
    3. a choice that ends the last line: "so it is (C)."
    4. the last number of the text

Both look after the thinking (`</think>`) first. Only `lenient` looks into it, if it finds nothing after it. As long as
the thinking has not ended, there is no strict answer.

A number is picked out of the words around it only if the gold answer is a plain number, or if none is given. Otherwise
the answer is all that stands there. A phrase with two different numbers is returned whole, so it equals neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trainer.answers.choice import choice_letter, named_letters
from trainer.answers.compare import equal
from trainer.answers.notation import BOLD, LONGEST_ANSWER, VULGAR_FRACTIONS, WRAPPERS, clean, to_ascii
from trainer.answers.number import CURRENCY, DECIMAL, is_plain, is_unit, number

LONGEST_TEXT = 200_000  # of a completion the end is read, where answers are
MOST_TRIES = 8  # earlier marks looked at when the last one holds nothing
MOST_CORRECTED = 2_000  # characters at the end in which an answer may be taken back
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
_SENTENCE_END = re.compile(
    r"[.?](?=\s|$)|!(?=\s*[^\s=*/^+-]|\s*$)|;\s|,?\s+(?:because|since)\b|,\s+(?:which|so|where|as|but)\b|\n"
)
# After the end of a sentence: another answer, or one that takes the first back.
_GOES_ON = re.compile(
    r"""\s*(?:or|no|wait|maybe|perhaps|possibly|alternatively|actually|sorry|oops|correction)\b
    |\s*[*_(]*(?-i:[A-J])[*_]*(?:[).:,;?!\n]|$)
    |(?:(?<=\bbut)|(?<=\bso))[^.!?\n]*\b(?:or|maybe|perhaps|possibl[ey]|could|might|may|also)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_HEDGE = re.compile(r"(?:\bor\b|/)[^0-9]{0,30}[0-9]", re.IGNORECASE)
_DOUBT = re.compile(
    r"\b(?:not|never|nope|cannot|false|wrong|incorrect|maybe|perhaps|if|unless|otherwise|least|most|than|power|root"
    r"|squared|cubed|doubled|halved|negative)\b|n't\b",
    re.IGNORECASE,
)
_CHANGED = re.compile(
    r"\b(?:no|half(?:\s+of)?|twice|thrice|double|triple|log|over|under|above|below|up\s+to)\W*$", re.IGNORECASE
)
_VARIABLE = re.compile(r"(?<![\w'.])(?:[b-zB-HJ-Z](?![\w'.])|a\W*$)")  # a letter by itself, but no article and no "I"
_CORRECTION = re.compile(
    r"[ \t,.;(-]+(?:no\b[,.;:!]*[ \t]+)?(?:wait|actually|sorry|oops|correction|scratch that|i mean|make that)\b"
    r"[ \t,.:;!-]*(?:no\b[ \t,.:;!-]*)?",
    re.IGNORECASE,
)
_ASIDE = re.compile(  # 18 because 3 * 6 = 18, 18 (see page 3), 18 (6 x 3), 18 (eighteen)
    r"""\b(?:because|since)\b.*
    |\s\(\s*(?:see|from|using|i\.e\.|e\.g\.|that\s+is)\b[^()]*\)
    |\s\((?=[\s=$-]*[0-9][^()]*[=+*/x]|\s*=)(?:[-0-9$.,\s=+*/]|(?<=\s)x(?=\s))+\)
    |\s\((?!\s*(?:or|not|wrong|maybe|perhaps)\b)[A-Za-z\s,.'-]{3,}\)""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_COMMENT = re.compile(r"(?<=[0-9a-z.)%])(?<!\bwell)[\s,]+(?:which|where|as(?!\s+well))\b.*", re.IGNORECASE | re.DOTALL)
_WORKING = re.compile(rf"(?:{CURRENCY}?{DECIMAL}%?\s*[-+*/x]\s*)+{CURRENCY}?{DECIMAL}%?\s*=\s*(?=[-$€£]?[0-9])")
_CONTEXT = re.compile(  # what stands before a number that is not offered as an answer: in 3 days, for each of 5 friends
    r"""\b(?:in|for|after|before|per|every|each|at|with|within|during|over|on|of|from|by|page|step|part|question|problem)
    \s+(?:(?:the|a|an|about|only|each|every|all|these|those|his|her|their|its)\s+)?$""",
    re.VERBOSE | re.IGNORECASE,
)
_LEFT_OVER = re.compile(r"\s*(?:(?:[A-Za-z]+\s+)?(?:left|over|remaining)|of\s+(?:them|which|those))\b", re.IGNORECASE)
_COMPOUND = re.compile(  # 5 feet 6 inches, 5 weeks and 3 days, 18 dollars and 50 cents, 18 % of 50, 2 dollars million
    r"""\s*(?:(?:years?|months?|weeks?|days?|hours?|hrs?|minutes?|mins?|feet|foot|ft|yards?|miles?)\s+(?:and\s+)?[0-9]
    |(?:dollars?|euros?|pounds?)\s+(?:and\s+)?[0-9]+\s+(?:cents?|pence)
    |%?\s*(?:percent\s+)?of\s+[0-9]
    |and\s+[a-z]+\s+(?:half|halves|quarters?|thirds?|[a-z]+ths?)\b|and\s+(?:up|above|below|counting)\b
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


def _pick(phrase: str, wanted: str | None) -> str | None:
    """Return the answer in a phrase: `18` for "$18 per day, because 3*6=18".

    `wanted` is the gold answer if it is no plain number: then the answer is the whole phrase."""
    if len(phrase) > LONGEST_ANSWER:
        return None
    if wanted is not None:
        for whole in (_tidy(phrase), phrase.strip()):
            if equal(whole, wanted):
                return whole
    if number(phrase) is None and (label := _LABEL.match(phrase)):
        phrase = phrase[label.end() :]
    if "\\boxed" in phrase and (box := _boxed(phrase, wanted)):
        return box[1]
    phrase = _tidy(phrase)
    if wanted is not None or not phrase or number(phrase) is not None:
        return phrase or None
    return _number_of_prose(phrase) or phrase


def _number_of_prose(phrase: str) -> str | None:
    """Return the one number that a phrase offers. Return None if it offers two, doubts it, or goes on with algebra."""
    plain = " ".join(to_ascii(phrase).split())
    if _HEDGE.search(plain):
        return None
    plain = _ASIDE.sub("", _CORRECTION.split(plain)[0] or plain)
    if leading := _IN_TEXT.match(plain):  # 18, which is 3 * 6; 18: she has 3 * 6 = 18 eggs
        plain = leading[0] + _WORKING.sub("", _COMMENT.sub("", plain[leading.end() :]))
    plain = _without_repetition(plain)
    numbers = list(_IN_TEXT.finditer(plain))
    if not numbers or any(_is_offered(plain, other) for other in numbers[1:]):
        return None
    first = numbers[0]
    rest = plain[first.end() :]
    if first.start() == 0:
        leads = _PROSE_TAIL.match(rest) and not _HEDGED_BARE.match(rest) and not _opens_with_formula(rest)
        is_clear = bool(leads or not rest.strip(" .,;:()"))
        is_doubted = _COMPOUND.match(rest) or _DOUBT.search(rest)
    else:
        is_sentence = re.match(r"[A-Za-z']{2,}[\s:,]", plain) and not _FORMULA.search(plain)
        is_clear = len(numbers) == 1 and bool(is_sentence)
        is_doubted = _DOUBT.search(plain) or _CHANGED.search(plain[: first.start()])
    return _tidy(first[0]) if is_clear and not is_doubted else None


def _without_repetition(plain: str) -> str:
    """Take out what repeats the first number, in whatever notation."""
    numbers = list(_IN_TEXT.finditer(plain))
    for other in reversed(numbers[1:]):
        if number(other[0]) == number(numbers[0][0]):
            plain = plain[: other.start()] + plain[other.end() :]
    return plain


def _is_offered(plain: str, other: re.Match[str]) -> bool:
    """Return True for the 20 in "18, 20", and False for the 3 in "18 in 3 days" and "5 and 3 left over"."""
    before = plain[max(0, other.start() - 40) : other.start()]
    return not _CONTEXT.search(before) and not _LEFT_OVER.match(plain, other.end())


def _opens_with_formula(rest: str) -> bool:
    word = re.match(r"[\s,;:(\[%.]*([A-Za-z']+)(\s*[-+*/^=<>])?", rest)
    if word is None or re.match(r"I [a-z]{2}", rest[word.start(1) :]):  # 18. I hope this helps!
        return False
    is_variable = len(word[1]) == 1 and (word[2] is not None or rest.strip(" .") == "a")
    return is_variable or not is_unit(word[1]) or _VARIABLE.search(rest, word.end()) is not None


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


# A box right before another one: "\\boxed{2} and \\boxed{3}", "$x = \\boxed{2}, y = "
_BESIDE = re.compile(
    r"\\boxed\{([^{}\n]*)\}[ \t$]*(?:[,;/&]|or\b|and\b)?[ \t$]*(?:or\b|and\b)?[ \t$]*(?:[A-Za-z][ \t]*=[ \t]*)?\Z"
)


def _braced(text: str) -> str | None:
    """Return the text between its first brace and the matching one."""
    depth = 0
    for brace in re.finditer(r"\\[{}]|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return text[1 : brace.start()]
    return None


def _hashes(text: str, wanted: str | None) -> Found | None:
    end = len(text)
    for _ in range(MOST_TRIES):
        start = text.rfind("####", 0, end)
        if start < 0:
            return None
        line = text[start + 4 : min(end, start + 2 * LONGEST_ANSWER)].partition("\n")[0]
        line = line.partition("</")[0].strip().lstrip(": ")
        if line and not _is_heading(line, wanted) and (picked := _pick(line, wanted)):
            return start, picked
        end = start
    return None


def _is_heading(line: str, wanted: str | None) -> bool:
    """Return True for a markdown heading, such as `#### Step 2: add`, which is no answer."""
    if wanted == GOLD or number(line) is not None or (wanted and equal(_tidy(line), wanted)):
        return False
    if _HEADING.match(line.lstrip("* ")) or line.endswith(":"):
        return True
    return wanted is None and not _ANY_DIGIT.search(line) and "\\" not in line and len(line.split()) > 4


def _tags(text: str, wanted: str | None) -> Found | None:
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    picked = _pick(text[start + len("<answer>") : text.find("</answer>", start)], wanted)
    return (start, picked) if picked else None


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


def _answer_is(text: str, wanted: str | None) -> str | None:
    phrases = _phrases(text)
    if wanted is not None:  # U.S. Grant: not every full stop ends a sentence
        phrases.sort(key=lambda phrase: not equal(_tidy(phrase), wanted))
    picked = _pick(phrases[0], wanted) if phrases else None
    if picked is None or number(picked) is not None or (wanted and equal(picked, wanted)):
        return picked
    if re.match(r"not\b", picked, re.IGNORECASE):
        return None
    is_sentence = re.match(r"(?:I\s|[A-Za-z']{2,}\b)", picked) and (
        _ANY_DIGIT.search(picked) or len(picked.split()) > 3
    )
    return None if is_sentence else picked


def _last_line(text: str) -> str:
    return text[-LONGEST_ANSWER:].rstrip().rpartition("\n")[2]


_MAY_CLOSE = re.compile(r"\([A-J]\)|^\W*[A-Ja-j]\W*$")
_CLAUSE = re.compile(r"[,.;:]|\b(?:so|thus|hence|therefore)\b")
_RULED_OUT = re.compile(
    _DOUBT.pattern
    + r"|\b(?:or|either|neither|nor|and|could|might|may|doubt|rul(?:e|es|ed|ing)\s+out|eliminat|exclud|reject)",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\b(?:[Oo]ption|[Cc]hoice)\s+(?:is\s+)?\(?([A-J])\b")


def _closing_choice(text: str) -> str | None:
    """Return a choice in brackets at the end of the last line, or a choice that is the whole line."""
    line = _last_line(text)
    if not _MAY_CLOSE.search(line):
        return None
    line = clean(line)
    if closing := re.search(r"\(([A-J])\)[.!]?$", line):
        clause = _CLAUSE.split(line[: closing.start()])[-1]
        return None if _RULED_OUT.search(clause) or named_letters(clause) else closing[1]
    return choice_letter(line) if len(line) <= 4 and line[:1] in "(ABCDEFGHIJ" else None


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
    if choice := choice_letter(phrase) or _closing_choice(text) or choice_letter(line):
        return choice
    named = set(_NAMED.findall(line))
    return named.pop() if len(named) == 1 and not _RULED_OUT.search(line) else None


def _last_number(text: str) -> str | None:
    last_digit = _ANY_DIGIT.search(text[::-1])
    if last_digit is None:
        return None
    end = len(text) - last_digit.start()
    for window in WINDOWS:
        start = max(0, end - window)
        plain = to_ascii(text[start : end + 2])
        numbers = [found for found in _IN_TEXT.finditer(plain) if found.start() or not start]
        if numbers and len(numbers[-1][0]) <= LONGEST_ANSWER:
            return None if _is_one_of_two(plain, numbers[-2:]) else _tidy(numbers[-1][0])
    return None


def _is_one_of_two(plain: str, numbers: list[re.Match[str]]) -> bool:
    """Return True for "18 or 20", and False for "6 rings or 6" and "10 + 8 or 18"."""
    first, last = numbers[0], numbers[-1]
    between = re.fullmatch(r"(?:\s[A-Za-z]+)?,?\s+or\s+(?:[A-Za-z]+\s+)?", plain[first.end() : last.start()])
    is_worked_out = plain[: first.start()].rstrip().endswith(("+", "-", "*", "/", "="))
    return between is not None and not is_worked_out and number(first[0]) != number(last[0])


def _last_mark(text: str, wanted: str | None) -> str | None:
    marks = [found for found in (_boxed(text, wanted), _hashes(text, wanted), _tags(text, wanted)) if found]
    return max(marks)[1] if marks else None


def _answer_of(find: Callable[[str, str | None], Found | None]) -> Callable[[str, str | None], str | None]:
    def style(text: str, wanted: str | None) -> str | None:
        found = find(text, wanted)
        return found[1] if found else None

    return style


STYLES: dict[str, Callable[[str, str | None], str | None]] = {
    "gsm8k": _answer_of(_hashes),
    "boxed": _answer_of(_boxed),
    "tags": _answer_of(_tags),
    "letter": _letter,
}


def strict(text: str, style: str, gold: str = "", opened: bool = False) -> str | None:
    """Return the answer, as written, from the place that the format asks for, or None if there is none.

    `opened` says that the prompt has opened a thought, which the text has to close."""
    said = text[-LONGEST_TEXT:].rpartition(THOUGHT_END)
    if THOUGHT in said[2] or (opened and not said[1]):
        return None
    return STYLES[style](_after_thinking(text), _wanted(gold))


def lenient(text: str, gold: str = "") -> str | None:
    """Return the answer wherever it stands. The order of places is at the top of this file."""
    wanted = _wanted(gold)
    thought = text[-LONGEST_TEXT:].rpartition(THOUGHT_END)[0]
    for part in (_after_thinking(text), thought) if thought else (_after_thinking(text),):
        corrected = _corrected(part)
        found = _last_mark(corrected, wanted) or _answer_is(corrected, wanted) or _closing_choice(corrected)
        if not found and any(_DENIED.fullmatch(phrase) for phrase in _phrases(corrected)[:1]):
            return None  # the only number is the one that is denied
        if found or (found := _last_number(corrected)):
            return found
    return None


def _corrected(text: str) -> str:
    """Take out numbers that are taken back near the end: `18, no wait,` of "18, no wait, 20"."""
    before, end = text[:-MOST_CORRECTED], text[-MOST_CORRECTED:]
    return before + _TAKEN_BACK.sub("", end) if any(word in end for word in _SECOND_THOUGHTS) else text


def marked(text: str, style: str) -> str | None:
    """Return all that stands in the place of an answer: how a gold answer is read from a worked solution."""
    return STYLES[style](text, GOLD)


def _wanted(gold: str) -> str | None:
    """Return None if numbers are to be picked out of words: if the gold answer is a plain number, or not given."""
    return gold if gold and not is_plain(gold) else None


THOUGHT, THOUGHT_END = "<think>", "</think>"
GOLD = ""  # in place of the gold answer, where it is the one to be found
_DENIED = re.compile(
    r"\s*(?:not|never|twice|half|at\s+(?:least|most)|(?:more|less)\s+than)\b[^0-9]*[0-9][0-9.,]*[^0-9]*", re.I
)
_SECOND_THOUGHTS = ("ait", "ctually", "orry", "ops", "orrection", "cratch that", "I mean", "ake that")
_TAKEN_BACK = re.compile(
    rf"(?<![0-9.,])[-+]?(?:{CURRENCY}\s?)?{DECIMAL}[*%]*(?:\s[A-Za-z]+){{0,2}}(?:{_CORRECTION.pattern})"
    r"(?=(?:(?:it|that|the|right|correct|answer|is|was|should|be|'s)\b[\s:,]*)*[-$€£]{0,2}[0-9])",
    re.IGNORECASE,
)
_STOP = re.compile(r"<\|(?:endoftext|end_of_text|im_end|eot_id|eom_id|end|return)\|>|<eos>|<end_of_turn>|</s>")
_STOP_TOKENS = re.compile(r"(?:<\|[A-Za-z_]{1,40}\|>|</s>|<eos>|\s)+$")


def _after_thinking(text: str) -> str:
    """Return what comes after the thinking, up to the stop token: a number in a thought is not yet an answer."""
    text = text[-LONGEST_TEXT:].rpartition(THOUGHT_END)[2]
    if (stop := _STOP.search(text)) and not (stop[0] == "</s>" and "<s>" in text):  # <s>17</s> is struck out
        text = text[: stop.start()]
    if text.endswith(">") and (stop := _STOP_TOKENS.search(text, max(0, len(text) - 100))):
        text = text[: stop.start()]
    return text
