"""Runs of the embedded model that are broken in one way each, and healthy ones: which alarms do they raise?

    python -m tests.e2e.faulty_runs FOLDER [NAME[=STEPS] ...]    writes FOLDER/alarms.json: the first step of each alarm

Each run has 20 steps through the real engine, with the decoder of a run where nothing else is said. With STEPS it ends
after so many of them, at the learning rates of 20.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import write_lines
from tests.samplers import Altered, Scripted
from trainer import loop
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.errors import TrainingError
from trainer.problem.word_problems import NanoTask
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.interface import Sampler
from trainer.run import assemble

STEPS = 20
ALWAYS = ["run.steps=20", "algorithm.lr=1e-3", "rollout.problems=8", "eval.problems=0", "run.merge=false"]
ALWAYS += ["run.save_every=99"]
CUSTOM = {  # name -> what a reward of one's own gives for a text
    "inverted": "float(not text.rstrip().endswith(f'#### {right}'))",
    "long": "len(text) / 100",
    "short": "1 - len(text) / 100",
    "constant": "0.5",
    "silent": "None",
}


def stale(one: Completion) -> Completion:
    """Return an answer with the log-probs of another policy."""
    return replace(one, logprobs=tuple(value - 0.3 for value in one.logprobs))


class Counted(Sampler):
    """Another sampler, which first calls a function with the number of the step."""

    def __init__(self, sampler: Sampler, before: Callable[[int], object]) -> None:
        self.sampler, self.before, self.steps = sampler, before, 0

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        self.steps += 1
        self.before(self.steps)
        yield from self.sampler.sample(prompts, sampling)


def slower(sampler: Sampler, tokenizer: Any) -> Sampler:
    """Return a sampler that takes longer from the twentieth step on."""
    return Counted(sampler, lambda step: time.sleep(3.0 if step > STEPS else 0))


def formed(sampler: Sampler, tokenizer: Any) -> Sampler:
    """Return a sampler of wrong answers, from the eighth step on in the form that is asked for."""
    steps: list[int] = []
    wrong = Scripted(tokenizer, lambda _, number: f"{'#### ' if len(steps) > 8 else ''}{-1 - number}")
    return Counted(wrong, steps.append)


# what a model that is being ruined also shows
RUIN = ("accuracy falls", "all wrong", "small groups", "answers alike", "cut off", "answers grow", "answers shrink")
RUIN += ("entropy explosion", "entropy collapse", "repetition", "learning rate too large")
# a reward for length, which ruins the model
LENGTH = ("paid by length", "shaping decides", *RUIN, "reward against accuracy")
WEIGHTS = "reward.weights="
SHORT = [WEIGHTS + "{correct: 1.0, length: 0.05}", "reward.length_band=[1, 8]", "reward.gate=false"]
NARROW = ["algorithm.clip_low=0.0001", "algorithm.clip_high=0.0001"]
ENTROPY = ["algorithm.entropy_bonus=5.0", "rollout.dead_groups=keep"]
UNHELD = ["algorithm.kl.coef=1e-9", "algorithm.lr=0.03", "rollout.dead_groups=keep"]


class Fault(NamedTuple):
    """Settings, a sampler in place of the run's, and the alarms that belong to it. The first one has to be raised."""

    settings: Sequence[str]
    alarms: Sequence[str]
    sampler: Any = None


def fault(*settings: str, raises: str | Sequence[str], sampler: Any = None) -> Fault:
    return Fault(settings, raises.split(", ") if isinstance(raises, str) else raises, sampler)


def told(text: Callable[[Prompt, int], str], raises: str, truncated: bool = False) -> Fault:
    return fault(raises=raises, sampler=lambda _, tokenizer: Scripted(tokenizer, text, truncated))


