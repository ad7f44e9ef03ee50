"""The recipe `verl_gsm8k` against verl's formulas, written here in plain torch: one loss, one gradient.

The formulas are those of verl in June 2025, when its baseline was run: the advantage divides by torch.std, the ratio is
clipped on both sides and again at 3 where the advantage is negative, the KL is k3, at most 10, and the losses of tokens
are averaged over each micro-batch, and then over micro-batches. Where the two differ by design:

- Ours is one mean over the tokens of the update. The two are the same if all micro-batches have as many tokens.
- Ours has no bound for the KL of a token, which here stays below 10.
"""

import pytest
import torch

from tests.conftest import gradients, logprobs_of
from tests.loss.test_trl_parity import Policies, answered, moved_apart, ours, spoken
from trainer.config.resolve import resolve

GROUP, LONGEST = 5, 16
REWARDS = [[1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0] * GROUP]  # all right: its advantages are 0
UNEVEN = [[3, 9, 1, LONGEST, 6], [7, 2, LONGEST, 5, 4], [2, 4, 12, 1, 8]]
EVEN = [[3, 9, 1, LONGEST, 6], [6, LONGEST, 1, 9, 3], [9, 3, 6, 1, LONGEST]]  # 35 tokens each


def config():
    sizes = ["rollout.problems=3", f"rollout.max_new_tokens={LONGEST}", "optim.tokens_per_micro_batch=48"]
    return resolve("nano", "verl_gsm8k", ["model.name=nano", *sizes])


@pytest.fixture(scope="module", params=[True, False], ids=["line", "rows"])
def policies(tiny_model, request) -> Policies:
    now, old, reference = moved_apart(tiny_model, 0.03, 0.015)
    return Policies(request.param, now, old, reference, old)


def groups_of(lengths, sampler):
    prompts = [tuple(range(30 + 10 * index, 34 + 11 * index)) for index in range(len(lengths))]
    return answered(zip(REWARDS, lengths, prompts, strict=True), sampler, 1.0)


def verl_loss(policies: Policies, groups, micro_batches: int) -> torch.Tensor:
    """Return the mean over micro-batches of pg_loss - 0.001 entropy + 0.001 KL, each a mean over tokens."""
    tokens = []  # of each answer: loss, entropy, KL
    for one in groups:
        rewards = torch.tensor([score.reward for score in one.scores])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for advantage, completion in zip(advantages, one.completions):
            prompt, answer = asked = one.prompt.tokens, completion.tokens
            logits = policies.now(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            logprob = logprobs_of(policies.now, *asked)
            old, reference = (spoken(model, *asked) for model in (policies.old, policies.reference))
            terms = clipped(logprob, old, advantage), entropy(logits), low_var_kl(logprob, reference)
            tokens.append(torch.stack(terms))
    size = len(tokens) // micro_batches
    parts = [torch.cat(tokens[start : start + size], dim=1).mean(dim=1) for start in range(0, len(tokens), size)]
    policy, spread, kl = torch.stack(parts).mean(dim=0)
    return policy - 0.001 * spread + 0.001 * kl


def clipped(logprob, old, advantage):
    ratio = (logprob - old).clamp(-20, 20).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.minimum(loss, -advantage * 3.0) if advantage < 0 else loss


def entropy(logits):
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def low_var_kl(logprob, reference):
    difference = (reference - logprob).clamp(-20, 20)
    return (difference.exp() - difference - 1).clamp(-10, 10)


def of_verl(policies, groups, micro_batches):
    policies.now.zero_grad()
    loss = verl_loss(policies, groups, micro_batches)
    loss.backward()
    return loss.item(), gradients(policies.now)


def apart(one, other) -> float:
    """Return how far two gradients are apart, relative to the second."""
    squares = [((one[name] - other[name]).square().sum(), other[name].square().sum()) for name in other]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt())


@pytest.mark.parametrize(("lengths", "micro_batches"), [(UNEVEN, 1), (EVEN, 3)])
def test_loss_and_gradient_are_those_of_verl(lengths, micro_batches, policies):
    groups = groups_of(lengths, policies.sampler)
    mine = ours(policies, groups, config())
    loss, gradient = of_verl(policies, groups, micro_batches)
    assert mine.loss == pytest.approx(loss, abs=1e-5)
    assert apart(mine.gradient, gradient) < 1e-4
    assert mine.metrics["clipped/high"] > 0, "the answers are off policy"
    assert mine.metrics["clipped/low"] > 0, "the answers are off policy"
    assert mine.metrics["ratio/max"] > 3, "the second clip acts"
