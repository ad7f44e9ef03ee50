"""rollout with `model.generate`: slow, but the reference for the tests of every faster sampler."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from trainer.machine.out_of_memory import is_out_of_memory
from trainer.model.ends import causal_lm_of
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.collect import Groups, Sampler
from trainer.rollout.draw import draw, uniforms
from trainer.rollout.turns import OpenAnswer, Stops, TurnTaking, Written


class OwnSampler(Sampler):
    """Samples from the model that is being trained, at most `rows` completions at a time."""

    def __init__(self, model: Any, turns: TurnTaking, rows: int, say: limits.Say = limits.on_stderr) -> None:
        self.model, self.turns, self.stops = model, turns, turns.stops
        self.rows = limits.RowLimit(rows, say)
        self._say = say

    def context_limit(self) -> int | None:
        return limits.context_of(self.model)


class HfSampler(OwnSampler):
    """Samples with `model.generate`."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        # PEFT's wrapper does not pass our settings on to the model if an adapter was saved without a task type
        super().__init__(causal_lm_of(model), *arguments, **options)
        if self.model.config.model_type == "rwkv":  # transformers mixes its rows when it reads single tokens
            self.rows.limit = 1

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        limits.check_context(self.context_limit(), prompts, sampling.max_new_tokens)
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
        places = [(index, number) for index in by_length for number in range(sampling.group)]
        waiting = [(index, self.turns.begin(prompts[index], number, sampling)) for index, number in places]
        groups: defaultdict[int, dict[int, Completion]] = defaultdict(dict)
        longest = max((prompt.longest(sampling.max_new_tokens) for prompt in prompts), default=0)
        at_once = limits.rows_that_fit(self.model, longest, self.rows.limit)
        with generating(self.model, self._settings(sampling)):
            while waiting:
                taken = self._within_context(waiting[: min(at_once, self.rows.limit)])
                written = self._generate([dialogue for _, dialogue in taken], sampling)
                if written is None:
                    self.rows.halve(len(taken))
                    continue
                del waiting[: len(taken)]
                added = [self.turns.add(one, *turn) for (_, one), turn in zip(taken, written, strict=True)]
                for (index, dialogue), ended in zip(taken, added, strict=True):
                    if completion := ended or self.turns.take_reply(dialogue):
                        groups[index][dialogue.number] = completion
                    else:
                        waiting.append((index, dialogue))
                    if len(groups[index]) == sampling.group:
                        yield index, [group for _, group in sorted(groups.pop(index).items())]

    def _within_context(self, waiting: list[tuple[int, OpenAnswer]]) -> list[tuple[int, OpenAnswer]]:
        """Return the first of these answers that can be generated together. All rows go on for as long as any of them,
        and a model with learned positions has none beyond its context. Some models need contexts of one length."""
        context, longest, most = self.context_limit(), 0, 0
        for count, (_, answer) in enumerate(waiting):
            longest, most = max(longest, len(answer.context)), max(most, answer.end - len(answer.tokens))
            if count and context is not None and longest + most > context:
                return waiting[:count]
            if count and len(answer.context) != len(waiting[0][1].context) and self._reads_padding:
                return waiting[:count]
        return waiting

    @cached_property
    @torch.no_grad()
    def _reads_padding(self) -> bool:
        """Return True if padding before a context changes the logits after it: the recurrent layers of xLSTM and
        RecurrentGemma ignore the mask, those of MiniMax from the second token on."""
        context, options = [5, 3, 4], {"max_new_tokens": 2, "min_new_tokens": 2, "output_logits": True}
        options["return_dict_in_generate"] = True
        found = []
        for rows in ([context], [context, context * 4]):
            tokens_BT, attention_BT = self._left_padded(rows)
            found.append(self.model.generate(input_ids=tokens_BT, attention_mask=attention_BT, **options).logits[1][0])
        alone_V, padded_V = (logits_V.float() for logits_V in found)
        rounding = 1e-3 if self.model.dtype == torch.float32 else 0.05
        return bool((padded_V - alone_V).abs().max() > rounding * alone_V.abs().max())

    @torch.no_grad()
    def _generate(self, dialogues: Sequence[OpenAnswer], sampling: Sampling) -> list[Written] | None:
        """Return the next turn of each answer, or None if memory runs out."""
        tokens_BT, attention_BT = self._left_padded([dialogue.context for dialogue in dialogues])
        starts = [len(dialogue.tokens) for dialogue in dialogues]
        lengths = [dialogue.end - start for dialogue, start in zip(dialogues, starts, strict=True)]
        numbers = [uniforms(sampling, dialogue.prompt, dialogue.number) for dialogue in dialogues]
        # all rows need the same number of random numbers; the zeros are used only beyond the end of an answer
        padded = [[*row[start:], *[0.0] * start] for row, start in zip(numbers, starts, strict=True)]
        criteria = [EndsWithString(self.stops, tokens_BT.shape[1])] if self.stops.strings else []
        drawn = Draw(sampling.temperature, torch.tensor(padded, dtype=torch.double, device=tokens_BT.device))
        try:
            output_BT = self.model.generate(
                input_ids=tokens_BT,
                attention_mask=attention_BT,
                max_new_tokens=max(lengths),
                logits_processor=LogitsProcessorList([drawn]),
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        sampled_BT = output_BT[:, tokens_BT.shape[1] :]
        tokens, logprobs = sampled_BT.tolist(), torch.stack(drawn.logprobs, dim=1).tolist()
        # beyond its length a row has padding, and the padding token may also be a stop token
        rows = zip(tokens, logprobs, lengths, strict=True)
        return [(row_tokens[:length], row_logprobs[:length]) for row_tokens, row_logprobs, length in rows]

    def _left_padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(row) for row in rows)
        pad = self.stops.tokenizer.pad_token_id
        tokens = [[pad] * (width - len(row)) + list(row) for row in rows]
        attention = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(tokens, device=self.model.device), torch.tensor(attention, device=self.model.device)

    def _settings(self, sampling: Sampling) -> GenerationConfig:
        """Return settings that leave the choice of each token to `Draw`, in place of the model's generation config."""
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(self.stops.tokens),
            pad_token_id=self.stops.tokenizer.pad_token_id,
            use_cache=True,
        )


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


class EndsWithString(StoppingCriteria):
    """Ends a row when its newest tokens contain a stop string. The first `prompt` tokens do not count."""

    def __init__(self, stops: Stops, prompt: int) -> None:
        self.stops = stops
        self.prompt = prompt

    def __call__(self, tokens_BT: Tensor, *_: Any, **__: Any) -> Any:
        newest = max(self.prompt, tokens_BT.shape[1] - self.stops.window)
        ended = [self.stops.is_in(tokens) for tokens in tokens_BT[:, newest:].tolist()]
        return torch.tensor(ended, device=tokens_BT.device)


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
