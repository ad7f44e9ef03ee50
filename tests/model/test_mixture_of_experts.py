"""Models whose feed-forward layers are mixtures of experts: how they are loaded, trained, saved and merged."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests.conftest import NANO, ROOT, gradients, launch, lines_of, refuses, said_by
from tests.e2e.short_job import resumes_to_the_bit
from tests.forks import forked
from tests.model.test_bad_models import edit
from tests.model.test_variants import read
from tests.rollout.test_decoder import SOME, adapted, move_adapter, prompts, rows_in, sample
from trainer.batch.pack import to_tensors
from trainer.config.settings import Lora
from trainer.errors import CheckpointError, ConfigError, ModelError
from trainer.loss.logprobs import LogProbs
from trainer.model import lora
from trainer.records import TrainingRow
from trainer.rollout.hf import HfSampler

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 64, "intermediate_size": 16, "num_experts_per_tok": 2, "initializer_range": 0.2}
OF_DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8, "kv_lora_rank": 8}
OF_DEEPSEEK |= {"first_k_dense_replace": 1, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "deepseek_v2": {**OF_DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {**OF_DEEPSEEK, "q_lora_rank": 8},
    "phimoe": {"num_local_experts": 4},  # its routers, and those of Llama 4, are linear layers with two results
    "llama4_text": {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 16},
}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8}
HYBRID = {"layers_block_type": ["hybrid"] * 2, "num_mem_blocks": 1, "n_mamba_heads": 2, "mamba_d_state": 8}
NEMOTRON = {"mamba_num_heads": 2, "mamba_head_dim": 8, "ssm_state_size": 8}
INKLING = {"n_routed_experts": 4, "head_dim": 8, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2}
INKLING |= {"swa_head_dim": 8, "unpadded_vocab_size": 64, "n_layers_per_attn_res_block": 1}
OTHERS = {
    "doge": {},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": MAMBA,
    "inkling2_text": INKLING | {"layer_types": ["hybrid", "hybrid_sliding"]},
    "jamba": {"mamba_d_state": 8, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "pad_token_id": 0},
    "nemotron_h": NEMOTRON | {"layers_block_type": ["mamba", "attention"]},
    "zamba2": HYBRID | {"mamba_ngroups": 1, "adapter_rank": 2, "attention_hidden_size": 32, "attention_head_dim": 16},
}
SAVED = ["falcon", "falcon_h1", "jamba", "zamba2"]
SAVED += ["inkling2_text"] if "inkling2_text" in CONFIG_MAPPING else []  # which an older transformers does not have
CHOICES = ["all", "attention", ("experts",), ("gate",), ("o_proj",), ("gate_up_proj",), ("down_proj", "o_proj")]
MORE = [{}, {"init": "pissa"}, {"dora": True}, {"rslora": True}]
TOKENS = torch.arange(6)[None]


def base(family: str, **changed):
    torch.manual_seed(0)
    settings = SMALL | (OTHERS[family] if family in OTHERS else FAMILIES[family]) | changed
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_more_experts_of_a_token_than_a_layer_has_are_refused(family, tmp_path):
    base(family, num_experts_per_tok=9).save_pretrained(tmp_path)
    with refuses("model.name", ModelError, names="num_experts_per_tok is 9") as refused:
        read(tmp_path)
    assert "4 experts" in refused.value.reason


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", CHOICES, ids=str)
def test_each_choice_of_layers_is_trained_or_refused(family, targets):
    for more in MORE:
        try:
            model = lora.add_adapter(base(family), Lora(targets=targets, r=1, **more))
        except ConfigError as refused:
            assert "\n" not in str(refused)  # noqa: PT017
            continue
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        assert any(one.grad is not None and one.grad.abs().sum() for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("targets", [("experts",), ("gate_up_proj",), ("q_proj", "mlp.experts.down_proj")], ids=str)
def test_experts_that_are_one_weight_are_refused_with_what_they_would_cost(family, targets):
    with refuses("lora.targets", ConfigError, names="5 to 11 times"):
        lora.add_adapter(base(family), Lora(targets=targets, r=1))


@pytest.mark.parametrize("family", [*FAMILIES, *SAVED])
def test_an_adapter_of_all_layers_is_saved_and_merged(family, tmp_path):
    model = lora.add_adapter(base(family), Lora(targets="all", r=2))
    move_adapter(model, seed=1)
    lora.save_adapter(model, tmp_path)
    with torch.no_grad():
        trained = model(input_ids=TOKENS).logits
        merged = lora.merged(base(family), tmp_path)(input_ids=TOKENS).logits
    torch.testing.assert_close(merged, trained, rtol=1e-4, atol=1e-4)
    assert (trained - base(family)(input_ids=TOKENS).logits).abs().max() > 1e-3


@pytest.mark.skipif("inkling2_text" not in SAVED, reason="an older transformers")
def test_an_adapter_that_peft_does_not_load_is_refused(tmp_path):
    lora.save_adapter(adapted(base("inkling2_text"), target_modules=["weight_proj"]), tmp_path)
    with refuses(tmp_path, CheckpointError, names="weight_proj"):
        lora.load_adapter(base("inkling2_text"), tmp_path)


def test_a_mamba_samples_from_cached_states_what_it_is_trained_with(tmp_path):
    model = base("nemotron_h", n_groups=1, head_dim=8)
    torch.nn.init.constant_(model.model.layers[0].mixer.dt_bias, -8.0)  # steps below time_step_min
    model.save_pretrained(tmp_path)
    model = read(tmp_path).eval()
    cache = DynamicCache(config=model.config)  # by position: its name differs between versions
    with torch.no_grad():
        found = [model(token, None, None, cache, use_cache=True).logits for token in TOKENS.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), model(TOKENS, use_cache=False).logits, rtol=0, atol=1e-6)


def test_layers_that_are_read_without_a_call_keep_their_precision(tmp_path):
    base("jamba").save_pretrained(tmp_path)
    model = read(tmp_path, quantize="bf16")
    model(TOKENS)
    dtypes = {part.weight.dtype for name, part in model.named_modules() if name.endswith("dt_proj")}
    assert dtypes == {torch.float32}
    adapted = lora.add_adapter(base("doge"), Lora(targets="all"))
    assert any("dt_proj" in name for name, _ in lora.layers(adapted)), "Doge calls it"


TODAY = ["qwen3_moe", "gpt_oss"]
TEXT = {"vocab_size": 480, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2}


@pytest.mark.parametrize("family", [*TODAY, "phimoe", "llama4_text"])
def test_sampling_and_training_choose_the_same_experts(family, tokenizer, tmp_path):
    """Another expert would change the log-prob by far more than rounding does."""
    base(family, **TEXT).save_pretrained(tmp_path)
    model = lora.add_adapter(read(tmp_path), Lora(targets="all", r=4))
    move_adapter(model, seed=1)
    asked = prompts(9, 3, 30, 4, 17)
    groups = sample(HfSampler, model, tokenizer, asked, stops=SOME)
    batch, found = to_tensors(rows_in(groups, asked), 0), []
    for module in (LogProbs(model, 1.0), LogProbs(model, 1.0, flat=True)):
        logprobs_BT = module(batch).logprobs_BT
        assert (logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().max() < 1e-4
        logprobs_BT[batch.mask_BT].sum().backward()
        found.append(gradients(model))
        model.zero_grad()
    assert module.is_flat == (family in ("qwen3_moe", "phimoe"))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", TODAY)
def test_a_loss_for_the_balance_of_experts_does_not_enter(family):
    """transformers adds it to its own loss where config.json says output_router_logits."""
    found = []
    for changed in ({}, {"output_router_logits": True, "router_aux_loss_coef": 100.0}):
        model = base(family, **TEXT, **changed)
        row = TrainingRow((5, 6), (7, 8, 9), (0.0,) * 3, 1.0)
        logprobs_BT = LogProbs(model, 1.0)(to_tensors([row], 0)).logprobs_BT
        logprobs_BT.sum().backward()
        found.append(gradients(model))
    router = next(name for name in found[0] if name.endswith(("router.weight", "gate.weight")))
    assert found[0][router].abs().sum() > 0
    torch.testing.assert_close(*found, rtol=0, atol=0)


def pack(folder: Path) -> None:
    """Store the experts of gpt-oss as its makers do: two numbers of 4 bits in a byte, and a scale for each 32."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 124, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4"})


