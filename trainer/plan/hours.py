"""How long a run takes, worked out before it begins, for `octet plan` and `octet slurm --time auto`.

A piece of work takes as long as its arithmetic or its memory traffic, whichever is longer, and each layer has a latency
beside that, however few tokens go through it. `--like RUN` corrects this by the ratios of measured to computed seconds
in an earlier run.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from trainer.config.settings import Config
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.model.shapes import shape_of
from trainer.plan.planner import DRAW, Planner
from trainer.problem.published import GSM8K_TRAINING_PROBLEMS
from trainer.run_folder.reader import RunFiles, read_run

BETWEEN = 8  # times that what a linear layer reads and writes is moved, by it and around it; fitted with `CPU`
STATES = 28  # bytes that an optimizer step reads and writes for each number trained: fp32 weights, sums, gradient
PCIE = 10e9  # bytes a second between an offloaded optimizer and its card
WARM = 1  # steps of a measured run that are not counted
SAFE = 1.5  # times the longer time, for the limit of a job


class Speed(NamedTuple):
    """What a processor does in a second at most."""

    flops: float  # of dense matrix products in the precision of the model
    bandwidth: float  # bytes
    latency: float  # seconds of a layer for a single token
    watts: float = 0.0  # that it draws at most


class Line(NamedTuple):
    """What a pass over all trained answers takes."""

    tokens: float
    layers: float  # FLOP
    head: float  # FLOP
    beside: float  # seconds of what moves between the layers, and of their latency


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
    """The seconds of a run on one rank. Answers have `length` tokens on average, and a share of the groups is live.
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

    @cached_property
    def update(self) -> float:
        config, algorithm, line = self.planner.config, self.planner.config.algorithm, self._line
        lora, checkpointing = config.lora.enabled, config.model.gradient_checkpointing
        layers = (1 if lora else 2) + checkpointing  # beside the first pass, with base or without
        adapters = (6 + 2 * checkpointing) * self.planner.trained * line.tokens * lora
        trained = line.layers * (1 + layers) + line.head * (2 if lora else 4) + adapters
        gradients = algorithm.epochs * (2 if algorithm.gradreg.strength else 1)
        moved = STATES * self.planner.shard / (PCIE if self.planner.offloads else self.speed.bandwidth)
        states = algorithm.epochs * algorithm.minibatches * moved
        gradient = trained / self.speed.flops + line.beside * (1 + layers)
        return self.ratio.update * (self.passes * self.of_pass + self.of_teacher + gradients * gradient + states)

    @property
    def passes(self) -> float:
        """How many passes over all answers are made before the first update; see `loss/before_update.py`."""
        algorithm, teacher = self.planner.config.algorithm, self.planner.config.teacher
        is_taught = teacher.is_there and teacher.form == "loss"
        reference = {"loss": not is_taught, "reward": 2}[algorithm.kl.where] if algorithm.kl.coef else 0
        return reference + (1 if algorithm.top_entropy < 1 else 1 - 1 / algorithm.minibatches)

    @property
    def of_teacher(self) -> float:
        """Seconds of the pass of a teacher on this device."""
        if self.planner.teacher:
            return replace(self, planner=self.planner.teacher).of_pass
        return self.of_pass if self.planner.config.shares_base else 0.0

    @property
    def of_pass(self) -> float:
        return (self._line.layers + self._line.head) / self.speed.flops + self._line.beside

    @cached_property
    def _line(self) -> Line:
        """What a pass over the trained answers takes: 2 FLOP for each weight and token, 4 for each pair of tokens and
        number of a query. One prompt is read for each group, unless every answer has its own."""
        planner, shape, prompt = self.planner, self.planner.shape, self.planner.prompt
        shares = planner.work.is_flat and not planner.config.is_warmup
        rows = self.live * planner.trained_rows
        prompts, edges = rows / (planner.config.rollout.group_size if shares else 1), rows * self.length
        tokens = edges + prompts * prompt
        pairs = prompts * prompt**2 / 2 + edges * (prompt + self.length / 2)
        layers = 2 * self._weights * tokens + 4 * shape.layers * shape.queries * pairs
        micro_batches = ceil(tokens / planner.config.optim.tokens_per_micro_batch)
        beside = tokens * self._passed / self.speed.bandwidth + shape.layers * micro_batches * self.speed.latency
        return Line(tokens, layers, 2 * shape.embedding * edges, beside)

    @property
    def _weights(self) -> int:
        return self.planner.shape.layers * sum(linear.weights for linear in self.planner.shape.linears)

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
        reason = f"that run has no step with a rollout to measure, the first {WARM} not counted"
        remedy = f"Name one that has made {WARM + 1} or more, or leave --like out"
        raise ConfigError("--like", reason, remedy)
    drops = duration.planner.config.drops_dead_groups
    live = 1 - median(one.get("dead_groups", 0.0) for one in steps) if drops else 1.0
    own = replace(duration, length=median(one["length"] for one in steps), live=live, ratio=AS_COMPUTED)
    rollout = median(one["time/rollout"] for one in steps)
    others = ("time/rollout", "time/evaluation")  # phases whose seconds are no update; a key with two slashes is a part
    update = median(
        sum(one[key] for key in one if key.startswith("time/") and key.count("/") == 1 and key not in others)
        for one in steps
    )
    return replace(own, ratio=Ratio(rollout / own.rollout, update / own.update))


