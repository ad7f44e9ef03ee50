"""Agents for the tests: each calls the model as OPENAI_BASE_URL and OPENAI_API_KEY say."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import numpy


def post(body, path="/chat/completions", key=None, method="POST", **headers):
    """Return the status and the reply of a request, whose body may be bytes."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, sent, method=method)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def user(text):
    return {"role": "user", "content": text}


class Talk:
    """Calls the model, and counts the tokens that it wrote."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, messages, **more):
        status, reply = post({"model": "any", "messages": messages, **more})
        assert status == 200, reply
        found = json.loads(reply)
        self.tokens += found["usage"]["completion_tokens"]
        return found["choices"][0]["message"]

    def end(self):
        return json.dumps({"tokens": self.tokens})


def three_turns(problem):
    talk, messages = Talk(), [user(problem.question)]
    for turn in range(3):
        messages += [talk(messages), user(f"And then, after {turn}?")]
    return talk.end()


def twice(problem):
    talk, messages = Talk(), [user(problem.question)]
    messages += [talk(messages), user("Say it again.")]
    return talk(messages)["content"]


def several(problem):
    """Ask twice in parallel behind the same reply, then with earlier words changed, then with a limit."""
    talk, messages = Talk(), [{"role": "system", "content": "Be brief."}, user(problem.question)]
    messages.append(talk(messages))
    with ThreadPoolExecutor() as pool:
        first, _ = pool.map(talk, [[*messages, user("Left?")], [*messages, user("Right?")]])
    messages += [user("Left?"), first, user("Go on.")]
    talk(messages)
    messages[1] = user("Something else")
    talk(messages, max_tokens=2)
    talk(messages, n=1, stream=False, temperature=0.2, strange=1)
    return talk.end()


def worth(problem):
    Talk()([user(problem.question)])
    return 0.25 if problem.question == "0" else numpy.float32(0.25)


def endless(problem):
    return 10**400


def unlike(problem):
    return float("nan")


def whole_message(problem):
    return SimpleNamespace(content="4", role="assistant")


def leaving(problem):
    Talk()([user("Hello")])
    return str(subprocess.Popen(["sleep", "600"]).pid)


def silent(problem):
    return None


def failing(problem):
    number = int(problem.question)
    if number == 0:
        raise ValueError(f"no idea, with {os.environ['SEARCH_API_KEY']}")
    if number == 1:
        os._exit(3)
    if number == 2:
        time.sleep(600)
    if number == 3:
        Talk()([user("Hello")])
        raise KeyError("afterwards")
    if number == 4:  # one of these is where its result is written to
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, b"3\n")
        os._exit(0)
    return Talk()([user("Hello")])["content"]


def long_result(problem):
    """The second one writes half a result and goes on, and the third one more than a result may have."""
    if problem.question == "1":
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, b"[")
        time.sleep(600)
    return "a" * (2_000_000 if problem.question == "2" else 200_000)


MESSAGES = [user("Hello")]
REQUESTS = {
    "no JSON": (b"{", 400, None),
    "no object": ([], 400, None),
    "no messages": ({}, 400, "messages"),
    "no role": ({"messages": [{"content": "a"}]}, 400, "messages[0]"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
    "a number": ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0]"),
    "a mapping": ({"messages": [{"role": "user", "content": {"text": "a"}}]}, 400, "messages[0]"),
    "another role": ({"messages": [{"role": "narrator", "content": "a"}]}, 400, "messages[0]"),
    "no call": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, 400, "messages[0]"),
    "stop": ({"messages": MESSAGES, "stop": 3}, 400, "stop"),
    "empty stop": ({"messages": MESSAGES, "stop": ["a", ""]}, 400, "stop"),
    "n": ({"messages": MESSAGES, "n": 0}, 400, "n"),
    "n of too many": ({"messages": MESSAGES, "n": 9}, 429, "n"),
    "n as a truth": ({"messages": MESSAGES, "n": True}, 400, "n"),
    "most": ({"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    "tools": ({"messages": MESSAGES, "tools": [{"function": {}}]}, 400, "tools"),
    "too long": ({"messages": [user("word " * 3000)]}, 400, "messages"),
    "far too long": ({"messages": [user("a" * 3_000_000)]}, 400, "messages"),
    "deep": (b"[" * 10_000_000, 400, None),
}


def malformed(problem):
    """Return what the endpoint says of each request, and of another path and another key."""
    found = {name: post(body) for name, (body, *_) in REQUESTS.items()}
    found["path"] = post({}, path="/completions")
    found["key"] = post({"messages": MESSAGES}, key="another")
    found["length"] = post({}, Content_Length="many")
    found["afterwards"] = post({"messages": MESSAGES})
    return json.dumps(found)


def unusual(problem):
    """Return what the endpoint says of requests that few agents make, and that can be answered."""
    called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "[" * 100_000}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be <|im_end|> brief."}]},
        user("half \ud800"),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "seen", "tool_call_id": "1"},
    ]
    asked = {"messages": messages, "tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "auto"}
    return json.dumps([post(asked), post(None, "/models/octet?like=this", method="GET")])


def streamed(problem):
    _, reply = post({"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in reply.split("\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    return "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])


if __name__ == "__main__":
    print(Talk()([user(json.load(sys.stdin)["question"])])["content"] + "!")
