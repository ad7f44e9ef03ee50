"""Promises of every sampler, held against `model.generate` and a training forward; then those of the fast one."""

import gc
import itertools
import json
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import peft
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.conftest import refuses
from trainer.batch.pack import to_tensors
from trainer.config.settings import Lora, Model, Rollout
from trainer.loss.logprobs import LogProbs
from trainer.model.embedding_and_head import causal_lm_of
from trainer.model.load import load_tokenizer, needs_repeated_keys, stop_tokens
from trainer.model.lora import add_adapter, add_teacher, save_adapter
from trainer.model.trained_weights import Snapshot
from trainer.records import Completion, Problem, Prompt, Sampling, TrainingRow
from trainer.rollout.decoder import rows, weights
from trainer.rollout.decoder.cuda_graphs import rounded
from trainer.rollout.decoder.eight_bits import in_8_bits
from trainer.rollout.decoder.eight_bits import rounded as in_steps
from trainer.rollout.decoder.forward import Forward
from trainer.rollout.decoder.layers.attention import _rotate, matrices
from trainer.rollout.decoder.rows import STEPS_PER_CHECK
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.decoder.schedule import Scheduler
from trainer.rollout.decoder.weights import Projection
from trainer.rollout.draw_tokens import BLOCK, LARGE, draw
from trainer.rollout.hf import HfSampler
from trainer.rollout.make import make_sampler
from trainer.rollout.turns import Stops, TurnTaking

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
BIASED = {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": False}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.1, 1.3], "long_factor": [2.0, 4.0], "partial_rotary_factor": 0.5}
TWO_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
TWO_ROPES |= {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0}
GRANITE4 = GRANITE | {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 48}
GRANITE4 |= {"mamba_n_heads": 4, "mamba_d_state": 8}  # which layers that are not there have
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
LFM3 = {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3, "sliding_window": 8}
LFM3 |= {"head_dim": 16}
QWEN3_5 = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2}
QWEN3_5 |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 8}
GEMMA4 |= {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 480}
SHARING = {"layer_types": GEMMA4["layer_types"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
SHARING |= {"use_double_wide_mlp": True, "final_logit_softcapping": 5.0}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
ALIKE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 9.0, "factor": 1.0}
# By name: the type of the model, and where it differs from the shape of all.
FAMILIES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", BIASED),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "windowed qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "windowed mistral": ("mistral", {"sliding_window": 8}),
    "ministral": ("ministral", WINDOWED | {"head_dim": 8}),
    "ministral3": ("ministral3", {"sliding_window": 8}),
    "gemma": ("gemma", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma3": ("gemma3_text", WINDOWED | {"head_dim": 16, "query_pre_attn_scalar": 8, "rope_parameters": TWO_ROPES}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "phi3": ("phi3", {"sliding_window": 8, "tie_word_embeddings": False}),
    "phi4-mini": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "granite": ("granite", GRANITE),
    "granite 4": ("granitemoehybrid", GRANITE4 | {"position_embedding_type": "rope"}),
    "granite 4 without positions": ("granitemoehybrid", GRANITE4 | {"embedding_multiplier": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOWED),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4 with windows": ("exaone4", WINDOWED),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8, "rope_parameters": ALPHA}),
    "lfm2": ("lfm2", LFM2),
    "lfm2 with biases": ("lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4}),
    "lfm3": ("lfm3", LFM3),
    "lfm3 without gates": ("lfm3", LFM3 | {"use_sandwich_norm": False, "use_attention_gate": False}),
    "qwen3.5": ("qwen3_5_text", QWEN3_5),
    "gemma4": ("gemma4_text", GEMMA4 | SHARING),
    "gemma4 with keys as values": ("gemma4_text", GEMMA4 | ALIKE),
    "seed_oss": ("seed_oss", {"head_dim": 8, "residual_dropout": 0.0, "attention_dropout": 0.0}),
}
PLAIN = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def family(name="qwen2", **changed):
    """A random model of two layers, by a name of the table or by its type. Norms and biases are random too: at their
    usual 1 and 0 nobody would miss them."""
    kind, own = FAMILIES.get(name, (name, {}))
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 480, "max_position_embeddings": 512, "initializer_range": 0.2}
    shape |= {"tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **own, **changed})).eval()
    for parameter in built.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    for part, buffer in built.named_buffers():
        if part.endswith("layer_scalar"):
            buffer.fill_(0.7)
    return built


def adapted(model, **options):
    """Add an adapter that has an effect: a fresh one has a B of zero."""
    model = peft.get_peft_model(model, peft.LoraConfig(**{**PLAIN, **options}))
    move_adapter(model, seed=1)
    return model.eval()


def move_adapter(model, seed):
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)


OF_FAMILIES = [(DecodeSampler, name) for name in FAMILIES] + [(HfSampler, name) for name in ("qwen2", "gemma3")]


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(Problem(f"p{n}", "q", "1"), "q", tuple(20 + (3 * i + n) % 90 for i in range(n))) for n in lengths]


def sampling(**changed) -> Sampling:
    return Sampling(**{"group": 4, "temperature": 1.0, "max_new_tokens": 12, "seed": 1, **changed})


def turns(tokenizer, stops, strings=()):
    return TurnTaking(Stops(tokenizer, stops, strings))


def sample(kind, model, tokenizer, asked, stops=(), rows=64, strings=(), **changed):
    sampler = kind(model, turns(tokenizer, stops or stop_tokens(tokenizer, model), strings), rows)
    return dict(sampler.sample(asked, sampling(**changed)))


def generated(model, prompt, stops):
    """The greedy answer of `model.generate` to one prompt alone, up to its stop token."""
    settings = GenerationConfig(max_new_tokens=12, eos_token_id=sorted(stops), pad_token_id=0, do_sample=False)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt.tokens]), generation_config=settings)
    return tuple(tokens[0, len(prompt.tokens) :].tolist())


