"""What cards do in a second, and their memory, by the names that nvidia-smi and people give them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LATENCY = 1.1e-4  # seconds of a layer: an H100 decodes 256 tokens for 32 rows of 1.5 B parameters in 1.06 s
COMMON = {8: "RTX 4060", 12: "RTX 3060", 16: "RTX 5060 Ti", 24: "RTX 3090", 80: "H100"}  # by their GB
OTHERS = {"TI", "SUPER", "LAPTOP", "ADA", "MAX", "D"}  # words in the name of another card
SLICES = 7  # of a card in MIG mode
EIGHTHS = {"1": 1, "2": 2, "3": 4, "4": 4, "7": 8}  # of its memory, by the number before the `g`


class Speed(NamedTuple):
    """What a processor does in a second at most."""

    flops: float  # of dense matrix products in the precision of the model
    bandwidth: float  # bytes
    latency: float  # seconds of a layer for a single token


class Card(NamedTuple):
    """A card as it was named. One that is not in the table is taken for its neighbour there."""

    name: str
    speed: Speed
    memory_gb: float
    neighbour: str = ""
    larger: str = ""  # how another one with more memory is named

    @property
    def size(self) -> str:
        other = f" (a larger one: --card '{self.larger}')" if self.larger else ""
        return f"{self.name}, {self.memory_gb:g} GB{f', taken for {self.neighbour}' if self.neighbour else other}"


def _rows() -> Iterator[tuple[str, Card]]:
    rows = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    for row in (row for row in rows if not row.startswith("#")):
        name, teraflops, gigabytes, memory = row.rsplit(" ", 3)
        small, _, large = memory.partition("/")
        speed = Speed(float(teraflops) * 1e12, float(gigabytes) * 1e9, LATENCY)
        yield name, Card(name, speed, float(small), larger=f"{name} {large}GB" if large else "")


CARDS = dict(_rows())


def card_of(name: str) -> Card | None:
    """Return a card by its name, or its neighbour's numbers under this name; None if it has no neighbour."""
    known, neighbour = _known(name) or (_neighbour(name), True)
    if known is None:
        return None
    gigabytes = re.findall(r"(\d+) ?GB", name.upper())  # an RTX 4060 Ti with 16GB; 3g.40gb, of a card with 80GB
    part = re.search(r"\bMIG (?:(\d)C\.)?(\d)G", name.upper())  # 1c.3g.40gb computes with one of the three
    share = int(part[1] or part[2]) / SLICES if part else 1.0
    moved = EIGHTHS[part[2]] / 8 if part else 1.0
    speed = Speed(share * known.speed.flops, moved * known.speed.bandwidth, LATENCY)
    taken_for, larger = known.name if neighbour else "", "" if gigabytes else known.larger
    return Card(name, speed, float(gigabytes[-1]) if gigabytes else known.memory_gb, taken_for, larger)


def common(memory_gb: float) -> str:
    """Return the name of a card of about this size that many people have."""
    return [name for size, name in COMMON.items() if size <= max(8, 1.07 * memory_gb)][-1]


def _known(name: str) -> tuple[Card, bool] | None:
    words = _words(name)
    for known in sorted(CARDS, key=lambda one: -len(one.split())):
        own = {*known.upper().split()}
        if own <= words and not (words - own) & OTHERS:
            return CARDS[known], False
    return None


def _words(name: str) -> set[str]:
    words = {*re.sub("(?<=RTX)(?=[0-9])|(?<=[0-9])(?=TI|SUPER)|[-_]", " ", name.upper()).split()}
    return words | {"RTX"} if any(re.fullmatch("[2-6]0[5-9]0", word) for word in words) else words


def _neighbour(name: str) -> Card | None:
    """Return the card of the same letters and digits that is nearest by class (60 in 4060), then generation."""
    asked, words = _number(_words(name)), _words(name)
    if asked is None:
        return None
    (letters, number), found = asked, []
    for card in CARDS.values():
        other = _number(_words(card.name))
        if other and other[0] == letters and len(other[1]) == len(number):
            place, its = int(number), int(other[1])
            strange = len({*card.name.upper().split()} ^ words & OTHERS)
            found.append(((abs(place % 100 - its % 100), abs(place - its), strange), card))
    return min(found, key=lambda one: one[0])[1] if found else None


def _number(words: set[str]) -> tuple[str, str] | None:
    """Return the letters and the digits of a card's name: RTX and 4060, A and 100."""
    found = [match for word in sorted(words) if (match := re.fullmatch(r"([ABHLTV]|)(\d+)[GS]?", word))]
    plain = [(one[1] or "RTX", one[2]) for one in found if one[1] or "RTX" in words]
    return plain[0] if plain else None
