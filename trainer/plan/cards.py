"""The speed and the memory of cards, found by the names that nvidia-smi and people use."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LATENCY = 1.1e-4  # seconds for each layer: an H100 decodes 256 tokens for 32 rows of 1.5 B parameters in 1.06 s
COMMON = {8: "RTX 4060", 12: "RTX 3060", 16: "RTX 5060 Ti", 24: "RTX 3090", 80: "H100"}  # widespread cards by GB
OTHERS = {"TI", "SUPER", "LAPTOP", "ADA", "D"}  # words that make a name that of another card
SLICES = 7  # of the processors of a card in MIG mode
QUARTERED = ("A30", "RTX PRO 6000")  # these have four slices, each with a quarter of the memory
EIGHTHS = {"1": 1, "2": 2, "3": 4, "4": 4, "7": 8}  # of the memory in a MIG profile, by the number before its `g`


class Speed(NamedTuple):
    """The peak rates of a processor."""

    flops: float  # FLOP per second of dense matrix products in the precision of the model
    bandwidth: float  # bytes per second
    latency: float  # seconds of a layer for a single token


class Card(NamedTuple):
    """A card under the name that was asked for."""

    name: str
    speed: Speed
    memory_gb: float
    larger: str = ""  # the name of a variant with more memory

    @property
    def size(self) -> str:
        larger = f" (a larger one: --card '{self.larger}')" if self.larger else ""
        return f"{self.name}, {self.memory_gb:g} GB{larger}"


def _rows() -> Iterator[tuple[str, Card]]:
    rows = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    for row in (row for row in rows if not row.startswith("#")):
        name, teraflops, gigabytes, memory = row.rsplit(" ", 3)
        small, _, large = memory.partition("/")
        speed = Speed(float(teraflops) * 1e12, float(gigabytes) * 1e9, LATENCY)
        yield name, Card(name, speed, float(small), larger=f"{name} {large}GB" if large else "")


CARDS = dict(_rows())
BY_WORDS = sorted(CARDS, key=lambda name: -len(name.split()))  # RTX 4060 Ti before RTX 4060


def card_of(name: str) -> Card | None:
    """Return the card of the table that shares the most words with the name, all of its own; None if none does, or if
    another word makes the name that of another card."""
    words = _words(name)
    known = next((known for known in BY_WORDS if {*known.upper().split()} <= words), "")
    if not known or (words - {*known.upper().split()}) & OTHERS:
        return None
    card = CARDS[known]
    gigabytes = re.findall(r"(\d+) ?GB", name.upper())  # RTX 4060 Ti 16GB; the last one in A100 80GB MIG 3g.40gb
    part = re.search(r"\bMIG (?:([1-7])C\.)?([12347])G", name.upper())  # 1c.3g.40gb computes on one of its three slices
    if "MIG" in words and part is None:
        return None
    is_quartered = card.name in QUARTERED
    share = int(part[1] or part[2]) / (4 if is_quartered else SLICES) if part else 1.0
    memory_share = (int(part[2]) / 4 if is_quartered else EIGHTHS[part[2]] / 8) if part else 1.0
    speed = Speed(share * card.speed.flops, memory_share * card.speed.bandwidth, LATENCY)
    memory_gb, larger = (float(gigabytes[-1]), "") if gigabytes else (card.memory_gb, card.larger)
    return Card(name, speed, memory_gb, larger)


def common(memory_gb: float) -> str:
    """Return the name of a card of about this size that many people have."""
    return [name for size, name in COMMON.items() if size <= max(8, 1.07 * memory_gb)][-1]


def _words(name: str) -> set[str]:
    words = {*re.sub("(?<=RTX)(?=[0-9])|(?<=[0-9])(?=TI|SUPER)|[-_]", " ", name.upper()).split()}
    return words | {"RTX"} if any(re.fullmatch("[2-6]0[5-9]0", word) for word in words) else words
