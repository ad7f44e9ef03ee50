"""The sections `model` and `lora`: the model, and the part of it that is trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trainer.config.nearest_name import did_you_mean
from trainer.config.sections.base import Section

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # PEFT takes all layers of these names for experts, if there are any
ENDS = ("lm_head", "embed_tokens")  # vLLM serves their adapters for a few models only
_named_here = BeforeValidator(lambda targets: "all" if targets == "all-linear" else targets)  # PEFT's name for `all`


class Model(Section):
    name: str = "nano"
    """A model on the hub, a local folder, or `nano`, the small model that comes with Octet."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto` is bf16 on cards that support it, fp16 on older ones, fp32 on the CPU."""
    quantize: Literal["none", "nf4", "int8", "bf16"] = "none"
    """Store the frozen base of an adapter in 4 bits (`nf4`) or 8 bits (`int8`). `bf16` computes products with
    it in bf16, on a CPU with AMX, or an AMD CPU with AVX512-BF16. Embeddings and output layer stay in model.dtype. The
    adapter is merged into the original base; see docs/training.md."""
    quantize_head: Literal["none", "int8"] = "none"
    """Store the frozen output layer in 8 bits. Only for models whose output layer is not their embedding."""
    embeddings: Literal["device", "cpu"] = "device"
    """`cpu` keeps the frozen embedding in CPU memory, which slows down sampling. Only for models whose output layer is
    not their embedding."""
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """`auto` is torch's `sdpa`. `flash`, which needs the package flash_attn and a GPU, and `eager` train with padded
    rows."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    activation_offload: bool = False
    """Move what gradient checkpointing stores to CPU memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for authors you trust."""

    @property
    def rounded(self) -> str:
        """Return how the base, or its output layer, is quantised; "none" if an adapter is merged into the same base."""
        return self.quantize_head if self.quantize == "none" else self.quantize

    @property
    def clean(self) -> "Model":
        """Return the original model, into which an adapter is merged."""
        return self.model_copy(update={"quantize": "none", "quantize_head": "none", "embeddings": "device"})


class Lora(Section):
    enabled: bool = True
    """`false` trains the whole model and ignores the other settings of this section."""
    r: int = Field(16, ge=1, le=512)
    """Rank of the adapter."""
    alpha: int = Field(32, ge=1)
    """The adapter is scaled by alpha / r."""
    rslora: bool = False
    """Scale the adapter by alpha / sqrt(r) instead (rsLoRA), so that a high rank learns as fast as a low one."""
    dora: bool = False
    """Train the magnitude of each weight row separately from its direction (DoRA), which is slower."""
    init: Literal["zero", "pissa", "pissa_niter_16"] = "zero"
    """`zero`: the adapter has no effect at first. `pissa`: it starts as the principal part of each weight, is saved
    with twice the rank, and needs a smaller learning rate. `pissa_niter_16`: a faster approximation of `pissa`."""
    start: Path | None = None
    """Folder of an adapter to train further, over the same model and with the rank, alpha and targets of this section.
    The model with this adapter is the base of the run and the reference of its KL."""
    plus_ratio: float = Field(1.0, gt=0.0)
    """LoRA+: the learning rate of the B matrices, as a multiple of algorithm.lr. Try 16, with a lower lr."""
    targets: Annotated[Literal["attention", "all"] | tuple[str, ...], _named_here] = "all"
    """`all` linear layers (`all-linear` in PEFT), `attention` (q, k, v, o), or a list of module names."""

    @property
    def product(self) -> Literal["adapter", "model"]:
        """Return the kind of a run's result, which is also the name of its folder."""
        return "adapter" if self.enabled else "model"

    @property
    def served_rank(self) -> int:
        """Return the rank of the adapter as it is exported: PiSSA is written as a plain adapter of twice the rank."""
        return self.r if self.init == "zero" else 2 * self.r

    @property
    def named_layers(self) -> tuple[str, ...]:
        """Return the layers of a list of targets. PEFT identifies a layer by the end of its name."""
        return tuple(name.rpartition(".")[2] for name in self.targets) if isinstance(self.targets, tuple) else ()

    @property
    def named_ends(self) -> list[str]:
        """Return the named layers that vLLM does not serve, and that ZeRO-3 cannot split."""
        return [name for name in self.named_layers if name in ENDS]

    @property
    def named_targets(self) -> str:
        """Return the setting of the targets, for errors."""
        return f"lora.targets={self.targets if isinstance(self.targets, str) else ','.join(self.targets)}"

    def without_layer(self, missing: Sequence[str], layers: Sequence[str]) -> str:
        """Return an error message about targets that are no layers of the model, whose linear ones are `layers`."""
        which = "such layers" if isinstance(self.targets, str) else f"layer {', '.join(missing)}"
        which = f"no {which} to adapt.{did_you_mean(missing[0], layers)} Its linear ones are {', '.join(layers)}"
        return f"{self.named_targets}: this model has {which}. Write lora.targets=all or name some of them."
