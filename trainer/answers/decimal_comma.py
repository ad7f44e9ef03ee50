"""Numbers with a decimal comma, as in 3,5 and 1.234,50."""

import re

_COMMA = re.compile(r"(?<![\w.,([{])-?\d+(?:\.\d{3})*,(?!\d{3}(?!\d))\d+(?![.,]?\d)")  # 1,234 may be a thousand
_ANY = re.compile(r"(?<![\w.,])\d+(?:\.\d{3})*(?:,\d+)?(?![.,]?\d)")


def has_comma(text: str) -> bool:
    """Return True for one number that can only be read with a decimal comma, whatever stands around it."""
    return len(_COMMA.findall(text)) == 1


def with_points(text: str) -> str:
    """Return a text with a point in numbers that have a decimal comma: 1234.50 for 1.234,50, and 1234 for 1.234."""
    return _ANY.sub(lambda found: found[0].replace(".", "").replace(",", "."), text)
