"""rollout by a decoder of its own on the training device: each prompt is read once, and no row waits for another.

A completion that ends leaves the batch, and the group of a new problem begins when there is room for it. What a row is
(its last token, its place, its cache) stays on the device; the host looks only now and then which rows have ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.machine.out_of_memory import is_out_of_memory, until_it_fits
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.collect import Sampler
from trainer.rollout.decoder.cuda_graphs import Steps, rounded_up
from trainer.rollout.decoder.forward import Forward
from trainer.rollout.decoder.weights import spare_bytes
from trainer.rollout.hf import evaluating

PREFILL_TOKENS = 4096  # read at once, padding included: the activations of a prompt are larger than its cache
PLACES = 16  # of a row come in multiples: what attention masks want on a card, and few new batches for longer prompts
STEPS_BETWEEN_LOOKS = {"cuda": 8}  # at a CPU looking is free


class DecodeSampler(Sampler):
    """Samples with the weights of the model that is being trained. At most `rows` completions are alive at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_tokens: Sequence[int],
        rows: int,
        say: limits.Say = limits.on_stderr,
        copies: bool = True,
    ) -> None:
        self.model = model
        self.copies = copies
        self.tokenizer = tokenizer
        self.stop_tokens = sorted(stop_tokens)
        self.rows = limits.Rows(rows, say)
        self._say = say
        self._keeps = True
        self.forward: Forward | None = None
        self.batch: Batch | None = None

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        limits.check_context(self.model, prompts, sampling.max_new_tokens)
        work, seed = Work([prompt.tokens for prompt in prompts], sampling.group), sampling.seed
        with evaluating(self.model):  # for layers that are called as they are
            while not work.is_done:
                rows = min(self.rows.limit, len(prompts) * sampling.group)
                try:
                    yield from self._decode(self._begin(rows, work.longest, replace(sampling, seed=seed)), work)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                if not work.is_done:  # not in the handler: its traceback keeps the tensors alive
                    work.restart()
                    self._make_room(rows)
                    seed += 1  # the same numbers again would repeat completions that are done
        self._put_away()

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """The first tokens of as many rows as there may be, in a cache as long as it may become."""

        def begin() -> None:
            work = Work([prompt.tokens for prompt in prompts], sampling.group)
            batch = self._begin(min(self.rows.limit, len(prompts) * sampling.group), work.longest, sampling)
            while begun := work.begin(batch.free, batch.room):
                batch.admit(begun)
            batch.advance()

        def make_room() -> None:
            self._make_room(min(self.rows.limit, len(prompts) * sampling.group))

        with evaluating(self.model):
            until_it_fits(begin, make_room)
        self._put_away()

    def _make_room(self, rows: int) -> None:
        """Half of the rows; where one is too many, the copies of the weights go."""
        self.batch = None
        if rows == 1 and self.copies:
            self.copies, self.forward = False, None
            self._say("out of memory with one completion: the rollout goes on without merged copies of the weights")
        else:
            self.rows.halve(rows)

    def give_back(self) -> bool:
        had = self.forward is not None
        self._keeps = False
        self._put_away()
        return had

    def _begin(self, rows: int, longest_prompt: int, sampling: Sampling) -> Batch:
        """The batch of the last call if it is large enough: memory that stays where it is, and captured graphs."""
        with torch.inference_mode():
            if self.forward is None:
                self.forward = Forward(self.model, self.copies)
            self.forward.refresh()
            places = rounded_up(longest_prompt + sampling.max_new_tokens, PLACES)
            size = Size(rows, places, sampling.max_new_tokens)
            if self.batch is None or not self.batch.has_room(size):
                size = Size(*map(max, size, self.batch.size)) if self.batch else size  # calls may take turns
                self.batch = None  # before the new one is made
                self.batch = Batch(self.forward, size, self.stop_tokens, self._say)
        self.batch.begin(rows, sampling)
        return self.batch

    def _decode(self, batch: Batch, work: Work) -> Iterator[tuple[int, list[Completion]]]:
        while not work.is_done:
            while begun := work.begin(batch.free, batch.room):
                batch.admit(begun)
                yield from self._take_ended(batch, work)  # a first token may be a stop token
            batch.advance()
            yield from self._take_ended(batch, work)

    def _take_ended(self, batch: Batch, work: Work) -> Iterator[tuple[int, list[Completion]]]:
        """The groups that are whole with what has ended."""
        for ended in batch.take_ended():
            if group := work.finish(ended.prompt, self._completion(ended)):
                yield ended.prompt, group

    def _completion(self, ended: Ended) -> Completion:
        text = self.tokenizer.decode(ended.tokens, skip_special_tokens=True)
        truncated = ended.tokens[-1] not in self.stop_tokens
        return Completion(tuple(ended.tokens), tuple(ended.logprobs), text, truncated)

    def _put_away(self) -> None:
        if not self._keeps:
            self.forward = self.batch = None
        elif self.batch is not None and self.batch.bytes > spare_bytes(self.batch.forward.device):
            self.batch = None


