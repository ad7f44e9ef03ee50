"""How long a run takes, worked out before it begins: the roofline of a shape and a configuration on a machine.

A piece of work takes as long as its arithmetic or its memory traffic, whichever is longer, and each layer has a latency
beside that, however few tokens go through it. Where a run has been measured on a machine, the ratios of its seconds to
those worked out for it correct what is worked out for other settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from statistics import median
from typing import NamedTuple

from trainer.errors import ConfigError
from trainer.plan.planner import DRAW, Planner

BETWEEN = 8  # times that what a linear layer reads and writes is moved, by it and around it; fitted with `CPU`
STATES = 28  # bytes that an optimizer step reads and writes for each number trained: fp32 weights, sums, gradient
PCIE = 10e9  # bytes a second between an offloaded optimizer and its card
WARM = 1  # steps of a measured run that are not counted


class Speed(NamedTuple):
    """What a processor does in a second at most."""

    flops: float  # of dense matrix products in the precision of the model
    bandwidth: float  # bytes
    latency: float  # seconds of a layer for a single token
    watts: float = 0.0  # that it draws at most


class Ratio(NamedTuple):
    """Measured over computed seconds."""

    rollout: float = 1.0
    update: float = 1.0


AS_COMPUTED = Ratio()
CPU = Speed(100e9, 3e9, 3e-4)  # of one core, fitted to six small models; a measured run corrects it
LATENCY = 1.1e-4  # of a layer on a card: an H100 decodes 256 tokens for 32 rows of 1.5 B parameters in 1.06 s
# bf16 (V100, T4, RTX 20: fp16) with sums in fp32, without sparsity; memory; power of the board. As their makers publish
# them: a GeForce card with sums in fp32 does half of what it does with sums in fp16, which is often the number quoted.
CARDS = {
    "RTX 2060": (25.8, 336, 160),
    "RTX 2070": (29.9, 448, 175),
    "RTX 3060": (25.5, 360, 170),
    "RTX 3060 Ti": (32.4, 448, 200),
    "RTX 3070": (40.6, 448, 220),
    "RTX 3080": (59.5, 760, 320),
    "RTX 3090": (71, 936, 350),
    "RTX 4060": (30.2, 272, 115),
    "RTX 4060 Ti": (44.1, 288, 160),
    "RTX 4070": (58.3, 504, 200),
    "RTX 4080": (97.5, 717, 320),
    "RTX 4090": (165.2, 1008, 450),
    "RTX 5060": (38.4, 448, 145),
    "RTX 5090": (209.5, 1792, 575),
    "T4": (65, 320, 70),
    "V100": (125, 900, 300),
    "V100 PCIe": (112, 900, 250),
    "A100": (312, 1555, 400),
    "A100 80GB PCIe": (312, 1935, 300),
    "L40S": (362, 864, 350),
    "L4": (121, 300, 72),
    "H100": (989, 3350, 700),
    "H100 PCIe": (756, 2000, 350),
    "H100 NVL": (835, 3938, 400),
    "H200": (989, 4800, 700),
    "H200 NVL": (835, 4800, 600),
}
OTHERS = {"TI", "SUPER", "LAPTOP", "MAX", "WITH", "D"}  # words in the name of another card
SLICES = 7  # of a card in MIG mode
EIGHTHS = {"1": 1, "2": 2, "3": 4, "4": 4, "7": 8}  # of its memory, by the number before the `g`
# Computed seconds times these are those that an H100 took for 32 answers of 256 to 512 tokens with 1.5 B parameters.
# A slower card loses a smaller share, so its seconds lie between the computed ones and these.
H100 = Ratio(rollout=1.4, update=7.0)


def card_speed(name: str) -> Speed | None:
    """Return the published numbers of a card from its name, as nvidia-smi or a person writes it; None if unknown."""
    words = {*re.sub("(?<=RTX)(?=[0-9])|(?<=[0-9])(?=TI)", " ", name.upper().replace("-", " ")).split()}
    part = re.search(r"\bMIG (?:(\d)C\.)?(\d)G", name.upper())  # 1c.3g.40gb computes with one of the three
    share = int(part[1] or part[2]) / SLICES if part else 1.0
    memory = EIGHTHS[part[2]] / 8 if part else 1.0
    for known in sorted(CARDS, key=lambda one: -len(one.split())):
        own, (teraflops, gigabytes, watts) = {*known.upper().split()}, CARDS[known]
        if own <= words and not (words - own) & OTHERS:
            return Speed(share * teraflops * 1e12, memory * gigabytes * 1e9, LATENCY, share * watts)
    return None


@dataclass(frozen=True)
class Duration:
    """The seconds of a run on one rank. Answers have `length` tokens in the mean, and a share of the groups is live.
    A step samples in so many `rounds`, the first and those of `rollout.refills`."""

    planner: Planner
    speed: Speed
    length: float
    live: float = 1.0
    ratio: Ratio = AS_COMPUTED
    rounds: int = 1

    @property
    def step(self) -> float:
        return self.rollout + self.update

    def run(self, steps: int) -> float:
        """Return the seconds of all steps and evaluations, with those of a warm-up, which may be all of the run."""
        config = self.planner.config
        own = 0.0 if config.is_warmup else self._own(steps)
        if not config.warmup.steps:
            return own
        warmup = replace(self.planner, config=config.warmed_up_in(None))
        return own + replace(self, planner=warmup, live=1.0)._own(config.warmup.steps)

    def _own(self, steps: int) -> float:
        """Return the seconds of steps and evaluations: of the base, of the trained model, and those between."""
        every = self.planner.config.eval.every
        return steps * self.step + (2 + ((steps - 1) // every if every else 0)) * self.evaluation

    @cached_property
    def rollout(self) -> float:
        """Seconds of sampling in a step; in a warm-up those of its rounds, shared by its steps."""
        planner, group, warmup = self.planner, self.planner.config.rollout.group_size, self.planner.config.warmup
        if not planner.config.is_warmup:
            return self.ratio.rollout * self.rounds * self._sampling(planner.all_rows, group)
        if warmup.source == "solutions":
            return 0.0
        asked = ceil(warmup.asked / planner.world_size) * group
        return self.ratio.rollout * self._sampling(asked, group) * warmup.rounds / warmup.steps

    @cached_property
    def evaluation(self) -> float:
        """Seconds of an evaluation: one greedy answer to each held-out problem."""
        answers = ceil(self.planner.config.eval.problems / self.planner.world_size)
        return self.ratio.rollout * self._sampling(answers, 1) if answers else 0.0

    @property
    def update(self) -> float:
        config, algorithm = self.planner.config, self.planner.config.algorithm
        lora, checkpointing = config.lora.enabled, config.model.gradient_checkpointing
        layers = (1 if lora else 2) + checkpointing  # beside the first pass, with base or without
        adapters = (6 + 2 * checkpointing) * self.planner.trained * self._tokens * lora
        trained = self._forward * (1 + layers) + self._head * (2 if lora else 4) + adapters
        gradients = algorithm.epochs * (2 if algorithm.gradreg.strength else 1)
        moved = STATES * self.planner.shard / (PCIE if self.planner.offloads else self.speed.bandwidth)
        states = algorithm.epochs * algorithm.minibatches * moved
        gradient = trained / self.speed.flops + self._beside * (1 + layers)
        return self.ratio.update * (self._scored * self._pass + self._teacher + gradients * gradient + states)

    @property
    def _scored(self) -> float:
        """Return how many passes over all answers are made before the first update; see `loss/before_update.py`."""
        algorithm, teacher = self.planner.config.algorithm, self.planner.config.teacher
        is_taught = teacher.is_there and teacher.form == "loss"
        reference = {"loss": not is_taught, "reward": 2}[algorithm.kl.where] if algorithm.kl.coef else 0
        return reference + (1 if algorithm.top_entropy < 1 else 1 - 1 / algorithm.minibatches)

    @property
    def _teacher(self) -> float:
        """Return the seconds of the pass of a teacher on this device."""
        if self.planner.teacher:
            return replace(self, planner=self.planner.teacher)._pass
        return self._pass if self.planner.config.shares_base else 0.0

    @property
    def _pass(self) -> float:
        return (self._forward + self._head) / self.speed.flops + self._beside

    @property
    def _head(self) -> float:
        return 2 * self.planner.shape.embedding * self._edges

    @property
    def _beside(self) -> float:
        """Seconds beside the arithmetic of a pass: what moves between the layers, and their latency."""
        passes = self.planner.shape.layers * ceil(self._tokens / self.planner.config.optim.tokens_per_micro_batch)
        return self._tokens * self._passed / self.speed.bandwidth + passes * self.speed.latency

    @property
    def _edges(self) -> float:
        """Tokens of answers that are trained on."""
        return self.live * self.planner.trained_rows * self.length

    @property
    def _prompts(self) -> float:
        """Prompts that are read in an update: one of each group, unless every answer has its own."""
        group = self.planner.config.rollout.group_size if self.planner.work.is_flat else 1
        return self.live * self.planner.trained_rows / (1 if self.planner.config.is_warmup else group)

    @property
    def _tokens(self) -> float:
        return self._edges + self._prompts * self.planner.prompt

    @property
    def _forward(self) -> float:
        """FLOP of a pass through the layers: 2 for each weight and token, 4 for each pair and number of a query."""
        shape, prompt = self.planner.shape, self.planner.prompt
        pairs = self._prompts * prompt**2 / 2 + self._edges * (prompt + self.length / 2)
        return 2 * self._weights * self._tokens + 4 * shape.layers * shape.queries * pairs

    @property
    def _weights(self) -> int:
        shape = self.planner.shape
        return shape.layers * sum(linear.weights for linear in shape.linears)

    @property
    def _passed(self) -> float:
        """Bytes of a token between the parts of the layers: what linear layers read and write, and others again."""
        shape = self.planner.shape
        return BETWEEN * self.planner.item * shape.layers * sum(one.inputs + one.outputs for one in shape.linears)

    def _sampling(self, answers: int, group: int) -> float:
        """Return the seconds of reading the prompts once, and of a decode step for each token of each wave of rows."""
        shape, planner, speed = self.planner.shape, self.planner, self.speed
        waves = ceil(answers / min(answers, planner.config.rollout.rows))
        steps, context = planner.completion, planner.prompt + self.length / 2
        rows = answers / waves * self.length / steps  # that are not finished
        prompts = answers / group
        attention = 4 * shape.layers * shape.queries
        reading = prompts * (2 * self._weights * planner.prompt + attention * planner.prompt**2 / 2)
        flops = rows * (2 * (self._weights + shape.embedding) + attention * context)
        cache = 2 * shape.layers * shape.keys * planner.item * context
        drawn = shape.vocabulary * (planner.item + DRAW)
        moved = planner.decoded + rows * (cache + drawn + self._passed)
        step = max(flops / speed.flops, moved / speed.bandwidth) + shape.layers * speed.latency
        read = reading / speed.flops + prompts * planner.prompt * self._passed / speed.bandwidth
        return read + waves * steps * step


def measured(duration: Duration, records: Iterable[Mapping[str, float]]) -> Duration:
    """Return the duration of a run corrected by its own steps, with the length and the live groups that they had.

    Raise ConfigError if it has too few of them."""
    steps = [one for one in records if one.get("time/rollout") and one.get("time/step") and "length" in one][WARM:]
    if not steps:
        raise ConfigError(
            "--like",
            f"that run has no step with a rollout to measure, the first {WARM} not counted",
            f"Name one that has made {WARM + 1} or more, or leave --like out",
        )
    drops = duration.planner.config.drops_dead_groups
    live = 1 - median(one.get("dead_groups", 0.0) for one in steps) if drops else 1.0
    own = replace(duration, length=median(one["length"] for one in steps), live=live, ratio=AS_COMPUTED)
    rollout = median(one["time/rollout"] for one in steps)
    update = median(_beside_sampling(one) for one in steps)
    return replace(own, ratio=Ratio(rollout / own.rollout, update / own.update))


def watts(records: Iterable[Mapping[str, float]]) -> float | None:
    """Return what a card drew in the phases of a run whose energy it counted; None if it counted none."""
    joules, seconds = 0.0, 0.0
    for record in records:
        for key, value in record.items():
            if key.startswith("energy/"):
                joules += value
                seconds += record[f"time/{key.removeprefix('energy/')}"]
    return joules / seconds if joules else None


def _beside_sampling(record: Mapping[str, float]) -> float:
    """Return the seconds of a step without its rollout."""
    left_out = ("time/rollout", "time/evaluation")
    phases = (key for key in record if key.startswith("time/") and key.count("/") == 1 and key not in left_out)
    return sum(record[key] for key in phases)
