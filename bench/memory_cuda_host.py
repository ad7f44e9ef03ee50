"""The plan of `octet plan` against torch's real CUDA allocator, at true size, without a card.

tests/cuda/python.sh bench/memory_cuda_host.py                     writes bench/results/memory_cuda_host.json
tests/cuda/python.sh bench/memory_cuda_host.py --only tiny         some of the cases, and writes nothing

Every case is the rehearsal of a run, on the longest prompts and answers that its settings allow, over the stub of a
card in tests/cuda: the host code of torch, DeepSpeed and bitsandbytes is the real one, kernels do nothing, and
arithmetic on large tensors is left out. Weights are zeros in a sparse file. A case takes the RAM that its card would
give away, at most.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import describe, python_path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/memory_cuda_host.json"
GB, GIB = 10**9, 2**30
COMPUTED = 300_000  # bytes of the largest tensors that are computed
LOWEST, HIGHEST = -0.02, 0.08  # how far the plan may lie from what is allocated


@dataclass(frozen=True)
class Case:
    name: str
    size: str  # of SIZES in gpu_memory.py
    preset: str
    card_gib: float
    settings: tuple[str, ...] = ()
    recipe: str | None = None


LONG = ("rollout.max_new_tokens=1024", "rollout.rows=24")
WIDE = ("rollout.max_new_tokens=512", "rollout.rows=32")
LARGER = ("rollout.max_new_tokens=1024", "rollout.rows=48", "optim.tokens_per_micro_batch=6144")
ENDS = ("rollout.max_new_tokens=512", "rollout.rows=16", "model.quantize_head=int8", "model.embeddings=cpu")
SMALL_PARTS = ("rollout.rows=8", "optim.tokens_per_micro_batch=1024")
CASES = [  # those with the name of a preset are the presets as they were with Qwen2.5
    Case("0.5b bf16 1024", "0.5b", "8gb", 8, LONG),
    Case("8gb", "1.5b", "8gb", 8, WIDE),
    Case("1.5b bf16 1024", "1.5b", "8gb", 8, ("rollout.max_new_tokens=1024", "rollout.rows=16")),
    Case("1.5b nf4 512", "1.5b", "8gb", 8, (*WIDE, "model.quantize=nf4")),
    Case("3b bf16 512", "3b", "8gb", 8, ("rollout.max_new_tokens=512", *SMALL_PARTS)),
    Case("8gb-7b", "7b", "8gb-4b", 8, ENDS),
    Case("12gb", "3b", "12gb", 12, WIDE),
    Case("16gb", "3b", "16gb", 16, LARGER),
    Case("24gb", "7b", "24gb", 24, ("rollout.max_new_tokens=768", "rollout.rows=24")),
    Case("80gb", "7b", "80gb", 80, ("rollout.problems=32", "rollout.max_new_tokens=2048", "rollout.rows=192")),
    Case("verl_gsm8k, 0.5b", "0.5b", "8gb", 8, recipe="verl_gsm8k"),
    Case("verl_gsm8k, 1.5b", "1.5b", "8gb", 8, recipe="verl_gsm8k"),
    Case("tiny", "tiny", "nano", 8, ("model.dtype=bf16",)),
]


def rehearsed(case: Case) -> dict[str, Any]:
    """Rehearse in this process, which is a child."""
    from trainer.machine import hardware, quiet

    quiet.quiet()
    hardware.prepare_cuda("decode")
    from gpu_memory import be_small

    from trainer.config.request import Request
    from trainer.config.resolve import resolve
    from trainer.model.shapes import shape_of
    from trainer.plan import planner
    from trainer.run import assemble
    from trainer.run.rehearsal import PLANNED, rehearse

    if "CUDA_STUB" not in os.environ:
        be_small(int(case.card_gib * GIB))
    with tempfile.TemporaryDirectory() as name:
        save_zeros(case.size, Path(name) / "model")
        fixed = [f"model.name={name}/model", f"run.dir={name}/run", "task.name=nano", "eval.problems=0"]
        config = resolve(case.preset, case.recipe, [*fixed, "run.merge=false", *case.settings])
        with assemble.process_group(config):
            run = assemble.build(Request(config, case.preset, ""))
            longest = run.rollouts.longest
            tokens = (longest.tokens * config.prompt.max_tokens)[: config.prompt.max_tokens]
            rollouts = replace(run.rollouts, longest=replace(longest, tokens=tokens))
            peaks = rehearse(rollouts, run.updater)
        plan = planner.Planner(shape_of(config.model.name), config, 1, int(case.card_gib * GIB)).plan
    phases = {phase: peaks[own] for own, phase in PLANNED.items() if phase in plan.phases}
    planned = {phase: plan.allocated_of(phase) for phase in phases}
    found = {
        "case": case.name,
        "card_gib": case.card_gib,
        "settings": case.settings,
        "allocated": {phase: peak.allocated / GB for phase, peak in phases.items()},
        "planned": {phase: bytes / GB for phase, bytes in planned.items()},
        "reserved": max(peak.reserved for peak in peaks.values()) / GB,
        "planned_reserved": (plan.peak - plan.phases[plan.peak_phase]["CUDA context"]) / GB,
        "difference": {phase: planned[phase] / peak.allocated - 1 for phase, peak in phases.items()},
    }
    if "CUDA_STUB" in os.environ:
        from tests.cuda.stub.library import counted

        found["taken_from_the_card"] = counted()["peak"] / GB
    return found


def save_zeros(size: str, folder: Path) -> None:
    """Write a model of zeros that takes no room on the disk."""
    import torch
    from gpu_memory import SIZES
    from transformers import AutoModelForCausalLM

    from trainer.config.settings import Model
    from trainer.model.load import load_tokenizer

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SIZES[size].config, dtype=torch.bfloat16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        if SIZES[size].tied and name == "lm_head.weight":
            continue
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(str(folder))
    load_tokenizer(Model()).save_pretrained(str(folder))


def in_a_child(script: str, name: str, card_gib: float) -> dict[str, Any]:
    """Return what a script prints of the case with this name on a card of this size."""
    card = {"CUDA_STUB_MEMORY_GIB": str(card_gib), "CUDA_STUB_COMPUTE_BYTES": str(COMPUTED)}
    environment = os.environ | card | {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, script, "--case", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(found: dict[str, Any]) -> str:
    phases = [f"{phase} {found['allocated'][phase]:.3f} ({planned:.3f})" for phase, planned in found["planned"].items()]
    reserved = f"reserved {found['reserved']:.3f} ({found['planned_reserved']:.3f})"
    return f"{found['case']:16} on {found['card_gib']:g} GiB: {', '.join(phases)}, {reserved}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases by name; with it, nothing is written")
    parser.add_argument("--case", help="one case in this process, on a real card as well")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(rehearsed(next(case for case in CASES if case.name == options.case))))
        return
    if "CUDA_STUB" not in os.environ:
        sys.exit("this needs the stub of a card: tests/cuda/python.sh bench/memory_cuda_host.py")
    chosen = [case for case in CASES if (case.name in options.only if options.only else case.size != "tiny")]
    found = []
    for case in chosen:
        found.append(in_a_child(__file__, case.name, case.card_gib))
        print(line(found[-1]), file=sys.stderr, flush=True)
        if not options.only:
            RESULTS.write_text(json.dumps({"machine": describe(), "cases": found}, indent=1) + "\n")
    outside = [
        f"{one['case']}, {phase}: the plan lies {difference:+.1%} from what is allocated"
        for one in found
        for phase, difference in one["difference"].items()
        if one["case"] != "tiny" and not LOWEST <= difference <= HIGHEST
    ]
    if outside:
        sys.exit("\n".join(outside))


if __name__ == "__main__":
    main()
