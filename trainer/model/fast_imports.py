"""Import transformers and PEFT without two parts of torch that take longer to import than everything else: its
compiler, and distributed tensors. Octet compiles nothing, and DeepSpeed splits its models."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, util
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
Function = Callable[..., Any]


def import_libraries() -> None:
    """Import torch, transformers and PEFT. Only Octet's own processes may call this, because transformers then assumes
    permanently that this torch has no distributed tensors."""
    Compiler().stand_in()
    import torch

    import_module("accelerate")  # before the next lines, which it would remember

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        with _larger_caches():
            import_module("transformers.models")
        import_module("transformers.modeling_utils")
        import_module("peft")
    finally:
        torch.distributed.is_available = is_available


@contextmanager
def _larger_caches() -> Iterator[None]:
    """Let lru_cache keep 1,024 results by default. transformers lists the classes of its 550 folders twice, and with
    room for 128 it reads all files again."""
    original = functools.lru_cache

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        return original(1024, typed)(maxsize) if callable(maxsize) else original(maxsize, typed)

    functools.lru_cache = lru_cache
    try:
        yield
    finally:
        functools.lru_cache = original


class Compiler:
    """A substitute for the compiler, which torch, DeepSpeed and transformers only ask to leave functions alone. Its
    modules replace those of the compiler until more is needed."""

    def __init__(self) -> None:
        self.marked: list[tuple[str, Function]] = []
        self.left_alone: list[Function] = []
        self.swapping = Lock()
        rules, masks = f"{COMPILER}.trace_rules", f"{COMPILER}._trace_wrapped_higher_order_op"
        self.rules = StandIn(self, rules, {"clear_lru_cache": lambda: None})
        get_item = {"TransformGetItemToIndex": lambda: self.real(masks).TransformGetItemToIndex()}
        attributes = {
            "__path__": [],
            "trace_rules": self.rules,
            "disable": self._disable,
            "graph_break": lambda msg="": None,
            "allow_in_graph": lambda function: self._mark("allow_in_graph", function),
            "assume_constant_result": lambda function: self._mark("assume_constant_result", function),
        }
        self.modules = [StandIn(self, COMPILER, attributes), self.rules, StandIn(self, masks, get_item)]

    def stand_in(self) -> None:
        if COMPILER not in sys.modules:
            sys.modules.update({module.__name__: module for module in self.modules})
            sys.meta_path.insert(0, self)

    def real(self, name: str) -> Any:
        """Return the compiler or a module of it. The first call imports it and repeats the requests made so far."""
        with self.swapping:  # for concurrent threads; Python's own lock protects the import itself
            is_first = self in sys.meta_path
            if is_first:
                sys.meta_path.remove(self)
                for module in self.modules:
                    del sys.modules[module.__name__]
        if is_first:
            compiler = import_module(COMPILER)
            for mark, function in self.marked:
                getattr(compiler, mark)(function)
            for function in self.left_alone:
                delattr(function, "__dynamo_disable")  # so that torch asks the real compiler
        return import_module(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Import the compiler before one of its modules. Python calls this before it imports any module."""
        if not name.startswith(f"{COMPILER}."):
            return None
        self.real(COMPILER)
        return ModuleSpec(name, Imported(sys.modules[name])) if name in sys.modules else util.find_spec(name)

    def _mark(self, name: str, function: Function) -> Function:
        self.marked.append((name, function))
        return function

    def _disable(self, fn: Function | None = None, recursive: bool = True, **options: Any) -> Function:
        import torch

        if fn is None or options.get("wrapping", True):
            return torch._disable_dynamo(fn, recursive)  # which calls this again when the function is called
        self.left_alone.append(fn)  # torch keeps the result in an attribute of the function
        return fn


class StandIn(ModuleType):
    def __init__(self, compiler: Compiler, name: str, attributes: dict[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(attributes, _compiler=compiler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiler.real(self.__name__), name)


class Imported(Loader):
    """A loader of a module that has been imported already."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
