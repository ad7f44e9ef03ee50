"""Repeat the first steps of a run, and find the first difference and its likely cause."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isclose
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from trainer.config.paths import DATA
from trainer.config.request import Request
from trainer.config.settings import Config
from trainer.errors import DataError, counted
from trainer.evaluation.best import Milestone
from trainer.machine.quiet import no_progress_bars
from trainer.machine.safe_text import print, visible
from trainer.run import assemble, teaching
from trainer.run.assemble import Run
from trainer.run.rehearsal import rehearse
from trainer.run_folder import changed_settings, create, provenance
from trainer.run_folder.journal import read_records
from trainer.run_folder.reader import read_run

MEASURED = ("time/", "memory/", "energy/", "eval/")  # metrics that depend on the machine, or do not belong to a step
ROUNDING = 1e-5  # the largest relative difference of a metric that another processor makes by rounding
OF_ROUNDING = "sampler_"  # metrics that measure rounding themselves, so their difference counts as it is
TINY = 1e-7  # a loss near zero, the sum of what cancels out, has a rounding error as large as this
ADAPTER = "checkpoints/step_{:06d}/adapter/adapter_model.safetensors"
UNKNOWN = (
    "not known: settings, data, base weights, versions, device and threads are those of the run. Steps before a change "
    "of run.steps had another learning rate. A judge, a vLLM server and tools with a time limit never repeat to the bit"
)


def replay(folder: Path, config: Config, steps: int) -> bool:
    """Repeat the first steps of the run in `folder` in `config.run.dir`. Print the result. Return True if it is
    identical, or on another processor equal up to rounding."""
    scratch = config.run.dir
    assert scratch is not None, "the command makes a folder"
    recorded = [record["step"] for record in read_records(folder / "metrics.jsonl") if record["step"]]
    if not recorded:
        raise DataError(folder, "its metrics.jsonl has no step", "Name a run that has made some")
    steps = min(steps, max(recorded))
    problems = [problem.id for problem in _train(config, steps).rollouts.curriculum.problems]
    own = ("run.dir", "run.track", *DATA)
    changed = [one for one in changed_settings.differences(folder, config) if one.key not in own]
    causes = [f"the setting {one.key}={one.now}; the run has {one.before}" for one in changed]
    before, now = provenance.recorded(folder), provenance.recorded(scratch)
    if before and (difference := provenance.apart(before, now, problems)):
        causes.append(difference if difference.startswith("the ") else f"the data: {difference}")
    there, here = (read_run(place).machine for place in (folder, scratch))
    causes += _surroundings(there, here)
    is_elsewhere = any(there.get(name, here[name]) != here[name] for name in ("processor", "device"))
    exact = [*_differences(folder, scratch, steps)]
    if different := [*_differences(folder, scratch, steps, rounds=True)] if is_elsewhere else exact:
        if any(": lr is " in one for one in different) and not changed:  # several updates of a step differ before it
            causes.insert(0, "the rate follows from run.steps, which was another one when the run made these steps")
        print(f"differs: {different[0]}")
        print("\n".join(f"likely cause: {cause}" for cause in causes or [UNKNOWN]))
        return False
    answers = counted(len(read_records(scratch / "samples.jsonl")), "answer")
    if exact:
        print(f"equal up to rounding, on another processor: the metrics of {counted(steps, 'step')}")
        print(f"identical to the bit: the {answers} in samples.jsonl")
        print(f"the first difference: {exact[0]}")
        print("not compared: the adapter, which an optimizer makes from gradients that were rounded in another way")
        print("\n".join(f"without an effect beyond rounding so far: {cause}" for cause in causes))
        return True
    print(f"identical to the bit: the metrics of {counted(steps, 'step')}, and the {answers} in samples.jsonl")
    if (folder / ADAPTER.format(steps)).is_file():
        print(f"identical to the bit: the adapter after step {steps}")
    else:
        print(f"no adapter was compared: the run saved none after step {steps}")
    for cause in causes:
        print(f"without an effect so far: {cause}")
    return True


def race(config: Config, goal: float) -> Milestone:
    """Train until an evaluation reaches the goal. Return that evaluation, or the one after the last step."""
    return _train(config, goal=goal).evaluator.history.milestones[-1]


def _train(config: Config, steps: int | None = None, goal: float = inf) -> Run:
    """Train for `steps`, or until an evaluation reaches `goal`, with the schedule of the whole run."""
    no_progress_bars()
    with assemble.process_group(config):
        run, train = teaching.built(Request(config, "repro", "", json=True))  # progress goes to standard error
        run.log.total_steps = steps or run.log.total_steps
        run.evaluator.history.goal = goal
        try:
            rehearse(run.rollouts, run.updater)
            train()
        finally:
            run.rollouts.close()
            run.log.close()
        return run


def _differences(folder: Path, scratch: Path, steps: int, rounds: bool = False) -> Iterator[str]:
    """Yield the differences, in the order in which a step computes the values. If the processor `rounds` in another
    way, leave out what that explains: small differences of metrics, and those of the adapter that they make."""
    samples = [read_records(place / "samples.jsonl") for place in (folder, scratch)]
    metrics = [read_records(place / "metrics.jsonl") for place in (folder, scratch)]
    for step in range(1, steps + 1):
        yield from _answers(step, *([one for one in side if one["step"] == step] for side in samples))
        before, now = ({k: v for one in side if one["step"] == step for k, v in one.items()} for side in metrics)
        for name in before | now:
            is_equal = repr(before.get(name)) == repr(now.get(name))
            if not (name.startswith(MEASURED) or is_equal or (rounds and _is_rounding(name, before, now))):
                yield f"step {step}: {name} is {now.get(name)!r}, and was {before.get(name)!r}"
    if not rounds and (folder / ADAPTER.format(steps)).is_file():
        yield from _tensors(folder / ADAPTER.format(steps), scratch / ADAPTER.format(steps), steps)


def _is_rounding(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    old, new = before.get(name), now.get(name)
    if name == "lr" or not (isinstance(old, float) and isinstance(new, float)):
        return False
    return isclose(old, new, rel_tol=ROUNDING, abs_tol=ROUNDING if name.startswith(OF_ROUNDING) else TINY)


def _answers(step: int, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    # rank 0 logs its own groups only, so another number of ranks logs other problems
    both = {one["problem"] for one in before} & {one["problem"] for one in now}
    pairs = [[one for one in side if not both or one["problem"] in both] for side in (before, now)]
    for old, new in zip(*pairs, strict=False):
        for name in ("problem", "prompt", "completion", "reward"):
            if old[name] != new[name]:
                now_shown, before_shown = (visible(repr(one[name])[-80:]) for one in (new, old))
                yield f"step {step}: the {name} of an answer to {old['problem']} is {now_shown}, and was {before_shown}"
    if len(before) != len(now):
        yield f"step {step}: samples.jsonl has {counted(len(now), 'answer')}, and had {len(before)}"


def _tensors(before: Path, now: Path, step: int) -> Iterator[str]:
    old, new = load_file(before), load_file(now)
    if others := old.keys() ^ new.keys():
        yield f"after step {step}: {min(others)} is in one of the two adapters only"
        return
    for name, tensor in old.items():
        if difference := (tensor.float() - new[name].float()).abs().max():
            yield f"after step {step}: {name} differs by up to {difference:.1e}"


def _surroundings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the changes in what the run has recorded: base weights, versions, threads and more."""
    if not before:
        yield f"base weights, versions, device, threads or code: the run has no {create.MACHINE} to compare them with"
    for name, value in before.items():
        if value != now.get(name) and not (name.startswith("checksum of ") and value in now.values()):  # only moved
            yield f"{name}: {now.get(name, 'none')}; the run had {value}"
