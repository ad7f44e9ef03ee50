"""Check whether a run can start on this machine, before anything heavy is imported, and divide the cards between the
policy and the vLLM servers that the run starts."""

import os
from dataclasses import replace

from trainer.config import ds_config
from trainer.config.settings import Config, Vllm
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.plan import memory_check, preflight
from trainer.reward import make


def check(config: Config, machine: hardware.Hardware) -> None:
    """Raise an error if a run with these settings cannot start on this machine."""
    ds_config.check(config, has_gpu=bool(machine.gpus))
    memory_check.check(config, machine)
    make.check(config.reward)
    preflight.check(config, machine)


def training_cards(machine: hardware.Hardware, vllm: Vllm) -> hardware.Hardware:
    """Return the machine without the cards of the vLLM servers that the run starts."""
    must_name_devices(machine, vllm)
    if not vllm.start or not vllm.devices:
        return machine
    left = tuple(gpu for gpu in machine.gpus if gpu.index not in vllm.devices)
    if not left:
        taken, all_cards = (",".join(map(str, cards)) for cards in (vllm.devices, [gpu.index for gpu in machine.gpus]))
        reason = f"no card is left to train on, of {all_cards or 'none'}"
        remedy = "Name fewer, or write rollout.engine=vllm_colocate, which shares a card"
        raise ConfigError(f"rollout.vllm.devices={taken}", reason, remedy)
    return replace(machine, gpus=left)


def must_name_devices(machine: hardware.Hardware, vllm: Vllm) -> None:
    """Raise ConfigError if the machine has cards and the settings name none of them for the servers."""
    if vllm.start and machine.gpus and not vllm.devices:
        cards = f"{len(machine.gpus)} x {machine.gpus[0].name}"
        reason = f"this machine has {cards}, and the settings do not say which of them the servers use"
        shares = "rollout.engine=vllm_colocate without rollout.vllm.start, which shares a card"
        raise ConfigError("rollout.vllm.start=true", reason, f"Write rollout.vllm.devices=0, or {shares}")


def must_leave_our_cards(machine: hardware.Hardware, vllm: Vllm, ranks: int) -> None:
    """Raise ConfigError if policy and servers would share a card, as they may without Octet's launcher."""
    must_name_devices(machine, vllm)
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    ours = [] if on_cpu else [gpu.index for gpu in machine.gpus[:ranks]]
    if vllm.start and (both := sorted(set(ours) & set(vllm.devices))):
        raise ConfigError(
            f"rollout.vllm.devices={','.join(map(str, vllm.devices))}",
            f"the policy is trained on {','.join(map(str, ours))}, so {','.join(map(str, both))} would be used by both",
            "Start with ./run_deepspeed.sh, which keeps them apart, or hide cards with CUDA_VISIBLE_DEVICES",
        )
