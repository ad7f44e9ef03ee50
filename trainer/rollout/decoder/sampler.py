"""rollout with Octet's own decoder: continuous batching on the training device.

A finished answer leaves the batch immediately, and those to the next prompts are added when rows are free. The state of
a row (last token, position, cache) stays on the device; on a card the host checks only every few steps which rows have
finished. On a CPU, where a step takes longer with more rows, the answers to a prompt share a row while they are equal.

The records of an answer, from prompt to completion:

    NewAnswers   answers to one prompt that start together      schedule.py decides when
    OpenAnswer   all tokens so far, and the environment         rows.py decodes it, turns.py adds turns and replies
    Written      the tokens and log-probs of one turn           turns.py
    Completion   the complete answer                            records.py
"""

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Any

import torch

from trainer.machine.out_of_memory import is_out_of_memory, until_it_fits
from trainer.plan.planner import PLACES
from trainer.records import Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.decoder.forward import Forward
from trainer.rollout.decoder.rows import Batch, Size
from trainer.rollout.decoder.schedule import Scheduler
from trainer.rollout.decoder.weights import spare_bytes
from trainer.rollout.hf import OwnSampler, evaluating
from trainer.rollout.interface import Groups

IDLE = 1 / 8  # this share of the rows must be free before a prompt is read, which takes as long as a decode step


class DecodeSampler(OwnSampler):
    """Samples with Octet's own forward pass. Without `copies`, it calls the linear layers of the model."""

    def __init__(self, *arguments: Any, copies: bool = True, weights: str = "same", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.copies, self.weights = copies, weights
        self._keeps_memory = True
        self.forward: Forward | None = None
        self.batch: Batch | None = None
        self.on_tokens: Callable[[list[int]], None] | None = None  # called with the tokens of the first row so far

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        limits.check_context(self.context_limit(), prompts, sampling.max_new_tokens)
        yield from self.decode_all(Scheduler(prompts, sampling.group), len(prompts) * sampling.group, sampling)

    def decode_all(self, scheduler: Scheduler, answers: int, sampling: Sampling) -> Groups:
        """Decode the answers that a scheduler starts, at most `answers` at a time, until it is finished."""
        with evaluating(self.model):  # for layers that are called, not copied
            while not scheduler.is_finished:
                rows = min(self.rows, answers)
                try:
                    batch = self._prepare(rows, scheduler.longest_prompt, sampling)
                    yield from self._decode(batch, scheduler)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                if not scheduler.is_finished:  # outside the handler, whose traceback would keep the tensors alive
                    scheduler.restart_unfinished()
                    self.turns.abandon(self.batch.dialogues if self.batch else [])
                    self._make_room(rows)
        self._release_memory()

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Decode the first tokens of as many rows as possible, with a cache for the longest possible answers."""
        answers = len(prompts) * sampling.group

        def begin() -> None:
            scheduler = Scheduler(prompts, sampling.group)
            batch = self._prepare(min(self.rows, answers), scheduler.longest_prompt, sampling)
            batch.shares, batch.least_shared = False, inf  # in the worst case nothing is shared
            while starting := scheduler.schedule(batch.free, batch.usable_rows):
                batch.add(starting)
            batch.decode()

        with evaluating(self.model):
            until_it_fits(begin, lambda: self._make_room(min(self.rows, answers)))
        self._release_memory()

    def _make_room(self, rows: int) -> None:
        """Halve the number of rows. If a single row does not fit, drop the copies of the weights."""
        self.batch = None
        if rows == 1 and self.copies:
            self.copies, self.forward = False, None
            self._say("out of memory with one completion: the rollout continues without merged copies of the weights")
        else:
            self.halve_rows(rows)

    def give_back(self) -> bool:
        had_memory = self.forward is not None
        self._keeps_memory = False
        self._release_memory()
        return had_memory

    def _prepare(self, rows: int, longest_prompt: int, sampling: Sampling) -> Batch:
        """Return an empty batch, which is the previous one, with its captured graphs, if that is large enough."""
        with torch.inference_mode():
            if self.forward is None:
                self.forward = Forward(self.model, self.copies, self.weights)
            self.forward.refresh()
            places = ceil((longest_prompt + sampling.max_new_tokens) / PLACES) * PLACES
            size = Size(rows, places, sampling.max_new_tokens)
            if self.batch is not None:
                size = Size(*map(max, size, self.batch.size))  # enough for calls that alternate
            if self.batch is None or self.batch.size != size:
                self.batch = None  # free the old batch first
                self.batch = Batch(self.forward, size, self.turns, self._say)
        self.batch.reset(rows, sampling)
        return self.batch

    def _decode(self, batch: Batch, scheduler: Scheduler) -> Groups:
        while not scheduler.is_finished:
            begins = not batch.active or batch.free >= IDLE * batch.usable_rows
            while begins and (starting := scheduler.schedule(batch.free, batch.usable_rows)):
                batch.add(starting)
                yield from self._finish(batch, scheduler)  # the first token may be a stop token
            if not batch.active:
                continue
            batch.decode()
            if self.on_tokens:
                self.on_tokens(batch.sampled_RN[0, : int(batch.counts_R[0])].tolist())
            yield from self._finish(batch, scheduler)

    def _finish(self, batch: Batch, scheduler: Scheduler) -> Groups:
        """Remove finished answers from the batch, and yield the groups that they complete."""
        done = {dialogue: self.turns.add(dialogue, *turn) for dialogue, turn in batch.ended()}
        if batch.waiting:
            replied = self.turns.answered(batch.waiting, batch.is_running)
            done |= {dialogue: self.turns.take_reply(dialogue) for dialogue in replied}
            batch.resume([dialogue for dialogue in replied if done[dialogue] is None])
        finished = {dialogue: completion for dialogue, completion in done.items() if completion is not None}
        for dialogue in batch.take(finished):
            if group := scheduler.finish(dialogue.index, dialogue.number, finished[dialogue]):
                yield dialogue.index, group

    def _release_memory(self) -> None:
        if not self._keeps_memory:
            self.forward = self.batch = None
        elif self.batch is not None and self.batch.cache.bytes > spare_bytes(self.batch.forward.device):
            self.batch = None
