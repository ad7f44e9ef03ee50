"""Copy a function of a script or a notebook, with what it uses of it, into the text of a file."""

import ast
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from trainer.machine import user_code

LAMBDA = "<lambda>"


def name_of(function: Callable[..., Any]) -> str:
    """Return the name under which a function, or an object that can be called, is logged and copied."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return "function" if name == LAMBDA else name


def source_of(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """Return the text of a file that defines the function, or "", and the names that it uses but does not define."""
    texts: dict[str, str | None] = {}
    _define(name_of(function) if inspect.isfunction(inspect.unwrap(function)) else "", function, texts)
    *used, (_, text) = texts.items()
    if text is None:
        return "", []
    parts = ["from __future__ import annotations\n", *(part for _, part in used if part), text]
    return "\n".join(parts), [name for name, part in used if part is None]


def _define(name: str, value: Any, texts: dict[str, str | None]) -> None:
    """Add the text that defines a name, or None if it has no source, after the texts of the names that it uses."""
    texts[name] = None  # a function may use itself
    text = None
    with suppress(OSError, TypeError, SyntaxError, KeyError):
        source = textwrap.dedent(inspect.getsource(value))
        is_whole = symtable.symtable(source, "", "exec").lookup(name).is_assigned() and not inspect.ismodule(value)
        text = source if is_whole else None
    if text is None and getattr(value, "__name__", "") == LAMBDA:
        text = _of_lambda(name, value)
    for used, its_value in _names(inspect.unwrap(value), text or ""):
        if used in texts:
            continue
        if (line := _definition(used, its_value, value.__module__)) is not None:
            texts[used] = line
        else:
            _define(used, its_value, texts)
    del texts[name]
    texts[name] = text


def _of_lambda(name: str, value: Any) -> str | None:
    """Return the definition of a lambda, whose source is the statement around it, if it is the only one in its line."""
    with suppress(OSError, SyntaxError):
        tree = ast.parse("".join(inspect.findsource(value)[0]))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        here = [node for node in found if node.lineno == value.__code__.co_firstlineno]
        return f"{name} = {ast.unparse(here[0])}\n" if len(here) == 1 else None
    return None


def _names(value: Any, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the names of the script that a function or class uses, with their values."""
    scope: dict[str, Any] = getattr(sys.modules.get(getattr(value, "__module__", "")), "__dict__", {})
    if inspect.isfunction(value):
        scope = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
    tree = ast.parse(text)
    for node in ast.walk(tree):  # annotations are not evaluated
        for part in {"annotation", "returns"} & {*node._fields}:
            setattr(node, part, getattr(node, part) and ast.Constant(None))
    _, read = user_code.names_in(ast.unparse(tree))
    yield from ((name, scope[name]) for name in read if name in scope)


def _definition(name: str, value: Any, home: str) -> str | None:
    """Return the line that imports a module, imports an object of another module, or defines a constant; else None."""
    if inspect.ismodule(value):
        return None if _is_beside_the_script(value.__name__) else f"import {value.__name__} as {name}\n"
    if isinstance(value, re.Pattern):
        return f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})\n"
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    is_other = module and module.__name__ not in ("__main__", home) and not _is_beside_the_script(module.__name__)
    for there in (name, getattr(value, "__name__", name)):
        if module and is_other and getattr(module, there, None) is value:
            return f"from {module.__name__} import {there} as {name}\n"
    try:
        return f"{name} = {value!r}\n" if ast.literal_eval(repr(value)) == value else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _is_beside_the_script(module: str) -> bool:
    """Return True if a module is in the folder of the script or notebook, and not installed."""
    top, script = module.partition(".")[0], getattr(sys.modules["__main__"], "__file__", None)
    here, file = Path(script).parent if script else Path(), getattr(sys.modules.get(top), "__file__", None) or ""
    is_here = Path(file).resolve() in [place.resolve() for place in (here / f"{top}.py", here / top / "__init__.py")]
    return is_here and top not in packages_distributions()
