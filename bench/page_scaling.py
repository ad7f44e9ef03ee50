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
    yield f"Random weights, seconds of one core, every group trained. Usual are {usual['problems']} problems x"
    yield f"{usual['group']} answers of at most {usual['tokens']} tokens, and {usual['layers']} layers of width"
    yield f"{usual['hidden']}; one setting changes at a time, but in the last row: the layers of SmolLM2-135M."
    yield "A limit is the time that the matrix products of a phase would take at the speed of a large product, or in"
    yield "sampling the reads of weights and caches at the speed of a copy, if that is longer.\n"
    rows = []
    for name, one in result["cases"].items():
        answers = one["problems"] * one["group"]
        rollout, update = f"{one['rollout_s']:.2f} s", f"{one['update_s']:.2f} s"
        shares = f"{one['rollout_limit']:.0%}", f"{one['update_limit']:.0%}"
        rows.append([name, f"{answers} x {one['length']:.0f}", rollout, shares[0], update, shares[1]])
    yield from markdown(["", "answers x tokens", "sampling", "of its limit", "update", "of its limit"], rows)
    products, copies = result["gflops"], result["gigabytes"]
    yield f"A product ran at {min(products):.0f} to {max(products):.0f} GFLOP/s, and a copy at {min(copies):.1f} to"
    yield f"{max(copies):.1f} GB/s."
    yield "Models this small do not reach the limit: beside their small products they spend time on norms, rotations"
    yield "and the overhead of many short operations, whose share falls as the width grows."
    yield on(result["machine"])


def measured() -> Iterator[str]:
    result = read("scaling")
    yield "## A second rank, measured\n"
    yield "The embedded model, the same 16 x 8 answers a step, every group trained, each rank held to one core: one"
    yield "rank against two. Efficiency is the time of one over twice the time of two.\n"
    one, two = result["seconds"]["one rank"], result["seconds"]["two ranks"]
    rows = [
        [name, f"{one[name]:.3f} s", f"{two[name]:.3f} s", f"{result['efficiency'][name]:.0%}"]
        for name in ("rollout", "advantage", "batch", "step", "whole")
    ]
    yield from markdown(["", "one rank", "two ranks", "efficiency"], rows)
    least, most = result["least_and_most"]
    smaller, taken, waiting = (1000 * seconds for seconds in result["lost_s"].values())
    yield f"Medians of {result['rounds']} rounds of {result['steps']} steps, with efficiencies of {least:.0%} to"
    yield f"{most:.0%}; a load of {result['load_before']:.1f} before they began. A step of two ranks takes"
    yield f"{smaller + taken + waiting:.0f} ms more than half of a step of one. Smaller batches account for"
    yield f"{smaller:.0f} ms, which one rank with half of the problems loses as well. Two such runs"
    yield f"without any communication lose {round(taken)} ms more, because the cores share memory and its caches. The"
    yield f"rest, {waiting:+.0f} ms, is for sending and for waiting for the other rank."
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
    yield f"step of {ANSWERS} answers. Sampling fewer rows than {AT_ONCE} is taken to last as long, because each token"
    yield "of an answer waits for the one before; more rows are sampled one batch after the other. An update is"
    yield f"proportional to its answers. The gradients of the adapter ({ADAPTER_BYTES / 1e6:.0f} MB) go around a ring"
    yield f"at {NETWORK / 1e9:.0f} GB/s, as if no two cards had a faster link.\n"
    whole = {cards: _step(cards, rollout, update) for cards in (1, 2, 4, 8, 16, 32)}
    rows = [
        [_name(cards), *(f"{part:.2f} s" for part in parts), f"{sum(whole[1]) / cards / sum(parts):.0%}"]
        for cards, parts in whole.items()
    ]
    yield from markdown(["cards", "sampling", "update", "gradients", "efficiency, at most"], rows)
    yield "**The efficiency is an upper limit.** Left out are: that smaller batches are less efficient, that the cards"
    yield "wait for the one with the longest answers, and the latency of what they send each other. Where two ranks"
    yield f"were measured, above, it is {read('scaling')['efficiency']['whole']:.0%}, and the table has 100%.\n"
    yield f"That sampling saturates first, beyond {ANSWERS // AT_ONCE} cards, follows from the {AT_ONCE} answers that"
    yield "the H100 was measured with: with more cards each has fewer. If it samples more rows in about the same time,"
    yield "which was not measured, one card needs less time than in the table, and sampling saturates with fewer cards."
    yield "Larger steps, more answers to a problem, or vLLM beside the training (`rollout.ahead`) use cards better."
    yield "Without the latency that is left out, gradients of an adapter take little time; those of a whole model of"
    yield "this size, 6.2 GB, would take 0.5 s a step."
    yield ""


def _step(cards: int, rollout: float, update: float) -> tuple[float, float, float]:
    """Return the seconds of sampling, update and exchange of gradients."""
    batches = max(1.0, ANSWERS / cards / AT_ONCE)
    exchange = 2 * (cards - 1) / cards * ADAPTER_BYTES / NETWORK
    return batches * rollout, ANSWERS / cards / AT_ONCE * update, exchange


def _name(cards: int) -> str:
    nodes = {16: " (2 nodes)", 32: " (4 nodes)"}
    return f"{cards}{nodes.get(cards, '')}"
