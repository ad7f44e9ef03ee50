"""What a rollout and an update ask of a card, counted without one: Octet, model.generate and TRL's GRPOTrainer.

tests/cuda/python.sh bench/counts_cuda_host.py                   writes bench/results/counts_cuda_host.json
tests/cuda/python.sh bench/counts_cuda_host.py --sides octet     counts these anew, and leaves the others as they are
tests/cuda/python.sh bench/counts_cuda_host.py --only tiny       whether all of this runs; writes nothing
python bench/counts_cuda_host.py --table                         prints the section of bench/results/speed.md

The three run over the stub of a card in tests/cuda, on the same model, prompts and lengths. A dispatch mode adds up for
each operation of torch what it reads, writes and computes; the stub counts launches, copies and synchronisations. Of a
rollout, the first tokens are counted and a step in its middle, and the step is taken as many times as there are tokens.
An update is counted as a whole, at full length.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import versus
from memory_cuda_host import in_a_child, save_zeros

from machine import describe
from trainer.plan.cards import Speed, card_of

COMMON = 7  # a token that ends no answer

if TYPE_CHECKING:
    from tests.cuda.ledger import Count, Ledger
    from trainer.run.assemble import Run

RESULTS = Path(__file__).parent / "results/counts_cuda_host.json"
TOKENS = {"1.5b": 512, "tiny": 32}  # of each answer
FEW = 9  # tokens of an answer that Octet decodes before it looks for the first time whether one has ended
CHECKED = 8  # steps from one such look to the next


@dataclass(frozen=True)
class Card:
    name: str
    link: float  # bytes a second from and to the host
    multiplies_fp8: bool = True

    @property
    def speed(self) -> Speed:
        """What its maker publishes: bf16, dense, sums in fp32. In fp32 it is half of that, without tensor cores."""
        found = card_of(self.name)
        assert found, self.name
        return found.speed


CARDS = [
    Card("RTX 3060 12 GB", 31.5e9, False),
    Card("RTX 3070 8 GB", 31.5e9, False),
    Card("RTX 4060 8 GB", 15.8e9),
    Card("RTX 4060 Ti 8 GB", 15.8e9),
    Card("RTX 5060 8 GB", 31.5e9),
    Card("RTX 4090 24 GB", 31.5e9),
]
LAUNCHES = (3.8e-6, 10e-6)  # seconds of the host for a launch: of CUDA alone, and with PyTorch's own host code
NODE = 0.5e-6  # seconds between two kernels of a graph
EIGHT_BITS = ("int8", "fp8")  # of rollout.weights
NAMES = {"octet": "Octet", "int8": "Octet, int8", "fp8": "Octet, fp8", "generate": "model.generate", "trl": "TRL"}
WORK = """## Counted, not timed

