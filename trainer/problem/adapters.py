"""Environments of other libraries, by what they can do: none of them is imported.

A method `environment` of a task may return `OpenEnv(client, action)` or `Verifiers(env)`; see docs/environments.md.
"""

import inspect
from collections.abc import Callable
from typing import Any

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
