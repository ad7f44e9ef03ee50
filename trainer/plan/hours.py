"""How long a run takes, worked out before it begins, for `octet plan` and `octet slurm --time auto`.

A piece of work takes as long as its arithmetic or its memory traffic, whichever is longer, and each layer has a latency
beside that, however few tokens go through it. `--like RUN` corrects this by the ratios of measured to computed seconds
in an earlier run.
"""

from argparse import ArgumentParser, Namespace
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
from trainer.model.shapes import shape_of
from trainer.plan.cards import CARDS, Speed, card_of
from trainer.plan.planner import DRAW, Planner
from trainer.plan.read_data import asking_what_there_is, count_local
from trainer.plan.search import planned_shape
from trainer.problem.published import GSM8K_TRAINING_PROBLEMS
from trainer.run_folder.reader import RunFiles, read_run

BETWEEN = 8  # times that what a linear layer reads and writes is moved, by it and around it; fitted with `CPU`
STATES = 28  # bytes that an optimizer step reads and writes for each number trained: fp32 weights, sums, gradient
PCIE = 10e9  # bytes a second between an offloaded optimizer and its card
WARM = 1  # steps of a measured run that are not counted
SAFE = 1.5  # times the longer time, for the limit of a job
LONG = 8.0  # hours from which on a run says what would be shorter
EVENING = 4.0  # hours of that


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
# Computed seconds times these are those that an H100 took for 32 answers with 1.5 B parameters: rollouts of 512 tokens,
# and updates on 256. A slower card loses a smaller share, so its seconds lie between the computed ones and these.
H100 = Ratio(rollout=1.4, update=3.5)


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
        """Return the seconds of steps and evaluations: of base, trained and merged model, and those between."""
        settings, merged = self.planner.config.eval, self.planner.config.merges
        between = (steps - 1) // settings.every if settings.every else 0
        sampled = 2 * settings.samples + 1 if settings.samples and not self.planner.config.is_warmup else 0
        return steps * self.step + (2 + merged + between + sampled) * self.evaluation

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
        layers = 2 * self._weights * tokens + 4 * self._queries * pairs
        micro_batches = ceil(tokens / planner.config.optim.tokens_per_micro_batch)
        beside = tokens * self._passed / self.speed.bandwidth + shape.layers * micro_batches * self.speed.latency
        return Line(tokens, layers, 2 * shape.embedding * edges, beside)

    @property
    def _weights(self) -> float:
        """Numbers of the layers that a token is multiplied with: those of few experts in a mixture."""
        return self.planner.shape.total(lambda block: block.weights)

    @property
    def _queries(self) -> float:
        return self.planner.shape.total(lambda block: block.queries)

    @property
    def _passed(self) -> float:
        """Bytes of a token between the parts of the layers: what linear layers read and write, and others again."""
        sides = self.planner.shape.total(
            lambda block: sum(one.inputs + one.outputs for one in block.linears) + (block.mlp if block.experts else 0)
        )
        return BETWEEN * self.planner.item * sides

    def _sampling(self, answers: int, group: int) -> float:
        """Return the seconds of reading the prompts once, and of a decode step for each token of each wave of rows."""
        shape, planner, speed = self.planner.shape, self.planner, self.speed
        waves = ceil(answers / min(answers, planner.config.rollout.rows))
        steps, context = planner.completion, planner.prompt + self.length / 2
        rows = answers / waves * self.length / steps  # that are not finished
        prompts = answers / group
        attention = 4 * self._queries
        reading = prompts * (2 * self._weights * planner.prompt + attention * planner.prompt**2 / 2)
        flops = rows * (2 * (self._weights + shape.embedding) + attention * context)
        cache = planner.row(context)
        drawn = shape.vocabulary * (planner.item + DRAW)
        moved = planner.decoded + rows * (cache + drawn + self._passed)
        step = max(flops / speed.flops, moved / speed.bandwidth) + shape.layers * speed.latency
        read = reading / speed.flops + prompts * planner.prompt * self._passed / speed.bandwidth
        return read + waves * steps * step


def measured(duration: Duration, records: Iterable[Mapping[str, float]]) -> Duration:
    """Return the duration of a run corrected by its own steps. Raise ConfigError if it has too few of them."""
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

    @property
    def about(self) -> float:
        """Hours in the middle of what is possible: as many times more than the least as the most is more than them."""
        least, most = self.hours or (0.0, 0.0)
        return sqrt(least * most)

    def __str__(self) -> str:
        if self.hours is None or self.steps is None:
            return "not known, because nobody has counted the problems of the task: write run.steps"
        least, most = self.hours
        if most < 1 / 60:
            return f"less than a minute for {self.steps:,} steps {self.basis}"
        about, low, high = spoken(self.about, least, most)
        between = "" if least == most else f" (between {low.split()[0]} and {high.split()[0]})"
        return f"about {about}{between} for {self.steps:,} steps {self.basis}"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--card", help="say how long the run takes on this card: RTX 4060, 4070 laptop, H100 ...")
    parser.add_argument("--like", type=Path, metavar="RUN", help="correct the time by the steps of an earlier run")


