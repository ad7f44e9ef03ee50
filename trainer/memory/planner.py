"""How much memory a run needs, worked out before it begins: arithmetic over a shape and a configuration.

    load -> rollout -> score -> backward -> step

For each phase, bytes by what they are for. Tensors are counted as the code makes them, at the lengths that the settings
allow, so a plan is the worst case of a run, not its average. `bench/plan.py` measures the same code and holds every
phase to the plan. What no tensor says, the context of CUDA and the slack of its allocator, are constants with a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from trainer.config import ds_config
from trainer.config.settings import Config
from trainer.memory.activations import FLOAT, Work, forward_bytes, head_bytes, kept_bytes, layer_bytes, saved_bytes
from trainer.model.shapes import Linear, Shape

GB = 10**9
CONTEXT = GB // 2  # of CUDA with the kernels of torch and cuBLAS, in every process; not measured
AT_WORK = 2 * GB  # of vLLM beside weights and cache: activations, kernels, graphs; not measured
ASLEEP = GB // 2  # what of that stays while it sleeps; a user of vLLM 0.13 saw 1.1 GB, the CUDA context included
SLEEPING = "sleeping weights of vLLM"
ADAPTERS = 2  # that vLLM holds: the new one is loaded while the old one is still known
SLACK = 0.05  # of what the allocator hands out: blocks are rounded up, and holes stay; not measured
PROCESS = 3 * GB // 2  # of CPU memory that a rank has for Python, torch and DeepSpeed
ROOMY = 0.9  # of a card: a plan below is certain to fit
TIGHT = 1.1  # a plan above is certain not to; between the two nobody knows

PREFILL_TOKENS, PLACES, SPARE = 4096, 16, 4  # as in samplers/decode.py and weights.py, which import torch
DRAW = 14  # bytes for each logit of a draw: fp32 logits and probabilities, and their sums in double
INSIDE_A_DRAW = 8  # and what is summed, in double, inside the kernel
ITEMS = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4}
NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # four bits, a byte for each 64, and a float for each 256 of these bytes
ADAM = {"adamw": 8, "adamw_8bit": 2.04}  # bytes for each number trained
TARGETS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj")}
DECODES = ("qwen2", "qwen3", "llama", "mistral")

Terms = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Bytes of one card in each phase, and of the machine's memory, by what they are for."""

    shape: Shape
    config: Config
    world_size: int
    vram: int
    phases: dict[str, Terms]
    ram: dict[str, Terms]

    def peak_of(self, phase: str) -> int:
        """What the card has given away at the peak of a phase: what `nvidia-smi` shows."""
        return sum(self.phases[phase].values())

    def allocated_of(self, phase: str) -> int:
        """Without context and slack: what `torch.cuda.max_memory_allocated` shows."""
        return sum(size for name, size in self.phases[phase].items() if name not in ("CUDA context", "allocator slack"))

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.peak_of)

    @property
    def peak(self) -> int:
        return self.peak_of(self.peak_phase)

    @property
    def dominant(self) -> str:
        """The largest term of the phase with the peak."""
        terms = self.phases[self.peak_phase]
        return max(terms, key=lambda name: terms[name])

    @property
    def ram_terms(self) -> Terms:
        """Of the phase that takes most of the machine's memory."""
        return max(self.ram.values(), key=lambda terms: sum(terms.values()))

    @property
    def ram_peak(self) -> int:
        return sum(self.ram_terms.values())

    @property
    def fits(self) -> bool:
        return self.peak <= ROOMY * self.vram

    @property
    def verdict(self) -> str:
        if self.fits:
            return "fits"
        return "tight" if self.peak <= TIGHT * self.vram else "too large"


def plan(shape: Shape, config: Config, world_size: int = 1, vram: int = 8 * GB, local_size: int | None = None) -> Plan:
    """Of one rank of `world_size`, `local_size` of which are on its machine: all of them where nobody says."""
    return Planner(shape, config, world_size, vram, local_size).plan()