def write(family: str, folder: Path) -> Path:
    """Write a model with the shipped tokenizer, gpt-oss with packed experts."""
    wide = {"hidden_size": 32, "intermediate_size": 32} if family == "gpt_oss" else {}
    base(family, **TEXT, **wide).save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    if family == "gpt_oss":
        pack(folder)
    return folder


def test_packed_experts_are_written_out_and_not_packed_again(tmp_path):
    folder = write("gpt_oss", tmp_path / "base")
    model = read(folder)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    packed = load_file(folder / "model.safetensors")["model.layers.0.mlp.experts.down_proj_blocks"]
    low, high = packed.int() % 16, packed.int() // 16
    wanted = torch.tensor(values)[torch.stack([low, high], dim=-1)].flatten(2) * 2.0 ** (124 - 127)
    torch.testing.assert_close(model.model.layers[0].mlp.experts.down_proj.data, wanted.transpose(1, 2))
    with refuses("model.quantize", ModelError, names="mxfp4"):
        read(folder, quantize="nf4")


FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "reward.control=random"]
FEW += ["eval.problems=4", "run.steps=2", "run.save_every=1", "run.keep=9", "run.dir=it"]


def trained(folder: Path, *arguments: object) -> str:
    done = launch(*forked(), ROOT / "train.py", *arguments, folder=folder, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_a_run_says_what_is_not_trained_and_merges_and_resumes_to_the_bit(family, tmp_path, capsys):
    base_folder = write(family, tmp_path / "base")
    said = trained(tmp_path, "--preset", "nano", f"model.name={base_folder}", *FEW)
    assert "the experts of this model are not trained" in said
    assert "4 of 4 greedy answers identical" in said
    whole = tmp_path / "it"
    steps = lines_of(whole / "metrics.jsonl")[1:]
    assert all(one["grad_norm"] > 0 and one["sampler_difference/max"] < 1e-4 for one in steps)
    resumes_to_the_bit(whole, trained)
    status, _, refused = said_by(capsys, "export", whole, "--to", "gguf", "--out", tmp_path / "out")
    assert (status, type(base(family)).__name__ in refused) == (2, True)
