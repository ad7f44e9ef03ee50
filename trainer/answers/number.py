"""Read the exact value of a text that is one number."""

import re
from fractions import Fraction
from functools import lru_cache, partial
from itertools import takewhile
from math import pi, prod, sqrt

from trainer.answers.arithmetic import UNCALCULATED, worth
from trainer.answers.equation import GREEK, parted
from trainer.answers.grammar import BEHIND, UNITS, fits, unit, unit_kind
from trainer.answers.notation import DECORATION, DEGREE, LONGEST_ANSWER, WRAPPERS, clean
from trainer.answers.number_words import SCALES
from trainer.answers.patterns import any_of

LARGEST_EXPONENT = 1_000  # of a power of ten
_DIGITS = (  # 1,234,567 or 1 234 567 or 1'234'567 or 12,34,567 as in India
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9])|[0-9]{1,3}(?:'[0-9]{3})+(?![0-9'])"
    r"|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])|[0-9]+)"
)
_DOTTED = r"[0-9]{1,3}(?:(?:\.[0-9]{3}){2,}(?:,[0-9]+)?|\.[0-9]{3},[0-9]{1,2})(?![0-9]|[.,][0-9])"  # 1.234.567,89
DECIMAL = rf"(?:{_DOTTED}|{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10\s*\^\s*[{(]?\s*(?P<NAME>[-+]?[0-9]+)\s*[)}]?"
_SYMBOLS = "$¢£¤¥฿\u20a0-\u20c0"
_COUNTRIES = any_of("US AU CA A C HK NZ NT S R MX AR")
_CODES = any_of(
    """USD EUR GBP INR CAD AUD CHF JPY CNY RMB BRL MXN SEK NOK DKK PLN CZK HUF NZD SGD HKD ZAR PKR NGN PHP IDR RUB
    [Kk]r\\.? Rs\\.? Rp\\.? RM"""
)
CURRENCY = rf"(?:{_COUNTRIES}?[{_SYMBOLS}]|{_CODES}(?=[\s0-9]))"  # €, US$, USD
_NO_CENTS = re.compile(r"(?<=[0-9])(?:/-|\.--?)\Z")  # Rs. 1,500/- and CHF 18.-
_CENTS = re.compile(  # "R$ 18,50" and "18,5 €", but "$18,50$" is a list
    rf"(?:[A-Z]\$|[{_SYMBOLS[1:]}])\s?[0-9]+,[0-9]{{1,2}}(?![0-9.,])"
    rf"|(?<![0-9.,])[0-9]+,[0-9]{{1,2}}(?=\s?(?:[{_SYMBOLS[1:]}]|EUR|CHF|zł|kr))"
)
with_cents = partial(_CENTS.sub, lambda money: money[0].replace(",", "."))
_WRITTEN = re.compile(
    rf"""(?xi)(?P<sign>[-+]?|minus\s|negative\s)[ ]?(?P<money>{CURRENCY}?)[ ]?(?P<inner>[-+]?)[ ]?
    (?: (?P<whole>[0-9]+)\s+(?:and\s(?=[0-9/]+\s[a-z]))?(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)(?![0-9.,])  # 3 1/2
      | (?P<top>{DECIMAL})\s*/\s*(?P<bottom>-?\s*{DECIMAL})  # 3/4
      | {_POWER.replace("NAME", "ten")}  # 10^3
      | (?P<decimal>{DECIMAL})(?:e(?P<e>[-+]?[0-9]+)|\s*[*x]\s*{_POWER.replace("NAME", "times")})?  # 1e3, 1.5 * 10^3
    )"""
)
_MIXED = re.compile(r"(?<=[0-9]) and (?=[0-9]+/[0-9]+\Z)")  # 2 and 1/2
_NUMERIC_FRACTION = re.compile(rf"\\frac\s*\{{\s*(-?\s*{DECIMAL})\s*\}}\s*\{{\s*(-?\s*{DECIMAL})\s*\}}")
_REPEATING = re.compile(r"(?P<whole>[0-9]*)\.(?P<once>[0-9]*)\\(?:overline|bar)\s*\{?(?P<again>[0-9]+)\}?")
_SIMPLE = re.compile(r"\s{0,9}(-?)\$?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)\.?\s*", re.ASCII)  # nearly all answers of GSM8K
_MONEY_SCALES = {"k": 3, "K": 3, "grand": 3, "thou": 3, "M": 6, "B": 9, "bn": 9}

