"""Loads a model and its tokenizer from a folder, the hub, or the package itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.config.settings import Model
from trainer.errors import ConfigError, ModelError
from trainer.machine.deadline import deadline
from trainer.model import quantised
from trainer.model.compact import compact
from trainer.model.staging import staged_copy

NANO = Path(__file__).parent / "nano"
ATTENTION = {"auto": None, "sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}  # None: transformers chooses
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TEMPLATE_S = 10.0
NOISE = re.compile("drop|(?<!router_)jitter")  # Phi-MoE's router_jitter_noise is a threshold in eval mode as well
END_OF_TEXT = "<|endoftext|>"  # ends a document wherever a vocabulary has it, also of a model whose turns end otherwise


def location(settings: Model) -> str:
    """Return where the model is read from: the package, a copy on this node, or the folder or hub that it names."""
    return str(NANO) if settings.name == "nano" else str(staged_copy(settings) or settings.name)


def resolve_dtype(dtype: str, device: torch.device) -> str:
    if dtype == "fp16" and device.type == "cpu":
        raise ConfigError("model.dtype=fp16: a CPU cannot train in it. Write model.dtype=fp32, or bf16.")
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def load_tokenizer(settings: Model) -> Any:
    tokenizer = _load(AutoTokenizer, settings)
    if not tokenizer("1")["input_ids"]:
        raise ModelError(f"model.name={settings.name}: its tokenizer has no vocabulary. Is tokenizer.json missing?")
    if tokenizer.pad_token_id is None:
        # any token will do, because padding is masked by its position
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def load_model(settings: Model, dtype: str, device: torch.device) -> Any:
    _refuse_quantised_on_disk(settings)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION[settings.attention]}
    if settings.quantize != "none":
        options |= quantised.options(settings.quantize, DTYPES[dtype], device)
    model = _load(AutoModelForCausalLM, settings, **options)
    if settings.gradient_checkpointing:
        # the second name is that of transformers before 5.21
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if staged_copy(settings):  # saved files should name the model, not this node's copy
        model.name_or_path = model.config._name_or_path = settings.name
    _disable_noise(model)
    compact(model, settings)
    return model.to(device) if settings.quantize == "none" else quantised.keep_training_arithmetic(model)


def _refuse_quantised_on_disk(settings: Model) -> None:
    """Raise if the model is quantised, because an adapter could not be merged into it. Only its config is read."""
    found = getattr(_load(AutoConfig, settings), "quantization_config", None)
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, dict) else found.quant_method
        raise ModelError(
            f"model.name={settings.name}: it is quantised already ({method}), so an adapter could not be merged into "
            "its base. Name the model that it was made from, and write model.quantize=nf4 or int8."
        )


def _disable_noise(model: Any) -> None:
    """Set every dropout and jitter to 0: with them, the policy being trained is not the policy that sampled.

    Many families keep the probability as a number, in a module or in the configuration, and call a function with it.
    """
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for owner in [*modules, *(module.config for module in modules if hasattr(module, "config"))]:
        for name, value in vars(owner).items():
            if isinstance(value, float) and NOISE.search(name):
                setattr(owner, name, 0.0)


def fits(folder: Path, device: torch.device) -> bool:
    """Return True if the card has room for the weights in a folder, and 20 % more to compute with."""
    if device.type != "cuda":
        return True
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return weights * 1.2 < torch.cuda.mem_get_info(device)[0]


def stop_tokens(tokenizer: Any, model: Any) -> list[int]:
    """Return all tokens that end an answer: of the tokenizer, the generation config, and the chat template."""
    configured = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    stops |= {tokenizer.get_vocab().get(END_OF_TEXT), _end_of_turn(tokenizer)}
    return sorted(stops - {None})


def _end_of_turn(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes behind the answer, or None if there is none."""
    answer = "forty-two"
    turns = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": answer}]
    try:
        with deadline(TEMPLATE_S):
            text = tokenizer.apply_chat_template(turns, tokenize=False) if tokenizer.chat_template else ""
    except (TemplateError, TimeoutError):  # it wants something else in a conversation
        return None
    _, found, behind = text.rpartition(answer)
    tokens = tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []
    added = {token for token, described in tokenizer.added_tokens_decoder.items() if described.content.strip()}
    return next((token for token in tokens if token in added), None)


def _load(loader: Any, settings: Model, **options: Any) -> Any:
    name = location(settings)
    try:
        return loader.from_pretrained(
            name, revision=settings.revision, trust_remote_code=settings.trust_remote_code, **options
        )
    except (OSError, ValueError, SafetensorError) as error:  # a missing, broken or unknown model
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model.name={settings.name}: it cannot be loaded ({first_line}). "
            "Check the spelling, connect to the internet once, or write the path of a local folder."
        ) from error
