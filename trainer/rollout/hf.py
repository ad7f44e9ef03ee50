"""rollout with `model.generate`: slow, but the reference for the tests of every faster sampler."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from trainer.errors import ConfigError
from trainer.machine.out_of_memory import is_out_of_memory
from trainer.model.embedding_and_head import causal_lm_of
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.draw_tokens import draw, uniforms
from trainer.rollout.interface import Groups, Sampler
from trainer.rollout.turns import OpenAnswer, TurnTaking, Written


class OwnSampler(Sampler):
    """Samples from the model that is being trained, at most `rows` completions at a time."""

    def __init__(self, model: Any, turns: TurnTaking, rows: int, say: limits.Say = limits.on_stderr) -> None:
        self.model, self.turns, self.stops = model, turns, turns.stops
        self.rows, self._wanted, self._say = rows, rows, say

    def context_limit(self) -> int | None:
        return limits.context_of(self.model)

    def halve_rows(self, tried: int) -> None:
        """Sample fewer completions at a time, after an attempt with `tried` of them ran out of memory."""
        if tried <= 1:
            reason = "not even one completion fits into the memory of the card"
            remedy = "Write a smaller rollout.max_new_tokens, prompt.max_tokens or model.name"
            raise ConfigError("rollout.rows=1", reason, remedy)
        is_first = self.rows == self._wanted
        self.rows = tried // 2
        if is_first:
            self._say(
                f"rollout.rows={self._wanted}: out of memory with {tried} completions at once; continuing with "
                f"{self.rows}, or fewer if necessary. Write rollout.rows={self.rows} to start with that."
            )


class HfSampler(OwnSampler):
    """Samples with `model.generate`."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        # PEFT's wrapper does not pass our settings on to the model if an adapter was saved without a task type
        super().__init__(causal_lm_of(model), *arguments, **options)
        if self.model.config.model_type == "rwkv":  # transformers mixes its rows when it reads single tokens
            self.rows = 1

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        limits.check_context(self.context_limit(), prompts, sampling.max_new_tokens)
        waiting = [
            self.turns.begin(prompt, number, sampling, index)
            for index, prompt in sorted(enumerate(prompts), key=lambda pair: len(pair[1].tokens))
            for number in range(sampling.group)
        ]
        groups: defaultdict[int, dict[int, Completion]] = defaultdict(dict)
        longest = max((prompt.longest(sampling.max_new_tokens) for prompt in prompts), default=0)
        at_once = limits.rows_that_fit(self.model, longest, self.rows)
        # the choice of each token is left to `Draw`
        ends, pad = sorted(self.stops.tokens), self.stops.tokenizer.pad_token_id
        settings = GenerationConfig(do_sample=False, eos_token_id=ends, pad_token_id=pad, use_cache=True)
        with generating(self.model, settings):
            while waiting:
                taken = self._within_context(waiting[: min(at_once, self.rows)])
                written = self._generate(taken, sampling)
                if written is None:
                    self.halve_rows(len(taken))
                    continue
                del waiting[: len(taken)]
                added = [self.turns.add(one, *turn) for one, turn in zip(taken, written, strict=True)]
                for dialogue, ended in zip(taken, added, strict=True):
                    group = groups[dialogue.index]
                    if completion := ended or self.turns.take_reply(dialogue):
                        group[dialogue.number] = completion
                    else:
                        waiting.append(dialogue)
                    if len(group) == sampling.group:
                        yield dialogue.index, [answer for _, answer in sorted(group.items())]

    def _within_context(self, waiting: list[OpenAnswer]) -> list[OpenAnswer]:
        """Return the first of these answers that can be generated together. All rows go on for as long as any of them,
        and a model with learned positions has none beyond its context. Some models need contexts of one length."""
        context, longest, most = self.context_limit(), 0, 0
        for count, answer in enumerate(waiting):
            longest, most = max(longest, len(answer.context)), max(most, answer.end - len(answer.tokens))
            if count and context is not None and longest + most > context:
                return waiting[:count]
            if count and len(answer.context) != len(waiting[0].context) and self._reads_padding:
                return waiting[:count]
        return waiting

    @cached_property
    @torch.no_grad()
    def _reads_padding(self) -> bool:
        """Return True if padding before a context changes the logits after it: the recurrent layers of xLSTM and
        RecurrentGemma ignore the mask, those of MiniMax from the second token on."""
        context, options = [5, 3, 4], {"max_new_tokens": 2, "min_new_tokens": 2, "output_logits": True}
        options["return_dict_in_generate"] = True
        inputs = map(self._left_padded, ([context], [context, context * 4]))
        alone_V, padded_V = (self.model.generate(**one, **options).logits[1][0].float() for one in inputs)
        rounding = 1e-3 if self.model.dtype == torch.float32 else 0.05
        return bool((padded_V - alone_V).abs().max() > rounding * alone_V.abs().max())

    @torch.no_grad()
    def _generate(self, dialogues: Sequence[OpenAnswer], sampling: Sampling) -> list[Written] | None:
        """Return the next turn of each answer, or None if memory runs out."""
        inputs = self._left_padded([dialogue.context for dialogue in dialogues])
        begin = inputs["input_ids"].shape[1]
        starts = [len(dialogue.tokens) for dialogue in dialogues]
        lengths = [dialogue.end - start for dialogue, start in zip(dialogues, starts, strict=True)]
        numbers = [uniforms(sampling, dialogue.prompt, dialogue.number) for dialogue in dialogues]
        # all rows need the same number of random numbers; the zeros are used only beyond the end of an answer
        padded = [[*row[start:], *[0.0] * start] for row, start in zip(numbers, starts, strict=True)]
        criteria = [partial(self._ended, begin)] if self.stops.strings else []
        drawn = Draw(sampling.temperature, torch.tensor(padded, dtype=torch.double, device=self.model.device))
        try:
            output_BT = self.model.generate(
                **inputs,
                max_new_tokens=max(lengths),
                logits_processor=LogitsProcessorList([drawn]),
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        sampled_BT = output_BT[:, begin:]
        tokens, logprobs = sampled_BT.tolist(), torch.stack(drawn.logprobs, dim=1).tolist()
        # beyond its length a row has padding, and the padding token may also be a stop token
        rows = zip(tokens, logprobs, lengths, strict=True)
        return [(row_tokens[:length], row_logprobs[:length]) for row_tokens, row_logprobs, length in rows]

    def _ended(self, prompt: int, tokens_BT: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return which rows have a stop string in their newest tokens. The first `prompt` tokens do not count."""
        newest = max(prompt, tokens_BT.shape[1] - self.stops.window)
        ended = [self.stops.is_in(tokens) for tokens in tokens_BT[:, newest:].tolist()]
        return torch.tensor(ended, device=tokens_BT.device)

    def _left_padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        width = max(len(row) for row in rows)
        pad = self.stops.tokenizer.pad_token_id
        tokens = [[pad] * (width - len(row)) + list(row) for row in rows]
        attention = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        inputs = {"input_ids": tokens, "attention_mask": attention}
        return {name: torch.tensor(values, device=self.model.device) for name, values in inputs.items()}


class Draw(LogitsProcessor):
    """Draws each token with the random numbers of its answer, records its log-prob, and excludes all other tokens.
    `generate` itself uses one generator for all rows, so an answer would depend on the other rows."""

    def __init__(self, temperature: float, uniform_BN: Tensor) -> None:
        self.temperature = temperature
        self.uniform_BN = uniform_BN
        self.logprobs: list[Tensor] = []  # one tensor per step

    def __call__(self, tokens_BT: Tensor, scores_BV: Tensor) -> Tensor:
        count = len(self.logprobs)
        chosen_B1, logprobs_B1 = draw(scores_BV, self.temperature, self.uniform_BN[:, count : count + 1])
        self.logprobs.append(logprobs_B1[:, 0])
        return torch.full_like(scores_BV, float("-inf")).scatter_(1, chosen_B1, 0.0)


@contextmanager
def generating(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Generate with these settings, in eval mode, where transformers does not checkpoint. Restore both at the end."""
    own_settings = model.generation_config
    with evaluating(model):
        try:
            model.generation_config = settings
            yield
        finally:
            model.generation_config = own_settings


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)
