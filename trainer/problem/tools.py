"""Tools that a model may call in any task: a calculator, Python in the sandbox, and the user's own functions.

    template   <tool_call>{"name": "calculator", "arguments": {"expression": "3 * 14"}}</tool_call>
               or in the forms of Qwen3.5, Llama and LFM2
    fenced     ```calculator
               3 * 14
               ```
    inline     3 * 14 =                                                        the calculator writes 42 after it

A turn without a call ends the answer.
"""

import ast
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from trainer.answers.arithmetic import UNCALCULATED, worth
from trainer.answers.strip_thinking import after_thinking
from trainer.errors import ConfigError
from trainer.machine import user_code
from trainer.machine.hardware import cores_of_rank
from trainer.machine.safe_text import print
from trainer.machine.threads import finished
from trainer.records import Problem
from trainer.sandbox.confine import Limits
from trainer.sandbox.pool import Sandbox

LONGEST_EXPRESSION = 200  # characters
MOST_CALLS = 8  # in a turn
PYTHON_S, PYTHON_MB = 5.0, 512
SECONDS = 60.0  # time limit of a call of a function of the user
PLAIN = ("string", "integer", "number", "boolean")  # types whose value may be the whole text of a fenced block
CHECKED = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)  # how arguments are compared with annotations
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LIST = re.compile(r"\[(\w+\(.*\))\]\s*\Z", re.DOTALL)
_FENCED = re.compile(r"```(\w+)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SAID = set[tuple[Path, str]]()  # functions of the user whose first fault was printed
# Errors that a malformed call may cause.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, SyntaxError, MemoryError)
_REPORTING = """
try:
    exec(compile({source!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function from text to text that a model may call."""

    name: str
    about: str
    argument: str
    example: str
    use: Callable[[str], str]

    @property
    def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema that a chat template shows."""
        parameters = {"type": "object", "properties": {self.argument: {"type": "string"}}, "required": [self.argument]}
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}


class OwnTool:
    """A typed function of the user with a docstring. A call that does not fit its annotations never reaches it. What is
    wrong with a call, and what the function raises, becomes the reply to the model."""

    argument = None  # it takes all arguments

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        self.function, self.name, self.seconds = function, function.__name__, seconds
        self.path = Path(getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", "no file"))

    @cached_property
    def schema(self) -> Any:
        """Return the JSON schema, which is made from the annotations and the docstring as TRL does it."""
        from transformers.utils import get_json_schema

        return get_json_schema(self.function)

    @property
    def about(self) -> str:
        about, form = str(self.schema["function"]["description"]), "Write" if self._is_plain else "Write JSON with"
        known = self._parameters.items()
        parts = [f"{name} ({self._kind(name, one)}): {one['description'].rstrip('.')}" for name, one in known]
        return f"{about} {form} {'; '.join(parts)}." if parts else about

    def _kind(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return what an argument may be: its type or its choices, and its default if it has one."""
        written: Callable[[Any], str] = str if self._is_plain else partial(json.dumps, default=repr)
        types = schema.get("type", "any")
        choices = map(written, schema["enum"]) if "enum" in schema else [types] if isinstance(types, str) else types
        default = inspect.signature(self.function).parameters[name].default
        default = default.value if isinstance(default, Enum) else default
        kind = " or ".join(choices)
        return kind if default is inspect.Parameter.empty else f"{kind}, by default {written(default)}"

    @property
    def example(self) -> str:
        values = {name: name.upper() for name in self._parameters}
        return "".join(values.values()) if self._is_plain else json.dumps(values)

    def use(self, written: str | Mapping[str, Any]) -> str:
        """Return the result of a call in a fenced block, or with the arguments that a chat template writes."""
        call = user_code.Call(partial(self._result, written))
        with user_code.contained:
            call.start()
            call.join(self.seconds)
        if call.is_alive():
            self._say(f"gave no result within {self.seconds:g} seconds, rollout.turns.seconds")
            return f"Error: no result after {self.seconds:g} seconds."
        if isinstance(call.error, ValidationError):
            flaws = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in call.error.errors())
            return f"Error: {'; '.join(flaws)}."
        if call.error is None:
            return str(call.result)
        raised, where = user_code.where(call.error, Path()), user_code.where(call.error, self.path)
        if where != raised:  # the call itself was right
            self._say(f"raised {where}")
        return f"Error: {raised}"

    def _say(self, fault: str) -> None:
        """Print the first fault of the function. The model sees all of them as replies."""
        if (self.path, self.name) not in _SAID:
            _SAID.add((self.path, self.name))
            print(f"octet: the tool {self.name} {fault}; its errors are replies.", file=sys.stderr, flush=True)

    def _result(self, written: Any) -> str:
        if isinstance(written, str):
            text = written.strip()
            written = dict.fromkeys(self._parameters, text) if self._is_plain else json.loads(text or "{}")
        # in the tags of some chat templates every argument is a text
        kinds = {name: one.get("type") for name, one in self._parameters.items()}
        of_json = [
            name for name in written if kinds.get(name) in ("array", "object") and isinstance(written[name], str)
        ]
        written = {**written, **{name: json.loads(written[name]) for name in of_json}}
        return str(finished(validate_call(config=CHECKED)(self.function)(**written)))

    @property
    def _parameters(self) -> Any:
        return self.schema["function"]["parameters"]["properties"]

    @property
    def _is_plain(self) -> bool:
        """Return True if the one argument is the text of a block."""
        return [one.get("type") in PLAIN for one in self._parameters.values()] == [True]


