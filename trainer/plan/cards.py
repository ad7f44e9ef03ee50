"""What cards do in a second, and their memory, by the names that nvidia-smi and people give them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

LATENCY = 1.1e-4  # seconds of a layer: an H100 decodes 256 tokens for 32 rows of 1.5 B parameters in 1.06 s
# TFLOPS, GB a second, and GB of the smallest card of that name, and of a larger one. As their makers publish them: bf16
# (V100, T4, RTX 20: fp16) with sums in fp32, without sparsity. A GeForce card with sums in fp32 does half of what it
# does with sums in fp16, which is often the number quoted.
TABLE = """
RTX 2060 25.8 336 6/12, RTX 2060 Super 28.7 448 8, RTX 2070 29.9 448 8, RTX 2070 Super 36.2 448 8,
RTX 2080 40.3 448 8, RTX 2080 Super 44.6 496 8, RTX 2080 Ti 53.8 616 11, RTX 3050 18.2 224 8, RTX 3060 25.5 360 12,
RTX 3060 Ti 32.4 448 8, RTX 3070 40.6 448 8, RTX 3070 Ti 43.5 608 8, RTX 3080 59.5 760 10/12, RTX 3080 Ti 68.2 912 12,
RTX 3090 71 936 24, RTX 3090 Ti 80 1008 24, RTX 4060 30.2 272 8, RTX 4060 Ti 44.1 288 8/16, RTX 4070 58.3 504 12,
RTX 4070 Super 71 504 12, RTX 4070 Ti 80.2 504 12, RTX 4070 Ti Super 88.2 672 16, RTX 4080 97.5 717 16,
RTX 4080 Super 104.4 736 16, RTX 4090 165.2 1008 24, RTX 4090 D 147.1 1008 24, RTX 5050 26.3 320 8,
RTX 5060 38.4 448 8, RTX 5060 Ti 47.4 448 8/16, RTX 5070 61.7 672 12, RTX 5070 Ti 87.9 896 16, RTX 5080 112.6 960 16,
RTX 5090 209.5 1792 32, RTX 3060 Laptop 26.2 336 6, RTX 3070 Laptop 33.2 448 8, RTX 3080 Laptop 42 448 8,
RTX 4050 Laptop 24.3 192 6, RTX 4060 Laptop 29.1 256 8, RTX 4070 Laptop 40.1 256 8, RTX 4080 Laptop 67.7 432 12,
RTX 4090 Laptop 79.4 576 16, RTX 5060 Laptop 33.2 384 8, RTX 5070 Laptop 43.3 384 8, RTX 5070 Ti Laptop 52.3 672 12,
RTX 5080 Laptop 70.3 896 16, RTX 5090 Laptop 90.7 896 24, T4 65 320 16, V100 125 900 16/32, V100 PCIe 112 900 16/32,
A2000 31.9 288 6/12, A4000 76.7 448 16, A4500 94.6 640 20, A5000 111.1 768 24, A6000 154.8 768 48,
RTX PRO 6000 503.8 1792 96, RTX 4000 Ada 106.8 360 20, RTX 5000 Ada 261.2 576 32, RTX 6000 Ada 364.2 960 48,
A10 125 600 24, A10G 70 600 24, A30 165 933 24, A40 149.7 696 48, L4 121 300 24, L40 181 864 48, L40S 362 864 48,
A100 312 1555 40/80, A100 80GB PCIe 312 1935 80, H100 989 3350 80, H100 PCIe 756 2000 80, H100 NVL 835 3938 94,
H800 989 3350 80, H200 989 4800 141, H200 NVL 835 4800 141, B200 2250 8000 180
"""
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
    for row in TABLE.replace("\n", " ").split(","):
        name, teraflops, gigabytes, memory = row.strip().rsplit(" ", 3)
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
