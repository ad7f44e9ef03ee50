"""The sections `task` and `prompt`: the problems, and how a model is asked."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from trainer.config.nearest_name import did_you_mean
from trainer.config.sections.base import Section, one_or_many

# The tasks that come with Octet, and their functions, which take the settings like that of a user's file.
BUILT_IN = {
    "nano": "trainer.problem.word_problems:nano",
    "addition": "trainer.problem.word_problems:AdditionTask",
    "gsm8k": "trainer.problem.published:Gsm8kTask",
    "gsm8k-renumbered": "trainer.problem.renumbered:RenumberedTask",
    "math": "trainer.problem.published:MathTask",
    "multiple_choice": "trainer.problem.published:MultipleChoiceTask",
    "records": "trainer.problem.own_records:RecordsTask",
    "reasoning_gym": "trainer.problem.generators:GeneratorTask",
    "mix": "trainer.problem.mixture:MixedTask",
}
TOOLS = ("calculator", "python")  # those of problem/tools.py


def known_task(name: str) -> str:
    """Return the name of a task. Raise ValueError if there is no such task; whether a user's file exists is checked
    later."""
    kind, _, part = name.partition(":")
    takes_part = kind.endswith(".py") or kind == "reasoning_gym"
    if part.isidentifier() if takes_part else name in BUILT_IN:
        return name
    if name.lower().endswith((".csv", ".json", ".jsonl", ".parquet")):
        raise ValueError(f"there is no task {name}. For a table the task is records, with task.path={name}")
    known = [*BUILT_IN][:-2]
    raise ValueError(
        f"there is no task {name}.{did_you_mean(name, known)} Known: {', '.join(known)}, reasoning_gym:GENERATOR, and "
        "your own, FILE.py:FUNCTION"
    )


def known_tool(name: str) -> str:
    """Return the name of a tool. Raise ValueError if there is no such tool."""
    file, _, function = name.rpartition(":")
    if name in TOOLS or (file.endswith(".py") and function.isidentifier()):
        return name
    known = f"Known: {', '.join(TOOLS)}, and your own functions, FILE.py:FUNCTION"
    raise ValueError(f"there is no such tool.{did_you_mean(name, TOOLS)} {known}")


class TaskSettings(Section):
    name: Annotated[str, AfterValidator(known_task)] = "nano"
    """`nano`, `addition`, `gsm8k`, `gsm8k-renumbered`, `math`, `multiple_choice`, `records`, `reasoning_gym:GENERATOR`,
    or `FILE.py:FUNCTION`, a task of your own; see docs/tasks.md."""
    mix: dict[str, float] = Field({})
    """Several tasks at once, with their shares: `{gsm8k: 2, reasoning_gym:gcd: 1}`. Sets `task.name=mix`."""
    gym: dict[str, Any] = Field({})
    """Parameters of a generator of `reasoning_gym`, such as `{max_terms: 4}`; `size` is the number of problems
    per pass, and `partial: true` pays partly right answers."""
    seed: int = Field(0, ge=0)
    """Seed of the numbers of `gsm8k-renumbered`."""
    tools: Annotated[tuple[Annotated[str, AfterValidator(known_tool)], ...], one_or_many] = ()
    """Tools that the model may call while it answers: `calculator`, `python`, `FILE.py:FUNCTION`, or several; see
    docs/environments.md."""
    calls: Literal["auto", "template", "fenced", "inline"] = "auto"
    """How a tool is called. `template`: as in the model's chat template. `fenced`: in a fenced block. `inline`: the
    calculator continues after every `=`. `auto`: `template` if the chat template has tools, else `fenced`."""
    agent: str | None = None
    """A program that answers each problem by calling the model through OpenAI's interface: `FILE.py:FUNCTION`, or a
    command; see docs/agents.md."""
    data_dir: Path | None = None
    """A folder with `train` and `test` as .jsonl, .json, .csv or .parquet; without it, the data come from the hub."""
    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, or several (`train-*.parquet`), a folder of Parquet files or of
    `save_to_disk`, or a data set on the hub such as `owner/name`."""
    test_path: str | None = None
    """The held-out problems, named in the same way."""
    subset: str | None = None
    """Configuration of the data set on the hub, or the folder of one in `task.path`."""
    split: str = "train"
    """Split of the data set to train on."""
    test_split: str | None = None
    """Split of the data set to hold out."""
    question: str | None = None
    """Column of the question; the default depends on the task."""
    answer: str | None = None
    """Column of the answer. `none`: there is no answer, and other rewards decide."""
    solution: str | None = None
    """Column of a worked solution, for few-shot examples and warm-ups."""
    incorrect: Annotated[tuple[str, ...], one_or_many] = ()
    """Columns of the wrong choices (`multiple_choice`); a column may hold a list of them."""
    choices: str | None = None
    """Column with a list of all choices (`multiple_choice`); the answer is an index from 0, a letter or a text."""
    decimal: Literal["point", "comma"] = "point"
    """`comma`: the answers of a table (`records`) are written as in `3,5` and `1.234,50`."""
    holdout: float | None = Field(None, gt=0.0, le=1.0)
    """Share of the problems to hold out if no test set is named; by default a tenth, and more of a small table."""
    on_bad_record: Literal["error", "skip"] = "error"
    """`error`: end before the run starts if a record cannot be used. `skip`: leave such records out, and count them."""
    limit: int | None = Field(None, ge=1)
    """Train on this many problems, the first of the shuffled training set."""
    curriculum: Literal["none", "difficulty", "solve_rate"] = "none"
    """`difficulty`: easy problems first. `solve_rate`: problems that are always or never solved are drawn less
    often."""

    @model_validator(mode="before")
    @classmethod
    def _mix_is_a_name(cls, values: Any) -> Any:
        is_mix = isinstance(values, dict) and values.get("mix")
        if is_mix and (name := values.get("name", "mix")) != "mix":
            raise ValueError(f"task.name={name} has no effect beside task.mix. Leave one of the two out")
        return {**values, "name": "mix"} if is_mix else values

    @field_validator("tools")
    @classmethod
    def _each_name_once(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        names = [tool.rpartition(":")[2] for tool in tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name {name} is taken. Give the function another one")
        return tools

    @field_validator("mix")
    @classmethod
    def _known_parts(cls, mix: dict[str, float]) -> dict[str, float]:
        for name, share in mix.items():
            if known_task(name) == "mix" or share <= 0:
                raise ValueError(f"{{{name}: {share:g}}}: a part is another task, with a share above 0. Leave it out")
        return mix

    @property
    def own_data(self) -> list[str]:
        """Return the settings that name the problems of a file or a data set, and its columns."""
        names = ("data_dir", "path", "question", "answer", "solution", "choices")
        return [name for name in names if getattr(self, name) is not None]


PROMPT_STYLES = ("auto", "chat", "r1_zero", "gsm8k", "boxed", "tags", "letter", "few_shot")
# arguments of transformers' apply_chat_template, and the variables that it derives from them
SET_BY_OCTET = {"conversation", "messages", "add_generation_prompt", "continue_final_message", "tokenize"}
SET_BY_OCTET |= {"chat_template", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
SET_BY_OCTET |= {"return_assistant_tokens_mask"}


class PromptSettings(Section):
    style: str = "auto"
    """`chat`, `r1_zero`, `gsm8k`, `boxed`, `tags`, `letter`, `few_shot` or a template file; `auto` is the style of the
    task."""
    system: str | None = None
    """A system message before the question."""
    shots: int = Field(4, ge=1)
    """Number of solved examples in a `few_shot` prompt."""
    answer: Literal["auto", "gsm8k", "boxed", "tags", "letter", "alone"] = "auto"
    """Where a strict answer is expected: after ####, in \\boxed{}, in <answer>, as a letter, or alone. `auto` follows
    the style."""
    template: dict[str, Any] = Field({})
    """Variables of the model's chat template, such as `{enable_thinking: false}` for Qwen3."""
    max_tokens: int = Field(512, ge=1)
    """Training problems with a longer prompt are left out and counted. Held-out problems are left out only if they
    exceed the context of the model."""

    @field_validator("template", mode="before")
    @classmethod
    def _variables(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("a mapping is needed: {key: value}. Name a prompt of your own as prompt.style=FILE")
        if isinstance(value, dict) and (taken := sorted(SET_BY_OCTET & {*value})):
            raise ValueError(f"Octet itself sets {', '.join(taken)}. Leave that out")
        return value

    @field_validator("style")
    @classmethod
    def _known_or_file(cls, style: str) -> str:
        if style in PROMPT_STYLES or os.path.isfile(style):  # False for a name that is too long
            return style
        nearest = did_you_mean(style, PROMPT_STYLES)
        raise ValueError(f"it is neither a file nor a style.{nearest} Known: {', '.join(PROMPT_STYLES)}")
