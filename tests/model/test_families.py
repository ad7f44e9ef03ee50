"""The families of today, from their own configurations with random weights: what each of them promises, in one table.

tests/rollout/test_decoder.py, tests/rollout/test_turns.py and tests/loss/test_shared_prefix.py hold the greedy tokens,
the log-probs and the gradients of all families in fp32; tests/llama has llama.cpp read their files.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from scripts import make_models_table as table
from tests.conftest import NANO, lines_of, refuses
from tests.e2e.short_job import resumes_to_the_bit, train
from tests.llama.families import FAMILIES as EXPORTED
from tests.model.test_mixture_of_experts import FEW, base
from tests.rollout.test_decoder import FAMILIES, SOME, adapted, family, move_adapter, prompts, rows_in, sample
from trainer.batch.pack import to_tensors
from trainer.config.resolve import resolve
from trainer.config.settings import Lora, Model
from trainer.errors import ModelError
from trainer.loss.logprobs import LogProbs
from trainer.loss.shared_prefix import make_flat
from trainer.model import families, lora, merge
from trainer.model.load import load_model
from trainer.rollout.decoder.forward import reasons_against
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.run.assemble import sampling_context

ROWS = {row.model_type: row for row in families.ROWS}
TODAY = ["smollm3", "lfm2", "lfm3", "qwen3.5", "gemma4"]


def small(model_type):
    if ROWS[model_type].mixture:
        return base(model_type)
    return family(next((name for name, (kind, _) in FAMILIES.items() if kind == model_type), model_type))


@pytest.mark.parametrize("model_type", ROWS)
def test_the_table_of_models_is_true(model_type):
    """The tests of decoder, tree, plan and export go through all families that have a yes there."""
    decoder, tree, plan, export, _ = table.cells(ROWS[model_type])
    model = small(model_type)
    assert (decoder == "yes") == (next(reasons_against(model), None) is None) == (model_type in dict(FAMILIES.values()))
    assert (tree != "no", plan == "yes") == (make_flat(model), model_type in families.BY_TYPE)
    assert (export == "yes") == (model_type in dict(EXPORTED.values()))


def test_the_page_has_the_table_of_models():
    assert table.table() in table.PAGE.read_text(), "python -m scripts.make_models_table"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_model_has_the_weights_and_tables_that_transformers_loads(name, tmp_path):
    family(name).save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = load_model(Model(name=str(tmp_path)), "fp32", torch.device("cpu"))
    tensors = [dict([*model.named_parameters(), *model.named_buffers()]) for model in (wanted, found)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())


@pytest.mark.parametrize("name", TODAY)
def test_in_bf16_sampling_and_training_are_as_close_to_the_exact_log_probs(name, tokenizer):
    """Random weights enlarge what is rounded, so neither is close to the other: both are to fp32, alike."""
    model, exact = adapted(family(name)).bfloat16(), adapted(family(name)).bfloat16().float()
    asked = prompts(9, 3, 30, 4, 17)
    groups = sample(DecodeSampler, model, tokenizer, asked, stops=SOME)
    batch = to_tensors(rows_in(groups, asked), 0)
    modules = [LogProbs(exact, 1.0), LogProbs(model, 1.0), LogProbs(model, 1.0, flat=True)]
    with torch.no_grad():
        wanted_BT, padded_BT, tree_BT = (module(batch).logprobs_BT for module in modules)
    assert modules[2].is_flat

    def distance(found_BT):
        return float((found_BT - wanted_BT)[batch.mask_BT].abs().mean())

    assert 0 < distance(batch.sampled_logprobs_BT) < 1.5 * distance(padded_BT)
    assert 0 < distance(tree_BT) < 1.5 * distance(padded_BT)


@pytest.mark.slow
@pytest.mark.parametrize("name", TODAY)
def test_a_run_merges_what_it_trained_and_resumes_to_the_bit(name, tmp_path):
    family(name).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(NANO).save_pretrained(tmp_path / "base")
    said = train(tmp_path, "--preset", "nano", f"model.name={tmp_path / 'base'}", *FEW)
    assert "4 of 4 greedy answers identical" in said
    assert "model.generate" not in said
    whole = tmp_path / "it"
    steps = lines_of(whole / "metrics.jsonl")[1:]
    assert all(one["grad_norm"] > 0 and one["sampler_difference"] < 1e-4 for one in steps)
    resumes_to_the_bit(whole)


CPU, TOKENS = torch.device("cpu"), torch.arange(5, 30)[None]
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OF_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
OF_QWEN |= {"num_position_embeddings": 16}
MARKS = {"image_token_id": 470, "video_token_id": 471, "vision_start_token_id": 472, "vision_end_token_id": 473}
GEMMA3 = {"mm_tokens_per_image": 4, "image_token_index": 470, "boi_token_index": 471, "eoi_token_index": 472}
# By the type of the whole model: its text model, what it sees with, and its other settings.
WHOLE = {
    "qwen3_5": ("qwen3.5", OF_QWEN, MARKS),
    "gemma3": ("gemma3", {**EYES, "image_size": 28, "patch_size": 14}, GEMMA3),
    "gemma4": ("gemma4", EYES, {"image_token_id": 470, "audio_config": None}),
    "lfm2_vl": ("lfm2", {**EYES, "model_type": "siglip2_vision_model"}, {"image_token_id": 470}),
    "lfm3_vl": ("lfm3", {**EYES, "model_type": "siglip2_vision_model"}, {"image_token_id": 470}),
    "qwen3_vl": ("qwen3", {**OF_QWEN, "deepstack_visual_indexes": [0]}, MARKS),
}


def multimodal(kind, folder):
    """Write a random model that also reads images, and return it."""
    name, eyes, own = WHOLE[kind]
    text = family(name).config.to_dict()
    if kind == "qwen3_vl":
        rope = {**text["rope_parameters"], "mrope_section": [4, 2, 2]}
        text |= {"model_type": "qwen3_vl_text", "rope_parameters": rope}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=eyes, tie_word_embeddings=True, **own)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4", "lfm2_vl", "lfm3_vl"])
def test_the_text_model_is_taken_out_of_one_that_reads_images_and_its_adapter_fits_both(kind, tmp_path):
    whole, settings = multimodal(kind, tmp_path / "whole"), Model(name=str(tmp_path / "whole"))
    text = load_model(settings, "fp32", CPU)
    assert not any("vision" in name or "visual" in name for name, _ in text.named_parameters())
    torch.testing.assert_close(logits(text), logits(whole))
    text.save_pretrained(tmp_path / "text")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "text")), logits(whole))
    model = lora.add_adapter(text, Lora(targets="all", r=2)).eval()
    move_adapter(model, seed=1)
    lora.save_adapter(model, tmp_path / "adapter")
    assert (logits(model) - logits(whole)).abs().max() > 0.1
    merge.write_merged(settings, tmp_path / "adapter", tmp_path / "merged", "fp32")
    merged = load_model(Model(name=str(tmp_path / "merged")), "fp32", CPU)
    assert not hasattr(merged, "taken_from")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-3, atol=1e-3)
    code = [line[4:] for line in (tmp_path / "adapter/README.md").read_text().splitlines() if line.startswith("    ")]
    done = {}
    exec("\n".join(code).replace("this folder", str(tmp_path / "adapter")), done)  # noqa: S102  as the card says
    torch.testing.assert_close(logits(done["model"].eval()), logits(model), rtol=1e-3, atol=1e-3)


def test_a_text_part_that_is_no_model_of_its_own_is_refused(tmp_path):
    multimodal("qwen3_vl", tmp_path)
    with refuses("model.name", ModelError, names="Qwen3VLForConditionalGeneration"):
        load_model(Model(name=str(tmp_path)), "fp32", CPU)


def test_a_run_says_that_images_are_left_out(tmp_path):
    multimodal("gemma3", tmp_path / "base")
    said = train(tmp_path, "--preset", "nano", f"model.name={tmp_path / 'base'}", *FEW, "run.steps=1")
    assert "Gemma3ForConditionalGeneration" in said
    assert "model.generate" not in said
    assert "4 of 4 greedy answers identical" in said


def test_a_server_cannot_sample_with_the_adapter_of_a_text_part(tmp_path):
    multimodal("gemma3", tmp_path)
    config = resolve("nano", None, ["rollout.vllm.urls=http://localhost:1", f"model.name={tmp_path}"])
    with refuses("rollout.engine", names="Gemma3ForConditionalGeneration"):
        sampling_context(config, None, load_model(config.model, "fp32", CPU), None, [], tmp_path, print)
