"""Text that a model wrote, made harmless to look at: nothing in it acts on a page or on a terminal."""

from __future__ import annotations

import os
import unicodedata

LONGEST = 4000  # characters of an answer that are shown
SHORTEST_KEY = 8  # characters; a shorter value may be a word
HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")  # control, format (right-to-left marks), private, surrogate, separators


def visible(text: str) -> str:
    """Return the text with every character that has an effect and no shape replaced by its name."""
    return "".join(map(_shown, text))


def without_keys(text: str) -> str:
    """Return the text without the keys in the environment, which an error of a user's code may quote."""
    for name, value in os.environ.items():
        if name.endswith(("_KEY", "_TOKEN")) and len(value) >= SHORTEST_KEY:
            text = text.replace(value, f"${name}")
    return text


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"


def shortened(text: str) -> str:
    """Return the text, or its beginning and its end, where answers are."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[{len(text) - LONGEST} characters are left out]\n{text[-half:]}"


def around(text: str, answer: str | None) -> tuple[str, str, str]:
    """Return what is before the last place where the answer stands in the text, the answer, and what is after it."""
    place = text.rfind(answer) if answer else -1
    if place < 0 or not answer:
        return text, "", ""
    return text[:place], answer, text[place + len(answer) :]
