"""Several tasks at once: `task.mix={gsm8k: 2, reasoning_gym:gcd: 1}`.

A pass over the training set has problems of the parts in proportion to their shares, each problem once; if a part has
more problems than that, each pass takes a different sample. The held-out problems are in the same proportion. All parts
use one prompt style: `prompt.style` if it is set, else that of the parts if they agree, else `tags`. The name of a part
is its key in `task.mix` without folders, and the ids of its problems begin with it.
"""

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from trainer.config.settings import TaskSettings
from trainer.errors import ConfigError, DataError
from trainer.problem.own_records import OwnTask
from trainer.problem.task import HELD_OUT, DataTask, Task, few, make_task
from trainer.records import Problem


class MixedTask(Task):
    name = "mix"
    parts: Sequence[Task] = ()

    def __init__(self, settings: TaskSettings) -> None:
        self.shares, self.passes = settings.mix, 0
        # without folders, because the paths of a resumed run are absolute
        names = [part.rpartition("/")[2] if ".py:" in part else part for part in settings.mix]
        self.names = [f"{name}-{at}" if name in names[:at] else name for at, name in enumerate(names)]
        self.columns: dict[str, None] = {}
        self.parts = [make_task(settings.model_copy(update={"name": name, "mix": {}})) for name in settings.mix]
        readers = [part for part in self.parts if isinstance(part, DataTask) and not isinstance(part, OwnTask)]
        if (settings.path or settings.data_dir) and len(readers) != 1:
            reason = f"your data (task.path, task.data_dir) are those of one part, and {len(readers)} parts read data"
            raise ConfigError("task.mix", reason, "Leave them out, or put your data into one file")
        styles = {(part.prompt_style, part.answer_style) for part in self.parts}
        marks = {mark for _, mark in styles}  # of answers that no prompt asks for, as with prompt.style=chat
        self.prompt_style = styles.pop()[0] if len(styles) == 1 else "tags"
        self.answer_style = marks.pop() if len(marks) == 1 else "tags"
        self.symbolic = any(part.symbolic for part in self.parts)

    def train(self) -> list[Problem]:
        return self._mixed([part.train() for part in self.parts], self.passes)

    def test(self) -> list[Problem]:
        return self._mixed([part.test() for part in self.parts], 0)

    def later(self, passes: int) -> "MixedTask":
        task = copy(self)
        task.passes = passes
        task.parts = [part.later(passes) or part for part in self.parts]
        return task

    def part(self, problem: Problem) -> Task:
        return self.parts[self.names.index(problem.part)] if problem.part else self  # what a person asks in a chat

    def notes(self) -> list[str]:
        notes = [note for part in self.parts for note in part.notes()]
        return [*(note for note in notes if not note.startswith(HELD_OUT)), *few(self.test())]  # of all parts together

    def _mixed(self, of_parts: Sequence[Sequence[Problem]], passes: int) -> list[Problem]:
        """Return as many problems as possible with the parts in proportion. Each pass samples them anew."""
        shares = list(self.shares.values())
        for name, problems in zip(self.shares, of_parts, strict=True):
            if not problems:
                reason = f"no problem of {name} is left, or all its questions are held out"
                raise DataError("task.mix", reason, "Add problems, or leave it out")
        unit = min(len(problems) / share for problems, share in zip(of_parts, shares, strict=True))
        counts = [max(1, round(unit * share)) for share in shares]
        self.columns |= {name: None for problems in of_parts for one in problems for name in one.extra}
        return [
            replace(problem, id=name + problem.id.removeprefix(part.name), part=name)
            for name, part, problems, count in zip(self.names, self.parts, of_parts, counts, strict=True)
            for problem in random.Random(passes).sample(problems, count)
        ]
