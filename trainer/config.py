"""The configuration: what can be set, and what it is when nobody sets it.

There is one place for each setting; numbers that follow from others are properties. How presets, recipes and the
command line become a configuration is in `settings.py`; memory and precision of the engine live in `ds_configs/`.
"""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from trainer.errors import did_you_mean

RUNS = Path("runs")


Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Model(Section):
    name: str = "nano"
    """A model on the hub, a local folder, or `nano`, the small model that is shipped with Octet."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """`auto` is bf16 on a card that has it, fp16 on an older one, fp32 on the CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run Python that came with the model. Only for authors you trust."""


class Lora(Section):
    r: int = Field(16, ge=1, le=512)
    """Rank of the adapter."""
    alpha: int = Field(32, ge=1)
    """The adapter is scaled by alpha / r."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Must stay 0: with dropout the policy that is trained is not the one that sampled."""
    targets: Literal["attention", "all"] | tuple[str, ...] = "attention"
    """`attention` (q, k, v, o), `all` linear layers, or a list of module names."""

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, value: float) -> float:
        if value:
            raise ValueError(
                "dropout makes the log-probs of step 1 differ from those that sampled, so the ratio is wrong. Write 0"
            )
        return value


class TaskSettings(Section):
    name: Literal["nano", "gsm8k", "math", "multiple_choice", "records"] = "nano"
    """`nano` is embedded and made up on the spot; the others are read. See `docs/tasks.md`."""
    data_dir: Path | None = None
    """A folder with `train` and `test` as .jsonl, .csv or .parquet; without it the data set comes from the hub."""
    path: str | None = None
    """One .jsonl, .csv or .parquet file, or a data set on the hub such as `owner/name`."""
    test_path: str | None = None
    """The held-out problems, named like `task.path`."""
    subset: str | None = None
    """Configuration of the data set on the hub."""
    split: str = "train"
    """Split of the data set on the hub to train on."""
    test_split: str | None = None
    """Split of the data set on the hub to hold out."""
    question: str | None = None
    """Column of the question; by default what the task's data set calls it."""
    answer: str | None = None
    """Column of the answer. `none`: there is none, and a custom reward judges (`records` only)."""
    solution: str | None = None
    """Column of a worked solution, for few-shot examples."""
    incorrect: tuple[str, ...] = ()
    """Columns of the wrong choices (`multiple_choice`); a column may hold a list of them."""
    holdout: float = Field(0.1, gt=0.0, le=1.0)
    """Share of the problems that is held out where no test set is named."""
    on_bad_record: Literal["error", "skip"] = "error"
    """A record that cannot be used ends the run before it starts, or is left out and counted."""
    limit: int | None = Field(None, ge=1)
    """Train on the first so many problems of the shuffled training set."""
    curriculum: Literal["none", "difficulty", "solve_rate"] = "none"
    """`difficulty`: easy ones first. `solve_rate`: those solved always or never are drawn less often."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskSettings:
        reads = sorted({"data_dir", "path"} & {key for key, value in self if value is not None})
        if self.name == "nano" and reads:
            raise ValueError(f"nano makes up its own problems and reads no {reads[0]}. Write task.name=records")
        if self.name == "records" and not reads:
            raise ValueError("records are read from your own data. Write task.path=FILE or task.data_dir=FOLDER")
        if len(reads) == 2:
            raise ValueError("problems come from one place. Write either task.path or task.data_dir")
        if self.path is None and (self.test_path or self.subset or self.test_split):
            raise ValueError("test_path, subset and test_split belong to a task.path. Write that too")
        return self


PROMPT_STYLES = ("auto", "chat", "r1_zero", "gsm8k", "boxed", "letter", "few_shot")


class PromptSettings(Section):
    style: str = "auto"
    """`chat`, `r1_zero`, `gsm8k`, `boxed`, `letter`, `few_shot` or a template file; `auto` is the task's own way."""
    system: str | None = None
    """A system message before the question."""
    shots: int = Field(4, ge=1)
    """Solved examples of `few_shot`."""
    answer: Literal["auto", "gsm8k", "boxed", "tags", "letter"] = "auto"
    """Where a strict answer has to stand (####, \\boxed{}, <answer>, a letter); `auto` follows the style."""
    max_tokens: int = Field(512, ge=1)
    """Problems with a longer prompt are left out, and counted."""

    @field_validator("style")
    @classmethod
    def _known_or_file(cls, style: str) -> str:
        if style in PROMPT_STYLES or Path(style).is_file():
            return style
        raise ValueError(
            f"it is neither a file nor a style.{did_you_mean(style, PROMPT_STYLES)} Known: {', '.join(PROMPT_STYLES)}"
        )


# Every reward that needs nothing but a weight (components.py), and the language model that grades (judge.py).
REWARDS = ("correct", "format", "length", "overlong", "repetition", "think_tags", "judge")
# Names that `octet score` writes beside the rewards, so no function of a user can have them.
RESERVED = (*REWARDS, "strict", "lenient", "correct_strict", "correct_lenient", "reward")


