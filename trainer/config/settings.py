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

from trainer.errors import ConfigError, did_you_mean

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
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Keep the frozen base of an adapter in 4 bits (NF4, doubly quantised) or 8 bits (LLM.int8), both of bitsandbytes.
    Embeddings and output layer stay in model.dtype, and the adapter is merged into the clean base."""
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """`auto` is `sdpa`, torch's own, the only one that optim.layout=flat works with. `flash` needs the package
    flash_attn and a card, and trains with padded rows, as `eager` does."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    activation_offload: bool = False
    """Keep what gradient_checkpointing keeps, the input of each layer, in CPU memory."""
    trust_remote_code: bool = False
    """Run Python that came with the model. Only for authors you trust."""

    @model_validator(mode="after")
    def _something_to_offload(self) -> Model:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offload=true moves what gradient checkpointing keeps, and that is switched off. "
                "Write model.gradient_checkpointing=true as well"
            )
        return self

    @property
    def clean(self) -> Model:
        """The same as it was published: what an adapter is merged into."""
        return self.model_copy(update={"quantize": "none"})


class Lora(Section):
    enabled: bool = True
    """`false` trains the whole model; the other settings of this section are then ignored."""
    r: int = Field(16, ge=1, le=512)
    """Rank of the adapter."""
    alpha: int = Field(32, ge=1)
    """The adapter is scaled by alpha / r."""
    rslora: bool = False
    """Scale it by alpha / sqrt(r) instead (rsLoRA), so that a higher rank learns as fast as a low one."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction (DoRA): better at low ranks, and slower."""
    init: Literal["zero", "pissa", "pissa_niter_16"] = "zero"
    """`zero`: it starts as nothing. `pissa`: it starts as the principal part of each weight, and the rest is frozen;
    it is saved as a plain adapter of twice the rank. `pissa_niter_16` finds that part faster, and nearly."""
    plus_ratio: float = Field(1.0, gt=0.0)
    """LoRA+: the learning rate of the B matrices is this multiple of algorithm.lr. Try 16, with a lower lr."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Must stay 0: with dropout the policy that is trained is not the one that sampled."""
    targets: Literal["attention", "all"] | tuple[str, ...] = "attention"
    """`attention` (q, k, v, o), `all` linear layers (`all-linear` in PEFT), or a list of module names."""

    @property
    def product(self) -> Literal["adapter", "model"]:
        """What a run makes, and the name of its folder."""
        return "adapter" if self.enabled else "model"

    @property
    def served_rank(self) -> int:
        """Of the adapter as it is exported: PiSSA is written as a plain one of twice the rank."""
        return self.r if self.init == "zero" else 2 * self.r

    @property
    def unserved_targets(self) -> list[str]:
        """PEFT knows a layer by the end of its name."""
        named = self.targets if isinstance(self.targets, tuple) else ()
        return [name for name in named if name.rpartition(".")[2] in UNSERVED]

    @field_validator("targets", mode="before")
    @classmethod
    def _name_of_peft(cls, value: Any) -> Any:
        return "all" if value == "all-linear" else value

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
    """What is graded: a file of `trainer/reward/rubrics/`, or a YAML file of yours."""
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


SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of an adapter, as vLLM reserves memory for it
UNSERVED = ("lm_head", "embed_tokens")  # layers of which vLLM takes no adapter, but for a few models


