r"""Find the answer in a text, and compare two answers. Standard library only; what a model wrote is only ever read.

Finding. `strict(text, style)` looks only where the format asked for puts the answer (`STYLES`). `lenient(text)` looks
everywhere; the first that finds something wins:

    1. the marks `\boxed{}`, `####` and `<answer>`: whichever of them comes last in the text
    2. "the answer is ..." (also "Answer: ..."), the last one
    3. a choice that ends the last line: "so it is (C)."
    4. the last number of the text

Both look behind the thinking (`</think>`) first; only `lenient` looks into it, where nothing comes after.

Comparing. `equal` puts both sides into one normal form: an exact number, else intervals, tuples and sets of such,
else text. What was decided where a reading is open (tests/data/answers.yaml has a case for each):

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
import unicodedata
from collections.abc import Callable, Hashable
from fractions import Fraction
from itertools import takewhile

# Limits that keep every pattern below cheap on hostile text. No answer of GSM8K or MATH comes near them.
LONGEST_ANSWER = 400  # characters
LARGEST_EXPONENT = 1_000  # of ten
LONGEST_TEXT = 200_000  # of a completion the end is read, where answers are
MOST_TRIES = 8  # earlier marks looked at when the last one holds nothing
WINDOWS = (60, 2_000)  # characters before the last digit in which the last number begins; the short one is fast

# ---------------------------------------------------------------------------------------------- one notation for many

_MINUS = "\u2010\u2011\u2012\u2013\u2014\u2212\u207b\ufe58\ufe63\uff0d"
_SPACES = "\t\n\r\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = [*range(9), 11, 12, *range(14, 32), 127, 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F)]
_INVISIBLE += [*range(0x2060, 0x2070), *range(0xFE00, 0xFE10), 0xFEFF, 0xFFFD, *range(0xD800, 0xE000)]
_VULGAR = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_SIGNS = {
    "×": "*", "⋅": "*", "·": "*", "∙": "*", "÷": "/", "⁄": "/", "∕": "/", "％": "%", "＄": "$", "．": ".", "。": ".",
    "，": ",", "：": ":", "（": "(", "）": ")", "＝": "=", "≈": "=", "＋": "+", "π": "\\pi ", "∞": "\\infty ",
    "∪": "\\cup ", "∈": "\\in ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ", "√": "\\sqrt ", "°": "^\\circ ",
    "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
_CHARACTERS: dict[int, str] = {
    **dict.fromkeys(_INVISIBLE, ""),
    **{ord(c): "-" for c in _MINUS},
    **{ord(c): " " for c in _SPACES},
    **{ord(c): f" {text} " for c, text in _VULGAR.items()},
    **{ord(c): text for c, text in _SIGNS.items()},
}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹][⁰¹²³⁴-⁹]*|⁻[⁰¹²³⁴-⁹]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_GLUED_METRES = re.compile(r"(?<=[0-9])(?=m[²³](?!\w))")  # 18m² is an area, 5m^2 is algebra
_PICTURE = re.compile("[\u2190-\u21ff\u2500-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]")  # arrows, ticks, emoji
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")


def _plain(text: str) -> str:
    """ASCII digits, signs and spaces; nothing invisible (NUL, bidi marks, zero-width spaces)."""
    if text.isascii() and text.isprintable():
        return text
    text = _GLUED_METRES.sub(" ", text)
    text = _SUPERSCRIPT.sub(lambda run: "^{" + run[0].translate(_SUPERSCRIPT_DIGITS) + "}", text)
    text = _FOREIGN_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    return _PICTURE.sub(" ", text).translate(_CHARACTERS)


_TEXT_COMMANDS = "text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|boldsymbol|underline"
_BOLD = re.compile(r"(?<![\w)*])(\*\*|__)([^*_]+)\1(?!\w)")  # but not the power 2**3
_MATHS = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.)*)\$")
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!", ""),
        (r"\\[,;: ]|\\quad|\\qquad", " "),
        (r"\\[(\[\])]", " "),  # \( \) \[ \]
        (r"\\(?:left|right|displaystyle|bigl|bigr|Bigl|Bigr|big|Big)(?![A-Za-z])\.?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (rf"\\(?:{_TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\^\s*\{?\s*(st|nd|rd|th)\b\s*\}?", r" \1"),  # 18^{\text{th}}
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", " "),
        (r"\\([$%&#_])", r"\1"),
        (r"\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])", "="),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\(le|ge|ne)(?![A-Za-z])", r"\\\1q"),
        (r"\\frac\s*([0-9])", r"\\frac{\1}"),  # \frac12 is one half
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
    )
]
_WRAPPERS = '*_`" '
_TAG = r"</?(?:b|i|u|p|em|strong|br)\s?/?>"
_OUTER_TAGS = re.compile(rf"^(?:\s*{_TAG})+|(?:{_TAG}\s*)+$", re.IGNORECASE)


def _clean(text: str) -> str:
    """Without the dress of LaTeX and markdown, and without the full stop."""
    text = _BOLD.sub(r"\2", _plain(text)).replace("{,}", ",").replace("~", " ")
    if "<" in text:
        text = _OUTER_TAGS.sub("", text)
    text = _MATHS.sub(r" \1 ", text)
    if "\\" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return text.strip(_WRAPPERS).rstrip(".,;: ").strip(_WRAPPERS)


# --------------------------------------------------------------------------------------------------------- one number

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10\s*\^\s*[{(]?\s*(?P<NAME>[-+]?[0-9]+)\s*[)}]?"
_CURRENCY = r"(?:(?:US|AU|CA|A|C|HK|NZ|S)?\$|[€£¥₹₽₩]|(?:USD|EUR|GBP|INR|CAD|AUD|Rs\.?)(?=[\s0-9]))"
_WRITTEN = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<money>{_CURRENCY}?)\s*(?P<inner>[-+]?)\s*
    (?: (?P<whole>[0-9]+)\s+(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)(?![0-9.,])
      | (?P<top>{_DECIMAL})\s*/\s*(?P<bottom>-?\s*{_DECIMAL})
      | {_POWER.replace("NAME", "ten")}
      | (?P<decimal>{_DECIMAL})(?:[eE](?P<e>[-+]?[0-9]+)|\s*[*xX]\s*{_POWER.replace("NAME", "times")})?
    )""",
    re.VERBOSE,
)
_NUMERIC_FRACTION = re.compile(rf"\\frac\s*\{{\s*(-?\s*{_DECIMAL})\s*\}}\s*\{{\s*(-?\s*{_DECIMAL})\s*\}}")
_SIMPLE = re.compile(r"\s*(-?)\$?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)\.?\s*", re.ASCII)  # nearly all of GSM8K

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MONEY_SCALES = {"k": 3, "K": 3, "M": 6, "B": 9, "bn": 9}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that change the value, or are mathematics: a number before them is not the whole of it.
_NOT_UNITS = _words(
    "pi sqrt sin cos tan cot sec csc log ln exp mod squared cubed factorial choose over plus minus or not "
    "half halves third thirds quarter quarters fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths "
    "tenth tenths tens lakh lakhs crore crores point times divided multiplied less remainder wrong incorrect"
)
_SHORT_UNITS = _words(
    "cm mm km kg mg ml kl lb lbs oz ft in yd yds mi hr hrs min mins sec secs mph kph kmh am pm st nd rd th pts pcs sq "
    "wk wks yr yrs mos usd eur gbp gb mb kb tb kwh kw hz khz mhz ghz rpm psi kj"
)
_ONE_LETTER_UNITS = frozenset("mgshlLKVWNJCF")
_COUNTERS = re.compile("元|块|圆|円|원|个|個|只|人|天|岁|米|厘米|公里|公斤|小时|分钟")  # but not 万, ten thousand
_UNIT_WORDS = re.compile(r"[A-Za-z']+(?:\s*\^\s*\{?[23]\}?)?\.?(?:[\s/*.-]+[A-Za-z']+(?:\s*\^\s*\{?[23]\}?)?)*")


