"""step: load an optimizer state that was saved by a different number of ranks.

ZeRO-1 and ZeRO-2 concatenate the trained parameters and cut them into one part per rank. Each rank saves its part, and
the positions of parameters in it. DeepSpeed itself loads a checkpoint only with the same number of ranks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import CheckpointError

MASTERS = "single_partition_of_fp32_groups"
STATE = "base_optimizer_state"
Part = dict[str, Any]


def load(zero: Any, files: Sequence[Path], read: Callable[[str], Any]) -> None:
    """Fill a ZeRO optimizer with this rank's share of a checkpoint, which has a file for each rank that saved it."""
    mine: Part = {}
    before: Counter[str] = Counter()  # number of values of each parameter in earlier files
    for path in files:
        part = read(str(path))["optimizer_state_dict"]
        mine = mine or _empty(part, zero, path)
        for group, fragments in enumerate(part["param_slice_mappings"]):
            theirs, ours = _buffers(part, group), _buffers(mine, group)
            for parameter in zero.bit16_groups[group]:
                name = zero.param_names[parameter]
                if fragment := fragments.get(name):
                    _copy(theirs, fragment, before[name], ours, parameter._hp_mapping)
                    before[name] += fragment.numel
    zero.load_state_dict([mine] * zero.partition_count[0], load_from_fp32_weights=True)


def _empty(part: Part, zero: Any, path: Path) -> Part:
    """Return a part with the structure of a saved one, with zeros in the sizes of this rank."""
    masters = [torch.zeros_like(flat) for flat in zero.single_partition_of_fp32_groups]
    state = {}
    for group, saved in part[STATE]["state"].items():
        flat = _buffers(part, group)
        if short := [key for key, value in flat.items() if value.numel() < flat[""].numel()]:
            reason = f"its optimizer keeps {short[0]} for blocks of values, which cannot be split for other ranks"
            raise CheckpointError(path, reason, "Start with the number of ranks that has written it")
        empty = {key: torch.zeros_like(masters[group], dtype=flat[key].dtype) for key in flat if key}
        state[group] = saved | empty
    paddings = {"param_alignment_paddings": zero.round_robin_bit16_padding}
    return {**part, **paddings, MASTERS: masters, STATE: {**part[STATE], "state": state}}


def _buffers(part: Part, group: int) -> dict[str, Tensor]:
    """Return the flat master weights and the flat tensors of the optimizer of a group."""
    state = part[STATE]["state"].get(group, {}).items()  # an optimizer may keep nothing
    return {"": part[MASTERS][group], **{key: value for key, value in state if torch.is_tensor(value) and value.dim()}}


def _copy(theirs: dict[str, Tensor], fragment: Any, first: int, ours: dict[str, Tensor], mapping: Any) -> None:
    """Copy the values that a saved fragment, which begins at value `first` of its parameter, shares with this rank."""
    if mapping is None:  # the parameter is on other ranks
        return
    ours_in_parameter, ours_in_part = mapping.lp_fragment_address, mapping.hp_fragment_address
    begin = max(first, ours_in_parameter.start)
    count = min(first + fragment.numel, ours_in_parameter.start + ours_in_parameter.numel) - begin
    if count > 0:
        source, target = fragment.start + begin - first, ours_in_part.start + begin - ours_in_parameter.start
        for key, value in ours.items():
            value[target : target + count].copy_(theirs[key][source : source + count])
