"""The section `reward`: how answers are rewarded."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from trainer.config.nearest_name import did_you_mean
from trainer.config.sections.base import RUNS, Address, Seconds, Section, one_or_many

# The rewards of reward/built_in.py, the language model that grades (reward/judge.py), and tests (reward/programs.py).
REWARDS = ("correct", "format", "length", "overlong", "repetition", "think_tags", "environment", "judge", "code")
NULL_OR_NUMBER = {"anyOf": [{"type": "number"}, {"type": "null"}]}  # `null` takes away a weight of a preset
KEY_IN_JSON = re.compile(r'"[^"]*(api[-_ ]?key|authorization|secret|password)[^"]*": *"', re.IGNORECASE)
RIGHT = ("correct", "code")  # the rewards for being right; if one of them has a weight, the others are shaping
# `octet score` writes these names, so a custom reward function cannot have them.
RESERVED = (*REWARDS, "strict", "lenient", "correct_strict", "correct_lenient", "reward", "mean", "std", "min", "max")


class Judge(Section):
    url: Address | None = None
    """Base URL of an OpenAI-compatible endpoint, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """Name of the judge's model at the endpoint."""
    rubric: str = "science"
    """What is graded: the name of a file in `trainer/reward/rubrics/`, or your own YAML file."""
    key_env: str = "OCTET_JUDGE_KEY"
    """Environment variable with the API key; a local endpoint may need none."""
    structured: bool = True
    """Request grades with a JSON schema. `false` for an endpoint without `response_format`."""
    concurrency: int = Field(8, ge=1, le=256)
    """Concurrent requests of each rank."""
    timeout_s: Seconds = 60.0
    """Timeout of one request, in seconds."""
    retries: int = Field(4, ge=0)
    """Retries after status 429 or 5xx, a failed connection, or unreadable grades."""
    backoff_s: float = Field(1.0, ge=0.0)
    """Seconds before the first retry; doubles each time, with jitter. `Retry-After` is honoured."""
    max_requests: int | None = Field(None, ge=1)
    """Budget of requests for the whole run, over all ranks, including retries. Afterwards grades are missing."""
    max_tokens: int | None = Field(None, ge=1)
    """Budget of tokens, from `usage` in the replies, or else four characters per token."""
    cache: Path | None = RUNS / "judge-cache"
    """Folder with earlier grades, so that no answer is graded twice. `null`: no cache."""
    extra: dict[str, Any] = Field({})
    """Merged into the body of each request, such as `{max_tokens: 2048}`; `null` removes a key."""

    @model_validator(mode="after")
    def _no_secret_in_the_settings(self) -> "Judge":
        """Refuse what may be a key. The messages do not show the values."""
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError("key_env is the name of a variable, in capitals, not the key. Write OCTET_JUDGE_KEY")
        try:
            extra = json.dumps(self.extra, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("extra has a value that JSON does not know, such as a date. Write it in quotes") from None
        if KEY_IN_JSON.search(extra):
            raise ValueError("extra has an API key or a password in it. Put it into the environment; see key_env")
        return self


class Code(Section):
    tests: str = "tests"
    """Column of the tests: inputs and outputs, or assertions in Python. MBPP has `test_list`, HumanEval `test`."""
    score: Literal["all", "share"] = "all"
    """`all`: 1 if all tests pass, else 0. `share`: the share of the tests that pass."""
    command: str | None = None
    """Shell command that runs a program in another language, from the file `program`, such as `gcc -x c program &&
    ./a.out`. Its tests are inputs and outputs."""
    seconds: Seconds = 5.0
    """Time limit for all tests of one answer, in seconds."""
    memory_mb: int = Field(512, ge=64)
    """Memory of a process, in MB."""
    processes: int = Field(16, ge=1)
    """Processes of a command, or threads of a Python program."""
    file_mb: int = Field(16, ge=1)
    """Size of the folder in memory that a program may write to, in MB."""
    output_kb: int = Field(256, ge=1)
    """Most output of a program, in kB; a program that prints more fails."""
    unsafe: bool = False
    """Run programs although this machine cannot confine them completely."""


class Reward(Section):
    custom: Annotated[tuple[str, ...], one_or_many] = ()
    """Your own reward functions with TRL's signature: `my_rewards.py:score`, or a list; see docs/rewards.md."""
    weights: dict[str, Annotated[float, WithJsonSchema(NULL_OR_NUMBER)]] = Field({"correct": 1.0})
    """Weights of the components, whose weighted sum is the reward; see docs/rewards.md. With
    `reward.custom` alone, each function has weight 1.0 and nothing else is paid."""
    gate: bool = True
    """Prevent other rewards from outvoting `correct` and `code`; see docs/rewards.md. `false` divides the whole reward
    by the standard deviation of the group, as the papers do."""
    answer: Literal["strict", "lenient"] = "strict"
    """What `correct` accepts: an answer in the requested format (`strict`), or anywhere in the text (`lenient`)."""
    control: Literal["none", "random", "shuffled_gold", "shuffled_advantages"] = "none"
    """Train a control of an experiment: with coin flips as rewards, the gold answers of other problems, or the
    advantages of other answers to the same problem. See docs/studies.md."""
    ignore_accents: bool = False
    """Ignore accents, so that Brasilia equals Brasília."""
    symbolic: bool | None = None
    """Also compare answers symbolically, with math-verify. By default only the task `math` does."""
    symbolic_s: Seconds = 5.0
    """Timeout of one symbolic comparison, in seconds, after which the answers count as different."""
    length_band: tuple[int, int] = (50, 500)
    """Smallest and largest number of characters that `length` rewards."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens before rollout.max_new_tokens over which `overlong` falls from 0 to -1; by default a fifth of it, as in
    DAPO."""
    repetition_words: int = Field(4, ge=1)
    """Words in a phrase of `repetition`."""
    timeout: Seconds = 60.0
    """Timeout of one call of a custom function, in seconds, after which the run stops."""
    custom_format: Literal["auto", "text", "chat"] = "auto"
    """What custom functions receive: texts, or TRL's lists of messages. `auto`: messages if the data set has them."""
    code: Code = Code()
    """Programs that are run against tests; they need a weight, reward.weights.code; see docs/sandbox.md."""
    judge: Judge = Judge()
    """A language model that grades answers; it needs a weight, reward.weights.judge."""

    @model_validator(mode="before")
    @classmethod
    def _functions_alone(cls, values: Any) -> Any:
        """Leave out the default weights beside custom functions."""
        is_alone = isinstance(values, dict) and values.get("custom") and "weights" not in values
        return {**values, "weights": {}} if is_alone else values

    @field_validator("length_band")
    @classmethod
    def _from_and_to(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] <= value[1]:
            raise ValueError("the first number is negative, or larger than the second. Write [50, 500]")
        return value

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

    @field_validator("weights", mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """Leave out names with `null`, which take away a weight of a preset. `correct:1.0` is such a name for YAML; it
        stays, so that it is refused."""
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one is not None or ":" in str(name)}

    @field_validator("weights")
    @classmethod
    def _known_names(cls, value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        known = [*REWARDS, *map(function_name, info.data.get("custom", ()))]
        for name in value if "custom" in info.data else ():  # otherwise custom was refused, with a message of its own
            if name not in known:
                nearest = did_you_mean(name, known)
                own = "and your own functions, with reward.custom=FILE.py:FUNCTION"
                raise ValueError(f"there is no reward `{name}`.{nearest} Known: {', '.join(known)}, {own}")
        return value

    @property
    def all_weights(self) -> dict[str, float]:
        """Return all weights, with 1.0 for custom functions that have no weight."""
        return {**self.weights, **{name: self.weights.get(name, 1.0) for name in map(function_name, self.custom)}}


def function_name(custom: str) -> str:
    """Return `score` for `my_rewards.py:score`."""
    return custom.rpartition(":")[2]
