"""Write a tokenizer into a GGUF file. The file names one of llama.cpp's ways to split a text into words, instead of a
regular expression.

llama.cpp's converter finds that name by hashing how a tokenizer splits a certain text, which works only for those
vocabularies that it knows. Here it follows from the rules in tokenizer.json, also for a custom vocabulary.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gguf

from trainer.errors import ModelError
from trainer.model.load import end_of_turn

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
BY_DIGIT = CONTRACTIONS + WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
BY_THREE_DIGITS = CONTRACTIONS + WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
BY_MARK = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
)
SPACE = "▁"  # SentencePiece's symbol for a space
BYTE = re.compile("<0x[0-9A-F]{2}>")
# llama.cpp's names, by the splits of a text, and by whether a word in the vocabulary is a token without any merges.
PRE = {
    (("gpt-2",), False): "gpt-2",
    (("digits", "gpt-2"), False): "smollm",
    ((BY_DIGIT,), False): "qwen2",
    ((BY_MARK,), False): "qwen35",
    ((BY_THREE_DIGITS,), False): "dbrx",
    ((BY_THREE_DIGITS,), True): "llama-bpe",
    ((BY_CASE,), True): "tekken",
}


def pre_of(rules: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the splits of a tokenizer. Raise ModelError for one that it may not support."""
    model, normalizer = rules["model"], rules.get("normalizer")
    if model["type"] != "BPE":
        raise _unknown(f"it is a {model['type']}, not BPE")
    if normalizer and normalizer["type"] != "NFC":
        raise _unknown(f"its normalizer is {normalizer['type']}")
    splits = tuple(_splits(rules.get("pre_tokenizer")))
    try:
        return PRE[splits, bool(model.get("ignore_merges"))]
    except KeyError:
        raise _unknown(f"it splits text by {', '.join(splits)[:200] or 'nothing'}") from None


def begins_with_space(rules: Mapping[str, Any]) -> bool:
    """Return True if a SentencePiece tokenizer adds a space before a text. Raise ModelError if it does more."""
    model, normalizer, splits = rules["model"], rules.get("normalizer"), rules.get("pre_tokenizer") or {}
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    seen = [step.get("prepend") or (step.get("pattern"), step.get("content")) for step in steps if step]
    blank = {"String": " "}
    if model["type"] == "BPE" and seen == [SPACE, (blank, SPACE)] and not splits:
        return True
    if model["type"] == "BPE" and seen == [(blank, SPACE)] and splits.get("pattern", blank) == blank:
        return False
    scheme = None if seen or splits.get("split") else splits.get("prepend_scheme")
    if model["type"] == "BPE" and scheme in ("always", "never"):
        return bool(scheme == "always")  # after a special token, `first` adds no space, but llama.cpp does
    raise _unknown(f"it is a SentencePiece tokenizer with {json.dumps([normalizer, splits])[:200]}")


def _unknown(reason: str) -> ModelError:
    remedy = f"Supported are those that llama.cpp calls {', '.join(PRE.values())}. Export --to safetensors, and "
    remedy += "convert that with llama.cpp's convert_hf_to_gguf.py"
    return ModelError("--to gguf", f"this tokenizer cannot be written ({reason})", remedy)


def _splits(rule: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the parts of a pre-tokenizer that split, as regular expressions or names."""
    if not rule:
        return
    kind = rule["type"]
    if kind == "Sequence":
        for part in rule["pretokenizers"]:
            yield from _splits(part)
    elif kind == "Split" and rule["behavior"] == "Isolated" and not rule["invert"]:
        yield rule["pattern"].get("Regex", str(rule["pattern"]))
    elif kind == "Digits" and rule["individual_digits"]:
        yield "digits"
    elif kind == "ByteLevel" and not rule["add_prefix_space"]:
        if rule["use_regex"]:
            yield "gpt-2"
    else:
        yield json.dumps(rule)


def write(writer: gguf.GGUFWriter, tokenizer: Any, size: int) -> None:
    """Write the tokens, merges and special tokens. The model has embeddings for `size` tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise _unknown("it has no tokenizer.json")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, kinds = _tokens(tokenizer, size)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in rules["model"].get("merges", ())]
    if rules["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(begins_with_space(rules))
        first: dict[str, int] = {}  # llama.cpp merges by the highest score instead of the order of the merges
        for rank, (left, right) in enumerate(merges):
            first.setdefault(left + right, rank)
        writer.add_token_scores([-float(first.get(token, len(merges))) for token in tokens])
        kinds = [gguf.TokenType.BYTE if BYTE.fullmatch(token) else kind for token, kind in zip(tokens, kinds)]
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_of(rules))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for kind in ("bos", "eos", "unk", "pad"):
        if (token := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    if (end := end_of_turn(tokenizer)) is not None:
        writer.add_eot_token_id(end)
    plain, wrapped = (tokenizer("1", add_special_tokens=special)["input_ids"] for special in (False, True))
    writer.add_add_bos_token(wrapped[0] == tokenizer.bos_token_id != plain[0])
    writer.add_add_eos_token(False)  # tokenizers saved by a trainer may add one, after which no prompt can be answered
    if template := template_of(tokenizer):
        writer.add_chat_template(template)


def template_of(tokenizer: Any) -> str | None:
    """Return the chat template for a conversation without tools."""
    template: str | None = tokenizer.chat_template
    return template["default"] if isinstance(template, dict) else template or None


def _tokens(tokenizer: Any, size: int) -> tuple[list[str], list[int]]:
    """Return the text and the kind of each token. Embeddings without a token get a placeholder."""
    by_id = {index: text for text, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens: list[str] = []
    kinds: list[int] = []
    for index in range(size):
        if index not in by_id:
            kind = gguf.TokenType.UNUSED
        elif index == tokenizer.unk_token_id and tokenizer.unk_token not in (tokenizer.eos_token, tokenizer.pad_token):
            kind = gguf.TokenType.UNKNOWN
        elif index in added:
            kind = gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED
        else:
            kind = gguf.TokenType.NORMAL
        tokens.append(by_id.get(index, f"[PAD{index}]"))
        kinds.append(kind)
    return tokens, kinds