FAULTS = {
    "rate x 100": fault("algorithm.lr=0.1", raises=("learning rate too large", *RUIN)),
    "rate x 1/1000": fault("algorithm.lr=1e-6", raises="learning rate too small"),
    "temperature 0.05": fault("rollout.temperature=0.05", raises="answers alike"),
    "wrong gold answers": fault("{wrong}", raises="all wrong"),
    "reward inverted": fault("{inverted}", raises=("reward against accuracy", *RUIN)),
    "reward is the length": fault(
        "{long}", raises="paid by length, answers grow, accuracy falls, reward against accuracy"
    ),
    "6 new tokens": fault("rollout.max_new_tokens=6", raises="cut off, all wrong, small groups"),
    "groups of 2": fault("rollout.group_size=2", "rollout.problems=16", raises="small groups"),
    "a constant part": fault("{constant}", "reward.weights.correct=1.0", raises="constant reward"),
    "format pays most": fault(WEIGHTS + "{correct: 1.0, format: 5.0}", raises="a part dominates, constant reward"),
    "short answers are paid, divided by the deviation of a group": fault(*SHORT, raises=("shaping decides", *RUIN)),
    "another form": told(
        lambda prompt, number: f"The answer is {prompt.problem.gold if number % 2 else number}.",
        "form never seen, all wrong",
    ),
    "a reward without values": fault("{silent}", raises="no reward"),
    "8 problems": fault("task.limit=8", raises="few problems"),
    "stale sampler": fault(raises="sampler and trainer apart", sampler=lambda sampler, _: Altered(sampler, stale)),
    "always right": told(lambda prompt, _: f"#### {prompt.problem.gold}", "all right, answers alike"),
    "empty answers": told(lambda *_: "", "empty answers, all wrong, answers alike"),
    "a loop": told(lambda _, number: "3 + 4 = " * 40 + str(number), "repetition, all wrong"),
    "endless thinking": told(
        lambda _, number: f"<think> {number}" + " + 1" * number, "thinking fills the limit, all wrong", truncated=True
    ),
    "a narrow clip": fault("algorithm.epochs=8", *NARROW, raises="clipping"),
    "a frozen adapter": fault("algorithm.lr=1e-30", raises="nothing trained"),
    "reward is shortness": fault("{short}", raises=LENGTH),
    "a punishment of every length": fault(
        WEIGHTS + "{correct: 1.0, overlong: 3.0}", "reward.overlong_buffer=39", raises=LENGTH
    ),
    "entropy is all that counts": fault(*ENTROPY, raises=("entropy explosion", *RUIN)),
    "a tiny limit of the gradient": fault("optim.max_grad_norm=0.001", raises="gradient at its limit"),
    "form is learned alone": fault(
        WEIGHTS + "{correct: 1.0, format: 1.0}",
        raises="form alone, all wrong, constant reward",
        sampler=formed,
    ),
    "shortness is paid, and held-out problems are asked": fault(
        "{short}", "eval.every=2", "eval.problems=64", raises=("held-out accuracy falls", *LENGTH)
    ),
    "a constant reward alone": fault("{constant}", "rollout.dead_groups=keep", raises="no gradient, constant reward"),
    "a machine that slows down": fault("run.steps=40", raises="slower", sampler=slower),
    "no hold by the KL": fault(*UNHELD, raises=("far from the reference", "no gradient", *RUIN)),
}
HEALTHY: dict[str, list[str]] = {f"seed {seed}": [f"run.seed={seed}"] for seed in range(8)}
HEALTHY |= {name: [f"--recipe={name}"] for name in ("dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce")}
HEALTHY |= {"KL": ["algorithm.kl.coef=0.01"], "cool": ["rollout.temperature=0.7"], "PiSSA": ["lora.init=pissa"]}
HEALTHY |= {"groups of 16": ["rollout.group_size=16"]}
HEALTHY |= {"half the rate": ["algorithm.lr=5e-4"], "twice the rate": ["algorithm.lr=2e-3"]}


def alarms(folder: Path, settings: Sequence[str], sampler: Any = None, steps: str = "") -> dict[str, int]:
    """Train, at most for so many steps, and return the first step of each alarm."""
    recipe = next((one.partition("=")[2] for one in settings if one.startswith("--recipe=")), None)
    own = [one for one in settings if not one.startswith("--")]
    config = resolve("nano", recipe, [*ALWAYS, *own, f"run.dir={folder}"])
    made = assemble.build(Request(config, "nano", ""))
    said: list[str] = []
    made.log.alarms.say = said.append
    made.log.total_steps = int(steps or made.log.total_steps)
    if sampler:
        rollouts = made.rollouts
        made = made._replace(rollouts=replace(rollouts, sampler=sampler(rollouts.sampler, rollouts.prompter.tokenizer)))
    try:
        loop.train(config, *made)
    except TrainingError as error:
        said.append(str(error))
    made.log.close()
    found: dict[str, int] = {}
    for text in said:
        step, rule = text.split(": ", 2)[:2]
        found.setdefault(rule, int(step.removeprefix("step ")))
    return found


def custom(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.py"
    rewards = f"[{CUSTOM[name]} for text, right in zip(completions, gold)]"
    path.write_text(f"def {name}(completions, gold):\n    return {rewards}\n")
    return [f"reward.custom={path}:{name}", f"reward.weights={{{name}: 1.0, correct: 0.0}}"]


def main() -> None:
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    with assemble.process_group(resolve("nano", None, ALWAYS)):
        for number, word in enumerate(chosen or [*FAULTS, *HEALTHY]):
            name, _, steps = word.partition("=")
            settings, _, sampler = FAULTS[name] if name in FAULTS else (HEALTHY[name], (), None)
            own = [one for text in settings for one in written(folder, text)]
            found[name] = alarms(folder / f"run{number}", own, sampler, steps)
    (folder / "alarms.json").write_text(json.dumps(found, indent=1) + "\n")


def written(folder: Path, setting: str) -> list[str]:
    """Return the settings that stand for a name in braces; their files are written."""
    name = setting.strip("{}")
    if setting == "{wrong}":
        rows = [{"question": one.question, "answer": "98765"} for one in NanoTask(train_size=400).train()]
        path = write_lines(folder / "wrong.jsonl", rows)
        return ["task.name=records", f"task.path={path}", "prompt.style=chat"]
    return custom(folder, name) if name in CUSTOM and setting.startswith("{") else [setting]


if __name__ == "__main__":
    main()
