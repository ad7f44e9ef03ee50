"""How fast answers are sampled: Octet's decoder against `model.generate`, on the same model with the same adapter.

python bench/decode.py [--rows 64 128] [--json]            the embedded model on one CPU thread
python bench/decode.py --model smollm2-135m-shape          random weights of that shape, few tokens
python bench/decode.py --model qwen2.5-1.5b-shape --device cuda --dtype bf16 --rows 32
python bench/decode.py --model qwen2.5-1.5b-shape --device cuda --dtype bf16 --rows 32 --weights same int8 fp8

Useful tokens are those that a completion keeps. The samplers take turns, so that whatever else the machine does hits
all; medians. With --weights, only Octet's decoder runs, with weights of these types, and all are compared with the
first. Each run is written to bench/results/decode.json under the name of its model, device and type.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from machine import describe
from trainer.config.settings import Lora, Model, PromptSettings, Rollout, TaskSettings
from trainer.machine import quiet
from trainer.model.load import DTYPES, load_model, load_tokenizer, stop_tokens
from trainer.model.lora import add_adapter
from trainer.model.shapes import from_config
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.records import Problem, Prompt, Sampling
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.turns import Stops, TurnTaking

RESULTS = Path(__file__).parent / "results/decode.json"
GROUP = 8
SAMPLERS: dict[str, Callable[..., Any]] = {"generate": HfSampler, "decode": DecodeSampler}


@dataclass(frozen=True)
class Shape:
    """Random weights and random prompts."""

    config: Any
    prompt_tokens: int
    new_tokens: int


def smollm2_135m() -> LlamaConfig:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    shape |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
    return LlamaConfig(**shape, rope_theta=100000.0, tie_word_embeddings=True)


def qwen25_15b() -> Qwen2Config:
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    shape |= {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768}
    return Qwen2Config(**shape, rope_theta=1e6, tie_word_embeddings=True)


def small(kind: str, **own: Any) -> Any:
    """Return a shape of a few million weights."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 2, "vocab_size": 8192, "tie_word_embeddings": True, "bos_token_id": None}
    return AutoConfig.for_model(kind, **shape, pad_token_id=0, eos_token_id=2, **own)


DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
INPUTS = {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 8192}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False}
GATED = {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"] * 2, "head_dim": 32}
SHARED = {"layer_types": ["attention"] * 8, "num_local_experts": 0, "shared_intermediate_size": 768}
SHAPES = {
    "smollm3-small": Shape(small("smollm3"), prompt_tokens=48, new_tokens=32),
    "granite4-small": Shape(small("granitemoehybrid", **SHARED), prompt_tokens=48, new_tokens=32),
    "lfm2-small": Shape(small("lfm2", **CONVOLUTIONS), prompt_tokens=48, new_tokens=32),
    "lfm3-small": Shape(small("lfm3", **GATED), prompt_tokens=48, new_tokens=32),
    "qwen3.5-small": Shape(small("qwen3_5_text", head_dim=32, **DELTA), prompt_tokens=48, new_tokens=32),
    "gemma4-small": Shape(small("gemma4_text", head_dim=32, **INPUTS), prompt_tokens=48, new_tokens=32),
    "smollm2-135m-shape": Shape(smollm2_135m(), prompt_tokens=48, new_tokens=16),
    "qwen2.5-1.5b-shape": Shape(qwen25_15b(), prompt_tokens=256, new_tokens=512),
}


@dataclass(frozen=True)
class Work:
    model: Any
    stops: Stops
    prompts: Callable[[int], list[Prompt]]
    new_tokens: int


def embedded(device: torch.device, dtype: str) -> Work:
    tokenizer = load_tokenizer(Model())
    model = load_model(Model(), dtype, device)
    task = make_task(TaskSettings())
    prompter = Prompter(tokenizer, PromptSettings(), task)
    problems = list(itertools.islice(task.train(), 512))
    asked = [prompter.prompt(problem) for problem in problems]
    return Work(adapted(model), Stops(tokenizer, stop_tokens(tokenizer, model)), lambda count: asked[:count], 40)


def shaped(shape: Shape, device: torch.device, dtype: str) -> Work:
    with device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=DTYPES[dtype])
    random = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[Prompt]:
        tokens = torch.randint(10, shape.config.vocab_size, (count, shape.prompt_tokens), generator=random).tolist()
        return [Prompt(Problem(str(n), "", ""), "", tuple(row)) for n, row in enumerate(tokens)]

    stops = Stops(load_tokenizer(Model()), [shape.config.vocab_size - 1])  # hardly ever drawn
    return Work(adapted(model), stops, prompts, shape.new_tokens)


def adapted(model: Any) -> Any:
    """Add an adapter as in training, with r=16 on all linear layers and values too small to change the answers."""
    dtype = model.dtype
    model = add_adapter(model, Lora(r=16, targets="all")).eval().to(dtype)  # as the engine has it
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
    return model


