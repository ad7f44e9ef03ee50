"""An embedding in CPU memory and an output layer in 8 bits: the values, both samplers, an update, and the merge."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import WITH_ENGINE, refuses
from tests.model.test_quantised import assert_sampled_as_trained
from tests.model.test_variants import advance, assert_close, logits, make_policy, read
from tests.rollout.test_decoder import move_adapter
from trainer.config.settings import Lora, Model
from trainer.errors import ModelError
from trainer.model import lora, merge
from trainer.model.load import load_model
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler

BOTH = {"embeddings": "cpu", "quantize_head": "int8"}

pytestmark = WITH_ENGINE


@pytest.fixture(scope="module")
def untied(tiny_model, tmp_path_factory):
    """The tiny model with an output layer of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    model.save_pretrained(folder)
    return folder


def compacted(folder, **options):
    return load_model(Model(name=str(folder), **options), "fp32", torch.device("cpu"))


def test_an_embedding_in_cpu_memory_changes_nothing_and_does_not_move(untied):
    model = compacted(untied, embeddings="cpu")
    assert torch.equal(logits(model), logits(read(untied)))
    assert not any("embed_tokens" in name for name in (*dict(model.named_parameters()), *dict(model.named_buffers())))
    moved = model.to_empty(device="meta").get_input_embeddings()
    assert moved.weight.device.type == "cpu"


def test_each_row_of_an_8_bit_output_layer_is_within_half_a_code(untied):
    clean, head = read(untied).lm_head.weight.detach(), compacted(untied, quantize_head="int8").lm_head
    largest = clean.abs().amax(dim=1)
    rows = head(torch.eye(32)).T
    assert ((rows - clean).abs() <= largest[:, None] / 254 * 1.0001).all()
    assert head.codes_VH.dtype == torch.int8
    assert (head.codes_VH.abs().amax(dim=1) == 127).all()


def test_the_gradient_through_8_bits_is_that_of_autograd(untied):
    head = compacted(untied, quantize_head="int8").lm_head
    hidden = torch.randn(5, 32, requires_grad=True)
    slope = torch.randn(5, head.out_features)
    (head(hidden) * slope).sum().backward()
    assert_close(head.to_hidden(slope), hidden.grad, 1e-5)


@pytest.mark.parametrize("sampler", [HfSampler, DecodeSampler])
def test_sampling_and_training_use_the_same_compacted_model(untied, tokenizer, sampler):
    model = lora.add_adapter(compacted(untied, **BOTH), Lora(r=4, targets="all"))
    move_adapter(model, seed=1)
    assert_sampled_as_trained(sampler, model, tokenizer)


def test_an_update_is_that_of_a_model_with_the_same_weights(untied, tmp_path):
    """The codes of the output layer are written into an ordinary one."""
    folder = tmp_path / "rounded"
    shutil.copytree(untied, folder)
    rounded = read(folder)
    head = compacted(untied, quantize_head="int8").lm_head
    rounded.lm_head.weight.data.copy_(head.codes_VH * head.factor_V[:, None])
    rounded.save_pretrained(folder)
    ours = advance(make_policy(untied, "model.embeddings=cpu model.quantize_head=int8"), 0, 1)
    theirs = lora.trainable(advance(make_policy(folder), 0, 1).model)
    for name, value in lora.trainable(ours.model).items():
        assert_close(value, theirs[name], 1e-5)


def test_the_adapter_is_merged_into_the_base_as_it_came(untied, tmp_path):
    policy = advance(make_policy(untied, "model.embeddings=cpu model.quantize_head=int8"), 0)
    policy.write_model(tmp_path / "adapter")
    merge.write_merged(policy.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    before, after = (load_file(folder / "model.safetensors") for folder in (untied, tmp_path / "merged"))
    assert before.keys() == after.keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("setting", [{"embeddings": "cpu"}, {"quantize_head": "int8"}])
def test_a_model_that_ties_them_is_refused_by_name(tiny_model, setting):
    with refuses(f"model.{next(iter(setting))}", ModelError):
        compacted(tiny_model, **setting)
