"""The duration of a run, estimated before it starts, for `octet plan` and `octet slurm --time auto`.

Each piece of work takes as long as its arithmetic or its memory traffic, whichever is longer, plus a latency for each
layer, however few tokens go through it. `--like RUN` corrects the estimate by the ratio of measured to computed seconds
of an earlier run.
"""

from argparse import ArgumentParser, Namespace
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, sqrt
from pathlib import Path
from statistics import median
from typing import NamedTuple

from trainer.config.settings import Config
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.machine.console import spoken, until
from trainer.model.shapes import planned_shape, shape_of
from trainer.plan.cards import CARDS, Speed, card_of
from trainer.plan.planner import DRAW, Planner
from trainer.plan.read_data import asking_what_there_is, count_local
from trainer.problem.published import GSM8K_TRAINING_PROBLEMS
from trainer.run_folder.reader import RunFiles, read_run, seconds_of

BETWEEN = 8  # how often the input and output of a linear layer are moved, by it and around it; fitted with `CPU`
STATES = 28  # bytes moved by an optimizer step for each trained parameter: fp32 weight, moments, gradient
DECOMPOSITION = 4.5e-10  # seconds of a core for the third power of a matrix's rows, with `optim.name=muon`
PCIE = 10e9  # bytes per second between an offloaded optimizer and its card
WARM = 1  # the first steps of a measured run, which are ignored
LONG = 8.0  # hours above which a run suggests a shorter one
EVENING = 4.0  # hours of the suggested run
LARGEST_GB = 10_000  # of a card


class PassCost(NamedTuple):
    """The cost of a forward pass over all trained answers."""

    tokens: float
    layers: float  # FLOP
    head: float  # FLOP
    overhead: float  # seconds of memory traffic between the layers, and of their latency


class Ratio(NamedTuple):
    """Measured divided by computed seconds."""

    rollout: float = 1.0
    update: float = 1.0


AS_COMPUTED = Ratio()
CPU = Speed(100e9, 3e9, 3e-4)  # one core, fitted to six small models; a measured run corrects it
# The ratios of an H100 with 32 answers of a model of 1.5 B parameters: rollouts of 512 tokens, and updates on 256.
# A slower card wastes a smaller share of its time, so its ratios lie between 1 and these.
H100 = Ratio(rollout=1.4, update=3.5)


