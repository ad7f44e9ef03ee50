"""Environments, which reply to a model between its turns.

    reset(problem)   begins an answer; returns what to ask the model, or None to ask the question of the problem
    step(text)       takes the model's turn; returns the reply to it, whether the answer is done, and a reward
    close()          ends an answer; an environment need not have it

Every answer has its own environment. A task from a user's file makes one in its method `environment(problem)`;
`task.tools` adds one to any task.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.settings import TaskSettings
from trainer.errors import ConfigError, DataError
from trainer.machine import threads, user_code
from trainer.problem.task import DataTask, Task
from trainer.problem.tools import SECONDS, ToolCalls, tools_of
from trainer.records import Problem

Environment = Any  # an object with the methods above, which may be async
Reply = tuple[str, bool, float]  # the text for the model, whether the answer is done, a reward


@dataclass(frozen=True, slots=True)
class Environments:
    """Makes the environment of each answer, and describes how a model talks to it."""

    setting: str
    path: Path  # the user's file; errors name the line in it
    make: Callable[[Problem], Environment | None]  # returns None for a problem that is answered in one turn
    seconds: float = SECONDS  # time limit of environment() and reset() while prompts are made
    may_ask: bool = False  # reset() may ask something other than the question of the problem
    is_of_all: bool = False  # no problem is answered in one turn
    role: str = "user"  # role of the replies in the chat template
    is_built_in: bool = False  # these are tools, each of which has a time limit and needs no more containment
    is_inline: bool = False  # a reply continues the model's own turn
    stops: tuple[str, ...] = ()  # strings that end a turn
    schemas: tuple[Mapping[str, Any], ...] = ()  # tools that the chat template describes
    request: str = ""  # tools as the prompt describes them, if the chat template does not

    @property
    def has_tools(self) -> bool:
        return bool(self.schemas or self.request)

    def reset(self, problem: Problem) -> str | None:
        """Return what an environment asks in place of the question, from an environment made only to find out."""
        if not (self.may_ask and problem.id):
            return None
        beginning = threads.begin(partial(self.begin, problem))
        try:
            environment, asked = beginning.result(self.seconds)
        except FutureTimeout:
            reason = f"environment() or reset() has not returned after {self.seconds:g} seconds, for {problem.id}"
            raise DataError(self.setting, reason, "Make it faster, or write a larger rollout.turns.seconds") from None
        self.close(environment)
        return asked

    def begin(self, problem: Problem) -> tuple[Environment | None, str | None]:
        """Return an environment after its reset(), and what it asks."""
        environment = self._call("environment", problem, lambda: self.make(problem))
        if environment is None and self.is_of_all:
            reason = f"environment() returned None for {problem.id}"
            raise DataError(self.setting, reason, "Return an object that has step()")
        asked = None if environment is None else self._call("reset", problem, lambda: environment.reset(problem))
        if asked is None:
            return environment, None
        if not isinstance(asked, str):
            raise DataError(self.setting, f"reset() returned {asked!r:.60} for {problem.id}", "Return text, or None")
        return environment, asked.encode(errors="replace").decode()  # tokenizers fail on lone surrogates

    def step(self, environment: Environment, problem: Problem, text: str) -> Reply:
        reply = self._call("step", problem, lambda: environment.step(text))
        is_triple = isinstance(reply, tuple | list) and len(reply) == 3
        observation, done, reward = reply if is_triple else (reply, None, None)
        if not (isinstance(observation, str) and is_number(reward) and is_number(done)):
            remedy = 'Return a reply, whether the answer is done, and a reward, such as ("too low", False, 0.0)'
            raise DataError(self.setting, f"step() returned {reply!r:.80} for {problem.id}", remedy)
        return observation, bool(done), float(reward or 0.0)

    def close(self, environment: Environment | None) -> None:
        if close := getattr(environment, "close", None):
            self._call("close", Problem("an answer", "", ""), close)

    def _call(self, method: str, problem: Problem, work: Callable[[], Any]) -> Any:
        if self.is_built_in:
            return work()
        raised = f"{self.setting}: {method}() for {problem.id} raised "
        return user_code.call(raised, self.path, lambda: threads.finished(work()), DataError)


def environments_of(
    task: Task, settings: TaskSettings, chat_template: str | None = None, seconds: float = SECONDS
) -> Environments | None:
    """Return the environments of a task, or of the tools that the settings name; None if there are none."""
    parts = [part for part in task.parts if isinstance(part, DataTask) and part.environment]
    if settings.tools:
        if parts:
            reason = f"{parts[0].name} has its own environment"
            remedy = "Leave one of the two out, or call the tools in its step()"
            raise ConfigError(f"task.tools={','.join(settings.tools)}", reason, remedy)
        return _with_tools(settings, chat_template, seconds)
    if not parts:
        return None

    def make(problem: Problem) -> Environment | None:
        part = task.part(problem)
        return part.environment(problem) if part.environment else None

    setting = parts[0].settings.name
    named, path = f"task.name={setting}" if parts[0] is task else "task.mix", user_code.find("task.name", setting)
    if not (functions := next((part.functions for part in parts if part.functions), None)):
        return Environments(named, path, make, seconds, may_ask=True, is_of_all=len(parts) == len(task.parts))
    if parts[0] is not task:
        reason = "a part of the mixture has TRL's tools, which all prompts would show"
        raise ConfigError(named, reason, "Train it alone")
    make_functions = partial(functions, "template" if has_tools(chat_template) else "fenced", seconds)
    what = f"{named}: its tools cannot be described: "
    options = user_code.call(what, path, lambda: _form(make_functions()))
    return Environments(named, path, lambda _: make_functions(), seconds, may_ask=True, **options)


# Marks of calls that Octet does not read: those of Gemma 4, gpt-oss, Mistral and DeepSeek.
OTHER_CALLS = ("<|tool_call>", "<|call|>", "[TOOL_CALLS]", "tool▁call")
NO_TOOLS = "the chat template of this model has no tools, or its calls have a form that Octet does not read"


def has_tools(chat_template: str | None) -> bool:
    template = chat_template or ""
    return "tools" in template and not any(mark in template for mark in OTHER_CALLS)


def _with_tools(settings: TaskSettings, chat_template: str | None, seconds: float) -> Environments:
    knows_tools = has_tools(chat_template)
    if settings.calls == "template" and not knows_tools:
        raise ConfigError("task.calls=template", NO_TOOLS, "Write task.calls=fenced")
    calls = settings.calls if settings.calls != "auto" else "template" if knows_tools else "fenced"
    tools, name = tools_of(settings.tools, seconds), f"task.tools={','.join(settings.tools)}"
    options = _form(ToolCalls(tools, calls))
    return Environments(name, Path(__file__), lambda _: ToolCalls(tools, calls), is_built_in=True, **options)


def _form(example: ToolCalls) -> dict[str, Any]:
    """Return the options of environments like this one, whose tools are called in its form."""
    if example.calls == "inline":
        return {"is_inline": True, "stops": ("=",)}
    if example.calls == "fenced":
        return {"request": example.request}
    return {"role": "tool", "schemas": tuple(tool.schema for tool in example.tools.values())}


def is_number(value: Any) -> bool:
    """Return True for a finite number, including NumPy's."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is that of a tensor of several numbers
        return False
