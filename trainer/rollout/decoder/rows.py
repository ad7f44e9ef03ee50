"""The rows of a batch that is being decoded: their state on the device, and the answers in them."""

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.records import Sampling
from trainer.rollout import limits
from trainer.rollout.decoder.cuda_graphs import DecodeStep
from trainer.rollout.decoder.forward import Forward
from trainer.rollout.decoder.schedule import NewAnswers
from trainer.rollout.draw_tokens import draw, uniforms
from trainer.rollout.turns import OpenAnswer, TurnTaking, Written

DRAWN = -1  # in place of a forced token: the token is drawn
LEAST_SHARED = 64  # a common prefix of at least this many tokens is read in a separate pass
STEPS_PER_CHECK = {"cuda": 8}  # 1 on other devices: on a CPU a check costs nothing


class Size(NamedTuple):
    rows: int
    places: int  # length of the cache of each row
    new_tokens: int


class Batch:
    """The sequences that are being decoded, in rows 0 to `active` - 1 of buffers that are allocated once.

    A row holds one answer, or several answers that are equal so far if the batch `shares` its rows. A row whose turn
    has ended is frozen: its state does not change until the host removes the row, and moves the last row into its
    place, or resumes it after a reply. The tokens of a reply are forced: they replace the drawn ones.
    """

    def __init__(self, forward: Forward, size: Size, turns: TurnTaking, say: limits.Say) -> None:
        self.forward, self.size, self.turns, device = forward, size, turns, forward.device
        rows, places, new_tokens = size
        self.cache = forward.allocate_cache(rows, places)
        self.mask_RT = torch.zeros(rows, places, dtype=forward.dtype, device=device)
        self.tokens_R, self.places_R, self.counts_R, self.ends_R = torch.zeros(4, rows, dtype=torch.long, device=device)
        self.hidden_RH = torch.zeros(rows, forward.config.hidden_size, dtype=forward.dtype, device=device)
        self.running_R = torch.zeros(rows, dtype=torch.bool, device=device)
        # one more column, because a frozen row keeps writing after its end
        self.sampled_RN = torch.zeros(rows, new_tokens + 1, dtype=torch.long, device=device)
        self.forced_RN = torch.full_like(self.sampled_RN, DRAWN) if turns.environments else None
        self.logprobs_RN = torch.zeros(rows, new_tokens + 1, device=device)
        self.continues_V = torch.ones(forward.config.vocab_size, dtype=torch.bool, device=device)
        # a tokenizer may have more tokens than the model
        self.continues_V[[token for token in turns.stops.tokens if token < forward.config.vocab_size]] = False
        self.uniform_RN = torch.zeros(rows, new_tokens + 1, dtype=torch.double, device=device)
        self.decode_step = DecodeStep(device, say)
        # a recurrent state cannot return to the place of a stop string that the host finds some steps later
        needs_states = self.cache.states_LR and turns.environments and turns.stops.strings
        self.steps_per_check = 1 if needs_states else STEPS_PER_CHECK.get(device.type, 1)

    def reset(self, rows: int, sampling: Sampling) -> None:
        """Remove all sequences, and use at most `rows` rows from now on."""
        self.usable_rows = rows
        # sharing needs a check after each token; an environment may reply differently to equal answers
        self.shares = self.forward.device.type == "cpu" and self.steps_per_check == 1 and not self.turns.environments
        self.least_shared: float = LEAST_SHARED
        self.members: list[list[OpenAnswer]] = []  # the answers in each active row
        self.sampling = sampling
        self.longest = 0  # length of the longest sequence
        self.temperature, self.limit = sampling.temperature, sampling.max_new_tokens
        self.decode_step.depends_on = (self.temperature, self.forward.adapters, self.forward.addresses)

    @property
    def active(self) -> int:
        return len(self.members)

    @property
    def dialogues(self) -> list[OpenAnswer]:
        """Return the first answer of each row. Others in the same row are equal so far."""
        return [row[0] for row in self.members]

    @property
    def free(self) -> int:
        """Return how many answers can be added if, in the end, each answer has a row of its own."""
        return self.usable_rows - sum(map(len, self.members))

    @property
    def waiting(self) -> list[OpenAnswer]:
        return [dialogue for dialogue in self.dialogues if dialogue.reply is not None]

    @property
    def is_running(self) -> bool:
        return len(self.waiting) < self.active

    @torch.inference_mode()
    def add(self, starting: Sequence[NewAnswers]) -> None:
        """Read the prompts and sample the first token of each completion."""
        device = self.forward.device
        prompts = [new.prompt.tokens for new in starting]
        members = [[self._begin(new, number) for number in new.numbers] for new in starting]
        groups = [[group] if self.shares else [[one] for one in group] for group in members]  # rows of each prompt
        lengths, counts = [len(tokens) for tokens in prompts], [len(group) for group in groups]
        width = max(lengths)
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in prompts]
        lengths_P, counts_P = torch.tensor(lengths, device=device), torch.tensor(counts, device=device)
        rows = slice(self.active, self.active + sum(counts))
        self.members += [row for group in groups for row in group]
        self.cache.clear(rows, width)
        before = self._read_beginning(prompts, rows.start)
        tokens_PT = torch.tensor(padded, device=device)[:, before:]
        logits_PV = self.forward.prefill(tokens_PT, lengths_P - before, self.cache, rows, counts_P, before)
        places_B = lengths_P.repeat_interleave(counts_P)
        self.places_R[rows], self.counts_R[rows], self.running_R[rows] = places_B, 0, True
        self.mask_RT[rows] = self._masked(places_B)
        if self.temperature and not self.shares:
            numbers = [dialogue.uniforms for dialogue in self.dialogues[rows]]
            self.uniform_RN[rows, : self.limit] = torch.tensor(numbers, dtype=torch.double, device=device)
        self.ends_R[rows] = torch.tensor([dialogue.end for dialogue in self.dialogues[rows]], device=device)
        if self.forced_RN is not None:
            self.forced_RN[rows] = DRAWN
        self._sample(logits_PV.repeat_interleave(counts_P, dim=0), rows, width)
        self.longest = max(self.longest, width)

    def _read_beginning(self, prompts: Sequence[tuple[int, ...]], row: int) -> int:
        """Read the common prefix of the prompts, such as few-shot examples, once into a row. Return its length, or 0 if
        it is too short."""
        first, last, device = min(prompts), max(prompts), self.forward.device
        same = next((place for place, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
        before = min(same, min(map(len, prompts)) - 1)
        if len(prompts) == 1 or before < self.least_shared:
            return 0
        tokens_1T, length_1, group_1 = (torch.tensor(one, device=device) for one in ([first[:before]], [before], [1]))
        self.forward.prefill(tokens_1T, length_1, self.cache, slice(row, row + 1), group_1)
        return before

    def _begin(self, new: NewAnswers, number: int) -> OpenAnswer:
        answer = self.turns.begin(new.prompt, number, self.sampling, new.prompt_index)
        answer.uniforms = uniforms(self.sampling, new.prompt, number) if self.temperature else [0.0] * self.limit
        return answer

    def _masked(self, places_B: Tensor) -> Tensor:
        """Return a mask that is 0 before these places, and -inf from there on."""
        beyond_BT = torch.arange(self.size.places, device=places_B.device) >= places_B[:, None]
        return self.mask_RT.new_zeros(beyond_BT.shape).masked_fill_(beyond_BT, float("-inf"))

    @torch.inference_mode()
    def decode(self) -> None:
        """Sample `steps_per_check` more tokens for each row."""
        for _ in range(self.steps_per_check if self.is_running else 0):
            width = min(self.longest + 1, self.size.places)
            if self.forward.embeds_on_host:  # outside the captured step, which cannot wait for the host
                self.hidden_RH[: self.active] = self.forward.embed(self.tokens_R[: self.active])
            self.decode_step(self._step, self.active, self.size.rows, width, self.size.places)
            self.longest += 1

    def _step(self, rows: int, width: int) -> None:
        active, places_B = slice(0, rows), self.places_R[:rows]
        self.mask_RT[active].scatter_(1, places_B[:, None], 0.0)
        tokens_B = self.tokens_R[active]
        hidden_BH = self.hidden_RH[active] if self.forward.embeds_on_host else self.forward.embed(tokens_B)
        mask_BT, running_B = self.mask_RT[active, :width], self.running_R[active]
        logits_BV = self.forward.step(tokens_B, hidden_BH, places_B, running_B, mask_BT, self.cache)
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
        continues_B = self.continues_V[tokens_B]
        if self.forced_RN is not None:
            forced_B = self.forced_RN[rows].gather(1, counts_B[:, None])[:, 0]
            tokens_B = tokens_B.where(forced_B == DRAWN, forced_B)
            continues_B |= forced_B != DRAWN
        self.tokens_R[rows] = tokens_B
        self.sampled_RN[rows].scatter_(1, counts_B[:, None], tokens_B[:, None])
        self.logprobs_RN[rows].scatter_(1, counts_B[:, None], logprobs_B[:, None])
        counts_B += running_B
        running_B &= continues_B & (counts_B < self.ends_R[rows])

    def _draw_apart(self, logits_BV: Tensor, rows: slice, width: int) -> tuple[Tensor, Tensor]:
        """Draw a token for each answer, and move answers that differ from the others in their row to new rows. Return
        the token of each row and its log-prob."""
        members, counts = self.members[rows], self.counts_R[rows].tolist()
        numbers = [[one.uniforms[count] for one in row] for row, count in zip(members, counts, strict=True)]
        most = max(map(len, members))
        padded = [[*row, *row[:1] * (most - len(row))] for row in numbers]  # an equal number draws an equal token
        tokens_BG, logprobs_BG = draw(logits_BV, self.temperature, torch.tensor(padded, dtype=torch.double))
        if moved := self._split(tokens_BG, rows.start):
            new = range(rows.start + len(members), self.active)
            self.cache.clear(slice(new.start, new.stop), width)
            self._copy_rows([rows.start + row for row, _ in moved], new, width)
        rows_B, places_B = torch.tensor([*((row, 0) for row in range(len(members))), *moved]).T
        return tokens_BG[rows_B, places_B], logprobs_BG[rows_B, places_B]

    def _split(self, tokens_BG: Tensor, start: int) -> list[tuple[int, int]]:
        """Move answers whose token differs from that of the first answer in their row to new rows at the end. Return
        the position, in `tokens_BG`, of the first answer of each new row."""
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
        """Copy rows over other rows, with the first `width` places of their cache."""
        if not sources:
            return
        source, target = (torch.tensor([*rows], device=self.forward.device) for rows in (sources, targets))
        state = [self.tokens_R, self.places_R, self.counts_R, self.ends_R, self.running_R]
        state += [self.sampled_RN, self.logprobs_RN, self.uniform_RN, self.mask_RT]
        for buffer in [*state, self.forced_RN] if self.forced_RN is not None else state:
            buffer[target] = buffer[source]
        self.cache.copy(sources, targets, width)

    @torch.inference_mode()
    def ended(self) -> list[tuple[OpenAnswer, Written]]:
        """Return the turns that have ended since the last call."""
        if any(one.stops.strings for one in self.dialogues):
            self._freeze_at_strings()
        running = self.running_R[: self.active]
        if bool(running.all()):
            return []
        rows, ended = (~running).nonzero()[:, 0], []
        states = (tensor[rows].tolist() for tensor in (self.counts_R, self.sampled_RN, self.logprobs_RN))
        for row, count, tokens, logprobs in zip(rows.tolist(), *states, strict=True):
            for dialogue in [one for one in self.members[row] if one.reply is None]:
                turn = slice(len(dialogue.tokens), count)
                ended.append((dialogue, (tokens[turn], logprobs[turn])))
        return ended

    def _freeze_at_strings(self) -> None:
        """Freeze the rows with a stop string in the newest tokens of their turn."""
        width = max(one.stops.window for one in self.dialogues) + self.steps_per_check
        counts_B = self.counts_R[: self.active]
        newest_BT = (counts_B[:, None] - width + torch.arange(width, device=counts_B.device)).clamp(min=0)
        tokens_BT = self.sampled_RN[: self.active].gather(1, newest_BT).tolist()
        ended = []
        for tokens, count, one in zip(tokens_BT, counts_B.tolist(), self.dialogues, strict=True):
            written = min(width, max(0, count - len(one.tokens)))
            ended.append(one.stops.is_in(tokens[width - written :]))
        self.running_R[: self.active] &= ~torch.tensor(ended, device=counts_B.device)

    @torch.inference_mode()
    def resume(self, dialogues: Sequence[OpenAnswer]) -> None:
        """Let the rows of some answers read the last token of their turn and then a reply, token by token, and write
        another turn."""
        assert self.forced_RN is not None, "there is an environment"
        if not dialogues:
            return
        row_of, device = {dialogue: row for row, dialogue in enumerate(self.dialogues)}, self.forward.device
        states, forced = [], []
        for dialogue in dialogues:
            row, end = row_of[dialogue], len(dialogue.tokens)
            turn_end = next(place for place in range(end, 0, -1) if dialogue.written[place - 1])
            place = len(dialogue.prompt.tokens) + turn_end - 1
            states.append((row, dialogue.tokens[turn_end - 1], place, turn_end, dialogue.end))
            forced += [(row, at, dialogue.tokens[at]) for at in range(turn_end, end)]
        rows_B, tokens_B, places_B, counts_B, ends_B = torch.tensor(states, device=device).T
        self.tokens_R[rows_B], self.places_R[rows_B], self.counts_R[rows_B] = tokens_B, places_B, counts_B
        self.ends_R[rows_B], self.running_R[rows_B] = ends_B, True
        rows_F, at_F, tokens_F = torch.tensor(forced, dtype=torch.long, device=device).reshape(-1, 3).T
        self.forced_RN[rows_F, at_F] = tokens_F
        self.mask_RT[rows_B] = self._masked(places_B)  # a row may have been decoded beyond a stop string

    @torch.inference_mode()
    def take(self, finished: Container[OpenAnswer]) -> list[OpenAnswer]:
        """Remove answers from the batch and return them, row by row."""
        rows = [row for row, dialogue in enumerate(self.dialogues) if dialogue in finished]
        taken = [one for row in rows for one in self.members[row]]
        if not rows:
            return taken
        # the last rows move into the places of the removed ones
        left, gone = self.active - len(rows), set(rows)
        holes = [row for row in rows if row < left]
        movers = [row for row in range(left, self.active) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self.members[hole] = self.members[mover]
        del self.members[left:]
        self._copy_rows(movers, holes, self.longest)
        self.running_R[left:] = False
        self.longest = int(self.places_R[:left].max()) if left else 0
        return taken