class ToolCalls:
    """The environment of an answer with tools."""

    def __init__(self, tools: Sequence[Tool | OwnTool], calls: str) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.calls = calls
        self.line = ""  # the last line of the answer so far, including inline results

    def reset(self, problem: Problem) -> str | None:
        return None

    def step(self, text: str) -> tuple[str, bool, float]:
        if self.calls == "inline":
            self.line = (self.line + text).rpartition("\n")[2]
            result = continued(self.line)
            self.line += result
            return result, not text.endswith("="), 0.0
        _, rest, is_thinking = after_thinking(text)
        if is_thinking:
            calls: list[Callable[[], str]] = []
        elif self.calls == "template":
            calls = [partial(self._called, written) for written in _written(rest, self.tools)]
        else:
            calls = [partial(self.tools[name].use, body) for name, body in _FENCED.findall(rest) if name in self.tools]
        results = [call() for call in calls[:MOST_CALLS]]
        if calls[MOST_CALLS:]:
            results.append(f"Error: only {MOST_CALLS} calls of a turn are answered.")
        return "\n".join(results), not results, 0.0

    @property
    def request(self) -> str:
        first = next(iter(self.tools.values()))
        known = "\n".join(f"{tool.name}: {tool.about}" for tool in self.tools.values())
        return (
            "You may call tools. To call one, end your message with a block like this, and the result comes back:\n"
            f"```{first.name}\n{first.example}\n```\nTools:\n{known}"
        )

    def _called(self, written: str) -> str:
        try:
            name, arguments = _read(written)
            tool = self.tools.get(name)
            if tool is None:
                return f"Error: there is no tool {name!r:.40}. There are: {', '.join(self.tools)}."
            argument: Any = arguments if tool.argument is None else str(arguments[tool.argument])
        except UNREADABLE:
            return 'Error: this is no call. Write {"name": ..., "arguments": {...}} as JSON.'
        return tool.use(argument)


def calls_in(text: str, names: Container[str]) -> tuple[str, list[tuple[str, Mapping[str, Any]]]]:
    """Return a text without its calls, and the name and arguments of each call. If a call is malformed, or if there are
    none, return the text unchanged. JSON that is a call of none of the tools is an answer."""
    _, rest, is_thinking = after_thinking(text)
    try:
        calls = [] if is_thinking or not names else [_read(written) for written in _written(rest, names)]
    except UNREADABLE:
        calls = []
    if not calls or ("<tool_call>" not in text and any(name not in names for name, _ in calls)):
        return text, []
    return (_CALL.sub("", text).strip() if "<tool_call>" in text else ""), calls


def _written(text: str, names: Container[str]) -> list[str]:
    """Return the calls in a text as they are written: within <tool_call>, or bare as in Llama and LFM2."""
    found = _LIST.search(text)
    is_bare = text.strip().startswith('{"name"') or (found and found[1].partition("(")[0] in names)
    return _CALL.findall(text) or ([text] if is_bare else [])


