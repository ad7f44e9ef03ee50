"""Log-probs and entropies are those of the model, and chunks change neither values nor gradients."""

import pytest
import torch
from torch import nn

from tests.conftest import refuses, row
from tests.rollout.test_decoder import family
from trainer.batch.pack import to_tensors
from trainer.errors import ModelError
from trainer.loss import logprobs
from trainer.loss.logprobs import LogProbs, Output
from trainer.model.embedding_and_head import Head

ROWS = [row(4, 6, 1.0), row(9, 2, -1.0, first=50), row(2, 5, 0.5, first=33)]
SPECIAL = ("gemma4", "cohere", "granite")  # whose logits are capped, scaled and divided


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["qwen2", "llama", *SPECIAL])
def test_scores_are_those_of_the_models_own_logits(name, temperature):
    """The first model shares the weight of its embedding, the second does not."""
    model, batch = family(name), to_tensors(ROWS, pad_token=0)
    everything = torch.log_softmax(model(batch.inputs_BT).logits / temperature, -1)
    expected = everything.gather(-1, batch.targets_BT[..., None])[..., 0] * batch.mask_BT
    scores = LogProbs(model, temperature)(batch)
    torch.testing.assert_close(scores.logprobs_BT, expected, atol=1e-5, rtol=1e-5)
    entropy = -(everything.exp() * everything).sum(-1) * batch.mask_BT
    torch.testing.assert_close(scores.entropy_BT, entropy, atol=1e-5, rtol=1e-5)
    assert not scores.entropy_BT.requires_grad


@pytest.mark.parametrize("name", [*SPECIAL, "modernbert-decoder"])
def test_a_head_that_does_more_than_is_known_is_refused_by_name(name, monkeypatch):
    model = family(name, bos_token_id=1)
    monkeypatch.setattr(logprobs, "head_of", lambda model: Head(model.get_output_embeddings()))
    with refuses("model.name", ModelError, names=model.config.model_type):
        LogProbs(model, 1.0)


def test_gradients_are_only_where_somebody_asks_and_log_softmax_is_in_float32():
    head, hidden = Head(nn.Linear(30, 30, dtype=torch.bfloat16)), torch.randn(2, 30, dtype=torch.bfloat16)
    values, entropy = Output(head, 1.0, train_entropy=True)(hidden, torch.tensor([1, 2]))
    assert entropy.requires_grad
    assert values.dtype == entropy.dtype == torch.float32
    with torch.no_grad():
        values, _ = Output(Head(nn.Linear(8, 30).requires_grad_(False)), 1.0)(torch.randn(4, 8), torch.arange(4))
    assert not values.requires_grad


ONE_PIECE, SEVEN_TOKENS = 10**9, 4 * 301 * 7


@pytest.mark.parametrize("head", [{}, {"scale": 0.3}, {"cap": 2.0}, {"scale": 3.0, "cap": 4.0}])
@pytest.mark.parametrize("train_entropy", [False, True])
def test_chunks_and_a_frozen_head_change_neither_values_nor_gradients(monkeypatch, head, train_entropy):
    """Autograd, in one piece and in chunks, against the gradients of a frozen head, which come with the values."""
    torch.manual_seed(0)
    layer, targets = nn.Linear(16, 301), torch.randint(0, 301, (50,))
    results, weights = [], []
    for trained, size in ((True, ONE_PIECE), (True, SEVEN_TOKENS), (False, SEVEN_TOKENS)):
        monkeypatch.setattr(logprobs, "CHUNK_BYTES", size)
        layer.requires_grad_(trained).zero_grad()
        hidden = torch.linspace(-3, 3, 50 * 16).reshape(50, 16).requires_grad_()
        values, entropy = Output(Head(layer, **head), 0.7, train_entropy)(hidden, targets)
        assert entropy.requires_grad is train_entropy
        entropies = entropy if train_entropy else entropy.detach()
        (values * torch.arange(50) + entropies * torch.arange(50).flip(0)).sum().backward()
        results.append((values, entropy, hidden.grad))
        weights += [layer.weight.grad.clone()] if trained else []
    for whole, in_chunks, at_once in zip(*results, strict=True):
        torch.testing.assert_close(in_chunks, whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(at_once, in_chunks, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", [True, False])
def test_no_tensor_of_tokens_by_vocabulary_stays_alive_for_backward(monkeypatch, trained):
    """Autograd keeps only what is smaller than a fifth of the logits."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 2000 * 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        head, hidden = Head(nn.Linear(8, 2000).requires_grad_(trained)), torch.randn(400, 8, requires_grad=True)
        Output(head, 1.0)(hidden, torch.zeros(400, dtype=torch.long))
    assert kept
    assert max(kept) < 400 * 2000 / 5