# Words that may follow a plain number. Other words make a difference: "7 Up" and "3 pm" are not plain numbers.
_MEASURES = (UNITS.keys() - {"am", "pm"}) | SCALES.keys()
_MEASURES |= {"rupee", "peso", "penny", "pence", "unit", "point", "time", "per", "a"}
_MYRIADS = {"십": 10, **dict.fromkeys("百백", 10**2), **dict.fromkeys("千천", 10**3)}
_MYRIADS |= {**dict.fromkeys("万萬만", 10**4), **dict.fromkeys("亿億억", 10**8)}
# a hundred, ten thousand; but 千克 is a kilogram, and 百分点 a percentage point
MYRIADS = r"(?:[십백천万萬만亿億억]|百(?!分)|千(?![克米瓦卡升]))+"
_MYRIAD = re.compile(rf"({MYRIADS})(.*)")
_COUNTS = (
    "(?:[美欧日]?元|[块圆円원개명권살个個只人天岁米克升吨]|ドル|달러|마리|시간|厘米|千米|公里|千克|公斤|小时|分钟)"
)
_COUNTERS = re.compile(f"{_COUNTS}(?![半多以左未])[\u4e00-\u9fff]{{0,4}}")  # but not 万 (ten thousand) and 左右 (about)
_WORD = r"[^\W\d_][^\W\d_']*(?:\s*\^\s*\{?[23]\}?)?\.?"
_LETTERS = re.compile(r"[^\W\d_][^\W\d_']*")
_TAIL = re.compile(  # the rest of "18 dollars", "50 %", "$18/hour" and "12-inch"
    rf"\s*[%{_SYMBOLS}]?(?P<joint>\s*/\s*|-)?\s*(?P<words>{_WORD}(?:(?:\s+|\s*/\s*|[.*-]){_WORD})*)?[\s.]*"
)


def number(text: str) -> Fraction | None:
    """Return the exact value of one written number: `-$1,234.50`, `3 1/2 cups`, `\\frac{3}{4}`, `1.5 \\times 10^3`.
    Return None if there is no number, more than one, or algebra around it."""
    read = with_words(text)
    return read[0] if read else None


def is_plain(text: str) -> bool:
    """Return True for a number followed by measures or nothing: `18`, `$18` and `18 cm`, but not `7 Up`."""
    read = with_words(text)
    return read is not None and not read[1]


@lru_cache(maxsize=1024)  # the search for an answer reads a line several times
def with_words(text: str) -> tuple[Fraction, tuple[str, ...], tuple[str, ...]] | None:
    """Return what `number` returns, the words after it that are not measures (`Up` of `7 Up`), and its units."""
    if len(text) > LONGEST_ANSWER:
        return None
    if simple := _SIMPLE.fullmatch(text):
        return Fraction(int(simple[1] + simple[2].replace(",", ""))), (), ("dollar",) if "$" in text else ()
    text = _DEGREES.sub(" degrees ", DECORATION.sub(" ", text))
    text = " ".join(clean("; ".join(text.strip().split("\n"))).split())
    text = with_cents(_NO_CENTS.sub("", text))
    text = _REPEATING.sub(_as_fraction, _NUMERIC_FRACTION.sub(r" \1/\2 ", text))
    text = _after_equals(text).strip(WRAPPERS)
    if text[:1] + text[-1:] in ("()", "[]", "{}") and "," not in text:
        text = text[1:-1].strip()
    elif not {*"([{"} & {*text}:
        text = text.rstrip(")]} ")  # the opening bracket of "18)" was cut off
    if (written := _WRITTEN.match(text)) is None:
        return None
    tail = written.string[written.end() :]
    value, scale = _value(written), _scale(tail, bool(written["money"]))
    if value is None or scale is None:
        return None
    nouns = [word for word in _LETTERS.findall(tail) if len(word) > 1 and word.lower().rstrip("s") not in _MEASURES]
    return value * scale, tuple(nouns), units_in(f"{written['money']} {tail}")