def _read(written: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a call: in JSON, in the tags of Qwen3.5, or in the Python of LFM2."""
    if found := _FUNCTION.search(written):
        return found[1], dict(_PARAMETER.findall(found[2]))
    if found := _LIST.search(written):
        call: Any = ast.parse(found[1], mode="eval").body
        return call.func.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    call = json.loads(written)
    name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    if not (isinstance(name, str) and isinstance(arguments, Mapping)):
        raise TypeError("a call has a name and a mapping of arguments")
    return name, arguments


def continued(text: str) -> str:
    """Return the value of the expression before the `=` that ends a text, or nothing if it cannot be read."""
    line = _plain(text.rpartition("\n")[2]).rstrip().removesuffix("=")
    before = line.rstrip(_EXPRESSION)
    expression = line[len(before) :]
    is_whole = not before[-1:].isalnum() or expression[:1].isspace()  # False for the `2 + 1` of `x2 + 1`
    expression = _ITEM.sub("", expression)
    if not (is_whole and _BINARY.match(expression)):  # a single number may end an expression that cannot be read
        return ""
    value = calculated(expression)
    return "" if value.startswith("Error") else f" {value}"


_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", "$": ""})
_TIMES = re.compile(r"\\times|\\cdot|(?<=[\d)])\s+x\s+(?=[\d($])", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_EXPRESSION = "0123456789 \t+*/().%-"
_ITEM = re.compile(r"\A\s*\d+[.)]\s+(?=[\d(])", re.ASCII)  # the 1. of `1. 3 * 4`, and the 3. of `I have 3. 4 * 2`
_BINARY = re.compile(r"\s*-?[\d(.](.*[\d)])?\s*[+*/%-]", re.ASCII)


def calculated(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % ** and brackets: a whole number, or ten digits."""
    text = re.sub(r"(?<![\d.])0+(?=\d)", "", _plain(expression).strip().removesuffix("=").strip())
    if len(text) > LONGEST_EXPRESSION or not text or text.strip(_EXPRESSION + "\n"):
        return "Error: an expression has numbers, + - * / // % ** and brackets."
    try:
        value = worth(text)
        if isinstance(value, Fraction) and value.denominator == 1:
            return str(value.numerator)
        number = float(value) or 0.0  # avoids -0.0
        return format(number, ".0f" if 1e10 <= abs(number) < 1e15 else ".10g")
    except UNCALCULATED as error:
        return f"Error: {'division by zero' if isinstance(error, ZeroDivisionError) else 'this cannot be calculated'}."


def _plain(text: str) -> str:
    """Return a text with Python's operators, and without dollar signs and thousands separators."""
    return _THOUSANDS.sub("", _TIMES.sub("*", text)).translate(_SIGNS)


@cache
def _at_once() -> threading.Semaphore:
    """Run one program per processor: more would use up each other's time limit."""
    return threading.Semaphore(max(1, cores_of_rank()))


def ran(source: str) -> str:
    """Run a Python program in the sandbox, and return what it printed and how it failed."""
    with _at_once():
        result = _sandbox().run(_REPORTING.format(source=source), b"")
    reply = result.output.decode(errors="replace").rstrip()
    if result.timed_out:
        reply += f"\nError: it did not end within {PYTHON_S:g} seconds."
    elif result.cut:
        reply += "\nError: it printed too much."
    elif result.status:
        reply += f"\nError: it ended with status {result.status}."
    return reply.strip() or "(nothing was printed)"


@cache
def _sandbox() -> Sandbox:
    sandbox = Sandbox(Limits(seconds=PYTHON_S, memory_mb=PYTHON_MB))
    if not sandbox.held.is_enough:
        reason = f"this machine cannot contain a program. It has {sandbox.held}, and needs Landlock and seccomp"
        raise ConfigError("task.tools=python", reason, "Take another machine, or write task.tools=calculator")
    return sandbox


CALCULATOR = Tool("calculator", "evaluates an arithmetic expression.", "expression", "12 * (3 + 4)", calculated)
PYTHON = Tool("python", "runs a Python program and returns what it prints.", "code", "print(12 * (3 + 4))", ran)
BUILT_IN = {tool.name: tool for tool in (CALCULATOR, PYTHON)}


def tools_of(names: Sequence[str], seconds: float = SECONDS) -> list[Tool | OwnTool]:
    """Return the tools with these names. The sandbox starts, and the user's functions are described, so that what
    cannot be used is refused at once."""
    if PYTHON.name in names:
        _sandbox()
    return [BUILT_IN.get(name) or _own(name, seconds) for name in names]


def _own(setting: str, seconds: float) -> OwnTool:
    function, path = user_code.load("task.tools", setting), user_code.find("task.tools", setting)
    if getattr(function, "__name__", "") != setting.rpartition(":")[2]:  # an object, or made by a decorator
        remedy = "Write it with `def`; a decorator needs functools.wraps"
        raise ConfigError(f"task.tools={setting}", "it is not a function of this name", remedy)
    tool = OwnTool(function, seconds)
    needs = "which needs the type of each argument, and what it is under `Args:` in the docstring"
    what = f"task.tools={setting}: it cannot be described to a model, {needs}: "
    user_code.call(what, path, lambda: (tool.schema, validate_call(config=CHECKED)(tool.function)))
    return tool
