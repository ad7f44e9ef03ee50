"""What only the reference sampler has to do: `model.generate` in shape for sampling."""

from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from tests.rollout.test_decoder import family, prompts, sample
from trainer.config.settings import Model
from trainer.model.load import load_model, load_tokenizer, stop_tokens
from trainer.records import Problem, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.hf import HfSampler
from trainer.rollout.turns import Stops, TurnTaking


def test_a_model_that_checkpoints_gradients_generates_with_its_cache(tiny_model, tokenizer):
    model, seen = load_model(Model(name=str(tiny_model), gradient_checkpointing=True), "fp32", torch.device("cpu")), []
    model.train().model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    sample(HfSampler, model, tokenizer, prompts(2), stops=[1], group=1, temperature=0.0, max_new_tokens=4)
    assert seen == [2, 1, 1, 1]


def test_answers_with_other_limits_are_not_generated_beyond_the_context(tokenizer):
    """Agents ask for fewer tokens after a long conversation. GPT-2 has no positions beyond its context."""
    model = family("gpt2", max_position_embeddings=40)
    asked = [Prompt(Problem("p", "q", "1"), "q", (5,) * (40 - most), most=most) for most in (5, 36)]
    sampler = HfSampler(model, TurnTaking(Stops(tokenizer, [])), rows=8)
    groups = dict(sampler.sample(asked, Sampling(2, temperature=1.0, max_new_tokens=36, seed=0)))
    assert [[len(one.tokens) for one in groups[index]] for index in range(2)] == [[5, 5], [36, 36]]


@pytest.mark.parametrize(("kind", "size"), [("mamba", 0), ("gemma4_text", 0), ("jetmoe", 128), ("zamba2", 160)])
def test_a_row_is_counted_by_the_size_of_a_head_or_where_a_model_has_none_or_some_of_two_sizes(kind, size):
    """The last two call the size by other names, and it is not the hidden size."""
    config = AutoConfig.for_model(kind)
    found, logits = limits.row_bytes(config, places=768, item=2), 12 * config.vocab_size
    if size:
        assert found == 2 * config.num_hidden_layers * config.num_key_value_heads * size * 2 * 768 + logits
    assert found >= logits


LIGHTNING = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_attention_heads": 2}
LIGHTNING |= {"num_local_experts": 2, "intermediate_size": 32}


@pytest.mark.parametrize(("kind", "own"), [("recurrent_gemma", {"lru_width": 32}), ("minimax", LIGHTNING)])
def test_prompts_of_other_lengths_are_generated_apart_if_the_model_reads_padding(kind, own, tokenizer):
    model, asked = family(kind, num_hidden_layers=3, **own), prompts(9, 3, 30)
    together = sample(HfSampler, model, tokenizer, asked, stops=[2], group=2)
    for index, prompt in enumerate(asked):
        alone = sample(HfSampler, model, tokenizer, [prompt], stops=[2], group=2)[0]
        assert [one.logprobs for one in alone] == [pytest.approx(one.logprobs, abs=1e-4) for one in together[index]]


def test_an_adapter_that_does_not_say_what_it_is_for_is_sampled_with_our_settings(tiny_model, tokenizer):
    """TRL saves such adapters. PEFT's wrapper would sample 20 tokens with the settings of the model."""
    answers, greedy = [], {"stops": [1], "group": 1, "temperature": 0.0, "max_new_tokens": 30}
    for task_type in ("CAUSAL_LM", None):
        torch.manual_seed(0)
        options = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type=task_type)
        model = peft.get_peft_model(load_model(Model(name=str(tiny_model)), "fp32", torch.device("cpu")), options)
        answers += sample(HfSampler, model, tokenizer, prompts(3), **greedy)[0]
    assert answers[0] == answers[1]
    assert len(answers[0].tokens) == 30


TURN = "{% for m in messages %}<start>{{ m['role'] }} {{ m['content'] }}"
# gpt-oss ends its thinking, and every answer but the last one, with <|end|>; in Gemma's vocabulary </s> is HTML
ENDS = {
    "gpt-oss": (TURN + "{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}", "<|return|>"),
    "gemma": (TURN + "<end_of_turn>\n{% endfor %}", "<end_of_turn>"),
    "phi": (TURN + "<|end|>\n{% endfor %}</s>", "<|end|>"),
    "none": (TURN + "\n{% endfor %}", None),
    "refuses": ("{{ raise_exception('no') }}", None),
    "another text": ("{% for m in messages %}<start>{{ m['role'] }}<end_of_turn>{% endfor %}", None),
}


@pytest.mark.parametrize(("template", "end"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_turn_is_what_the_chat_template_writes(tiny_model, template, end):
    tokenizer = load_tokenizer(Model(name=str(tiny_model)))
    tokenizer.add_tokens(["<|return|>", "<|end|>", "<start>", "<end_of_turn>", "</s>", "<|im_end|>", "\n"])
    tokenizer.chat_template = template
    found = set(stop_tokens(tokenizer, AutoModelForCausalLM.from_pretrained(tiny_model)))
    expected = {"<|im_end|>", "<|endoftext|>", end} - {None}  # the first is the end of the configuration
    assert found == set(tokenizer.convert_tokens_to_ids(sorted(expected)))


def test_rows_are_as_many_as_half_of_the_free_memory_holds(monkeypatch):
    """Qwen2.5-1.5B in bf16: 28 KiB of cache a token (2 x 28 layers x 2 heads x 128 x 2 bytes), 1.8 MB of logits."""
    sizes = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, vocab_size=151936)
    each = limits.row_bytes(config, places=768, item=2)
    assert each == 28 * 1024 * 768 + 3 * 4 * 151936
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * each)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: each)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * each, 80 * each))
    assert limits.rows_that_fit(model, 768, wanted=64) == 6  # half of ten, and of the two that torch has to spare
    assert limits.rows_that_fit(model, 768, wanted=4) == 4
    model.device = torch.device("cpu")
    assert limits.rows_that_fit(model, 768, wanted=64) == 64
