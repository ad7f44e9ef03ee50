"""The section `rollout`: how answers are sampled, and by which engine."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.sections.base import BaseAddress, Seconds, Section, one_or_many

SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # adapter ranks for which vLLM can reserve memory


class Vllm(Section):
    """Settings of the vLLM engines; see docs/vllm.md."""

    urls: tuple[BaseAddress, ...] = ()
    """Running servers, such as `http://127.0.0.1:8000`; several share the load."""
    start: bool = False
    """Start servers for this run, and stop them at its end. They listen on this machine only."""
    python: Path | None = None
    """Python interpreter of the environment with vLLM; by default the trainer's."""
    devices: tuple[int, ...] = ()
    """CUDA devices for the servers that the run starts, such as `0,1`; the policy trains on the others. Required on a
    machine with GPUs."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices that share one copy of the model. Each such group of `devices` gets one server."""
    memory: float | None = Field(None, gt=0.0, lt=1.0)
    """Share of a device's memory for vLLM. The default is 0.9 of a device of its own, or on a shared device what `octet
    plan` computes."""
    sleep: Literal[0, 1] = 1
    """While the policy trains, `vllm_colocate` keeps everything on the GPU (0), or moves its weights to CPU memory and
    frees its cache (1)."""
    arguments: tuple[str, ...] = ()
    """More arguments for the servers that the run starts, such as `--quantization,fp8`."""
    wait_s: Seconds = 600.0
    """Seconds that a server may be unreachable before the run ends."""
    timeout_s: Seconds = 600.0
    """Timeout for the answers to one problem, in seconds, including the time in a server's queue."""
    max_difference: float = Field(1.0, gt=0.0)
    """Largest mean difference between the log-probs of sampler and trainer. Above it, the run is refused or ends."""

    @field_validator("urls", "arguments", "devices", mode="before")
    @classmethod
    def _by_comma(cls, value: Any) -> Any:
        return str(value).split(",") if isinstance(value, (str, int)) else value

    @model_validator(mode="after")
    def _no_secret_in_the_settings(self) -> "Vllm":
        """Refuse what may be a key, which config.yaml and `ps` would show. The message does not show the value."""
        if any(re.match("--(api[-_]key|hf[-_]token)", argument) for argument in self.arguments):
            raise ValueError("arguments have a key in them. Put it into the environment: VLLM_API_KEY, or HF_TOKEN")
        return self


class Turns(Section):
    """Limits of an answer that an environment replies to; see docs/environments.md."""

    most: int = Field(8, ge=1)
    """Most turns of the model in an answer; longer answers are truncated."""
    tokens: int | None = Field(None, ge=1)
    """Most tokens of a turn; an answer with a longer turn is truncated there. By default there is no such limit."""
    observation: int = Field(256, ge=1)
    """Most tokens of a reply of the environment; a longer one is cut, and says so."""
    seconds: Seconds = 60.0
    """Timeout of a reply, in seconds, after which the run stops."""


class Rollout(Section):
    engine: Literal["auto", "decode", "hf", "vllm_server", "vllm_colocate"] = "auto"
    """`decode` is Octet's own decoder, `hf` is model.generate, `vllm_server` uses servers, and `vllm_colocate` runs
    vLLM in the trainer's process. `auto` uses servers if rollout.vllm names or starts some, else `decode`, else
    `hf`."""
    weights: Literal["same", "int8", "fp8"] = "same"
    """The weights of the frozen base that Octet's decoder reads in a decode step: those of training, or a copy in 8
    bits; see docs/training.md. `fp8` needs a card of compute capability 8.9 or more."""
    vllm: Vllm = Vllm()
    """Settings of the two vLLM engines."""
    ahead: Literal[0, 1] = 0
    """1: sample the answers of the next step while this one trains, with the policy before the update. Only with
    `vllm_server`."""
    problems: int = Field(16, ge=1, le=10**6)
    """Problems in a step, over all ranks."""
    group_size: int = Field(8, le=10**6)
    """Completions of each problem."""
    temperature: float = Field(1.0, gt=0.0)
    """Divides the logits, in sampling and in training."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens of a completion; longer ones are truncated."""
    turns: Turns = Turns()
    """Limits of answers that have several turns, because a task has tools or an environment."""
    stop: Annotated[tuple[str, ...], one_or_many] = ()
    """Strings, or names of special tokens, that end an answer, besides those of the prompt style; see docs/tasks.md."""
    dead_groups: Literal["drop", "keep", "refill"] = "drop"
    """What to do with groups whose rewards are all equal, so that their advantages are 0. `drop` leaves them out, also
    out of the KL and entropy terms. `keep` counts their tokens in the mean. `refill` samples new problems in their
    place (dynamic sampling)."""
    dead_by: Literal["reward", "correct"] = "reward"
    """`correct`: a group is also dead if all its answers are right or all are wrong, as in DAPO. With `reward`, wrong
    answers can still teach the format; see docs/rewards.md."""
    refills: int = Field(3, ge=1)
    """Most rounds of new problems that `refill` samples in a step."""
    rows: int = Field(128, ge=1)
    """Completions that are decoded at once; halved if they do not fit into memory. A vLLM server decides by itself,
    unless the run has started it on a CPU."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty string would end every answer at once. Leave it out")
        if escaped := next((one for one in value if re.search(r"\\n(?![a-z])", one)), None):
            meant = json.dumps([escaped.replace("\\n", "\n")])
            raise ValueError(f"{escaped} has a backslash and an n, no line break. Write JSON: rollout.stop='{meant}'")
        return value

    @property
    def names_servers(self) -> bool:
        return bool(self.vllm.urls) or self.vllm.start

    @property
    def uses_servers(self) -> bool:
        return self.engine == "vllm_server" or (self.engine == "auto" and self.names_servers)

    @property
    def uses_vllm(self) -> bool:
        return self.uses_servers or self.engine == "vllm_colocate"
