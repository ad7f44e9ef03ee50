"""The tools: what they are called with, and what they say."""

import json
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.conftest import refuses
from trainer.errors import RewardError
from trainer.problem import tools
from trainer.problem.tools import CALCULATOR, ToolCalls, calculated, calls_in, continued, tools_of


@pytest.mark.parametrize(("expression", "value"), [
    ("3 * 14", "42"), ("12 * (3 + 4) - 2", "82"), ("1/3 + 1/6", "0.5"), ("1 / 3", "0.3333333333"),
    ("7 // 2 + 7 % 2", "4"), ("2 ** 10", "1024"), ("2^3", "8"), ("-5 + +3", "-2"), ("1,234 × 2", "2468"),
    ("0.1 + 0.2", "0.3"), ("007 + 1", "8"), ("1.50 * 2 =", "3"), ("1.05 * 200", "210"), ("0.05", "0.05"),
    ("100.007 + 1", "101.007"), ("3 x 4 + 2", "14"), ("$1,200 / 3", "400"), (r"2 \times 3 \cdot 4", "24"),
    ("2**31", "2147483648"), ("2**99", "633825300114114700748351602688"), ("(-2)**31 + 1", "-2147483647"),
    ("1.05**25", "3.386354941"), ("1000*1.07**20", "3869.684462"), ("10**9 * 1.07**50", "29457025063"),
    ("1000 / 1.07**-20 // 1", "3869"), ("1.0001**36500", "38.46764553"),
    ("1/7/11/13/17/19/23/29/31/37/41/43*10**12", "0.002293093884"), ("0 * -(1.07**20)", "0"),
])  # fmt: skip
def test_the_calculator_is_exact(expression, value):
    assert calculated(expression) == value


@pytest.mark.parametrize("hostile", [
    "9 ** 9 ** 9", "2 ** 99999", "10 ** 30", "1.1 ** 999999999", "10.5 ** 30",
    "1 / 0", "0 ** -1", "2 ** 0.5", "", "()", "x + 1", "__import__('os')", "1e999",
    "(" * 150 + ")" * 150, "9" * 199, "1" * 5000, "1 +", "a.b", "3 if 1 else 2", "1 << 99", "[1]", "٣ + ٤", "1.2.3",
    "1 + 1 = 2", "1,5 * 2", "-" * 199 + "1",
])  # fmt: skip
def test_what_is_no_arithmetic_is_an_error_and_at_once(hostile):
    began = time.process_time()
    found = calculated(hostile)
    assert found.startswith("Error") or found in ("-1", "1")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(("text", "goes_on"), [
    ("3 * 14 =", " 42"), ("She has 3 * 14 =", " 42"), ("\n42 - 2 =", " 40"), ("3 * 14 = 42\n40 + 1 =", " 41"),
    ("1,200 * 3 =", " 3600"), ("That is $4 * 1.05 =", " 4.2"), ("2.5 × 3 =", " 7.5"), ("3 x 4 + 2 =", " 14"),
    (r"So 3 \times 4 =", " 12"), ("12 / 4 = 3 * 7 =", " 21"), ("(2 + 3) * -4 =", " -20"),
    ("1. 3 * 4 =", " 12"), ("I have 3. 4 * (2 + 1) =", " 12"), ("2) 3 * 4 =", " 12"), ("(1 + 2) 3 * 4 =", ""),
    ("1.5 * 4 =", " 6"),
    # what cannot be read has no value, and its last number is not one
    ("x =", ""), ("1 / 0 =", ""), ("so =", ""), ("3x4 =", ""), ("20% of 50 =", ""), ("x2 + 1 =", ""),
    ("3 apples * 4 =", ""), ("2² + 1 =", ""), ("9 + " + "1 + " * 120 + "1 =", ""),
])  # fmt: skip
def test_an_inline_calculator_goes_on_behind_an_expression(text, goes_on):
    assert continued(text) == goes_on
    assert ToolCalls(tools_of(["calculator"]), "inline").step(text) == (goes_on, False, 0.0)


@pytest.mark.parametrize(("turns", "told"), [
    (["3*4=", "-5+2="], [" 12", " 9"]),
    (["3*4=", "0+5="], [" 12", " 125"]),
    (["2 - 5 =", " + 7 =", "\n7 + 1 ="], [" -3", " 4", " 8"]),
    (["12 / 4 =", " * 7 =", " apples, 2 * 2 ="], [" 3", " 21", " 4"]),
    (["3*4=", "="], [" 12", ""]),
    (["x =", " 3 * 4 ="], ["", " 12"]),
])  # fmt: skip
def test_an_inline_calculator_reads_the_line_with_the_numbers_that_it_wrote_itself(turns, told):
    environment = ToolCalls(tools_of(["calculator"]), "inline")
    assert [environment.step(turn)[0] for turn in turns] == told


