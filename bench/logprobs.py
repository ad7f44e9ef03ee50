"""Memory and time of the log-prob pass, forward and backward: chunk by chunk against the whole logits at once.

python bench/logprobs.py [--json]        writes bench/results/logprobs.json

The output layer is that of a 1.5 B Qwen2.5 (vocabulary 151,936, hidden 1,536) in fp32, with random weights, frozen as
under LoRA. Each pass runs in a process of its own, because a peak never falls: peak resident memory minus what was
resident before the pass. Time is that of the processor, so that other people on the machine do not count.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "bench/results/logprobs.json"
WAYS = ("chunked", "whole")
VOCABULARY, HIDDEN = 151_936, 1_536
# Every tensor of a megabyte or more goes back to the system when it is freed: the peak is then that of what is alive.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "TOKENS"), help=argparse.SUPPRESS)  # what a child measures
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    sizes = [compare(tokens) for tokens in options.tokens]
    result = {"machine": describe(), "vocabulary": VOCABULARY, "hidden": HIDDEN, "sizes": sizes}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    for size in sizes:
        print(
            f"{size['tokens']} tokens: chunked has {size['memory']:.0%} of the memory, {size['time']:.0%} of the time"
        )
        for way in WAYS:
            print(f"  {way:8} {size[way]['peak_mib']:>8,.0f} MiB  {size[way]['cpu_s']:>6.1f} CPU seconds")


def compare(tokens: int) -> dict[str, Any]:
    found = {way: in_a_child(way, tokens) for way in WAYS}
    chunked, whole = (found[way] for way in WAYS)
    assert abs(chunked["logprob"] - whole["logprob"]) < 1e-3, "both work out the same"
    memory, seconds = chunked["peak_mib"] / whole["peak_mib"], chunked["cpu_s"] / whole["cpu_s"]
    return {"tokens": tokens, **found, "memory": round(memory, 3), "time": round(seconds, 2)}


def in_a_child(way: str, tokens: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", way, str(tokens)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | MALLOC)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def measure(way: str, tokens: int) -> dict[str, float]:
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
    hidden_NH, targets_N = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randint(VOCABULARY, (tokens,))
    one_pass(way, layer, hidden_NH[:2], targets_N[:2])  # the libraries' own buffers are no part of it
    before, began = peak_bytes(), time.process_time()
    logprob = one_pass(way, layer, hidden_NH, targets_N)
    seconds = time.process_time() - began
    return {"peak_mib": round((peak_bytes() - before) / 2**20, 1), "cpu_s": round(seconds, 2), "logprob": logprob}


def one_pass(way: str, layer: Any, hidden_NH: Any, targets_N: Any) -> float:
    """Forward and backward; the mean log-prob."""
    from trainer.loss.logprobs import Output
    from trainer.model.embedding_and_head import Head

    if way == "chunked":
        logprobs_N, _ = Output(Head(layer), temperature=1.0)(hidden_NH, targets_N)
    else:
        logprobs_N = layer(hidden_NH).log_softmax(dim=-1).gather(-1, targets_N[:, None])[:, 0]
    logprobs_N.mean().backward()
    return round(logprobs_N.mean().item(), 5)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


if __name__ == "__main__":
    main()
