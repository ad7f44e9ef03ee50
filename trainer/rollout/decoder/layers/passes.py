"""The inputs of a forward pass that all layers share, and the cache of the layers."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

# Cosines and sines of each kind of rotary embedding, or rotation matrices.
Angles = dict[str, tuple[Tensor, ...]]
# The cache of a layer in a decode step: all places of all rows and heads, the indices of the new ones, keys and values.
Slots = tuple[Tensor, Tensor, Tensor, Tensor]


class Keys(NamedTuple):
    """The keys and values of an attention layer, at each place of each row."""

    heads: int  # key heads and value heads together
    size: int


class State(NamedTuple):
    """A state whose size does not depend on the length of the row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Cache:
    """The state of all layers for each row. Layers with equal shapes share a tensor, so that one call copies a row."""

    def __init__(
        self, wanted: Sequence[Sequence[Keys | State]], rows: int, places: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers_of: defaultdict[Keys | State, list[int]] = defaultdict(list)
        for layer, kinds in enumerate(wanted):
            for kind in kinds:
                layers_of[kind].append(layer)
        self.keys_LRKTD: list[Tensor] = []
        self.states_LR: list[Tensor] = []
        self.layers_of_keys: list[list[int]] = []
        self.of_layer: list[list[Tensor]] = [[] for _ in wanted]
        for kind, layers in layers_of.items():
            if isinstance(kind, Keys):  # zeros, because masked places are multiplied by 0, and 0 x NaN is NaN
                shape = (len(layers), rows, kind.heads, places, kind.size)
                tensor = torch.zeros(shape, dtype=dtype, device=device)
                self.keys_LRKTD.append(tensor)
                self.layers_of_keys.append(layers)
            else:
                tensor = torch.zeros((len(layers), rows, *kind.shape), dtype=kind.dtype, device=device)
                self.states_LR.append(tensor)
            for layer, part in zip(layers, tensor.unbind(), strict=True):
                self.of_layer[layer].append(part)
        self.bytes = sum(tensor.nbytes for tensor in (*self.keys_LRKTD, *self.states_LR))

    def clear(self, rows: slice, width: int) -> None:
        """Write zeros after the first `width` places, where an earlier sequence may have left NaN."""
        for keys_LRKTD in self.keys_LRKTD:
            keys_LRKTD[:, rows, :, width:].zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy rows with their first `width` places."""
        for source, target in zip(sources, targets, strict=True):  # four times faster than indexing with lists
            for keys_LRKTD in self.keys_LRKTD:
                keys_LRKTD[:, target, :, :width].copy_(keys_LRKTD[:, source, :, :width])
            for state_LR in self.states_LR:
                state_LR[:, target].copy_(state_LR[:, source])

    def slots(self, places_B: Tensor, width: int) -> dict[int, Slots]:
        """Return the slots of each layer that keeps keys. Indices are computed once for all layers of a shape."""
        rows, slots = len(places_B), dict[int, Slots]()
        for keys_LRKTD, layers in zip(self.keys_LRKTD, self.layers_of_keys, strict=True):
            _, _, heads, places, size = keys_LRKTD.shape
            new_BK = torch.arange(rows * heads, device=places_B.device).view(rows, heads) * places
            new_BK += places_B[:, None]
            keys, values = (half.unbind() for half in keys_LRKTD[:, :rows, :, :width].chunk(2, dim=2))
            whole = keys_LRKTD.view(len(layers), -1, size).unbind()
            slots |= zip(layers, zip(whole, repeat(new_BK), keys, values))
        return slots


class Prompts(NamedTuple):
    """A pass over prompts, which may continue a common prefix that an earlier pass has read into the first row."""

    before: int  # length of the common prefix, which the other fields leave out
    width: int
    lengths_P: Tensor
    groups_P: Tensor  # number of rows that start with each prompt
    rows: slice
    cache: Cache
    angles: Angles
    masks: dict[int | None, Tensor | None]  # by window
    inputs_LNp: Tensor | None  # the per-layer inputs of Gemma 4
    lent: dict[int, Tensor]  # keys and values that later layers use
    repeats_keys: bool  # for cards whose fast kernels need as many key heads as query heads

    def beginning(self, layer: int, number: int) -> Tensor:
        """Return the state of a layer after the common prefix, once for each prompt."""
        state = self.cache.of_layer[layer][number][self.rows.start]
        return state.expand(len(self.lengths_P), *state.shape)

    def keep(self, layer: int, number: int, state_P: Tensor) -> None:
        """Write the state of a layer after each prompt to the rows of the prompt."""
        state_R = self.cache.of_layer[layer][number]
        state_R[self.rows] = state_P.repeat_interleave(self.groups_P, dim=0).to(state_R.dtype)


class Step(NamedTuple):
    """A pass over one more token of each row."""

    running_B: Tensor  # False for rows whose state must not change
    cache: Cache
    slots: dict[int, Slots]
    angles: Angles
    masks: dict[int | None, Tensor]  # 0 where a row may attend, else -inf
    inputs_LNp: Tensor | None

    def state(self, layer: int, number: int) -> Tensor:
        return self.cache.of_layer[layer][number][: len(self.running_B)]


Pass = Prompts | Step