def number(text: str) -> Fraction | None:
    """The exact value of one written number: `-$1,234.50`, `3 1/2 cups`, `\\frac{3}{4}`, `1.5 \\times 10^3`.

    None if there is no number, more than one, or algebra around it.
    """
    if len(text) > LONGEST_ANSWER:
        return None
    if simple := _SIMPLE.fullmatch(text):
        return Fraction(int(simple[1] + simple[2].replace(",", "")))
    text = _NUMERIC_FRACTION.sub(r" \1/\2 ", _clean(text))
    text = _after_equals(text).strip(_WRAPPERS)
    if text[:1] + text[-1:] in ("()", "[]", "{}") and "," not in text:
        text = text[1:-1].strip()
    elif not _OPENING.search(text):
        text = text.rstrip(")]} ")  # 18) has lost its beginning
    written = _WRITTEN.match(_signed_by_word(text))
    if written is None:
        return None
    value, scale = _value(written), _scale(written.string[written.end() :], bool(written["money"]))
    return None if value is None or scale is None else value * scale


_OPENING = re.compile(r"[(\[{]")
_EXPLANATION = re.compile(r"\b(?:because|since|as|so|where|which|that|when|if|for|means|from|i\.e\.)(?![a-z])|[,;:]\s")


def _after_equals(text: str) -> str:
    """`18` of "x = 18" and "3 * 6 = 18", but all of "19 because 3 * 6 = 18"."""
    left, equals, right = text.rpartition("=")
    if not equals or left.endswith(("<", ">", "!", ":", "\\")) or _EXPLANATION.search(left):
        return text
    return right


