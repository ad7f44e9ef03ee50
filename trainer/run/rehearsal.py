"""Run the largest possible step before the first one, so that a lack of memory shows now and not at step 600."""

from collections.abc import Mapping, Sequence
from functools import partial

from trainer.config.settings import Config
from trainer.model.shapes import planned_shape
from trainer.plan.planner import Planner
from trainer.ranks import distributed
from trainer.records import MiniBatch, TrainingRow
from trainer.rollout.collect import Rollouts
from trainer.step.update import Updater
from trainer.watch.phases import GB, Peak, Phases
from trainer.watch.tally import Tally

DIGITS = 6
# The phases of a step, and the planner's names for them. A rehearsal ends before the optimizer.
PLANNED = {"rollout": "rollout", "score": "score", "step": "backward"}


def planned(config: Config, longest_prompt: int, card: int, outside: bool) -> dict[str, int]:
    """Return the bytes planned for each phase of a step, if known. With `outside`, another engine samples."""
    if (shape := planned_shape(config.model)) is None:
        return {}
    elsewhere = {"rollout.engine": "vllm_server"} if outside else {}
    settings = config.changed({"prompt.max_tokens": longest_prompt} | elsewhere)
    plan = Planner(shape, settings, distributed.world_size(), card).plan
    return {
        name: plan.allocated_of(phase)
        for name, phase in PLANNED.items()
        if phase in plan.phases and not (outside and phase == "rollout")
    }


def report(plan: Mapping[str, int], peaks: Mapping[str, Peak], card: int) -> str:
    """Compare the memory measured on a card of `card` bytes with the plan."""
    parts = [f"{PLANNED[name]} {peaks[name].allocated / GB:.2f} ({size / GB:.2f})" for name, size in plan.items()]
    reserved = max(peak.reserved for peak in peaks.values()) / GB
    return f"memory in GB, measured (planned): {', '.join(parts)}; {reserved:.2f} reserved of {card / GB:.1f}"


def rehearse(rollouts: Rollouts, updater: Updater) -> dict[str, Peak]:
    """Sample and train at full length, with fewer rows if memory runs out. Return the memory of each phase."""
    phases, rollout = Phases(), rollouts.config.rollout
    problems = -(-rollout.problems // distributed.world_size())
    with phases("rollout"), updater.policy.gathered():
        rollouts.sampler.rehearse([rollouts.longest] * problems, rollouts.sampling_of(0))
    prompt, length = rollouts.longest.tokens, rollout.max_new_tokens
    if rollouts.config.is_warmup:  # each solution has its own prompt
        count = -(-rollouts.config.warmup.problems // distributed.world_size())
        rows = [_row((*prompt[index:], *prompt[:index]), length, index) for index in range(count)]
    else:
        rows = [_row(prompt, length, index) for index in range(problems * rollout.group_size)]
    largest = updater.packer.arrange(rows)[0]
    tokens = float(sum(len(row.completion) for row in largest))
    with phases("score"):
        (minibatch,) = updater.prepare([MiniBatch(updater.packer.pack(largest), tokens, tokens)])
    with phases("step"):
        updater.policy.rehearse(partial(updater.add_gradient, [minibatch], 0, Tally()))
    return dict(phases.peaks)


def _row(prompt: Sequence[int], length: int, index: int) -> TrainingRow:
    """Return an answer of full length that begins with its number, written in tokens of the prompt."""
    known = sorted(set(prompt))
    digits = [known[index // len(known) ** place % len(known)] for place in range(min(DIGITS, length))]
    completion = [*digits, *[known[0]] * (length - len(digits))]
    return TrainingRow(prompt, completion, [0.0] * length, advantage=1.0)
