"""rollout: answers of agents. An agent is a program of the user that calls the model through OpenAI's API. Its calls
become prompts for the run's sampler."""

import json
import os
import queue
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, groupby, islice
from operator import attrgetter
from typing import Any

from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError, TrainingError
from trainer.machine import user_code
from trainer.machine.installed_files import in_a_process
from trainer.machine.safe_text import visible
from trainer.plan.planner import PREFILL_TOKENS
from trainer.problem.environment import is_number
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.agents.conversation import Call, Conversation, Limits
from trainer.rollout.agents.endpoint import Endpoint
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.decoder.schedule import NewAnswers, Scheduler
from trainer.rollout.interface import Groups, Sampler
from trainer.rollout.limits import Say
from trainer.rollout.turns import Stops

START_S = 60.0  # timeout for importing the file of an agent
PATIENCE_S = 0.2  # how long to wait for the next calls of agents, so that rows have the same order in every run
SLOW_S, SLOW_TIMES = 0.03, 8  # after this many waits of this length, the scheduler no longer waits for agents
FIRST_CALL_S = 2.0  # how long to wait for the first call of an agent that has just started
ALIKE = ("prompt.problem.id", "prompt.repeat", "prompt.most", "prompt.stop")  # alike in all calls of one prompt
MOST_SILENT = 16  # if so many agents end before any has called the model, the agent itself is wrong
WATCH_S = 0.5  # interval of the checks for agents that take too long


