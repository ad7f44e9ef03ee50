"""Text of others (a model, a data set, a run folder) made harmless to look at: it acts on no page and no terminal."""

import builtins
import json
import os
import re
import unicodedata
from itertools import chain
from typing import Any

LONGEST = 4000  # characters of an answer that are shown
SHORTEST_KEY = 8  # characters; a shorter value may be a word
SECRET = re.compile(
    r"(KEY|TOKEN|JWT|SECRET|(?<!COM)(?<!BY)PASS(WORD|WD|PHRASE)?|CREDENTIAL|_PAT|_PWD)S?\d*(_|$)"
    r"|AUTH(?!OR(?!I[SZ]))|BEARER|COOKIE|CREDS",  # not AUTHOR
    re.IGNORECASE,
)
LOGIN = re.compile(r"://([^/\s:@]*:([^/\s@]+))@")  # in a URL: user and password, and the password
named_as_keys: set[str] = set()  # the variables that settings name, whatever they are called
HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")  # control, format (right-to-left marks), private, surrogate, separators


def visible(text: str) -> str:
    """Return the text with every character that has an effect and no shape replaced by its name."""
    return text if text.isprintable() else "".join(map(_shown, text))


def print(*texts: object, **options: Any) -> None:
    """Print texts, made visible. What the program says goes through here, or through `machine/console.py`."""
    builtins.print(*(visible(str(text)) for text in texts), **options)


def without_keys(text: str, most: int | None = None) -> str:
    """Return the first characters of the text without the keys in the environment, which an error may quote."""
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        shortest = 1 if name in named_as_keys else SHORTEST_KEY
        whole = [value.strip()] if name in named_as_keys or SECRET.search(name) else []
        for key in [*whole, *chain(*LOGIN.findall(value))]:
            if len(key) >= shortest:  # errors and replies may quote it with escapes
                found |= dict.fromkeys((key, repr(key)[1:-1], json.dumps(key)[1:-1]), name)
    for key in sorted(found, key=len, reverse=True):  # one may be a part of another
        text = text.replace(key, f"${found[key]}")
    return text[:most]


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