class Estimate(NamedTuple):
    """What a run takes. Pairs are the low and the high end, which are equal where an earlier run corrects them."""

    steps: int | None  # None if they follow from problems that nobody has counted
    hours: tuple[float, float] | None
    seconds: dict[str, tuple[float, float]]  # of a rollout, an update and an evaluation
    basis: str
    kwh: float | None  # if all cards draw their most for the longer time
    price: tuple[float, float] | None


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--card", help="say how long the run takes on this card: RTX 4060, H100 ...")
    parser.add_argument("--like", type=Path, metavar="RUN", help="correct the time by the steps of an earlier run")
    parser.add_argument("--length", type=float, metavar="N", help="average number of tokens of an answer")


def estimate(options: Namespace, planner: Planner, machine: hardware.Hardware | None) -> Estimate | None:
    """Return the time of a run on the named card, on the device of the earlier run, or on this machine; None if its
    speed is not known."""
    for name in ("length", "price"):
        value = getattr(options, name, None)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"--{name} {value:g}", "it must be a number above 0")
    if options.card is not None and card_speed(options.card) is None:
        reason, remedy = f"its speed is not known. Known are {', '.join(CARDS)}", "Or name a run with --like"
        raise ConfigError(f"--card {options.card or repr('')}", reason, remedy)
    config, like = planner.config, read_run(options.like) if options.like else None
    card = options.card or (machine.gpus[0].name if machine and machine.gpus else "")
    speed, rounds, length = card_speed(card), 1, min(options.length or inf, float(config.rollout.max_new_tokens))
    if config.rollout.dead_groups == "refill" and not config.is_warmup:
        rounds += config.rollout.refills  # at most: nobody knows before the answers are there
    if like:
        low, basis = _like(like, planner, options, length), f"by the steps of {options.like}"
        high = low if like.config.rollout.dead_groups == "refill" else replace(low, rounds=rounds)
    elif speed:
        low, basis = Duration(planner, speed, length), f"by the published numbers of {card}"
        high = replace(low, ratio=H100, rounds=rounds)
    else:
        return None
    return _between(low, high, _steps(config, like), basis, getattr(options, "price", None))


def _between(low: Duration, high: Duration, steps: int | None, basis: str, price: float | None) -> Estimate:
    cards, parts = high.planner.world_size, ("rollout", "update", "evaluation")
    seconds = {name: (getattr(low, name), getattr(high, name)) for name in parts}
    if steps is None:
        return Estimate(None, None, seconds, basis, None, None)
    first, last = low.run(steps) / 3600, high.run(steps) / 3600
    kwh = last * high.speed.watts * cards / 1000
    cost = None if price is None else (first * cards * price, last * cards * price)
    return Estimate(steps, (first, last), seconds, basis, kwh or None, cost)


def _like(like: RunFiles, planner: Planner, options: Namespace, length: float) -> Duration:
    """Return the time that follows from an earlier run, with its length and its share of live groups if the task and
    the model are the same."""
    own, config, device = like.config, planner.config, like.machine.get("device", "")
    if options.card and not card_speed(device):
        reason = f"the run of --like was made on {device or 'an unknown machine'}, which says nothing of a card"
        remedy = "Leave one of the two out"
        raise ConfigError(f"--card {options.card}", reason, remedy)
    its_planner = Planner(shape_of(own.model.name, own.model.revision), own, int(like.machine.get("ranks", 1)), 0)
    earlier = measured(Duration(its_planner, card_speed(device) or CPU, length), like.metrics)
    is_alike = config.task == own.task and config.model.name == own.model.name
    if is_alike and not options.length:
        length = min(earlier.length, length)
    live = earlier.live if is_alike and config.drops_dead_groups else 1.0
    return Duration(planner, card_speed(options.card or "") or earlier.speed, length, live, earlier.ratio)


def _steps(config: Config, like: RunFiles | None) -> int | None:
    """Return the steps of the run; None if they follow from the number of problems, and that is not known here."""
    task = config.task
    if config.is_warmup:
        return config.warmup.steps
    if config.run.steps is not None:
        return config.run.steps
    if like and task == like.config.task and like.history.problems:
        return config.total_steps(like.history.problems)
    is_published = task.name == "gsm8k" and task.data_dir is None and task.path is None and task.limit is None
    return config.total_steps(GSM8K_TRAINING_PROBLEMS) if is_published else None


def lines(found: Estimate | None) -> Iterator[str]:
    """Yield the time, the energy and the price of a run for people."""
    if found is None:
        yield "time: not known for this machine; name a --card, or an earlier run with --like"
    elif found.hours is None:
        yield "time: the steps follow from the number of problems, which is not known: write run.steps"
    else:
        spans = [f"{hour:.1f} h" if hour >= 2 else f"{hour * 60:.1f} min" for hour in found.hours]
        yield f"time: {_span(*spans)} for {found.steps} steps, {found.basis}"
        if found.kwh is not None:
            yield f"energy: at most {found.kwh:.2g} kWh"
        if found.price is not None:
            yield f"price: {_span(*(f'{amount:.2f}' for amount in found.price))}"


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def limit_of_a_job(found: Estimate | None, jobs: int) -> str:
    """Return `SAFE` times the longer time, shared by the jobs of a chain, as sbatch reads it: in whole quarters of an
    hour."""
    if found is None or found.hours is None:
        missing = "the speed of the cards" if found is None else "the number of steps"
        remedy = "--card H100 or --like RUN" if found is None else "run.steps=N"
        raise ConfigError("--time auto", f"{missing} is not known", f"Write {remedy} as well, or --time HH:MM:SS")
    quarters = max(1, ceil(SAFE * found.hours[1] / jobs * 4))
    return f"{quarters // 4:02d}:{quarters % 4 * 15:02d}:00"
