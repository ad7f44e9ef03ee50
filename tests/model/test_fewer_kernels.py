"""Norms and rotations with fewer kernels equal those of transformers, in values and gradients."""

import importlib

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from trainer.model.fewer_kernels import _norm, _turns_halves, rotate

CPU = torch.device("cpu")


def with_gradients(function, *inputs):
    inputs = [one.clone().requires_grad_() for one in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [one.detach().cos() for one in outputs])
    return [one.detach() for one in (*outputs, *(one.grad for one in inputs))]


def all_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("size", [16, 12], ids=["whole heads", "a part of each head"])
def test_a_rotation_is_that_of_transformers(size):
    torch.manual_seed(0)
    heads = [torch.randn(1, 5, count, 16).transpose(1, 2) for count in (4, 2)]
    angles = torch.randn(1, 5, size // 2).repeat(1, 1, 2)
    cos_sin = angles.cos(), angles.sin()
    expected = with_gradients(lambda q, k: apply_rotary_pos_emb(q, k, *cos_sin), *heads)
    all_close(with_gradients(lambda q, k: rotate(q, k, *cos_sin), *heads), expected)


def test_a_norm_is_that_of_transformers():
    torch.manual_seed(0)
    norm = LlamaRMSNorm(16, eps=1e-5).requires_grad_(False)
    norm.weight.normal_()
    hidden = torch.randn(1, 5, 16)
    all_close(with_gradients(lambda one: _norm(norm, one), hidden), with_gradients(norm, hidden))


@pytest.mark.parametrize("family, is_alike", [("qwen2", True), ("smollm3", True), ("glm", False), ("cohere", False)])
def test_rotations_of_another_kind_are_left_alone(family, is_alike):
    of_family = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert _turns_halves(of_family.apply_rotary_pos_emb, CPU) is is_alike
    assert not _turns_halves(None, CPU)
