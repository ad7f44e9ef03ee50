"""The plan of `octet plan` against the tensors that the real code keeps alive, phase by phase.

python bench/plan.py [--json]                  writes bench/results/plan.json
python bench/plan.py --only small normed       some of the cases, and writes nothing

Small models and slices of large ones, with random weights, go through the real engine, decoder and training pass on the
CPU. `live.py` counts the tensors that are alive. It does not see what a kernel allocates inside, nor blocks of
the CUDA allocator, nor captured steps: these parts of a plan are left out of the comparison.
"""

import argparse
import gc
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from live import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

from machine import describe
from trainer import advantage
from trainer.batch.pack import Packer, idle_row, rows
from trainer.batch.pack import minibatches as deal
from trainer.config.resolve import resolve
from trainer.config.settings import Config
from trainer.machine import quiet
from trainer.model.load import DTYPES, load_tokenizer
from trainer.model.lora import add_adapter
from trainer.model.shapes import from_config
from trainer.plan import planner
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, Sampling, Score, ScoredGroup
from trainer.rollout.decoder import weights
from trainer.rollout.make import make_sampler
from trainer.rollout.turns import Stops
from trainer.step.engine import DeepSpeedPolicy
from trainer.step.update import backward
from trainer.watch.tally import Tally

RESULTS = Path(__file__).parent / "results/plan.json"
PLENTY = 10**13  # bytes of a card, so that nothing is left out for want of memory, as on this CPU


@dataclass(frozen=True)
class Case:
    """A model and what is done with it."""

    name: str
    model: dict[str, Any]
    prompt: int
    completion: int
    settings: tuple[str, ...] = ()
    prompts: int = 2
    group: int = 4

    @property
    def config(self) -> Config:
        lengths = (f"prompt.max_tokens={self.prompt}", f"rollout.max_new_tokens={self.completion}")
        sizes = (f"rollout.problems={self.prompts}", f"rollout.group_size={self.group}", "eval.problems=2")
        fixed = ("model.dtype=bf16", "engine.ds_config=zero2", "algorithm.kl.coef=0.1", "run.steps=1")
        return resolve(None, None, [*lengths, *sizes, *fixed, *self.settings])


def model(hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, **more: Any) -> dict:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv, "intermediate_size": intermediate, "vocab_size": vocabulary}
    return {"model_type": "qwen2", "tie_word_embeddings": True, "max_position_embeddings": 8192, **sizes, **more}