_UNIT = re.compile(r"\^\s*\{?\s*([23])|([^\W\d_]+|[%$¢£€¥₹])")
_SIGN_UNITS = {"$": "dollar", "¢": "cent", "£": "lb", "€": "euro", "¥": "yen", "₹": "rupee", "%": "%"}
_SEVERAL = {"mph": ("mi", "h"), "kph": ("km", "h"), "°c": ("degree", "°c"), "°f": ("degree", "°f")}
_DEGREES = re.compile(f"°|{DEGREE}")


def units_in(text: str) -> tuple[str, ...]:
    """Return the units after a number by their first names: `sq` and `ft` for `square feet` and `ft^2`."""
    names = list[str]()
    for power, word in _UNIT.findall(text):
        name = _SIGN_UNITS.get(word.lower()) or unit(word)
        if power:
            names[-1:] = ["sq" if power == "2" else "cubic", *names[-1:]]
        elif name:
            names += [one for one in _SEVERAL.get(name, (name,)) if one not in names]
    return tuple(names)


def same_quantity(answer: str, gold: str) -> bool:
    """Return True for equal numbers whose units agree: for 18 and 18 cm, but not for 18 m and 18 cm."""
    ours, theirs = with_words(_MIXED.sub(" ", answer)), with_words(gold)
    if ours is None or theirs is None:
        return False
    (value, _, units), (wanted, _, gold_units) = ours, theirs
    if units == ("%",) and not gold_units and 0 < abs(wanted) < 1:
        return value == 100 * wanted
    if gold_units == ("%",) and not units and ("/" in answer or "frac" in answer):
        return wanted in (value, 100 * value)
    if {units, gold_units} == {("cent",), ("dollar",)}:
        return value * 100 == wanted if gold_units == ("cent",) else value == wanted * 100
    return value == wanted and agree(units, gold_units)


_MONEY = {(name,) for name in ("dollar", "cent", "euro", "lb", "yen", "rupee")}