def _signed_by_word(text: str) -> str:
    word, _, rest = text.partition(" ")
    return "-" + rest if word.lower() in ("minus", "negative") else text


def _value(written: re.Match[str]) -> Fraction | None:
    if written["sign"] and written["inner"]:
        return None
    if written["over"] is not None:
        value = _quotient(written["over"], written["under"])
        value = None if value is None else int(written["whole"]) + value
    elif written["top"] is not None:
        value = _quotient(written["top"], written["bottom"])
    else:
        exponent = int(written["ten"] or written["e"] or written["times"] or 0)
        if abs(exponent) > LARGEST_EXPONENT:
            return None
        value = _decimal(written["decimal"] or "1") * Fraction(10) ** exponent
    return -value if value is not None and "-" in (written["sign"], written["inner"]) else value


def _quotient(top: str, bottom: str) -> Fraction | None:
    under = _decimal(bottom)
    return _decimal(top) / under if under else None


def _decimal(digits: str) -> Fraction:
    whole, _, fraction = digits.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int(whole + fraction or "0"), 10 ** len(fraction))


def _scale(tail: str, money: bool) -> int | None:
    """By how much the words behind a number multiply it: 1 for units. None if they are not units."""
    glued = tail[:1].isalpha()
    tail = tail.strip().lstrip("%$€£¥₹₽₩-/ ").strip(" .")
    if not tail or _COUNTERS.fullmatch(tail):
        return 1
    if money and tail in _MONEY_SCALES:
        return int(10 ** _MONEY_SCALES[tail])
    if not _UNIT_WORDS.fullmatch(tail):
        return None
    words = re.findall(r"[A-Za-z']+", tail)
    if glued and words[0].lower() not in _SHORT_UNITS:
        return None  # 5x and 12ab are algebra
    if not all(_is_unit(word) for word in words):
        return None
    powers = [_SCALES.get(word.lower().rstrip("s"), 0) for word in words]
    scales = list(takewhile(bool, powers))
    return int(10 ** sum(scales)) if not any(powers[len(scales) :]) else None  # 2 dollars million is nothing