SMALL = model(128, 4, 8, 2, 384, 1024)
WIDE = model(256, 3, 4, 4, 512, 4096, model_type="llama", tie_word_embeddings=False)
NORMED = model(192, 3, 6, 3, 512, 2048, model_type="qwen3", head_dim=64)
JOINED = model(192, 3, 6, 3, 512, 2048, model_type="phi3", pad_token_id=0, tie_word_embeddings=False)
NORMED_AFTER = model(192, 3, 6, 3, 512, 2048, model_type="olmo2", tie_word_embeddings=False)
SCALED = model(192, 3, 6, 3, 512, 2048, model_type="granite", logits_scaling=8.0)
GEMMA = model(192, 3, 6, 3, 512, 2048, model_type="gemma3_text", head_dim=32)
CONVOLUTIONS = model(192, 3, 6, 3, 768, 2048, model_type="lfm2", layer_types=["conv", "full_attention", "conv"])
GATED = {"layer_types": ["conv", "sliding_attention", "full_attention"], "model_type": "lfm3", "head_dim": 32}
GATED = model(192, 3, 6, 3, 768, 2048, pad_token_id=0, **GATED)
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
DELTA |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "model_type": "qwen3_5_text"}
DELTA = model(192, 3, 6, 3, 512, 2048, head_dim=32, **DELTA)
BORROWED = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 2048, "num_kv_shared_layers": 2}
BORROWED |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 64, "head_dim": 32}
BORROWED = model(192, 4, 6, 3, 512, 2048, model_type="gemma4_text", use_double_wide_mlp=True, **BORROWED)
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 128, "num_experts_per_tok": 4, "model_type": "qwen3_moe"}
EXPERTS = model(192, 3, 6, 3, 512, 2048, head_dim=32, **EXPERTS)
SINKS = {"num_local_experts": 16, "num_experts_per_tok": 4, "model_type": "gpt_oss", "attention_bias": True}
SINKS = model(192, 4, 6, 3, 128, 2048, head_dim=32, pad_token_id=0, **SINKS)
DEEP = model(96, 12, 6, 2, 320, 512)
CHECKPOINTED, ALL, FULL = "model.gradient_checkpointing=true", "lora.targets=all", "lora.enabled=false"
CASES = [
    Case("small", SMALL, 64, 48),
    Case("small, checkpointed", SMALL, 64, 48, (CHECKPOINTED,)),
    Case("small, all layers", SMALL, 64, 48, (ALL,)),
    Case("small, in 8 bits", SMALL, 64, 48, (ALL, "rollout.weights=int8")),
    Case("small, long answers", SMALL, 32, 512, (CHECKPOINTED, ALL)),
    Case("small, long prompts", SMALL, 400, 48, (CHECKPOINTED,)),
    Case("small, rows one by one", SMALL, 64, 48, (CHECKPOINTED, "optim.tokens_per_micro_batch=1")),
    Case("small, padded", SMALL, 64, 48, ("optim.layout=padded",)),
    Case("small, model.generate", SMALL, 64, 48, ("rollout.engine=hf",)),
    Case("small, whole model", SMALL, 64, 48, (FULL,)),
    Case("wide", WIDE, 64, 64, (CHECKPOINTED,)),
    Case("wide, whole model", WIDE, 64, 64, (FULL, CHECKPOINTED)),
    Case("normed", NORMED, 96, 64, (ALL,)),
    Case("normed, checkpointed", NORMED, 96, 64, (CHECKPOINTED,)),
    Case("joined", JOINED, 96, 64, (ALL,)),
    Case("normed after", NORMED_AFTER, 96, 64, (ALL,)),
    Case("scaled", SCALED, 96, 64, (ALL,)),
    Case("gemma 3", GEMMA, 96, 64, (ALL,)),
    Case("convolutions", CONVOLUTIONS, 96, 64, (ALL,)),
    Case("gated heads", GATED, 96, 64, (ALL,)),
    Case("gated heads, checkpointed", GATED, 96, 64, (CHECKPOINTED,)),
    Case("gated delta rule", DELTA, 96, 64, (ALL,)),
    Case("gated delta rule, checkpointed", DELTA, 96, 64, (CHECKPOINTED,)),
    Case("borrowed keys", BORROWED, 96, 64, (ALL,)),
    Case("borrowed keys, checkpointed", BORROWED, 96, 64, (CHECKPOINTED,)),
    Case("experts", EXPERTS, 96, 64, (ALL,)),
    Case("experts, checkpointed", EXPERTS, 96, 64, (CHECKPOINTED,)),
    Case("sinks", SINKS, 96, 64, (ALL,)),
    Case("deep", DEEP, 48, 128),
    Case("deep, checkpointed", DEEP, 48, 128, (CHECKPOINTED, ALL)),
    Case("deep, entropy", DEEP, 48, 128, ("algorithm.entropy_bonus=0.01",)),
]
IN_FP32 = "model.dtype=fp32"  # bf16 takes minutes on a CPU
LARGE = [
    Case("two layers of 1.5 B", model(1536, 2, 12, 2, 8960, 16384), 96, 16, (CHECKPOINTED, IN_FP32), prompts=1),
    Case("one layer of 7 B", model(3584, 1, 28, 4, 18944, 8192), 96, 16, (CHECKPOINTED, ALL, IN_FP32), prompts=1),
]


@dataclass
class Measurement:
    """Peaks of live bytes by phase."""

    live: LiveBytes
    peaks: dict[str, int] = field(default_factory=dict)

    def end(self, phase: str) -> None:
        gc.collect()
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live.peak)
        self.live.forget_the_peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    parser.add_argument("--only", nargs="+", metavar="CASE")
    options = parser.parse_args()
    weights.LARGE = PLENTY  # no copies in the layout of oneDNN, which a card does not make
    quiet.quiet()
    torch.set_num_threads(1)
    distributed.connect(timeout_s=600)
    found = [compare(case) for case in [*CASES, *LARGE] if not options.only or case.name in options.only]
    result = {"machine": describe(), "cases": found}
    if not options.only:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    distributed.disconnect()


