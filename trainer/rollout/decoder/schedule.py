"""Decides which prompts are read next, and collects the finished answers."""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from trainer.plan.planner import PREFILL_TOKENS
from trainer.records import Completion, Prompt


class NewAnswers(NamedTuple):
    """Answers to one prompt that start together."""

    prompt_index: int
    prompt: Prompt
    numbers: Sequence[int]  # the numbers of the answers in their group


class Scheduler:
    """Decides which prompts are read next, and collects the completions of each group. The longest prompts come first,
    so that a lack of memory shows early."""

    def __init__(self, prompts: Sequence[Prompt], group: int) -> None:
        self._prompts = prompts
        self._group = group
        by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].tokens))
        self._waiting: deque[tuple[int, Sequence[int]]] = deque((index, range(group)) for index in by_length)
        self._running: set[tuple[int, int]] = set()  # the indices of prompts, with the numbers of answers
        self._completions: defaultdict[int, dict[int, Completion]] = defaultdict(dict)

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.tokens) for prompt in self._prompts)

    @property
    def is_finished(self) -> bool:
        return not self._waiting and not self._running

    def schedule(self, free: int, usable: int) -> list[NewAnswers]:
        """Return the answers to start next, as many as fit into `free` of the `usable` rows and one prefill pass. A
        group that does not fit is started in parts."""
        starting: list[NewAnswers] = []
        while self._waiting:
            index, missing = self._waiting[0]
            count, prompt = min(len(missing), usable), self._prompts[index]
            width = max(len(prompt.tokens), *(len(new.prompt.tokens) for new in starting), 0)
            if free < count and free * 4 >= usable:  # start part of a large group rather than leave rows idle
                count = free
            if count > free or (starting and (len(starting) + 1) * width > PREFILL_TOKENS):
                break
            self._waiting.popleft()
            if missing[count:]:
                self._waiting.appendleft((index, missing[count:]))
            starting.append(NewAnswers(index, prompt, missing[:count]))
            self._running.update((index, number) for number in missing[:count])
            free -= count
        return starting

    def finish(self, index: int, number: int, completion: Completion) -> list[Completion] | None:
        """Add a completion to its group. Return the group, ordered by number, once it is complete."""
        self._running.remove((index, number))
        group = self._completions[index]
        group[number] = completion
        return [answer for _, answer in sorted(group.items())] if len(group) == self._group else None

    def restart_unfinished(self) -> None:
        """Schedule the running answers again. Finished ones are kept, because sampling is reproducible."""
        for index, answers in groupby(sorted(self._running), key=itemgetter(0)):
            self._waiting.appendleft((index, [number for _, number in answers]))
        self._running.clear()