def assert_greedy_is_generate(groups, model, asked, stops):
    for index, prompt in enumerate(asked):
        assert {one.tokens for one in groups[index]} == {generated(model, prompt, stops)}


SOME = set(range(0, 480, 6))  # stop tokens that end some rows early and leave others whole


@pytest.mark.parametrize(("kind", "name"), OF_FAMILIES)
def test_greedy_tokens_are_those_of_generate_with_and_without_the_adapter(kind, name, tokenizer):
    model, asked, found = adapted(family(name)), prompts(9, 3, 30, 17), []
    sampler, greedy = kind(model, turns(tokenizer, SOME), 64), sampling(temperature=0.0)
    for seed, is_on in ((1, True), (1, False), (2, True)):
        move_adapter(model, seed)
        with nullcontext() if is_on else model.disable_adapter():
            found.append(dict(sampler.sample(asked, greedy)))
            assert_greedy_is_generate(found[-1], model, asked[: 4 if seed == is_on else 2], SOME)
    before, base, after = found
    assert base != before != after


def rows_in(groups, asked) -> list[TrainingRow]:
    pairs = ((asked[index].tokens, one) for index, group in groups.items() for one in group)
    return [TrainingRow(prompt, one.tokens, one.logprobs, 0.0) for prompt, one in pairs]


def assert_logprobs_of_training(groups, model, asked, temperature=1.0, tolerance=1e-4):
    batch = to_tensors(rows_in(groups, asked), pad_token=0)
    with torch.no_grad():
        trained_BT = LogProbs(model.train(), temperature)(batch).logprobs_BT
    assert_close(trained_BT, batch.sampled_logprobs_BT, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("kind", "name"), OF_FAMILIES)
def test_logprobs_are_those_of_training_and_a_common_beginning_is_read_once(kind, name, tokenizer, monkeypatch):
    """Nine rows are too few for the third prompt, which is read by itself."""
    monkeypatch.setattr(rows, "LEAST_SHARED", 16)
    model, beginning, read, prefill = adapted(family(name)), prompts(20)[0].tokens, [], Forward.prefill
    asked = [replace(prompt, tokens=beginning + prompt.tokens) for prompt in prompts(9, 3, 30)]

    def count(forward, tokens_PT, *of):
        read.append(tokens_PT.shape)
        return prefill(forward, tokens_PT, *of)

    monkeypatch.setattr(Forward, "prefill", count)
    groups = sample(kind, model, tokenizer, asked, stops=SOME, temperature=0.7, rows=9)
    if kind is DecodeSampler:
        assert (read[:2], {*read[2:]}) == ([(1, 20), (2, 30)], {(1, 23)})
    assert_logprobs_of_training(groups, model, asked, 0.7)


def test_without_a_stop_token_it_is_truncated(kind, model, tokenizer):
    for stops, new_tokens, truncated in ([479], 1, True), ([479], 4, True), (range(480), 1, False):
        group = sample(kind, model, tokenizer, prompts(5), stops=stops, max_new_tokens=new_tokens)[0]
        assert [(len(one.tokens), one.truncated) for one in group] == [(new_tokens, truncated)] * 4


STRINGS = ("ou", "\n", "s an", "</answer>")  # of one token or several, or of none that is likely