Torch, Octet and TRL ran over the [stub of a card](../../tests/cuda/README.md), where a dispatch mode added up what each
operation of torch reads, writes and computes. Weights in 8 bits [were slower on an
H100](#where-a-decode-step-goes-on-an-h100), where their bytes had promised the opposite. The work: the shape of
Qwen2.5-1.5B in bf16, LoRA r=16 everywhere, gradient checkpointing, 4 prompts of about 300 tokens x 8 answers of 512.
The decode step is one in the middle of the answers, for all 32. A rollout is its first tokens and this step for each
later token; an update was counted as a whole. TRL is GRPOTrainer without vLLM, with as many answers at a time as fit
into Octet's budget of 2,048 tokens.

| | | launches | kernels in graphs | GB read and written | TFLOP | copies | waits for the card |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
ROOFLINE = """
What that takes at least, **computed and not measured**: ms of a decode step, s of a whole step (rollout and update).

| | Octet decodes | generate | times | Octet trains | TRL | times |
| --- | --- | --- | --- | --- | --- | --- |"""
EIGHT = """
The same for a decode step with `rollout.weights`, in ms. The copy in 8 bits stays beside the weights, and nothing is
merged into it. fp8 was counted on a card of compute capability 12.0.

| | same | int8 | fp8 |
| --- | --- | --- | --- |"""
ASSUMPTIONS = """
Assumed: an operation takes its bytes over the published bandwidth of the card, or its arithmetic over the published
peak if that is longer (bf16 on tensor cores with sums in fp32, dense; a half of it for fp32). Caches are ignored. The
host launches while the card computes, so the longer of both counts. A launch costs from 3.8 us (NVIDIA's figure for
launches in a row) to 10 us (with PyTorch's own host code, for which 5 to 25 are published); a kernel in a graph costs
0.5 us more than its work (NVIDIA's figure). Copies run at the speed of the PCIe slot. Waits, AdamW on the CPU and the
scoring of answers are left out. Octet was counted on a card of 8 GiB, where the adapter is merged into only as many
weights of the decoder as fit; the others were counted on one of 24. Real programs are slower than this, on each side.
"""


@dataclass(frozen=True)
class Work:
    """A model of zeros, and the settings of both programs."""

    size: str
    folder: Path
    weights: str = "same"

    @property
    def tokens(self) -> int:
        return TOKENS[self.size]

    @property
    def settings(self) -> list[str]:
        import gpu_memory

        of_the_size = gpu_memory.Case(self.size, "none", self.tokens).settings(self.folder / "model")
        return [*of_the_size, "optim.tokens_per_micro_batch=2048", f"rollout.weights={self.weights}"]


@contextmanager
def built(work: Work) -> Iterator[Run]:
    from trainer.config.request import Request
    from trainer.machine import hardware, quiet
    from trainer.run import assemble

    quiet.quiet()
    hardware.prepare_cuda("decode")
    config = versus.settings(1, 0, work.folder / "run", *work.settings)
    with assemble.process_group(config):
        yield assemble.build(Request(config, "nano", ""))


def octet(work: Work, ledger: Ledger) -> None:
    with built(work) as run:
        count_rollout(work, ledger, run)
        count_update(work, ledger, run)


def in_8_bits(work: Work, ledger: Ledger, weights: str) -> None:
    with built(replace(work, weights=weights)) as run:
        count_rollout(work, ledger, run)


def count_rollout(work: Work, ledger: Ledger, run: Run) -> None:
    prompts, sampling = run.rollouts.prompts_of(0), run.rollouts.sampling_of(0)
    longer = [replace(one, tokens=(*one.tokens, *one.tokens[: work.tokens // 2])) for one in prompts]
    more, few, start = ("more", longer, FEW + CHECKED), ("few", longer, FEW), ("start", prompts, FEW)
    # the first calls make copies of weights, a cache and graphs; what the same calls do again is counted
    for name, asked, tokens in (more, few, more, few, start):
        with ledger.counting(name):
            dict(run.rollouts.sampler.sample(asked, replace(sampling, max_new_tokens=tokens)))
    step = ledger.counts.pop("more").since(ledger.counts.pop("few")).times(1 / CHECKED)
    ledger.counts["decode step"] = step
    ledger.counts["rollout"] = ledger.counts.pop("start").plus(step.times(work.tokens - FEW))


def count_update(work: Work, ledger: Ledger, run: Run) -> None:
    from trainer.records import MiniBatch
    from trainer.run.rehearsal import _row
    from trainer.watch.tally import Tally

    prompts, sampling = run.rollouts.prompts_of(0), run.rollouts.sampling_of(0)
    updater, answers = run.updater, range(len(prompts) * sampling.group)
    rows = [_row(prompts[n // sampling.group].tokens, work.tokens, n) for n in answers]
    tokens = float(len(rows) * work.tokens)
    with ledger.counting("update"):
        prepared = updater.prepare([MiniBatch(updater.packer.pack(rows), tokens, tokens)])
        updater.update(prepared, 0, Tally())


def generate(work: Work, ledger: Ledger) -> None:
    import torch
    from transformers import GenerationConfig

    from trainer.model.embedding_and_head import causal_lm_of
    from trainer.rollout.hf import generating

    with built(work) as run:
        policy: Any = run.updater.policy
        model, prompts = causal_lm_of(policy.model), run.rollouts.prompts_of(0)
        rows = [one.tokens for one in prompts for _ in range(run.rollouts.config.rollout.group_size)]
        width = max(map(len, rows))
        ids_BT = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device="cuda")
        present_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device="cuda")
        settings = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=0.9, pad_token_id=0, use_cache=True)
        with generating(model, settings), torch.no_grad():
            count_generation(ledger, model.generate, work.tokens, input_ids=ids_BT, attention_mask=present_BT)


def count_generation(ledger: Ledger, generate: Callable[..., Any], tokens: int, **given: Any) -> None:
    """Count the first token of `model.generate` and a step in the middle, and the rollout that these make."""
    from torch.nn.functional import pad

    half = (0, tokens // 2)
    ids_BT, present_BT = given["input_ids"], given["attention_mask"]
    longer = {"input_ids": pad(ids_BT, half, value=COMMON), "attention_mask": pad(present_BT, half, value=1)}
    for name, asked, new in (("start", given, 1), ("few", given | longer, 2), ("more", given | longer, 3)):
        with ledger.counting(name):
            generate(**asked, max_new_tokens=new)
    start, few, more = (ledger.counts.pop(name) for name in ("start", "few", "more"))
    ledger.counts["decode step"] = more.since(few)
    ledger.counts["rollout"] = start.plus(more.since(few).times(tokens - 1))


def trl(work: Work, ledger: Ledger) -> None:
    from torch.nn.functional import pad
    from transformers import GenerationMixin
    from trl import GRPOTrainer

    generate, sample = GenerationMixin.generate, GRPOTrainer._generate_and_score_completions

    def generated(model: Any, **given: Any) -> Any:
        """Return answers of full length, which nobody has sampled."""
        with ledger.counting("while generating"):
            count_generation(ledger, partial(generate, model), work.tokens, **given)
            return pad(given["input_ids"], (0, work.tokens), value=COMMON)

    def sampled(trainer: Any, inputs: Any) -> Any:
        with ledger.counting("sampling"):
            found = sample(trainer, inputs)
        around = ledger.counts.pop("sampling").since(ledger.counts.pop("while generating"))
        ledger.counts["rollout"] = ledger.counts["rollout"].plus(around)
        clock.begun = ledger.now()
        return found

    class Update(versus.Clock):
        begun: Count

        def tick(self, *_: Any, **__: Any) -> None:
            ledger.counts["update"] = ledger.now().since(self.begun)

    clock = Update()
    GenerationMixin.generate, GRPOTrainer._generate_and_score_completions = generated, sampled
    versus.trl(1, 0, work.folder, clock, *work.settings)


SIDES: dict[str, tuple[Callable[[Work, Ledger], None], float]] = {  # with the GiB of a card on which it fits
    "octet": (octet, 8),
    **{weights: (partial(in_8_bits, weights=weights), 8) for weights in EIGHT_BITS},
    "generate": (generate, 24),
    "trl": (trl, 24),
}


def counted(size: str, side: str) -> dict[str, Any]:
    """Count in this process, which is a child."""
    from tests.cuda.ledger import Ledger

    with tempfile.TemporaryDirectory() as name, Ledger() as ledger:
        save_zeros(size, Path(name) / "model")
        SIDES[side][0](Work(size, Path(name)), ledger)
    return {phase: summary(count) for phase, count in ledger.counts.items()}


def summary(count: Count) -> dict[str, Any]:
    """Return sums over all operations, the seconds that they take on each card at least, and the dearest by name."""
    from tests.cuda.ledger import COUNTED

    names: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("calls", "bytes", "flops"), 0.0))
    seconds = dict.fromkeys((card.name for card in CARDS), 0.0)
    captured = 0.0
    for one, calls in count.operations.items():
        for what, amount in (("calls", 1), ("bytes", one.bytes), ("flops", one.flops)):
            names[one.name][what] += calls * amount
        for card in CARDS:
            peak = card.speed.flops / (2 if one.is_fp32 else 1)
            seconds[card.name] += calls * max(one.bytes / card.speed.bandwidth, one.flops / peak)
        captured += calls * one.launches * one.captured
    totals = {what: sum(each[what] for each in names.values()) for what in ("bytes", "flops")}
    dearest = sorted(names, key=lambda name: -names[name]["bytes"])[:12]
    return {
        **{name: count.counters[name] for name in COUNTED},
        "captured": captured,
        **totals,
        "seconds": seconds,
        "most bytes": {name: names[name] for name in dearest},
    }


def at_least(one: dict[str, Any], card: Card, launch: float) -> float:
    """Return the seconds that a phase takes at least: the host launches while the card computes."""
    kernels = one["seconds"][card.name] + one["captured"] * NODE
    host = (one["launches"] + one["graph_launches"]) * launch
    return float(max(kernels, host) + (one["bytes_to_card"] + one["bytes_to_host"]) / card.link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["tiny"], help="a model that takes a minute; with it, nothing is written")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], help="what is counted")
    parser.add_argument("--table", action="store_true", help="print the results that are there")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print("\n".join(section()))
        return
    if "CUDA_STUB" not in os.environ:
        sys.exit("this needs the stub of a card: tests/cuda/python.sh bench/counts_cuda_host.py")
    if options.case:
        print(json.dumps(counted(*options.case.split())))
        return
    size = options.only or "1.5b"
    result = json.loads(RESULTS.read_text())
    found = result["counts"]
    for side, (_, card_gib) in SIDES.items():
        if side not in options.sides:
            continue
        os.environ["CUDA_STUB_CAPABILITY"] = "12.0" if side == "fp8" else "8.6"
        found[side] = in_a_child(__file__, f"{size} {side}", card_gib)
        for phase, one in found[side].items():
            print(f"{side} | {phase} | {cells(one)}", file=sys.stderr, flush=True)
    if not options.only:
        RESULTS.write_text(json.dumps(result | {"machine": describe(), "counts": found}, indent=1) + "\n")


def cells(one: dict[str, Any]) -> str:
    numbers = [f"{one[name]:,.0f}" for name in ("launches", "captured")]
    numbers += [f"{one['bytes'] / 1e9:,.1f}", f"{one['flops'] / 1e12:,.2f}"]
    return " | ".join(numbers + [f"{one[name]:,.0f}" for name in ("copies", "synchronisations")])


def section() -> Iterator[str]:
    """Yield the lines of the section of bench/results/speed.md."""
    result = json.loads(RESULTS.read_text())
    counts = result["counts"]
    yield WORK
    for side, name in NAMES.items():
        for phase in ("decode step", "rollout", "update"):
            if phase in counts[side]:
                yield f"| {name} | {phase} | {cells(counts[side][phase])} |"
    yield ROOFLINE
    for card in CARDS:
        step = compared(counts, card, "generate", ("decode step",), 1e3)
        yield f"| {card.name} | {step} | {compared(counts, card, 'trl', ('rollout', 'update'), 1)} |"
    yield EIGHT
    for card in CARDS:
        kinds = ["octet", *(kind for kind in EIGHT_BITS if kind == "int8" or card.multiplies_fp8)]
        times = [_range([1e3 * at_least(counts[kind]["decode step"], card, one) for one in LAUNCHES]) for kind in kinds]
        yield f"| {card.name} | {' | '.join([*times, '', ''][:3])} |"
    yield ASSUMPTIONS
    yield f"{result['note']}\n" if "note" in result else ""
    packages = ", ".join(f"{name} {version}" for name, version in result["machine"]["packages"].items())
    yield f"`tests/cuda/{result['machine']['command'].replace('python ', 'python.sh ')}`; {packages}.\n"


def compared(counts: dict[str, Any], card: Card, other: str, phases: Sequence[str], unit: float) -> str:
    """Return cells: the least time of Octet and of another program, and how many times Octet's that is."""
    ours, theirs = (
        [unit * sum(at_least(counts[side][phase], card, launch) for phase in phases) for launch in LAUNCHES]
        for side in ("octet", other)
    )
    ratios = [slow / fast for fast, slow in zip(ours, theirs, strict=True)]
    return " | ".join([_range(ours), _range(theirs), f"**{_range(ratios)}**"])


def _range(numbers: Sequence[float]) -> str:
    """Return both ends, or one number where they do not differ."""
    return " to ".join(dict.fromkeys(f"{number:.1f}" for number in numbers))


if __name__ == "__main__":
    main()