@dataclass(frozen=True)
class Duration:
    """The seconds of a run on one rank."""

    planner: Planner
    speed: Speed
    length: float  # mean number of tokens of an answer
    live: float = 1.0  # share of the groups that a step trains on
    ratio: Ratio = AS_COMPUTED
    rounds: int = 1  # how often a step samples: once, and again for each of `rollout.refills`

    def run(self, steps: int) -> float:
        """Return the seconds of all steps and evaluations, including a warm-up, which may be the whole run."""
        config = self.planner.config
        seconds = 0.0 if config.is_warmup else self._phase(steps)
        if not config.warmup.steps:
            return seconds
        warmup = replace(self.planner, config=config.warmed_up_in(None))
        return seconds + replace(self, planner=warmup, live=1.0)._phase(config.warmup.steps)

    def _phase(self, steps: int) -> float:
        """Return the seconds of the warm-up or of what follows: its steps, and its evaluations (base, trained, merged,
        and those between)."""
        settings, merged = self.planner.config.eval, self.planner.config.merges
        between = (steps - 1) // settings.every if settings.every else 0
        sampled = 2 * settings.samples + 1 if settings.samples and not self.planner.config.is_warmup else 0
        return steps * (self.rollout + self.update) + (2 + merged + between + sampled) * self.evaluation

    @cached_property
    def rollout(self) -> float:
        """Seconds of sampling in a step. A warm-up samples in rounds, whose seconds are divided by its steps."""
        planner, group, warmup = self.planner, self.planner.config.rollout.group_size, self.planner.config.warmup
        if not planner.config.is_warmup:
            return self.ratio.rollout * self.rounds * self._sampling(planner.all_rows, group)
        if warmup.source == "solutions":
            return 0.0
        asked = ceil(warmup.asked / planner.world_size) * group
        return self.ratio.rollout * self._sampling(asked, group) * warmup.rounds / warmup.steps

    @cached_property
    def evaluation(self) -> float:
        """Seconds of an evaluation, which samples one greedy answer for each held-out problem."""
        answers = ceil(self.planner.config.eval.problems / self.planner.world_size)
        return self.ratio.rollout * self._sampling(answers, 1) if answers else 0.0

    @cached_property
    def update(self) -> float:
        config, algorithm, cost = self.planner.config, self.planner.config.algorithm, self._cost
        lora, checkpointing = config.lora.enabled, config.model.gradient_checkpointing
        layers = 1 + (1 if lora else 2) + checkpointing  # forward, backward (of weights as well), and forward again
        adapters = (6 + 2 * checkpointing) * self.planner.trained * cost.tokens * lora
        trained = cost.layers * layers + cost.head * (2 if lora else 4) + adapters
        gradients = algorithm.epochs * (2 if algorithm.gradreg.strength else 1)
        moved = STATES * self.planner.shard / (PCIE if self.planner.offloads else self.speed.bandwidth)
        states = algorithm.epochs * algorithm.minibatches * (moved + self._decompositions)
        gradient = trained / self.speed.flops + cost.overhead * layers
        return self.ratio.update * (self.passes * self.of_pass + self.of_teacher + gradients * gradient + states)

    @property
    def _decompositions(self) -> float:
        """Seconds in which the CPU makes an update orthogonal. The matrices of an adapter are small."""
        if self.planner.config.optim.name != "muon" or self.planner.config.lora.enabled:
            return 0.0
        shape = self.planner.shape
        cubes = shape.total(lambda block: sum(min(part.inputs, part.outputs) ** 3 for part in block.linears))
        return DECOMPOSITION * (cubes + shape.hidden**3)

    @property
    def passes(self) -> float:
        """The number of passes over all answers before the first update; see `loss/before_update.py`."""
        algorithm, teacher = self.planner.config.algorithm, self.planner.config.teacher
        is_taught = teacher.is_there and teacher.form == "loss"
        reference = {"loss": not is_taught, "reward": 2}[algorithm.kl.where] if algorithm.kl.coef else 0
        return reference + (1 if algorithm.top_entropy < 1 else 1 - 1 / algorithm.minibatches)

    @property
    def of_teacher(self) -> float:
        """Seconds of a pass of a teacher on this device."""
        if self.planner.teacher:
            return replace(self, planner=self.planner.teacher).of_pass
        return self.of_pass if self.planner.config.shares_base else 0.0

    @property
    def of_pass(self) -> float:
        """Seconds of a forward pass over all trained answers."""
        return (self._cost.layers + self._cost.head) / self.speed.flops + self._cost.overhead

    @cached_property
    def _cost(self) -> PassCost:
        """The cost of a forward pass: 2 FLOP for each token and each weight that it uses, in a mixture those of its
        chosen experts, and 4 for each pair of tokens and dimension of a query. A prompt is computed once for its group
        if the layout is flat, else once for each answer."""
        planner, shape, prompt = self.planner, self.planner.shape, self.planner.prompt
        shares = planner.work.is_flat and not planner.config.is_warmup
        rows = self.live * planner.trained_rows
        prompts, edges = rows / (planner.config.rollout.group_size if shares else 1), rows * self.length
        tokens = edges + prompts * prompt
        pairs = prompts * prompt**2 / 2 + edges * (prompt + self.length / 2)
        layers = shape.total(lambda block: 2 * block.weights * tokens + 4 * block.queries * pairs)
        micro_batches = ceil(tokens / planner.config.optim.tokens_per_micro_batch)
        overhead = tokens * self._passed / self.speed.bandwidth + shape.layers * micro_batches * self.speed.latency
        return PassCost(tokens, layers, 2 * shape.embedding * edges, overhead)

    @property
    def _passed(self) -> float:
        """Bytes of activations that a token moves through memory in all layers."""
        widths = self.planner.shape.total(
            lambda block: sum(part.inputs + part.outputs for part in block.linears) + block.mlp * bool(block.experts)
        )
        return BETWEEN * self.planner.item * widths

    def _sampling(self, answers: int, group: int) -> float:
        """Return the seconds of one prefill of each prompt, and of a decode step for each token of each wave."""
        shape, planner, speed = self.planner.shape, self.planner, self.speed
        waves = ceil(answers / min(answers, planner.config.rollout.rows))
        steps, context = planner.completion, planner.prompt + self.length / 2
        rows = answers / waves * self.length / steps  # the mean number of unfinished rows
        prompts = answers / group
        weights, attention = shape.total(lambda block: block.weights), shape.total(lambda block: 4 * block.queries)
        reading = prompts * (2 * weights * planner.prompt + attention * planner.prompt**2 / 2)
        flops = rows * (2 * (weights + shape.embedding) + attention * context)
        cache = planner.row(context)
        drawn = shape.vocabulary * (planner.item + DRAW)
        moved = planner.decoded + rows * (cache + drawn + self._passed)
        step = max(flops / speed.flops, moved / speed.bandwidth) + shape.layers * speed.latency
        read = reading / speed.flops + prompts * planner.prompt * self._passed / speed.bandwidth
        return read + waves * steps * step


