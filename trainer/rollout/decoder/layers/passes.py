"""What a pass through the layers computes once for all of them, and what the layers keep of each row."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Cosines and sines of each kind of rotary embedding, or the matrices that turn by them.
Angles = dict[str, tuple[Tensor, ...]]


class Keys(NamedTuple):
    """Keys and values of a layer with attention, at each place of each row."""

    heads: int  # of keys and of values together
    size: int


class State(NamedTuple):
    """A state that does not grow with the row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Slots(NamedTuple):
    """The cache of a layer with attention, as a decode step sees it."""

    all_SD: Tensor  # the places of all rows and heads
    new_BK: Tensor  # those of the tokens of this step
    keys_BKTD: Tensor
    values_BKTD: Tensor


class Cache:
    """What the layers keep of each row. Layers that keep the same share a tensor: a row is copied with one call."""

    def __init__(
        self, wanted: Sequence[Sequence[Keys | State]], rows: int, places: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.places = places
        alike: defaultdict[Keys | State, list[tuple[int, int]]] = defaultdict(list)
        for layer, kept in enumerate(wanted):
            for number, one in enumerate(kept):
                alike[one].append((layer, number))
        self.keys_LRKTD: list[Tensor] = []
        self.states_LR: list[Tensor] = []
        self.layers_of_keys: list[list[int]] = []
        self.of_layer: list[list[Tensor]] = [[] for _ in wanted]
        for one, owners in sorted(alike.items(), key=lambda item: item[1]):
            if isinstance(one, Keys):  # zeros: masked, but 0 x NaN would be NaN
                shape = (len(owners), rows, one.heads, places, one.size)
                tensor = torch.zeros(shape, dtype=dtype, device=device)
                self.keys_LRKTD.append(tensor)
                self.layers_of_keys.append([layer for layer, _ in owners])
            else:
                tensor = torch.zeros((len(owners), rows, *one.shape), dtype=one.dtype, device=device)
                self.states_LR.append(tensor)
            for (layer, _), own in zip(owners, tensor.unbind(), strict=True):
                self.of_layer[layer].append(own)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys_LRKTD, *self.states_LR]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def clear(self, rows: slice, width: int) -> None:
        """Write zeros behind the first `width` places, where an earlier sequence may have left NaN."""
        for keys_LRKTD in self.keys_LRKTD:
            keys_LRKTD[:, rows, :, width:].zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy rows with their first `width` places."""
        for one, other in zip(sources, targets, strict=True):  # row by row is four times faster than an index
            for keys_LRKTD in self.keys_LRKTD:
                keys_LRKTD[:, other, :, :width].copy_(keys_LRKTD[:, one, :, :width])
            for state_LR in self.states_LR:
                state_LR[:, other].copy_(state_LR[:, one])

    def slots(self, places_B: Tensor, width: int) -> dict[int, Slots]:
        """Return the slots of each layer that keeps keys; what all layers share is computed once."""
        rows, found = len(places_B), dict[int, Slots]()
        for keys_LRKTD, layers in zip(self.keys_LRKTD, self.layers_of_keys, strict=True):
            heads, size = keys_LRKTD.shape[2], keys_LRKTD.shape[4]
            new_BK = torch.arange(rows * heads, device=places_B.device).view(rows, heads) * self.places
            new_BK += places_B[:, None]
            keys, values = (half.unbind() for half in keys_LRKTD[:, :rows, :, :width].chunk(2, dim=2))
            whole = keys_LRKTD.view(len(layers), -1, size).unbind()
            found |= {
                layer: Slots(whole[number], new_BK, keys[number], values[number]) for number, layer in enumerate(layers)
            }
        return found


class Prompts(NamedTuple):
    """A pass over prompts, padded on the right, where causal layers never look. They may go on from a beginning that
    all of them have, and that an earlier pass has read into the first of the rows."""

    before: int  # tokens of that beginning, which the other fields leave out
    width: int
    lengths_P: Tensor
    groups_P: Tensor  # how many rows keep what is read of each prompt
    rows: slice
    cache: Cache
    angles: Angles
    masks: dict[int | None, Tensor | None]  # by the window
    inputs_LNp: Tensor | None  # what each layer adds of its own embeddings
    lent: dict[int, Tensor]  # keys and values of layers that later ones use
    repeats_keys: bool  # for cards whose quick kernels want as many heads of keys as of queries

    def beginning(self, layer: int, number: int) -> Tensor:
        """Return for each prompt what a layer has kept of the beginning."""
        kept = self.cache.of_layer[layer][number][self.rows.start]
        return kept.expand(len(self.lengths_P), *kept.shape)

    def keep(self, layer: int, number: int, state_P: Tensor) -> None:
        """Write a state after each prompt to its rows."""
        self.cache.of_layer[layer][number][self.rows] = state_P.repeat_interleave(self.groups_P, dim=0).to(
            self.cache.of_layer[layer][number].dtype
        )


class Step(NamedTuple):
    """A pass over one more token of each row."""

    running_B: Tensor  # False for rows whose states must stay as they are
    cache: Cache
    slots: dict[int, Slots]
    angles: Angles
    masks: dict[int | None, Tensor]  # 0 where a row may attend, else -inf
    inputs_LNp: Tensor | None

    def state(self, layer: int, number: int) -> Tensor:
        return self.cache.of_layer[layer][number][: len(self.running_B)]


Pass = Prompts | Step
