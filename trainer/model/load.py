"""Load a model and its tokenizer from a folder, the hub, or the package itself.

`OCTET_SCRATCH` names a folder on a local disk, to which a model is copied once per node and not once per rank. It
belongs to the machine and is not a setting of the run; run folders record the model's own name.
"""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.config.settings import Model
from trainer.errors import ConfigError, ModelError
from trainer.machine import disk
from trainer.machine.out_of_memory import is_out_of_memory
from trainer.machine.user_code import OF_A_TEMPLATE, TEMPLATE_S, deadline
from trainer.model import contradictions, hub, quantised
from trainer.model.ends import compact
from trainer.ranks import distributed

ATTENTION = {"auto": None, "sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}  # None: transformers chooses
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NOISE = re.compile("drop|(?<!router_)jitter")  # Phi-MoE's router_jitter_noise is a threshold in eval mode as well
META = torch.device("meta")
OF_ROTATIONS = {torch.arange, Tensor.div, Tensor.__rdiv__, Tensor.__rpow__, torch.empty_like}  # what makes their tables
CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
# of the weights of a text model in the files of one that also reads images or sound
TEXT_PART = {r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.", r"^language_model\.lm_head": "lm_head"}
ANSWER = "forty-two"  # of a conversation that shows what a chat template writes
LONGEST_REASON = 300  # characters
REMEDY = "Check the spelling, connect to the internet once, or write the path of a local folder whose files are whole."
END_OF_TEXT = "<|endoftext|>"  # ends a document wherever a vocabulary has it, also of a model whose turns end otherwise


def location(settings: Model) -> str:
    """Return where the model is read from: the package, a copy on this node, or the folder or hub that it names."""
    return str(hub.NANO) if settings.name == "nano" else str(staged_copy(settings) or settings.name)


def stage(settings: Model) -> None:
    """Copy the model, or warn if that is impossible. Every rank calls it before the model is loaded."""
    if os.environ.get("OCTET_SCRATCH") and distributed.is_first_here():
        try:
            place, source = _place(settings), _source(settings)
            if place and source and not staged_copy(settings):
                # under a temporary name until it is complete: other jobs on this node may read or copy it
                partial = place.with_name(f"{place.name}.{os.getpid()}")
                disk.private_folder(place.parent)
                if os.path.lexists(place):
                    disk.private_folder(place)
                try:
                    shutil.copytree(source, partial)
                    partial.chmod(0o700)
                    if not place.is_dir():
                        partial.rename(place)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            reason = f"{settings.name} cannot be copied there ({error.strerror or error})"
            print(f"octet: warning: OCTET_SCRATCH: {reason}. It is read from where it is.", file=sys.stderr, flush=True)
    distributed.barrier()


def staged_copy(settings: Model) -> Path | None:
    """Return the copy on this node, if there is a complete one that nobody but this user can have made."""
    try:
        place = _place(settings)
    except OSError:  # a file cannot be read, of which `stage` has warned
        return None
    is_ours = place and place.is_dir() and disk.is_private(place.parent) and disk.is_private(place)
    return place if is_ours else None


def _place(settings: Model) -> Path | None:
    """Return the path of the copy. It depends on the files of the model, so another version gets another copy."""
    scratch = os.environ.get("OCTET_SCRATCH")
    source = _source(settings) if scratch else None
    if not scratch or source is None:
        return None
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.iterdir())
    key = hashlib.sha256(repr((str(source.resolve()), files)).encode()).hexdigest()[:12]
    return Path(scratch) / f"octet-models-{os.geteuid()}" / f"{Path(settings.name).name}-{key}"


def _source(settings: Model) -> Path | None:
    """Return the folder of the model, which may be in the hub's cache."""
    if settings.name == "nano":
        return None  # it is small, and part of the package
    return hub.local_folder(settings.name) or hub.snapshot(settings)


def needs_repeated_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if only the slow attention kernel takes grouped keys: before Ampere, and in fp32 everywhere."""
    return device.type == "cuda" and (dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0))


def resolve_dtype(dtype: str, device: torch.device) -> str:
    if dtype == "fp16" and device.type == "cpu":
        raise ConfigError("model.dtype=fp16", "a CPU cannot train in it", "Write model.dtype=fp32, or bf16")
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def load_tokenizer(settings: Model) -> Any:
    tokenizer = _load(AutoTokenizer, settings)
    if not tokenizer("1")["input_ids"]:
        raise ModelError(f"model.name={settings.name}", "its tokenizer has no vocabulary", "Is tokenizer.json missing?")
    if tokenizer.pad_token_id is None:
        _choose_padding(tokenizer)
    return tokenizer


def _choose_padding(tokenizer: Any) -> None:
    """Set the token for padding. Any will do, because padding is masked by its position."""
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Raise ModelError if the tokenizer writes tokens without an embedding. Spare embeddings do no harm."""
    rows = model.config.get_text_config().vocab_size
    if tokenizer.pad_token_id >= rows:
        _choose_padding(tokenizer)
    written = tokenizer(_conversation(tokenizer), add_special_tokens=False)["input_ids"]
    largest = max([tokenizer.vocab_size - 1, *written])
    if largest >= rows:
        reason = f"its tokenizer has a token {largest}, and the model has embeddings for {rows} tokens, from 0 on"
        remedy = f"Restore it, or save the model after model.resize_token_embeddings({len(tokenizer)})"
        raise ModelError(f"model.name={model.name_or_path}", reason, remedy)


def load_model(settings: Model, dtype: str, device: torch.device) -> Any:
    config = _checked_config(settings)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION[settings.attention]}
    if settings.quantize in ("nf4", "int8"):
        options |= quantised.options(settings.quantize, DTYPES[dtype], device)
    elif hub.quantisation_of(config) == hub.UNPACKED:
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    if text := text_part(config):
        options |= {"config": text, "key_mapping": TEXT_PART}
    wants_facts = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, facts = _load(AutoModelForCausalLM, settings, **wants_facts, **options)
    contradictions.check(settings.name, model, facts)
    if text:
        model.taken_from = config.architectures[0]
    if text or hub.quantisation_of(config):
        model._weight_conversions = None  # it would be saved under the names of the files that it is taken from
    if settings.gradient_checkpointing:
        # the second name is that of transformers before 5.21
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if staged_copy(settings):  # saved files should name the model, not this node's copy
        model.name_or_path = model.config._name_or_path = settings.name
    _disable_noise(model)
    compact(model, settings)
    if settings.quantize in ("nf4", "int8"):
        return quantised.keep_training_arithmetic(model)
    if settings.quantize == "bf16":
        quantised.round_to_bf16(model)
    return model.to(device)


