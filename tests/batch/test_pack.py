"""The only file that shifts, so every position is checked; and how the tokens of a step become one number."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import group, row
from trainer import advantage
from trainer.batch.pack import AGGREGATIONS, Packer, idle_row, minibatches, rows_of, to_tensors
from trainer.config.resolve import resolve
from trainer.config.settings import Algorithm
from trainer.loss.objectives import total
from trainer.records import Completion, TrainingRow

PAD = 0


def test_a_row_is_shifted_and_only_its_completion_is_trained_on():
    batch = to_tensors([TrainingRow([5, 6], [PAD, 2], [-0.1, -0.2], 1.5), TrainingRow([5], [8], [-0.3], -0.5)], PAD)
    assert batch.inputs_BT.tolist() == [[5, 6, PAD], [5, PAD, PAD]]
    assert batch.targets_BT.tolist() == [[6, PAD, 2], [8, PAD, PAD]]
    assert batch.mask_BT.tolist() == [[False, True, True], [True, False, False]]
    assert batch.present_BT.tolist() == [[True, True, True], [True, False, False]]
    torch.testing.assert_close(batch.sampled_logprobs_BT, torch.tensor([[0, -0.1, -0.2], [-0.3, 0, 0]]))
    assert batch.advantages_B.tolist() == [1.5, -0.5]


def size(batch, flat: bool) -> int:
    return len(batch.tree.line_N) if flat else batch.inputs_BT.numel()


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40), st.integers(1, 300))
@pytest.mark.parametrize("flat", [True, False])
def test_packing_keeps_every_token_and_the_budget(flat, shapes, budget):
    rows = [row(prompt, completion, advantage=float(index)) for index, (prompt, completion) in enumerate(shapes)]
    batches = Packer(budget, PAD, flat).pack(rows)
    # a batch has one token less in each row, because it is shifted
    assert all(len(batch.inputs_BT) == 1 or size(batch, flat) + len(batch.inputs_BT) <= budget for batch in batches)
    assert sum(int(batch.mask_BT.sum()) for batch in batches) == sum(completion for _, completion in shapes)
    trained = {}
    for batch in batches:
        for number, targets, mask in zip(batch.advantages_B, batch.targets_BT, batch.mask_BT, strict=True):
            trained[float(number)] = targets[mask].tolist()
    assert trained == {one.advantage: list(one.completion) for one in rows}


def test_answers_to_one_prompt_stay_together_and_the_prompt_counts_once():
    """Two prompts of ten tokens with three answers of two and four tokens: 16 and 22 in a line."""
    short, long = ([row(10, tokens, float(tokens), first=first)] * 3 for tokens, first in ((2, 20), (4, 60)))
    mixed = [one for pair in zip(short, long, strict=True) for one in pair]
    # and an eighth of each row for its keys: 3 x 12 // 8 and 3 x 14 // 8
    assert [batch.advantages_B.tolist() for batch in Packer(25, PAD).pack(mixed)] == [[4.0] * 3, [2.0] * 3]
    assert len(Packer(43, PAD).pack(mixed)) == 2
    assert len(Packer(44, PAD).pack(mixed)) == 1
    padded = Packer(30, PAD, flat=False).pack(mixed)
    assert [batch.advantages_B.tolist() for batch in padded] == [[4, 4], [4, 2], [2, 2]]


def made_of(scored, settings):
    return rows_of(scored, advantage.of(scored.rewards_G, settings), settings)


def test_rows_pair_each_completion_with_its_own_advantage_and_prompt():
    groups = [group([1, 0], lengths=[2, 4], prompt=(1, 1)), group([0, None, 1], lengths=[1, 2, 3], prompt=(9,))]
    rows = [one for each in groups for one in made_of(each, Algorithm(advantage="dr_grpo"))]
    found = [(one.prompt, len(one.completion), one.advantage, one.reward) for one in rows]
    assert found == [((1, 1), 2, 0.5, 1), ((1, 1), 4, -0.5, 0), ((9,), 1, -0.5, 0), ((9,), 3, 0.5, 1)]


def cut_off(scored, *indices):
    """The group with some of its answers cut off at the longest."""
    completions = [replace(one, truncated=index in indices) for index, one in enumerate(scored.completions)]
    return replace(scored, completions=tuple(completions))


def test_masked_answers_leave_the_loss_but_not_the_mean_of_their_group():
    made = made_of(cut_off(group([1, 0, 0], lengths=[2, 3, 4]), 1), Algorithm(advantage="dr_grpo", truncated="mask"))
    assert [len(one.completion) for one in made] == [2, 4]
    assert [one.advantage for one in made] == pytest.approx([2 / 3, -1 / 3])
    assert len(made_of(cut_off(group([1, 0]), 1), Algorithm())) == 2
    assert made_of(cut_off(group([1, 0]), 0, 1), Algorithm(truncated="mask")) == []


IDLE, PACKER = row(1, 1, 0.0, weight=0.0), Packer(16384, PAD)


def test_the_groups_of_a_pass_are_dealt_out_whole():
    config = resolve("nano", None, ["algorithm.minibatches=2"])
    rows = [replace(row(2, 3, 1.0, first=10 * place), place=place) for place in range(3) for _ in range(2)]
    first, second = minibatches(rows, IDLE, config, PACKER)
    assert (first.tokens, first.divisor, second.tokens) == (12, 12, 6)
    assert sorted(set(first.batches[0].inputs_BT[:, 0].tolist())) == [10 * 0, 10 * 2]
    assert set(second.batches[0].inputs_BT[:, 0].tolist()) == {10}


def test_an_update_has_the_same_groups_on_any_number_of_ranks(monkeypatch):
    """Seven live groups of eight; three ranks have every third. Whatever the rank, a group is in the same update."""
    config, live = resolve("nano", None, ["algorithm.minibatches=3"]), [0, 1, 2, 4, 5, 6, 7]
    rows = {place: replace(row(2, 3, 1.0, first=9 * place), place=place) for place in live}

    def updates(mine: list[int]) -> list[set[int]]:
        made = minibatches([rows[place] for place in mine], IDLE, config, PACKER)
        return [{int(t) // 9 for b in one.batches for t in b.inputs_BT[b.weights_B > 0][:, 0]} for one in made]

    alone, shares = updates(live), [[place for place in live if place % 3 == rank] for rank in range(3)]
    for share in shares:
        others = {int: [p for p in live if p not in share], tuple: [(0, 0, 0)] * 3}
        monkeypatch.setattr("trainer.batch.pack.distributed.gather", lambda mine, o=others: [mine, o[type(mine[0])]])
        assert updates(share) == [update & set(share) for update in alone]
    assert [len(update) for update in alone] == [3, 2, 2]


def test_a_rank_with_fewer_micro_batches_fills_up_with_rows_without_weight(monkeypatch):
    """The other rank has three. Where nobody has anything to train on, there is no batch at all."""
    (nothing,) = minibatches([], IDLE, resolve("nano"), PACKER)
    assert (nothing.batches, nothing.tokens) == ([], 0)
    theirs = {int: [1], tuple: [(3, 30, 30)]}  # places of groups, then what they have in each update
    monkeypatch.setattr("trainer.batch.pack.distributed.gather", lambda mine: [mine, theirs[type(mine[0])]])
    (made,) = minibatches([row(2, 3, 1.0)], IDLE, resolve("nano"), PACKER)
    assert [batch.weights_B.tolist() for batch in made.batches] == [[1.0], [0.0], [0.0]]
    assert [int(batch.counted_BT.sum()) for batch in made.batches] == [3, 0, 0]
    assert (made.divisor, made.tokens) == (33.0, 33.0)


def test_a_rank_whose_agents_never_called_the_model_can_fill_up():
    silent = replace(group([0.0]), completions=(Completion((), (), "", truncated=False),))
    batch = to_tensors([idle_row(silent)], PAD)
    assert (batch.mask_BT.tolist(), batch.weights_B.tolist()) == ([[False, False, True]], [0.0])


def test_a_batch_moves_as_a_whole():
    moved = to_tensors([row(2, 3, 1.0)], PAD).to(torch.device("meta"))
    values = [getattr(moved, name) for name in moved.__slots__]
    values += [getattr(moved.tree, name) for name in moved.tree.__slots__]
    assert {str(value.device) for value in values if isinstance(value, torch.Tensor)} == {"meta"}


# Two groups; the losses of the tokens of each answer.
LOSSES = [[[1.0, 2.0], [4.0]], [[8.0, 16.0, 32.0], [64.0, 128.0]]]


def by_hand(aggregation: str, constant: float = 1.0) -> float:
    tokens = [loss for group in LOSSES for answer in group for loss in answer]
    if aggregation == "dapo":
        return fmean(tokens)
    if aggregation == "grpo":
        return fmean(fmean(answer) for group in LOSSES for answer in group)
    if aggregation == "bnpo":
        return fmean(fmean(loss for answer in group for loss in answer) for group in LOSSES)
    return sum(tokens) / constant


def config(aggregation: str):
    sizes = ["rollout.problems=2", "rollout.group_size=2", "rollout.max_new_tokens=10"]
    return resolve("nano", None, [f"algorithm.aggregation={aggregation}", *sizes])


@pytest.mark.parametrize("budget", [1, 12, 1000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_against_the_reference_for_any_micro_batches(aggregation, budget):
    """The losses of the tokens travel as log-probs, so that packing and padding sort them as it sorts rows."""
    rows = []
    for place, of_group in enumerate(LOSSES):
        weights = AGGREGATIONS[aggregation]([len(answer) for answer in of_group])
        for answer, weight in zip(of_group, weights, strict=True):
            rows.append(TrainingRow([5] * 3, [6] * len(answer), answer, 0.0, 0.0, weight, place=place))
    idle = TrainingRow([5], [6], [0.0], 0.0, weight=0.0)
    (minibatch,) = minibatches(rows, idle, config(aggregation), Packer(budget, 0))
    assert minibatch.tokens == 8
    found = sum(total(batch.sampled_logprobs_BT, batch, minibatch.divisor) for batch in minibatch.batches)
    expected = by_hand(aggregation, constant=2 * 2 * 10)  # problems x answers x the longest they could be
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_the_constant_divisor_knows_nothing_of_what_was_sampled():
    assert config("dr_grpo").constant_divisor == 40
    assert resolve("nano", None, ["algorithm.minibatches=4"]).constant_divisor == 16 * 8 * 40 / 4
