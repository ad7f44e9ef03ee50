"""Load a model and its tokenizer from a folder, the hub, or the package itself.

`OCTET_SCRATCH` names a folder on a local disk to which a model is copied once per node. It describes the machine and is
not a setting of the run; run folders record the model's original name.
"""

import hashlib
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.config.settings import Model
from trainer.errors import ConfigError, ModelError
from trainer.machine import disk
from trainer.machine.out_of_memory import is_out_of_memory
from trainer.machine.user_code import OF_A_TEMPLATE, TEMPLATE_S, deadline, must_be_named
from trainer.model import hub, quantised
from trainer.model.embedding_and_head import compact
from trainer.ranks import distributed

ATTENTION = {"auto": None, "sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}  # None: transformers chooses
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NOISE = re.compile("drop|(?<!router_)jitter")  # Phi-MoE's router_jitter_noise is a threshold, in eval mode as well
OF_LAYERS = re.compile(r"\D*\.(?=\d+\.)")  # the name of a stack of layers before a number, such as model.layers.
CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
# prefixes of the text model's weights in the files of a multimodal model, and in the text model itself
TEXT_PART = {r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.", r"^language_model\.lm_head": "lm_head"}
ANSWER = "forty-two"  # the answer in a conversation that reveals the tokens of a chat template
LONGEST_REASON = 300  # characters
REMEDY = "Check the spelling, connect to the internet once, or write the path of a local folder with complete files."
# the key under which transformers remembers that it has warned of a long text
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
END_OF_TEXT = "<|endoftext|>"  # ends a document in all vocabularies that have it, even if turns end with another token


def location(settings: Model) -> str:
    """Return the folder or the name on the hub from which the model is read, preferably a copy on this node."""
    return str(hub.NANO) if settings.name == "nano" else str(staged_copy(settings) or settings.name)


def stage(settings: Model) -> None:
    """Copy the model to `OCTET_SCRATCH`, or warn if that fails. Every rank calls this before it loads the model."""
    if os.environ.get("OCTET_SCRATCH") and distributed.is_first_here():
        try:
            place, source = _place(settings), _source(settings)
            if place and source and not staged_copy(settings):
                # under a temporary name until it is complete, because other jobs may read or copy it meanwhile
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
            print(f"octet: warning: OCTET_SCRATCH: {reason}. The original is read.", file=sys.stderr, flush=True)
    distributed.barrier()


def staged_copy(settings: Model) -> Path | None:
    """Return the complete copy on this node that only this user can have made; None if there is none."""
    try:
        place = _place(settings)
    except OSError:  # a file cannot be read; `stage` has warned of it
        return None
    is_ours = place and place.is_dir() and disk.is_private(place.parent) and disk.is_private(place)
    return place if is_ours else None


def _place(settings: Model) -> Path | None:
    """Return the path of the copy, which depends on the files of the model, so that each version gets its own."""
    if not (scratch := os.environ.get("OCTET_SCRATCH")) or not (source := _source(settings)):
        return None
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.iterdir())
    key = hashlib.sha256(repr((str(source.resolve()), files)).encode()).hexdigest()[:12]
    return Path(scratch) / f"octet-models-{os.geteuid()}" / f"{Path(settings.name).name}-{key}"


def _source(settings: Model) -> Path | None:
    """Return the folder of the model, which may be in the hub's cache. Nano is small and never copied."""
    if settings.name == "nano":
        return None
    return hub.local_folder(settings.name) or hub.snapshot(settings)


def needs_repeated_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if only the slow attention kernel supports grouped keys: before Ampere, and always in fp32."""
    return device.type == "cuda" and (dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0))


def resolve_dtype(dtype: str, device: torch.device) -> str:
    if dtype == "fp16" and device.type == "cpu":
        raise ConfigError("model.dtype=fp16", "a CPU cannot train in it", "Write model.dtype=fp32, or bf16")
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def stored_dtype(settings: Model) -> str:
    """Return the precision that the config.json of a model names; fp32 if it names none or another one."""
    stored = _load(AutoConfig, settings).dtype
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


def load_tokenizer(settings: Model) -> Any:
    tokenizer = _load(AutoTokenizer, settings)
    if not tokenizer("1")["input_ids"]:
        raise ModelError(f"model.name={settings.name}", "its tokenizer has no vocabulary", "Is tokenizer.json missing?")
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        reason = f"its chat templates are {', '.join(tokenizer.chat_template)}, and none of them is the default"
        remedy = "Save the one to use as chat_template.jinja in its folder"
        raise ModelError(f"model.name={settings.name}", reason, remedy)
    if tokenizer.pad_token_id is None:
        _choose_padding(tokenizer)
    tokenizer.deprecation_warnings[TOO_LONG] = True  # Octet checks lengths itself, and knows the model's true context
    return tokenizer


def _choose_padding(tokenizer: Any) -> None:
    """Set the token for padding. Any token is suitable, because padding is masked by its position."""
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)


def check_vocabulary(tokenizer: Any, model: Any) -> None:
    """Raise ModelError if the tokenizer produces tokens without an embedding. Surplus embeddings are harmless."""
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
    if reason := _contradiction(model, facts):
        raise ModelError(f"model.name={settings.name}", reason, "Download the model again, or correct its config.json")
    if text:
        model.taken_from = config.architectures[0]
    if text or hub.quantisation_of(config):
        model._weight_conversions = None  # they would restore the names of the original files when the model is saved
    if settings.gradient_checkpointing:
        # the second name is that of transformers before 5.21
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if settings.name != "nano":  # for saved files: not the path of this node's copy, nor a relative one
        folder = hub.local_folder(settings.name)
        model.name_or_path = model.config._name_or_path = str(folder.absolute() if folder else settings.name)
    if not hasattr(model, model.base_model_prefix):  # Llama 4, whose decoder transformers would not find
        model.base_model_prefix = "model"
    _disable_noise(model)
    compact(model, settings)
    if settings.quantize in ("nf4", "int8"):
        return quantised.keep_training_arithmetic(model)
    if settings.quantize == "bf16":
        quantised.round_to_bf16(model)
    return model.to(device)


def _contradiction(model: Any, facts: Mapping[str, Any]) -> str:
    """Return how a model differs from its files, by the loading info of transformers; "" if it does not. transformers
    initialises missing weights at random, and ignores unexpected ones."""
    layers = {match[0] for name, _ in model.named_parameters() if (match := OF_LAYERS.match(name))}
    strange = [name for name in facts["unexpected_keys"] if (match := OF_LAYERS.match(name)) and match[0] in layers]
    text = model.config.get_text_config()
    experts, chosen = getattr(text, "num_experts", None), getattr(text, "num_experts_per_tok", None)
    if experts and chosen and chosen > experts:
        return f"num_experts_per_tok is {chosen} in its config.json, and a layer has {experts} experts"
    if unlike := sorted(facts["mismatched_keys"]):
        name, *shapes = unlike[0]
        filed, configured = (" x ".join(map(str, shape)) for shape in shapes)
        return f"{name} has the shape {filed} in its files, and {configured} by its config.json"
    if missing := facts["missing_keys"]:
        return f"its files lack {min(missing)}, which its config.json implies; {len(missing)} are missing"
    if strange:
        return f"its files have {min(strange)}, which is no weight of the model that its config.json describes"
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = model._tied_weights_keys and text.tie_word_embeddings
    if is_tied and getattr(head, "weight", None) is not embedding.weight:
        return "tie_word_embeddings is true in its config.json, and its output layer is not the embedding"
    return ""


def text_part(config: Any) -> Any:
    """Return the configuration of the text model in a multimodal model; None if there is none."""
    text = getattr(config, "text_config", None)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(text, "model_type", ""))
    if text is None or kind is None or config.is_encoder_decoder or not config.architectures:
        return None
    text.architectures, text.dtype, text.tie_word_embeddings = [kind], config.dtype, config.tie_word_embeddings
    return text


def _checked_config(settings: Model) -> Any:
    """Return the config of a model. Raise ModelError if it is quantised, or not a causal language model."""
    config = _load(AutoConfig, settings)
    hub.refuse_quantised(settings.name, config)
    if settings.quantize != "none" and hub.quantisation_of(config):
        reason = f"{settings.name} is stored in {hub.UNPACKED}, loaded in 16 bits, and cannot be quantised again"
        raise ModelError(f"model.quantize={settings.quantize}", reason, "Write model.quantize=none")
    kinds = [str(kind) for kind in config.architectures or []]
    is_causal = any(kind in CAUSAL or kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    if kinds and not is_causal and not text_part(config):
        reason = f"it is a {kinds[0]}, and neither that nor a text part of it is a causal language model"
        raise ModelError(f"model.name={settings.name}", reason, "Name one, for example Qwen/Qwen2.5-0.5B-Instruct")
    return config


def _disable_noise(model: Any) -> None:
    """Set every dropout and jitter to 0, in modules and configurations, and make everything else compute in training
    mode what it computes in eval mode, because otherwise the trained policy would not be the policy that sampled."""
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "router_jitter_noise"):  # Phi-MoE draws experts at random in training mode
            module.register_forward_pre_hook(lambda router, _: setattr(router, "training", False))
        elif hasattr(module, "time_step_limit"):  # Mamba-2 has none while a token is sampled
            module.time_step_limit = (0.0, math.inf)
    if hasattr(model.config, "rescale_every"):  # RWKV divides weights in eval mode, but not their adapters
        model.config.rescale_every = 0
    for owner in [*modules, *(module.config for module in modules if hasattr(module, "config"))]:
        for name, value in vars(owner).items():
            if isinstance(value, float) and NOISE.search(name):
                setattr(owner, name, 0.0)


def fits(folder: Path, device: torch.device) -> bool:
    """Return True if the weights in a folder fit the free memory of the card, plus 20 % for computations."""
    if device.type != "cuda":
        return True
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return weights * 1.2 < torch.cuda.mem_get_info(device)[0]


def stop_tokens(tokenizer: Any, model: Any) -> list[int]:
    """Return all tokens that end an answer, from the tokenizer, the generation config, and the chat template."""
    configured = model.generation_config.eos_token_id
    stops = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    stops += [tokenizer.get_vocab().get(END_OF_TEXT), end_of_turn(tokenizer)]
    if not all(stop is None or type(stop) is int for stop in stops):
        reason = f"eos_token_id is {configured!r} in its generation_config.json; expected one or several numbers"
        raise ModelError(f"model.name={model.name_or_path}", reason, "Correct it, or delete the file")
    return sorted({*stops} - {None})


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes after an answer; None if there is none."""
    _, answer, rest = _conversation(tokenizer).rpartition(ANSWER)
    tokens = tokenizer(rest, add_special_tokens=False)["input_ids"] if answer else []
    added = {token for token, described in tokenizer.added_tokens_decoder.items() if described.content.strip()}
    return next((token for token in tokens if token in added), None)


def _conversation(tokenizer: Any) -> str:
    """Return a question and an answer in the chat template; "" if there is none, or if it fails. Some templates fail
    without a system message."""
    turns = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": ANSWER}]
    for system in ([], [{"role": "system", "content": "Calculate."}]) if tokenizer.chat_template else ():
        with suppress(TemplateError, *OF_A_TEMPLATE), deadline(TEMPLATE_S):
            return str(tokenizer.apply_chat_template([*system, *turns], tokenize=False))
    return ""


def _load(loader: Any, settings: Model, **options: Any) -> Any:
    options |= {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    if settings.trust_remote_code:
        must_be_named("model.trust_remote_code=true")
    name = location(settings)
    try:
        return loader.from_pretrained(name, **options)
    except Exception as error:  # the libraries raise errors of every class for invalid files
        if is_out_of_memory(error):
            raise
        raise ModelError(f"model.name={settings.name}", f"it cannot be loaded ({reason_of(error)})", REMEDY) from error


def reason_of(error: Exception) -> str:
    if isinstance(error, UnpicklingError):
        return "a pickle holds more than tensors, which could run code"
    if "trust_remote_code" in str(error):
        return "it needs its own code. Read that code first; model.trust_remote_code=true then runs it"
    if isinstance(error, OSError | ValueError | SafetensorError):
        return str(error).strip().partition("\n")[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
