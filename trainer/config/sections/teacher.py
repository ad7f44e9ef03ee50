"""The section `teacher`: on-policy distillation, where a model is taught token by token about its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.sections.base import Section, base_address, may_have_a_key


class Teacher(Section):
    """docs/warmup.md says when a teacher helps."""

    name: str | None = None
    """A model on the hub or a local folder whose log-probs of the sampled answers are learned from, with the tokenizer
    of `model.name`. With `teacher.url`, the name of a model at that server; by default its base."""
    url: str | None = None
    """A running vLLM server as teacher, such as `http://127.0.0.1:8000`. `rollout.vllm.wait_s` and
    `rollout.vllm.timeout_s` apply to it, too."""
    revision: str | None = None
    """Branch, tag or commit of the teacher on the hub."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Store the teacher in 4 or 8 bits, as in `model.quantize`."""
    adapter: Path | None = None
    """Folder of an adapter of the teacher. Without `teacher.name`, or with that of `model.name`, it uses the base of
    the trained adapter, which is loaded once."""
    form: Literal["advantage", "loss"] = "advantage"
    """`advantage`: the advantage of a token is the log-prob of the teacher minus that of the sampler. `loss`: the
    teacher is the reference of the KL in the loss, weighted by `algorithm.kl.coef`."""
    weight: float = Field(1.0, gt=0.0)
    """Weight of the teacher in the advantage of a token."""
    reward: float = Field(0.0, ge=0.0)
    """Weight of the verifier's advantage; 0 learns from the teacher alone."""

    @property
    def is_there(self) -> bool:
        return any(one is not None for one in (self.name, self.url, self.adapter))

    @field_validator("url")
    @classmethod
    def _base_address(cls, value: str | None) -> str | None:
        return value and base_address(value)

    @model_validator(mode="after")
    def _no_secret_in_the_settings(self) -> Teacher:
        if self.url and may_have_a_key(self.url):  # the message does not show it
            raise ValueError("the url has a user name or a query in it. Put the key of the server into VLLM_API_KEY")
        return self
