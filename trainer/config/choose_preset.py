"""Choose the preset for a card, or for a machine without one."""

from trainer.machine import hardware

# Presets with the GB of their card. The last one that fits is chosen, so the first three are chosen only by name.
GPU_PRESETS = {"cluster": 80, "smollm2-gsm8k": 8, "8gb-4b": 8, "8gb": 8, "12gb": 12, "16gb": 16, "24gb": 24, "80gb": 80}


def choose_preset(machine: hardware.Hardware) -> tuple[str, str]:
    """Return the preset for this hardware, and why."""
    if not machine.gpus:
        return "nano", f"{machine}: the embedded model trains without one, in less than a minute"
    if (preset := preset_for(machine.memory_gb)) is None:
        return "nano", f"{machine}: the 8gb preset needs a card of 8 GB"
    return preset, f"{machine}: it fits a card of {GPU_PRESETS[preset]} GB or more; --preset nano takes a minute"


def preset_for(memory_gb: float) -> str | None:
    """Return the largest preset for a card. A card sold as 8 GB may report a little less."""
    fitting = [name for name, size in GPU_PRESETS.items() if memory_gb >= 0.94 * size]
    return fitting[-1] if fitting else None