def test_a_turn_without_a_call_ends_the_answer():
    for calls in ("template", "fenced", "inline"):
        for text in ("#### 42", "so [f(x)]"):
            assert ToolCalls(tools_of(["calculator"]), calls).step(text) == ("", True, 0.0)


def call(name="calculator", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def of_qwen35(tool="calculator", **arguments):
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function={tool}>\n{written}</function>\n</tool_call>"


@pytest.mark.parametrize(("text", "said"), [
    (call(expression="3 * 14"), "42"),
    (f"First: {call(expression='3 * 14')} then {call(expression='1 + 1')}", "42\n2"),
    ('{"name": "calculator", "parameters": {"expression": "3 * 14"}}', "42"),
    ("<tool_call>3 * 14</tool_call>", "Error: this is no call."),
    (call(number=3), "Error: this is no call."),
    (call("abacus", expression="1"), "Error: there is no tool 'abacus'. There are: calculator."),
    ("<tool_call>" + "[" * 100_000, "Error: this is no call."),
    ("<tool_call>[1]</tool_call>", "Error: this is no call."),
    (f"I ask.\n\n{of_qwen35(expression='3 * 14')}", "42"),
    (of_qwen35(number="3"), "Error: this is no call."),
    ('[calculator(expression="3 * 14")]', "42"),
    ("Let me see. [calculator(expression='[3] * 14')]\n", "Error: an expression"),
    ("[calculator(expression=3 * 14)]", "Error: this is no call."),
    ("[calculator(" + "(" * 100_000 + ")]", "Error: this is no call."),
])  # fmt: skip
def test_calls_as_templates_write_them(text, said):
    found, done, _ = ToolCalls(tools_of(["calculator"]), "template").step(text)
    assert found.startswith(said)
    assert not done


@pytest.mark.parametrize(("name", "arguments"), [([1], {}), ("calculator", "3 * 14"), ("calculator", [3])])
def test_a_malformed_call_is_a_text(name, arguments):
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    assert calls_in(text, {"calculator"}) == (text, [])


def test_an_error_of_a_tool_is_not_taken_for_a_malformed_call():
    def use(expression):
        raise RewardError("the sandbox is gone")

    with pytest.raises(RewardError):
        ToolCalls([replace(CALCULATOR, use=use)], "template").step(call(expression="3 * 14"))


def test_calls_in_fenced_blocks():
    environment = ToolCalls(tools_of(["calculator"]), "fenced")
    assert environment.step("I ask.\n```calculator\n3 * 14\n```") == ("42", False, 0.0)
    assert environment.step("I ask.\n```calculator\n3 * 14") == ("42", False, 0.0)
    assert environment.step("```java\n3 * 14\n```") == ("", True, 0.0)
    assert environment.step("<think>```calculator\n3 * 14\n``` or so") == ("", True, 0.0)
    said, done, _ = environment.step("```calculator\n1 + 1\n```\n" * 10)
    assert said.splitlines() == ["2"] * 8 + ["Error: only 8 calls of a turn are answered."]
    assert not done


OWN = """
import time
from typing import Literal

def lookup(country: str) -> int:
    '''Return the population of a country.

    Args:
        country: Its English name.
    '''
    time.sleep(60 if country == "Atlantis" else 0)
    return {"France": 68, "7": 7}[country]

async def trip(city: str, days: int, cost: float = 1.0, sleeps: bool = True) -> str:
    '''Plan a trip.

    Args:
        city: Where to.
        days: How many.
        cost: Of a day.
        sleeps: Whether at a hotel.
    '''
    return repr((city, days, cost, sleeps))

def total(numbers: list[int]) -> int:
    '''Return a sum.

    Args:
        numbers: All of them.
    '''
    return sum(numbers)

def ship(size: Literal["small", "large"] = "small") -> str:
    '''Return a price.

    Args:
        size: Of the parcel.
    '''
    return size

def pack(size: Literal["small", "large"], weight: Literal[1, 2], note: int | str = 3) -> str:
    '''Pack it.

    Args:
        size: Of the parcel.
        weight: Of it.
        note: To add.
    '''
    return size

def now() -> str:
    '''Return the time.'''
    return "noon"
"""


@pytest.fixture
def own(tmp_path):
    """Return the environment of a table of functions with this form of calls, beside the calculator."""
    (tmp_path / "mine.py").write_text(OWN)
    names = ["calculator", *(f"{tmp_path}/mine.py:{name}" for name in ("lookup", "trip", "now"))]
    return lambda calls: ToolCalls(tools_of(names, seconds=0.5), calls)


@pytest.mark.parametrize(("name", "block", "said"), [
    ("lookup", "France", "68"), ("lookup", "7", "7"), ("now", "", "noon"), ("calculator", "3 * 14", "42"),
    ("lookup", "Mars", "Error: KeyError: 'Mars'"), ("lookup", "Atlantis", "Error: no result after 0.5 seconds."),
    ("trip", '{"city": "Rome", "days": 3}', "('Rome', 3, 1.0, True)"),
    ("trip", '{"city": 5, "days": "3", "cost": "2", "sleeps": "false"}', "('5', 3, 2.0, False)"),
    ("trip", '{"city": {"a": 1}, "days": 0.5}', "Error: city: Input"), ("trip", '{"days": 1}', "Error: city: Missing"),
    ("trip", '{"city": "Rome", "days": 1e999}', "Error: days: "),
    ("trip", '{"city": "Rome", "days": 1, "x": 1}', "Error: x: "),
    ("trip", '{"city": "Rome", "days": 1, "cost": NaN}', "Error: cost: "), ("trip", "Rome", "Error: JSONDecodeError"),
    ("trip", "[1]", "Error: TypeError"), ("trip", "[" * 100_000, "Error: "), ("now", '{"zone": 1}', "Error: zone: "),
    ("trip", '{"city": "Rome", "days": ' + "9" * 5000 + "}", "Error: "),
])  # fmt: skip
def test_a_function_of_the_user_gets_what_fits_its_annotations_and_its_errors_are_replies(own, name, block, said):
    reply, done, _ = own("fenced").step(f"I ask.\n```{name}\n{block}\n```")
    assert (reply[: len(said)], done) == (said, False)
    written = {"country": block} if name == "lookup" else {"expression": block} if name == "calculator" else None
    with suppress(ValueError, RecursionError, TypeError):  # of a block that is no JSON, or no object
        turn = call(name, **(written or json.loads(block or "{}")))
        assert own("template").step(turn)[0].startswith(said)


@pytest.mark.parametrize(("country", "said"), [("Mars", 'return {"France"'), ("Atlantis", "0.5 seconds")])
def test_the_first_fault_of_a_function_is_printed(own, capsys, country, said):
    wrong, failing = "```trip\nRome\n```", f"```lookup\n{country}\n```"
    for calls in (wrong, failing, failing):
        own("fenced").step(calls)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_list_in_the_tags_of_a_template_is_read_as_json(own, tmp_path):
    tools = ToolCalls(tools_of([f"{tmp_path}/mine.py:total"], seconds=0.5), "template")
    assert tools.step(of_qwen35("total", numbers=[1, 2]))[0] == "3"
    assert tools.step(of_qwen35("total", numbers="[1"))[0].startswith("Error: JSONDecodeError")


def test_an_object_that_can_be_called_is_no_tool(tmp_path):
    (tmp_path / "mine.py").write_text("from functools import partial\nround_up = partial(round, ndigits=1)\n")
    with refuses("task.tools", names="functools.wraps"):
        tools_of([f"{tmp_path}/mine.py:round_up"], seconds=0.5)


def test_a_function_of_the_user_is_described_in_both_forms(own):
    lines = own("fenced").request.splitlines()
    assert lines[-1] == "now: Return the time."
    assert lines[-3] == "lookup: Return the population of a country. Write country (string): Its English name."
    cost = "cost (number, by default 1.0): Of a day; sleeps (boolean, by default true): Whether at a hotel."
    assert lines[-2].endswith(f"Write JSON with city (string): Where to; days (integer): How many; {cost}")
    *_, lookup, trip, _ = own("fenced").tools.values()
    assert (lookup.example, json.loads(trip.example)["city"]) == ("COUNTRY", "CITY")
    assert trip.schema["function"]["parameters"]["required"] == ["city", "days"]


def test_choices_and_defaults_are_in_the_description(own, tmp_path):
    ship, pack = tools_of([f"{tmp_path}/mine.py:{name}" for name in ("ship", "pack")])
    assert ship.about.endswith("Write size (small or large, by default small): Of the parcel.")
    assert 'size ("small" or "large"): Of the parcel; weight (1 or 2): Of it; ' in pack.about
    assert "note (integer or string, by default 3): To add." in pack.about


def test_python_runs_in_the_sandbox():
    pytest.importorskip("fcntl")
    environment = ToolCalls(tools_of(["python"]), "fenced")

    def ran(source):
        return environment.step(f"```python\n{source}\n```")[0]

    assert ran("print(3 * 14)") == "42"
    assert ran("x = 1") == "(nothing was printed)"
    assert ran("1 / 0") == "ZeroDivisionError: division by zero"
    assert ran("print(open('/etc/passwd').read())").startswith("PermissionError")
    assert ran("import os; os._exit(3)") == "Error: it ended with status 3."
    assert ran("print('x' * 10**7)").endswith("Error: it printed too much.")


def test_a_program_that_hangs_is_ended(monkeypatch):
    sandbox = tools._sandbox()
    monkeypatch.setattr(sandbox, "limits", tools.Limits(seconds=0.5))
    assert tools.ran("while True: pass").startswith("Error: it did not end")
