"""Convert the many ways to write mathematics to one notation in ASCII."""

import re
import unicodedata

# In characters. It keeps every pattern below cheap on hostile text; answers of GSM8K and MATH are far shorter.
LONGEST_ANSWER = 400
_HYPHENS, _MINUSES = "\u2010\u2011\u2012\u2013\u2014\u2212", "\u207b\u2796\ufe58\ufe63"
_SPACES = "\t\n\r\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = [*range(9), 11, 12, *range(14, 32), 127, 0xAD, 0x61C, 0x200B, 0x200C, 0x200E, 0x200F]
_INVISIBLE += [*range(0x202A, 0x202F), *range(0x2060, 0x2070), *range(0xFE00, 0xFE10), 0xFEFF, *range(0xD800, 0xE000)]
VULGAR_FRACTIONS = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_SIGNS = {
    "×": "*", "✖": "*", "⋅": "*", "·": "*", "∙": "*", "∅": "\\emptyset ",
    "÷": "/", "➗": "/", "⁄": "/", "∕": "/", "➕": "+", "。": ".", "∶": ":", "٫": ".", "٬": ",", "￥": "¥", "￡": "£",
    "∴": " ", "≈": "\\approx ", "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∈": "\\in ", "≤": "\\leq ",
    "≥": "\\geq ", "≠": "\\neq ", "±": "\\pm ", "√": "\\sqrt ", "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
_VISIBLE = {**dict.fromkeys(_INVISIBLE, ""), **{ord(c): " " for c in _SPACES}, **{ord(c): "-" for c in _HYPHENS}}
_CHARACTERS = {
    **{full: chr(full - 0xFEE0) for full in range(0xFF01, 0xFF5F)},  # full-width ASCII
    **{ord(c): "-" for c in _MINUSES},
    **{ord(c): f" {text} " for c, text in VULGAR_FRACTIONS.items()},
    **{ord(c): text for c, text in _SIGNS.items()},
}
_JOINER = re.compile(r"\u200d(?![^\w\s])|(?<![^\w\s])\u200d")  # but not one that joins two pictures
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹][⁰¹²³⁴-⁹]*|⁻[⁰¹²³⁴-⁹]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_GLUED_METRES = re.compile(r"(?<=[0-9])(?=m[²³](?!\w))")  # 18m² is an area, 5m^2 is algebra
_DEGREES = re.compile(r"(?<=[0-9}]) ?°")
PICTURE = re.compile("[\u2190-\u21ff\u2500-\u27bf\u2b00-\u2bff\U0001f000-\U0001fbff\ufffd]")  # arrows, suits, emoji
# Symbols that may stand next to an answer without changing it, unlike crosses, question marks and a thumb down.
DECORATION = re.compile(
    "^\\s*[-=]+>|(?![\U0001f44e\U0001f6ab])[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff]|[✅✓✔☑☀☺⭐★✨❤➡→⇒\ufffd]"
)
_SCRIPT_ENDS = re.compile("(?<=[\u3040-\u9fff])(?=[0-9])")  # 答案是18
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")


def normalise(text: str) -> str:
    """Compose accents, convert spaces and hyphens to ASCII, and drop invisible characters. Symbols are kept."""
    if text.isascii() and text.isprintable():
        return text
    text = unicodedata.normalize("NFC", text).translate(_VISIBLE)
    return _JOINER.sub("", text) if "\u200d" in text else text


def to_ascii(text: str) -> str:
    """Normalise a text and convert digits and signs to ASCII: a cross and a dot both become a product."""
    if text.isascii() and text.isprintable():
        return text
    text = _DEGREES.sub("^\\\\circ ", _GLUED_METRES.sub(" ", normalise(text)))
    text = _SUPERSCRIPT.sub(lambda run: "^{" + run[0].translate(_SUPERSCRIPT_DIGITS) + "}", text)
    text = _FOREIGN_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_CHARACTERS))
    return _SCRIPT_ENDS.sub(" ", text)


_TEXT_COMMANDS = "text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|boldsymbol|underline"
BOLD = re.compile(r"(?<![\w)*])(\*\*|__|`)([^*_`]+)\1(?!\w)")  # but not the power 2**3
_MATHS = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.)*)\$")
_STYLE = re.compile(r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm)(?![A-Za-z])")
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}(?:\s*\{([^{}]*)\})?")  # \color{red}{18}
DEGREE = r"(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z]))"
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!\s*", ""),
        (r"(?<!\\)\\[,;: ]", " "),  # but not after the \\ that ends a row
        (r"\\q?quad(?![A-Za-z])", ", "),  # texts so far apart are not one number
        (r"\\[(\[\])]", " "),  # \( \) \[ \]
        (r"\\(?:left|right|displaystyle|bigl|bigr|Bigl|Bigr|big|Big)(?![A-Za-z])\.?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        *[(rf"\\(?:{_TEXT_COMMANDS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r" \1 ")] * 2,  # may be nested
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\^\s*\{?\s*(st|nd|rd|th)\b\s*\}?", r" \1"),  # 18^{\text{th}}
        (DEGREE, " "),
        (r"\\([$%&#_])", r"\1"),
        (r"\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])", "=~"),
        (r"\(\s*(=~[^()]*)\)", r" \1"),  # 1/3 (\approx 0.333)
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\(le|ge|ne)(?![A-Za-z])", r"\\\1q"),
        (r"\\(begin|end)\{[bp]matrix\}", r"\\\1{matrix}"),
        (r"\\frac\s*([0-9]|\\(?:pi|theta|alpha|beta)(?![A-Za-z]))", r"\\frac{\1}"),  # \frac12, \frac\pi2
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\1{\2}"),
    )
]
_HALF_OF_DAY = re.compile(r"(?<=[0-9])(?::00)?\s*([ap])(?:\.\s?m\b\.?|m\b)", re.IGNORECASE)  # 7 p.m., 7PM
_TIE = re.compile(r"(?<!\S)~~[^~]+~~(?!\S)|(?<=[^\s=])~")  # struck out, or a space in LaTeX; but "~18" means about 18
WRAPPERS = '*_`" '
_TAG = r"</?(?:b|i|u|p|em|strong|br)\s?/?>"
_OUTER_TAGS = re.compile(rf"^(?:\s*{_TAG})+|(?:{_TAG}\s*)+$", re.IGNORECASE)


def without_styling(text: str) -> str:
    """Strip the commands for size, weight and colour: `\\large`, `\\bf`, `\\color{red}`."""
    return _COLOUR.sub(r"\1", _STYLE.sub("", text)) if "\\" in text else text


def clean(text: str) -> str:
    """Strip the markup of LaTeX, HTML and markdown, and the full stop."""
    text = BOLD.sub(r"\2", to_ascii(text)).replace("{,}", ",")
    text = _TIE.sub(" ", text) if "~" in text else text
    if "<" in text:
        text = _OUTER_TAGS.sub("", text)
    text = _MATHS.sub(r" \1 ", text)
    if "\\" in text:
        text = without_styling(text)
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    text = _HALF_OF_DAY.sub(lambda half: f" {half[1].lower()}m", text.replace(" per cent", " percent"))
    return text.strip(WRAPPERS).rstrip(".,;: ").strip(WRAPPERS)