class Begun(NamedTuple):
    """So many completions of a prompt that begin together."""

    prompt: int
    tokens: Sequence[int]
    completions: int


class Ended(NamedTuple):
    prompt: int
    tokens: list[int]
    logprobs: list[float]


class Work:
    """What has not begun, what is under way, what is whole. Long prompts come first: if they do not fit, it shows."""

    def __init__(self, prompts: Sequence[Sequence[int]], group: int) -> None:
        self._prompts = prompts
        self._group = group
        by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        self._waiting = deque((index, group) for index in by_length)
        self._under_way: Counter[int] = Counter()
        self._completions: defaultdict[int, list[Completion]] = defaultdict(list)

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self._prompts)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._under_way.total()

    def begin(self, free: int, room: int) -> list[Begun]:
        """Groups that there are free rows for, as many as may be read at once; larger ones than `room` in parts."""
        begun: list[Begun] = []
        while self._waiting:
            index, missing = self._waiting[0]
            count, tokens = min(missing, room), self._prompts[index]
            width = max(len(tokens), *(len(one.tokens) for one in begun), 0)
            if free < count and free * 4 >= room:  # a part of it, so that a large group does not leave rows idle
                count = free
            if count > free or (begun and (len(begun) + 1) * width > PREFILL_TOKENS):
                break
            self._waiting.popleft()
            if missing > count:
                self._waiting.appendleft((index, missing - count))
            begun.append(Begun(index, tokens, count))
            self._under_way[index] += count
            free -= count
        return begun

    def finish(self, index: int, completion: Completion) -> list[Completion] | None:
        """The group, if this was what it lacked."""
        self._under_way[index] -= 1
        group = self._completions[index]
        group.append(completion)
        return group if len(group) == self._group else None

    def restart(self) -> None:
        """Groups that are torn begin anew as a whole: what they have would be the short ones of their answers."""
        torn = [index for index, group in self._completions.items() if len(group) < self._group]
        torn += [index for index, count in self._under_way.items() if count and index not in torn]
        self._waiting = deque((index, missing) for index, missing in self._waiting if index not in torn)
        self._waiting.extendleft((index, self._group) for index in torn)
        for index in torn:
            self._completions.pop(index, None)
        self._under_way.clear()


class Size(NamedTuple):
    rows: int
    places: int  # of the cache, for each row
    new_tokens: int