def estimate(options: Namespace, planner: Planner, here: str) -> Estimate | None:
    """Return the time of a run on the named card or the one `here`, or by an earlier run; None if unknown."""
    if options.card is not None:
        must_know(options.card)
    planner = replace(planner, config=asking_what_there_is(planner.config))
    if not options.like:
        return on_card(options.card or here, planner)
    like = read_run(options.like)
    low = _like(like, planner, options.card)
    rounds = 1 if like.config.rollout.dead_groups == "refill" else _rounds(planner.config)
    problems = like.history.problems if planner.config.task == like.config.task else None
    return _between(low, replace(low, rounds=rounds), _steps(planner.config, problems), f"by those of {options.like}")


def must_know(card: str) -> None:
    """Raise ConfigError for a card that is neither known nor beside a known one."""
    if card_of(card) is None:
        known = ", ".join([*CARDS][::6])
        reason, remedy = f"its speed is not known, as that of {known} is", "Name a card near it, or a run with --like"
        raise ConfigError(f"--card {card or repr('')}", reason, remedy)


def on_card(name: str, planner: Planner, problems: int | None = None) -> Estimate | None:
    """Return the time of a run on a card by its published numbers; None if they are not known."""
    if (card := card_of(name)) is None:
        return None
    low = Duration(planner, card.speed, float(planner.config.rollout.max_new_tokens))
    guess = f", taken for {card.neighbour}" if card.neighbour else ""
    high = replace(low, ratio=H100, rounds=_rounds(planner.config))
    cards = f"{planner.world_size} x " if planner.world_size > 1 else ""
    return _between(low, high, _steps(planner.config, problems), f"on {cards}{name}{guess}")


def _rounds(config: Config) -> int:
    """Return how often a step samples at most: nobody knows before the answers are there."""
    refills = config.rollout.dead_groups == "refill" and not config.is_warmup
    return 1 + config.rollout.refills * refills


def _between(low: Duration, high: Duration, steps: int | None, basis: str) -> Estimate:
    seconds = {name: (getattr(low, name), getattr(high, name)) for name in ("rollout", "update", "evaluation")}
    hours = None if steps is None else (low.run(steps) / 3600, high.run(steps) / 3600)
    return Estimate(steps, hours, seconds, basis)


def at_start(config: Config, first_step: int, total_steps: int, world_size: int) -> str | None:
    """Return what a run says of its time before its first step; None on a CPU and on a card that is not known."""
    gpus, shape = hardware.detect().gpus, planned_shape(config.model)
    if not gpus or shape is None or first_step >= total_steps:
        return None
    left = config.model_copy(update={"run": config.run.model_copy(update={"steps": total_steps - first_step})})
    found = on_card(gpus[0].name, Planner(shape, left, world_size, 0))
    return found and f"{found}{until(found.about)}. {shorter(found)}".removesuffix(". ")


def shorter(found: Estimate) -> str:
    """Return what would be shorter than a long run."""
    if found.about <= LONG or not found.steps:
        return ""
    return f"run.steps={max(1, int(found.steps * EVENING / found.about))} would take about {EVENING:g} h"


def _like(like: RunFiles, planner: Planner, card: str | None) -> Duration:
    """Return the time by an earlier run, with its length and share of live groups if task and model are the same."""
    own, config, device = like.config, planner.config, like.machine.get("device", "")
    its_card, other = card_of(device), card_of(card or "")
    if other and not its_card:
        reason = f"the run of --like was made on {device or 'an unknown machine'}, which says nothing of a card"
        remedy = "Leave one of the two out"
        raise ConfigError(f"--card {card}", reason, remedy)
    its_planner = Planner(shape_of(own.model.name, own.model.revision), own, int(like.machine.get("ranks", 1)), 0)
    length, speed = float(config.rollout.max_new_tokens), its_card.speed if its_card else CPU
    earlier = measured(Duration(its_planner, speed, length), like.metrics)
    is_alike = config.task == own.task and config.model.name == own.model.name
    live = earlier.live if is_alike and config.drops_dead_groups else 1.0
    length = min(earlier.length, length) if is_alike else length
    return Duration(planner, other.speed if other else speed, length, live, earlier.ratio)


def _steps(config: Config, problems: int | None) -> int | None:
    """Return the steps of the run; None if they follow from the number of problems, and that is not known here."""
    if config.is_warmup:
        return config.warmup.steps
    if config.run.steps is not None:
        return config.run.steps
    task = config.task
    if task.name == "gsm8k" and task.data_dir is None and task.path is None:
        problems = min(GSM8K_TRAINING_PROBLEMS, task.limit or GSM8K_TRAINING_PROBLEMS)
    problems = problems or count_local(config)
    return config.total_steps(problems) if problems else None


def limit_of_a_job(found: Estimate | None, jobs: int) -> str:
    """Return `SAFE` times the longer time, shared by the jobs of a chain, in quarters of an hour for sbatch."""
    if found is None or found.hours is None:
        missing = "the speed of the cards" if found is None else "the number of steps"
        remedy = "--card H100 or --like RUN" if found is None else "run.steps=N"
        raise ConfigError("--time auto", f"{missing} is not known", f"Write {remedy} as well, or --time HH:MM:SS")
    quarters = max(1, ceil(SAFE * found.hours[1] / jobs * 4))
    return f"{quarters // 4:02d}:{quarters % 4 * 15:02d}:00"
