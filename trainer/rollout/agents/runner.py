"""A process that imports the user's file once, and forks an agent for each answer.

It is started with the setting `task.agent`, and imports nothing heavy. It reads and writes lines of JSON:

    {"key": "Xb3", "problem": {...}, "url": "http://127.0.0.1:1234/v1"}               in: start an agent with an API key
    {"key": "Xb3"}                                                                    in: end it
    {"key": "Xb3", "value": "42"}   or   {"key": "Xb3", "error": "ValueError: ..."}   out: it has ended
"""

import asyncio
import gc
import inspect
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from trainer.errors import ConfigError, OctetError
from trainer.machine import user_code
from trainer.machine.safe_text import without_keys

LARGEST = 1_000_000  # bytes of a result
PART = 65_536  # bytes per read, which is the capacity of a pipe


def agent_of(setting: str) -> Callable[[Any], Any]:
    """Return the agent: a function in a file, or a command that reads a problem and prints an answer."""
    path, _, name = setting.rpartition(":")
    if path.endswith(".py") and name.isidentifier():
        sys.path.insert(0, str(user_code.find("task.agent", setting).parent))  # its neighbours come before packages
        agent = user_code.load("task.agent", setting, run=_imported)
        try:
            inspect.signature(agent).bind("a problem")
        except TypeError as error:
            raise ConfigError(f"task.agent={setting}", f"it cannot be called with a problem: {error}") from None
        return agent
    command = shlex.split(setting)
    if not shutil.which(command[0]):
        raise ConfigError(f"task.agent={setting}", f"there is no program {command[0]}, and no FILE.py:FUNCTION")
    return partial(_command, command)


def _imported(what: str, path: Path, work: Callable[[], Any], kind: type[OctetError]) -> None:
    """Import the user's file. Unlike the file of a reward, it may change its process, in which nothing else runs."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  the user's file may raise anything
        raise kind(f"{what}{user_code.where(error, path)}.") from None


def _command(command: list[str], problem: Any) -> str:
    with open(os.memfd_create("problem"), "w+") as asked:  # a pipe blocks if a command prints before it reads
        json.dump(vars(problem), asked)
        asked.seek(0)
        process = subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None, "it is a pipe"
    if len(printed := process.stdout.read(LARGEST + 1)) > LARGEST:
        raise ValueError(f"the command printed more than {LARGEST} characters")
    if status := process.wait():
        raise subprocess.CalledProcessError(status, command)
    return printed.strip()


def serve(setting: str) -> None:
    """Start and end agents as the lines on standard input request, until it is closed."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process, but only ranks act on it
    results, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # also for what the user's file and its programs print
    try:
        agent = agent_of(setting)
    except Exception as error:  # noqa: BLE001  the setting may be anything
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        reason = without_keys(reason.removeprefix(f"task.agent={setting}: "))
        print(json.dumps({"error": reason}), file=results, flush=True)
        return
    if openai := sys.modules.get("openai"):
        with suppress(Exception):  # the first client loads certificates and modules, which all forks inherit
            _ = openai.OpenAI(api_key="none").chat
    gc.freeze()
    print(json.dumps({}), file=results, flush=True)
    children: dict[str, tuple[int, int]] = {}  # the process of each answer, and the pipe with its result
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    unread: defaultdict[int, bytes] = defaultdict(bytes)  # the incomplete last line of each pipe
    while True:
        for key, _ in selector.select():
            read = os.read(key.fd, PART)
            *lines, unread[key.fd] = (unread[key.fd] + read).split(b"\n")
            if key.fd == 0:
                if not read:
                    _end(children.values())
                    return
                for order in map(json.loads, lines):
                    if "problem" in order:
                        children[order["key"]] = _start(agent, order, results)
                        selector.register(children[order["key"]][1], selectors.EVENT_READ, order["key"])
                    elif order["key"] in children:
                        _end([children[order["key"]]])
            elif lines or not read or len(unread[key.fd]) > LARGEST:
                selector.unregister(key.fd)
                os.close(key.fd)
                process, _ = child = children.pop(key.data)
                _end([child])  # including processes that the agent has left behind
                os.waitpid(process, 0)
                result = _read([*lines, unread.pop(key.fd)][0])
                print(json.dumps({**result, "key": key.data}), file=results, flush=True)


def _start(agent: Callable[[Any], Any], order: Mapping[str, Any], results: TextIO) -> tuple[int, int]:
    """Fork an agent. Return its process id, and the end of a pipe that its result can be read from."""
    read_end, write_end = os.pipe()
    if process := os.fork():
        os.close(write_end)
        return process, read_end
    result: dict[str, Any] = {"error": "it ended its process"}
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        results.close()  # its reader waits until no process has it open
        os.environ.update(OPENAI_BASE_URL=order["url"], OPENAI_API_KEY=order["key"])
        known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if known != "*":  # a proxy cannot reach this machine
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{known},127.0.0.1".lstrip(",")
        value = agent(SimpleNamespace(**order["problem"]))
        value = asyncio.run(value) if inspect.iscoroutine(value) else value
        result = {"value": getattr(value, "item", lambda: value)()}  # numbers of NumPy
    except BaseException as error:  # noqa: BLE001  the user's code may raise anything
        result = {"error": without_keys(f"{type(error).__name__}: {error}", 500)}
    finally:
        with suppress(BaseException):
            text = json.dumps(result, default=lambda value: {type(value).__name__: repr(value)}).encode()
            if len(text) > LARGEST:
                reason = f"its result has {len(text)} bytes; at most {LARGEST} are allowed"
                text = json.dumps({"error": reason}).encode()
            os.write(write_end, text + b"\n")
        os._exit(0)


def _read(text: bytes) -> dict[str, Any]:
    result = None
    with suppress(ValueError, RecursionError):
        result = json.loads(text)
    return result if isinstance(result, dict) else {"error": "it was ended, or has ended its process"}


def _end(children: Any) -> None:
    for process, _ in children:
        for kill in (os.killpg, os.kill):  # a process that has just been forked may not have its own group yet
            with suppress(OSError):
                kill(process, signal.SIGKILL)
