"""Make foreign text (of a model, a data set, a run folder) safe to show on a page or a terminal."""

import builtins
import json
import os
import re
import shlex
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import Any

LONGEST = 4000  # characters of an answer that are shown
SHORTEST_KEY = 8  # characters; a shorter value may be an ordinary word
SECRET = re.compile(
    r"(KEY|TOKEN|JWT|SECRET|(?<!COM)(?<!BY)PASS(WORD|WD|PHRASE)?|CREDENTIAL|_PAT|_PWD)S?\d*(_|$)"
    r"|AUTH(?!OR(?!I[SZ]))|BEARER|COOKIE|CREDS",  # not AUTHOR
    re.IGNORECASE,
)
LOGIN = re.compile(r"://([^/\s:@]*:([^/\s@]+))@")  # in a URL: user and password, and the password
named_as_keys: set[str] = set()  # variables that settings declare to hold a key
HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")  # control, format (right-to-left marks), private, surrogate, separators


def visible(text: str) -> str:
    """Return the text with control and invisible characters replaced by a symbol or their code."""
    return text if text.isprintable() else "".join(map(_shown, text))


def as_command(words: Sequence[str]) -> str:
    """Return a command line with readable quotes: shlex would write `'"'"'` for each single quote in a list."""
    return " ".join(f'"{one}"' if "'" in one and not set(one) & {*'"$`\\!'} else shlex.quote(one) for one in words)


def print(*texts: object, **options: Any) -> None:
    """Print texts, made visible. All output goes through this function or `machine/console.py`."""
    builtins.print(*(visible(str(text)) for text in texts), **options)


def without_keys(text: str, most: int | None = None) -> str:
    """Return the first characters of the text, with keys from the environment replaced by the variable's name."""
    names: dict[str, str] = {}
    for name, value in os.environ.items():
        shortest = 1 if name in named_as_keys else SHORTEST_KEY
        whole = [value.strip()] if name in named_as_keys or SECRET.search(name) else []
        for key in [*whole, *chain(*LOGIN.findall(value))]:
            if len(key) >= shortest:  # errors and replies may quote it with escapes
                names |= dict.fromkeys((key, repr(key)[1:-1], json.dumps(key)[1:-1]), name)
    for key in sorted(names, key=len, reverse=True):  # one key may be part of another
        text = text.replace(key, f"${names[key]}")
    return text[:most]


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"


def shortened(text: str) -> str:
    """Return the text, or its beginning and its end, where answers usually are."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[{len(text) - LONGEST} characters are left out]\n{text[-half:]}"


def around(text: str, answer: str | None) -> tuple[str, str, str]:
    """Return the text before the last occurrence of the answer, the answer, and the text after it."""
    return text.rpartition(answer) if answer and answer in text else (text, "", "")