@pytest.mark.parametrize(("kind", "rows", "steps"), [
    (HfSampler, 3, 1), (HfSampler, 64, 1), (DecodeSampler, 3, 1), (DecodeSampler, 64, 8),
])  # fmt: skip
def test_greedy_tokens_end_with_the_one_that_completes_a_stop_string(kind, model, tokenizer, monkeypatch, rows, steps):
    """What a line break opens is not part of the text."""
    decoded = partial(tokenizer.decode, skip_special_tokens=True)
    monkeypatch.setitem(STEPS_PER_CHECK, "cpu", steps)
    asked, greedy = prompts(*range(4, 24)), {"group": 2, "temperature": 0.0, "max_new_tokens": 40}
    whole = sample(kind, model, tokenizer, asked, **greedy)
    ended = sample(kind, model, tokenizer, asked, strings=STRINGS, rows=rows, **greedy)
    for (one, _), (found, other) in ((whole[index], ended[index]) for index in whole):
        texts = [decoded(one.tokens[:count]) for count in range(1, len(one.tokens) + 1)]
        ends = [count for count, text in enumerate(texts, 1) if any(string in text for string in STRINGS)]
        count = min(ends, default=len(texts))
        assert found.tokens == other.tokens == one.tokens[:count]
        assert found.logprobs == pytest.approx(one.logprobs[:count], abs=1e-4)
        assert texts[count - 1].startswith(found.text)
        assert "\n" not in found.text
        if ends:
            assert not found.truncated
            assert "\n" in texts[count - 1] or found.text.endswith(STRINGS)
    assert len({len(group[0].tokens) for group in ended.values()}) > 4, "the answers should end at different tokens"


def test_a_seed_repeats_after_other_work_and_another_does_not(kind, model, tokenizer):
    """Memory that is kept from call to call carries nothing over."""
    sampler = kind(model, turns(tokenizer, stop_tokens(tokenizer, model)), 64)
    first, other = (dict(sampler.sample(prompts(6, 9), sampling(seed=seed))) for seed in (1, 2))
    assert first != other
    list(sampler.sample(prompts(30, 9, 4), sampling(group=8, max_new_tokens=20, temperature=0.0)))
    assert dict(sampler.sample(prompts(6, 9), sampling())) == first


def answers_in(groups):
    return [one for _, group in sorted(groups.items()) for one in group]


def tokens_of(groups):
    return {index: [one.tokens for one in group] for index, group in groups.items()}


def test_an_answer_does_not_depend_on_those_sampled_beside_it(kind, tokenizer):
    """A problem that comes again in a step gets other answers."""
    model, asked = adapted(family()), prompts(9, 3, 14, 30)
    asked.append(replace(asked[-1], repeat=1))
    together = tokens_of(sample(kind, model, tokenizer, asked, stops=SOME, max_new_tokens=24))
    assert len({tokens for group in together.values() for tokens in group}) == 20
    for index, prompt in enumerate(asked):
        alone = tokens_of(sample(kind, model, tokenizer, [prompt], stops=SOME, rows=3))
        assert alone == {0: [tokens[:12] for tokens in together[index]]}


def test_the_models_own_generation_config_cannot_bend_the_distribution(kind, model, tokenizer):
    plain = sample(kind, model, tokenizer, prompts(6))
    own = model.generation_config
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, repetition_penalty=3.0, temperature=0.1)
    try:
        assert sample(kind, model, tokenizer, prompts(6)) == plain
        assert model.generation_config.top_k == 1  # and it is put back
    finally:
        model.generation_config = own


def chi_square(seen, expected):
    """Over the cells that are expected at least ten times, and the rest as one; with the degrees of freedom."""
    total = sum(expected.values())
    large = {cell: count for cell, count in expected.items() if count >= 10}
    cells = [(seen.get(cell, 0), count) for cell, count in large.items()]
    rest = (sum(seen.values()) - sum(got for got, _ in cells), total - sum(large.values()))
    return sum((got - want) ** 2 / want for got, want in [*cells, rest]), len(cells)


def test_sampled_tokens_follow_the_distribution(kind, tokenizer):
    """Chi-square of the first two tokens together, in a vocabulary of eight of which one stops."""
    model, prompt, draws, temperature = family(vocab_size=8), Prompt(Problem("p", "q", "1"), "q", (3, 5, 4)), 4096, 0.8

    def next_token(*tokens):
        with torch.no_grad():
            return (model(torch.tensor([[*prompt.tokens, *tokens]])).logits[0, -1] / temperature).softmax(-1).tolist()

    first = next_token()
    expected = {(7,): draws * first[7]}
    for one in range(7):
        expected |= {(one, two): draws * first[one] * share for two, share in enumerate(next_token(one))}
    settings = {"group": draws, "rows": draws, "max_new_tokens": 2, "temperature": temperature}
    group = sample(kind, model, tokenizer, [prompt], stops=[7], **settings)[0]
    drawn = [one.tokens for one in group]
    value, freedom = chi_square({cell: drawn.count(cell) for cell in set(drawn)}, expected)
    assert freedom > 10
    assert value < freedom + 3.1 * (2 * freedom) ** 0.5 + 5  # above the 0.1 % point


