"""What is scored before a step: only what cannot be had otherwise, and with the right weights."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import group, logprobs_of, refuses, row
from tests.e2e.updates import updater_of
from tests.loss.test_trl_parity import Plain, moved_apart
from trainer.batch.pack import minibatches
from trainer.config.resolve import resolve
from trainer.errors import TrainingError
from trainer.loss.before_update import threshold, with_teacher
from trainer.records import Completion, MeasuredBatch
from trainer.step.update import backward
from trainer.watch.tally import Tally

IDLE = row(1, 1, 0.0, weight=0.0)
PAIRS = [(row(4, 6, 1.0, first=20 + 9 * n), row(2, 3, -1.0, first=50 + n)) for n in range(4)]
ROWS = [replace(one, place=place) for place, pair in enumerate(PAIRS) for one in pair]


def setting(tiny_model, *overrides):
    config = resolve("nano", None, ["rollout.temperature=0.7", "optim.tokens_per_micro_batch=30", *overrides])
    policy = Plain(*moved_apart(tiny_model, 0.1), config)
    updater = updater_of(policy, config)
    return policy, updater, minibatches(ROWS, IDLE, config, updater.packer), config


def test_one_update_on_policy_needs_no_pass_before_it(tiny_model):
    policy, updater, dealt, config = setting(tiny_model)
    (prepared,) = updater.prepare(dealt)
    assert policy.passes == []
    trained = backward(policy, prepared, config.algorithm, 0.0, Tally())
    assert policy.passes == ["train"] * len(prepared.batches)
    assert all(isinstance(batch, MeasuredBatch) for batch in trained.batches)


def test_only_batches_that_come_after_another_update_are_scored_before(tiny_model):
    policy, updater, dealt, _ = setting(tiny_model, "algorithm.minibatches=2")
    first, second = updater.prepare(dealt)
    assert policy.passes == ["policy"] * len(second.batches)
    assert not any(isinstance(batch, MeasuredBatch) for batch in first.batches)
    for batch in second.batches:
        torch.testing.assert_close(batch.old_logprobs_BT, policy.measure(batch).logprobs_BT)


def test_a_reference_is_scored_only_where_kl_has_a_price(tiny_model):
    """The teacher of an advantage leaves it in place."""
    policy, updater, dealt, config = setting(tiny_model, "algorithm.kl.coef=0.04", "teacher.name=nano")
    (prepared,) = updater.prepare(dealt)
    assert policy.passes == ["reference"] * len(prepared.batches)
    for batch in prepared.batches:
        assert (policy.now(batch).logprobs_BT - batch.reference_logprobs_BT).abs().max() > 1e-3
        taught = with_teacher(batch, batch.sampled_logprobs_BT, config.teacher)
        assert taught.reference_logprobs_BT is batch.reference_logprobs_BT


def test_a_teacher_in_the_loss_stands_in_for_the_reference_which_is_not_scored(tiny_model):
    settings = ["teacher.name=nano", "teacher.form=loss", "algorithm.kl.coef=0.04", "algorithm.kl.estimator=k2"]
    policy, updater, dealt, _ = setting(tiny_model, *settings)
    taught = replace(updater, teacher=lambda batches: [batch.sampled_logprobs_BT - 1 for batch in batches])
    (prepared,) = taught.prepare(dealt)
    assert policy.passes == []
    assert all(torch.equal(one.reference_logprobs_BT, one.sampled_logprobs_BT - 1) for one in prepared.batches)


def test_only_the_most_uncertain_tokens_of_the_step_are_trained_on(tiny_model):
    policy, updater, dealt, config = setting(tiny_model, "algorithm.top_entropy=0.25")
    (prepared,) = updater.prepare(dealt)
    kept = torch.cat([batch.trained_BT[batch.mask_BT] for batch in prepared.batches])
    entropies = torch.cat([policy.measure(batch).entropy_BT[batch.mask_BT] for batch in prepared.batches])
    assert len(kept) == 36
    assert kept.sum() == 9
    assert entropies[kept].min() >= entropies[~kept].max()
    backward(policy, prepared, config.algorithm, 0.0, Tally())  # with the old log-probs of the pass before
    assert policy.passes.count("train") == len(prepared.batches)
    assert threshold(torch.empty(0), share=0.25) == 0.0, "nothing is trained on in this step"
    assert updater.update([replace(prepared, tokens=0.0)], 0, Tally()) == []


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_is_taken_off_each_reward(tiny_model, estimator):
    overrides = ["algorithm.kl.coef=0.5", "algorithm.kl.where=reward", f"algorithm.kl.estimator={estimator}"]
    policy, updater, dealt, _ = setting(tiny_model, *overrides)
    groups = [group([1.0, 0.0], lengths=[4, 2]), group([None, 1.0], lengths=[1, 5], prompt=(9, 8))]
    silent = Completion((), (), "", truncated=False)  # of an agent that has not called the model
    groups.append(replace(group([1.0, 0.0], prompt=tuple(range(3, 30))), completions=(silent, silent)))
    tally = Tally()
    for before, after in zip(groups, updater.penalise(groups, tally), strict=True):
        for completion, old, new in zip(before.completions, before.rewards_G, after.rewards_G, strict=True):
            tokens = completion.tokens
            apart = divergence(policy, before.prompt.tokens, tokens, estimator) if tokens else 0.0
            assert new == (None if old is None else pytest.approx(old - 0.5 * apart, abs=1e-5))
    assert tally.sums["kl"][1] == 12  # tokens
    (prepared,) = updater.prepare(dealt)
    assert prepared.batches[0].reference_logprobs_BT is None, "it is paid for once"
    policy, updater, *_ = setting(tiny_model, "algorithm.kl.coef=0.5", "algorithm.kl.target=0.1")
    assert updater.penalise(groups, Tally()) == groups, "it is part of the loss"
    assert policy.passes == []
    assert (updater.adapt_kl({}), updater.adapt_kl({"kl": 0.2})) == ({}, {"kl_coef": 0.5}), "the one that was used"
    assert updater.kl.value == pytest.approx(0.5 * 1.02)


def divergence(policy, prompt, completion, estimator) -> float:
    """One answer, without padding, by the definition."""
    now, reference = (logprobs_of(one.model, prompt, completion, 0.7) for one in (policy.now, policy.reference))
    d = (now - reference).detach()
    return float((d if estimator == "k1" else (-d).exp() + d - 1).sum())


def test_a_kl_that_never_fits_ends_when_no_batch_can_be_halved(tiny_model, monkeypatch, capsys):
    """And not when the budget has been halved down to one token."""
    overrides = ["algorithm.kl.coef=0.5", "algorithm.kl.where=reward", "optim.tokens_per_micro_batch=4096"]
    policy, updater, _, _ = setting(tiny_model, *overrides)
    policy.start_over = lambda: None
    monkeypatch.setattr(policy, "measure", lambda batch: torch.empty(1 << 50, dtype=torch.uint8))
    with refuses("optim.tokens_per_micro_batch", TrainingError, names="counts"):
        updater.penalise([group([1.0, 0.0], lengths=[4, 8])], Tally())
    assert capsys.readouterr().out.count("out of memory") == 1
