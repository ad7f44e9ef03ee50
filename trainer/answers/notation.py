"""Bring the many ways to write mathematics to one notation in ASCII."""

from __future__ import annotations

import re
import unicodedata

# Limits that keep every pattern below cheap on hostile text. No answer of GSM8K or MATH comes near them.
LONGEST_ANSWER = 400  # characters
_MINUS = "\u2010\u2011\u2012\u2013\u2014\u2212\u207b\ufe58\ufe63\uff0d"
_SPACES = "\t\n\r\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = [*range(9), 11, 12, *range(14, 32), 127, 0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F)]
_INVISIBLE += [*range(0x2060, 0x2070), *range(0xFE00, 0xFE10), 0xFEFF, 0xFFFD, *range(0xD800, 0xE000)]
VULGAR_FRACTIONS = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_SIGNS = {
    "×": "*", "⋅": "*", "·": "*", "∙": "*", "÷": "/", "⁄": "/", "∕": "/", "％": "%", "＄": "$", "．": ".", "。": ".",
    "，": ",", "：": ":", "（": "(", "）": ")", "＝": "=", "≈": "\\approx ", "＋": "+", "π": "\\pi ", "∞": "\\infty ",
    "∪": "\\cup ", "∈": "\\in ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ", "√": "\\sqrt ", "°": "^\\circ ",
    "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
_CHARACTERS: dict[int, str] = {
    **dict.fromkeys(_INVISIBLE, ""),
    **{ord(c): "-" for c in _MINUS},
    **{ord(c): " " for c in _SPACES},
    **{ord(c): f" {text} " for c, text in VULGAR_FRACTIONS.items()},
    **{ord(c): text for c, text in _SIGNS.items()},
}
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹][⁰¹²³⁴-⁹]*|⁻[⁰¹²³⁴-⁹]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_GLUED_METRES = re.compile(r"(?<=[0-9])(?=m[²³](?!\w))")  # 18m² is an area, 5m^2 is algebra
_PICTURE = re.compile("[\u2190-\u21ff\u2500-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]")  # arrows, ticks, emoji
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")


def to_ascii(text: str) -> str:
    """Convert digits, signs and spaces to ASCII, and drop what is invisible (NUL, bidi marks, zero-width spaces)."""
    if text.isascii() and text.isprintable():
        return text
    text = _GLUED_METRES.sub(" ", text)
    text = _SUPERSCRIPT.sub(lambda run: "^{" + run[0].translate(_SUPERSCRIPT_DIGITS) + "}", text)
    text = _FOREIGN_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    return _PICTURE.sub(" ", text).translate(_CHARACTERS)


_TEXT_COMMANDS = "text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|boldsymbol|underline"
BOLD = re.compile(r"(?<![\w)*])(\*\*|__)([^*_]+)\1(?!\w)")  # but not the power 2**3
_MATHS = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.)*)\$")
_STYLE = re.compile(r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm)(?![A-Za-z])")
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}(?:\s*\{([^{}]*)\})?")  # \color{red}{18}
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\!", ""),
        (r"\\[,;: ]", " "),
        (r"\\q?quad(?![A-Za-z])", ", "),  # what stands so far apart is not one number
        (r"\\[(\[\])]", " "),  # \( \) \[ \]
        (r"\\(?:left|right|displaystyle|bigl|bigr|Bigl|Bigr|big|Big)(?![A-Za-z])\.?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (rf"\\(?:{_TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\^\s*\{?\s*(st|nd|rd|th)\b\s*\}?", r" \1"),  # 18^{\text{th}}
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", " "),
        (r"\\([$%&#_])", r"\1"),
        (r"\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])", "=~"),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\(le|ge|ne)(?![A-Za-z])", r"\\\1q"),
        (r"\\frac\s*([0-9]|\\(?:pi|theta|alpha|beta)(?![A-Za-z]))", r"\\frac{\1}"),  # \frac12, \frac\pi2
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z]|\\pi(?![A-Za-z]))", r"\1{\2}"),
    )
]
WRAPPERS = '*_`" '
_TAG = r"</?(?:b|i|u|p|em|strong|br)\s?/?>"
_OUTER_TAGS = re.compile(rf"^(?:\s*{_TAG})+|(?:{_TAG}\s*)+$", re.IGNORECASE)


def without_styling(text: str) -> str:
    """Strip what changes size, weight or colour: `\\large`, `\\color{red}`."""
    return _COLOUR.sub(r"\1", _STYLE.sub("", text)) if "\\" in text else text


def clean(text: str) -> str:
    """Strip the markup of LaTeX and markdown, and the full stop."""
    text = BOLD.sub(r"\2", to_ascii(text)).replace("{,}", ",").replace("~", " ")
    if "<" in text:
        text = _OUTER_TAGS.sub("", text)
    text = _MATHS.sub(r" \1 ", text)
    if "\\" in text:
        text = without_styling(text)
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return text.strip(WRAPPERS).rstrip(".,;: ").strip(WRAPPERS)
