"""The memory that a run needs, computed before it starts from the shape of its model and its configuration.

    load -> rollout -> score -> backward -> step

A plan lists the bytes of each phase by purpose. Tensors are counted as the code creates them, at the greatest lengths
that the settings allow, so a plan describes the worst case of a run and not its average. `bench/plan.py` measures the
same code and compares every phase with its plan. Memory that belongs to no tensor (the CUDA context, the allocator's
slack) is estimated by constants.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, prod

from trainer.config import ds_config
from trainer.config.sections.model import ENDS, OF_EXPERTS
from trainer.config.settings import Config, Teacher
from trainer.model import hub
from trainer.model.shapes import Block, Linear, Shape, adapter_shapes, planned_shape
from trainer.plan.activations import FLOAT, Work, forward_bytes, head_bytes, kept_bytes, layer_bytes, saved_bytes

GB = 10**9
CONTEXT = GB // 2  # the CUDA context of each process, with the kernels of torch and cuBLAS; not measured
AT_WORK = 2 * GB  # vLLM's activations, kernels and graphs, in addition to weights and cache; not measured
ASLEEP = GB // 2  # what vLLM keeps while it sleeps; a user of vLLM 0.13 saw 1.1 GB, the CUDA context included
SLEEPING, TAUGHT = "sleeping weights of vLLM", "teacher being loaded"  # terms of the RAM
ADAPTERS = 2  # slots in vLLM: the new adapter is loaded while the old one is still registered
SLACK = 0.05  # share of the allocated memory lost to rounding and fragmentation; not measured
PROCESS = 3 * GB // 2  # CPU memory of a rank for Python, torch and DeepSpeed
ROOMY = 0.9  # a plan below this share of the card is certain to fit
TIGHT = 1.1  # a plan above this share is certain not to fit; in between it may or may not fit

# Constants that the decoder (rollout/decoder) shares with its plan.
PREFILL_TOKENS = 4096  # in one pass, padding included: the activations of a prompt are larger than its cache
PLACES = 16  # cache lengths are multiples of this: GPU attention masks need it, and more batches can share a cache
SPARE = 4  # merged copies, and a cache, may take 1/SPARE of the free memory; the training pass needs the rest
EIGHT_BITS_MULTIPLE = 16  # 8-bit matrix products need inputs and outputs that are multiples of this
INSIDE_A_DRAW = 4  # bytes for each logit inside the sampling kernel, which sums in double precision
DRAW = 8 + INSIDE_A_DRAW  # bytes for each logit of a draw: fp32 logits divided by the temperature, and probabilities
ITEMS = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a number
# bytes of a weight: four bits, a byte for each 64 weights, and a float for each 256 of these bytes
NF4 = 1 / 2 + 1 / 64 + 4 / (64 * 256)
MOMENTS = {"adamw": 8, "adamw_8bit": 2.04, "muon": 0}  # bytes of the optimizer's state of each trained parameter

Terms = dict[str, int]
Sizes = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """The bytes of each phase by purpose: on one card, and in the RAM of the machine."""

    vram: int
    phases: dict[str, Terms]
    ram: dict[str, Terms]

    def peak_of(self, phase: str) -> int:
        """Return the bytes that the process occupies at the peak of a phase, as `nvidia-smi` shows them."""
        return sum(self.phases[phase].values())

    def allocated_of(self, phase: str) -> int:
        """Return the peak without context and slack, as `torch.cuda.max_memory_allocated` reports it."""
        return sum(size for name, size in self.phases[phase].items() if name not in ("CUDA context", "allocator slack"))

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.peak_of)

    @property
    def peak(self) -> int:
        return self.peak_of(self.peak_phase)

    @property
    def dominant(self) -> str:
        terms = self.phases[self.peak_phase]
        return max(terms, key=lambda name: terms[name])

    @property
    def ram_terms(self) -> Terms:
        """The terms of the phase that needs the most RAM."""
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


@dataclass(eq=False)
class Planner:
    """The terms of a plan, one property each. `ram` is the memory that all ranks of the machine share."""

    shape: Shape
    config: Config
    world_size: int
    vram: int
    ram: float = inf
    local_size: int | None = None  # the ranks on this machine; None if they are all

    def __post_init__(self) -> None:
        config, self.zero = self.config, ds_config.zero_settings(self.config.engine)
        self.item = ITEMS[config.model.dtype]  # bytes of a number in the model's precision
        self.stage = int(self.zero.get("stage", 0))
        self.offloads = ds_config.is_offloaded(self.zero, "optimizer")
        self.streams = self.stage == 3 and ds_config.is_offloaded(self.zero, "param")  # weights stay in CPU memory
        self.splits = self.stage == 3 and (self.streams or self.world_size > 1)
        self.completion = config.rollout.max_new_tokens
        self.prompt = max(1, min(config.prompt.max_tokens, self.shape.context - self.completion))

    @cached_property
    def plan(self) -> Plan:
        trains = self._resident | self._kept_by_rollout
        teacher = {"teacher": self._resident["teacher"]}
        phases = {"load": self._load() | teacher, "rollout": self._resident | self._rollout()}
        algorithm = self.config.algorithm
        if self.teacher:
            phases["teacher"] = trains | self.teacher.passing(())
        if self.config.shares_base:
            adapted = {part for name in self._teacher_adapter for part in name.split(".")}
            phases["teacher"] = trains | self._whole | self.passing(adapted)
        if algorithm.kl.coef or algorithm.top_entropy < 1 or algorithm.minibatches > 1:  # a pass before the update
            weights = self._whole if algorithm.kl.coef else self._layer_by_layer  # the reference needs all of them
            phases["score"] = trains | weights | self.passing(self.targets)
        phases |= {"backward": trains | self._backward(), "step": trains | self._step()}
        planned = {}
        for phase, terms in phases.items():
            sizes = {term: round(size) for term, size in terms.items() if size >= 1}
            slack = round(SLACK * sum(sizes.values()))
            planned[phase] = {**sizes, "allocator slack": slack, "CUDA context": CONTEXT}
        return Plan(self.vram, planned, self._ram())

    # resident in every phase

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Names of the layers that get an adapter."""
        lora = self.config.lora
        if not lora.enabled:
            return ()
        if lora.targets == "attention":
            return tuple(linear.name for part in self.shape.attention for linear in part)
        return self.adaptable if lora.targets == "all" else lora.named_layers

    @cached_property
    def adaptable(self) -> tuple[str, ...]:
        """Names of the linear layers that can get an adapter."""
        has_experts = any(block.experts for block in self.shape.blocks)
        names = (linear.name for linear in self.shape.linears)
        return tuple(name for name in names if not (has_experts and name in OF_EXPERTS))

    @cached_property
    def adapted(self) -> list[Linear]:
        hidden, tokens = self.shape.hidden, self.shape.vocabulary
        ends = (Linear("embed_tokens", tokens, hidden, False), Linear("lm_head", hidden, tokens, False))
        return [linear for linear in (*self.shape.linears, *ends) if linear.name in self.targets]

    @cached_property
    def trained(self) -> int:
        lora = self.config.lora
        if not lora.enabled:
            return self.shape.parameters
        sizes = {part: lora.r * (part.inputs + part.outputs) + part.outputs * lora.dora for part in self.adapted}
        of_ends = sum(size for part, size in sizes.items() if part.name in ENDS)
        blocks = [block for block in self.shape.blocks if block.queries or lora.targets != "attention"]
        return of_ends + sum(block.count * sum(sizes.get(part, 0) for part in block.linears) for block in blocks)

    @cached_property
    def weights(self) -> float:
        """Bytes of the model's weights on the card, without the adapter."""
        shape, model = self.shape, self.config.model
        embedding = head = shape.embedding * self.item
        if not shape.tied and model.quantize_head == "int8":
            head = shape.embedding + FLOAT * shape.vocabulary
        on_card = head if shape.tied or model.embeddings == "cpu" else embedding + head
        return on_card + shape.ends * self.item + shape.total(self._block)

    def _block(self, block: Block) -> float:
        """Return the bytes of a block. Only linear layers are quantised; experts are not."""
        others = block.others + block.experts * block.expert
        return sum(map(self._linear_bytes, block.linears)) + others * self.item

    @property
    def decoded(self) -> float:
        """Bytes of weights that a decode step moves: all except the embedding, of which it reads a few rows, and
        experts that get no token. Quantised weights are also written in full precision and read again."""
        model, shape = self.config.model, self.shape
        unread = 0 if shape.tied or model.embeddings == "cpu" else shape.embedding * self.item
        in_full = shape.total(lambda block: sum(linear.weights for linear in block.linears)) * self.item
        idle = shape.total(lambda block: max(0, block.experts - self.rows * block.chosen) * block.expert) * self.item
        halved = in_full + shape.embedding * self.item * (model.quantize_head == "none")
        saved = halved * (1 - 1 / self.item) if self.eight_bits else 0
        return self.weights - unread - idle - saved + (2 * in_full if model.quantize != "none" else 0)

    def _linear_bytes(self, linear: Linear) -> float:
        kind, bias = self.config.model.quantize, linear.outputs * linear.bias * self.item
        if kind == "int8":
            return linear.weights + 4 * linear.outputs + bias
        return linear.weights * (NF4 if kind == "nf4" else self.item) + bias

    @cached_property
    def shard(self) -> float:
        """The number of parameters whose optimizer state belongs to this rank."""
        return self.trained / (self.world_size if self.stage else 1)

    @cached_property
    def state(self) -> float:
        """Bytes of this rank's optimizer state, and of its gradient if the weights are split, without offload."""
        return self.shard * (4 + MOMENTS[self.config.optim.name] + (self.item if self.splits else 0))

    @cached_property
    def _resident(self) -> Sizes:
        lora, kl = self.config.lora, self.config.algorithm.kl
        snapshots = int(kl.refresh is not None or (kl.coef > 0 and not lora.enabled))  # the reference of the KL
        starts_nonzero = lora.start is not None or lora.init != "zero"
        snapshots += lora.enabled and starts_nonzero  # the initial values of PiSSA or of an adapter trained further
        longest = lora.r * max((max(linear.inputs, linear.outputs) for linear in self.adapted), default=0)
        largest = longest if lora.enabled else max(self.shape.embedding, *(one.weights for one in self.shape.linears))
        # the precision of the policy's adapter if they share a base; PEFT alone loads an adapter in fp32
        adapter_item = self.item if self.config.shares_base else FLOAT
        teacher_adapter = sum(map(prod, self._teacher_adapter.values())) * adapter_item
        return {
            # adapters are not split, because their tensors are too small
            "weights": 0 if self.streams else self.weights / (self.world_size if self.splits else 1),
            "adapter": self.trained * self.item if lora.enabled else 0,
            "optimizer state": largest * self.item if self.offloads else self.state,  # or a buffer of one tensor
            "reference": snapshots * self.trained * self.item,
            "teacher": (self.teacher.weights if self.teacher else 0) + teacher_adapter,
        }

    @property
    def _whole(self) -> Sizes:
        """The weights while all of them are gathered, as in a rollout."""
        return {"weights": self._resident["weights"] + (self.weights if self.splits else 0)}

    @property
    def _layer_by_layer(self) -> Sizes:
        """The weights during a training pass, which gathers split layers only while it computes them."""
        live = int(self.zero.get("stage3_max_live_parameters", GB))
        gathered = self.item * min(self.shape.parameters, max(live, self.shape.embedding)) if self.splits else 0
        return {"weights": self._resident["weights"] + gathered}

    @cached_property
    def _free(self) -> float:
        """Bytes that are free when the first rollout starts."""
        return self.vram - CONTEXT - (1 + SLACK) * sum((self._resident | self._whole).values())

    # a teacher

    @cached_property
    def teacher(self) -> "Planner | None":
        """The planner of a teacher that this process loads; None for a server and for an unknown shape."""
        model = self.config.teacher_model
        with hub.naming("teacher.name"):
            shape = planned_shape(model) if model else None
        if shape is None:
            return None
        config = self.config.model_copy(update={"model": model, "teacher": Teacher()})
        return Planner(shape, config, self.world_size, self.vram)

    @cached_property
    def _teacher_adapter(self) -> dict[str, list[int]]:
        """The shapes of the weights of the teacher's adapter."""
        folder = self.config.teacher.adapter
        return adapter_shapes("teacher.adapter", folder) if folder else {}

    def passing(self, targets: Collection[str]) -> Sizes:
        """Return the bytes, weights excluded, of a forward pass without gradients over the largest micro-batch."""
        inside = forward_bytes(self.shape, self.work, self.item, targets) + self._dequantised
        head = head_bytes(self.shape, self.work.edges, learns=False, wants_entropy=False)
        return _larger(inside, self.work.edges * self.shape.hidden * self.item, head)

    # load

    def _load(self) -> Sizes:
        """The engine flattens the trained parameters into one tensor, on the CPU if two of them would not fit."""
        flat = self.trained * self.item
        frozen = self.weights if self.config.lora.enabled else 0
        shard = self.shard * (self.item if self.offloads else max(4 + self.item, 8))  # in fp32, with a first gradient
        loaded = self.weights
        if self.config.model.quantize != "none":  # embedding and output layer reach the card in full precision
            loaded = (self.shape.embeddings + self.shape.ends) * self.item + self.shape.total(self._block)
        second = flat if frozen + 2 * flat <= self.vram - CONTEXT else 0
        flattening = {} if self.splits else {"flattening": max(second, shard)}  # ZeRO-3 partitions weights one by one
        return {"weights": loaded, "adapter": flat if frozen else 0, **flattening}

    # rollout

    @cached_property
    def all_rows(self) -> int:
        """The answers that this rank samples in a step."""
        rollout = self.config.rollout
        return ceil(rollout.problems / self.world_size) * rollout.group_size

    @cached_property
    def trained_rows(self) -> int:
        """The rows that this rank trains on in a step. Those of a warm-up are worked solutions with a prompt each."""
        warmup = self.config.warmup
        return ceil(warmup.problems / self.world_size) if self.config.is_warmup else self.all_rows

    @cached_property
    def rows(self) -> int:
        """The answers that are sampled at the same time."""
        return min(self.config.rollout.rows, self.all_rows)

    @cached_property
    def decodes(self) -> bool:
        """True if Octet's decoder samples, rather than model.generate, a server or vLLM in this process."""
        rollout, can_decode = self.config.rollout, self.shape.family.decodes and "embed_tokens" not in self.targets
        return can_decode and not rollout.uses_servers and rollout.engine not in ("hf", "vllm_colocate")

    @property
    def _vllm_here(self) -> Sizes:
        """vLLM in this process allocates its whole share as soon as it samples."""
        return {"vLLM": self.vllm} if self.config.rollout.engine == "vllm_colocate" else {}

    @cached_property
    def vllm(self) -> float:
        """Bytes of vLLM in this process: the share that the settings give it, or one that holds all rows."""
        share = self.config.rollout.vllm.memory
        return share * self.vram if share else self.vllm_at_least + self._cache(self.rows - 1) + AT_WORK

    @property
    def vllm_at_least(self) -> float:
        """Bytes of the unquantised base, the adapters, and the cache of one answer."""
        adapters = ADAPTERS * self.trained if self.config.lora.enabled else 0
        return (self.shape.parameters + adapters) * self.item + self._cache(1)

    @property
    def _may_copy(self) -> bool:
        return self.decodes and self.stage != 3 and self.config.model.quantize == "none" and not self.config.lora.dora

    @cached_property
    def eight_bits(self) -> float:
        """Bytes of the decoder's 8-bit weights with a scale for each output, and of the adapters that it concatenates
        where several layers share an input."""
        if not self._may_copy or self.config.rollout.weights == "same":
            return 0
        has_head = self.config.model.quantize_head == "none"
        head = (self.shape.embedding + FLOAT * self.shape.vocabulary) * has_head
        return head + self.shape.total(lambda block: sum(map(self._part_in_8_bits, block.projections)))

    def _part_in_8_bits(self, part: tuple[Linear, ...]) -> float:
        inputs, outputs = part[0].inputs, sum(linear.outputs for linear in part)
        if inputs % EIGHT_BITS_MULTIPLE or outputs % EIGHT_BITS_MULTIPLE:
            return 0
        rank = self.config.lora.r * len(part) * any(linear in self.adapted for linear in part)
        return (inputs + FLOAT) * outputs + rank * (inputs + outputs) * self.item

    @cached_property
    def copies(self) -> float:
        """Bytes of merged weights that the decoder keeps in 1/SPARE of the free memory, the smallest ones first."""
        if not self._may_copy or self.config.rollout.weights != "same":
            return 0
        parts, budget, copied = Counter[tuple[Linear, ...]](), self._free / SPARE, 0.0
        for block in self.shape.blocks:
            parts.update(dict.fromkeys(block.projections, block.count))
        parts.update((linear,) for linear in self.adapted if linear.name == "lm_head")
        adapted = {part: any(linear in self.adapted for linear in part) for part in parts}
        weights = {part: sum(linear.weights for linear in part) for part in parts}
        for part in sorted(parts, key=lambda part: (not adapted[part], weights[part])):
            if weights[part] and (adapted[part] or len(part) > 1):
                size = weights[part] * self.item
                count = min(parts[part], int((budget - copied) // size)) if budget > copied else 0
                copied += count * size
        return copied

    @cached_property
    def places(self) -> int:
        """The length of the cache: how many tokens each row can hold."""
        return ceil((self.prompt + self.completion) / PLACES) * PLACES

    def _cache(self, rows: int) -> float:
        return rows * self.row(self.places)

    def row(self, places: float) -> float:
        """Return the bytes that the layers cache for a row: keys and values of each place, and states of fixed size."""
        states = self.shape.total(lambda block: block.inputs * self.item + block.matrix * FLOAT)
        return self._of_place * places + states

    @property
    def _of_place(self) -> float:
        return 2 * self.item * self.shape.total(lambda block: block.keys * block.caches)

    @cached_property
    def _kept_by_rollout(self) -> Sizes:
        """What the sampler keeps between rollouts. The decoder keeps its copies and captured steps, and each cache that
        fits 1/SPARE of the free memory: one for training, and one for evaluations, which have their own decoder."""
        rollout = self.config.rollout
        if not self.decodes:
            return {"sleeping vLLM": ASLEEP} if self._vllm_here and rollout.vllm.sleep else self._vllm_here
        kept = {"merged copies": self.copies, "KV cache": 0.0, "cache of evaluations": 0.0, "captured steps": 0.0}
        kept |= {"weights in 8 bits": self.eight_bits}
        free, evaluated = self._free - self.copies - self.eight_bits, ceil(self.config.eval.problems / self.world_size)
        for name, rows in (("cache of evaluations", min(rollout.rows, evaluated)), ("KV cache", self.rows)):
            if rows and self._cache(rows) <= (free - self._cache(rows)) / SPARE:
                kept[name] = self._cache(rows)
                kept["captured steps"] += self._decode_step(rows)
                free -= self._cache(rows) + self._decode_step(rows)
        return kept

    def _decode_step(self, rows: int) -> float:
        """Return the temporary bytes of one more token for each row, which a captured step keeps."""
        return self._through_a_block(rows) + rows * self.shape.vocabulary * (self.item + DRAW)

    def _through_a_block(self, tokens: int) -> float:
        """Return the bytes of a pass through a block of the decoder: hidden states and the larger of its two halves."""
        shape = self.shape
        outputs = max((linear.outputs for linear in self.adapted if linear.name not in ENDS), default=0)
        adapters = 0 if self.copies or self.eight_bits else 3 * outputs
        inside = max(max(2 * (block.queries + block.keys), block.mlp, block.mixed) for block in shape.blocks)
        return tokens * (2 * shape.hidden + inside + adapters) * self.item

    def _rollout(self) -> Sizes:
        rollout, rows, shape = self.config.rollout, self.rows, self.shape
        if rollout.uses_servers or self._vllm_here:
            return self._whole | self._vllm_here
        if not self.decodes:
            return self._whole | self._generate()
        kept = self._whole | self._kept_by_rollout
        prompts = max(1, min(PREFILL_TOKENS // self.prompt, ceil(rows / rollout.group_size)))  # in one prefill pass
        keys = max(block.keys for block in shape.blocks)
        # one layer's keys and values, repeated for the rows of each group
        spread = 2 * keys * self.prompt * min(rows, prompts * rollout.group_size) * self.item
        mixing = max(block.mixing for block in shape.blocks)
        reading = prompts * self.prompt * mixing + self._through_a_block(prompts * self.prompt) + spread
        # a merge holds the adapter's product before and after it is scaled
        merging = 2 * max((linear.weights for linear in self.adapted), default=0) * self.item if self.copies else 0
        drawing = rows * shape.vocabulary * (self.item + DRAW)
        return kept | {
            "KV cache": self._cache(rows),
            "captured steps": max(kept["captured steps"], self._decode_step(rows)),
            "activations": max(reading, self._dequantised, merging),
            "logits": max(0.0, drawing - reading),
        }

    @property
    def _dequantised(self) -> float:
        """Bytes of the largest quantised weight, which a matrix product dequantises for a moment."""
        largest = max(linear.weights for linear in self.shape.linears)
        return largest * self.item if self.config.model.quantize != "none" else 0

    def _generate(self) -> Sizes:
        """Bytes of model.generate with as many rows as limits.rows_that_fit allows. The cache grows by being copied
        layer by layer, so the peak is either the prefill of all prompts or the last token."""
        shape, length = self.shape, self.prompt + self.completion
        row_bytes = self._of_place * length + 12 * shape.vocabulary
        rows = max(1, min(self.rows, int(self._free / 2 / row_bytes)))
        prefill = forward_bytes(shape, self._padded(rows, 0), self.item, self.targets) + self._dequantised
        logits = rows * shape.vocabulary * (self.item + 4 * FLOAT)
        first, last = self._of_place * rows * self.prompt, self._of_place * rows * length
        growing = last / shape.layers
        if first + prefill > last + growing + logits:
            return {"KV cache": first, "activations": prefill}
        return {"KV cache": last + growing, "logits": logits}

    # score, backward, step

    @cached_property
    def work(self) -> Work:
        """The largest micro-batch: prompts and answers of full length, as many as the token budget allows."""
        model, optim = self.config.model, self.config.optim
        budget = optim.tokens_per_micro_batch
        family = self.shape.family
        knows_layers = not family.is_eager and (family.decodes or not self.shape.windowed)
        if optim.layout == "flat" and model.attention in ("auto", "sdpa") and knows_layers:
            group = 1 if self.config.is_warmup else self.config.rollout.group_size
            return Work.flat(budget, self.trained_rows, group, self.prompt, self.completion)
        rows = min(self.trained_rows, max(1, budget // (self.prompt + self.completion - 1)))
        return self._padded(rows, self.completion)

    def _padded(self, rows: int, completion: int) -> Work:
        keeps_scores = self.shape.family.is_eager or self.config.model.attention == "eager"
        return Work.padded(rows, self.prompt, completion, keeps_scores)

    def _backward(self) -> Sizes:
        """The peak is at the output layer, when all layers have saved what they need, or in the last layer on the way
        back."""
        shape, work, config = self.shape, self.work, self.config
        saved = {block: saved_bytes(shape, block, work, self.item, self._learning) for block in shape.blocks}
        is_checkpointed = config.model.gradient_checkpointing
        layers = (layer_bytes(shape, block, work, self.item) + size * is_checkpointed for block, size in saved.items())
        inside = max(layers) + self._dequantised
        kept = kept_bytes(shape, work, self.item) + shape.total(lambda block: block.carried) * work.tokens * self.item
        if is_checkpointed:
            kept += (2 if config.model.activation_offload else shape.layers) * work.tokens * shape.hidden * self.item
        else:
            kept += shape.total(saved.__getitem__)
        entropy, regularises = bool(config.algorithm.entropy_bonus), bool(config.algorithm.gradreg.strength)
        head = head_bytes(shape, work.edges, not config.lora.enabled or "lm_head" in self.targets, entropy)
        head += 0 if config.lora.enabled else shape.embedding * self.item  # the gradient of the output layer
        gradients = {
            "gradients": self.trained * FLOAT if regularises else self._gradients,
            # in fp32: the parameters, the displaced parameters, the first gradient, and the sum of the second one
            "regularisation": 4 * FLOAT * self.trained * regularises,
        }
        needs_all = regularises or config.optim.name == "muon"  # their gradients are computed outside the engine
        return (self._whole if needs_all else self._layer_by_layer) | gradients | _larger(inside, kept, head)

    @property
    def _gradients(self) -> float:
        """Bytes of the gradients. Muon adds those of micro-batches in fp32, and two copies of a matrix."""
        copied = 0 if self.config.lora.enabled else 2 * self.shape.embedding  # the largest matrix
        return self.trained * self.item + FLOAT * (self.trained + copied) * (self.config.optim.name == "muon")

    @property
    def _learning(self) -> tuple[str, ...]:
        """Names of the layers whose input is saved for the backward pass: those that learn, or whose adapter does."""
        every = tuple(linear.name for linear in self.shape.linears)
        if not self.config.lora.enabled:
            return (*every, "norms")
        return every if self.config.model.quantize == "int8" else self.targets  # int8 layers always save their input

    def _step(self) -> Sizes:
        """Gradients are reduced bucket by bucket, and this rank's part is converted to fp32 for the optimizer."""
        size = int(self.zero.get("reduce_bucket_size", min(self.trained, ds_config.LARGEST_BUCKET)))
        bucket = size * self.item * (2 if self.zero.get("overlap_comm") else 1)
        gradients = self._gradients
        # the first updates are measured with a copy of the adapter and its difference
        is_measured = self.config.lora.enabled and not self.splits
        measured: Sizes = {"measured updates": 2 * self.trained * self.item} if is_measured else {}
        if self.offloads:
            return {"gradients": gradients, "reduction": bucket} | measured
        reduced = 0 if self.splits else self.shard * self.item
        return {"gradients": gradients, "reduction": reduced + max(bucket, self.shard * 4)} | measured

    # the RAM of the machine

    @property
    def _through_ram(self) -> float:
        """Bytes of the RAM while the model is loaded. Layers that are quantised reach the card one by one."""
        shape = self.shape
        return (shape.parameters if self.config.model.quantize == "none" else shape.embedding) * self.item

    def _ram(self) -> dict[str, Terms]:
        model, shape = self.config.model, self.shape
        phases: dict[str, Sizes] = {"load": {"weights being loaded": self._through_ram}, "run": {}}
        if self.teacher:  # which is loaded before the model
            phases["teacher"] = {TAUGHT: self.teacher._through_ram}
        if self.offloads:
            # weights and gradient in fp32, the copy sent to the card (usually all page-locked), and the moments
            sizes = (4 * self.shard, 4 * self.shard, self.item * self.shard)
            buffers = map(_page_locked, sizes) if self.zero["offload_optimizer"].get("pin_memory") else sizes
            phases["run"]["optimizer state"] = sum(buffers) + MOMENTS[self.config.optim.name] * self.shard
        if self.streams:
            phases["run"]["weights"] = _page_locked(shape.parameters * self.item / self.world_size)
        if model.embeddings == "cpu":
            phases["run"]["embedding"] = shape.embedding * self.item
        if self._vllm_here and self.config.rollout.vllm.sleep:
            phases["run"][SLEEPING] = shape.parameters * self.item
        if model.activation_offload and model.gradient_checkpointing:
            phases["run"]["activations"] = shape.layers * self.work.tokens * shape.hidden * self.item
        ranks = self.world_size if self.local_size is None else self.local_size
        return {
            phase: {"processes": ranks * PROCESS} | {name: round(ranks * size) for name, size in terms.items()}
            for phase, terms in phases.items()
        }


def _larger(inside: float, kept: float, head: float) -> Sizes:
    """Return what is kept plus the larger of two peaks: inside a layer, or at the output layer."""
    return {"activations": kept + inside} if inside > head else {"activations": kept, "logits": head}


def _page_locked(size: float) -> float:
    """Return the bytes of a page-locked block, whose size is rounded up to a power of two."""
    return 1 << (ceil(size) - 1).bit_length() if size >= 1 else 0
