"""What a run will take: its hours, energy and price, for `octet plan` and for `octet slurm --time auto`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from trainer.config.settings import Config
from trainer.errors import ConfigError, counted
from trainer.machine import hardware
from trainer.model.shapes import shape_of
from trainer.plan.duration import CARDS, CPU, H100, Duration, Speed, card_speed, measured, watts
from trainer.plan.planner import Planner
from trainer.problem.published import GSM8K_TRAINING_PROBLEMS
from trainer.run_folder.reader import RunFiles, read_run

KNOWN = ", ".join(CARDS)
PARTS = ("rollout", "update", "evaluation")
SAFE, QUARTER_S = 1.5, 900  # a job has half as much time again, in quarters of an hour


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--card", help="say how long the run takes on this card: RTX 4060, H100 ...")
    parser.add_argument("--like", type=Path, metavar="RUN", help="correct the time by the steps of an earlier run")
    parser.add_argument("--length", type=float, metavar="N", help="tokens of an answer, as they are in the mean")


@dataclass(frozen=True)
class Outlook:
    """The seconds of a run: between `least` and `most`, which are the same where an earlier run corrects them."""

    least: Duration
    most: Duration
    steps: int | None  # None if they follow from problems that nobody has counted
    basis: str
    watts: float  # that a card draws at most, or drew in the earlier run; 0 if unknown
    is_measured: bool  # the watts are those of the earlier run

    @property
    def ranks(self) -> int:
        return self.most.planner.world_size

    @property
    def seconds(self) -> tuple[float, float] | None:
        return None if self.steps is None else (self.least.run(self.steps), self.most.run(self.steps))

    @property
    def kwh(self) -> float | None:
        """The energy of all cards for the longest time: an upper bound if they are at their limit."""
        return self.seconds[1] / 3.6e6 * self.watts * self.ranks if self.seconds and self.watts else None


def outlook(options: Namespace, planner: Planner, machine: hardware.Hardware | None) -> Outlook | None:
    """Return the time of a run on the named card, on the machine of the earlier run, or on this one, whichever is known
    first; None if none is."""
    _check(options)
    like = read_run(options.like) if options.like else None
    here = machine.gpus[0].name if machine and machine.gpus else ""
    drawn = None
    if like:
        device = like.machine.get("device", "")
        on = options.card or device
        least, basis = _followed(options, planner, like)
        refills = 0 if like.config.rollout.dead_groups == "refill" else _refills(planner.config)
        most = replace(least, rounds=1 + refills)
        if not options.card or least.speed == card_speed(device):
            drawn = watts(like.metrics)
    else:
        on = options.card or here
        speed = _named(on) if options.card else card_speed(on)
        if speed is None:
            return None
        longest = float(planner.config.rollout.max_new_tokens)
        least = Duration(planner, speed, min(longest, options.length or longest))
        most = replace(least, ratio=H100, rounds=1 + _refills(planner.config))
        basis = (
            f"computed from the published numbers of {on}: the first at these, the second with the losses of an H100"
        )
    limit = hardware.power_limit() if here and here == on and " MIG " not in here else 0.0
    known = drawn or limit or least.speed.watts
    return Outlook(least, most, _steps(planner.config, like), basis, known, bool(drawn))


def _followed(options: Namespace, planner: Planner, like: RunFiles) -> tuple[Duration, str]:
    """Return the time that follows from an earlier run, and what it is based on.

    Its length and its share of live groups are taken if the task and the model are the same."""
    earlier, config, device = _measured(like), planner.config, like.machine.get("device") or "an unknown machine"
    if options.card and not card_speed(device):
        raise ConfigError(
            f"--card {options.card}",
            f"the run of --like was made on {device}, and what it lost there against the computed time says nothing "
            "of a card",
            f"Leave --card out, or --like, or name a run on one of {KNOWN}",
        )
    speed = _named(options.card) if options.card else earlier.speed
    is_alike = config.task == like.config.task and config.model.name == like.config.model.name
    longest = float(config.rollout.max_new_tokens)
    length = min(longest, options.length or (earlier.length if is_alike else longest))
    live = earlier.live if is_alike and config.drops_dead_groups else 1.0
    basis = (
        f"corrected by the steps of {options.like}: {like.config.model.name} on {device}, answers of "
        f"{earlier.length:.0f} tokens in the mean"
    )
    if not is_alike and not options.length:
        basis += f"; the task or the model is another, so {length:.0f} tokens are taken"
    if speed != earlier.speed:
        basis = f"computed for {options.card}, on which nothing was measured, and {basis}"
    return Duration(planner, speed, length, live, earlier.ratio), basis


def _check(options: Namespace) -> None:
    for name in ("length", "price"):
        value = getattr(options, name, None)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} {value:g}", "it must be a number above 0")
    if options.card is not None:
        _named(options.card)


def _named(card: str) -> Speed:
    speed = card_speed(card)
    if speed is None:
        raise ConfigError(
            f"--card {card or repr(card)}", "its speed is not known", f"Known are {KNOWN}. Or name a run with --like"
        )
    return speed


def _measured(like: RunFiles) -> Duration:
    """Return the duration of the earlier run on its own machine, corrected by its steps."""
    config, machine = like.config, like.machine
    shape = shape_of(config.model.name, config.model.revision)
    planner = Planner(shape, config, int(machine.get("ranks", 1)), 0)
    speed = card_speed(machine.get("device", "")) or CPU
    return measured(Duration(planner, speed, config.rollout.max_new_tokens), like.metrics)


def _refills(config: Config) -> int:
    """Return how often a step may sample again, which nobody knows before its answers are there."""
    return config.rollout.refills if config.rollout.dead_groups == "refill" and not config.is_warmup else 0


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


def lines(found: Outlook | None, price: float | None) -> Iterator[str]:
    """Yield the time, the energy and the price of a run for people."""
    if found is None:
        yield "time: not known for this machine; --card NAME computes it, and --like RUN takes that of an earlier run"
        return
    of_run = "the steps follow from the number of problems, which is not known: write run.steps"
    if found.seconds:
        config = found.most.planner.config
        taught = ", those of the warm-up" if config.warmup.steps and not config.is_warmup else ""
        of_run = f"{_span(*found.seconds)} for {counted(found.steps or 0, 'step')}{taught} and the evaluations"
    parts = {name: _span(getattr(found.least, name), getattr(found.most, name)) for name in PARTS}
    yield f"time: {of_run}, {found.basis}\n  {', '.join(f'{name} {span}' for name, span in parts.items())}"
    yield f"  not counted: {', '.join(_left_out(found.most.planner))}"
    if found.kwh is not None:
        how = "about" if found.is_measured else "at most"
        yield f"energy: {how} {found.kwh:.2g} kWh, with {found.ranks} x {found.watts:.0f} W"
    if price is not None and found.seconds:
        least, most = (seconds / 3600 * found.ranks * price for seconds in found.seconds)
        yield f"price: {least:.2f}" + (f" to {most:.2f}" if most > least else "") + f" at {price:g} an hour of a card"


def _left_out(planner: Planner) -> Iterator[str]:
    config = planner.config
    yield "loading"
    if config.teacher.is_there and not (planner.teacher or config.shares_base):
        yield "the teacher"
    yield "judges, tools and environments"


def _span(least: float, most: float) -> str:
    first, last = _time(least), _time(most)
    return first if first == last else f"{first} to {last}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def document(found: Outlook | None, price: float | None) -> dict[str, Any] | None:
    if found is None:
        return None
    per_step = {name: [getattr(found.least, name), getattr(found.most, name)] for name in PARTS}
    hours = found.seconds and [seconds / 3600 for seconds in found.seconds]
    return {
        "steps": found.steps,
        "hours": hours,
        "seconds": per_step,
        "basis": found.basis,
        "kwh": found.kwh,  # at most, unless it follows from what the card of an earlier run drew
        "kwh_is_measured": found.is_measured,
        "price": hours and price and [hour * found.ranks * price for hour in hours],
    }


def limit_of_a_job(found: Outlook | None, jobs: int) -> str:
    """Return `SAFE` times the longest time, shared by the jobs of a chain, as sbatch reads it: in whole quarters."""
    if found is None or found.seconds is None:
        missing = "the speed of the cards" if found is None else "the number of steps"
        remedy = "--card H100 or --like RUN" if found is None else "run.steps=N"
        raise ConfigError("--time auto", f"{missing} is not known", f"Write {remedy} as well, or --time HH:MM:SS")
    quarters = max(1, ceil(SAFE * found.seconds[1] / jobs / QUARTER_S))
    return f"{quarters // 4:02d}:{quarters % 4 * 15:02d}:00"