class Vllm(Section):
    """Where and how vLLM samples: docs/vllm.md."""

    urls: tuple[str, ...] = ()
    """Servers that are running, such as `http://127.0.0.1:8000`; several share the load."""
    start: bool = False
    """Start servers of the run's own, and stop them with it. They listen on this machine only."""
    python: Path | None = None
    """Interpreter of the environment that vLLM is installed in; by default that of the trainer."""
    devices: tuple[int, ...] = ()
    """CUDA devices of the servers that the run starts, such as `0` or `0,1`; the policy is trained on the others. On a
    machine with cards they have to be named."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices that share one copy of the model. A server is started for every so many of `devices`."""
    memory: float | None = Field(None, gt=0.0, lt=1.0)
    """Share of a device's memory for vLLM; by default 0.9 of devices of its own, and of one that it shares what holds
    the base, the adapter and the cache of all rows: `octet plan` counts it."""
    sleep: Literal[0, 1] = 1
    """Of `vllm_colocate`, while the policy trains: 0 keeps everything on the card, 1 moves the weights into CPU memory
    and gives the cache back."""
    arguments: tuple[str, ...] = ()
    """More arguments for the servers that the run starts, such as `--quantization,fp8`."""
    wait_s: float = Field(600.0, gt=0.0)
    """How long a server may be away, at the start and later, before the run ends."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Seconds for the answers to one problem, what they wait for at a busy server included."""
    max_difference: float = Field(1.0, gt=0.0)
    """Mean difference of a token's log-prob between sampler and trainer from which on the run is refused, or ended."""

    @field_validator("urls", "arguments", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("devices", mode="before")
    @classmethod
    def _by_comma(cls, value: Any) -> Any:
        return str(value).split(",") if isinstance(value, (str, int)) else value

    @field_validator("urls")
    @classmethod
    def _base_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urllib.parse.urlsplit(url)
            if not url.isascii() or parts.scheme not in ("http", "https") or not parts.netloc or parts.query:
                raise ValueError(f"{url} is not the address of a server. Write one like http://127.0.0.1:8000")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in value)

    @model_validator(mode="after")
    def _running_or_started(self) -> Vllm:
        if self.urls and self.start:
            raise ValueError("urls name servers that are running, and start makes others. Write one of the two")
        if len(set(self.devices)) < len(self.devices) or min(self.devices, default=0) < 0:
            raise ValueError(
                f"devices={','.join(map(str, self.devices))} are not numbers of different cards. Write some like 0,1"
            )
        if len(self.devices) % self.tensor_parallel:
            raise ValueError(
                f"devices={','.join(map(str, self.devices))} cannot be dealt out by "
                f"tensor_parallel={self.tensor_parallel}. Name a multiple of it"
            )
        return self


class Rollout(Section):
    engine: Literal["auto", "decode", "hf", "vllm_server", "vllm_colocate"] = "auto"
    """`decode` is Octet's own fast decoder, for Qwen2, Qwen3, Llama and Mistral; `hf` is model.generate; `vllm_server`
    asks servers, `vllm_colocate` has vLLM in the trainer's process. `auto` takes servers where rollout.vllm names or
    starts some, vLLM where it is installed on a card that has room for both, else `decode`, else `hf`."""
    vllm: Vllm = Vllm()
    """For the two engines of vLLM."""
    ahead: Literal[0, 1] = 0
    """1: the answers of the next step are sampled while this one trains, by the policy before the update. Only with
    `vllm_server`."""
    problems: int = Field(16, ge=1)
    """Problems a step, over all ranks."""
    group_size: int = 8
    """Completions of each problem."""
    temperature: float = Field(1.0, gt=0.0)
    """Divides the logits, in sampling and in training alike."""
    max_new_tokens: int = Field(256, ge=1)
    """Longer completions are cut and count as truncated."""
    dead_groups: Literal["drop", "keep", "refill"] = "drop"
    """A group whose rewards are all the same has no advantage. `drop` saves its forward and backward pass, and the loss
    is the mean over the tokens that are left (a KL or entropy term is then of live groups alone, too); with `keep` its
    tokens count in that mean, so the rest weighs less; `refill` samples fresh problems in its place (dynamic
    sampling)."""
    refills: int = Field(3, ge=1)
    """Rounds of fresh problems that `refill` tries in a step at most."""
    rows: int = Field(128, ge=1)
    """Completions that the local samplers decode side by side; halved where they do not fit into memory. A server of
    vLLM that was started elsewhere goes by its own memory, and queues what is beyond it."""

    @field_validator("group_size")
    @classmethod
    def _group_of_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError("GRPO compares answers to the same problem, so it needs at least 2. Try 8")
        return value

    @property
    def asks_servers(self) -> bool:
        named = bool(self.vllm.urls) or self.vllm.start
        return self.engine == "vllm_server" or (self.engine == "auto" and named)


