"""Chunked log-probs equal the plain ones, value and gradient, and padding changes nothing."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import refuses, row
from trainer.batch.pack import Packer, to_tensors
from trainer.errors import ModelError
from trainer.loss import logprobs
from trainer.loss.logprobs import LogProbs, chunked
from trainer.model.ends import Head


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


ROWS = [row(4, 6, 1.0), row(9, 2, -1.0, first=50), row(2, 5, 0.5, first=33)]


def reference(model, one, temperature):
    """A few plain lines in float64: one row, no padding, no chunks."""
    tokens = torch.tensor([[*one.prompt, *one.completion]])
    logits = model.double()(tokens).logits[0, len(one.prompt) - 1 : -1] / temperature
    everything = torch.log_softmax(logits, dim=-1)
    chosen = [everything[index, token] for index, token in enumerate(one.completion)]
    return torch.stack(chosen), -(everything.exp() * everything).sum(dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_padded_batch_equals_its_rows_one_by_one_in_float64(model, temperature):
    batch = to_tensors(ROWS, pad_token=0)
    scores = LogProbs(model, temperature)(batch)
    for index, one in enumerate(ROWS):
        expected, entropy = reference(model, one, temperature)
        mask = batch.mask_BT[index]
        torch.testing.assert_close(scores.logprobs_BT[index][mask].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores.entropy_BT[index][mask].double(), entropy, atol=1e-5, rtol=1e-5)
        assert not scores.logprobs_BT[index][~mask].any()
        model.float()


def gradients(model, batches, flat):
    module = LogProbs(model, 0.7, flat=flat)
    model.zero_grad()
    for batch in batches:
        (module(batch).logprobs_BT.sum(dim=1) * batch.advantages_B).sum().backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


def test_gradients_are_only_where_somebody_asks_and_log_softmax_is_in_float32(model):
    assert not LogProbs(model, 1.0)(to_tensors(ROWS, pad_token=0)).entropy_BT.requires_grad
    head, hidden = Head(nn.Linear(30, 30, dtype=torch.bfloat16)), torch.randn(2, 30, dtype=torch.bfloat16)
    values, entropy = chunked(head, hidden, torch.tensor([1, 2]), 1.0, train_entropy=True)
    assert entropy.requires_grad
    assert values.dtype == entropy.dtype == torch.float32
    with torch.no_grad():
        values, _ = chunked(Head(nn.Linear(8, 30).requires_grad_(False)), torch.randn(4, 8), torch.arange(4), 1.0)
    assert not values.requires_grad


@pytest.mark.parametrize("budget", [10, 20, 1000])
@pytest.mark.parametrize("flat", [True, False])
def test_any_micro_batching_has_one_gradient(model, budget, flat):
    whole = gradients(model, [to_tensors(ROWS, pad_token=0)], flat=False)
    pieces = gradients(model, Packer(budget, 0, flat).pack(ROWS), flat)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


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
        values, entropy = chunked(Head(layer, **head), hidden, targets, 0.7, train_entropy)
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
        chunked(head, hidden, torch.zeros(400, dtype=torch.long), 1.0)
    assert kept
    assert max(kept) < 400 * 2000 / 5


def shaped(family: str, **unusual):
    config = AutoConfig.for_model(
        family, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, **unusual,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)  # so that a cap has something to cap
    return model.eval()


FAMILIES = {
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "gemma2 capped": ("gemma2", {"final_logit_softcapping": 3.0, "layer_types": ["full_attention"] * 2}),
    "cohere scaled": ("cohere", {"logit_scale": 0.0625}),
    "granite divided": ("granite", {"logits_scaling": 8.0}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_of_all_kinds_are_scored_as_the_model_does(name):
    model = shaped(FAMILIES[name][0], **FAMILIES[name][1])
    batch = to_tensors(ROWS, pad_token=0)
    batch = replace(batch, inputs_BT=batch.inputs_BT % 97, targets_BT=batch.targets_BT % 97)
    logits = model(batch.inputs_BT).logits / 0.7
    expected = torch.log_softmax(logits, -1).gather(-1, batch.targets_BT[..., None])[..., 0] * batch.mask_BT
    torch.testing.assert_close(LogProbs(model, 0.7)(batch).logprobs_BT, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma2 capped", "cohere scaled", "granite divided"])
def test_a_head_that_does_more_than_is_known_is_refused_by_name(name, monkeypatch):
    model = shaped(FAMILIES[name][0], **FAMILIES[name][1])
    monkeypatch.setattr(logprobs, "head_of", lambda model: Head(model.get_output_embeddings()))
    with refuses("model.name", ModelError, names=FAMILIES[name][0]):
        LogProbs(model, 1.0)
