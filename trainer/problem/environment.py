"""Environments: what replies to a model between its turns.

    reset   begins an answer, and may say what is asked in place of the question
    step    takes what the model wrote in a turn; returns what it is told, whether the answer is done, and a reward

Every answer has an environment of its own. A task of a user's file makes one in its method `environment(problem)`;
`task.tools` gives one to any task.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from trainer.config.settings import TaskSettings
from trainer.errors import ConfigError, DataError
from trainer.machine import threads, user_code
from trainer.problem.task import DataTask, Task
from trainer.problem.tools import ToolCalls, tools_of
from trainer.records import Problem

SECONDS = 60.0
Reply = tuple[str, bool, float]  # what the model is told, whether the answer is done, a reward


class Environment(Protocol):
    def reset(self, problem: Problem) -> str | None:
        """Begin an answer. Return what is asked, or None for the question of the problem."""

    def step(self, text: str) -> Reply:
        """Reply to what the model wrote in a turn."""


@dataclass(frozen=True, slots=True)
class Environments:
    """Makes the environment of each answer, and says how models speak with it."""

    setting: str
    path: Path  # of the user's file
    make: Callable[[Problem], Environment | None]  # None for a problem that is answered in one turn
    seconds: float = SECONDS  # for environment() and reset() where prompts are made
    may_ask: bool = False  # something else than the question of the problem
    role: str = "user"  # of what an environment says, in the chat template
    ends_in_time: bool = False  # it has limits of its own, so that what a model writes cannot end the run
    is_inline: bool = False  # it goes on in the model's own turn
    stops: tuple[str, ...] = ()  # strings that end a turn
    schemas: tuple[Mapping[str, Any], ...] = ()  # of tools, for the chat template
    request: str = ""  # what a prompt says about tools

    def reset(self, problem: Problem) -> str | None:
        """Return what an environment asks in place of the question. It is made for this alone."""
        if not (self.may_ask and problem.id):
            return None
        begun = threads.begin(partial(self.begin, problem))
        try:
            environment, asked = begun.result(self.seconds)
        except FutureTimeout:
            reason = f"environment() or reset() has not returned after {self.seconds:g} seconds, for {problem.id}"
            remedy = "Make it faster, or write a larger rollout.turns.seconds"
            raise DataError(self.setting, reason, remedy) from None
        self.close(environment)
        return asked

    def begin(self, problem: Problem) -> tuple[Environment | None, str | None]:
        """Return an environment that has begun, and what it asks."""
        environment = self._call("environment", problem, lambda: self.make(problem))
        if environment is None:
            return None, None
        asked = self._call("reset", problem, lambda: environment.reset(problem))
        if asked is None:
            return environment, None
        if not isinstance(asked, str):
            raise DataError(self.setting, f"reset() returned {asked!r:.60} for {problem.id}", "Return text, or None")
        return environment, asked.encode(errors="replace").decode()  # half a character is no text for a tokenizer

    def step(self, environment: Environment, problem: Problem, text: str) -> Reply:
        reply = self._call("step", problem, lambda: environment.step(text))
        is_triple = isinstance(reply, tuple | list) and len(reply) == 3
        observation, done, reward = reply if is_triple else (reply, None, None)
        if not (isinstance(observation, str) and is_number(reward) and is_number(done)):
            remedy = 'Return what the model is told, whether it is done, and a reward, such as ("too low", False, 0.0)'
            raise DataError(self.setting, f"step() returned {reply!r:.80} for {problem.id}", remedy)
        return observation, bool(done), float(reward or 0.0)

    def close(self, environment: Environment | None) -> None:
        if close := getattr(environment, "close", None):
            self._call("close", Problem("an answer", "", ""), close)

    def _call(self, method: str, problem: Problem, work: Callable[[], Any]) -> Any:
        def finished() -> Any:
            result = work()
            return asyncio.run_coroutine_threadsafe(result, _loop()).result() if inspect.iscoroutine(result) else result

        return user_code.call(f"{self.setting}: {method}() for {problem.id} raised ", self.path, finished, DataError)


def environments_of(
    task: Task, settings: TaskSettings, chat_template: str | None = None, seconds: float = SECONDS
) -> Environments | None:
    """Return the environments of a task, or of the tools that the settings name; None if there are none."""
    own = [part for part in task.parts if isinstance(part, DataTask) and part.environment]
    if own and settings.tools:
        reason, remedy = f"{own[0].name} has an environment of its own", "Leave one out, or call them in its step()"
        raise ConfigError(f"task.tools={','.join(settings.tools)}", reason, remedy)
    if settings.tools:
        return _with_tools(settings, chat_template)
    if not own:
        return None

    def make(problem: Problem) -> Environment | None:
        part = task.part(problem)
        return part.environment(problem) if part.environment else None

    setting = own[0].settings.name
    named, path = f"task.name={setting}" if own[0] is task else "task.mix", user_code.find("task.name", setting)
    if not (functions := next((part.functions for part in own if part.functions), None)):
        return Environments(named, path, make, seconds, may_ask=True)
    if own[0] is not task:
        raise ConfigError(
            named, "a part of the mixture has TRL's tools, which all prompts would show", "Train it alone"
        )
    if not _knows_tools(chat_template):
        raise ConfigError(named, NO_TOOLS, "Take a model that calls tools, such as Qwen2.5")
    schemas = user_code.call(f"{named}: its tools cannot be described: ", path, lambda: functions().schemas)
    return Environments(named, path, make, seconds, may_ask=True, role="tool", schemas=schemas)


OTHER_CALLS = ("<|tool_call>", "<|call|>", "[TOOL_CALLS]", "tool▁call")  # of Gemma 4, gpt-oss, Mistral, DeepSeek
NO_TOOLS = "the chat template of this model has no tools, or calls in a form that Octet does not read"


def _knows_tools(chat_template: str | None) -> bool:
    template = chat_template or ""
    return "tools" in template and not any(mark in template for mark in OTHER_CALLS)


def _with_tools(settings: TaskSettings, chat_template: str | None) -> Environments:
    knows_tools = _knows_tools(chat_template)
    calls = settings.calls if settings.calls != "auto" else "template" if knows_tools else "fenced"
    tools = tools_of(settings.tools)
    if calls == "template" and not knows_tools:
        raise ConfigError("task.calls=template", NO_TOOLS, "Write task.calls=fenced")
    how: dict[str, dict[str, Any]] = {
        "inline": {"is_inline": True, "stops": ("=",)},
        "template": {"role": "tool", "schemas": tuple(tool.schema for tool in tools)},
        "fenced": {"request": ToolCalls(tools, calls).request},
    }
    name = f"task.tools={','.join(settings.tools)}"
    return Environments(name, Path(__file__), lambda _: ToolCalls(tools, calls), ends_in_time=True, **how[calls])


def is_number(value: Any) -> bool:
    """Return True for a finite number, of NumPy too."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop of all environments: a connection belongs to the loop in which it was opened."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # the caller gets it too
                loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    return loop