def measured(duration: Duration, records: Iterable[Mapping[str, float]]) -> Duration:
    """Return the duration of a run corrected by its own steps. Raise ConfigError if it has too few of them."""
    steps = [step for step in records if step.get("time/rollout") and step.get("time/step") and "length" in step][WARM:]
    drops = duration.planner.config.drops_dead_groups
    live = 1 - median(step.get("dead_groups", 0.0) for step in steps) if drops and steps else 1.0
    if not (steps and live):
        missing = "update (its groups were dead)" if steps else "step with a rollout"
        reason = f"that run has no {missing} to measure, the first {WARM} not counted"
        raise ConfigError("--like", reason, f"Name one that trains for {WARM + 1} steps or more, or leave --like out")
    computed = replace(duration, length=median(step["length"] for step in steps), live=live, ratio=AS_COMPUTED)
    rollout = median(step["time/rollout"] for step in steps)
    update = median(seconds_of(step) - step["time/rollout"] for step in steps)
    return replace(computed, ratio=Ratio(rollout / computed.rollout, update / computed.update))


class Estimate(NamedTuple):
    """The estimated duration of a run. Pairs are a lower and an upper bound, equal with --like except for refills."""

    steps: int | None  # None if they depend on an unknown number of problems
    hours: tuple[float, float] | None
    seconds: dict[str, tuple[float, float]]  # of a rollout, an update and an evaluation
    basis: str
    short: int = 0  # the most steps of GRPO that take `EVENING` hours with evaluations and warm-up; 0 if none do

    @property
    def about(self) -> float:
        """The geometric mean of the bounds, in hours."""
        least, most = self.hours or (0.0, 0.0)
        return sqrt(least * most)

    def __str__(self) -> str:
        if self.hours is None or self.steps is None:
            return "unknown, because the task's problems have not been counted: write run.steps"
        (least, most), steps = self.hours, f"for {self.steps:,} step{'s' * (self.steps > 1)} {self.basis}"
        if most < 1 / 60:
            return f"less than a minute {steps}"
        about, low, high = spoken(self.about, least, most)
        between = "" if least == most else f" (between {low.split()[0]} and {high.split()[0]})"
        return f"about {about}{between} {steps}"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--card", help="say how long the run takes on this card: RTX 4060, 4070 laptop, H100 ...")
    parser.add_argument("--like", type=Path, metavar="RUN", help="correct the time by the steps of an earlier run")


def estimate(options: Namespace, planner: Planner, here: str) -> Estimate | None:
    """Return the time of a run by an earlier one (--like), or on the named card or the one `here`; None if unknown."""
    if options.card is not None:
        must_know(options.card)
    planner = replace(planner, config=asking_what_there_is(planner.config))
    if not options.like:
        return on_card(options.card or here, planner)
    like = read_run(options.like)
    low = _like(like, planner, options.card)
    rounds = 1 if like.config.rollout.dead_groups == "refill" else _rounds(planner.config)
    problems = like.history.problems if planner.config.task == like.config.task else None
    basis = f"by those of {options.like} ({like.machine.get('device', 'an unknown machine')})"
    return _between(low, replace(low, rounds=rounds), _steps(planner.config, problems), basis)


