"""The section `teacher`: on-policy distillation, where a model is taught token by token about its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from trainer.config.sections.base import Section


class Teacher(Section):
    """docs/warmup.md says when a teacher helps."""

    name: str | None = None
    """A model on the hub or a local folder whose log-probs of the sampled answers are learned from. Its tokenizer must
    be that of `model.name`."""
    revision: str | None = None
    """Branch, tag or commit of the teacher on the hub."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Store the teacher in 4 or 8 bits, as in `model.quantize`."""
    adapter: Path | None = None
    """The folder of an adapter of the teacher, such as that of an earlier run."""
    form: Literal["advantage", "loss"] = "advantage"
    """`advantage`: each token has the log-prob of the teacher minus that of the sampler as its advantage, the reverse
    KL of one token. `loss`: the teacher is the reference of the KL in the loss, whose weight is `algorithm.kl.coef`."""
    weight: float = Field(1.0, gt=0.0)
    """Weight of the teacher in the advantage of a token."""
    reward: float = Field(0.0, ge=0.0)
    """Weight of the verifier's advantage beside the teacher; 0 learns from the teacher alone."""
