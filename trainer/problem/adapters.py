"""Environments of other libraries, by what they can do: none of them is imported.

A method `environment` of a task may return `OpenEnv(client, action)` or `Verifiers(env)`. What TRL takes as
`environment_factory` and `tools` are attributes of a task; see docs/bring.md.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.problem.tools import MOST_CALLS, calls_in
from trainer.records import Problem


class OpenEnv:
    """A client of OpenEnv, whose `reset` and `step` return an observation, a reward and whether the episode is done.
    `action` makes an action of a text, and `show` a text of an observation. `begin` takes the client and a problem; it
    must bring the client into the same state for the same problem."""

    def __init__(
        self,
        client: Any,
        action: Callable[[str], Any],
        show: Callable[[Any], str] = str,
        begin: Callable[[Any, Problem], Any] = lambda client, problem: client.reset(),
    ) -> None:
        self.client, self.action, self.show, self.begin = client, action, show, begin

    def reset(self, problem: Problem) -> str:
        return self.show(self.begin(self.client, problem).observation)

    def step(self, text: str) -> tuple[str, bool, float]:
        result = self.client.step(self.action(text))
        return self.show(result.observation), bool(result.done), float(result.reward or 0.0)

    def close(self) -> None:
        self.client.close()


class Verifiers:
    """An environment of verifiers with `env_response` and `is_completed`. Its rubric scores the answer at the end."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.state: dict[str, Any] = {}

    async def reset(self, problem: Problem) -> None:
        prompt = [dict(message) for message in problem.messages] or [{"role": "user", "content": problem.question}]
        columns = {"info": {}, "task": "default", **problem.extra}
        self.state = {**columns, "prompt": prompt, "completion": [], "answer": problem.gold}
        self.state |= {"turn": 0, "responses": [], "trajectory": []}
        self.state = await self._call(self.env.setup_state) or self.state

    async def step(self, text: str) -> tuple[str, bool, float]:
        asked, said = [*self.state["prompt"], *self.state["completion"]], {"role": "assistant", "content": text}
        self.state["trajectory"].append({"prompt": asked, "completion": [said]})
        self.state["completion"].append(said)
        self.state["turn"] += 1
        if await self._call(self.env.is_completed):
            scored = await self._call(self.env.rubric.score_rollout)
            return "", True, float(scored.reward if hasattr(scored, "reward") else self.state["reward"])
        told = await self._call(self.env.env_response)
        if isinstance(told, tuple):  # in versions before 0.1.8
            told, self.state = told
        self.state["completion"] += told
        return "\n\n".join(str(message["content"]) for message in told), False, 0.0

    async def _call(self, method: Callable[..., Any]) -> Any:
        """Call a method with those of the known arguments that this version of it takes."""
        offered = {**self.state, "state": self.state, "messages": self.state["prompt"] + self.state["completion"]}
        taken = inspect.signature(method).parameters
        result = method(**{name: value for name, value in offered.items() if name in taken})
        return await result if inspect.isawaitable(result) else result


class Functions:
    """What TRL takes as `environment_factory` and `tools`: the model calls functions, and methods of an environment. A
    turn without a call ends the answer, which then earns what `get_reward` returns, if there is one."""

    def __init__(self, factory: Callable[[], Any] | None, tools: Sequence[Callable[..., Any]]) -> None:
        self.environment: Any = factory() if factory else None
        names = [name for name, _ in inspect.getmembers(type(self.environment), inspect.isfunction) if name[0] != "_"]
        methods = [getattr(self.environment, name) for name in names if name not in ("reset", "get_reward")]
        self.functions = {one.__name__: one for one in (*tools, *methods)}

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return what chat templates show of the functions, which docstrings and annotations say."""
        from transformers.utils import get_json_schema

        return tuple(get_json_schema(one) for one in self.functions.values())

    async def reset(self, problem: Problem) -> str | None:
        """Return the question with what the environment adds to it."""
        if self.environment is None:
            return None
        asked = [dict(message) for message in problem.messages]
        told = await _called(self.environment.reset, {"prompt": asked or problem.question, **problem.extra})
        if told and sum(one["role"] != "system" for one in asked) > 1:
            raise ValueError("reset() adds to a question, and the prompt is a conversation of several turns")
        return problem.question + told if told else None

    async def step(self, text: str) -> tuple[str, bool, float]:
        _, calls = calls_in(text, self.functions)
        results = [await self._result(name, arguments) for name, arguments in calls[:MOST_CALLS]]
        if results or not hasattr(self.environment, "get_reward"):
            return "\n".join(results), not results, 0.0
        return "", True, float(await _called(self.environment.get_reward, {}))

    async def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            if name not in self.functions:
                raise ValueError(f"Tool {name} not found.")
            return str(await _called(self.functions[name], arguments))
        except Exception as error:  # noqa: BLE001  what the model wrote, which it is told as TRL does
            return str({"error": str(error)})


async def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function, which may be async, beside other environments."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)
