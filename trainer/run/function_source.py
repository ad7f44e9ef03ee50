"""Write a function of a script, with what it uses of that script, so that a file can define it again."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def write(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """Return the text of a file that defines the function, and the names in it that the text does not define. There is
    no text where Python keeps no source, as in a plain shell."""
    texts: dict[str, str | None] = {}
    _define(function.__name__ if inspect.isfunction(function) else "", function, texts)
    *used, (_, text) = texts.items()
    if text is None:
        return "", []
    parts = ["from __future__ import annotations\n", *(part for _, part in used if part), text]
    return "\n".join(parts), [name for name, part in used if part is None]


def _define(name: str, value: Any, texts: dict[str, str | None]) -> None:
    """Add the text that defines a name, after the texts of the names that it uses. It is None if there is none."""
    texts[name] = None  # a function may use itself
    try:
        text = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        text = None
    for used, its_value in _names(inspect.unwrap(value), text or ""):
        if used in texts:
            continue
        if (line := _line(used, its_value, value.__module__)) is not None:
            texts[used] = line
        else:
            _define(used, its_value, texts)
    del texts[name]
    texts[name] = text


def _names(value: Any, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the names of the script that a function or class uses, with their values."""
    scope: dict[str, Any] = getattr(sys.modules.get(getattr(value, "__module__", "")), "__dict__", {})
    if inspect.isfunction(value):
        scope = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
    tree = ast.parse(text)
    for node in ast.walk(tree):  # annotations are not evaluated
        for part in {"annotation", "returns"} & {*node._fields}:
            setattr(node, part, None)
    nodes = list(ast.walk(tree))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in own and node.id in scope:
            yield node.id, scope[node.id]


def _line(name: str, value: Any, home: str) -> str | None:
    """Return the line that defines the name of a module, of something in a module other than `home`, or of a
    constant."""
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}\n"
    if isinstance(value, re.Pattern):
        return f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})\n"
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    for there in (name, getattr(value, "__name__", name)):
        if module and module.__name__ not in ("__main__", home) and getattr(module, there, None) is value:
            return f"from {module.__name__} import {there} as {name}\n"
    try:
        return f"{name} = {value!r}\n" if ast.literal_eval(repr(value)) == value else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
