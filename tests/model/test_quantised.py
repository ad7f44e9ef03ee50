"""A base of 4 or 8 bits, and the rest of the program: sampling, resuming, merging, and a job from its start."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import WITH_ENGINE, lines_of, octet
from tests.e2e import short_job
from tests.model.test_variants import advance, assert_close, logits, make_policy, read
from tests.plan.test_levers import KINDS, base
from tests.rollout.test_decoder import SOME, assert_greedy_is_generate, move_adapter, prompts, sample
from trainer.batch.pack import to_tensors
from trainer.config.command_line import resolve
from trainer.config.settings import Lora
from trainer.loss.logprobs import LogProbs
from trainer.model import lora, merge, quantised
from trainer.model.low_rank import use_own
from trainer.records import TrainingRow
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.make import make_sampler

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
        assert layer.weight.quant_state.quant_type == "nf4"
        assert layer.compute_dtype == torch.bfloat16
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


def test_an_output_layer_of_its_own_is_not_quantised(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    for kind in KINDS:
        assert type(base(folder, kind).lm_head) is torch.nn.Linear


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [HfSampler, DecodeSampler])
def test_sampling_over_a_quantised_base(tiny_model, tokenizer, kind, sampler):
    model = quantised_and_adapted(tiny_model, kind)
    assert isinstance(make_sampler(resolve("nano").rollout, model, tokenizer, [2]), DecodeSampler)
    assert_sampled_as_trained(sampler, model, tokenizer)


def assert_sampled_as_trained(sampler, model, tokenizer):
    """Greedy tokens are those of model.generate, and log-probs those of a training forward."""
    asked = prompts(9, 3, 14)
    greedy = sample(sampler, model, tokenizer, asked, stops=SOME, temperature=0.0)
    assert_greedy_is_generate(greedy, model, asked, SOME)
    assert_logprobs_of_training(sampler, model, tokenizer, 5e-5)


def assert_logprobs_of_training(sampler, model, tokenizer, tolerance):
    asked = prompts(9, 3, 14)
    groups = sample(sampler, model, tokenizer, asked, stops=SOME)
    rows = [TrainingRow(asked[i].tokens, one.tokens, one.logprobs, 0.0) for i, group in groups.items() for one in group]
    batch = to_tensors(rows, 0)
    with torch.no_grad():
        trained_BT = LogProbs(model.train(), temperature=1.0)(batch).logprobs_BT
    assert_close(trained_BT, batch.sampled_logprobs_BT * batch.mask_BT, tolerance)


@pytest.mark.parametrize("targets", ["all", "attention", ("q_proj", "down_proj")])
def test_a_base_in_bf16_is_sampled_and_trained_alike(tiny_model, tokenizer, targets):
    """Products are rounded to bf16, and those of the sampler add up in another order. An adapter of one of three joined
    layers is not kept beside their copy."""
    model = lora.add_adapter(base(tiny_model, "bf16"), Lora(r=4, targets=targets))
    move_adapter(model, seed=1)
    use_own(model)
    assert_logprobs_of_training(DecodeSampler, model, tokenizer, 2e-2)


def test_what_is_in_bf16_and_its_gradients(tiny_model):
    """The adapter computes in fp32, as autograd would, through the rounded products."""
    model, plain = (lora.add_adapter(base(tiny_model, "bf16"), Lora(r=4, targets="all")) for _ in "ab")
    assert {value.dtype for name, value in model.float().named_parameters() if "base_layer" in name} == {torch.bfloat16}
    rest = {value.dtype for name, value in model.named_parameters() if "base_layer" not in name}
    assert (rest, model.get_output_embeddings().weight.dtype) == ({torch.float32}, torch.float32)
    use_own(model)
    for one in (model, plain):
        move_adapter(one, seed=1)
        one(input_ids=torch.arange(5, 25)[None]).logits.square().mean().backward()
    wanted = dict(plain.named_parameters())
    for name, value in model.named_parameters():
        if "lora_" in name:
            scale = wanted[name].grad.abs().max()
            assert (value.grad - wanted[name].grad).abs().max() < 0.02 * scale, name


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
def test_an_adapter_is_evaluated_over_the_clean_base_unless_another_is_asked_for(
    job, tmp_path, monkeypatch, capsys, chosen, alike
):
    """The run evaluated its adapter over 4 bits, and merged it into the clean base."""
    monkeypatch.chdir(job[0].parent)
    assert octet("eval", "--adapter", "it/adapter", "--out", tmp_path / "out", "--json", *chosen) == 0
    assert answers(tmp_path / "out", "adapter") == answers(job[0], alike)
    capsys.readouterr()


def answers(folder, model: str) -> list[str]:
    records = lines_of(folder / "eval_answers.jsonl")
    return [record["completion"] for record in records if record["model"] == model]
