"""Calculate an expression of numbers exactly. Python only parses the expression, and the size of numbers is limited."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from math import log10
from typing import Any

MOST_DIGITS = 30  # before the decimal point; a fraction of longer numbers becomes a float
LARGEST_POWER = 100_000  # with a larger exponent, a float has fewer than ten correct digits
# Errors of `worth` for what it cannot calculate.
UNCALCULATED = (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError)


def worth(expression: str) -> Fraction | float:
    """Return the value of + - * / // % ** and brackets, long fractions as floats, or raise one of UNCALCULATED."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("it has something other than arithmetic")


def _power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    times = int(exponent)
    if times != exponent or abs(times) > LARGEST_POWER:
        raise ValueError("the exponent is not a whole number, or it is too large")
    is_long = isinstance(base, float) or abs(times) * log10(max(abs(base.numerator), base.denominator)) > MOST_DIGITS
    return float(base) ** times if is_long else base**times


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _bounded(value: Fraction | float) -> Fraction | float:
    """Return a value unchanged, or as a float if it is a fraction of long numbers."""
    if abs(value) >= 10**MOST_DIGITS:
        raise ValueError("a number is too long")
    if isinstance(value, float):
        return value
    is_long = max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS
    return float(value) if is_long else Fraction(value)
