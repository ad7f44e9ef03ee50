"""rollout with `model.generate`: slow, but the reference that every faster sampler is tested against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from trainer.machine.out_of_memory import is_out_of_memory
from trainer.model.head import causal_lm_of
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.collect import Sampler
from trainer.rollout.stop import Stops


class HfSampler(Sampler):
    """Samples with the model that is being trained, at most `rows` completions at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stop_tokens: Sequence[int],
        rows: int,
        say: limits.Say = limits.on_stderr,
        stop_strings: Sequence[str] = (),
    ) -> None:
        # an adapter that was saved without its task type would not pass our settings on to the model
        self.model = causal_lm_of(model)
        self.tokenizer = tokenizer
        self.stops = Stops(tokenizer, stop_tokens, stop_strings)
        self.rows = limits.RowLimit(rows, say)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        limits.check_context(self.model, prompts, sampling.max_new_tokens)
        torch.manual_seed(sampling.seed)
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
        waiting = [index for index in by_length for _ in range(sampling.group)]
        groups: defaultdict[int, list[Completion]] = defaultdict(list)
        longest = max((len(prompt.tokens) for prompt in prompts), default=0) + sampling.max_new_tokens
        at_once = limits.rows_that_fit(self.model, longest, self.rows.limit)
        with generating(self.model, self._settings(sampling)):
            while waiting:
                indices = waiting[: min(at_once, self.rows.limit)]
                completions = self._generate([prompts[index].tokens for index in indices], sampling)
                if completions is None:
                    self.rows.halve(len(indices))
                    continue
                del waiting[: len(indices)]
                for index, completion in zip(indices, completions, strict=True):
                    groups[index].append(completion)
                    if len(groups[index]) == sampling.group:
                        yield index, groups.pop(index)

    @torch.no_grad()
    def _generate(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion] | None:
        """Return a completion for each row, or None if memory runs out."""
        tokens_BT, attention_BT = self._left_padded(rows)
        criteria = [EndsWithString(self.stops, tokens_BT.shape[1])] if self.stops.strings else []
        recorder = TemperedRecorder(sampling.temperature or 1.0)
        try:
            output_BT = self.model.generate(
                input_ids=tokens_BT,
                attention_mask=attention_BT,
                logits_processor=LogitsProcessorList([recorder]),
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        sampled_BT = output_BT[:, tokens_BT.shape[1] :]
        tokens, logprobs = sampled_BT.tolist(), recorder.logprobs_BT(sampled_BT).tolist()
        # behind its end a row has padding, which may be a stop token too
        return [self.stops.completion(*row) for row in zip(tokens, logprobs, strict=True)]

    def _left_padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(row) for row in rows)
        pad = self.tokenizer.pad_token_id
        tokens = [[pad] * (width - len(row)) + list(row) for row in rows]
        attention = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(tokens, device=self.model.device), torch.tensor(attention, device=self.model.device)

    def _settings(self, sampling: Sampling) -> GenerationConfig:
        """Return settings that leave the distribution as it is, whatever the model's generation config says."""
        greedy = sampling.temperature == 0
        random = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(self.stops.tokens),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
            **random,
        )


class TemperedRecorder(LogitsProcessor):
    """Divides the logits by the temperature and records the log-prob of each sampled token.

    `generate` applies its own temperature after every custom processor, where its effect could not be recorded. The
    scores of a single step are kept, because the token sampled from them is known in the next one.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._scores_BV: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, tokens_BT: Tensor, scores_BV: Tensor) -> Tensor:
        if self._scores_BV is not None:
            self._record(tokens_BT[:, -1])
        self._scores_BV = scores_BV.float() / self.temperature
        return self._scores_BV

    def logprobs_BT(self, sampled_BT: Tensor) -> Tensor:
        """Return the log-probs of the sampled tokens. Call it once, after the last step."""
        self._record(sampled_BT[:, -1])
        return torch.stack(self._columns, dim=1)

    def _record(self, tokens_B: Tensor) -> None:
        assert self._scores_BV is not None, "no step has been seen"
        chosen_B = self._scores_BV.gather(-1, tokens_B[:, None])[:, 0]
        self._columns.append(chosen_B - self._scores_BV.logsumexp(dim=-1))


class EndsWithString(StoppingCriteria):
    """Ends the rows in whose newest tokens a stop string is complete. The first `prompt` tokens are not looked at."""

    def __init__(self, stops: Stops, prompt: int) -> None:
        self.stops = stops
        self.prompt = prompt

    def __call__(self, tokens_BT: Tensor, *_: Any, **__: Any) -> Any:
        newest = max(self.prompt, tokens_BT.shape[1] - self.stops.window)
        ended = [self.stops.is_in(tokens) for tokens in tokens_BT[:, newest:].tolist()]
        return torch.tensor(ended, device=tokens_BT.device)


@contextmanager
def generating(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Put the model into eval mode with these settings, and disable gradient checkpointing, which would disable the
    cache. Everything is restored afterwards."""
    own_settings = model.generation_config
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    with evaluating(model):
        try:
            for module in checkpointed:
                module.gradient_checkpointing = False
            model.generation_config = settings
            yield
        finally:
            for module in checkpointed:
                module.gradient_checkpointing = True
            model.generation_config = own_settings


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)