def one_run(sampler: Any, prompts: list[Prompt], sampling: Sampling) -> dict[str, float]:
    on_gpu = sampler.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    groups = dict(sampler.sample(prompts, sampling))
    if on_gpu:
        torch.cuda.synchronize()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = sum(len(one.tokens) for group in groups.values() for one in group)
    steps = max(len(one.tokens) for group in groups.values() for one in group)
    return {"per_cpu_s": tokens / cpu, "per_wall_s": tokens / wall, "wall_s": wall, "tokens": tokens, "steps": steps}


def measure(work: Work, rows: int, repetitions: int, kinds: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    samplers = {name: kind(work.model, TurnTaking(work.stops), rows) for name, kind in kinds.items()}
    prompts = work.prompts(max(1, rows // GROUP))
    group = rows // len(prompts)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in samplers}
    for seed in range(repetitions + 1):
        for name, sampler in samplers.items():
            runs[name].append(one_run(sampler, prompts, Sampling(group, 1.0, work.new_tokens, seed)))
    timed = {name: each[1:] for name, each in runs.items()}  # the first of each warms up
    result: dict[str, Any] = {
        name: {key: round(median(run[key] for run in each), 3) for key in each[0]} for name, each in timed.items()
    }
    first, *others = timed
    for key in ("per_cpu_s", "per_wall_s"):
        for name in others:
            ratios = [fast[key] / slow[key] for slow, fast in zip(timed[first], timed[name], strict=True)]
            of = "" if name == "decode" else f"_{name}"
            result[f"speedup_{key}{of}"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    result["over_memory_floor"] = over_memory_floor(work, rows, prompts, timed.get("decode", timed[first]))
    return result


def over_memory_floor(work: Work, rows: int, prompts: list[Prompt], runs: list[dict[str, float]]) -> dict[str, float]:
    """Time of a step over the time that reading weights and caches once takes. Prompts are counted as steps, too."""
    shape = from_config("the model", work.model.config.to_dict())
    weights = sum(p.numel() * p.element_size() for name, p in work.model.named_parameters() if "lora_" not in name)
    item = next(work.model.parameters()).element_size()
    per_token = 2 * item * shape.total(lambda block: block.keys * block.caches)
    prompt = sum(len(one.tokens) for one in prompts) / len(prompts)
    steps = median(run["steps"] for run in runs)
    caches = rows * per_token * (prompt + steps / 2)
    bandwidth = copy_bandwidth(work.model.device)
    floor = (weights + caches) / bandwidth
    step = median(run["wall_s"] / run["steps"] for run in runs)
    return {"copy_gb_per_s": bandwidth / 1e9, "floor_ms": floor * 1e3, "step_ms": step * 1e3, "ratio": step / floor}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a plain copy, the best of ten."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    to, seconds = torch.empty_like(source), []
    for _ in range(10):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        to.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * source.numel() * source.element_size() / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128], help="completions side by side")
    parser.add_argument("--model", choices=["nano", *SHAPES], default="nano")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument(
        "--weights", choices=list(get_args(Rollout.model_fields["weights"].annotation)), nargs="+", default=[]
    )
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    options = parser.parse_args()
    quiet.quiet()
    quiet.no_progress_bars()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    shape = SHAPES.get(options.model)
    work = shaped(shape, device, options.dtype) if shape else embedded(device, options.dtype)
    own: dict[str, Callable[..., Any]] = {kind: partial(DecodeSampler, weights=kind) for kind in options.weights}
    by_rows = {str(rows): measure(work, rows, options.repetitions, own or SAMPLERS) for rows in options.rows}
    clock = "speedup_per_cpu_s" if options.device == "cpu" else "speedup_per_wall_s"
    speedups = {
        rows + name.removeprefix(clock).replace("_", " "): round(one["median"], 2)
        for rows, result in by_rows.items()
        for name, one in result.items()
        if name.startswith(clock)
    }
    settings = {name: getattr(options, name) for name in ("model", "device", "dtype", "repetitions", "threads")}
    write(options, {"machine": machine(device), **settings, "speedup": speedups, "results": by_rows})


def machine(device: torch.device) -> dict[str, Any]:
    return describe() | ({"gpu": torch.cuda.get_device_name()} if device.type == "cuda" else {})


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    stored[" ".join([options.model, options.device, options.dtype, *options.weights])] = result
    options.out.write_text(json.dumps(stored, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    for rows, one in result["results"].items():
        for name in options.weights or SAMPLERS:
            cpu, wall = one[name]["per_cpu_s"], one[name]["per_wall_s"]
            print(f"{rows:>4} rows  {name:9} {cpu:9,.0f} tokens a CPU second {wall:9,.0f} a second")
        print(f"{rows:>4} rows  a step is {one['over_memory_floor']['ratio']:.1f}x its memory floor")
    for compared, times in result["speedup"].items():
        print(f"{compared}: {times:.2f}x")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
