"""Adapters of models whose feed-forward layers are mixtures of experts: trained, or refused in a sentence."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config.settings import Lora
from trainer.errors import ConfigError
from trainer.model import lora

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
}
CHOICES = ["all", "attention", ("experts",), ("gate",), ("o_proj",), ("gate_up_proj",), ("down_proj", "o_proj")]
MORE = [{}, {"init": "pissa"}, {"dora": True}, {"rslora": True}]
TOKENS = torch.arange(6)[None]


def base(family: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **FAMILIES[family])).eval()


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


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_all_layers_is_saved_and_merged(family, tmp_path):
    model = lora.add_adapter(base(family), Lora(targets="all", r=2))
    with torch.no_grad():
        for value in lora.trainable(model).values():
            value.add_(0.05)
        trained = model(input_ids=TOKENS).logits
    lora.save_adapter(model, tmp_path)
    with torch.no_grad():
        merged = lora.merged(base(family), tmp_path)(input_ids=TOKENS).logits
    torch.testing.assert_close(merged, trained, rtol=1e-4, atol=1e-4)
    assert (trained - base(family)(input_ids=TOKENS).logits).abs().max() > 1e-3