class Planner:
    """The terms, one property each. `item` is the bytes of a number in the model's precision."""

    def __init__(self, shape: Shape, config: Config, world_size: int, vram: int, local_size: int | None = None) -> None:
        self.shape, self.config, self.world_size, self.vram = shape, config, world_size, vram
        self.local_size = world_size if local_size is None else local_size
        self.item = ITEMS[config.model.dtype]
        self.engine = ds_config.read(config.engine.ds_config).get("zero_optimization", {})
        self.stage = int(self.engine.get("stage", 0))
        self.offloads = _is_offloaded(self.engine, "offload_optimizer")
        self.streams = self.stage == 3 and _is_offloaded(self.engine, "offload_param")
        self.splits = self.stage == 3 and (self.streams or world_size > 1)
        self.prompt, self.completion = longest_prompt(shape, config), config.rollout.max_new_tokens

    def plan(self) -> Plan:
        phases = {
            "load": self._load(),
            "rollout": self._resident | self._rollout(),
            "score": self._resident | self._kept_by_rollout | self._score(),
            "backward": self._resident | self._kept_by_rollout | self._backward(),
            "step": self._resident | self._kept_by_rollout | self._step(),
        }
        if not self._scores:
            del phases["score"]
        whole = {name: self._with_overhead(terms) for name, terms in phases.items()}
        return Plan(self.shape, self.config, self.world_size, self.vram, whole, self._ram())

    def _with_overhead(self, terms: Mapping[str, float]) -> Terms:
        found = {name: round(size) for name, size in terms.items() if size >= 1}
        return {**found, "allocator slack": round(SLACK * sum(found.values())), "CUDA context": CONTEXT}

    # what is there all the time

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Linear layers with an adapter; those of the whole model have none."""
        lora = self.config.lora
        if not lora.enabled:
            return ()
        every = tuple(linear.name for linear in self.shape.linears)
        if isinstance(lora.targets, str):
            return TARGETS.get(lora.targets, every)
        return tuple(name.rpartition(".")[2] for name in lora.targets)  # PEFT knows a layer by the end of its name

    @cached_property
    def trained(self) -> int:
        """Numbers that are trained."""
        if not self.config.lora.enabled:
            return self.shape.parameters
        return self.shape.layers * sum(map(self._adapter, self.shape.linears))

    def _adapter(self, linear: Linear) -> int:
        if linear.name not in self.targets:
            return 0
        lora = self.config.lora
        return lora.r * (linear.inputs + linear.outputs) + linear.outputs * lora.dora

    @cached_property
    def weights(self) -> float:
        """Bytes of the model without an adapter."""
        shape, of_linears = self.shape, sum(map(self._linear_bytes, self.shape.linears))
        return (shape.embeddings + shape.norms) * self.item + shape.layers * of_linears

    def _linear_bytes(self, linear: Linear) -> float:
        bias = linear.outputs * linear.bias * self.item
        if self.config.model.quantize == "nf4":
            return linear.weights * NF4 + bias
        if self.config.model.quantize == "int8":
            return linear.weights + 4 * linear.outputs + bias
        return linear.weights * self.item + bias

    @cached_property
    def shard(self) -> float:
        """Numbers whose optimizer state is with this rank."""
        return self.trained / (self.world_size if self.stage else 1)

    @cached_property
    def state(self) -> float:
        """Bytes of the optimizer state of this rank: the weights in fp32, and what Adam remembers. ZeRO-3 keeps the
        gradient of its part beside them."""
        return self.shard * (4 + ADAM[self.config.optim.name] + (self.item if self.splits else 0))

    @cached_property
    def _resident(self) -> dict[str, float]:
        lora, kl = self.config.lora, self.config.algorithm.kl
        snapshots = (kl.refresh is not None or (kl.coef > 0 and not lora.enabled)) + (
            lora.enabled and lora.init != "zero"
        )
        largest = max(self._trained_sizes)
        return {
            "weights": self._own_weights,
            "adapter": self.trained * self.item if lora.enabled else 0,
            "optimizer state": largest * self.item if self.offloads else self.state,
            "reference": snapshots * self.trained * self.item,
        }

    @cached_property
    def _own_weights(self) -> float:
        """Bytes of the weights that stay on this card. An adapter stays whole: DeepSpeed splits no tensor of less than
        100,000 numbers."""
        return 0 if self.streams else self.weights / (self.world_size if self.splits else 1)

    @property
    def _regularisation(self) -> float:
        """Of algorithm.gradreg beside the second gradient, all in fp32: the parameters, the same a step further, the
        first gradient, and the second as it is added up."""
        return 4 * FLOAT * self.trained if self.config.algorithm.gradreg.strength else 0

    @cached_property
    def _trained_sizes(self) -> list[int]:
        """Of single tensors."""
        if not self.config.lora.enabled:
            return [self.shape.embedding, *(linear.weights for linear in self.shape.linears)]
        sides = [max(one.inputs, one.outputs) for one in self.shape.linears if one.name in self.targets]
        return [self.config.lora.r * max(sides, default=0)]

    @property
    def _free(self) -> float:
        """What is free when the first rollout begins."""
        return self.vram - CONTEXT - (1 + SLACK) * (sum(self._resident.values()) + self._whole)

    # load

    def _load(self) -> dict[str, float]:
        """The engine makes what is trained one flat tensor, by way of the CPU where two of them would not fit."""
        flat = self.trained * self.item
        frozen = self.weights if self.config.lora.enabled else 0
        own = self.shard * (self.item if self.offloads else max(4 + self.item, 8))  # in fp32, with a first gradient
        twice = flat if frozen + 2 * flat <= self.vram - CONTEXT else 0
        if self.splits:  # a part of a weight takes the place of the whole, one after the other
            return {"weights": self.weights, "adapter": flat if frozen else 0}
        return {"weights": self.weights, "adapter": flat if frozen else 0, "flattening": max(twice, own)}

    # rollout

    @cached_property
    def rows(self) -> int:
        """Answers that are sampled side by side."""
        rollout = self.config.rollout
        return min(rollout.rows, ceil(rollout.problems / self.world_size) * rollout.group_size)

    @cached_property
    def _evaluated(self) -> int:
        """Problems that are evaluated side by side."""
        return min(self.config.rollout.rows, ceil(self.config.eval.problems / self.world_size))

    @cached_property
    def decodes(self) -> bool:
        """With the decoder, not with model.generate."""
        known = self.shape.family in DECODES and not self.shape.windowed
        return known and self.config.rollout.engine != "hf" and not self._is_outside

    @property
    def _is_outside(self) -> bool:
        """Another program samples, or an engine with a share of the card."""
        return self.config.rollout.asks_servers or bool(self._engine_of_vllm)

    @property
    def _engine_of_vllm(self) -> dict[str, float]:
        """It takes its share whole, as soon as it samples."""
        return {"vLLM": self.vllm} if self.config.rollout.engine == "vllm_colocate" else {}

    @cached_property
    def vllm(self) -> float:
        """Bytes for a vLLM in this process: the share that it was given, or one that holds all rows."""
        share = self.config.rollout.vllm.memory
        return share * self.vram if share else self.vllm_at_least + self._cache(self.rows - 1) + AT_WORK

    @property
    def vllm_at_least(self) -> float:
        """The base as it came, adapters, and the cache of one answer."""
        adapters = ADAPTERS * self.trained if self.config.lora.enabled else 0
        return (self.shape.parameters + adapters) * self.item + self._cache(1)

    @cached_property
    def copies(self) -> float:
        """Merged weights that the decoder keeps, as many as a quarter of the free memory holds, adapted ones first."""
        if not self.decodes or self.stage == 3 or self.config.model.quantize != "none" or self.config.lora.dora:
            return 0
        linears, budget, found = self.shape.linears, self._free / SPARE, 0.0
        parts = [linears[:3], linears[3:4], linears[4:6], linears[6:]]
        adapted = {part: any(one.name in self.targets for one in part) for part in parts}
        for part in sorted(parts, key=lambda part: not adapted[part]):
            if adapted[part] or len(part) > 1:
                size = sum(one.weights for one in part) * self.item
                count = min(self.shape.layers, int((budget - found) // size)) if budget > found else 0
                found += count * size
        return found

    @cached_property
    def places(self) -> int:
        return ceil((self.prompt + self.completion) / PLACES) * PLACES

    def _cache(self, rows: int) -> float:
        return 2 * self.shape.layers * self.shape.keys * self.item * self.places * rows

    @cached_property
    def _kept_by_rollout(self) -> dict[str, float]:
        """The decoder keeps its copies, its captured steps, and its caches where a quarter of the free memory holds
        them: one for training and one for evaluations, which have a decoder of their own."""
        if not self.decodes:
            asleep = self._engine_of_vllm and self.config.rollout.vllm.sleep
            return {"sleeping vLLM": ASLEEP} if asleep else self._engine_of_vllm
        kept = {"merged copies": self.copies, "KV cache": 0.0, "cache of evaluations": 0.0, "captured steps": 0.0}
        free = self._free - self.copies
        for name, rows in (("cache of evaluations", self._evaluated), ("KV cache", self.rows)):
            if rows and self._cache(rows) <= (free - self._cache(rows)) / SPARE:
                kept[name] = self._cache(rows)
                kept["captured steps"] += self._decode_step(rows)
                free -= self._cache(rows) + self._decode_step(rows)
        return kept

    def _decode_step(self, rows: int) -> float:
        """Bytes that one token more for each row takes for a moment; a captured step keeps them."""
        return self._passing_through(rows) + rows * self.shape.vocabulary * (self.item + DRAW + INSIDE_A_DRAW)

    def _passing_through(self, tokens: int) -> float:
        """Through a block of the decoder: the hidden state, what its halves read and made, before any is let go."""
        shape = self.shape
        heads = shape.queries + 2 * shape.keys
        adapters = 3 * max((one.outputs for one in shape.linears if one.name in self.targets), default=0)
        live = 2 * shape.hidden + heads + 4 * shape.intermediate + (0 if self.copies else adapters)
        return tokens * live * self.item

    def _rollout(self) -> dict[str, float]:
        gathered = {"weights": self._own_weights + self._whole}
        if self._is_outside:
            return gathered | self._engine_of_vllm
        if not self.decodes:
            return gathered | self._generated()
        kept = gathered | self._kept_by_rollout
        rows, prompts = self.rows, self._prompts_at_once
        reading = self._passing_through(prompts * self.prompt) + self._spread(prompts)
        drawing = rows * self.shape.vocabulary * (self.item + DRAW + INSIDE_A_DRAW)
        captured = self._decode_step(rows)
        return kept | {
            "KV cache": self._cache(rows),
            "captured steps": max(kept["captured steps"], captured),
            "activations": max(reading, self._dequantised, self._merging),
            "logits": max(0.0, drawing - reading),
        }

    @property
    def _merging(self) -> float:
        """The product of an adapter's two matrices, before and after it is scaled, while it goes into a copy."""
        largest = max((one.weights for one in self.shape.linears if one.name in self.targets), default=0)
        return 2 * largest * self.item if self.copies else 0

    @property
    def _prompts_at_once(self) -> int:
        fitting = max(1, PREFILL_TOKENS // self.prompt)
        return max(1, min(fitting, ceil(self.rows / self.config.rollout.group_size)))

    def _spread(self, prompts: int) -> float:
        """Keys and values of one layer, once for each row of its group."""
        rows = min(self.rows, prompts * self.config.rollout.group_size)
        return 2 * self.shape.keys * self.prompt * rows * self.item

    @property
    def _dequantised(self) -> float:
        """The largest weight as a number of its own, for the moment of its product."""
        largest = max(linear.weights for linear in self.shape.linears)
        return largest * self.item if self.config.model.quantize != "none" else 0

    def _generated(self) -> dict[str, float]:
        """By model.generate: rows as limits.rows_that_fit chooses them; caches grow by being copied, layer by layer.
        The peak is where all prompts are read at once, or at the last token."""
        shape = self.shape
        of_place = 2 * shape.layers * shape.keys * self.item
        of_row = of_place * (self.prompt + self.completion) + 12 * shape.vocabulary
        rows = max(1, min(self.rows, int(self._free / 2 / of_row)))
        work = self._padded(rows, 0)
        reading = forward_bytes(shape, work, self.item, self.targets) + self._dequantised
        logits = rows * shape.vocabulary * (self.item + 4 * FLOAT)
        first, last = of_place * rows * self.prompt, of_place * rows * (self.prompt + self.completion)
        growing = last / shape.layers
        if first + reading > last + growing + logits:
            return {"KV cache": first, "activations": reading}
        return {"KV cache": last + growing, "logits": logits}

    # score, backward, step

    @cached_property
    def work(self) -> Work:
        """The largest micro-batch: answers of full length to prompts of full length, up to the budget."""
        rollout = self.config.rollout
        most = ceil(rollout.problems / self.world_size) * rollout.group_size
        budget = self.config.optim.tokens_per_micro_batch
        if not self.is_flat:
            row = self.prompt + self.completion - 1
            return self._padded(min(most, max(1, budget // row)), self.completion)
        return Work.flat(budget, most, rollout.group_size, self.prompt, self.completion)

    def _padded(self, rows: int, completion: int) -> Work:
        keeps_scores = self.shape.capped or self.config.model.attention == "eager"
        return Work.padded(rows, self.prompt, completion, keeps_scores)

    @cached_property
    def is_flat(self) -> bool:
        attention = self.config.model.attention in ("auto", "sdpa")
        return self.config.optim.layout == "flat" and attention and not self.shape.windowed

    @property
    def _scores(self) -> bool:
        """Whether there is a pass before the update."""
        algorithm = self.config.algorithm
        return bool(algorithm.kl.coef) or algorithm.top_entropy < 1 or algorithm.minibatches > 1

    @property
    def _whole(self) -> float:
        """Bytes of the weights that split ones are gathered into while ranks do work of their own, as in a rollout."""
        return self.weights if self.splits else 0

    @property
    def _layer_by_layer(self) -> dict[str, float]:
        """The weights here, with those that are gathered while the layers that need them are computed."""
        live = int(self.engine.get("stage3_max_live_parameters", GB))
        gathered = self.item * min(self.shape.parameters, max(live, self.shape.embedding)) if self.splits else 0
        return {"weights": self._own_weights + gathered}

    def _score(self) -> dict[str, float]:
        work, shape = self.work, self.shape
        inside = forward_bytes(shape, work, self.item, self.targets) + self._dequantised
        hidden = work.edges * shape.hidden * self.item
        whole = {"weights": self._own_weights + self._whole}  # for a reference, all of them
        gathered = whole if self.config.algorithm.kl.coef else self._layer_by_layer
        return gathered | self._larger(inside, hidden, self._head(trains=False))

    def _larger(self, inside: float, kept: float, head: float) -> dict[str, float]:
        """What is kept, and the larger of two peaks: inside a layer, or at the output layer."""
        if inside > head:
            return {"activations": kept + inside}
        return {"activations": kept, "logits": head}

    def _head(self, trains: bool) -> float:
        algorithm, lora = self.config.algorithm, self.config.lora
        wants_entropy = trains and bool(algorithm.entropy_bonus)
        learns = trains and not lora.enabled
        return head_bytes(self.shape, self.work.edges, self.item, trains, learns, wants_entropy)

    def _backward(self) -> dict[str, float]:
        """The peak is at the head, when all layers have kept what they need, or in the last layer on the way back."""
        shape, work, model = self.shape, self.work, self.config.model
        saved = saved_bytes(shape, work, self.item, self._saving)
        on_the_way = layer_bytes(shape, work, self.item, self._saving) + self._dequantised
        kept = kept_bytes(shape, work, self.item)
        if not model.gradient_checkpointing:
            inside, kept = on_the_way, kept + shape.layers * saved
        else:
            inside = saved + on_the_way
            inputs = work.tokens * shape.hidden * self.item
            kept += (2 if model.activation_offload else shape.layers) * inputs
        regularised = self._regularisation
        found = self.trained * (FLOAT if regularised else self.item)
        gradients = {"gradients": found, "regularisation": regularised}
        return self._layer_by_layer | gradients | self._larger(inside, kept, self._head(trains=True))

    @cached_property
    def _saving(self) -> tuple[str, ...]:
        """Linear layers whose input the backward pass needs, because they or their adapter learn."""
        every = tuple(linear.name for linear in self.shape.linears)
        if not self.config.lora.enabled:
            return (*every, "norms")
        return every if self.config.model.quantize == "int8" else self.targets  # int8 keeps what it multiplies

    @property
    def _bucket(self) -> float:
        size = int(self.engine.get("reduce_bucket_size", min(self.trained, ds_config.LARGEST_BUCKET)))
        return size * self.item * (2 if self.engine.get("overlap_comm") else 1)

    def _step(self) -> dict[str, float]:
        """The gradients are reduced bucket by bucket, and become a part in fp32 for the optimizer."""
        gradients = self.trained * self.item
        if self.offloads:
            return {"gradients": gradients, "reduction": self._bucket}
        reduced, in_fp32 = 0 if self.splits else self.shard * self.item, self.shard * 4
        return {"gradients": gradients, "reduction": reduced + max(self._bucket, in_fp32)}

    # the machine's own memory

    def _ram(self) -> dict[str, Terms]:
        """Of all ranks on one machine."""
        ranks, processes = self.local_size, {"processes": self.local_size * PROCESS}
        loading = self.weights if self.config.model.quantize == "none" else self.shape.embedding * self.item
        phases: dict[str, dict[str, float]] = {"load": {"weights on their way": ranks * loading}, "run": {}}
        if self.offloads:
            phases["run"]["optimizer state"] = ranks * self._offloaded
        if self.streams:
            phases["run"]["weights"] = pinned(self.shape.parameters * self.item / self.world_size) * ranks
        if self._engine_of_vllm and self.config.rollout.vllm.sleep:
            phases["run"][SLEEPING] = ranks * self.shape.parameters * self.item
        if self.config.model.activation_offload and self.config.model.gradient_checkpointing:
            inputs = self.shape.layers * self.work.tokens * self.shape.hidden * self.item
            phases["run"]["activations"] = ranks * inputs
        return {name: processes | {key: round(size) for key, size in terms.items()} for name, terms in phases.items()}

    @property
    def _offloaded(self) -> float:
        """Page-locked memory comes in powers of two: the weights and their gradient in fp32, and a copy to send."""
        is_pinned = self.engine["offload_optimizer"].get("pin_memory")
        sizes = (4 * self.shard, 4 * self.shard, self.item * self.shard)
        return sum(map(pinned, sizes) if is_pinned else sizes) + ADAM[self.config.optim.name] * self.shard


def pinned(size: float) -> float:
    return 1 << (ceil(size) - 1).bit_length() if size >= 1 else 0


def _is_offloaded(settings: Mapping[str, Any], part: str) -> bool:
    return settings.get(part, {}).get("device", "none") != "none"


def longest_prompt(shape: Shape, config: Config) -> int:
    """Tokens; the context has to hold the answer, too."""
    return max(1, min(config.prompt.max_tokens, shape.context - config.rollout.max_new_tokens))


def offload_saves(shape: Shape, config: Config, world_size: int = 1) -> float:
    """Bytes of a card that optimizer offload frees."""
    return Planner(shape, config, world_size, 0).state