def agree(units: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Return True if one side has no units, or both have the same, as 5 km and 5 km per day, $18 and $18 per hour."""
    lasting = [[unit for unit in of[1:] if unit not in ("day", "wk", "mo", "yr")] for of in (units, others)]
    is_vague = units[:1] in _MONEY or ("degree",) in (units, others)  # 25 degrees are 25 °C
    return not units or not others or (units[:1] == others[:1] and (is_vague or lasting[0] == lasting[1]))


_OPERAND = re.compile(rf"{CURRENCY}?\s?({DECIMAL})%?")
_OPERATION = re.compile(r"[0-9%)]\s*[-+*/^(]")
_NAMED = re.compile(r"([0-9]?)(\\?)(?!a [a-z])([A-Za-z']+)")
_DENYING = any_of("no not never none cannot false wrong incorrect or if suppose assume unless maybe perhaps either")
_DENIED = re.compile(rf"(?i)n't\b|\b{_DENYING}\b")
_TIMES = re.compile(r"(?<=[0-9)\s])x(?=\s?[0-9($])|(?<=%) of(?= [0-9$])")


def _after_equals(text: str) -> str:
    """Return `18` for "x = 18" and "3 * 6 = 18", but the whole text for "2x = 18", "x = 18 or x = 20" and "20 = 18"."""
    labels, sides = parted(text)
    *working, result = sides
    named = [name for side in working for name in _NAMED.findall(_TIMES.sub("*", side))]
    if _DENIED.search(" ".join((*labels, *working))) or (not labels and any(_is_variable(*name) for name in named)):
        return text  # "2x = 18", but not "3 boxes * 6 eggs = 18"
    if result.startswith("~"):
        if not any(working) or not is_rounded(working[-1], result[1:]):
            return text
        return result[1:] if exact(sides) == sides else working[-1]
    value = number(result) if working else None
    known = [number(side) if found is None else found for side, found in zip(working, map(worked_out, working))]
    return result if {*known} <= {None, value} else text  # roots and words have no value


_DECIMALS = re.compile(r"~ ?-?[0-9]*\.[0-9]+(?:\.\.\.|\\l?dots)?")
_ROUNDED = re.compile(r"[-+]?[$0-9., ]+")


def exact(sides: list[str]) -> list[str]:
    """Drop the decimals that follow an exact side: 1.414 of `\\sqrt2 =~ 1.414`, but not the 18 of `17.9 =~ 18`."""
    if len(sides) > 1 and _DECIMALS.fullmatch(sides[-1]) and not _ROUNDED.fullmatch(sides[-2]):
        return sides[:-1] if is_rounded(sides[-2], sides[-1][1:]) else sides
    return sides


def is_rounded(side: str, rounded: str) -> bool:
    """Return True if the second is the first, rounded or cut off: for 2/3 and 0.67 or 0.66, 1234 and 1200, 17.2 and 18.
    Also return True if the value of the first is not known."""
    rounded = rounded.partition("\\")[0].rstrip(". ")  # without \\ldots
    value, shown, decimals = number(side), number(rounded), rounded.partition(".")[2]
    value = _about(side) if value is None else value
    if value is None or shown is None:
        return value is None
    digits = rounded.replace(",", "")
    off = (value - shown) * 10 ** len(decimals) / 10 ** (len(digits) - len(digits.rstrip("0")) if not decimals else 0)
    return (Fraction(-1, 2) if decimals else -1) <= (off if shown > 0 else -off) < 1


_ROOT = re.compile(r"\\sqrt\s*(?:\{([^{}]+)\}|([0-9]))")


def _about(side: str) -> Fraction | None:
    """Return the value of a side with roots, fractions and pi in it as a float, or None if it is not known."""

    def root(found: re.Match[str]) -> str:
        square = worked_out(f"1*({found[1] or found[2]})")
        return f"({sqrt(square)})" if square and square > 0 else "?"

    side = _ROOT.sub(root, side.replace(" \\", "\\").replace("\\pi", f"({pi})"))
    without = re.sub(r"(?<![0-9])\\frac\{", "(", side).replace("}{", ")/(")  # 2\\frac12 is a sum
    return worked_out(f"1*({without})")


def _is_variable(digit: str, backslash: str, word: str) -> bool:
    """Return True for x, \\theta, xy and the ab of `2ab`, but not for a word, \\frac, or the cm of `2cm`."""
    lower = word.lower()
    if GREEK.fullmatch(word) or len(word) == 1:
        return True
    if backslash or unit(lower):
        return False
    return bool(digit) or (len(word) == 2 and ("x" in lower or not set(lower) & set("aeiouy")))


def worked_out(working: str) -> Fraction | None:
    """Return the value of `6 x 3` and `2(4 + 5)`, or None if it is not known."""
    working = _TIMES.sub("*", working)
    if not _OPERATION.search(working):
        return None
    text = working.replace("^", "**").replace("{", "(").replace("}", ")")
    share = "/100" if "*" in text else ""  # for "60% * 70", but not for "60% + 10%"
    text = _OPERAND.sub(lambda operand: f"({_decimal(operand[1])}{share * operand[0].endswith('%')})", text)
    try:
        value = worth(text.replace(")(", ")*("))
    except UNCALCULATED:
        return None
    return value if isinstance(value, Fraction) else None


def _as_fraction(repeating: re.Match[str]) -> str:
    whole, once, again = repeating.groups("")
    return f"{int(whole + once + again) - int(whole + once or '0')}/{(10 ** len(again) - 1) * 10 ** len(once)}"


def _value(written: re.Match[str]) -> Fraction | None:
    if written["sign"] and written["inner"]:
        return None
    if top := written["over"] or written["top"]:
        bottom = _decimal(written["under"] or written["bottom"])
        if not bottom:
            return None
        value = int(written["whole"] or 0) + _decimal(top) / bottom
    else:
        exponent = int(written["ten"] or written["e"] or written["times"] or 0)
        if abs(exponent) > LARGEST_EXPONENT:
            return None
        value = _decimal(written["decimal"] or "1") * Fraction(10) ** exponent
    is_negative = written["inner"] == "-" or written["sign"] not in ("", "+")
    return -value if is_negative else value


def _decimal(digits: str) -> Fraction:
    if re.fullmatch(_DOTTED, digits):
        digits = digits.replace(".", "").replace(",", ".")
    whole, _, fraction = re.sub("[, ']", "", digits).partition(".")
    return Fraction(int(whole + fraction or "0"), 10 ** len(fraction))


def _scale(tail: str, money: bool) -> int | None:
    """Return the factor that the words after a number stand for: 1 if none is a scale, None if they cannot follow."""
    shown = tail.strip(" .$")
    if not tail or _COUNTERS.fullmatch(shown):
        return 1
    if (myriad := _MYRIAD.fullmatch(shown)) and (not myriad[2] or _COUNTERS.fullmatch(myriad[2].lstrip())):
        return prod(map(_MYRIADS.__getitem__, myriad[1]))
    head, _, currency = shown.partition(" ")
    if head in _MONEY_SCALES and ((unit(currency),) in _MONEY if currency else money or head in ("grand", "thou")):
        return int(10 ** _MONEY_SCALES[head])
    words = _unit_words(tail)
    if words is None:
        return None
    factors = [SCALES.get(word.lower().rstrip("s"), 0) for word in words]
    scales = list(takewhile(bool, factors))
    return prod(scales) if not any(factors[len(scales) :]) else None  # None for "2 dollars million"


def _unit_words(tail: str) -> list[str] | None:
    """Return the words after a number, or None if they cannot follow a number, or are algebra: 5x, 12ab, 5/m, 5-ab."""
    if (match := _TAIL.fullmatch(tail)) is None:
        return None
    joint, words = match["joint"], _LETTERS.findall(match["words"] or "")
    if not words:
        return None if joint else []
    is_apart = not joint and not tail[0].isalpha()
    if not (is_apart or (len(words[0]) > 1 and unit(words[0])) or (joint and len(words[0]) > 2)):
        return None
    return words if fits(BEHIND, "".join(map(unit_kind, words))) else None


_COMMA = re.compile(r"(?<![\w.,([{])-?\d+(?:\.\d{3})*,(?!\d{3}(?!\d))\d+(?![.,]?\d)")  # 1,234 may be a thousand
_ANY = re.compile(r"(?<![\w.,])\d+(?:\.\d{3})*(?:,\d+)?(?![.,]?\d)")


def has_comma(text: str) -> bool:
    """Return True for a text with exactly one number that can only have a decimal comma."""
    return len(_COMMA.findall(text)) == 1


def with_points(text: str) -> str:
    """Convert decimal commas to decimal points: 1234.50 for 1.234,50, 3.5 for 3{,}5, and 1234 for 1.234."""
    return _ANY.sub(lambda written: written[0].replace(".", "").replace(",", "."), text.replace("{,}", ","))
