"""Computes on the CPU what the kernels of a card would have computed, in the memory of the stub.

Every operation on a CUDA tensor first runs as it is: torch's own host code checks devices and types, chooses a kernel,
allocates, and launches it on the stub, where it does nothing. Then the same operation runs on CPU tensors that lie at
the same addresses. What has no counterpart on the CPU fails, and so does a kernel launched outside of an operation.

In a capture nothing is computed. A replay computes the recorded operations in their order, at the addresses they had.
"""

import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.cuda.attention import KERNELS
from tests.cuda.stub.library import Forget, Replay, library

# Tensors of floats and of int8 beyond so many bytes stay what they are: memory at true size, without the arithmetic.
LIMIT = int(os.environ.get("CUDA_STUB_COMPUTE_BYTES", str(1 << 62)))
# Host code that does all of the work: it allocates, copies through the runtime, or calls NCCL.
HOST_ONLY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "record_stream", "set_"}
HOST_ONLY |= {"resize_", "_local_scalar_dense", "is_pinned", "pin_memory", "_pin_memory"}
# The size of a result or of a workspace comes from the card, like that of the operations that torch tags so.
FROM_THE_CARD = {"isin", "_linalg_svd", "linalg_qr", "linalg_eigh"}
INDEXES = {"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put"}
TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Where a dispatch mode is on, these backward passes of torch write into a copy; without one, as on a card, in place.
WRITES_IN_PLACE = {
    "IndexSelectBackward0": torch.ops.aten.index_add_.default,
    "IndexBackward0": torch.ops.aten.index_put_.default,
}
NOT_COMPUTED = 7  # the result of a search that is not computed: a token, but none that ends an answer
SEARCHES = {"argmax", "searchsorted", "multinomial"}

CPU = torch.device("cpu")


class NotComputed(Exception):
    """No torch error, so that no handler takes it for one of a card."""


@dataclass(frozen=True)
class Work:
    """One operation, to be computed on CPU tensors. Nothing here keeps memory of the card."""

    function: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[Tensor]  # where the results belong that the operation does not write by itself
    generator: torch.Generator | None

    def compute(self) -> None:
        try:
            with torch.no_grad(), numbers.of(self.generator) if self.generator is not None else nullcontext():
                found = self.function(*self.args, **self.kwargs)
        except Exception as error:
            raise NotComputed(f"{self.name} has no counterpart on the CPU: {error}") from error
        for result, computed in zip(self.results, tree_leaves(found)):
            if result.shape != computed.shape:
                raise NotComputed(f"{self.name}: {computed.shape} on the CPU, {result.shape} on the card")
            result.copy_(computed)