def test_a_group_comes_as_soon_as_it_is_whole(kind, tokenizer):
    """So its reward is computed beside the later ones."""
    model, passes = family(), []
    model.lm_head.register_forward_hook(lambda *_: passes.append(1))
    groups = kind(model, turns(tokenizer, SOME), 4).sample(prompts(9, 3, 6), sampling())
    next(groups)
    at_the_first = len(passes)
    assert len(list(groups)) == 2
    assert at_the_first < len(passes)


def test_sampling_leaves_the_model_as_it_was(kind, tokenizer):
    model = adapted(family()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample(kind, model, tokenizer, prompts(4, 9))
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    assert model.training


def test_nothing_is_sampled_beyond_the_context_whose_last_place_is_used(kind, tokenizer):
    model, asked = family(), prompts(500)
    # no prompt leaves room for an answer of 512 tokens, and no answer behind a prompt of 512
    for length, new_tokens, remedy in (512, 8, "prompt.max_tokens=504"), (500, 13, "=12"), (500, 512, "=12"):
        with refuses("rollout.max_new_tokens", names=remedy):
            sample(kind, model, tokenizer, prompts(3, length), max_new_tokens=new_tokens)
    groups = sample(kind, model, tokenizer, asked, group=1, stops=[479], max_new_tokens=12, temperature=0.0)
    assert_greedy_is_generate(groups, model, asked, [479])


class Card:
    """Memory for so many rows: the output layer of a larger batch does not fit."""

    def __init__(self, model, rows):
        self.rows = rows
        model.lm_head.register_forward_pre_hook(self.take)

    def take(self, _, inputs):
        if inputs[0].shape[0] > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_batch_that_does_not_fit_is_halved_once_and_for_all(kind, tokenizer, monkeypatch):
    monkeypatch.setitem(STEPS_PER_CHECK, "cpu", 8)  # as on a card: each answer has a row
    model, asked, said = family(), prompts(9, 3, 30, 4, 17), []
    wanted = {index: [generated(model, prompt, SOME)] * 4 for index, prompt in enumerate(asked)}
    Card(model, rows=6)
    sampler = kind(model, turns(tokenizer, SOME), 64, said.append)
    for _ in range(2):
        assert tokens_of(dict(sampler.sample(asked, sampling(temperature=0.0)))) == wanted
    assert sampler.rows in range(3, 7)
    assert len(said) == 1
    assert "20 completions" in said[0]
    Card(model, rows=0)
    with refuses("rollout.rows"):
        sample(kind, model, tokenizer, prompts(4))


def test_a_tokenizer_without_a_pad_token(kind, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "unpadded")
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def load(**changed):
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": None, **changed}))
        return load_tokenizer(Model(name=str(folder)))

    assert load(eos_token=None).pad_token_id is not None
    tokenizer = load()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    model, asked = adapted(family()), prompts(9, 3, 14)
    groups = sample(kind, model, tokenizer, asked, temperature=0.0)
    assert_greedy_is_generate(groups, model, asked, stop_tokens(tokenizer, model))


def counts(requests):
    return [(one.prompt_index, len(one.numbers)) for one in requests]


def test_what_memory_interrupted_is_sampled_again_and_what_was_finished_is_kept():
    scheduler = Scheduler(prompts(5, 4), group=2)
    done, other = (Completion((n,), (-0.1,), "", truncated=False) for n in (2, 3))
    assert counts(scheduler.schedule(4, 4)) == [(0, 2), (1, 2)]
    assert scheduler.finish(0, 1, done) is None
    assert scheduler.finish(1, 1, done) is None
    assert scheduler.finish(1, 0, other) == [other, done], "in the order of the numbers"
    scheduler.restart_unfinished()
    (again,) = scheduler.schedule(4, 4)
    assert (again.prompt_index, list(again.numbers)) == (0, [0])
    assert scheduler.finish(0, 0, other) == [other, done]
    assert scheduler.is_finished


def test_a_large_group_begins_in_parts_and_leaves_few_rows_idle():
    scheduler = Scheduler(prompts(6, 5), group=8)
    assert counts(scheduler.schedule(8, 8)) == [(0, 8)]
    assert scheduler.schedule(1, 8) == []
    assert counts(scheduler.schedule(2, 8)) == [(1, 2)]
    assert counts(scheduler.schedule(6, 8)) == [(1, 6)]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_what_is_not_a_number_in_one_row_does_not_stay_in_its_place(temperature, tokenizer):
    model, asked = family(), prompts(9, 3, 14)
    sampler, drawn = DecodeSampler(model, turns(tokenizer, SOME), 64), sampling(temperature=temperature)
    wanted = dict(sampler.sample(asked, drawn))
    with torch.inference_mode():
        for kept in sampler.batch.cache.keys_LRKTD:
            kept.fill_(float("nan"))
    assert dict(sampler.sample(asked, drawn)) == wanted


@pytest.mark.parametrize("new_tokens", [1, 12])
def test_a_rehearsal_fills_a_row_for_each_answer(new_tokens, tokenizer):
    sampler, asked = DecodeSampler(family(), turns(tokenizer, SOME), 64), prompts(9, 3, 14)
    sampler.rehearse(asked, sampling(temperature=0.04, max_new_tokens=new_tokens))
    assert sampler.batch.active == 12
    assert [len(group) for group in dict(sampler.sample(asked, sampling())).values()] == [4, 4, 4]


def test_other_values_swapped_in_are_read_from_elsewhere(tokenizer):
    """A captured step reads weights where they were: it must not stand for one with other values."""
    model = adapted(family())
    sampler = DecodeSampler(model, turns(tokenizer, SOME), 64, copies=False)
    dict(sampler.sample(prompts(3), sampling()))
    before = sampler.forward.addresses
    with Snapshot(model.parameters()).swapped_in():
        assert sampler.forward.addresses != before
    assert sampler.forward.addresses == before


def test_adapters_beside_their_layers_give_what_these_give():
    """What a card does where a copy does not fit."""
    model, hidden_NH = adapted(family()), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    attention = causal_lm_of(model).get_decoder().layers[0].self_attn
    joined, out = Projection([attention.q_proj, attention.k_proj, attention.v_proj]), Projection([attention.o_proj])
    for projection in (joined, out):
        projection.allocate_factors()
    for seed in (1, 2):
        move_adapter(model, seed)
        for is_on in (True, False):
            with nullcontext() if is_on else model.disable_adapter(), torch.no_grad():
                for projection in (joined, out):
                    projection.refresh()
                    assert_close(projection(hidden_NH), torch.cat([one(hidden_NH) for one in projection.layers], dim=1))
            assert not joined.live_adapters


@pytest.mark.parametrize(("dtype", "close"), [(torch.int8, 1e-5), (torch.float8_e4m3fn, 1e-2)])  # this rounds to bf16
def test_a_product_in_8_bits_is_that_of_the_rounded_numbers(dtype, close):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 32).requires_grad_(False), torch.nn.Linear(64, 16, bias=False).requires_grad_(False)]
    hidden_NH = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 30.0, 1e3, 0.0])[:, None]
    made, (codes_NH, scale_N1) = in_8_bits(layers, dtype), in_steps(hidden_NH, dtype)
    weight_OH, given_OH = made.codes_OH.float() * made.scale_1O.t(), torch.cat([one.weight for one in layers])
    bias_O = torch.cat((layers[0].bias, torch.zeros(16)))
    product_NO = made.product(hidden_NH)
    assert_close(product_NO, codes_NH.float() * scale_N1 @ weight_OH.t() + bias_O, atol=close, rtol=close)
    step_OH = made.scale_1O.t() if dtype == torch.int8 else (given_OH.abs() / 8).maximum(made.scale_1O.t() / 2**9)
    assert ((weight_OH - given_OH).abs() <= 0.51 * step_OH).all()
    assert_close(made.product(hidden_NH[1:2]), product_NO[1:2])  # whatever stands beside it


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_decode_steps_read_8_bits_beside_the_adapter_and_prompts_do_not(kind, tokenizer):
    model, asked = adapted(family()), prompts(9, 3, 14)
    sampler = DecodeSampler(model, turns(tokenizer, SOME), 64, weights=kind)
    for seed in (1, 2):
        move_adapter(model, seed)
        batch = to_tensors(rows_in(dict(sampler.sample(asked, sampling())), asked), tokenizer.pad_token_id)
        with torch.no_grad():
            apart_BT = (LogProbs(model, 1.0)(batch).logprobs_BT - batch.sampled_logprobs_BT).abs()
        is_first_BT = batch.mask_BT & (batch.mask_BT.cumsum(dim=1) == 1)
        assert apart_BT[is_first_BT].max() < 1e-4
        assert 1e-3 < apart_BT[batch.mask_BT & ~is_first_BT].mean() < 0.2
    assert all(projection._in_8_bits for projection in sampler.forward.projections)


