"""A base of 4 or 8 bits, or only its ends: sampling, training, merging, and a job."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import WITH_ENGINE, lines_of, octet, refuses
from tests.e2e import short_job
from tests.model.test_variants import QUANTISED, advance, assert_close, logits, make_policy, one_update, read
from tests.rollout.test_decoder import (
    SOME,
    assert_greedy_is_generate,
    assert_logprobs_of_training,
    move_adapter,
    prompts,
    sample,
    sampling,
)
from trainer.config.resolve import resolve
from trainer.config.settings import Lora
from trainer.errors import ModelError
from trainer.model import lora, merge, quantised
from trainer.model.fast_lora import use_own
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.make import make_sampler
from trainer.rollout.turns import Stops

pytestmark = WITH_ENGINE
BOTH_ENDS = {"embeddings": "cpu", "quantize_head": "int8"}
ENDS = " ".join(f"model.{name}={value}" for name, value in BOTH_ENDS.items())


@pytest.mark.parametrize(("kind", "stored"), [("nf4", torch.uint8), ("int8", torch.int8)])
def test_how_the_layers_between_embedding_and_output_are_quantised(tiny_model, untied, kind, stored):
    """In int8 without looking for outliers, for which each layer would wait for the card. In nf4 with quantised scales,
    and never packed for a processor, after which a weight has no gradient."""
    model = read(tiny_model, "bf16", quantize=kind)
    layers = list(quantised.layers(model))
    assert ({layer.weight.dtype for layer in layers}, len(layers)) == ({stored}, 14)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rest = {value.dtype for name, value in model.named_parameters() if "_proj.weight" not in name}
    assert rest == {torch.bfloat16}
    assert type(read(untied, quantize=kind).lm_head) is torch.nn.Linear
    for layer in layers:
        if kind == "int8":
            assert layer.state.threshold == 0.0
        else:
            assert layer.weight.quant_state.nested
            assert (layer.weight.quant_state.quant_type, layer.compute_dtype) == ("nf4", torch.bfloat16)
            assert layer.support_avx512bf16_for_cpu is False


def moved(model, **options):
    """Add an adapter that has an effect."""
    model = lora.add_adapter(model, Lora(**{"r": 4, "targets": "all", **options}))
    move_adapter(model, seed=1)
    return model


@pytest.mark.parametrize("options", [{"quantize": "nf4"}, {"quantize": "int8"}, BOTH_ENDS], ids=str)
@pytest.mark.parametrize("sampler", [HfSampler, DecodeSampler])
def test_a_model_in_fewer_bits_is_sampled_and_trained_alike(untied, tokenizer, options, sampler):
    model, asked = moved(read(untied, **options)), prompts(9, 3, 14)
    made = make_sampler(resolve("nano").rollout, model, Stops(tokenizer, [2]))
    assert isinstance(made, DecodeSampler)
    dict(made.sample(prompts(9), sampling()))
    copies = [projection._copy_OH is not None for projection in made.forward.projections]
    assert any(copies) == ("quantize" not in options)
    greedy = sample(sampler, model, tokenizer, asked, stops=SOME, temperature=0.0)
    assert_greedy_is_generate(greedy, model, asked, SOME)
    drawn = sample(sampler, model, tokenizer, asked, stops=SOME)
    assert_logprobs_of_training(drawn, model, asked, tolerance=5e-5)


@pytest.mark.parametrize("targets", ["all", "attention", ("q_proj", "down_proj")])
def test_a_base_in_bf16_is_sampled_and_trained_alike(tiny_model, tokenizer, targets):
    """Products are rounded to bf16, and those of the sampler add up in another order. An adapter of one of three joined
    layers is not kept beside their copy."""
    model, asked = moved(read(tiny_model, quantize="bf16"), targets=targets), prompts(9, 3, 14)
    use_own(model)
    drawn = sample(DecodeSampler, model, tokenizer, asked, stops=SOME)
    assert_logprobs_of_training(drawn, model, asked, tolerance=2e-2)


def test_what_is_in_bf16(tiny_model):
    model = lora.add_adapter(read(tiny_model, quantize="bf16"), Lora(r=4, targets="all"))
    assert {value.dtype for name, value in model.float().named_parameters() if "base_layer" in name} == {torch.bfloat16}
    rest = {value.dtype for name, value in model.named_parameters() if "base_layer" not in name}
    assert (rest, model.get_output_embeddings().weight.dtype) == ({torch.float32}, torch.float32)


@pytest.mark.parametrize("more", [*QUANTISED, ""])
def test_a_released_policy_holds_nothing_of_its_base(tiny_model, more):
    policy = advance(make_policy(tiny_model, more), 0)
    layers = list(quantised.layers(policy.model))
    policy.release()
    assert not any(value.numel() for value in (*policy.model.parameters(), *policy.model.buffers()))
    for layer in layers:
        assert getattr(layer.weight, "quant_state", None) is None
        assert getattr(layer, "state", None) is None or layer.state.CB is None


@pytest.mark.parametrize("more", [*QUANTISED, ENDS])
def test_the_adapter_is_merged_into_the_base_as_it_came(untied, tmp_path, more):
    policy = advance(make_policy(untied, more), 0)
    assert policy.is_flat, "each token goes through the model once"
    policy.write_model(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(untied)
    merge.write_merged(policy.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    clean, merged = (load_file(folder / "model.safetensors") for folder in (untied, tmp_path / "merged"))
    assert clean.keys() == merged.keys()
    adapted = {f"{name}.weight": layer for name, layer in lora.layers(policy.model)}
    for name, value in clean.items():
        layer = adapted.get(f"base_model.model.{name}")
        delta = 0.0 if layer is None else layer.get_delta_weight("default").detach()
        assert_close(merged[name], value + delta, 1e-6 if layer else 0.0)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    own = ("model.quantize=nf4", "run.dir=it", "eval.problems=8")
    return folder / "it", short_job.train(folder, "--preset", "nano", *short_job.FEW, *own)


def test_a_job_over_a_4_bit_base_says_what_it_compares(job):
    folder, said = job
    assert "engine zero2_offload, base in nf4" in said
    assert "merged against trained (clean base against nf4 base, so they differ by quantisation too, " in said
    assert "warn" not in said.lower()
    assert "quantization_config" not in json.loads((folder / "merged/config.json").read_text())
    assert json.loads((folder / "eval.json").read_text())["settings"]["quantize"] == "nf4"


@pytest.mark.parametrize(("chosen", "alike"), [((), "merged"), (("model.quantize=nf4",), "trained")])
def test_an_adapter_is_evaluated_over_the_clean_base_or_the_one_that_is_asked_for(
    job, tmp_path, monkeypatch, chosen, alike
):
    """The run evaluated its adapter over 4 bits, and merged it into the clean base."""
    monkeypatch.chdir(job[0].parent)
    assert octet("eval", "--adapter", "it/adapter", "--out", tmp_path / "out", "--json", *chosen) == 0
    assert answers(tmp_path / "out", "adapter") == answers(job[0], alike)


def answers(folder, model: str) -> list[str]:
    records = lines_of(folder / "eval_answers.jsonl")
    return [record["completion"] for record in records if record["model"] == model]


@pytest.fixture(scope="module")
def untied(tiny_model, tmp_path_factory):
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("untied") / "model")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    model.save_pretrained(folder)
    return folder


def test_an_embedding_in_cpu_memory_changes_nothing_and_does_not_move(untied):
    model = read(untied, embeddings="cpu")
    assert torch.equal(logits(model), logits(read(untied)))
    assert not any("embed_tokens" in name for name in (*dict(model.named_parameters()), *dict(model.named_buffers())))
    moved = model.to_empty(device="meta").get_input_embeddings()
    assert moved.weight.device.type == "cpu"


def test_the_directions_of_pissa_are_those_without_an_8_bit_output_layer(untied):
    settings, kinds = Lora(r=2, init="pissa"), ("none", "int8")
    wanted, found = (lora.add_adapter(read(untied, quantize_head=kind), settings) for kind in kinds)
    for one, other in zip(lora.trainable(wanted).values(), lora.trainable(found).values(), strict=True):
        assert torch.equal(one, other)


def test_each_row_of_an_8_bit_output_layer_is_within_half_a_code(untied):
    clean, head = read(untied).lm_head.weight.detach(), read(untied, quantize_head="int8").lm_head
    largest = clean.abs().amax(dim=1)
    rows = head(torch.eye(32)).T
    assert ((rows - clean).abs() <= largest[:, None] / 254 * 1.0001).all()
    assert head.codes_VH.dtype == torch.int8
    assert (head.codes_VH.abs().amax(dim=1) == 127).all()


def test_an_update_is_that_of_a_model_with_the_same_weights(untied, tmp_path):
    """The codes of the output layer are written into an ordinary one."""
    folder = shutil.copytree(untied, tmp_path / "rounded")
    rounded = read(folder)
    head = read(untied, quantize_head="int8").lm_head
    rounded.lm_head.weight.data.copy_(head.codes_VH * head.factor_V[:, None])
    rounded.save_pretrained(folder)
    ours, theirs = make_policy(untied, ENDS), make_policy(folder)
    for step in range(2):
        expected = one_update(theirs, step).grad_norm
        assert one_update(ours, step).grad_norm == pytest.approx(expected, rel=1e-5)
    for name, value in lora.trainable(ours.model).items():
        assert_close(value, lora.trainable(theirs.model)[name], 1e-5)


@pytest.mark.parametrize("setting", [{"embeddings": "cpu"}, {"quantize_head": "int8"}])
def test_a_model_that_ties_them_is_refused_by_name(tiny_model, setting):
    with refuses(f"model.{next(iter(setting))}", ModelError):
        read(tiny_model, **setting)
