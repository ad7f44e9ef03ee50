"""rollout: where an answer ends, for every sampler alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from trainer.records import Completion

MARGIN = 4  # tokens; the first token of a text that begins in the middle may be decoded without its space


class Stops:
    """The tokens and the strings that end an answer, whichever comes first."""

    def __init__(self, tokenizer: Any, tokens: Sequence[int], strings: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.tokens = frozenset(tokens)
        self.strings = strings
        # A string has at most as many tokens as bytes.
        self.window = MARGIN + max((len(string.encode()) for string in strings), default=0)

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Return True if the text of the tokens has a stop string in it."""
        text = self._text(tokens)
        return any(string in text for string in self.strings)

    def completion(self, tokens: Sequence[int], logprobs: Sequence[float], version: int | None = None) -> Completion:
        """Return the answer up to its first stop token, or up to the token that completes its first stop string.

        The text ends with the stop string, or before it if it begins a new line: then it opens something else.
        """
        stop = next((at for at, token in enumerate(tokens, 1) if token in self.tokens), None)
        tokens, truncated = tokens[:stop], stop is None
        text = self._text(tokens)
        if ends := [(text.index(string) + len(string), string) for string in self.strings if string in text]:
            end, string = min(ends)
            kept = bisect_left(range(len(tokens)), True, key=lambda count: self.is_in(tokens[:count]))
            tokens, truncated = tokens[:kept], False
            text = text[: end - len(string) if string.startswith("\n") else end]
        return Completion(tuple(tokens), tuple(logprobs[: len(tokens)]), text, truncated, version)

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
