"""What every sampler promises, on the reference sampler."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trainer.batches import to_tensors
from trainer.config import Model
from trainer.logprobs import LogProbs
from trainer.policy.base import load_model, stop_tokens
from trainer.samplers.hf import HfSampler, generating
from trainer.types import Problem, Prompt, Sampling, TrainingRow


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(Problem(f"p{n}", "q", "1"), "q", tuple(20 + (3 * i + n) % 90 for i in range(n))) for n in lengths]


def sample(model, tokenizer, asked, stops=(), rows=64, **changed):
    sampling = Sampling(**{"group": 4, "temperature": 1.0, "max_new_tokens": 12, "seed": 1, **changed})
    sampler = HfSampler(model, tokenizer, list(stops) or stop_tokens(tokenizer, model), rows)
    return dict(sampler.sample(asked, sampling))


def test_every_prompt_gets_its_group_whatever_the_batching(model, tokenizer):
    groups = sample(model, tokenizer, prompts(9, 3, 6, 4, 12), rows=8)
    assert sorted(groups) == [0, 1, 2, 3, 4]
    assert {len(group) for group in groups.values()} == {4}


def test_greedy_of_mixed_lengths_equals_one_by_one(model, tokenizer):
    asked = prompts(9, 3, 6, 14)
    together = sample(model, tokenizer, asked, group=1, temperature=0.0)
    for index, prompt in enumerate(asked):
        alone = sample(model, tokenizer, [prompt], group=1, temperature=0.0)[0]
        assert together[index][0].tokens == alone[0].tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_returned_logprobs_equal_a_training_forward(model, tokenizer, temperature):
    asked = prompts(9, 3, 6)
    groups = sample(model, tokenizer, asked, temperature=temperature)
    rows = [
        TrainingRow(asked[index].tokens, one.tokens, one.logprobs, 0.0)
        for index, group in groups.items()
        for one in group
    ]
    batch = to_tensors(rows, tokenizer.pad_token_id)
    with torch.no_grad():
        trained = LogProbs(model, temperature)(batch).logprobs_BT
    torch.testing.assert_close(trained, batch.sampled_logprobs_BT, atol=1e-4, rtol=0)


def test_a_completion_ends_with_its_first_stop_token(model, tokenizer):
    """Half of the vocabulary stops, so nearly every row ends early and is padded behind its end."""
    stops = set(range(0, model.config.vocab_size, 2))
    groups = sample(model, tokenizer, prompts(5, 8), stops=stops, group=16)
    for one in (one for group in groups.values() for one in group):
        assert [token in stops for token in one.tokens] == [False] * (len(one.tokens) - 1) + [not one.truncated]
        assert len(one.logprobs) == len(one.tokens)


def test_without_a_stop_token_it_is_truncated(model, tokenizer):
    unused = [model.config.vocab_size - 1]
    group = sample(model, tokenizer, prompts(5), stops=unused, max_new_tokens=4)[0]
    assert [(len(one.tokens), one.truncated) for one in group] == [(4, True)] * 4


def test_a_seed_repeats_and_another_does_not(model, tokenizer):
    one, same, other = (sample(model, tokenizer, prompts(6), seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_the_models_own_generation_config_cannot_bend_the_distribution(model, tokenizer):
    plain = sample(model, tokenizer, prompts(6))
    own = model.generation_config
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, repetition_penalty=3.0, temperature=0.1)
    try:
        assert sample(model, tokenizer, prompts(6)) == plain
        assert model.generation_config.top_k == 1  # and it is put back
    finally:
        model.generation_config = own


def test_sampled_tokens_follow_the_distribution(model, tokenizer):
    """Chi-square of the first token over the likeliest ten and the rest, 4,096 draws."""
    prompt = prompts(6)[0]
    with torch.no_grad():
        probabilities = (model(torch.tensor([prompt.tokens])).logits[0, -1] / 0.5).softmax(-1)
    top = probabilities.topk(10)
    expected = [*(4096 * top.values).tolist(), 4096 * float(1 - top.values.sum())]
    group = sample(model, tokenizer, [prompt], group=4096, max_new_tokens=1, temperature=0.5, rows=4096)[0]
    drawn = [one.tokens[0] for one in group]
    seen = [drawn.count(token) for token in top.indices.tolist()]
    seen.append(4096 - sum(seen))
    chi_square = sum((a - b) ** 2 / b for a, b in zip(seen, expected, strict=True))
    assert chi_square < 29.6  # 0.1 % point at 10 degrees of freedom


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


def test_stop_tokens_are_a_set_of_all_that_end_an_answer(model, tokenizer):
    stops = stop_tokens(tokenizer, model)
    ids = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert ids <= set(stops)
    assert stops == sorted(set(stops))