def compare(case: Case) -> dict[str, Any]:
    planned, measured = planned_bytes(case), measure(case)
    phases = {name: {"plan": planned[name], "live": measured[name]} for name in planned}
    differences = (f"{name} {of['plan'] / of['live'] - 1:+.1%}" for name, of in phases.items())
    print(f"{case.name:26}", *differences, file=sys.stderr, flush=True)
    return {"case": case.name, "model": case.model, "settings": list(case.settings), "bytes": phases}


def planned_bytes(case: Case) -> dict[str, int]:
    """Return the planned bytes of each phase, without those that cannot be measured here."""
    the_planner = planner.Planner(from_config(case.name, case.model), case.config, 1, PLENTY)
    plan = the_planner.plan
    inside = the_planner.rows * case.model["vocab_size"] * planner.INSIDE_A_DRAW
    found = {}
    for phase, terms in plan.phases.items():
        unseen = terms.get("captured steps", 0) + (min(inside, terms.get("logits", 0)) if phase == "rollout" else 0)
        found[phase] = plan.allocated_of(phase) - unseen
    return found


def measure(case: Case) -> dict[str, int]:
    """A run of one step: load, evaluate, sample, score, train twice (Adam's memory is made in the first)."""
    torch.manual_seed(0)
    config, live = case.config, LiveBytes()
    found = Measurement(live)
    with live:
        policy = make_policy(case, live)
        found.end("load")
        stops, say = Stops(load_tokenizer(config.model), []), partial(print, file=sys.stderr)
        choose = partial(make_sampler, config.rollout, policy.model, stops, say)
        evaluator, sampler = choose(copies=False), choose()
        sample(evaluator, case, group=1)
        groups = sample(sampler, case, case.group)
        packer = Packer(config.optim.tokens_per_micro_batch, 0, policy.is_flat)
        for step in (0, 1):
            train(policy, config, groups, packer, step, found)
        del groups
        found.end("nothing")
        sample(sampler, case, case.group)
        found.end("rollout")
    policy.release()
    return found.peaks


def make_policy(case: Case, live: LiveBytes) -> DeepSpeedPolicy:
    config = case.config
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.model), dtype=DTYPES[config.model.dtype])
    if config.model.gradient_checkpointing:
        made.activation_checkpointing_enable({"use_reentrant": False})
    gc.collect()
    live.forget_the_peak()  # from random values a tied output layer is made for nothing; from a file it is not
    if config.lora.enabled:
        made = add_adapter(made, config.lora)
    return DeepSpeedPolicy(made, config, config.model.dtype, total_steps=2)


def prompts_of(case: Case) -> list[Prompt]:
    draw = partial(torch.randint, case.model["vocab_size"], (case.prompt,))
    return [Prompt(Problem(str(index), "", ""), "", tuple(draw().tolist())) for index in range(case.prompts)]


def sample(sampler: Any, case: Case, group: int) -> list[ScoredGroup]:
    """Nothing stops an answer, so all are as long as the settings allow."""
    prompts = prompts_of(case)
    sampled = sampler.sample(prompts, Sampling(group, 1.0, case.completion, seed=1))
    return [scored(prompts[index], completions) for index, completions in sampled]


def scored(prompt: Prompt, completions: list[Completion]) -> ScoredGroup:
    scores = tuple(Score(float(index % 2), {}, None, None, False, False) for index in range(len(completions)))
    return ScoredGroup(prompt, tuple(completions), scores)


def train(policy: Any, config: Config, groups: list[ScoredGroup], packer: Packer, step: int, found: Any) -> None:
    algorithm = config.algorithm
    made = rows(groups, [advantage.of(group.rewards_G, algorithm) for group in groups], algorithm)
    (minibatch,) = deal(made, idle_row(groups[0]), config, packer)
    found.live.forget_the_peak()
    for batch in minibatch.batches:
        policy.measure(batch)
    found.end("score")

    def collected() -> None:
        backward(policy, minibatch, algorithm, 0.0, Tally())
        found.end("backward")

    policy.update(collected, step)
    found.end("step")


if __name__ == "__main__":
    main()
