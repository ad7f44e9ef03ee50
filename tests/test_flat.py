"""A line of tokens gives what padded rows give, value and gradient, and nothing else is taken for one."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import row
from trainer.batches import to_tensors
from trainer.config import Lora
from trainer.flat import PREFIX, layout_of, make_flat
from trainer.logprobs import LogProbs
from trainer.policy.lora import add_adapter
from trainer.types import TrainingRow

# Two prompts of different length with three and two answers, and one that stands alone.
ROWS = [
    *(TrainingRow((5, 6, 7, 8), tuple(range(20 + n, 22 + 3 * n)), (-1.0,) * (2 + 2 * n), 1.0 - n) for n in range(3)),
    *(TrainingRow((9, 8), tuple(range(40, 44 - n)), (-1.0,) * (4 - n), n - 0.5) for n in range(2)),
    row(1, 1, 2.0, first=60),
]


def test_the_layout_by_hand():
    """Rows 5 6 7 8, 5 6 9 and 4 3 2 1 8, each with a last target behind it that is no input."""
    rows = [TrainingRow((5, 6), (7, 8, 2), (0.0,) * 3, 1.0), TrainingRow((5, 6), (9, 2), (0.0,) * 2, 1.0)]
    batch = to_tensors([*rows, TrainingRow((4, 3, 2), (1, 8, 2), (0.0,) * 3, 1.0)], pad_token=0)
    assert batch.first_B.tolist() == [0, 0, 2]
    layout = layout_of(batch)
    # the line: 5 6 4 3 2 7 8 9 1 8
    assert layout.positions_N.tolist() == [0, 1, 0, 1, 2, 2, 3, 2, 3, 4]
    places = [row[present].tolist() for row, present in zip(layout.index_BT, batch.present_BT, strict=True)]
    assert places == [[0, 1, 5, 6], [0, 1, 7], [2, 3, 4, 8, 9]]
    assert layout.kept_N.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 10, 11]  # of 2 x 3 places of prompts, 3 x 2 of answers
    # the second token of the first answer sees its prompt (of two tokens, padded) and both of its own
    assert layout.mask_BCK[0].tolist() == [[True, True, False, True, False], [True, True, False, True, True]]


FAMILIES = {"qwen2": {}, "qwen3": {}, "llama": {}, "mistral": {"sliding_window": None}, "gemma": {}}


def tiny(family: str, dtype=torch.float32, **options):
    config = AutoConfig.for_model(
        family, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def adapted(family: str, checkpointing: bool):
    model = tiny(family, **FAMILIES[family])
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = add_adapter(model, Lora(targets="all", r=4))
    with torch.no_grad():
        for number, (name, value) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                value.copy_(0.1 * torch.sin(torch.arange(value.numel()) * (1 + number)).view_as(value))
    return model.train()


def pass_over(module):
    batch = to_tensors(ROWS, pad_token=0)
    module.zero_grad()
    scores = module(batch)
    (scores.logprobs_BT.sum(dim=1) * batch.advantages_B + scores.entropy_BT.sum(dim=1)).sum().backward()
    gradients = [value.grad.clone() for value in module.parameters() if value.requires_grad]
    return [scores.logprobs_BT.detach(), scores.entropy_BT.detach(), *gradients]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_padded_rows(family, checkpointing):
    plain = LogProbs(adapted(family, checkpointing), 0.7, train_entropy=True, flat=False)
    flat = LogProbs(adapted(family, checkpointing), 0.7, train_entropy=True)
    assert (plain.is_flat, flat.is_flat) == (False, True)
    for expected, found in zip(pass_over(plain), pass_over(flat), strict=True):
        largest = max(1.0, float(expected.abs().max()))  # these sums are not divided by anything
        torch.testing.assert_close(found / largest, expected / largest, atol=1e-5, rtol=0)


def test_the_layers_see_every_token_once():
    module, seen = LogProbs(tiny("qwen2"), 1.0), []
    module.model.model.layers[0].mlp.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].shape))
    module(to_tensors(ROWS, pad_token=0))
    prompts, answers = 4 + 2 + 1, sum(len(one.completion) - 1 for one in ROWS)  # the last token is no input
    assert seen == [(1, prompts + answers, 32)]


def test_sampling_is_not_disturbed():
    plain, flat = tiny("qwen2").eval(), tiny("qwen2").eval()
    assert make_flat(flat)
    prompt = torch.tensor([[0, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    answers = [
        model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False) for model in (plain, flat)
    ]
    assert torch.equal(*answers)


def test_bf16_is_exact_enough():
    assert make_flat(tiny("qwen2", dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("gemma2", {}),
    ],
)
def test_attention_with_a_window_stays_as_it_is(family, options):
    model = tiny(family, **options)
    before = model.config._attn_implementation
    assert not LogProbs(model, 1.0).is_flat
    assert model.config._attn_implementation == before


def test_a_family_that_does_not_hand_the_layout_on_stays_as_it_is():
    config = AutoConfig.for_model("gpt2", vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    assert not make_flat(model)
    assert not model.config._attn_implementation.startswith(PREFIX)


def test_an_attention_that_computes_something_else_is_found_out(monkeypatch):
    from trainer import flat

    right = flat.layout_of
    wrong = lambda batch: right(batch)._replace(index_BT=right(batch).index_BT.roll(1, dims=0))  # noqa: E731
    monkeypatch.setattr(flat, "layout_of", wrong)
    assert not make_flat(tiny("qwen2"))


def test_a_saved_model_says_nothing_of_it(tmp_path):
    model = tiny("qwen2")
    assert make_flat(model)
    model.save_pretrained(tmp_path)
    assert PREFIX not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_rows_of_padding_only_do_not_exist_but_idle_ones_do():
    batch = to_tensors([row(2, 1, 0.0, weight=0.0)], pad_token=0)
    plain, flat = LogProbs(tiny("qwen2"), 1.0, flat=False), LogProbs(tiny("qwen2"), 1.0)
    torch.testing.assert_close(flat(batch).logprobs_BT, plain(batch).logprobs_BT)
    assert replace(batch).first_B.tolist() == [0]
