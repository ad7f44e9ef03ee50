"""Real training steps of large models on a small card: the plan of `octet plan` against what the card gave away.

python bench/gpu_memory.py [--cap 8] [--only 1.5b] [--json]      writes bench/results/gpu_memory.json
python bench/gpu_memory.py --cap 0 --only "1.5b bf16 512"         with the whole card, for its seconds
python bench/gpu_memory.py --only tiny                           without a card: whether all of this runs

A larger card is made as small as that for each run, a process of its own: torch's allocator ends there, and what is
free is counted from there. The context of CUDA is taken as the plan takes it, and measured. Weights are random, because
neither memory nor speed depends on them, and answers run to their full length. `bench/versus.py --cells` has other
programs on the same shapes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import versus

from machine import describe, python_path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/gpu_memory.json"
GB, GIB = 10**9, 2**30
STEPS = 4


@dataclass(frozen=True)
class Size:
    """The size of a Qwen2.5 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151936
    tied: bool = True

    @property
    def config(self) -> Any:
        from transformers import AutoConfig

        sizes = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        sizes |= {"num_key_value_heads": self.kv_heads, "intermediate_size": self.intermediate}
        sizes |= {"vocab_size": self.vocabulary, "tie_word_embeddings": self.tied, "max_position_embeddings": 32768}
        return AutoConfig.for_model("qwen2", **sizes)

    def save(self, folder: Path) -> None:
        """Random weights, with the tokenizer of the embedded model."""
        from transformers import AutoModelForCausalLM

        from trainer.config.settings import Model
        from trainer.model.load import load_tokenizer

        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        model.save_pretrained(str(folder))
        load_tokenizer(Model()).save_pretrained(str(folder))
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


SIZES = {
    "0.5b": Size(896, 24, 14, 2, 4864),
    "1.5b": Size(1536, 28, 12, 2, 8960),
    "3b": Size(2048, 36, 16, 2, 11008),
    "7b": Size(3584, 28, 28, 4, 18944, 152064, tied=False),
    "tiny": Size(64, 2, 4, 2, 128, 1024),
}


@dataclass(frozen=True)
class Case:
    size: str
    quantize: str
    completion: int

    @property
    def name(self) -> str:
        return f"{self.size} {'bf16' if self.quantize == 'none' else self.quantize} {self.completion}"

    def settings(self, folder: Path) -> list[str]:
        card = torch.cuda.is_available()
        dtype, threads = ("bf16", "null") if card else ("fp32", "1")  # bf16 takes a CPU minutes; TRL has one thread
        fixed = [f"model.dtype={dtype}", "model.gradient_checkpointing=true"]
        fixed += ["lora.targets=all", "prompt.style=few_shot"]
        fixed += ["rollout.problems=4", "rollout.group_size=8", "rollout.rows=32", "optim.tokens_per_micro_batch=4096"]
        fixed += ["engine.ds_config=zero2_offload", f"run.threads={threads}", f"model.name={folder}"]
        return [*fixed, f"model.quantize={self.quantize}", f"rollout.max_new_tokens={self.completion}"]


CASES = [
    Case("1.5b", "none", 256),
    *[Case(size, "none", completion) for size in ("0.5b", "1.5b", "3b") for completion in (512, 1024)],
    *[Case(size, "nf4", completion) for size in ("0.5b", "1.5b", "3b", "7b") for completion in (512, 1024)],
    Case("tiny", "none", 32),
    Case("tiny", "nf4", 32),
]


def octet(folder: Path, cap: int, more: list[str]) -> dict[str, Any]:
    """Steps of the real program: what its log and its plan say."""
    from trainer.config.request import Request
    from trainer.loop import train
    from trainer.machine import hardware, quiet
    from trainer.run import assemble
    from trainer.run.rehearsal import rehearse
    from trainer.watch.screen import Screen

    said: list[str] = []

    class Listening(Screen):
        def warn(self, text: str) -> None:
            said.append(text)

    quiet.quiet()
    hardware.prepare_cuda("decode")
    config = versus.settings(STEPS, 0, folder, "rollout.dead_groups=keep", *more)
    with assemble.process_group(config):
        assemble.Screen = Listening
        run = assemble.build(Request(config, "nano", ""))
        rehearse(run.rollouts, run.updater)
        train(config, *run)
        longest = len(run.rollouts.longest.tokens)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = [name for name in steps[0] if name.startswith(("memory/", "time/")) and name.count("/") == 1]
    return {
        "measured": {name: max(step[name] for step in steps) for name in names if name.startswith("memory/")},
        "seconds": {name: median(step[name] for step in steps[1:]) for name in names if name.startswith("time/")},
        "planned": planned([*more, f"prompt.max_tokens={longest}"], cap),
        "prompt": longest,
        "said": said,
        "reserved": max((step[name] for step in steps for name in names if name.endswith("_reserved")), default=0.0),
    }


def planned(more: list[str], cap: int) -> dict[str, float]:
    """GB of each phase: what the allocator will say, and with context and slack."""
    from trainer.model.shapes import shape_of
    from trainer.plan import planner

    config = versus.settings(STEPS, 0, Path("none"), *more)
    plan = planner.Planner(shape_of(config.model.name), config, 1, cap).plan
    allocated = {phase: plan.allocated_of(phase) / GB for phase in plan.phases}
    return {**allocated, "peak": plan.peak / GB}


def measured(cap: int, more: list[str]) -> dict[str, Any]:
    """Run Octet in this child process. Its CUDA context is what the card lacks before anything is allocated."""
    context = 0
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        context = total - free
        be_small(cap)
    with tempfile.TemporaryDirectory() as folder:
        found = octet(Path(folder), cap, more)
    return {**found, "context": context / GB, "peak": found["reserved"] + context / GB}


def run(cap: int, more: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--bytes", str(cap), *more]
    environment = os.environ | {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def be_small(cap: int) -> None:
    """Let this process see a larger card as one of so many bytes, context included."""
    from trainer.plan.planner import CONTEXT

    total = torch.cuda.mem_get_info()[1]
    if cap < total:
        torch.cuda.set_per_process_memory_fraction((cap - CONTEXT) / total)
        torch.cuda.mem_get_info = lambda *_: (max(0, cap - CONTEXT - torch.cuda.memory_reserved()), cap)


def compared(case: Case, cap: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        SIZES[case.size].save(Path(folder))
        found = run(cap, case.settings(Path(folder)))
    said = found["failed"] if "failed" in found else f"{found['peak']:.2f} GB, planned {found['planned']['peak']:.2f}"
    print(f"{case.name:18}  {said}", file=sys.stderr, flush=True)
    return {"case": case.name, "octet": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=float, default=8.0, help="GiB of the card that the runs see (default 8; 0: all)")
    parser.add_argument("--only", default="", help="cases whose name begins so; with it, nothing is written")
    parser.add_argument("--json", action="store_true", help="print the result")
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.bytes is not None:
        print(json.dumps(measured(options.bytes, options.more)))
        return
    if not torch.cuda.is_available() and not options.only.startswith("tiny"):
        sys.exit("there is no card: --only tiny tries the script without one")
    cases = [case for case in CASES if case.name.startswith(options.only) and (options.only or case.size != "tiny")]
    cap = int(options.cap * GIB) or torch.cuda.get_device_properties(0).total_memory
    found = [compared(case, cap) for case in cases]
    result = {"machine": describe(), "card": card(), "cap_gib": options.cap, "cases": found}
    if not options.only:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    if any("failed" in case["octet"] for case in found if case["case"].startswith("tiny")):
        sys.exit("a case that fits every card failed")


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


if __name__ == "__main__":
    main()