def _is_unit(word: str) -> bool:
    lower = word.lower()
    if len(word) == 1:
        return word in _ONE_LETTER_UNITS or lower == "a"
    if lower in _SHORT_UNITS:
        return True
    return lower not in _NOT_UNITS and (len(word) > 3 or any(vowel in lower for vowel in "aeiou"))


# ---------------------------------------------------------------------------------------------------- finding answers

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
    (?:[0-9]*\\[dt]?frac\{{-?{_DECIMAL}\}}\{{{_DECIMAL}\}}
      |(?:{_CURRENCY}\s?-?)?[0-9]+[ ][0-9]+/[0-9]+(?![0-9])
      |(?:{_CURRENCY}\s?-?)?{_DECIMAL}(?:\s?/\s?[0-9]+(?![0-9])|[eE][-+]?[0-9]+(?!\w)|\s?(?:\*|x|\\times|\\cdot)\s?10\^\{{?-?[0-9]+\}}?)?)
    (?:\s?\\?%)?""",
    re.VERBOSE,
)
_ANY_DIGIT = re.compile(f"[\\d{''.join(_VULGAR)}]")
Found = tuple[int, str]  # where, and what


def _tidy(phrase: str) -> str:
    """Without what surrounds an answer; what is left stays as it was written."""
    phrase = _BOLD.sub(r"\2", phrase.strip().lstrip("# "))
    for _ in range(3):  # **$18$**. has three layers
        phrase = phrase.rstrip(".,;: ").strip(_WRAPPERS)
        if phrase.startswith("$") and phrase.endswith("$") and len(phrase) > 2:
            phrase = phrase.strip("$").strip()
        elif phrase.startswith(("\\(", "\\[")) and phrase.endswith(("\\)", "\\]")):
            phrase = phrase[2:-2].strip()
    return phrase


def _pick(phrase: str) -> str | None:
    """The answer within a phrase that holds one: `18` of "$18 per day, because 3*6=18"."""
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
    plain = _plain(phrase)
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
    return word is not None and not _is_unit(word[1])


def _boxed(text: str) -> Found | None:
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    after = text[start + 5 : start + LONGEST_ANSWER + 10].removeprefix("d").lstrip()
    inner = _braced(after) if after.startswith("{") else re.split(r"[\s$.,]", after, maxsplit=1)[0]
    picked = _pick(inner) if inner else None
    return (start, picked) if picked else None


def _braced(text: str) -> str | None:
    """What is between the first brace of `text` and the one that closes it."""
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
    """`#### Step 2: add` is markdown, not an answer."""
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
    """What follows the last "the answer is", up to the end of the sentence."""
    end = len(text)
    for _ in range(MOST_TRIES):
        start = max(text.rfind("nswer", 0, end), text.rfind("NSWER", 0, end))
        if start < 0:
            return None
        window = text[start : start + LONGEST_ANSWER]
        if said := _ANSWER_IS.match(window):
            rest = _CALCULATION.sub("", window[said.end() :])
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
_SAID_CHOICE = re.compile(r"(?:(?:option|choice|letter)\s+)?['\"(]?([A-J])['\")]?(?=[\s.,:;]|$)")
_TWO_CHOICES = re.compile(r"\(?[A-J]\)?\s*(?:or|and|/|,|&)\s*\(?[A-J]\b")
_NAMED_CHOICE = re.compile(r"\b(?:[Oo]ption|[Cc]hoice)\s+\(?([A-J])\b")


def _choice(phrase: str) -> str | None:
    """C of `C`, `(C)`, `C) Paris`, `\\text{(C)}`, `(c)`."""
    phrase = _clean(phrase)
    if _TWO_CHOICES.match(phrase):
        return None
    if upper := _CHOICE.fullmatch(phrase):
        return upper[1]
    lower = _LOWER_CHOICE.fullmatch(phrase)
    return (lower[1] or lower[2]).upper() if lower else None


def _said_choice(text: str) -> str | None:
    phrase = _clean(_phrase(text) or "")
    if _TWO_CHOICES.match(phrase):
        return None
    said = _SAID_CHOICE.match(phrase)
    if said is None or re.match(r"I\s+[a-z]", phrase):  # "Answer: I think ..."
        return _choice(phrase)
    return said[1]


def _last_line(text: str) -> str:
    return text[-LONGEST_ANSWER:].rstrip().rpartition("\n")[2]


_MAY_CLOSE = re.compile(r"\([A-J]\)|^\W*[A-Ja-j]\W*$")


def _closing_choice(text: str) -> str | None:
    """A choice in brackets that ends the last line, or is all of it."""
    line = _last_line(text)
    if not _MAY_CLOSE.search(line):
        return None
    line = _clean(line)
    if closing := re.search(r"\(([A-J])\)[.!]?$", line):
        return None if re.search(r"\([A-J]\)\s*(?:or|and|,)\s*\([A-J]\)[.!]?$", line) else closing[1]
    return _choice(line) if len(line) <= 4 and line[:1] in "(ABCDEFGHIJ" else None


def _letter(text: str) -> str | None:
    for found in (_boxed(text), _tags(text)):
        if found and (choice := _choice(found[1])):
            return choice
    if choice := _said_choice(text) or _closing_choice(text) or _choice(_last_line(text)):
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
        numbers = [found[0] for found in _IN_TEXT.finditer(_plain(text[start : end + 2])) if found.start() or not start]
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
    """The answer in the place that the format asks for, as written; None if there is none."""
    return STYLES[style](_spoken(text))


def lenient(text: str) -> str | None:
    """The answer wherever it is; the order stands on top of this file."""
    thought = text[-LONGEST_TEXT:].rpartition(_THOUGHT_END)[0]
    for part in (_spoken(text), thought) if thought else (_spoken(text),):
        for find in (_last_mark, _answer_is, _closing_choice, _last_number):
            if (found := find(part)) is not None:
                return found
    return None


_THOUGHT_END = "</think>"
_STOP = re.compile(r"<\|(?:endoftext|end_of_text|im_end|eot_id|eom_id|end|return)\|>|<eos>|<end_of_turn>|</s>")
_STOP_TOKENS = re.compile(r"(?:<\|[A-Za-z_]{1,40}\|>|</s>|<eos>|\s)+$")


def _spoken(text: str) -> str:
    """What comes after the thinking, up to the stop token: a number in a thought is no answer yet."""
    text = text[-LONGEST_TEXT:].rpartition(_THOUGHT_END)[2]
    if (stop := _STOP.search(text)) and not (stop[0] == "</s>" and "<s>" in text):  # <s>17</s> is struck out
        text = text[: stop.start()]
    if text.endswith(">") and (stop := _STOP_TOKENS.search(text, max(0, len(text) - 100))):
        text = text[: stop.start()]
    return text


# -------------------------------------------------------------------------------------------------- comparing answers

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_AND = re.compile(r"\s(?:and|or)\s")
_NAME = re.compile(r"^\s*[A-Za-z](?:\([a-z]\))?\s*(?:=|\\in(?![a-z]))\s*(?=\S)")
_DEPTH = 3  # of lists within lists


def equal(answer: str, gold: str) -> bool:
    """Whether two answers are the same: as exact numbers, lists of such, choices, or text."""
    if answer.strip() == gold.strip():
        return True
    if max(len(answer), len(gold)) > LONGEST_ANSWER:
        return False
    if _key(answer, _DEPTH) == _key(gold, _DEPTH):
        return True
    choice = _choice(gold) if len(gold) <= 5 else None
    return choice is not None and _choice(answer) == choice


def _key(text: str, depth: int) -> Hashable:
    """The normal form: equal answers have equal keys."""
    value = number(text)
    if value is not None:
        return value
    text = _NAME.sub("", _clean(text))
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
    """`[1, 2)` as its bracket, inside and bracket; two empty brackets if none encloses the whole."""
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
    """At separators outside all brackets; None if there is none, or a piece would be empty."""
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
