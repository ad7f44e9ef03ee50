"""Read `ds_configs/*.json`: memory and precision of the engine, and nothing that the configuration already sets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.config.settings import Config, Engine
from trainer.errors import ConfigError
from trainer.machine.installed_files import ROOT

FOLDER = ROOT / "ds_configs"

# Settings that Octet itself fills in, or that it does not offer, with what to use instead.
ELSEWHERE = {
    "train_batch_size": "rollout.problems and rollout.group_size",
    "train_micro_batch_size_per_gpu": "optim.tokens_per_micro_batch",
    "gradient_accumulation_steps": "optim.tokens_per_micro_batch",
    "gradient_clipping": "optim.max_grad_norm",
    "optimizer": "optim.name",
    "scheduler": "optim.schedule",
    "torch_autocast": "model.dtype",  # it imports the modules that it names; the next two write to any file
    "autotuning": "octet plan",
    "flops_profiler": "octet report RUN",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "run.track"),
}


def check(config: Config, has_gpu: bool) -> None:
    """Raise ConfigError for settings that the engine cannot combine, without importing it."""
    zero = zero_settings(config.engine)
    if config.optim.name == "adamw_8bit" and is_offloaded(zero, "optimizer"):
        reason = f"engine.ds_config={config.engine.ds_config} keeps its state in CPU memory, where 8 bits are very slow"
        raise ConfigError("optim.name=adamw_8bit", reason, "Write engine.ds_config=zero2, or optim.name=adamw")
    if config.model.attention == "flash" and not has_gpu:
        raise ConfigError("model.attention=flash", "it needs a card, and there is none", "Write model.attention=auto")
    if config.model.attention == "flash" and config.model.dtype == "fp32":
        raise ConfigError("model.attention=flash", "it computes in bf16 or fp16", "Write model.dtype=auto")
    if splits_weights(zero):
        _check_split_weights(config)


def zero_settings(settings: Engine) -> dict[str, Any]:
    """Return the section about ZeRO in the DeepSpeed file of the settings."""
    return read(settings.ds_config).get("zero_optimization", {})


def is_offloaded(zero: Mapping[str, Any], part: Literal["optimizer", "param"]) -> bool:
    """Return True if ZeRO keeps the optimizer state, or the parameters, in CPU memory."""
    return (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"


def splits_weights(zero: Mapping[str, Any]) -> bool:
    """Return True for ZeRO-3, where each rank has a part of the weights and gathers a layer when it is needed."""
    return zero.get("stage", 0) == 3


def _check_split_weights(config: Config) -> None:
    """Raise ConfigError for settings that read weights outside their layer, where split weights are empty."""
    model, lora = config.model, config.lora
    ends = lora.named_ends if lora.enabled else []
    for is_wrong, reason, instead in (
        (model.quantize != "none", f"those of model.quantize={model.quantize} cannot be split", ""),
        (model.quantize_head != "none", f"those of model.quantize_head={model.quantize_head} cannot be split", ""),
        (lora.enabled and lora.dora, "lora.dora=true measures whole weights in each pass", ", or lora.dora=false"),
        (config.rollout.weights != "same", f"rollout.weights={config.rollout.weights} copies whole weights", ""),
        (ends, f"lora.targets={','.join(ends)} is computed in chunks", ", or lora.targets=all"),
    ):
        if is_wrong:
            why = f"it splits the weights over the ranks (ZeRO-3), and {reason}"
            remedy = f"Write engine.ds_config=zero2_offload{instead}"
            raise ConfigError(f"engine.ds_config={config.engine.ds_config}", why, remedy)


def read(name: str) -> dict[str, Any]:
    """Return the settings in a file, without `//` keys, which are comments."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise ConfigError(f"engine.ds_config={name}", f"there is no {path}", f"Known: {known}")
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"engine.ds_config={name}", f"{path} is not JSON: {error}") from None
    zero: Any = settings.get("zero_optimization", {}) if isinstance(settings, dict) else None
    parts = [zero]
    if isinstance(zero, dict):
        parts += [settings.get(key, {}) for key in ("bf16", "fp16")]
        parts += [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    if not all(isinstance(part, dict) for part in parts):
        reason = f"{path} is not a JSON object, or a section in it is not one"
        raise ConfigError(f"engine.ds_config={name}", reason, "See ds_configs/zero3_offload.json")
    if automatic := [key for key, value in zero.items() if value == "auto"]:  # which transformers' Trainer fills in
        remedy = "Leave it out for the default, or write a number"
        raise ConfigError(f"engine.ds_config={name}", f"nothing fills in `{automatic[0]}`, which is auto", remedy)
    if zero.get("stage") not in (1, 2, 3):
        raise ConfigError(f"engine.ds_config={name}", "`zero_optimization` needs a stage from 1 to 3", "Write 2")
    for key, home in ELSEWHERE.items():
        if key in settings:
            raise ConfigError(f"engine.ds_config={name}", f"it must not contain `{key}`", f"Write {home} instead")
    return {key: value for key, value in settings.items() if not key.startswith("//")}


LARGEST_BUCKET = 50_000_000  # the most numbers that are reduced at once


def fill(settings: dict[str, Any], dtype: str, max_grad_norm: float, trained: int) -> dict[str, Any]:
    """Return the settings of the engine, with `auto` precision resolved, and batch sizes and clipping filled in. There
    is always one accumulation step, because Octet itself decides when an update is complete."""
    # one number for each trained parameter; DeepSpeed's default is two buffers of 1 GB, even for a small adapter
    bucket = {"reduce_bucket_size": min(trained, LARGEST_BUCKET)}
    filled = settings | {"zero_optimization": bucket | settings.get("zero_optimization", {})}
    for precision in ("bf16", "fp16"):
        section = settings.get(precision, {"enabled": "auto"})
        enabled = dtype == precision if section.get("enabled", "auto") == "auto" else section["enabled"]
        filled[precision] = {**section, "enabled": enabled}
    return filled | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
