"""A base of 4 or 8 bits, or only its ends, and the rest of the program: sampling, resuming, merging, and a job."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import WITH_ENGINE, lines_of, octet, refuses
from tests.e2e import short_job
from tests.model.test_variants import advance, assert_close, logits, make_policy, read
from tests.plan.test_levers import KINDS, base
from tests.rollout.test_decoder import (
    SOME,
    assert_greedy_is_generate,
    assert_logprobs_of_training,
    move_adapter,
    prompts,
    sample,
    sampling,
)
from trainer.config.command_line import resolve
from trainer.config.settings import Lora, Model
from trainer.errors import ModelError
from trainer.model import lora, merge, quantised
from trainer.model.load import load_model
from trainer.model.low_rank import use_own
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.make import make_sampler
from trainer.rollout.turns import Stops

pytestmark = WITH_ENGINE
EVERY_KIND = (*KINDS, "bf16")


def quantised_and_adapted(folder, kind: str, **options):
    model = lora.add_adapter(base(folder, kind), Lora(r=4, targets="all", **options))
    move_adapter(model, seed=1)
    return model


def test_only_the_layers_between_embedding_and_output_are_quantised(tiny_model):
    for kind, stored in zip(KINDS, (torch.uint8, torch.int8), strict=True):
        model = base(tiny_model, kind, "bf16")
        layers = list(quantised.layers(model))
        assert ({layer.weight.dtype for layer in layers}, len(layers)) == ({stored}, 14)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        rest = {value.dtype for name, value in model.named_parameters() if "_proj.weight" not in name}
        assert rest == {torch.bfloat16}


def test_how_layers_are_quantised(tiny_model):
    """In int8 without looking for outliers, for which each layer would wait for the card. In nf4 with quantised scales,
    and never packed for a processor, after which a weight has no gradient."""
    assert {layer.state.threshold for layer in quantised.layers(base(tiny_model, "int8"))} == {0.0}
    for layer in quantised.layers(base(tiny_model, "nf4", "bf16")):
        assert layer.weight.quant_state.nested
        assert (layer.weight.quant_state.quant_type, layer.compute_dtype) == ("nf4", torch.bfloat16)
        assert layer.support_avx512bf16_for_cpu is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_over_a_quantised_base_is_the_one_loaded_apart(tiny_model, tmp_path, kind):
    apart = quantised_and_adapted(tiny_model, kind)
    lora.save_adapter(apart, tmp_path)
    model = lora.add_adapter(base(tiny_model, kind), Lora(r=2))
    before = logits(model)
    lora.add_teacher(model, tmp_path)
    with lora.as_teacher(model):
        assert torch.equal(logits(model), logits(apart))
    assert torch.equal(logits(model), before)


def test_an_output_layer_of_its_own_is_not_quantised(untied):
    for kind in KINDS:
        assert type(base(untied, kind).lm_head) is torch.nn.Linear


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [HfSampler, DecodeSampler])
def test_sampling_over_a_quantised_base(tiny_model, tokenizer, kind, sampler):
    model = quantised_and_adapted(tiny_model, kind)
    made = make_sampler(resolve("nano").rollout, model, Stops(tokenizer, [2]))
    assert isinstance(made, DecodeSampler)
    dict(made.sample(prompts(9), sampling()))
    assert not any(projection._copy_OH is not None for projection in made.forward.projections)
    assert_sampled_as_trained(sampler, model, tokenizer)


def assert_sampled_as_trained(sampler, model, tokenizer):
    asked = prompts(9, 3, 14)
    greedy = sample(sampler, model, tokenizer, asked, stops=SOME, temperature=0.0)
    assert_greedy_is_generate(greedy, model, asked, SOME)
    drawn = sample(sampler, model, tokenizer, asked, stops=SOME)
    assert_logprobs_of_training(drawn, model, asked, tolerance=5e-5)


@pytest.mark.parametrize("targets", ["all", "attention", ("q_proj", "down_proj")])
def test_a_base_in_bf16_is_sampled_and_trained_alike(tiny_model, tokenizer, targets):
    """Products are rounded to bf16, and those of the sampler add up in another order. An adapter of one of three joined
    layers is not kept beside their copy."""
    model = lora.add_adapter(base(tiny_model, "bf16"), Lora(r=4, targets=targets))
    move_adapter(model, seed=1)
    use_own(model)
    asked = prompts(9, 3, 14)
    drawn = sample(DecodeSampler, model, tokenizer, asked, stops=SOME)
    assert_logprobs_of_training(drawn, model, asked, tolerance=2e-2)


def test_what_is_in_bf16(tiny_model):
    model = lora.add_adapter(base(tiny_model, "bf16"), Lora(r=4, targets="all"))
    assert {value.dtype for name, value in model.float().named_parameters() if "base_layer" in name} == {torch.bfloat16}
    rest = {value.dtype for name, value in model.named_parameters() if "base_layer" not in name}
    assert (rest, model.get_output_embeddings().weight.dtype) == ({torch.float32}, torch.float32)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_token_goes_through_a_quantised_model_once(tiny_model, kind):
    assert make_policy(tiny_model, f"model.quantize={kind}").is_flat
    assert not make_policy(tiny_model, f"model.quantize={kind} model.attention=eager").is_flat


@pytest.mark.parametrize("more", ["", "lora.dora=true", "lora.rslora=true lora.plus_ratio=4"])
def test_variants_over_4_bits_learn_and_return_to_their_base(tiny_model, more):
    policy = make_policy(tiny_model, f"model.quantize=nf4 {more}")
    original = logits(base(tiny_model, "nf4"))
    trained = logits(advance(policy, 0).model)
    with policy.as_base():
        assert_close(logits(policy.model), original)
    assert (trained - original).abs().max() > 0.01


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_run_over_a_quantised_base_resumes_exactly_from_an_adapter_sized_checkpoint(tiny_model, tmp_path, kind):
    more = f"model.quantize={kind}"
    undisturbed = advance(make_policy(tiny_model, more), 0, 1, 2)
    advance(make_policy(tiny_model, more), 0, 1).save(tmp_path)
    saved = torch.load(next(tmp_path.glob("engine/*model_states.pt")), weights_only=False)["module"]
    assert saved
    assert all("lora_" in name for name in saved), "the base is not written"
    resumed = make_policy(tiny_model, more)
    resumed.load(tmp_path)
    advance(resumed, 2)
    for name, value in lora.trainable(undisturbed.model).items():
        assert torch.equal(lora.trainable(resumed.model)[name], value), name
    assert_close(logits(resumed.model), logits(undisturbed.model), 1e-6)


@pytest.mark.parametrize("kind", [*EVERY_KIND, "none"])
def test_a_released_policy_holds_nothing_of_its_base(tiny_model, kind):
    policy = advance(make_policy(tiny_model, f"model.quantize={kind}"), 0)
    layers = list(quantised.layers(policy.model))
    policy.release()
    assert not any(value.numel() for value in (*policy.model.parameters(), *policy.model.buffers()))
    for layer in layers:
        assert getattr(layer.weight, "quant_state", None) is None
        assert getattr(layer, "state", None) is None or layer.state.CB is None


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_adapter_is_merged_into_the_clean_base(tiny_model, tmp_path, kind):
    policy = advance(make_policy(tiny_model, f"model.quantize={kind}"), 0)
    policy.write_model(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tiny_model)
    merge.write_merged(policy.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    adapted = policy.model.base_model.model.model.layers[1].self_attn.q_proj
    clean = read(tiny_model).model.layers[1].self_attn.q_proj.weight
    merged = read(tmp_path / "merged").model.layers[1].self_attn.q_proj.weight
    assert_close(merged.detach(), (clean + adapted.get_delta_weight("default")).detach(), 1e-6)


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


BOTH = {"embeddings": "cpu", "quantize_head": "int8"}


@pytest.fixture(scope="module")
def untied(tiny_model, tmp_path_factory):
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


def test_the_directions_of_pissa_are_those_without_an_8_bit_output_layer(untied):
    settings, kinds = Lora(r=2, init="pissa"), ("none", "int8")
    wanted, found = (lora.add_adapter(compacted(untied, quantize_head=kind), settings) for kind in kinds)
    for one, other in zip(lora.trainable(wanted).values(), lora.trainable(found).values(), strict=True):
        assert torch.equal(one, other)


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