class Judge(Section):
    url: str | None = None
    """Base of an OpenAI-compatible endpoint, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """The grader, by the name that the endpoint knows it by."""
    rubric: str = "science"
    """What is graded: a file of `trainer/rewards/rubrics/`, or a YAML file of yours."""
    key_env: str = "OCTET_JUDGE_KEY"
    """Name of the environment variable that holds the key; a local endpoint may need none."""
    structured: bool = True
    """Ask for the grades by JSON schema. `false` for an endpoint that does not know `response_format`."""
    reply_tokens: int = Field(1024, ge=1)
    """Tokens that the grader may write, its thinking included."""
    concurrency: int = Field(8, ge=1, le=256)
    """Requests under way at once, on each rank."""
    timeout_s: float = Field(60.0, gt=0.0)
    """Seconds for one request."""
    retries: int = Field(4, ge=0)
    """Tries after the first, for 429, 5xx, no connection, and grades that cannot be read."""
    backoff_s: float = Field(1.0, ge=0.0)
    """Wait before the first retry; doubles each time, with jitter. `Retry-After` is honoured."""
    max_requests: int | None = Field(None, ge=1)
    """Budget of the run from its start, over all ranks, retries included. After it every grade is missing."""
    max_tokens: int | None = Field(None, ge=1)
    """Budget in tokens, as the endpoint counts them in `usage`; where it does not, four characters are one."""
    cache: Path | None = RUNS / "judge-cache"
    """Folder of earlier grades, one small file each; the same question is not paid for twice. `null`: none."""
    extra: dict[str, Any] = {}
    """Added to the body of each request, such as `{temperature: 1}`; `null` takes a key out of it."""

    @model_validator(mode="after")
    def _no_secret_in_here(self) -> Judge:
        """The values are not shown: they may be the key."""
        parts = urllib.parse.urlsplit(self.url or "http://none")
        if "@" in parts.netloc or parts.query:
            raise ValueError("the url has a user name or a query in it. Put the key into the environment; see key_env")
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError("key_env is the name of a variable, in capitals, not the key. Write OCTET_JUDGE_KEY")
        if not (self.url or "").isascii() or parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("the url does not begin with http:// or https://. Write one like http://localhost:8000/v1")
        return self


class Reward(Section):
    custom: tuple[str, ...] = ()
    """Functions of your own with TRL's signature, `my_rewards.py:score`, or a list; see docs/rewards.md."""
    weights: dict[str, float] = {"correct": 1.0}
    """Reward = sum of weight x component; see docs/rewards.md. A function of yours counts 1.0 if it is not named."""
    answer: Literal["strict", "lenient"] = "strict"
    """Which parse `correct` believes: the format that was asked for, or any answer that can be found."""
    symbolic: bool | None = None
    """Compare answers as mathematics too, with math-verify. By default the task decides: `math` does."""
    symbolic_s: float = Field(5.0, gt=0.0)
    """Seconds for one such comparison; what takes longer is not equal."""
    length_band: tuple[int, int] = (50, 500)
    """Characters between which `length` pays."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens before rollout.max_new_tokens over which `overlong` falls to -1; by default a fifth, as in DAPO."""
    repetition_words: int = Field(4, ge=1)
    """Words in a row that count as one phrase of `repetition`."""
    timeout: float = Field(60.0, gt=0.0)
    """Seconds for one call of a function of yours; after it the run stops."""
    custom_format: Literal["auto", "text", "chat"] = "auto"
    """What your functions get: texts, or TRL's lists of messages. `auto`: messages where the data set has them."""
    judge: Judge = Judge()
    """A language model that grades; give `judge` a weight."""

    @field_validator("custom", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("custom")
    @classmethod
    def _file_and_function(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            file, _, function = text.rpartition(":")
            if not file.endswith(".py") or not function.isidentifier():
                raise ValueError(f"{text} is not FILE.py:FUNCTION. Write one like my_rewards.py:score")
        names = [function_name(text) for text in value]
        for name in names:
            if name in RESERVED or names.count(name) > 1:
                raise ValueError(f"the name {name} is taken. Give the function another one")
        return value

    @field_validator("weights")
    @classmethod
    def _known_names(cls, value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        known = [*REWARDS, *map(function_name, info.data.get("custom", ()))]
        for name in value:
            if name not in known:
                raise ValueError(
                    f"there is no reward `{name}`.{did_you_mean(name, known)} Known: {', '.join(known)}, "
                    "and your own functions, with reward.custom=FILE.py:FUNCTION"
                )
        return value

    @model_validator(mode="after")
    def _something_to_learn_from(self) -> Reward:
        if not any(self.all_weights.values()):
            raise ValueError(
                "no reward has a weight, so there is nothing to learn. Write reward.weights={correct: 1.0}"
            )
        judged = "judge" in self.weights
        if judged and not (self.judge.url and self.judge.model):
            raise ValueError("weights.judge needs reward.judge.url and reward.judge.model. Name the endpoint's two")
        if self.judge.url and not judged:
            raise ValueError("judge.url is set, but the judge has no weight. Write reward.weights.judge=1.0")
        return self

    @property
    def all_weights(self) -> dict[str, float]:
        """With the functions of `custom` that have no weight of their own."""
        return {**self.weights, **{name: self.weights.get(name, 1.0) for name in map(function_name, self.custom)}}


def function_name(custom: str) -> str:
    """`score` of `my_rewards.py:score`."""
    return custom.rpartition(":")[2]


class Rollout(Section):
    engine: Literal["auto", "decode", "hf"] = "auto"
    """`decode` is Octet's own fast decoder, for Qwen2, Qwen3, Llama and Mistral; `hf` is model.generate; `auto` takes
    the first that can."""
    problems: int = Field(16, ge=1)
    """Problems a step, over all ranks."""
    group_size: int = 8
    """Completions of each problem."""
    temperature: float = Field(1.0, gt=0.0)
    """Divides the logits, in sampling and in training alike."""
    max_new_tokens: int = Field(256, ge=1)
    """Longer completions are cut and count as truncated."""
    dead_groups: Literal["drop", "keep"] = "drop"
    """A group whose rewards are all the same has no gradient. `drop` saves its forward and backward pass, and the loss
    is the mean over the tokens that are left; with `keep` its tokens count in that mean, so the rest weighs less."""
    rows: int = Field(128, ge=1)
    """Completions that are decoded side by side; halved where they do not fit into memory."""

    @field_validator("group_size")
    @classmethod
    def _group_of_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError("GRPO compares answers to the same problem, so it needs at least 2. Try 8")
        return value


class Algorithm(Section):
    loss: Literal["grpo_clip", "reinforce_baseline"] = "grpo_clip"
    """See `trainer/losses.py`."""
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo` divides by the standard deviation of the group, `dr_grpo` does not; see `trainer/advantages.py`."""
    clip_low: float = Field(0.2, ge=0.0, lt=1.0)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0)
    """The ratio is clipped at 1 + clip_high."""
    lr: float = Field(1e-5, gt=0.0)
    """Peak learning rate."""


class Optim(Section):
    name: Literal["adamw", "cpu_adam"] = "adamw"
    """`adamw` is torch's; `cpu_adam` is DeepSpeed's, which compiles for minutes at its first start."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's memory of the gradient and of its square."""
    weight_decay: float = Field(0.0, ge=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: float = Field(0.05, ge=0.0, lt=1.0)
    """Share of the steps in which the learning rate rises."""
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are clipped to this norm over all parameters."""
    tokens_per_micro_batch: int = Field(16384, ge=1)
    """Padded tokens of one forward and backward pass: the setting that decides the peak of memory."""


class Engine(Section):
    ds_config: str = "zero2_offload"
    """Name of a file in `ds_configs/`, or a path to one."""
    timeout_s: float = Field(1800.0, gt=0.0)
    """How long a rank waits for the others before the run ends with an error."""


class Run(Section):
    dir: Path | None = None
    """The run folder; by default `runs/<preset>-<date>-<time>`. The same command in the same folder resumes."""
    seed: int = Field(0, ge=0)
    steps: int | None = Field(None, ge=1)
    """Updates to do. Give this or `run.epochs`."""
    epochs: float | None = Field(None, gt=0.0)
    """Passes over the training problems. Give this or `run.steps`."""
    save_every: int = Field(50, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(2, ge=1)
    """Checkpoints that stay; older ones are deleted."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank; by default torch decides on a GPU machine, and cores / ranks on a CPU."""
    merge: bool = True
    """At the end, write the model with the adapter merged in, and compare the two."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Run:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a run has either steps or epochs. Write one of them, such as run.steps=100")
        return self


class Eval(Section):
    problems: int = Field(256, ge=0)
    """Held-out problems, the same ones each time. 0 switches evaluation off."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations; by default only before the first step and after the last."""
    metric: Literal["accuracy", "lenient"] = "accuracy"
    """What makes an adapter the best: answers in the format that was asked for, or in any."""
    patience: int | None = Field(None, ge=1)
    """Stop after so many evaluations in a row without a new best; by default never."""

    @model_validator(mode="after")
    def _patience_needs_evaluations(self) -> Eval:
        if self.patience is not None and (self.every is None or not self.problems):
            raise ValueError(
                f"patience={self.patience} counts evaluations in the course of the run, and there are none. "
                "Write eval.every=50, and eval.problems above 0"
            )
        return self


class Config(Section):
    model: Model = Model()
    lora: Lora = Lora()
    task: TaskSettings = TaskSettings()
    prompt: PromptSettings = PromptSettings()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    optim: Optim = Optim()
    engine: Engine = Engine()
    run: Run = Run(steps=100)
    eval: Eval = Eval()

    def total_steps(self, train_problems: int) -> int:
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.epochs is not None, "validated: one of the two is set"
        return max(1, round(self.run.epochs * train_problems / self.rollout.problems))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=100)


def sections() -> dict[str, Any]:
    return {name: info.annotation for name, info in Config.model_fields.items()}


def fields(section: Any = None, prefix: str = "") -> list[str]:
    """Every setting as `section.key`; those of a section in a section as `reward.judge.url`."""
    found = []
    for name, info in (section or Config).model_fields.items():
        inner = is_section(info.annotation)
        found += fields(info.annotation, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
