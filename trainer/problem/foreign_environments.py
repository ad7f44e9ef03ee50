"""Adapters for environments of other libraries. They use methods of the objects and import none of these libraries.

The method `environment` of a task may return `OpenEnv(client, action)` or `Verifiers(env)`. TRL's
`environment_factory` and `tools` are attributes of a task; see docs/bring.md.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.machine.threads import finished
from trainer.problem.tools import OwnTool, ToolCalls
from trainer.records import Problem


@dataclass
class OpenEnv:
    """A client of OpenEnv, whose `reset` and `step` return an observation, a reward and whether the episode is done.
    `action` turns a text into an action, and `show` turns an observation into a text. `begin(client, problem)` starts
    an episode, and has to start it in the same state whenever the problem is the same."""

    client: Any
    action: Callable[[str], Any]
    show: Callable[[Any], str] = str
    begin: Callable[[Any, Problem], Any] = lambda client, problem: client.reset()

    def reset(self, problem: Problem) -> str:
        return self.show(self.begin(self.client, problem).observation)

    def step(self, text: str) -> tuple[str, bool, float]:
        result = self.client.step(self.action(text))
        return self.show(result.observation), bool(result.done), float(result.reward or 0.0)

    def close(self) -> None:
        self.client.close()


class Message(dict[str, Any]):
    """A message whose keys are also its attributes, as in verifiers from 0.1.9 on."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Verifiers:
    """An environment of the library verifiers. Its rubric scores the answer once `is_completed` returns True; until
    then `env_response` replies to the model."""

    def __init__(self, env: Any) -> None:
        if getattr(env, "tool_defs", None) or getattr(env, "oai_tools", None):
            raise TypeError("the model would not see its tools. Write `tools = env.tools` in place of `environment`")
        self.env = env
        self.state: dict[str, Any] = {}

    async def reset(self, problem: Problem) -> None:
        prompt = [*map(Message, problem.messages or [{"role": "user", "content": problem.question}])]
        columns = {name: value for name, value in problem.extra.items() if value is not None}
        self.state = {"info": {}, "task": "default", "answer": problem.gold, **columns, "prompt": prompt}
        self.state |= {"completion": [], "turn": 0, "responses": [], "trajectory": []}
        self.state = await self._call(self.env.setup_state) or self.state

    async def step(self, text: str) -> tuple[str, bool, float]:
        message = Message(role="assistant", content=text)
        prompt = [*self.state["prompt"], *self.state["completion"]]
        self.state["trajectory"].append({"prompt": prompt, "completion": [message]})
        self.state["completion"].append(message)
        self.state["turn"] += 1
        if await self._call(self.env.is_completed):
            scored = await self._call(self.env.rubric.score_rollout)
            return "", True, float(scored.reward if hasattr(scored, "reward") else self.state["reward"])
        replies = await self._call(self.env.env_response)
        if isinstance(replies, tuple):  # in versions before 0.1.8
            replies, self.state = replies
        self.state["completion"] += [Message(one) if isinstance(one, dict) else one for one in replies]
        return "\n\n".join(str(reply["content"]) for reply in replies), False, 0.0

    async def _call(self, method: Callable[..., Any]) -> Any:
        """Call a method with those arguments that it takes in the installed version of verifiers."""
        known = {**self.state, "state": self.state, "messages": self.state["prompt"] + self.state["completion"]}
        parameters = inspect.signature(method).parameters
        result = method(**{name: value for name, value in known.items() if name in parameters})
        return await result if inspect.isawaitable(result) else result


class Functions(ToolCalls):
    """The environment made from TRL's `environment_factory` and `tools`: the model calls these tools and the public
    methods of what the factory makes. A turn without a call ends the answer, and `get_reward`, if there is one, returns
    its reward."""

    def __init__(
        self, factory: Callable[[], Any] | None, tools: Sequence[Callable[..., Any]], calls: str, seconds: float
    ) -> None:
        self.environment: Any = factory() if factory else None
        names = [name for name, _ in inspect.getmembers(type(self.environment), inspect.isfunction) if name[0] != "_"]
        methods = [getattr(self.environment, name) for name in names if name not in ("reset", "get_reward")]
        super().__init__([OwnTool(function, seconds) for function in (*tools, *methods)], calls)

    def reset(self, problem: Problem) -> str | None:
        """Return the question followed by what the environment adds to it, or None if it adds nothing."""
        if self.environment is None:
            return None
        messages = [dict(message) for message in problem.messages]
        added = finished(self.environment.reset(**{"prompt": messages or problem.question, **problem.extra}))
        if added and sum(message["role"] != "system" for message in messages) > 1:
            raise ValueError("reset() adds to a question, and the prompt is a conversation of several turns")
        return problem.question + added if added else None

    def step(self, text: str) -> tuple[str, bool, float]:
        reply, done, _ = super().step(text)
        is_paid = done and hasattr(self.environment, "get_reward")
        return reply, done, float(finished(self.environment.get_reward())) if is_paid else 0.0
