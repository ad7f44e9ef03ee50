"""The only file that shifts, so every position is checked."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import group, row
from trainer.batches import idle_row, pack, rows_of, to_tensors
from trainer.types import TrainingRow

PAD = 0


def test_a_row_is_shifted_and_only_its_completion_is_trained_on():
    batch = to_tensors([TrainingRow([5, 6], [7, 2], [-0.1, -0.2], 1.5), TrainingRow([5], [8], [-0.3], -0.5)], PAD)
    assert batch.inputs_BT.tolist() == [[5, 6, 7], [5, PAD, PAD]]
    assert batch.targets_BT.tolist() == [[6, 7, 2], [8, PAD, PAD]]
    assert batch.mask_BT.tolist() == [[False, True, True], [True, False, False]]
    torch.testing.assert_close(batch.sampled_logprobs_BT, torch.tensor([[0, -0.1, -0.2], [-0.3, 0, 0]]))
    assert batch.advantages_B.tolist() == [1.5, -0.5]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40), st.integers(1, 300))
def test_packing_keeps_every_token_and_the_budget(shapes, budget):
    rows = [row(prompt, completion, advantage=float(index)) for index, (prompt, completion) in enumerate(shapes)]
    batches = pack(rows, budget, PAD)
    assert all(len(batch.inputs_BT) == 1 or batch.inputs_BT.numel() <= budget for batch in batches)
    assert sum(int(batch.mask_BT.sum()) for batch in batches) == sum(completion for _, completion in shapes)
    trained = {
        float(advantage): targets[mask].tolist()
        for batch in batches
        for advantage, targets, mask in zip(batch.advantages_B, batch.targets_BT, batch.mask_BT, strict=True)
    }
    assert trained == {one.advantage: list(one.completion) for one in rows}


def test_rows_pair_each_completion_with_its_own_advantage_and_prompt():
    groups = [group([1, 0], lengths=[2, 4], prompt=(1, 1)), group([0, None, 1], lengths=[1, 2, 3], prompt=(9,))]
    rows = rows_of(groups, "dr_grpo")
    assert [(one.prompt, len(one.completion), one.advantage) for one in rows] == [
        ((1, 1), 2, 0.5),
        ((1, 1), 4, -0.5),
        ((9,), 1, -0.5),
        ((9,), 3, 0.5),
    ]


def test_an_idle_row_has_no_weight():
    assert idle_row(group([1, 1], lengths=[5, 3])).advantage == 0
    assert len(idle_row(group([1, 1], lengths=[5, 3])).completion) == 3


def test_a_batch_moves_as_a_whole():
    moved = to_tensors([row(2, 3, 1.0)], PAD).to(torch.device("meta"))
    assert {str(getattr(moved, name).device) for name in moved.__slots__} == {"meta"}


@pytest.mark.parametrize("width", [1, 2])
def test_a_row_of_one_token_each_is_legal(width):
    assert to_tensors([row(width, 1, 1.0)], PAD).mask_BT.sum() == 1
