"""The limits of a sampler: the context length of the model and the memory of the card."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer.errors import ConfigError
from trainer.records import Prompt

Say = Callable[[str], None]


def on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def check_context(context: int | None, prompts: Sequence[Prompt], new_tokens: int, server: str = "") -> None:
    """Raise ConfigError if a prompt with its answer can exceed the context, beyond which the model would write nonsense
    without an error."""
    longest = max(prompts, key=lambda prompt: prompt.longest(new_tokens), default=None)
    if context is None or longest is None or longest.longest(new_tokens) <= context:
        return
    length, where = len(longest.tokens), longest.problem.where or longest.problem.id
    reason = f"with the prompt {where} ({length} tokens) it exceeds the context of {server or 'this model'}, {context}"
    fewer = f"rollout.max_new_tokens={context - length} or less, or " if length < context else ""
    without = f". prompt.max_tokens={context - new_tokens} leaves it out of training"
    some_fit = any(prompt.longest(new_tokens) <= context for prompt in prompts)
    longer = "start the server with --max-model-len" if server else "take a model with a context of"
    remedy = f"Write {fewer}a shorter prompt, or {longer} {longest.longest(new_tokens)}{without * some_fit}"
    raise ConfigError(f"rollout.max_new_tokens={new_tokens}", reason, remedy)


def within_context(prompts: Sequence[Prompt], context: int | None, new_tokens: int) -> list[Prompt]:
    """Return the prompts that fit into the context with their answers. Raise ConfigError if none of them does."""
    fitting = [prompt for prompt in prompts if context is None or prompt.longest(new_tokens) <= context]
    if prompts and not fitting:
        none = f"none of {len(prompts)} held-out prompts fits into the context of {context} tokens"
        remedy = "Write a smaller one, or eval.problems=0"
        raise ConfigError(f"rollout.max_new_tokens={new_tokens}", f"with such an answer, {none}", remedy)
    return fitting


def context_of(model: Any) -> int | None:
    return getattr(model.config, "max_position_embeddings", None) or None


def rows_that_fit(model: Any, places: int, wanted: int) -> int:
    """Return how many completions, `wanted` at most, fit into half of the free memory with their caches and logits."""
    if model.device.type != "cuda":
        return wanted
    free = free_bytes(model.device)
    return max(1, min(wanted, free // 2 // row_bytes(model.config, places, model.dtype.itemsize)))


def free_bytes(card: torch.device) -> int:
    """Return the free memory of a card, including what PyTorch has reserved but does not use."""
    cached = torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)
    return int(torch.cuda.mem_get_info(card)[0]) + cached


def row_bytes(config: Any, places: int, item: int) -> int:
    """Return the memory of one completion: the keys and values of all layers, and logits and probabilities in fp32."""
    known, heads = config.to_dict(), getattr(config, "num_attention_heads", 0)  # Mamba has none, Gemma 4 has two sizes
    head = known.get(config.attribute_map.get("head_dim", "head_dim")) or config.hidden_size // max(1, heads)
    keys = known.get("num_key_value_heads") or heads
    return 2 * config.num_hidden_layers * keys * head * item * places + 3 * 4 * config.vocab_size
