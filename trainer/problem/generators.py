"""Problems of `reasoning_gym`: over a hundred generators, each with its own way to score answers.

    octet task show reasoning_gym:chain_sum task.gym.max_terms=3

`task.name` names a generator; `task.gym` holds its parameters, `size`, the number of problems in a pass, and
`partial`, whether partly right answers are paid. Every pass has new problems. Training and held-out problems are
generated from different seeds, and a question that is in both is held out. With `task.curriculum=difficulty` the
problems have the levels of the generator's own curriculum.

Several generators evaluate what a model wrote as Python, so they score in a sandboxed child process.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from functools import cache, lru_cache
from typing import Any

from trainer.answers.child_process import Child, Died
from trainer.answers.strip_thinking import after_thinking
from trainer.config.nearest_name import did_you_mean
from trainer.config.settings import TaskSettings
from trainer.errors import ConfigError, DataError
from trainer.machine.installed_files import pip_install
from trainer.problem.task import Task, normalised
from trainer.records import Problem
from trainer.sandbox.confine import Limits, Walls

SIZE, HELD_OUT = 10_000, 1_000
SEEDS = {"train": 1, "test": 1_000_003}  # problem i of a data set is generated from its seed + i
LATER_SEED = 2_000_000_000  # where the seeds of later passes begin
LEVELS = 4  # levels of a curriculum, with the same number of problems each
SCORING_S = 5.0
LIFETIME_S, MEMORY_MB = 1e6, 2048  # limits of the child that scores, which the kernel confines as far as it can
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GeneratorTask(Task):
    """The problems of one generator. Answers stand between <answer> and </answer>, because many span several lines."""

    prompt_style = answer_style = "tags"

    def __init__(self, settings: TaskSettings) -> None:
        self.name = settings.name
        self.generator = settings.name.partition(":")[2]
        self.passes = 0
        parameters = dict(settings.gym)
        self.size = size = parameters.pop("size", SIZE)
        if type(size) is not int or size < LEVELS:
            remedy = f"Write {LEVELS} or more, such as {SIZE}"
            raise ConfigError(f"task.gym.size={size}", "it is the number of problems in a pass", remedy)
        self.is_partial = parameters.pop("partial", False)
        if type(self.is_partial) is not bool:
            reason = "it says whether partly right answers are paid"
            raise ConfigError(f"task.gym.partial={json.dumps(self.is_partial)}", reason, "Write true or false")
        self.versions = _versions(self.name, self.generator, parameters, settings.curriculum == "difficulty")

    def train(self) -> list[Problem]:
        held_out = {normalised(problem.question) for problem in self.test()}
        problems = self._problems("train", self.size)
        return [problem for problem in problems if normalised(problem.question) not in held_out]

    def test(self) -> list[Problem]:
        return self._problems("test", min(HELD_OUT, self.size))

    def later(self, passes: int) -> "GeneratorTask":
        task = copy(self)
        task.passes = passes
        return task

    def read(self, problem: Problem, text: str) -> str | None:
        _, rest, is_thinking = after_thinking(text)
        answers = [] if is_thinking else _ANSWER.findall(rest)
        return answers[-1].strip() if answers else None

    def score(self, problem: Problem, answer: str) -> float:
        """Return the generator's score of an answer, or 0 if scoring fails or takes more than `SCORING_S` seconds. An
        answer that is not fully right has 0, too, unless `task.gym.partial` is set."""
        if "made_by" not in problem.extra:
            reason = "only its generator can score the answers to a problem, and this problem was not generated"
            raise DataError(problem.id, reason, f"Answer them yourself: octet task play {self.name}")
        with suppress(Died):
            score = float(_scorer().ask([problem.extra["made_by"], answer]) or 0.0)
            return score if self.is_partial or score >= 1.0 else 0.0
        return 0.0

    def _problems(self, split: str, size: int) -> list[Problem]:
        problems: dict[str, Problem] = {}  # by normalised question
        count = size // len(self.versions)
        passes = self.passes if split == "train" else 0
        seed = LATER_SEED + passes * count if passes else SEEDS[split]
        for level, parameters in enumerate(self.versions):
            for index, entry in enumerate(_entries(self.generator, parameters, seed, count)):
                name = f"{self.name}/{split}/{passes * size + level * count + index}"
                made_by = [self.generator, parameters, seed, count, index]
                extra = {"difficulty": level, "made_by": made_by}
                problem = Problem(name, entry["question"].strip(), str(entry["answer"] or ""), extra=extra)
                problems.setdefault(normalised(problem.question), problem)
        return list(problems.values())


def _versions(task: str, generator: str, parameters: Mapping[str, Any], by_level: bool) -> list[str]:
    """Return the parameters of the generator as JSON: one text, or with `by_level` one for each level of difficulty."""
    try:
        import reasoning_gym as gym
    except ImportError:
        needs = "it needs reasoning-gym, which is not installed"
        raise ConfigError(f"task.name={task}", needs, f"Run: {pip_install('gym')}") from None
    if generator not in gym.factory.DATASETS:
        reason = f"there is no such generator.{did_you_mean(generator, gym.factory.DATASETS)}"
        raise ConfigError(f"task.name={task}", reason, f"There are: {', '.join(sorted(gym.factory.DATASETS))}")
    if by_level and not gym.factory.has_curriculum(generator):
        reason, remedy = f"{task} has no levels of difficulty", "Write task.curriculum=solve_rate"
        raise ConfigError("task.curriculum=difficulty", reason, remedy)
    try:
        of_levels = [_of_level(generator, level) for level in range(LEVELS)] if by_level else [{}]
        versions = [json.dumps({**usual, **parameters}) for usual in of_levels]
        for version in versions:
            _data_set(generator, version, seed=0, count=1)
    except (TypeError, ValueError, AssertionError) as error:
        known = [key for key in vars(gym.factory.DATASETS[generator][1]()) if key not in ("seed", "size")]
        if by_level and not parameters:
            reason, remedy = f"{task} refuses its own settings for a level", "Write task.curriculum=solve_rate"
            raise ConfigError("task.curriculum=difficulty", f"{reason} ({error})", remedy) from None
        reason = f"{task} does not take that{' on each level of difficulty' * by_level} ({error})"
        named = f"task.gym={json.dumps(parameters, default=str)}"
        raise ConfigError(named, reason, f"It has: {', '.join(known)}") from None
    return versions


def _of_level(generator: str, level: int) -> dict[str, Any]:
    """Return the parameters of a level of the generator's own curriculum, without those that JSON does not have."""
    import reasoning_gym

    curriculum = reasoning_gym.factory.create_curriculum(generator)
    curriculum.set_global_level(level)
    usual = vars(curriculum.generate_configuration())
    return {key: value for key, value in usual.items() if key not in ("seed", "size") and _is_json(value)}


