"""bench/results/scaling.md: what a second rank brings, and what would saturate first on many cards."""

from collections.abc import Iterator

from page_results import RESULTS, markdown, on, read

HEAD = """# Scaling: all tables

One and two ranks are measured on a CPU; several cards are computed from a step on one, as an upper limit, and marked
so. [The evidence](../../docs/evidence_scaling.md) says what follows. `python bench/report.py` makes this page from the
files beside it.

"""
CARD = "cards/NVIDIA-H100-80GB-HBM3"
ANSWERS, AT_ONCE = 512, 32  # of a step; that the card was measured with
ADAPTER_BYTES = 18_464_768 * 4  # gradients in fp32 of LoRA r=16 on all linear layers of Qwen2.5-1.5B
NETWORK = 25e9  # bytes a second of a node with 200 Gbit/s


def page() -> str:
    return "\n".join([HEAD, *step_cost(), *measured(), *computed()])


def step_cost() -> Iterator[str]:
    if not (RESULTS / "step_cost.json").is_file():
        return
    result = read("step_cost")
    usual = result["cases"]["usual"]
    yield "## What a step costs, measured\n"
    yield "Seconds of one core, with random weights and training on every group. The usual case has"
    yield f"{usual['problems']} problems x {usual['group']} answers of at most {usual['tokens']} tokens, and"
    yield f"{usual['layers']} layers of width {usual['hidden']}. Each row changes one setting, except the last row,"
    yield "which has the layers of SmolLM2-135M. The limit of an update is the time that its matrix products would take"
    yield "at the speed of a large product. The limit of sampling is the same, or the time to read weights and caches"
    yield "at the speed of a copy, if that is longer.\n"
    rows = []
    for name, one in result["cases"].items():
        answers = one["problems"] * one["group"]
        rollout, update = f"{one['rollout_s']:.2f} s", f"{one['update_s']:.2f} s"
        shares = f"{one['rollout_limit']:.0%}", f"{one['update_limit']:.0%}"
        rows.append([name, f"{answers} x {one['length']:.0f}", rollout, shares[0], update, shares[1]])
    yield from markdown(["", "answers x tokens", "sampling", "of its limit", "update", "of its limit"], rows)
    products, copies = result["gflops"], result["gigabytes"]
    yield f"A large product ran at {min(products):.0f} to {max(products):.0f} GFLOP/s, and a copy at"
    yield f"{min(copies):.1f} to {max(copies):.1f} GB/s."
    yield "Models this small do not reach the limit, because norms, rotations and the overhead of many short operations"
    yield "also take time. Their share falls as the width grows."
    yield on(result["machine"])


def measured() -> Iterator[str]:
    result = read("scaling")
    yield "## A second rank, measured\n"
    yield "One rank against two: the embedded model, the same 16 x 8 answers a step, training on every group, and one"
    yield "core for each rank. Efficiency is the time of one rank divided by twice the time of two.\n"
    one, two = result["seconds"]["one rank"], result["seconds"]["two ranks"]
    rows = [
        [name, f"{one[name]:.3f} s", f"{two[name]:.3f} s", f"{result['efficiency'][name]:.0%}"]
        for name in ("rollout", "advantage", "batch", "step", "whole")
    ]
    yield from markdown(["", "one rank", "two ranks", "efficiency"], rows)
    least, most = result["least_and_most"]
    smaller, taken, waiting = (1000 * seconds for seconds in result["lost_s"].values())
    yield f"Medians of {result['rounds']} rounds of {result['steps']} steps, with efficiencies of {least:.0%} to"
    yield f"{most:.0%}; the load of the machine was {result['load_before']:.1f} before. A step of two ranks takes"
    yield f"{smaller + taken + waiting:.0f} ms more than half of a step of one rank. Smaller batches account for"
    yield f"{smaller:.0f} ms, which one rank with half of the problems loses as well. Two such runs at the same time,"
    yield f"without any communication, lose {round(taken)} ms more, because the cores share memory and its caches. The"
    yield f"rest, {waiting:+.0f} ms, goes to sending, and to waiting for the other rank."
    if waiting < 0:
        yield "It cannot be less than 0: the kinds of run differ by as much for other reasons, so no part is exact."
    for kind, seconds in result.get("rounds_s", {}).items():
        yield f"- {kind}, each round: {', '.join(f'{one:.3f}' for one in seconds)} s"
    yield ""
    yield on(result["machine"])


def computed() -> Iterator[str]:
    (case,) = read(CARD)["parts"]["speed, four days later"]["result"]
    seconds = case["octet"]["seconds"]
    rollout, update = seconds["time/rollout"], seconds["time/step"]
    yield "## Several cards, computed\n"
    yield f"No machine with several cards has run this. A step on one H100 ({AT_ONCE} answers of 256 tokens,"
    yield f"Qwen2.5-1.5B, LoRA r=16) takes {rollout:.2f} s to sample and {update:.2f} s to update. The table is for a"
    yield f"step of {ANSWERS} answers. It assumes that sampling fewer rows than {AT_ONCE} takes as long, because each"
    yield "token of an answer waits for the one before, and that more rows are sampled one batch after the other. The"
    yield "time of an update is proportional to its answers. The gradients of the adapter"
    yield f"({ADAPTER_BYTES / 1e6:.0f} MB) are reduced in a ring at {NETWORK / 1e9:.0f} GB/s, as if no two cards had a"
    yield "faster link.\n"
    whole = {cards: _step(cards, rollout, update) for cards in (1, 2, 4, 8, 16, 32)}
    rows = [
        [_name(cards), *(f"{part:.2f} s" for part in parts), f"{sum(whole[1]) / cards / sum(parts):.0%}"]
        for cards, parts in whole.items()
    ]
    yield from markdown(["cards", "sampling", "update", "gradients", "efficiency, at most"], rows)
    yield "**The efficiency is an upper limit.** It ignores that smaller batches are less efficient, that the cards"
    yield "wait for the one with the longest answers, and the latency of communication. With the two ranks that were"
    yield f"measured above the efficiency is {read('scaling')['efficiency']['whole']:.0%}, where this table has 100%.\n"
    yield f"With more than {ANSWERS // AT_ONCE} cards each card samples fewer than the {AT_ONCE} answers that were"
    yield "measured, so sampling gets no faster. If a card samples more rows in about the same time, which was not"
    yield "measured, this happens with fewer cards. Larger steps, more answers to a problem, or vLLM beside the"
    yield "training (`rollout.ahead`) use the cards better. Gradients of an adapter take little time; those of a whole"
    yield "model of this size, 6.2 GB, would take 0.5 s a step."
    yield ""


def _step(cards: int, rollout: float, update: float) -> tuple[float, float, float]:
    """Return the seconds of sampling, update and exchange of gradients."""
    batches = max(1.0, ANSWERS / cards / AT_ONCE)
    exchange = 2 * (cards - 1) / cards * ADAPTER_BYTES / NETWORK
    return batches * rollout, ANSWERS / cards / AT_ONCE * update, exchange


def _name(cards: int) -> str:
    nodes = {16: " (2 nodes)", 32: " (4 nodes)"}
    return f"{cards}{nodes.get(cards, '')}"