def test_a_matrix_turns_heads_as_angles_do():
    torch.manual_seed(0)
    heads_NhD, angles_N1D = torch.randn(3, 4, 12), torch.randn(3, 1, 8)
    cos, sin, other = angles_N1D.cos(), angles_N1D.sin(), heads_NhD.clone()
    _rotate(heads_NhD, cos, sin)
    _rotate(other, matrices(cos, sin))
    assert_close(other, heads_NhD)


@pytest.mark.parametrize("is_adapted", [True, False])
def test_large_layers_are_packed_anew_when_they_have_changed(monkeypatch, tokenizer, is_adapted):
    monkeypatch.setattr(weights, "LARGE", 0)
    model, asked = adapted(family()) if is_adapted else family(), prompts(9, 3, 14)
    sampler = DecodeSampler(model, turns(tokenizer, SOME), 64)
    for seed in (1, 2):
        move_adapter(model, seed)
        if not is_adapted:
            model.lm_head.weight.data.mul_(1 - 2 * (torch.arange(480) % (seed + 1))[:, None])
        assert_greedy_is_generate(dict(sampler.sample(asked, sampling(temperature=0.0))), model, asked, SOME)
    assert all(projection._copy_OH.is_mkldnn for projection in sampler.forward.projections)


def test_the_adapter_of_a_run_is_copied_and_its_copies_stay_where_they_are(tokenizer):
    model = add_adapter(family(), Lora(targets="all"))
    sampler = DecodeSampler(model, turns(tokenizer, SOME), 64)
    places = []
    for _ in range(2):
        list(sampler.sample(prompts(9, 3), sampling()))
        places.append([one._copy_OH.data_ptr() for one in sampler.forward.projections if one._copy_OH is not None])
    assert places[0] == places[1]
    assert len(places[0]) == 8  # four a layer; the head has no adapter
    layers = itertools.chain.from_iterable(layer.projections for layer in sampler.forward.layers)
    assert all(projection._copy_OH is not None for projection in layers)


