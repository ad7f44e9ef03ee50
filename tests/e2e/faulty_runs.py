"""Runs of the embedded model that are broken in one way each, and healthy ones: which alarms do they raise?

    python -m tests.e2e.faulty_runs FOLDER [NAME ...]        writes FOLDER/alarms.json: the first step of each alarm

Each run has 20 steps through the real engine, with the decoder of a run where nothing else is said.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import loop
from trainer.config.command_line import Request, resolve
from trainer.errors import TrainingError
from trainer.problem.word_problems import NanoTask
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.collect import Sampler
from trainer.run import assemble

STEPS = 20
ALWAYS = [
    "run.steps=20",
    "algorithm.lr=1e-3",
    "rollout.problems=8",
    "eval.problems=0",
    "run.merge=false",
    "run.save_every=99",
]
CUSTOM = {  # name -> what a reward of one's own gives for a text
    "inverted": "float(not text.rstrip().endswith(f'#### {right}'))",
    "long": "len(text) / 100",
    "short": "1 - len(text) / 100",
    "constant": "0.5",
    "silent": "None",
}


class Scripted(Sampler):
    """Writes what it is told to, and reports log-probs that are not those of the model."""

    def __init__(self, tokenizer: Any, text: Callable[[Prompt, int], str], truncated: bool = False) -> None:
        self.tokenizer, self.text, self.truncated = tokenizer, text, truncated

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        for index, prompt in enumerate(prompts):
            yield index, [self._answer(self.text(prompt, number)) for number in range(sampling.group)]

    def _answer(self, text: str) -> Completion:
        tokens = tuple(self.tokenizer(text)["input_ids"]) or (2,)
        return Completion(tokens, (-1.0,) * len(tokens), text, self.truncated)


class Stale(Sampler):
    """A sampler whose log-probs are those of another policy."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        for index, group in self.sampler.sample(prompts, sampling):
            yield index, [replace(one, logprobs=tuple(value - 0.3 for value in one.logprobs)) for one in group]


class Slower(Sampler):
    """A sampler that takes longer and longer from the twentieth step on."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.calls = sampler, 0

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        self.calls += 1
        if self.calls > STEPS:
            time.sleep(3.0)
        yield from self.sampler.sample(prompts, sampling)


class Formed(Scripted):
    """Writes wrong answers, from the eighth step on in the form that is asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda _, number: f"{'#### ' if self.calls > 8 else ''}{-1 - number}")
        self.calls = 0

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        self.calls += 1
        yield from super().sample(prompts, sampling)


def scripted(text: Callable[[Prompt, int], str], truncated: bool = False) -> Callable[[Any, Any], Sampler]:
    return lambda sampler, tokenizer: Scripted(tokenizer, text, truncated)