def _is_json(value: Any) -> bool:
    """Return True for values that JSON does not change, except for a tuple, which becomes a list."""
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str, dict)


@lru_cache(maxsize=32)
def _entries(generator: str, parameters: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Return the problems of a generator. They are cached, because some commands need them several times."""
    return list(_data_set(generator, parameters, seed, count))


def _data_set(generator: str, parameters: str, seed: int, count: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(generator, **json.loads(parameters), seed=seed, size=count)


@cache
def _scorer() -> Child:
    return Child(f"{__name__}:scorer", SCORING_S)


# ------------------------------------------------------------------------------------------------------- in the child


def scorer() -> Callable[[tuple[list[Any], str]], float]:
    """Return the function that scores an answer. It generates the problem again, because not all its parts are JSON."""
    import reasoning_gym  # noqa: F401  loads the modules that are listed below

    Walls(Limits(seconds=LIFETIME_S, memory_mb=MEMORY_MB), is_command=False).enter()
    modules: list[Any] = [module for name, module in sys.modules.items() if name.startswith("reasoning_gym.")]
    data_set = lru_cache(maxsize=32)(_data_set)

    def score(request: tuple[list[Any], str]) -> float:
        (*made_by, index), answer = request
        problems = data_set(*made_by)
        entry = problems[index]
        trusted = [entry["answer"], *entry["metadata"].values()]
        for module in modules:  # several of them call eval: on the generator's own text, or on the model's answer
            module.eval = lambda text: eval(text) if text in trusted else ast.literal_eval(text)  # noqa: S307
        try:
            return float(problems.score_answer(answer, entry))
        finally:
            for module in modules:
                del module.eval

    return score
