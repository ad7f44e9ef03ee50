"""Separate the answer of a model from its thinking, and cut it off at the stop token."""

import re
from functools import lru_cache

LONGEST_TEXT = 200_000  # characters; only the end of a longer completion is read, where the answer is
_TAGS = ("think", "thinking", "reasoning", "thought", "scratchpad", "analysis", "reflection", "Think", "THINK")
THOUGHTS = {  # marks with which models begin and end their thinking
    **{f"<{tag}>": f"</{tag}>" for tag in _TAGS},
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis": "<|channel|>final<|message|>",  # gpt-oss
    "<|channel>thought": "<channel|>",  # Gemma 4
}
_STOPS = """<|endoftext|> <|endofturn|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <eos>
    <end_of_turn> <turn|> <｜end▁of▁sentence｜> </s>"""
_STOP = re.compile("|".join(map(re.escape, _STOPS.split())))
_STOP_TOKENS = re.compile(r"(?:<\|[A-Za-z_]{1,40}\|>|</s>|<eos>|\s)+$")  # also those of unknown models


@lru_cache(maxsize=1)  # a completion is read twice, strictly and leniently
def after_thinking(text: str) -> tuple[str | None, str, bool]:
    """Return the thought (None if no thought has ended), the text after it, and whether a thought is still open."""
    text = text[-LONGEST_TEXT:]
    ends = [(text.rfind(end), text.rfind(begin), end) for begin, end in THOUGHTS.items()]
    is_open = any(begun > ended for ended, begun, _ in ends)
    position, _, end = max(ends)
    thought = text[:position] if position >= 0 else None
    return thought, _up_to_stop_token(text[position + len(end) :] if thought is not None else text), is_open


def _up_to_stop_token(text: str) -> str:
    if (stop := _STOP.search(text)) and not (stop[0] == "</s>" and "<s>" in text):  # <s>17</s> means struck out
        text = text[: stop.start()]
    if text.endswith(">") and (stop := _STOP_TOKENS.search(text, max(0, len(text) - 100))):
        text = text[: stop.start()]
    return text
