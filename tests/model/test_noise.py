"""Dropout and jitter: with them, the policy being trained is not the policy that sampled."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.conftest import refuses
from tests.model.test_variants import read
from tests.rollout.test_decoder import adapted, family
from trainer.errors import ModelError
from trainer.loss.logprobs import LogProbs

FAMILIES = {  # by where the probability stands
    "modules": ("gpt2", {"resid_pdrop": 0.2}),
    "attention": ("persimmon", {"attention_dropout": 0.2}),
    "decoder layer": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.2}),
    "residual": ("starcoder2", {"residual_dropout": 0.2, "embedding_dropout": 0.2}),
    "default": ("seed_oss", {"residual_dropout": 0.1, "attention_dropout": 0.1}),  # which config.json leaves out
    "hidden": ("bloom", {"hidden_dropout": 0.2}),
    "configuration": ("falcon", {"hidden_dropout": 0.2}),
    "experts": ("phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.5}),  # here a threshold, and no noise
    "router": ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}),
}
TOKENS = torch.arange(3, 19)[None]


def saved(folder, kind, own):
    family(kind, **own).save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize(("kind", "own"), FAMILIES.values(), ids=FAMILIES)
def test_training_mode_computes_what_eval_mode_does(tmp_path, kind, own):
    folder = saved(tmp_path, kind, own)
    noisy = AutoModelForCausalLM.from_pretrained(folder)
    sampling = noisy.eval()(TOKENS).logits
    assert (noisy.train()(TOKENS).logits - sampling).abs().max() > 1e-3, "this family should be noisy by itself"
    model = read(folder)
    torch.testing.assert_close(model.train()(TOKENS).logits, sampling)


def test_noise_that_stays_is_refused_by_name_and_without_using_up_random_numbers(tmp_path):
    folder = saved(tmp_path, *FAMILIES["modules"])
    model = read(folder).eval()
    model.transformer.ln_f.register_forward_hook(lambda norm, _, hidden: F.dropout(hidden, 0.5, norm.training))
    state = torch.get_rng_state()
    with refuses("model.name", ModelError, names="something"):
        LogProbs(model, 1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training


def test_rwkv_computes_in_training_mode_what_it_does_in_eval_mode_also_with_an_adapter(tmp_path):
    """It divides weights in eval mode, and an adapter beside them would count twice as much."""
    folder = saved(tmp_path, "rwkv", {"attention_hidden_size": 32, "rescale_every": 1})
    model = adapted(read(folder))
    with torch.no_grad():
        torch.testing.assert_close(model.train()(TOKENS).logits, model.eval()(TOKENS).logits)