def text_part(config: Any) -> Any:
    """Return the configuration of the text model in one that also reads images or sound; None if it has none."""
    text = getattr(config, "text_config", None)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(text, "model_type", ""))
    if text is None or kind is None or config.is_encoder_decoder or not config.architectures:
        return None
    text.architectures, text.dtype, text.tie_word_embeddings = [kind], config.dtype, config.tie_word_embeddings
    return text


def _checked_config(settings: Model) -> Any:
    """Return the config of a model. Raise if it is quantised, or does not write on from left to right."""
    config = _load(AutoConfig, settings)
    hub.refuse_quantised(settings.name, config)
    if settings.quantize != "none" and hub.quantisation_of(config):
        reason = f"{settings.name} is stored in {hub.UNPACKED}, which is written out in 16 bits, and not packed again"
        raise ModelError(f"model.quantize={settings.quantize}", reason, "Write model.quantize=none")
    kinds = [str(kind) for kind in config.architectures or []]
    is_causal = any(kind in CAUSAL or kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    if kinds and not is_causal and not text_part(config):
        reason = f"it is a {kinds[0]}, and Octet trains causal language models only, such as Qwen2ForCausalLM"
        if hasattr(config, "text_config"):
            reason = f"it is a {kinds[0]}, and its text part ({config.text_config.model_type}) is no model of its own"
        remedy = "Name one, for example Qwen/Qwen2.5-0.5B-Instruct"
        raise ModelError(f"model.name={settings.name}", reason, remedy)
    return config


def _disable_noise(model: Any) -> None:
    """Set every dropout and jitter to 0, in modules and configurations: with them, the policy being trained is not the
    policy that sampled."""
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
    stops |= {tokenizer.get_vocab().get(END_OF_TEXT), end_of_turn(tokenizer)}
    if not all(type(stop) is int for stop in stops - {None}):
        reason = f"eos_token_id is {configured!r} in its generation_config.json; expected one or several numbers"
        raise ModelError(f"model.name={model.name_or_path}", reason, "Correct it, or delete the file")
    return sorted(stops - {None})


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes behind the answer, or None if there is none."""
    _, found, behind = _conversation(tokenizer).rpartition(ANSWER)
    tokens = tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []
    added = {token for token, described in tokenizer.added_tokens_decoder.items() if described.content.strip()}
    return next((token for token in tokens if token in added), None)


def _conversation(tokenizer: Any) -> str:
    """Return a question and an answer in the chat template, or "" if it wants something else in a conversation."""
    turns = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": ANSWER}]
    try:
        with deadline(TEMPLATE_S):
            text: str = tokenizer.apply_chat_template(turns, tokenize=False) if tokenizer.chat_template else ""
            return text
    except (TemplateError, *OF_A_TEMPLATE):
        return ""


class WithoutSympy(TorchFunctionMode):
    """Keep torch from importing sympy for tensors on the meta device, where a model is made before its files are read.
    A draw changes nothing there, and the shapes of the tables of rotations are found with numbers on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is init.normal_ and named["tensor"].is_meta:
            return named["tensor"]
        is_meta = any(isinstance(one, Tensor) and one.is_meta for one in args) or named.get("device") == META
        if function not in OF_ROTATIONS or not is_meta:
            return function(*args, **named)
        on_cpu = {**named, "device": "cpu"} if "device" in named else named
        args = [torch.empty(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
        return function(*args, **on_cpu).to(named.get("device", META))


def _load(loader: Any, settings: Model, **options: Any) -> Any:
    options |= {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    name = location(settings)
    try:
        with WithoutSympy():
            return loader.from_pretrained(name, **options)
    except Exception as error:  # for files that make no sense, the libraries raise errors of every class
        if is_out_of_memory(error):
            raise
        raise ModelError(f"model.name={settings.name}", f"it cannot be loaded ({_reason(error)})", REMEDY) from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that holds more than tensors, which could run code"
    if "trust_remote_code" in str(error):
        return "it needs code of its own. Read that code first; model.trust_remote_code=true then runs it"
    if isinstance(error, OSError | ValueError | SafetensorError):
        return str(error).strip().partition("\n")[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