class Batch:
    """The completions that are being decoded: rows 0 to `alive` - 1 of buffers that are made once.

    A row that has ended is frozen: nothing of it moves until the host takes it out and the last row fills its place.
    """

    def __init__(self, forward: Forward, size: Size, stop_tokens: Sequence[int], say: limits.Say) -> None:
        self.forward, self.size, device = forward, size, forward.device
        rows, places, new_tokens = size
        self.cache_LRKTD = forward.cache(rows, places)
        self.mask_RT = torch.zeros(rows, places, dtype=forward.dtype, device=device)
        self.tokens_R, self.places_R, self.counts_R = torch.zeros(3, rows, dtype=torch.long, device=device)
        self.running_R = torch.zeros(rows, dtype=torch.bool, device=device)
        # a frozen row goes on writing behind its end, so there is one column more
        self.sampled_RN = torch.zeros(rows, new_tokens + 1, dtype=torch.long, device=device)
        self.logprobs_RN = torch.zeros(rows, new_tokens + 1, device=device)
        self.goes_on_V = torch.ones(forward.config.vocab_size, dtype=torch.bool, device=device)
        known = [token for token in stop_tokens if token < forward.config.vocab_size]  # a tokenizer may know more
        self.goes_on_V[torch.tensor(known, dtype=torch.long, device=device)] = False
        self.generator = torch.Generator(device)
        self.steps = Steps(self._step, self.generator, device, say)
        self.looks_every = STEPS_BETWEEN_LOOKS.get(device.type, 1)

    @property
    def bytes(self) -> int:
        return self.cache_LRKTD.numel() * self.cache_LRKTD.element_size()

    def has_room(self, wanted: Size) -> bool:
        return all(have >= want for have, want in zip(self.size, wanted, strict=True))

    def begin(self, rows: int, sampling: Sampling) -> None:
        self.room = rows
        self.owners: list[int] = []
        self.reach = 0  # the last place that any row has come to
        self.temperature, self.limit = sampling.temperature, sampling.max_new_tokens
        self.steps.kind = (sampling.temperature, sampling.max_new_tokens, self.forward.adapters, self.forward.addresses)
        self.generator.manual_seed(sampling.seed)

    @property
    def alive(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        return self.room - self.alive

    @torch.inference_mode()
    def admit(self, begun: Sequence[Begun]) -> None:
        """Read the prompts, and draw the first token of each of their completions."""
        device = self.forward.device
        lengths, counts = [len(one.tokens) for one in begun], [one.completions for one in begun]
        width = max(lengths)
        tokens_PT = torch.tensor([[*one.tokens, *[0] * (width - len(one.tokens))] for one in begun], device=device)
        lengths_P, counts_P = torch.tensor(lengths, device=device), torch.tensor(counts, device=device)
        rows = slice(self.alive, self.alive + sum(counts))
        self.cache_LRKTD[:, rows, :, width:].zero_()  # an earlier row may have left what is not a number
        logits_PV = self.forward.prefill(tokens_PT, lengths_P, self.cache_LRKTD[:, rows], counts_P)
        places_B = lengths_P.repeat_interleave(counts_P)
        self.places_R[rows], self.counts_R[rows], self.running_R[rows] = places_B, 0, True
        beyond_BT = torch.arange(self.size.places, device=device) >= places_B[:, None]
        self.mask_RT[rows] = torch.zeros_like(self.mask_RT[rows]).masked_fill_(beyond_BT, float("-inf"))
        self._record(logits_PV.repeat_interleave(counts_P, dim=0), rows)
        self.owners += [one.prompt for one in begun for _ in range(one.completions)]
        self.reach = max(self.reach, width)

    @torch.inference_mode()
    def advance(self) -> None:
        """One token more for each row, or several before the host looks again."""
        for _ in range(self.looks_every if self.alive else 0):
            self.steps(self.alive, self.size.rows, min(self.reach + 1, self.size.places), self.size.places)
            self.reach += 1

    def _step(self, rows: int, width: int) -> None:
        alive, places_B = slice(0, rows), self.places_R[:rows]
        self.mask_RT[alive].scatter_(1, places_B[:, None], 0.0)
        logits_BV = self.forward.step(self.tokens_R[alive], places_B, self.mask_RT[alive, :width], self.cache_LRKTD)
        self._record(logits_BV, alive)
        places_B += self.running_R[alive]

    def _record(self, logits_BV: Tensor, rows: slice) -> None:
        tokens_B, logprobs_B = draw(logits_BV, self.temperature, self.generator)
        counts_B, running_B = self.counts_R[rows], self.running_R[rows]
        self.tokens_R[rows] = tokens_B
        self.sampled_RN[rows].scatter_(1, counts_B[:, None], tokens_B[:, None])
        self.logprobs_RN[rows].scatter_(1, counts_B[:, None], logprobs_B[:, None])
        counts_B += running_B
        running_B &= self.goes_on_V[tokens_B]
        running_B &= counts_B < self.limit

    @torch.inference_mode()
    def take_ended(self) -> list[Ended]:
        running = self.running_R[: self.alive]
        if bool(running.all()):
            return []
        rows = (~running).nonzero()[:, 0]
        lengths = self.counts_R[rows].tolist()
        tokens, logprobs = self.sampled_RN[rows].tolist(), self.logprobs_RN[rows].tolist()
        ended = rows.tolist()
        taken = [
            Ended(self.owners[row], tokens[i][:length], logprobs[i][:length])
            for i, (row, length) in enumerate(zip(ended, lengths, strict=True))
        ]
        self._fill_holes(ended)
        return taken

    def _fill_holes(self, ended: Sequence[int]) -> None:
        """The last rows that go on move to where rows have ended."""
        left = self.alive - len(ended)
        gone = set(ended)
        holes = [row for row in ended if row < left]
        movers = [row for row in range(left, self.alive) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self.owners[hole] = self.owners[mover]
        del self.owners[left:]
        if holes:
            to, source = (torch.tensor(rows, device=self.forward.device) for rows in (holes, movers))
            parts = (self.tokens_R, self.places_R, self.counts_R, self.running_R, self.sampled_RN, self.logprobs_RN)
            for part in (*parts, self.mask_RT):
                part[to] = part[source]
        used = self.cache_LRKTD[..., : self.reach, :]
        for hole, mover in zip(holes, movers, strict=True):  # a plain copy of each is four times faster than an index
            used[:, hole].copy_(used[:, mover])
        self.running_R[left:] = False
        self.reach = int(self.places_R[:left].max()) if left else 0


def draw(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token of each row (the likeliest at temperature 0), and its log-prob in the distribution drawn from.

    Where a uniform number falls among the summed probabilities: it takes one number a row instead of one a token of the
    vocabulary. In double, because a token of probability 1e-7 is lost in the rounding of a sum near 1.
    """
    probabilities_BV = (logits_BV.float() / (temperature or 1.0)).softmax(dim=-1)
    if temperature == 0:
        tokens_B1 = logits_BV.argmax(dim=-1, keepdim=True)
    else:
        summed_BV = probabilities_BV.cumsum(dim=-1, dtype=torch.double)
        uniform_B1 = torch.rand(len(logits_BV), 1, dtype=torch.double, device=logits_BV.device, generator=generator)
        # in (0, sum], so that a token of probability 0 is never drawn
        tokens_B1 = torch.searchsorted(summed_BV, (1 - uniform_B1) * summed_BV[:, -1:])
        tokens_B1.clamp_(max=logits_BV.shape[1] - 1)  # logits that are not numbers have no place
    return tokens_B1[:, 0], probabilities_BV.gather(-1, tokens_B1)[:, 0].log()