def must_know(card: str) -> None:
    """Raise ConfigError for a card that is not known, or has an impossible memory."""
    known = card_of(card)
    if known and not 0 < known.memory_gb < LARGEST_GB:
        raise ConfigError(f"--card {card}", "that is not the size of a card", "Write its GB, such as RTX 3060 12GB")
    if known is None:
        reason = f"its speed is unknown (some known cards: {', '.join([*CARDS][::6])})"
        remedy = "Octet needs an NVIDIA GTX 16, RTX 20 or newer. Name a similar card, or a run with --like"
        raise ConfigError(f"--card {card or repr('')}", reason, remedy)


def on_card(name: str, planner: Planner) -> Estimate | None:
    """Return the time of a run on a card according to its published numbers; None if they are unknown."""
    if (card := card_of(name)) is None:
        return None
    low = Duration(planner, card.speed, float(planner.config.rollout.max_new_tokens))
    high = replace(low, ratio=H100, rounds=_rounds(planner.config))
    cards = f"{planner.world_size} x " if planner.world_size > 1 else ""
    return _between(low, high, _steps(planner.config, None), f"on {cards}{name}")


def _rounds(config: Config) -> int:
    """Return how often a step samples at most, since the number of refills depends on the answers."""
    refills = config.rollout.dead_groups == "refill" and not config.is_warmup
    return 1 + config.rollout.refills * refills


def _between(low: Duration, high: Duration, steps: int | None, basis: str) -> Estimate:
    seconds = {name: (getattr(low, name), getattr(high, name)) for name in ("rollout", "update", "evaluation")}
    hours = None if steps is None else (low.run(steps) / 3600, high.run(steps) / 3600)
    counts = range(1, 1 if low.planner.config.is_warmup or steps is None else steps)
    short = bisect_right(counts, EVENING * 3600, key=lambda count: sqrt(low.run(count) * high.run(count)))
    return Estimate(steps, hours, seconds, basis, short)


def at_start(config: Config, first_step: int, total_steps: int, world_size: int) -> str | None:
    """Return the line that a run prints about its duration before its first step; None on a CPU or unknown card."""
    gpus, shape = hardware.detect().gpus, planned_shape(config.model)
    if not gpus or shape is None or first_step >= total_steps:
        return None
    section = "warmup" if config.is_warmup else "run"
    left = config.changed({f"{section}.steps": total_steps - first_step})
    time = on_card(gpus[0].name, Planner(shape, left, world_size, 0))
    return time and f"{time}{until(time.about)}. {'' if first_step else shorter(time)}".removesuffix(". ")


def shorter(time: Estimate) -> str:
    """Return a suggestion that makes a long run shorter; "" for a short run."""
    return f"run.steps={time.short} would take about {EVENING:g} h" if time.about > LONG and time.short else ""


def _like(like: RunFiles, planner: Planner, card: str | None) -> Duration:
    """Return the time by an earlier run, with its length and share of live groups if task and model are the same."""
    before, config, device = like.config, planner.config, like.machine.get("device", "")
    measured_on, other = card_of(device), card_of(card or "")
    if other and not measured_on:
        reason = f"the run of --like was made on {device or 'an unknown machine'}, which predicts nothing for a card"
        raise ConfigError(f"--card {card}", reason, "Leave one of the two out")
    shape, ranks = shape_of(before.model.name, before.model.revision), int(like.machine.get("ranks", 1))
    length, speed = float(config.rollout.max_new_tokens), measured_on.speed if measured_on else CPU
    earlier = measured(Duration(Planner(shape, before, ranks, 0), speed, length), like.metrics)
    is_alike = config.task == before.task and config.model.name == before.model.name
    live = earlier.live if is_alike and config.drops_dead_groups else 1.0
    length = min(earlier.length, length) if is_alike else length
    return Duration(planner, other.speed if other else speed, length, live, earlier.ratio)


def _steps(config: Config, problems: int | None) -> int | None:
    """Return the steps of the run; None if they depend on a number of problems that is unknown here."""
    if config.is_warmup:
        return config.warmup.steps
    if config.run.steps is not None:
        return config.run.steps
    task = config.task
    if task.name == "gsm8k" and task.data_dir is None and task.path is None:
        problems = min(GSM8K_TRAINING_PROBLEMS, task.limit or GSM8K_TRAINING_PROBLEMS)
    problems = problems or count_local(config)
    return config.total_steps(problems) if problems else None