class Kl(Section):
    coef: float = Field(0.0, ge=0.0)
    """Price of moving away from the reference; with 0 there is no reference, no forward pass and no memory for it."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL is estimated from one sample; see `trainer/loss/kl.py`."""
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the reward of each answer before the advantages (summed over its tokens)."""
    target: float | None = Field(None, gt=0.0)
    """Adapt the coefficient so that the mean KL of a token stays near this."""
    refresh: int | None = Field(None, ge=1)
    """Steps after which the reference becomes the policy of that moment; by default it stays the model of the start."""

    @model_validator(mode="after")
    def _needs_a_start(self) -> Kl:
        if self.coef == 0 and (self.target or self.refresh):
            name = "target" if self.target else "refresh"
            raise ValueError(f"{name} has no effect while coef is 0. Write algorithm.kl.coef=0.04 as well")
        return self


class Correction(Section):
    level: Literal["none", "token", "sequence"] = "token"
    """Weigh each token by policy / sampler probability, of the token or of the whole answer (geometric mean)."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What is above the cap counts as the cap, or not at all."""
    cap: float = Field(2.0, ge=1.0)
    """Largest weight."""


class GradReg(Section):
    strength: float = Field(0.0, ge=0.0)
    """Weight of the penalty on the gradient's norm; published: 1e-3 to 1e-2. Above 0 a step costs two gradients."""
    eps: float = Field(1e-3, gt=0.0)
    """How far along the gradient the second one is taken."""
    warmup: int = Field(0, ge=0)
    """Steps over which the strength rises to its value."""


class Algorithm(Section):
    """Every objective in one table: docs/objectives.md."""

    loss: Literal["reinforce", "reinforce_baseline", "grpo_clip", "gspo", "cispo"] = "grpo_clip"
    """See `trainer/loss/objectives.py`."""
    aggregation: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    """How the tokens of a step become one number: mean over all tokens, over answers, by a constant, over groups."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "batch_std"] = "grpo"
    """`grpo` divides by the standard deviation of the group, `dr_grpo` does not, `rloo` leaves the answer itself out
    of the mean, `batch_std` divides by the deviation of the whole step."""
    advantage_eps: float = Field(1e-6, gt=0.0)
    """Added to the standard deviation."""
    advantage_ddof: Literal[0, 1] = 0
    """Standard deviation over G (0) or over G - 1 (1)."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0)
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1.0)
    """A second bound, on the ratio of answers with a negative advantage; usual is 3."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of answers (mu)."""
    minibatches: int = Field(1, ge=1)
    """Updates in one pass: the answers are dealt out over so many."""
    truncated: Literal["keep", "mask"] = "keep"
    """Answers cut off at max_new_tokens: `mask` takes them out of the loss, not out of the group's mean."""
    entropy_bonus: float = 0.0
    """Coefficient of the entropy that is added to the objective."""
    top_entropy: float = Field(1.0, gt=0.0, le=1.0)
    """Train only on this share of an update's tokens, those of the highest entropy."""
    kl: Kl = Kl()
    """A penalty on the distance to a reference model."""
    correction: Correction = Correction()
    """For the difference between the probabilities that sampled and those that are trained."""
    gradreg: GradReg = GradReg()
    """Gradient regularisation: prefer flat places."""
    lr: float = Field(1e-5, gt=0.0)
    """Peak learning rate."""

    @model_validator(mode="after")
    def _second_bound_behind_the_first(self) -> Algorithm:
        if self.dual_clip is not None and self.loss not in ("grpo_clip", "gspo"):
            raise ValueError(
                f"dual_clip={self.dual_clip} has no effect on loss={self.loss}. Write algorithm.dual_clip=null"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip={self.dual_clip} is inside the first bound, 1 + clip_high = {1 + self.clip_high:g}. "
                f"Write algorithm.dual_clip={max(3.0, 2 * (1 + self.clip_high)):g}"
            )
        return self

    @model_validator(mode="after")
    def _something_moves_between_refreshes(self) -> Algorithm:
        if self.kl.refresh == 1 and (self.kl.where == "reward" or self.epochs * self.minibatches == 1):
            raise ValueError(
                "kl.refresh=1 makes the policy its own reference, so the KL is always 0. "
                "Write algorithm.kl.refresh=50, or with kl.where=loss algorithm.epochs=2"
            )
        return self


