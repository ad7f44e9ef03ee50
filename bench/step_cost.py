"""What a step costs with larger groups, longer answers and larger models, and how near it is to the machine's limits.

python bench/step_cost.py [--steps 6]

Random weights, one CPU thread, seconds of the processor; one setting changes at a time. Medians over all steps but the
first. The limit of a phase is the time that its matrix products (or, in sampling, its reads of weights and caches, if
that takes longer) would take at the speed of a large product, by the faster one of MKL and oneDNN, and of a copy. Both
are measured before and after.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import copy_bandwidth
from hours import Case, duration_of, run

from machine import describe
from trainer.config.resolve import resolve
from trainer.plan.cards import Speed
from trainer.plan.hours import measured

RESULTS = Path(__file__).parent / "results/step_cost.json"
USUAL = Case(hidden=256, layers=4, problems=8, group=8, tokens=64)
CASES = {
    "usual": USUAL,
    **{f"group {size}": USUAL._replace(group=size) for size in (2, 4, 16, 32)},
    **{f"{tokens} tokens": USUAL._replace(tokens=tokens) for tokens in (16, 32, 128, 256)},
    **{f"{hidden} wide": USUAL._replace(hidden=hidden) for hidden in (128, 512)},
    "576 wide, 30 layers": USUAL._replace(hidden=576, layers=30, tokens=16),  # the layers of SmolLM2-135M
}


def product_speed(size: int = 1024) -> float:
    """FLOP a second of a product of two matrices in fp32, the best of ten with the faster one of two libraries."""
    one, seconds = torch.ones(size, size), []
    packed = torch.ops.mkldnn._reorder_linear_weight(one, size)
    by_onednn = partial(torch.ops.mkldnn._linear_pointwise, one, packed, None, "none", [], "")
    for product in (partial(torch.mm, one, one), by_onednn) * 10:
        began = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def limits() -> Speed:
    return Speed(product_speed(), copy_bandwidth(torch.device("cpu")), latency=0.0)


def measure(case: Case, steps: int, machine: Speed) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        settings = case.settings(Path(name))
        computed = duration_of(resolve("nano", None, settings))
        found = measured(computed, run(settings, steps + 1, Path(name) / "run"))
    ideal = replace(found, ratio=computed.ratio, speed=machine)
    products = replace(ideal, speed=machine._replace(bandwidth=float("inf")))  # an update is bound by its products
    seconds = {"rollout_s": found.rollout, "update_s": found.update, "length": found.length}
    return {**seconds, "rollout_limit": ideal.rollout / found.rollout, "update_limit": products.update / found.update}


def measure_all(names: Sequence[str], steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    before = limits()
    cases = {name: {**CASES[name]._asdict(), **measure(CASES[name], steps, before)} for name in names}
    after = limits()
    speeds = {
        "gflops": [before.flops / 1e9, after.flops / 1e9],
        "gigabytes": [before.bandwidth / 1e9, after.bandwidth / 1e9],
    }
    return {"machine": describe(), "steps": steps, **speeds, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a run, the first not counted (default %(default)s)")
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    result = measure_all(options.only, options.steps)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, one in result["cases"].items():
        print(
            f"{name:12} rollout {one['rollout_s']:.2f} s ({one['rollout_limit']:.0%} of the limit), "
            f"update {one['update_s']:.2f} s ({one['update_limit']:.0%}), {one['length']:.0f} tokens"
        )


if __name__ == "__main__":
    main()