@pytest.mark.parametrize("rows", [64, 9])
def test_answers_share_a_row_while_they_are_the_same(rows, monkeypatch, tokenizer):
    """A token behind the same beginning is computed once. The answers are those of rows of their own."""
    monkeypatch.setattr(weights.hardware, "free_ram", lambda: 0)
    model, seen, asked = adapted(family()), [], prompts(9, 14, 30)
    drawn = {"stops": SOME, "group": 8, "temperature": 0.04, "rows": rows}
    with monkeypatch.context() as card:
        card.setitem(STEPS_PER_CHECK, "cpu", 2)
        own = sample(DecodeSampler, model, tokenizer, asked, **drawn)
    first = model.base_model.model.model.layers[0].self_attn.q_proj
    first.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    shared = sample(DecodeSampler, model, tokenizer, asked, **drawn)
    assert tokens_of(shared) == tokens_of(own)
    for index, group in shared.items():
        for one, other in zip(group, own[index], strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    read = [(index, one.tokens[:end]) for index in shared for one in shared[index] for end in range(1, len(one.tokens))]
    assert 2 * len(set(read)) < len(read)
    if rows == 64:  # with fewer, a prompt may be read twice
        assert sum(seen) == 3 * 30 + len(set(read))


def test_new_groups_begin_before_old_ones_are_whole(monkeypatch, tokenizer):
    """Waves of six groups would take as many steps as the longest completion of each."""
    monkeypatch.setattr(weights.hardware, "free_ram", lambda: 0)
    model, seen = family(), []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    sampler = DecodeSampler(model, turns(tokenizer, SOME), 12)
    groups = dict(sampler.sample(prompts(*[50] * 24), sampling(group=2, max_new_tokens=40)))
    longest = [max(len(one.tokens) for one in group) for _, group in sorted(groups.items())]
    waves = [max(longest[start : start + 6]) for start in range(0, 24, 6)]
    assert len([rows for rows in seen if rows <= 12]) < 0.8 * (sum(waves) - 4)


SIZES = [6, LARGE, LARGE + BLOCK // 2 + 1]  # of a vocabulary: small, and in whole blocks or not


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_of_probability_zero_is_drawn_and_logits_that_are_no_numbers_are_survived(temperature, size):
    logits_BV = torch.full((4096, size), float("-inf"))
    logits_BV[:, 2:4] = torch.tensor([0.0, -15.0])
    tokens_B, logprobs_B = draw(logits_BV, temperature, torch.linspace(0, 1, 4097, dtype=torch.double)[:-1, None])
    assert set(tokens_B[:, 0].tolist()) <= {2, 3}
    assert logprobs_B.isfinite().all()
    tokens_B, logprobs_B = draw(torch.full((3, size), float("nan")), temperature, torch.rand(3, 1, dtype=torch.double))
    assert all(0 <= token < size for token in tokens_B[:, 0].tolist())
    assert logprobs_B.isnan().all()


@pytest.mark.parametrize("size", SIZES)
def test_the_token_is_the_one_whose_share_of_the_line_has_the_random_number(size):
    logits_BV = torch.randn(50, size) * 4
    numbers_BG = torch.rand(50, 20, dtype=torch.double)
    drawn = [draw(logits_BV, 0.7, numbers_B1) for numbers_B1 in numbers_BG.split(1, dim=1)]
    tokens_BG, logprobs_BG = (torch.cat(parts, dim=1) for parts in zip(*drawn, strict=True))
    ends_BV = (logits_BV / 0.7).softmax(dim=-1).cumsum(dim=-1, dtype=torch.double)
    starts_BV = F.pad(ends_BV, (1, 0))
    reached_BG = (1 - numbers_BG) * ends_BV[:, -1:]
    assert (ends_BV.gather(1, tokens_BG) >= reached_BG - 1e-12).all()
    assert (starts_BV.gather(1, tokens_BG) < reached_BG + 1e-12).all()
    together_BG, _ = draw(logits_BV, 0.7, numbers_BG)  # may be found in another way
    assert (together_BG != tokens_BG).sum() <= 1
    assert torch.allclose(logprobs_BG, (logits_BV / 0.7).log_softmax(dim=-1).gather(1, tokens_BG), atol=1e-4)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MAMBA = ["linear_attention", "full_attention"]
UNSUPPORTED = {
    "family": (lambda: family("gpt2"), "no forward pass for GPT2LMHeadModel, and no plan"),
    "window": (lambda: family("llama", sliding_window=8), "a sliding window of 8 tokens"),
    "experts": (lambda: family("gemma4 with keys as values", **GEMMA4_EXPERTS), "mixtures of experts"),
    "experts of Granite 4": (lambda: family("granite 4", num_local_experts=4), "mixtures of experts"),
    "Mamba": (lambda: family("granite 4", layer_types=MAMBA), "layers of another kind (1 x mamba)"),
    "rope": (lambda: family(rope_parameters=DYNAMIC), "its rope_type is dynamic"),
    "adapter": (lambda: peft.get_peft_model(family(), peft.IA3Config(task_type="CAUSAL_LM")), "IA3, not LoRA"),
    "embedding": (lambda: adapted(family("llama"), target_modules=["embed_tokens", "q_proj"]), "input embedding"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_the_fast_path_does_not_know(name, tokenizer):
    (build, reason), said = UNSUPPORTED[name], []
    model = build()
    sampler = make_sampler(Rollout(), model, Stops(tokenizer, [2]), said.append)
    assert isinstance(sampler, HfSampler)
    assert [reason in text for text in said] == [True]
    assert len(dict(sampler.sample(prompts(4), sampling()))[0]) == 4
    with refuses("rollout.engine"):
        make_sampler(Rollout(engine="decode"), model, Stops(tokenizer, [2]))
    with refuses("rollout.weights"):
        make_sampler(Rollout(weights="int8"), model, Stops(tokenizer, [2]))


SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("name", "changed"), [
    ("phi4-mini", {}), ("ministral3", {"rope_parameters": SCALED | {"llama_4_scaling_beta": 0.1}}),
])  # fmt: skip
def test_a_context_in_which_the_model_attends_in_another_way_is_refused(name, changed, tokenizer):
    sampler = make_sampler(Rollout(), family(name, **changed), Stops(tokenizer, [2]))
    with refuses("rollout.max_new_tokens", names=64):
        list(sampler.sample(prompts(60), sampling()))


@pytest.mark.parametrize(("name", "options", "changed"), [
    ("llama", {"use_rslora": True}, {}),
    ("llama", {"use_dora": True}, {}),
    ("llama", {"target_modules": ["q_proj", "down_proj"]}, {}),
    ("llama", {"lora_bias": True}, {}),
    ("olmo3", {}, {"rope_parameters": SCALED}),
], ids=["rslora", "dora", "two layers", "bias", "one rope beside those of the kinds of layers"])  # fmt: skip
def test_other_adapters_and_ropes_answer_as_in_generate(name, options, changed, tokenizer):
    model, asked = adapted(family(name, **changed), **options), prompts(9, 3, 14, 30)
    groups = sample(DecodeSampler, model, tokenizer, asked, stops=SOME, temperature=0.0)
    assert_greedy_is_generate(groups, model, asked, SOME)


def test_calls_that_take_turns_share_one_memory_which_is_free_as_soon_as_it_is_given_back(tokenizer):
    """Many short prompts, few long ones: as training and evaluation do. Memory in a reference cycle would stay until
    the cyclic garbage collector runs, through a training pass."""
    sampler, batches = DecodeSampler(family(), turns(tokenizer, SOME), 64), []
    for asked in [prompts(3, 4, 5, 6), prompts(60)] * 3:
        list(sampler.sample(asked, sampling()))
        batches.append(sampler.batch)
    assert len(set(map(id, batches[1:]))) == 1
    batches.clear()
    batch, cache = weakref.ref(sampler.batch), weakref.ref(sampler.batch.cache.keys_LRKTD[0])
    gc.disable()
    try:
        assert sampler.give_back()
        assert (batch(), cache()) == (None, None)
    finally:
        gc.enable()


def test_repeated_keys_give_the_same_answers(tokenizer):
    """As on cards whose quick kernels want as many heads of keys as of queries."""
    model, asked = adapted(family()), prompts(9, 3, 30)
    sampler = DecodeSampler(model, turns(tokenizer, SOME), 64)
    list(sampler.sample(asked, sampling()))
    sampler.forward.repeats_keys = True
    assert_greedy_is_generate(dict(sampler.sample(asked, sampling(temperature=0.0))), model, asked, SOME)


@pytest.mark.parametrize(("capability", "dtype", "repeats"), [
    ((7, 5), "float16", True), ((8, 6), "bfloat16", False), ((8, 6), "float32", True), ((12, 0), "float16", False),
])  # fmt: skip
def test_keys_are_repeated_where_only_the_slow_kernel_takes_fewer(monkeypatch, capability, dtype, repeats):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert needs_repeated_keys(torch.device("cuda"), getattr(torch, dtype)) == repeats
    assert not needs_repeated_keys(torch.device("cpu"), getattr(torch, dtype))


@pytest.fixture(scope="module")
def answered():
    model, asked = adapted(family()), prompts(9, 3, 30, 4, 17, 8, 21)
    return model, asked, {index: [generated(model, prompt, SOME)] * 4 for index, prompt in enumerate(asked)}


@pytest.mark.parametrize(("kind", "rows"), [(HfSampler, 3), *((DecodeSampler, rows) for rows in (1, 3, 11, 64))])
def test_neither_refill_nor_compaction_nor_rare_looks_change_greedy_tokens(kind, rows, answered, tokenizer):
    """Fewer rows than completions, and fewer than one group; and a stop token that the model does not have."""
    (model, asked, wanted), greedy = answered, sampling(temperature=0.0)
    assert len({len(answer) for (answer, *_) in wanted.values()}) > 2, "the rows should end at different times"
    sampler = kind(model, turns(tokenizer, [*SOME, 487]), rows)
    assert tokens_of(dict(sampler.sample(asked, greedy))) == wanted
    if kind is DecodeSampler:
        assert not sampler.batch.running_R.any(), "a moved row would run on where it had been, out of its cache"
        sampler.batch.decode_step = lambda step, *sizes: step(*rounded(*sizes))  # as a card does, without the graphs
        sampler.batch.steps_per_check = 8
        assert tokens_of(dict(sampler.sample(asked, greedy))) == wanted
        drawn = answers_in(dict(sampler.sample(asked, sampling())))
        assert [len(one.tokens) == len(one.logprobs) <= 12 for one in drawn] == [True] * 28


def test_a_teacher_beside_the_adapter_changes_neither_what_is_copied_nor_the_answers(tokenizer, tmp_path):
    """The teacher's adapter is one that no copy could hold, of layers that have no other."""
    save_adapter(adapted(family(), target_modules="all-linear", use_dora=True), tmp_path)
    alone, beside = (adapted(family(), target_modules=["q_proj"]) for _ in range(2))
    add_teacher(beside, tmp_path)
    asked, found = prompts(9, 3, 30), []
    for model in (alone, beside):
        sampler = DecodeSampler(model, turns(tokenizer, SOME), 64)
        answers = dict(sampler.sample(asked, sampling()))
        found.append((answers, [one._copy_OH is not None for one in sampler.forward.projections]))
    assert found[0] == found[1]
    assert any(found[0][1])