class Optim(Section):
    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw` is torch's. `adamw_8bit` is bitsandbytes's, with moments of a quarter of the size; it needs an
    engine.ds_config without optimizer offload, such as zero2, because in CPU memory it is 40 times slower."""
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
    """Tokens of one forward and backward pass: the setting that decides the peak of memory."""
    layout: Literal["flat", "padded"] = "flat"
    """`flat`: a prompt goes through the layers once for all its answers, and no padding does, where the model allows
    it. `padded`: plain rows; slower, and the same numbers."""


class Engine(Section):
    ds_config: str = "zero2_offload"
    """Name of a file in `ds_configs/`, or a path to one."""
    timeout_s: float = Field(1800.0, gt=0.0)
    """How long a rank waits for the others in the course of the run, before it ends with an error that names them."""
    connect_s: float = Field(60.0, gt=0.0)
    """How long the ranks have to find each other at the start, before any weights load."""


class Run(Section):
    dir: Path | None = None
    """The run folder; by default `runs/<preset>-<date>-<time>`. The same command in the same folder resumes."""
    seed: int = Field(0, ge=0, le=2**63)
    """The order of the problems, the first values of the adapter and every sampled token follow from it."""
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
    """At the end, write the model with the adapter merged in, and compare the two. Without an adapter it is ignored."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Run:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs}: a run has either steps or epochs. "
                "Write one of them, such as run.steps=100"
            )
        return self


class Eval(Section):
    problems: int = Field(256, ge=0)
    """Held-out problems, the same ones each time. 0 switches evaluation off."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations; by default only before the first step and after the last."""
    metric: Literal["accuracy", "lenient"] = "accuracy"
    """What makes an adapter (or model) the best: answers in the format that was asked for, or in any."""
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

    @property
    def merges(self) -> bool:
        return self.run.merge and self.lora.enabled

    def total_steps(self, train_problems: int) -> int:
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.epochs is not None, "validated: one of the two is set"
        return max(1, round(self.run.epochs * train_problems / self.rollout.problems))

    def refuse_idle(self, ranks: int) -> None:
        """A group never crosses a rank, so every rank has a problem of its own."""
        problems = self.rollout.problems
        if problems < ranks:
            raise ConfigError(
                f"rollout.problems={problems}: each of the {ranks} ranks needs one. Write rollout.problems={ranks} or "
                f"more, or take {problems} GPUs or fewer."
            )

    @model_validator(mode="after")
    def _quantised_bases_are_frozen_and_whole(self) -> Config:
        kind = self.model.quantize
        if kind != "none" and not self.lora.enabled:
            raise ValueError(
                f"model.quantize={kind}: quantised weights cannot be trained, only an adapter over them. Write "
                "lora.enabled=true, or model.quantize=none"
            )
        if kind != "none" and self.lora.init != "zero":
            raise ValueError(
                f"lora.init={self.lora.init}: it takes its part out of the weights, and those of model.quantize={kind} "
                "cannot be rewritten. Write lora.init=zero, or model.quantize=none"
            )
        if kind == "int8" and self.lora.dora:
            raise ValueError(
                "lora.dora=true: PEFT cannot measure the rows of model.quantize=int8 reliably. Write "
                "model.quantize=nf4, or lora.dora=false"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.algorithm.loss == "reinforce" and self.rollout.dead_groups == "refill":
            raise ValueError(
                "rollout.dead_groups=refill: algorithm.loss=reinforce learns from the raw reward, so a group of equal "
                "rewards is not dead. Write rollout.dead_groups=keep"
            )
        if self.algorithm.minibatches > self.rollout.problems:
            raise ValueError(
                f"algorithm.minibatches={self.algorithm.minibatches}: groups stay whole, and a step has "
                f"rollout.problems={self.rollout.problems}. Write algorithm.minibatches={self.rollout.problems} or less"
            )
        return self

    @model_validator(mode="after")
    def _vllm_can(self) -> Config:
        rollout = self.rollout
        if rollout.engine == "vllm_server" and not (rollout.vllm.urls or rollout.vllm.start):
            raise ValueError(
                "rollout.engine=vllm_server: no server is named. Write rollout.vllm.urls=http://127.0.0.1:8000, or "
                "rollout.vllm.start=true"
            )
        if rollout.engine not in ("auto", "vllm_server") and (rollout.vllm.urls or rollout.vllm.start):
            raise ValueError(
                f"rollout.engine={rollout.engine}: it asks no server, and rollout.vllm has one. "
                "Write rollout.engine=vllm_server"
            )
        if rollout.ahead and not rollout.asks_servers:
            raise ValueError(
                "rollout.ahead=1: only a server samples while the policy trains. Write rollout.engine=vllm_server"
            )
        if rollout.ahead and self.algorithm.correction.level == "none":
            raise ValueError(
                "rollout.ahead=1: the answers are of the policy before, and algorithm.correction.level=none does not "
                "make up for that. Write algorithm.correction.level=token"
            )
        if rollout.asks_servers or rollout.engine == "vllm_colocate":
            self._vllm_serves_the_adapter()
        return self

    def _vllm_serves_the_adapter(self) -> None:
        if not self.lora.enabled:
            if self.rollout.vllm.urls:
                raise ValueError(
                    "rollout.vllm.urls: the weights of a whole model (lora.enabled=false) go only to servers that the "
                    "run started. Write rollout.vllm.start=true"
                )
        elif self.lora.dora:
            raise ValueError(
                f"rollout.engine={self.rollout.engine}: vLLM serves no DoRA. Write lora.dora=false, or "
                "rollout.engine=decode"
            )
        elif unserved := self.lora.unserved_targets:
            raise ValueError(
                f"lora.targets={','.join(self.lora.targets)}: vLLM serves no adapter of {', '.join(unserved)}, but "
                "for a few models. Write lora.targets=all, which leaves them out, or rollout.engine=decode"
            )
        elif self.lora.served_rank > SERVED_RANKS[-1]:
            most = SERVED_RANKS[-1]
            raise ValueError(
                f"lora.r={self.lora.r}: vLLM serves a rank of at most {most}, and this adapter leaves the run with "
                f"{self.lora.served_rank}. Write lora.r={most * self.lora.r // self.lora.served_rank} or less"
            )

    @property
    def drops_dead_groups(self) -> bool:
        """The raw reward of `reinforce` moves the policy even where all answers are worth the same."""
        return self.rollout.dead_groups != "keep" and self.algorithm.loss != "reinforce"

    @property
    def constant_divisor(self) -> float:
        """The longest that the answers of one update could be: what `dr_grpo` divides by, whatever was sampled."""
        rollout = self.rollout
        return rollout.problems * rollout.group_size * rollout.max_new_tokens / self.algorithm.minibatches

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