class RandomNumbers:
    """Random numbers of CUDA generators: those that a CPU generator of the same seed gives, one after the other."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, int, torch.Generator]] = {}  # seed, offset reached, numbers; by address

    def drawn(self, generator: torch.Generator, before: int | None) -> None:
        """Take note that a CUDA generator has moved on, from the offset `before` if that is known."""
        seed, after = generator.initial_seed(), generator.get_offset()
        known_seed, reached, running = self._running.get(generator._cdata, (None, 0, None))
        goes_on = seed == known_seed and (before == reached if before is not None else after > reached)
        if not goes_on:
            running = torch.Generator().manual_seed(seed + (before or 0))
        self._running[generator._cdata] = (seed, after, running)

    @contextmanager
    def of(self, generator: torch.Generator) -> Iterator[None]:
        """Let the CPU draw these numbers, as not every operation has an argument for a generator."""
        running, own = self._running[generator._cdata][2], torch.default_generator.get_state()
        torch.default_generator.set_state(running.get_state())
        yield
        running.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(own)


class Emulation(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = as_on_a_card(func)
        leaves, name = tree_leaves((args, kwargs)), func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in leaves if is_cuda(leaf)]
        wants_cuda = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not (tensors or wants_cuda) or name in HOST_ONLY or func.namespace == "c10d":
            return func(*args, **kwargs)
        if reads_from_the_card(func, name, args, kwargs):
            torch.cuda.current_stream().synchronize()
            return computed_on_cpu(func, name, args, kwargs)
        generator = generator_of(func, leaves)
        capturing = torch.cuda.is_current_stream_capturing()
        before = generator.get_offset() if generator is not None and not capturing else None
        library.stub_cover(1)
        try:
            out = func(*args, **kwargs)
        finally:
            library.stub_cover(-1)
        if generator is not None and not capturing:
            numbers.drawn(generator, before)
        if (work := self._work(func, name, args, kwargs, out, tensors, generator)) is not None:
            if capturing:
                graphs[library.stub_capture_of(torch.cuda.current_stream().cuda_stream)].append(work)
            else:
                work.compute()
        return out

    def _work(self, func, name, args, kwargs, out, tensors, generator) -> Work | None:
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        new = [result for result in results if result.untyped_storage().data_ptr() not in inputs]
        if not func._schema.is_mutable and not new:
            return None  # a view, or no tensor
        if max(map(bytes_of, filter(is_of_weights, (*tensors, *results))), default=0) > LIMIT:
            for result in new:
                if not is_of_weights(result) or bytes_of(result) <= LIMIT:
                    on_cpu(result).fill_(NOT_COMPUTED if name in SEARCHES else 0)
            return None
        written = [] if func._schema.is_mutable and not new else tree_map(on_cpu, new)
        kernel = KERNELS.get(name)
        if kernel is not None and "attention" in name:
            written = [result for result in written if result.dim() == 4][: 3 if "backward" in name else 1]
        return Work(kernel or func, name, tree_map(on_cpu, args), tree_map(on_cpu, kwargs), written, generator)


def as_on_a_card(func: Any) -> Any:
    if func not in (torch.ops.aten.index_add.default, torch.ops.aten.index_put.default):
        return func
    node = torch._C._current_autograd_node()
    return WRITES_IN_PLACE.get(node.name() if node else "", func)


def is_cuda(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cuda"


def is_of_weights(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype == torch.int8


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def on_cpu(leaf: Any) -> Any:
    """Return a CPU tensor at the address of a CUDA tensor, the CPU instead of a card, and no generator."""
    if isinstance(leaf, torch.device):
        return CPU
    if isinstance(leaf, torch.Generator):
        return None
    if not is_cuda(leaf):
        return leaf
    storage = leaf.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    with torch.inference_mode(False):  # a replay may come outside of the inference mode of its capture
        return torch.empty(0, dtype=leaf.dtype).set_(same, leaf.storage_offset(), leaf.size(), leaf.stride())


def generator_of(func: Any, leaves: Iterable[Any]) -> torch.Generator | None:
    """Return the CUDA generator whose numbers an operation uses."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func._schema.name.startswith("aten::_scaled_dot"):
        return None
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    return given[0] if given else torch.cuda.default_generators[torch.cuda.current_device()]


def reads_from_the_card(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """True if the host waits for a number that a kernel would have computed."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in INDEXES:
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in indices)
    return name in FROM_THE_CARD or bool(TAGS & set(func.tags))


def computed_on_cpu(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    try:
        found = func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
    except NotImplementedError as error:
        raise NotComputed(f"{name} has no counterpart on the CPU: {error}") from error
    return args[0] if name.endswith("_") else tree_map(_on_card, found)


def _on_card(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    result = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda")
    on_cpu(result).copy_(leaf)
    return result


# --- graphs

numbers = RandomNumbers()
graphs: defaultdict[int, list[Work]] = defaultdict(list)  # what was recorded, by the number of the capture


@Replay
def _replay(graph: int) -> int:
    try:
        with _disable_current_modes():
            drawing = [work.generator for work in graphs[graph] if work.generator is not None]
            for generator in {generator._cdata: generator for generator in drawing}.values():
                numbers.drawn(generator, None)
            for work in graphs[graph]:
                work.compute()
    except Exception:  # noqa: BLE001 - C has no exceptions: the launch fails
        traceback.print_exc(file=sys.stderr)
        return 1
    return 0


@Forget
def _forget(graph: int) -> None:
    graphs.pop(graph, None)


def install() -> None:
    """Switch the emulation on for the rest of this process."""
    as_text = torch._tensor_str._str  # switches every mode off while it formats the numbers
    torch._tensor_str._str = lambda tensor, **more: as_text(on_cpu(tensor), **more)
    library.stub_on_graphs(_replay, _forget)
    library.stub_be_strict()
    Emulation().__enter__()