class Agents:
    """Starts agents, and receives their calls and results."""

    def __init__(self, setting: str, say: Say) -> None:
        user_code.must_be_named(f"task.agent={setting}")
        self.setting, self.say = setting, say
        self.inbox: queue.SimpleQueue[Call | Mapping[str, Any]] = queue.SimpleQueue()
        self.at_work: dict[str, Conversation] = {}  # by the API key of the agent
        self._said: set[str] = set()
        self._silent, self._has_called = 0, False  # agents that have ended without a call to the model
        self._endpoint = Endpoint(self.at_work.get, self.inbox.put, self._say_once)
        # in its own session, because Ctrl-C must not reach it
        command = in_a_process(start=f"from trainer.rollout.agents.runner import serve; serve({setting!r})")
        # a client that the file makes on import must not call OpenAI with the user's own key
        own = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": "of-no-answer"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, **own}
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            first = self.inbox.get(timeout=START_S)
        except queue.Empty:
            first = {"error": f"its import took more than {START_S:g} s"}
        if isinstance(first, Mapping) and first:
            self.close()
            raise ConfigError(f"task.agent={setting}", visible(first["error"])[:300], "Correct the file or its name")
        distributed.before_disconnect(self.close)  # from Python this process goes on

    def start(self, conversation: Conversation) -> None:
        conversation.deadline = time.monotonic() + conversation.limits.seconds
        self.at_work[conversation.key] = conversation
        problem = conversation.prompt.problem
        names = ("id", "question", "gold", "solution", "extra", "messages")
        fields = {name: getattr(problem, name) for name in names}
        self._send({"key": conversation.key, "problem": fields, "url": self._endpoint.url})

    def ended(self, result: Mapping[str, Any]) -> tuple[Conversation, Completion] | None:
        """Return the conversation and the answer of an agent that has ended, or None if its answer is not needed."""
        if "key" not in result:
            raise TrainingError(f"task.agent={self.setting}", "the process that starts agents has ended", "See above")
        conversation = self.at_work.pop(result["key"], None)
        if conversation is None:
            return None
        if error := result.get("error"):
            self._say_once(f"an agent failed, so its answer is empty: {visible(error)[:200]}", error.partition(":")[0])
        elif not conversation.calls:
            self._say_once("an agent has ended without a call to the model, so its answer trains nothing", "no call")
        self._silent, self._has_called = self._silent + 1, self._has_called or bool(conversation.calls)
        if self._silent >= MOST_SILENT and not self._has_called:
            failed = f", the last of them with {visible(error)[:200]}" if error else ""
            reason = f"the first {MOST_SILENT} agents have ended without a call to the model{failed}"
            raise TrainingError(f"task.agent={self.setting}", reason, "Correct the agent: docs/agents.md")
        if conversation.is_rewritten:
            text = "a call does not continue an earlier one, so its answer is trained on in several parts"
            self._say_once(text, "rewritten")
        return conversation, conversation.completion(self._value(result), bool(error))

    def end_late(self) -> None:
        """End the agents that have not made a call in time."""
        now = time.monotonic()
        for key, conversation in [*self.at_work.items()]:
            if not conversation.pending and now > conversation.deadline:
                late = f"late: no call and no result within rollout.turns.seconds={conversation.limits.seconds:g}"
                self._send({"key": key})
                self.inbox.put({"key": key, "error": late})
                conversation.deadline = now + WATCH_S * 10

    def end_all(self) -> None:
        for key in self.at_work:
            self._send({"key": key})
        self.at_work.clear()

    def close(self) -> None:
        self._endpoint.shutdown()
        self._endpoint.server_close()
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(OSError):
            self._process.stdin.close()  # ends the process and its agents
        try:
            self._process.wait(timeout=START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _value(self, result: Mapping[str, Any]) -> str | float | None:
        value = result.get("value")
        if value is None or isinstance(value, str):
            return value and value.encode(errors="replace").decode()
        if is_number(value):
            return float(value)
        reason = f"it returned {value!r:.60}"
        raise DataError(f"task.agent={self.setting}", reason, "Return the text of the answer, a reward, or None")

    def _say_once(self, text: str, kind: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.say(f"task.agent={self.setting}: {text}")

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(OSError):  # the process has ended, which the reading thread reports
            self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as results:
            for line in results:
                self.inbox.put(json.loads(line))
        self.inbox.put({"error": "the process that starts agents has ended"})


class Calls(Scheduler):
    """Schedules the calls of agents, in place of prompts that are known at the start."""

    def __init__(self, agents: Agents, conversations: Sequence[Conversation], limits: Limits, at_once: int) -> None:
        self.agents, self.limits = agents, limits
        self._not_started = deque(conversations)
        self._queued: list[Call] = []
        self._decoding: dict[tuple[int, int], Call] = {}
        self._slow = self._prompts_read = 0
        self.ended: list[tuple[Conversation, Completion]] = []
        for _ in range(min(at_once, len(conversations))):
            agents.start(self._not_started.popleft())

    @property
    def longest_prompt(self) -> int:
        return self.limits.context - self.limits.new_tokens

    @property
    def is_finished(self) -> bool:
        return not (self.agents.at_work or self._not_started)

    def schedule(self, free: int, usable: int) -> list[NewAnswers]:
        """Return the calls to start next, as many as fit one prefill pass. Equal prompts of a group are read once."""
        self._receive()
        self._queued.sort(key=attrgetter("prompt.place", *ALIKE, "conversation.number"))
        starting: list[NewAnswers] = []
        for _, alike in groupby([*self._queued], key=attrgetter(*ALIKE, "prompt.tokens")):
            calls = [*alike][: free - sum(len(new.numbers) for new in starting)]
            if not calls:
                break
            self._prompts_read += 1
            new = NewAnswers(self._prompts_read, calls[0].prompt, [one.conversation.number for one in calls])
            width = max(len(one.prompt.tokens) for one in (*starting, new))
            if starting and (len(starting) + 1) * width > PREFILL_TOKENS:
                break
            starting.append(new)
            self._decoding |= {(self._prompts_read, one.conversation.number): one for one in calls}
            self._queued = [one for one in self._queued if one not in calls]
        return starting

    def finish(self, index: int, number: int, completion: Completion) -> list[Completion] | None:
        call = self._decoding.pop((index, number))
        call.conversation.pending -= 1
        call.conversation.deadline = time.monotonic() + self.limits.seconds
        call.reply.set_result(completion)
        return [completion]

    def restart_unfinished(self) -> None:
        self._queued += self._decoding.values()
        self._decoding.clear()

    def close(self) -> None:
        """End the running agents, and cancel their calls."""
        self.agents.end_all()
        for call in (*self._queued, *self._decoding.values()):
            call.reply.cancel()

    def _receive(self) -> None:
        """Receive calls and results. Wait a short time for the next calls of all agents, and longer if there is nothing
        to decode."""
        began = time.monotonic()
        deadline = began - FIRST_CALL_S + self.limits.seconds  # that of new agents is later
        while not self.is_finished:
            with suppress(queue.Empty):
                while True:
                    self._take(self.agents.inbox.get_nowait())
            self.agents.end_late()
            thinking = [one for one in self.agents.at_work.values() if not one.pending]
            waited, is_idle = time.monotonic() - began, not (self._queued or self._decoding)
            is_new = any(not one.calls and one.deadline > deadline for one in thinking)
            patience_s = FIRST_CALL_S if is_new else PATIENCE_S if self._slow < SLOW_TIMES else 0.0
            if not thinking or not (is_idle or waited < patience_s):
                break
            with suppress(queue.Empty):
                self._take(self.agents.inbox.get(timeout=WATCH_S if is_idle else patience_s - waited))
        else:
            return
        self._slow += waited > SLOW_S and not is_new

    def _take(self, item: Call | Mapping[str, Any]) -> None:
        if isinstance(item, Call):
            if item.conversation.key in self.agents.at_work:
                item.conversation.pending += 1
                self._queued.append(item)
            else:  # its answer has ended
                item.reply.cancel()
        elif ended := self.agents.ended(item):
            self.ended.append(ended)
            for call in [one for one in self._queued if one.conversation is ended[0]]:
                self._queued.remove(call)
                call.reply.cancel()
            if self._not_started:
                self.agents.start(self._not_started.popleft())


class AgentSampler(Sampler):
    """Samples the answers of agents, whose calls another sampler answers."""

    def __init__(self, inner: Sampler, agents: Agents, prompter: Prompter, stops: Stops, config: Config) -> None:
        self.inner, self.agents, self.prompter, self.stops, self.config = inner, agents, prompter, stops, config
        self.owns_copy = inner.owns_copy

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        inner = self.inner.frozen()  # on every rank, also on one whose agents never call the model
        groups: defaultdict[int, dict[int, Completion]] = defaultdict(dict)
        rollout, new_tokens = self.config.rollout, sampling.max_new_tokens
        limits = Limits(rollout.turns.most, new_tokens, self._context(new_tokens), rollout.turns.seconds)
        conversations = [
            Conversation(self.prompter, self.stops, prompt, number, limits, index)
            for index, prompt in enumerate(prompts)
            for number in range(sampling.group)
        ]
        calls = Calls(self.agents, conversations, limits, rollout.rows)
        try:
            for _ in _decoded(inner, calls, rollout.rows, sampling):
                yield from self._complete(calls, groups, sampling.group)
            yield from self._complete(calls, groups, sampling.group)
        finally:
            calls.close()

    def _complete(self, calls: Calls, groups: dict[int, dict[int, Completion]], size: int) -> Groups:
        for conversation, completion in calls.ended:
            if completion.reward and not self.config.reward.weights.get("environment"):
                reason = f"it returned {completion.reward:g}, the reward `environment`, which has no weight"
                remedy = "Write reward.weights='{correct: 0, environment: 1}', or return the text of the answer"
                raise DataError(f"task.agent={self.agents.setting}", reason, remedy)
            index = conversation.index
            groups[index][conversation.number] = completion
            if len(groups[index]) == size:
                yield index, [answer for _, answer in sorted(groups.pop(index).items())]
        calls.ended.clear()

    def _context(self, new_tokens: int) -> int:
        longest = self.config.prompt.max_tokens + new_tokens
        return min(longest, self.context_limit() or longest)

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self.inner.rehearse(prompts, sampling)

    def longest(self, prompt: Prompt) -> Prompt:
        """Return a prompt as long as a conversation may be before its last reply, or the given one if it is longer."""
        new_tokens = self.config.rollout.max_new_tokens
        length = max(self._context(new_tokens) - new_tokens, len(prompt.tokens))
        return replace(prompt, tokens=tuple(islice(cycle(prompt.tokens), length)))

    def give_back(self) -> bool:
        return self.inner.give_back()

    def context_limit(self) -> int | None:
        return self.inner.context_limit()

    def frozen(self) -> Sampler:
        return AgentSampler(self.inner.frozen(), self.agents, self.prompter, self.stops, self.config)

    def each(self) -> Mapping[str, Sampler]:
        return self.inner.each()

    def close(self) -> None:
        self.agents.close()
        self.inner.close()


def _decoded(inner: Sampler, calls: Calls, rows: int, sampling: Sampling) -> Iterator[object]:
    """Decode calls until all agents have ended, with Octet's decoder as they arrive, otherwise in rounds."""
    if isinstance(inner, DecodeSampler):
        yield from inner.decode_all(calls, rows, sampling)
        return
    while not calls.is_finished:
        starting = [(new, number) for new in calls.schedule(rows, rows) for number in new.numbers]
        named = ((new.prompt, f"{new.prompt.problem.id}/{number}") for new, number in starting)  # for random numbers
        prompts = [replace(prompt, problem=replace(prompt.problem, id=name)) for prompt, name in named]
        for at, [completion] in inner.sample(prompts, replace(sampling, group=1)) if prompts else ():
            new, number = starting[at]
            yield calls.finish(new.prompt_index, number, completion)
