"""Read one exact number from a text."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile

from trainer.answers.equation import GREEK, parted
from trainer.answers.notation import LONGEST_ANSWER, WRAPPERS, clean

LARGEST_EXPONENT = 1_000  # of ten
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10\s*\^\s*[{(]?\s*(?P<NAME>[-+]?[0-9]+)\s*[)}]?"
CURRENCY = r"(?:(?:US|AU|CA|A|C|HK|NZ|S)?\$|[€£¥₹₽₩]|(?:USD|EUR|GBP|INR|CAD|AUD|Rs\.?)(?=[\s0-9]))"
_WRITTEN = re.compile(
    rf"""(?P<sign>[-+]?)[ ]?(?P<money>{CURRENCY}?)[ ]?(?P<inner>[-+]?)[ ]?
    (?: (?P<whole>[0-9]+)\s+(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)(?![0-9.,])
      | (?P<top>{DECIMAL})\s*/\s*(?P<bottom>-?\s*{DECIMAL})
      | {_POWER.replace("NAME", "ten")}
      | (?P<decimal>{DECIMAL})(?:[eE](?P<e>[-+]?[0-9]+)|\s*[*xX]\s*{_POWER.replace("NAME", "times")})?
    )""",
    re.VERBOSE,
)
_NUMERIC_FRACTION = re.compile(rf"\\frac\s*\{{\s*(-?\s*{DECIMAL})\s*\}}\s*\{{\s*(-?\s*{DECIMAL})\s*\}}")
_REPEATING = re.compile(
    r"(?P<whole>[0-9]*)\.(?P<once>[0-9]*)\\(?:overline|bar)\s*\{?(?P<again>[0-9]+)\}?"
)  # 0.\overline{3}
_SIMPLE = re.compile(r"\s{0,9}(-?)\$?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)\.?\s*", re.ASCII)  # nearly all of GSM8K
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MONEY_SCALES = {"k": 3, "K": 3, "M": 6, "B": 9, "bn": 9}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that take a number back, and words that make another value of it: "18 maybe", "half of 18".
_DOUBTS = _words(
    "not no nope nor or never none cannot false wrong incorrect untrue invalid mistaken if unless otherwise maybe "
    "perhaps possibly probably either neither least most than"
)
_CHANGES = _words(
    "sqrt sin cos tan cot sec csc log ln exp mod squared cubed factorial choose up over under plus minus point "
    "negative times divided multiplied less remainder power root once twice thrice double doubled triple tripled "
    "quadruple half halved halves third thirds quarter quarters tens lakh lakhs crore crores alpha beta gamma delta "
    "epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi omega"
)
# "one" is left out, because in prose it is mostly a pronoun.
_TO_TEN = "two three four five six seven eight nine ten"
_TO_NINETEEN = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
SPOKEN = {
    "zero": 0,
    **{word: value for value, word in enumerate(f"{_TO_TEN} {_TO_NINETEEN}".split(), 2)},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), 2)},
}
_PART = re.compile(
    r"(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie|hundred|thousand|[mb]illion)ths?"
)
_SHORT_UNITS = _words(
    "cm mm km kg mg ml kl lb lbs oz ft in yd yds mi hr hrs min mins sec secs mph kph kmh am pm st nd rd th pts pcs sq "
    "wk wks yr yrs mos usd eur gbp gb mb kb tb kwh kw hz khz mhz ghz rpm psi kj"
)
_ONE_LETTER_UNITS = frozenset("mgshlLKVWNJCF")
# The units that make no difference in a gold answer. Other words do: "7 Up" and "3 pm" are no plain numbers.
_MEASURES = {unit.rstrip("s") for unit in _SHORT_UNITS - _words("am pm")} | _words(
    "dollar euro pound cent rupee yen peso penny pence percent degree celsius fahrenheit radian metre meter centimetre "
    "centimeter millimetre millimeter kilometre kilometer inch inche feet foot yard mile gram kilogram ounce ton tonne "
    "litre liter millilitre milliliter gallon quart pint second minute hour day week month year unit point square "
    "cubic per a hundred thousand million billion trillion"
)
_COUNTERS = re.compile("元|块|圆|円|원|个|個|只|人|天|岁|米|厘米|公里|公斤|小时|分钟")  # but not 万, ten thousand
_WORD = r"[A-Za-z']+(?:\s*\^\s*\{?[23]\}?)?\.?"
_LETTERS = re.compile(r"[A-Za-z']+")
_TAIL = re.compile(  # 18 dollars, 50 %, $18/hour, 12-inch, but not 5 - m
    rf"\s*[%$€£¥₹₽₩]?(?P<joint>\s*/\s*|-)?\s*(?P<words>{_WORD}(?:(?:\s+|\s*/\s*|[.*-]){_WORD})*)?[\s.]*"
)


def number(text: str) -> Fraction | None:
    """Return the exact value of one written number: `-$1,234.50`, `3 1/2 cups`, `\\frac{3}{4}`, `1.5 \\times 10^3`.

    Return None if there is no number, more than one, or algebra around it.
    """
    found = with_words(text)
    return found[0] if found else None


def is_plain(text: str) -> bool:
    """Return True for a number with no word but a measure behind it: `18`, `$18` and `18 cm`, but not `7 Up`."""
    found = with_words(text)
    return found is not None and not found[1]


@lru_cache(maxsize=1024)  # a line is looked at several times while an answer is sought in it
def with_words(text: str) -> tuple[Fraction, tuple[str, ...]] | None:
    """Return a number as `number` does, and the words behind it that are no measures: `Up` of `7 Up`."""
    if len(text) > LONGEST_ANSWER:
        return None
    if simple := _SIMPLE.fullmatch(text):
        return Fraction(int(simple[1] + simple[2].replace(",", ""))), ()
    text = " ".join(clean("; ".join(text.strip().split("\n"))).split())
    text = _REPEATING.sub(_as_fraction, _NUMERIC_FRACTION.sub(r" \1/\2 ", text))
    text = _after_equals(text).strip(WRAPPERS)
    if text[:1] + text[-1:] in ("()", "[]", "{}") and "," not in text:
        text = text[1:-1].strip()
    elif not _OPENING.search(text):
        text = text.rstrip(")]} ")  # 18) has lost its beginning
    written = _WRITTEN.match(_signed_by_word(text))
    if written is None:
        return None
    tail = written.string[written.end() :]
    value, scale = _value(written), _scale(tail, bool(written["money"]))
    return None if value is None or scale is None else (value * scale, _nouns(tail))


def _nouns(tail: str) -> tuple[str, ...]:
    words = _LETTERS.findall(tail) if tail else []
    return tuple(word for word in words if len(word) > 1 and word.lower().rstrip("s") not in _MEASURES)


_OPENING = re.compile(r"[(\[{]")
_SUM = re.compile(rf"\s*(?:{CURRENCY}?{DECIMAL}%?\s*(?:[-+*/x]\s*|$))+")
_OPERATION = re.compile(rf"(?P<operator>^|[-+*/x])\s*{CURRENCY}?(?P<number>{DECIMAL})")  # * 6
_NAMED = re.compile(r"([0-9]?)(\\?)(?!a [a-z])([A-Za-z']+)")
_TIMES = re.compile(r"(?<=[0-9)\s])x(?=\s?[0-9($])")


def _after_equals(text: str) -> str:
    """Return `18` for "x = 18" and "3 * 6 = 18", but the whole text for "2x = 18", "x = 18 or x = 20" and "20 = 18"."""
    labels, sides = parted(text)
    *working, result = sides
    if any(is_doubt(word) for words in (*labels, *working) for word in _LETTERS.findall(words)):
        return text
    if not labels and not all(map(_is_of_numbers, working)):
        return text
    if result.startswith("~"):
        return result[1:]
    value = number(result) if working else None
    return result if all(_of_working(side) in (None, value) for side in working) else text


def _is_of_numbers(side: str) -> bool:
    """Return True if a side of an equation has no variable: for `3 boxes * 6 eggs`, but not for `2x` and `18 - x`."""
    return not any(_is_variable(*found) for found in _NAMED.findall(_TIMES.sub("*", side)))


def _is_variable(digit: str, backslash: str, word: str) -> bool:
    """Return True for x, \\theta, xy and the ab of `2ab`, but not for a word, \\frac, or the cm of `2cm`."""
    lower = word.lower()
    if GREEK.fullmatch(word) or len(word) == 1:
        return True
    if backslash or lower in _SHORT_UNITS:
        return False
    return bool(digit) or (len(word) == 2 and ("x" in lower or not set(lower) & set("aeiouy")))


def _of_working(side: str) -> Fraction | None:
    """Return what one side of an equation comes to, or None if that is not known: for brackets, roots and words."""
    return worked_out(side) if _SUM.fullmatch(side) else number(side)


def worked_out(working: str) -> Fraction | None:
    """Return what `6 x 3` comes to. Signs go from left to right, and products before sums."""
    total, term = Fraction(0), Fraction(0)
    for step in _OPERATION.finditer(working):
        value = number(step["number"]) or Fraction(0)
        if step["operator"] in ("*", "x"):
            term *= value
        elif step["operator"] == "/":
            if not value:
                return None
            term /= value
        else:
            total, term = total + term, -value if step["operator"] == "-" else value
    return total + term


def _as_fraction(repeating: re.Match[str]) -> str:
    whole, once, again = repeating.groups("")
    return f"{int(whole + once + again) - int(whole + once or '0')}/{(10 ** len(again) - 1) * 10 ** len(once)}"


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
    """Return the factor that the words after a number stand for: 1 for units, None for words that are not units."""
    shown = tail.strip(" .$")
    if not tail or _COUNTERS.fullmatch(shown):
        return 1
    if money and shown in _MONEY_SCALES:
        return int(10 ** _MONEY_SCALES[shown])
    words = _unit_words(tail)
    if words is None:
        return None
    powers = [SCALES.get(word.lower().rstrip("s"), 0) for word in words]
    scales = list(takewhile(bool, powers))
    return int(10 ** sum(scales)) if not any(powers[len(scales) :]) else None  # 2 dollars million is nothing


def _unit_words(tail: str) -> list[str] | None:
    """Return the words after a number, or None if one of them is no unit, or if it is algebra: 5x, 12ab, 5/m, 5-ab."""
    found = _TAIL.fullmatch(tail)
    words = _LETTERS.findall(found["words"] or "") if found else []
    if found is None or not words:
        return words if found and not found["joint"] else None
    is_apart = not found["joint"] and not tail[0].isalpha()
    if not (is_apart or words[0].lower() in _SHORT_UNITS or (found["joint"] and len(words[0]) > 2)):
        return None
    return words if all(map(is_unit, words)) and words[-1].lower() != "a" else None


def is_doubt(word: str) -> bool:
    """Return True for a word that takes a number back: not, isn't, maybe, or."""
    return word.lower() in _DOUBTS or word.endswith("n't")


def changes(word: str) -> bool:
    """Return True for a word that doubts a number beside it, or makes another value of it: half, times, thousandths."""
    lower = word.lower()
    return is_doubt(lower) or lower in _CHANGES or _PART.fullmatch(lower) is not None


def is_unit(word: str) -> bool:
    """Return True for a unit or a plain noun: a word that leaves the number before it as it is."""
    lower = word.lower()
    if len(word) == 1:
        return word in _ONE_LETTER_UNITS or lower == "a"
    if lower in _SHORT_UNITS:
        return True
    if changes(word) or lower in SPOKEN or lower == "one":
        return False
    return len(word) > 3 or any(vowel in lower for vowel in "aeiou")
