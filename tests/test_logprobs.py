"""Chunked log-probs equal the plain ones, value and gradient, and padding changes nothing."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.conftest import row
from trainer import logprobs
from trainer.batches import pack, to_tensors
from trainer.errors import ModelError
from trainer.logprobs import LogProbs, chunked


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


ROWS = [row(4, 6, 1.0), row(9, 2, -1.0, first=50), row(2, 5, 0.5, first=33)]


def reference(model, one, temperature):
    """Ten plain lines in float64: one row, no padding, no chunks."""
    tokens = torch.tensor([[*one.prompt, *one.completion]])
    logits = model.double()(tokens).logits[0, :-1] / temperature
    everything = torch.log_softmax(logits, dim=-1)
    start = len(one.prompt) - 1
    chosen = [everything[start + index, token] for index, token in enumerate(one.completion)]
    entropy = [-(everything[start + index].exp() * everything[start + index]).sum() for index in range(len(chosen))]
    return torch.stack(chosen), torch.stack(entropy)


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


def gradients(model, batches):
    module = LogProbs(model, 0.7)
    model.zero_grad()
    for batch in batches:
        (module(batch).logprobs_BT.sum(dim=1) * batch.advantages_B).sum().backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


@pytest.mark.parametrize("budget", [10, 20, 1000])
def test_any_micro_batching_has_one_gradient(model, budget):
    whole = gradients(model, [to_tensors(ROWS, pad_token=0)])
    torch.testing.assert_close(gradients(model, pack(ROWS, budget, pad_token=0)), whole, atol=1e-5, rtol=1e-5)


def test_chunks_change_neither_values_nor_gradients(monkeypatch):
    torch.manual_seed(0)
    head = nn.Linear(16, 301, bias=False)
    targets = torch.randint(0, 301, (50,))
    results = []
    for chunk_bytes in (10**9, 4 * 301 * 7):  # all at once; seven tokens at a time
        monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)
        hidden = torch.linspace(-1, 1, 50 * 16).reshape(50, 16).requires_grad_()
        head.zero_grad()
        values, entropy = chunked(head, hidden, targets, 0.7)
        (values * torch.arange(50)).sum().backward()
        results.append((values, entropy, hidden.grad, head.weight.grad.clone()))
    for once, in_chunks in zip(*results, strict=True):
        torch.testing.assert_close(once, in_chunks, atol=1e-5, rtol=1e-5)


def test_no_tensor_of_tokens_by_vocabulary_stays_alive_for_backward(monkeypatch):
    """Autograd keeps only what is smaller than a fifth of the logits."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 2000 * 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked(nn.Linear(8, 2000), torch.randn(400, 8, requires_grad=True), torch.zeros(400, dtype=torch.long), 1.0)
    assert kept
    assert max(kept) < 400 * 2000 / 5


def test_log_softmax_is_in_float32_for_a_bf16_model():
    head = nn.Linear(8, 50, dtype=torch.bfloat16)
    values, entropy = chunked(head, torch.randn(3, 8, dtype=torch.bfloat16), torch.tensor([1, 2, 3]), 1.0)
    assert values.dtype == entropy.dtype == torch.float32


def test_a_head_that_caps_its_logits_is_refused_by_name(model):
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        LogProbs(model, 1.0)
