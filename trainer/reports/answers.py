"""Answers of a model on a page, with what was read from them marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.machine.visible import around, shortened
from trainer.reports.markup import Html, joined, tag

MOST_FLIPS = 20  # shown in each direction; all of them are in eval_flips.jsonl


def flips(found: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    """Yield the problems that only one of two models solved, in both directions."""
    for direction, title in (("gained", "Won"), ("lost", "Lost")):
        these = [flip for flip in found if flip.get("direction") == direction]
        more = f", {MOST_FLIPS} of them here, all in eval_flips.jsonl" if len(these) > MOST_FLIPS else ""
        if these:
            yield tag("h3", f"{title}: {len(these)}{more}")
        yield from map(_flip, these[:MOST_FLIPS])


def _flip(flip: Mapping[str, Any]) -> Html:
    sides = [
        tag("div", tag("p", side, class_="soft"), answer(flip[f"{side}_completion"], flip[f"{side}_answer"]))
        for side in ("before", "after")
    ]
    asked = tag("summary", f"{flip['question']} ", tag("strong", flip["gold"]))
    return tag("details", asked, tag("div", *sides, class_="pair"))


def samples(found: Mapping[str, Mapping[str, Any]]) -> Iterator[Html]:
    """Yield answers that were sampled in training, each under its name."""
    for name, sample in found.items():
        read = sample["strict"] if sample["strict"] is not None else sample["lenient"]
        earned = "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
        title = joined(
            tag("strong", name, class_=name.split()[-1]), f", step {sample['step']}, {earned}; the answer is "
        )
        asked = tag("details", tag("summary", "prompt"), tag("pre", shortened(sample["prompt"])))
        cut = tag("p", "cut off", class_="soft") if sample["truncated"] else ""
        earlier = [
            part for turn in told(sample) for part in (tag("p", turn["role"], class_="soft"), tag("pre", turn["text"]))
        ]
        last = tag("p", "model", class_="soft") if earlier else ""
        written = answer(sample["completion"], read)
        yield tag("div", tag("h3", title, tag("code", sample["gold"])), asked, *earlier, last, written, cut)


def told(sample: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    """Return who said what before the last turn of an answer."""
    return list(sample.get("turns", ()))[:-1]


def answer(text: str, read: str | None) -> Html:
    """Return an answer as it was written, and what was read from it: marked in its last place, and below."""
    before, found, after = around(shortened(text), read)
    marked = tag("pre", before, tag("mark", found) if found else "", after)
    said = joined("read: ", tag("code", read)) if read is not None else "no answer was read from it"
    return joined(marked, tag("p", said, class_="soft"))
