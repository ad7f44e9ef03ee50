"""The sections `optim` and `engine`: the optimizer, and DeepSpeed, which runs it."""

from typing import Literal

from pydantic import Field

from trainer.config.sections.base import Seconds, Section, Share


class Optim(Section):
    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit` stores its states in 8 bits, and needs an engine.ds_config without optimizer offload, such
    as zero2. `muon` makes updates orthogonal; it has no state, and no momentum."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of Adam's moving averages of the gradient and its square."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule of the learning rate after its rise."""
    warmup: float = Field(0.05, ge=0.0, lt=1.0)
    """Share of the steps over which the learning rate rises."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are clipped to this global norm."""
    tokens_per_micro_batch: int = Field(16384, ge=1)
    """Most tokens in one forward and backward pass, which determine the peak memory of training."""
    layout: Literal["flat", "padded"] = "flat"
    """`flat`: a prompt goes through the layers once for all its answers, without padding, if the model supports it.
    `padded`: plain rows, which are slower and give the same results."""


class Engine(Section):
    ds_config: str = "zero2_offload"
    """Name of a file in `ds_configs/`, or a path to one."""
    timeout_s: Seconds = 1800.0
    """Seconds that a rank waits for the others before the run ends with an error that names them."""
    connect_s: Seconds = 60.0
    """Seconds that the ranks have to connect at the start."""
