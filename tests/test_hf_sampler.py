"""What only the reference sampler has to do: `model.generate` in shape for sampling, and put back."""

import contextlib

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trainer.config import Model
from trainer.policy.base import load_model, stop_tokens
from trainer.samplers.hf import generating


def test_generating_restores_training_mode_and_checkpointing_even_after_an_error(tiny_model):
    model = load_model(Model(name=str(tiny_model), gradient_checkpointing=True), "fp32", torch.device("cpu"))
    model.train()
    flags = [module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    assert any(flags)
    with contextlib.suppress(RuntimeError), generating(model, GenerationConfig()):
        assert not model.training
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        raise RuntimeError("sampling failed")
    assert model.training
    assert flags == [m.gradient_checkpointing for m in model.modules() if hasattr(m, "gradient_checkpointing")]


def test_stop_tokens_are_a_set_of_all_that_end_an_answer(tiny_model, tokenizer):
    stops = stop_tokens(tokenizer, AutoModelForCausalLM.from_pretrained(tiny_model))
    ids = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert ids <= set(stops)
    assert stops == sorted(set(stops))
