"""The sections `run` and `eval`: the course of a run, and its evaluations."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trainer.config.sections.base import Section


class Run(Section):
    dir: Path | None = None
    """The run folder; by default `runs/<preset>-<date>-<time>`. The same command in the same folder resumes."""
    seed: int = Field(0, ge=0, le=2**63)
    """Seed of the order of the problems, the initial adapter and every sampled token."""
    steps: int | None = Field(None, ge=1, le=10**9)
    """Number of steps. Set this or `run.epochs`."""
    epochs: float | None = Field(None, gt=0.0, le=10**6)
    """Passes over the training problems. Set this or `run.steps`."""
    save_every: int = Field(50, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    save_minutes: float = Field(10.0, gt=0.0)
    """Save a checkpoint also if the last one is this many minutes old; with `rollout.ahead=1` this has no effect."""
    keep: int = Field(2, ge=1)
    """Checkpoints to keep; older ones are deleted."""
    strict_health: bool = False
    """End the run with status 5 at its first alarm; see docs/training.md."""
    track: Literal["wandb", "trackio"] | None = None
    """Also send the metrics to Weights & Biases or trackio (docs/metrics.md). If that fails, the run continues."""
    track_answers: bool = False
    """With `run.track`, also send eight answers, with rewards, at each evaluation and checkpoint."""
    strict_verdict: bool = False
    """Exit with status 3 if the verdict is `did not learn`, and with 4 if it is `cannot tell`; see docs/reports.md."""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads of each rank; by default cores / ranks on a machine without a GPU, else torch's default."""
    merge: bool = True
    """At the end, write the model with the adapter merged in, and compare the two."""


class Eval(Section):
    problems: int = Field(256, ge=0)
    """Number of held-out problems, always the same ones. 0 switches evaluation off."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations; by default only before the first step and after the last."""
    samples: int = Field(0, ge=0)
    """Number of answers to sample to each held-out problem, before training and after it, for pass@k."""
    metric: Literal["accuracy", "lenient", "loss"] = "accuracy"
    """What selects the best adapter or model: `accuracy`, counted as `reward.answer` says, or `lenient`, which counts
    answers in any format. Without gold answers the reward decides. A warm-up uses `warmup.metric`."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a new best; by default never."""
