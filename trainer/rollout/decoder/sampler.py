"""rollout with Octet's own decoder: continuous batching on the training device.

Each prompt is read once for its whole group. A finished sequence leaves the batch at once, and the sequences of the
next request are added when there are free rows. The state of a row (last token, position, cache) stays on the device;
the host checks only every few steps which rows have finished. On a CPU, answers to a prompt share a row for as long as
they are the same, because there a step takes longer the more rows it has.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.machine.out_of_memory import is_out_of_memory, until_it_fits
from trainer.plan.planner import PLACES, PREFILL_TOKENS
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.collect import Sampler
from trainer.rollout.decoder.cuda_graphs import DecodeStep, rounded_up
from trainer.rollout.decoder.forward import Forward
from trainer.rollout.decoder.weights import spare_bytes
from trainer.rollout.draw import draw, uniforms
from trainer.rollout.hf import evaluating
from trainer.rollout.stop import Stops
from trainer.rollout.turns import OpenAnswer, TurnTaking

IDLE = 1 / 8  # of the rows have to be free before prompts are read, because reading one takes as long as a decode step
DRAWN = -1  # no token is forced
STEPS_PER_CHECK = {"cuda": 8}  # elsewhere 1: on a CPU a check costs nothing


class DecodeSampler(Sampler):
    """Samples with the weights of the model that is being trained, at most `rows` completions at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_tokens: Sequence[int],
        rows: int,
        say: limits.Say = limits.on_stderr,
        copies: bool = True,
        stop_strings: Sequence[str] = (),
        turns: Callable[[Stops], TurnTaking] = TurnTaking,
    ) -> None:
        self.model = model
        self.copies = copies
        self.stops = Stops(tokenizer, stop_tokens, stop_strings)
        self.turns = turns(self.stops)
        self.rows = limits.RowLimit(rows, say)
        self._say = say
        self._keeps_memory = True
        self.forward: Forward | None = None
        self.batch: Batch | None = None
        self.on_tokens: Callable[[list[int]], None] | None = None  # hears what the first row has so far

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        limits.check_context(self.model, prompts, sampling.max_new_tokens)
        scheduler = Scheduler(prompts, sampling.group)
        with evaluating(self.model):  # for layers that are called as they are
            while not scheduler.is_finished:
                rows = min(self.rows.limit, len(prompts) * sampling.group)
                try:
                    batch = self._prepare(rows, scheduler.longest_prompt, sampling)
                    yield from self._decode(batch, scheduler)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                if not scheduler.is_finished:  # not in the handler, where the traceback keeps the tensors alive
                    scheduler.restart_unfinished()
                    self.turns.abandon(self.batch.dialogues if self.batch else [])
                    self._make_room(rows)
        self._release_memory()

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Decode the first tokens of as many rows as possible, in a cache of the largest size it may reach."""

        def begin() -> None:
            scheduler = Scheduler(prompts, sampling.group)
            rows = min(self.rows.limit, len(prompts) * sampling.group)
            batch = self._prepare(rows, scheduler.longest_prompt, sampling)
            batch.shares = False  # at its largest, no two answers are the same
            while requests := scheduler.schedule(batch.free, batch.usable_rows):
                batch.add(requests)
            batch.decode()

        def make_room() -> None:
            self._make_room(min(self.rows.limit, len(prompts) * sampling.group))

        with evaluating(self.model):
            until_it_fits(begin, make_room)
        self._release_memory()

    def _make_room(self, rows: int) -> None:
        """Halve the number of rows. If a single row does not fit, drop the copies of the weights."""
        self.batch = None
        if rows == 1 and self.copies:
            self.copies, self.forward = False, None
            self._say("out of memory with one completion: the rollout goes on without merged copies of the weights")
        else:
            self.rows.halve(rows)

    def give_back(self) -> bool:
        had_memory = self.forward is not None
        self._keeps_memory = False
        self._release_memory()
        return had_memory

    def _prepare(self, rows: int, longest_prompt: int, sampling: Sampling) -> Batch:
        """Return an empty batch. The previous one is reused if it is large enough: its memory and its captured graphs
        stay valid."""
        with torch.inference_mode():
            if self.forward is None:
                self.forward = Forward(self.model, self.copies)
            self.forward.refresh()
            places = rounded_up(longest_prompt + sampling.max_new_tokens, PLACES)
            size = Size(rows, places, sampling.max_new_tokens)
            if self.batch is None or not self.batch.has_room(size):
                size = Size(*map(max, size, self.batch.size)) if self.batch else size  # for calls that alternate
                self.batch = None  # free the old one first
                self.batch = Batch(self.forward, size, self.turns, self._say)
        self.batch.reset(rows, sampling)
        return self.batch

    def _decode(self, batch: Batch, scheduler: Scheduler) -> Iterator[tuple[int, list[Completion]]]:
        while not scheduler.is_finished:
            begins = not batch.active or batch.free >= IDLE * batch.usable_rows
            while begins and (requests := scheduler.schedule(batch.free, batch.usable_rows)):
                batch.add(requests)
                yield from self._finish(batch, scheduler)  # the first token may be a stop token
            batch.decode()
            if self.on_tokens:
                self.on_tokens(batch.sampled_RN[0, : int(batch.counts_R[0])].tolist())
            yield from self._finish(batch, scheduler)

    def _finish(self, batch: Batch, scheduler: Scheduler) -> Iterator[tuple[int, list[Completion]]]:
        """Take finished answers out of the batch and yield the groups that they complete."""
        done = {}
        for dialogue, tokens, logprobs in batch.ended():
            done[dialogue] = self.turns.add(dialogue, tokens, logprobs)
        if batch.waiting:
            for dialogue in self.turns.answered(batch.waiting, batch.is_running):
                done[dialogue] = self.turns.hear(dialogue)
                if done[dialogue] is None:
                    batch.go_on(dialogue)
        finished = {dialogue: completion for dialogue, completion in done.items() if completion is not None}
        for answer, dialogue in batch.take(finished):
            if group := scheduler.finish(answer, finished[dialogue]):
                yield answer.prompt_index, group

    def _release_memory(self) -> None:
        if not self._keeps_memory:
            self.forward = self.batch = None
        elif self.batch is not None and self.batch.bytes > spare_bytes(self.batch.forward.device):
            self.batch = None


class Request(NamedTuple):
    """Answers to one prompt that start together."""

    prompt_index: int
    prompt: Prompt
    numbers: Sequence[int]  # of the answers in their group


class AnswerId(NamedTuple):
    prompt_index: int
    number: int  # in the group


class RowMember(NamedTuple):
    """An answer that is being decoded, with the random numbers of its tokens."""

    answer: AnswerId
    dialogue: OpenAnswer
    uniform_N: Sequence[float]


class EndedTurn(NamedTuple):
    dialogue: OpenAnswer
    tokens: list[int]
    logprobs: list[float]


class Scheduler:
    """Decides which prompts are read next and collects the completions of each group.

    The longest prompts come first, so that memory that does not suffice for them runs out early.
    """

    def __init__(self, prompts: Sequence[Prompt], group: int) -> None:
        self._prompts = prompts
        self._group = group
        by_length = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].tokens))
        self._waiting: deque[tuple[int, Sequence[int]]] = deque((index, range(group)) for index in by_length)
        self._running: set[AnswerId] = set()
        self._completions: defaultdict[int, dict[int, Completion]] = defaultdict(dict)

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.tokens) for prompt in self._prompts)

    @property
    def is_finished(self) -> bool:
        return not self._waiting and not self._running

    def schedule(self, free: int, room: int) -> list[Request]:
        """Return requests for `free` rows of the `room` in a batch, as many as may be read in one pass.

        A group that is larger than the batch is split.
        """
        requests: list[Request] = []
        while self._waiting:
            index, missing = self._waiting[0]
            count, prompt = min(len(missing), room), self._prompts[index]
            width = max(len(prompt.tokens), *(len(request.prompt.tokens) for request in requests), 0)
            if free < count and free * 4 >= room:  # start a part of a large group rather than leave rows idle
                count = free
            if count > free or (requests and (len(requests) + 1) * width > PREFILL_TOKENS):
                break
            self._waiting.popleft()
            if missing[count:]:
                self._waiting.appendleft((index, missing[count:]))
            requests.append(Request(index, prompt, missing[:count]))
            self._running.update(AnswerId(index, number) for number in missing[:count])
            free -= count
        return requests

    def finish(self, answer: AnswerId, completion: Completion) -> list[Completion] | None:
        """Add a completion to the group of its prompt. Return the group, in the order of its numbers, when complete."""
        self._running.remove(answer)
        group = self._completions[answer.prompt_index]
        group[answer.number] = completion
        return [group[number] for number in sorted(group)] if len(group) == self._group else None

    def restart_unfinished(self) -> None:
        """Sample the answers again that were being decoded. They come out the same, so finished ones are kept."""
        for index, answers in groupby(sorted(self._running), key=attrgetter("prompt_index")):
            self._waiting.appendleft((index, [answer.number for answer in answers]))
        self._running.clear()


class Size(NamedTuple):
    rows: int
    places: int  # length of the cache of each row
    new_tokens: int


class Batch:
    """The sequences that are being decoded, in rows 0 to `active` - 1 of buffers that are allocated once.

    A row has one answer, or several that are the same so far if the batch `shares` its rows. A row whose turn has ended
    is frozen: nothing in it changes until the host takes it out and moves the last row there, or lets it go on behind a
    reply. The tokens of a reply are forced: they take the place of those drawn.
    """

    def __init__(self, forward: Forward, size: Size, turns: TurnTaking, say: limits.Say) -> None:
        self.forward, self.size, self.turns, self.stops, device = forward, size, turns, turns.stops, forward.device
        rows, places, new_tokens = size
        self.cache_LRKTD = forward.allocate_cache(rows, places)
        self.mask_RT = torch.zeros(rows, places, dtype=forward.dtype, device=device)
        self.tokens_R, self.places_R, self.counts_R, self.ends_R = torch.zeros(4, rows, dtype=torch.long, device=device)
        self.hidden_RH = torch.zeros(rows, forward.config.hidden_size, dtype=forward.dtype, device=device)
        self.running_R = torch.zeros(rows, dtype=torch.bool, device=device)
        # one column more, because a frozen row goes on writing behind its end
        self.sampled_RN = torch.zeros(rows, new_tokens + 1, dtype=torch.long, device=device)
        self.forced_RN = torch.full_like(self.sampled_RN, DRAWN) if turns.environments else None
        self.logprobs_RN = torch.zeros(rows, new_tokens + 1, device=device)
        self.continues_V = torch.ones(forward.config.vocab_size, dtype=torch.bool, device=device)
        known = [token for token in self.stops.tokens if token < forward.config.vocab_size]  # a tokenizer may have more
        self.continues_V[torch.tensor(known, dtype=torch.long, device=device)] = False
        self.uniform_RN = torch.zeros(rows, new_tokens + 1, dtype=torch.double, device=device)
        self.decode_step = DecodeStep(device, say)
        self.steps_per_check = STEPS_PER_CHECK.get(device.type, 1)

    @property
    def bytes(self) -> int:
        return self.cache_LRKTD.numel() * self.cache_LRKTD.element_size()

    def has_room(self, wanted: Size) -> bool:
        return all(have >= want for have, want in zip(self.size, wanted, strict=True))

    def reset(self, rows: int, sampling: Sampling) -> None:
        """Remove all sequences. From now on at most `rows` rows are used."""
        self.usable_rows = rows
        # the host sees each token then; an environment may reply to equal answers differently
        self.shares = self.forward.device.type == "cpu" and self.steps_per_check == 1 and not self.turns.environments
        self.members: list[list[RowMember]] = []  # of each active row
        self.sampling = sampling
        self.longest = 0  # tokens of the longest sequence
        self.temperature, self.limit = sampling.temperature, sampling.max_new_tokens
        self.decode_step.depends_on = (self.temperature, self.forward.adapters, self.forward.addresses)

    @property
    def active(self) -> int:
        return len(self.members)

    @property
    def dialogues(self) -> list[OpenAnswer]:
        """Return the first dialogue of each row. The others are the same so far."""
        return [row[0].dialogue for row in self.members]

    @property
    def free(self) -> int:
        """Return how many answers can be added, so that each could have a row of its own."""
        return self.usable_rows - sum(map(len, self.members))

    @property
    def waiting(self) -> list[OpenAnswer]:
        """Return the answers that wait for a reply."""
        return [dialogue for dialogue in self.dialogues if dialogue.reply is not None]

    @property
    def is_running(self) -> bool:
        return len(self.waiting) < self.active

    @torch.inference_mode()
    def add(self, requests: Sequence[Request]) -> None:
        """Read the prompts and sample the first token of each completion."""
        device = self.forward.device
        prompts = [request.prompt.tokens for request in requests]
        members = [self._members(request) for request in requests]
        groups = [[group] if self.shares else [[one] for one in group] for group in members]  # rows of each prompt
        lengths, counts = [len(tokens) for tokens in prompts], [len(group) for group in groups]
        width = max(lengths)
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in prompts]
        lengths_P, counts_P = torch.tensor(lengths, device=device), torch.tensor(counts, device=device)
        rows = slice(self.active, self.active + sum(counts))
        self.members += [row for group in groups for row in group]
        self.cache_LRKTD[:, rows, :, width:].zero_()  # an earlier sequence may have left NaN
        cache_LBKTD = self.cache_LRKTD[:, rows]
        logits_PV = self.forward.prefill(torch.tensor(padded, device=device), lengths_P, cache_LBKTD, counts_P)
        places_B = lengths_P.repeat_interleave(counts_P)
        self.places_R[rows], self.counts_R[rows], self.running_R[rows] = places_B, 0, True
        beyond_BT = torch.arange(self.size.places, device=device) >= places_B[:, None]
        self.mask_RT[rows] = torch.zeros_like(self.mask_RT[rows]).masked_fill_(beyond_BT, float("-inf"))
        if self.temperature and not self.shares:
            numbers = [row[0].uniform_N for row in self.members[rows]]
            self.uniform_RN[rows, : self.limit] = torch.tensor(numbers, dtype=torch.double, device=device)
        self.ends_R[rows] = torch.tensor([dialogue.end for dialogue in self.dialogues[rows]], device=device)
        if self.forced_RN is not None:
            self.forced_RN[rows] = DRAWN
        self._sample(logits_PV.repeat_interleave(counts_P, dim=0), rows, width)
        self.longest = max(self.longest, width)

    def _members(self, request: Request) -> list[RowMember]:
        return [
            RowMember(
                AnswerId(request.prompt_index, number),
                self.turns.begin(request.prompt, number, self.sampling),
                uniforms(self.sampling, request.prompt, number) if self.temperature else [0.0] * self.limit,
            )
            for number in request.numbers
        ]

    @torch.inference_mode()
    def decode(self) -> None:
        """Sample one more token for each row, or several where checks are rare."""
        for _ in range(self.steps_per_check if self.is_running else 0):
            width = min(self.longest + 1, self.size.places)
            if self.forward.embeds_on_host:  # not in the captured step, which cannot wait for the host
                self.hidden_RH[: self.active] = self.forward.embed(self.tokens_R[: self.active])
            self.decode_step(self._step, self.active, self.size.rows, width, self.size.places)
            self.longest += 1

    def _step(self, rows: int, width: int) -> None:
        active, places_B = slice(0, rows), self.places_R[:rows]
        self.mask_RT[active].scatter_(1, places_B[:, None], 0.0)
        hidden_BH = self.hidden_RH[active] if self.forward.embeds_on_host else self.forward.embed(self.tokens_R[active])
        logits_BV = self.forward.step(hidden_BH, places_B, self.mask_RT[active, :width], self.cache_LRKTD)
        places_B += self.running_R[active]  # a row that ends now stops at the place of its last token
        self._sample(logits_BV, active, width)

    def _sample(self, logits_BV: Tensor, rows: slice, width: int) -> None:
        if self.shares:
            tokens_B, logprobs_B = self._draw_apart(logits_BV, rows, width)
            rows = slice(rows.start, rows.start + len(tokens_B))
        else:
            uniform_B1 = self.uniform_RN[rows].gather(1, self.counts_R[rows, None])
            tokens_B, logprobs_B = (drawn_B1[:, 0] for drawn_B1 in draw(logits_BV, self.temperature, uniform_B1))
        counts_B, running_B = self.counts_R[rows], self.running_R[rows]
        is_drawn_B: Tensor | bool = True
        if self.forced_RN is not None:
            forced_B = self.forced_RN[rows].gather(1, counts_B[:, None])[:, 0]
            is_drawn_B = forced_B == DRAWN
            tokens_B = tokens_B.where(is_drawn_B, forced_B)
        self.tokens_R[rows] = tokens_B
        self.sampled_RN[rows].scatter_(1, counts_B[:, None], tokens_B[:, None])
        self.logprobs_RN[rows].scatter_(1, counts_B[:, None], logprobs_B[:, None])
        counts_B += running_B
        running_B &= self.continues_V[tokens_B] if is_drawn_B is True else self.continues_V[tokens_B] | ~is_drawn_B
        running_B &= counts_B < self.ends_R[rows]

    def _draw_apart(self, logits_BV: Tensor, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """Draw a token for each answer, and give answers that are no longer the same rows of their own.

        Return the token of each row and its log-prob."""
        members, counts = self.members[rows], self.counts_R[rows].tolist()
        numbers = [[one.uniform_N[count] for one in row] for row, count in zip(members, counts, strict=True)]
        most = max(map(len, members))
        padded = [[*row, *row[:1] * (most - len(row))] for row in numbers]  # the same number draws the same token
        tokens_BG, logprobs_BG = draw(logits_BV, self.temperature, torch.tensor(padded, dtype=torch.double))
        moved = self._split(tokens_BG, rows.start)
        if not moved:
            return tokens_BG[:, 0], logprobs_BG[:, 0]
        new = range(rows.start + len(members), self.active)
        self.cache_LRKTD[:, new.start : new.stop, :, width:].zero_()  # as in `add`
        self._copy_rows([rows.start + row for row, _ in moved], new, width)
        rows_M, places_M = torch.tensor(moved).T
        tokens_B = torch.cat((tokens_BG[:, 0], tokens_BG[rows_M, places_M]))
        return tokens_B, torch.cat((logprobs_BG[:, 0], logprobs_BG[rows_M, places_M]))

    def _split(self, tokens_BG: Tensor, start: int) -> list[tuple[int, int]]:
        """Move answers whose token differs from that of the first answer in their row to new rows at the end. Return
        where, in `tokens_BG`, the first answer of each new row stands."""
        moved = []
        for row in (tokens_BG != tokens_BG[:, :1]).any(dim=1).nonzero()[:, 0].tolist():
            members, places_of = self.members[start + row], defaultdict(list)
            for place, token in zip(range(len(members)), tokens_BG[row].tolist()):  # without the padding
                places_of[token].append(place)
            stay, *leave = places_of.values()
            self.members[start + row] = [members[place] for place in stay]
            self.members += [[members[place] for place in places] for places in leave]
            moved += [(row, places[0]) for places in leave]
        return moved

    def _copy_rows(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy rows over others, with the first `width` places of their caches."""
        if not sources:
            return
        source, target = (torch.tensor([*rows], device=self.forward.device) for rows in (sources, targets))
        state = [self.tokens_R, self.places_R, self.counts_R, self.ends_R, self.running_R]
        state += [self.sampled_RN, self.logprobs_RN, self.uniform_RN, self.mask_RT]
        for buffer in [*state, self.forced_RN] if self.forced_RN is not None else state:
            buffer[target] = buffer[source]
        for one, other in zip(sources, targets, strict=True):  # copying row by row is four times faster than an index
            self.cache_LRKTD[:, other, :, :width].copy_(self.cache_LRKTD[:, one, :, :width])

    @torch.inference_mode()
    def ended(self) -> list[EndedTurn]:
        """Return the turns that have ended since the last call."""
        if self.stops.strings and self.active:
            self._freeze_at_strings()
        running = self.running_R[: self.active]
        if bool(running.all()):
            return []
        waits = [dialogue.reply is not None for dialogue in self.dialogues]
        rows = (~running).nonzero()[:, 0]
        counts, sampled = self.counts_R[rows].tolist(), self.sampled_RN[rows].tolist()
        logprobs = self.logprobs_RN[rows].tolist()
        ended = []
        for i, row in enumerate(rows.tolist()):
            for member in self.members[row] if not waits[row] else []:
                turn = slice(len(member.dialogue.tokens), counts[i])
                ended.append(EndedTurn(member.dialogue, sampled[i][turn], logprobs[i][turn]))
        return ended

    def _freeze_at_strings(self) -> None:
        """Freeze the rows in whose newest tokens, of this turn, a stop string is complete."""
        counts_B, width = self.counts_R[: self.active], self.stops.window + self.steps_per_check
        newest_BT = (counts_B[:, None] - width + torch.arange(width, device=counts_B.device)).clamp(min=0)
        tokens_BT = self.sampled_RN[: self.active].gather(1, newest_BT).tolist()
        written = [
            min(width, max(0, count - len(one.tokens)))
            for count, one in zip(counts_B.tolist(), self.dialogues, strict=True)
        ]
        ended = [self.stops.is_in(row[width - count :]) for row, count in zip(tokens_BT, written, strict=True)]
        self.running_R[: self.active] &= ~torch.tensor(ended, device=counts_B.device)

    @torch.inference_mode()
    def go_on(self, dialogue: OpenAnswer) -> None:
        """Let a row read a reply, token by token, and write another turn. The last token of its turn is read first."""
        assert self.forced_RN is not None, "an environment has replied"
        row, end = self.dialogues.index(dialogue), len(dialogue.tokens)
        heard = next(count for count, is_written in enumerate(reversed(dialogue.written)) if is_written)
        begun, place = end - heard, len(dialogue.prompt.tokens) + end - heard - 1
        device = self.forward.device
        self.tokens_R[row], self.places_R[row], self.counts_R[row] = dialogue.tokens[begun - 1], place, begun
        self.forced_RN[row, begun:end] = torch.tensor(dialogue.tokens[begun:], dtype=torch.long, device=device)
        # a row may have gone on for some steps behind a stop string
        self.mask_RT[row] = torch.zeros_like(self.mask_RT[row]).masked_fill_(
            torch.arange(self.size.places, device=device) >= place, float("-inf")
        )
        self.ends_R[row], self.running_R[row] = dialogue.end, True

    @torch.inference_mode()
    def take(self, finished: Container[OpenAnswer]) -> list[tuple[AnswerId, OpenAnswer]]:
        """Remove answers from the batch and return them, row by row."""
        rows = [row for row, dialogue in enumerate(self.dialogues) if dialogue in finished]
        taken = [(one.answer, one.dialogue) for row in rows for one in self.members[row]]
        if rows:
            self._compact(rows)
        return taken

    def _compact(self, finished: Sequence[int]) -> None:
        """Move the last running rows to the rows that have finished."""
        left, gone = self.active - len(finished), set(finished)
        holes = [row for row in finished if row < left]
        movers = [row for row in range(left, self.active) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self.members[hole] = self.members[mover]
        del self.members[left:]
        self._copy_rows(movers, holes, self.longest)
        self.running_R[left:] = False
        self.longest = int(self.places_R[:left].max()) if left else 0