# what a model that is being ruined also shows
RUIN = ("accuracy falls", "all wrong", "small groups", "answers alike", "cut off", "answers grow", "answers shrink")
RUIN += ("entropy explosion", "entropy collapse", "repetition", "learning rate too large")
# name -> settings, the alarms that belong to it (the first one has to be raised), and another sampler
Fault = tuple[list[str], tuple[str, ...], Any]
FAULTS: dict[str, Fault] = {
    "rate x 100": (["algorithm.lr=0.1"], ("learning rate too large", *RUIN), None),
    "rate x 1/1000": (["algorithm.lr=1e-6"], ("learning rate too small",), None),
    "temperature 0.05": (["rollout.temperature=0.05"], ("answers alike",), None),
    "wrong gold answers": (["{wrong}"], ("all wrong",), None),
    "reward inverted": (["{inverted}"], ("reward against accuracy", *RUIN), None),
    "reward is the length": (
        ["{long}"],
        ("paid by length", "answers grow", "accuracy falls", "reward against accuracy"),
        None,
    ),
    "6 new tokens": (["rollout.max_new_tokens=6"], ("cut off", "all wrong", "small groups"), None),
    "groups of 2": (["rollout.group_size=2", "rollout.problems=16"], ("small groups",), None),
    "a constant part": (["{constant}", "reward.weights.correct=1.0"], ("constant reward",), None),
    "format pays most": (["reward.weights={correct: 1.0, format: 5.0}"], ("a part dominates", "constant reward"), None),
    "another form": (
        [],
        ("form never seen", "all wrong"),
        scripted(lambda prompt, number: f"The answer is {prompt.problem.gold if number % 2 else number}."),
    ),
    "a reward without values": (["{silent}"], ("no reward",), None),
    "8 problems": (["task.limit=8"], ("few problems",), None),
    "stale sampler": ([], ("sampler and trainer apart",), lambda sampler, _: Stale(sampler)),
    "always right": ([], ("all right", "answers alike"), scripted(lambda prompt, _: f"#### {prompt.problem.gold}")),
    "empty answers": ([], ("empty answers", "all wrong", "answers alike"), scripted(lambda *_: "")),
    "a loop": ([], ("repetition", "all wrong"), scripted(lambda _, number: "3 + 4 = " * 40 + str(number))),
    "endless thinking": (
        [],
        ("thinking fills the limit", "all wrong"),
        scripted(lambda _, number: f"<think> {number}" + " + 1" * number, truncated=True),
    ),
    "a narrow clip": (
        ["algorithm.epochs=8", "algorithm.clip_low=0.0001", "algorithm.clip_high=0.0001"],
        ("clipping",),
        None,
    ),
    "a frozen adapter": (["algorithm.lr=1e-30"], ("nothing trained",), None),
    "reward is shortness": (["{short}"], ("paid by length", *RUIN, "reward against accuracy"), None),
    "a punishment of every length": (
        ["reward.weights={correct: 1.0, overlong: 3.0}", "reward.overlong_buffer=39"],
        ("paid by length", *RUIN, "reward against accuracy"),
        None,
    ),
    "entropy is all that counts": (
        ["algorithm.entropy_bonus=5.0", "rollout.dead_groups=keep"],
        ("entropy explosion", *RUIN),
        None,
    ),
    "a tiny limit of the gradient": (["optim.max_grad_norm=0.001"], ("gradient at its limit",), None),
    "form is learned alone": (
        ["reward.weights={correct: 1.0, format: 1.0}"],
        ("form alone", "all wrong", "constant reward"),
        lambda _, tokenizer: Formed(tokenizer),
    ),
    "shortness is paid, and held-out problems are asked": (
        ["{short}", "eval.every=2", "eval.problems=64"],
        ("held-out accuracy falls", "paid by length", *RUIN, "reward against accuracy"),
        None,
    ),
    "a constant reward alone": (["{constant}", "rollout.dead_groups=keep"], ("no gradient", "constant reward"), None),
    "a machine that slows down": (["run.steps=40"], ("slower",), lambda sampler, _: Slower(sampler)),
    "no hold by the KL": (
        ["algorithm.kl.coef=1e-9", "algorithm.lr=0.03", "rollout.dead_groups=keep"],
        ("far from the reference", "no gradient", *RUIN),
        None,
    ),
}
HEALTHY: dict[str, list[str]] = {f"seed {seed}": [f"run.seed={seed}"] for seed in range(8)}
HEALTHY |= {name: [f"--recipe={name}"] for name in ("dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce")}
HEALTHY |= {"KL": ["algorithm.kl.coef=0.01"], "cool": ["rollout.temperature=0.7"], "PiSSA": ["lora.init=pissa"]}
HEALTHY |= {"groups of 16": ["rollout.group_size=16"]}
HEALTHY |= {"half the rate": ["algorithm.lr=5e-4"], "twice the rate": ["algorithm.lr=2e-3"]}


def alarms(folder: Path, settings: Sequence[str], sampler: Any = None) -> dict[str, int]:
    """Train, and return the first step of each alarm."""
    recipe = next((one.partition("=")[2] for one in settings if one.startswith("--recipe=")), None)
    own = [one for one in settings if not one.startswith("--")]
    config = resolve("nano", recipe, [*ALWAYS, *own, f"run.dir={folder}"])
    made = assemble.build(Request(config, "nano", ""))
    said: list[str] = []
    made.log.alarms.say = said.append
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
    """Return settings for a reward of one's own."""
    path = folder / f"{name}.py"
    rewards = f"[{CUSTOM[name]} for text, right in zip(completions, gold)]"
    path.write_text(f"def {name}(completions, gold):\n    return {rewards}\n")
    return [f"reward.custom={path}:{name}", f"reward.weights={{{name}: 1.0, correct: 0.0}}"]


def main() -> None:
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    found = {}
    with assemble.process_group(resolve("nano", None, ALWAYS)):
        for number, name in enumerate(chosen or [*FAULTS, *HEALTHY]):
            settings, _, sampler = FAULTS[name] if name in FAULTS else (HEALTHY[name], (), None)
            own = [one for text in settings for one in written(folder, text)]
            found[name] = alarms(folder / f"run{number}", own, sampler)
    (folder / "alarms.json").write_text(json.dumps(found, indent=1) + "\n")


def written(folder: Path, setting: str) -> list[str]:
    """Return the settings that stand for a name in braces; their files are written."""
    name = setting.strip("{}")
    if setting == "{wrong}":
        path = folder / "wrong.jsonl"
        problems = NanoTask(train_size=400).train()
        path.write_text("".join(json.dumps({"question": one.question, "answer": "98765"}) + "\n" for one in problems))
        return ["task.name=records", f"task.path={path}", "prompt.style=chat"]
    return custom(folder, name) if name in CUSTOM and setting.startswith("{") else [setting]


if __name__ == "__main__":
    main()
