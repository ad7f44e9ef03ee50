"""Adds up what the operations of torch ask of a card: bytes read and written, arithmetic, kernel launches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tests.cuda import emulation
from tests.cuda.stub.library import Forget, Replay, counted, library

COUNTED = ("launches", "graph_launches", "copies", "bytes_to_card", "bytes_to_host", "synchronisations")
# Of what they look up in, they read as much as they return; of what they write into, they write what they are given.
LOOK_UPS = {"embedding", "index", "_unsafe_index", "index_select", "gather"}
PARTIAL_WRITES = {"index_copy_", "index_put_", "scatter_", "scatter_add_", "index_add_"}
OVERWRITES = {"copy_", "fill_", "zero_"}  # they do not read what was there

callbacks: list[Any] = []  # C has their addresses for the rest of the process


class Operation(NamedTuple):
    """One operation, by what it costs."""

    name: str
    bytes: int
    flops: int
    is_fp32: bool
    launches: int
    captured: bool  # part of a graph that was replayed


class Count(NamedTuple):
    """How often each operation was done, and what the stub of the card counted."""

    operations: Counter[Operation]  # numbers may be fractions
    counters: Counter[str]

    def since(self, before: Count) -> Count:
        return Count(self.operations - before.operations, self.counters - before.counters)

    def plus(self, other: Count) -> Count:
        return Count(self.operations + other.operations, self.counters + other.counters)

    def times(self, factor: float) -> Count:
        return Count(*(Counter({key: factor * number for key, number in part.items()}) for part in self))


class Ledger(TorchDispatchMode):
    """Counts every operation. A replay of a graph counts the operations that were captured."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Count] = {}
        self._operations: Counter[Operation] = Counter()
        self._captured: defaultdict[int, list[Operation]] = defaultdict(list)  # by the number of the capture
        callbacks.append((Replay(self._replay), Forget(self._forget)))
        library.stub_on_graphs(*callbacks[-1])

    def now(self) -> Count:
        stub = counted()
        return Count(self._operations.copy(), Counter({name: stub[name] for name in COUNTED}))

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        before = self.now()
        yield
        self.counts[name] = self.now().since(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = emulation.as_on_a_card(func)
        if not has_kernel(func, "CUDA") and has_kernel(func, "CompositeImplicitAutograd"):
            with self:  # nothing has taken it apart yet where no gradients are recorded
                return func.decompose(*args, **(kwargs or {}))
        stub = library.stub_counters().contents
        before = stub.launches + stub.captured
        out = func(*args, **(kwargs or {}))
        launches = stub.launches + stub.captured - before
        capture = library.stub_capture_of(torch.cuda.current_stream().cuda_stream)
        operation = operation_of(func, args, kwargs or {}, out, launches, bool(capture))
        if operation is not None and capture:
            self._captured[capture].append(operation)
        elif operation is not None:
            self._operations[operation] += 1
        return out

    def _replay(self, graph: int) -> int:
        self._operations.update(self._captured[graph])
        return int(emulation._replay(graph))

    def _forget(self, graph: int) -> None:
        self._captured.pop(graph, None)
        emulation._forget(graph)


def has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def operation_of(func: Any, args: Any, kwargs: Any, out: Any, launches: int, captured: bool) -> Operation | None:
    """Return what an operation costs; None for a view, and for what the card has no part in."""
    name = func._schema.name.partition("::")[2]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if emulation.is_cuda(leaf)]
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    results = [leaf for leaf in tree_leaves(out) if emulation.is_cuda(leaf)]
    new = [result for result in results if result.untyped_storage().data_ptr() not in known]
    if not (inputs or new) or name in emulation.HOST_ONLY or not (func._schema.is_mutable or new or launches):
        return None
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None)  # torch has no formula for what writes in place
    formula = flop_registry.get(func._overloadpacket) or flop_registry.get(plain)
    flops = formula(*(one for one in args if isinstance(one, Tensor)), out_val=out) if formula else 0
    is_fp32 = any(tensor.dtype == torch.float32 for tensor in inputs[:1])
    changed = changed_by(func, args, kwargs)
    read = [leaf for leaf in tree_leaves((args, kwargs | {"out": None})) if emulation.is_cuda(leaf)]
    return Operation(name, bytes_moved(name, read, changed, new), flops, is_fp32, launches, captured)


def changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
    written = [given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if emulation.is_cuda(leaf)]


def bytes_moved(name: str, inputs: Sequence[Tensor], changed: Sequence[Tensor], new: Sequence[Tensor]) -> int:
    """Return the bytes of card memory that an operation reads and writes."""
    if name in LOOK_UPS:
        return sum(map(size_of, (*inputs[1:], *new, *new)))
    if name in PARTIAL_WRITES:
        return sum(map(size_of, (*inputs[1:], inputs[-1])))
    read = inputs[1:] if name in OVERWRITES and changed else inputs
    return sum(map(size_of, (*read, *changed, *new)))


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, without those that an expanded view only repeats."""
    lengths = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride or not size]
    return prod(lengths) * tensor.element_size()
