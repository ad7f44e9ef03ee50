"""step: the optimizer state that a number of ranks has saved, for another number of ranks.

ZeRO-1 and ZeRO-2 lay what is trained end to end and cut it into as many parts as there are ranks. Each rank saves its
part and says which parameters lie where in it. DeepSpeed itself loads a checkpoint with the same number of ranks only.
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
    """Fill a ZeRO optimizer with this rank's share of what the ranks of a checkpoint have saved, one file each."""
    mine: Part = {}
    before: Counter[str] = Counter()  # how much of each parameter the earlier files have
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
    """Return a part like a saved one, with zeros in the sizes of this rank."""
    masters = [torch.zeros_like(flat) for flat in zero.single_partition_of_fp32_groups]
    state = {}
    for group, saved in part[STATE]["state"].items():
        for key, value in saved.items():
            if torch.is_tensor(value) and value.dim() and value.numel() < part[MASTERS][group].numel():
                reason = f"its optimizer keeps {key} for blocks of values, which other ranks would cut elsewhere"
                remedy = "Start with as many ranks as have written it"
                raise CheckpointError(path, reason, remedy)
        is_cut = {key: torch.is_tensor(value) and value.dim() > 0 for key, value in saved.items()}
        state[group] = {
            key: torch.zeros_like(masters[group], dtype=value.dtype) if is_cut[key] else value
            for key, value in saved.items()
        }
    paddings = {"param_alignment_paddings": zero.round_robin_bit16_padding}
    return {**part, **paddings, MASTERS: masters, STATE: {**part[STATE], "state": state}}


def _buffers(part: Part, group: int) -> dict[str, Tensor]:
    """Return the master weights and the optimizer's tensors of a group, each laid end to end."""
    state = part[STATE]["state"][group].items()
    return {"": part[MASTERS][group], **{key: value for key, value in state if torch.is_tensor(value) and value.dim()}}


def _copy(theirs: dict[str, Tensor], fragment: Any, first: int, ours: dict[str, Tensor], mapping: Any) -> None:
    """Copy what a saved fragment, which begins at value `first` of its parameter, has of this rank's."""
    if mapping is None:  # the parameter is on other ranks
        return
    own, place = mapping.lp_fragment_address, mapping.hp_fragment_address
    begin = max(first, own.start)
    count = min(first + fragment.numel, own.start + own.numel) - begin
    if count > 0:
        source, target = fragment.start + begin - first, place.start + begin - own.start
        for key, value in ours.items():
            value[target : target + count].copy_(theirs[key][source : source + count])
