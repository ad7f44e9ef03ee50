"""A line of tokens gives what padded rows give, value and gradient, and nothing else is taken for one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.conftest import row
from tests.rollout.test_decoder import FAMILIES, family
from trainer.batch.pack import to_tensors
from trainer.config.settings import Lora
from trainer.loss import shared_prefix
from trainer.loss.logprobs import LogProbs
from trainer.loss.shared_prefix import FLAT, layout_of, make_flat
from trainer.model.lora import add_adapter
from trainer.records import TrainingRow


def answer(prompt: tuple[int, ...], *tokens: int, advantage: float = 1.0) -> TrainingRow:
    return TrainingRow(prompt, tokens, (-1.0,) * len(tokens), advantage)


# Answers to one prompt that begin alike, one that is the beginning of another, the same one twice; a prompt that begins
# like the first; one that stands alone, and has one token.
ROWS = [
    answer((5, 6, 7, 8), 20, 21, 22, 23, 2),
    answer((5, 6, 7, 8), 20, 21, 30, 2, advantage=-1.0),
    answer((5, 6, 7, 8), 20, 21, 22, advantage=0.5),
    answer((5, 6, 7, 8), 20, 21, 30, 2, advantage=-0.25),
    answer((5, 6, 9), 40, 41, 2, advantage=2.0),
    answer((5, 6, 9), 50, 2, advantage=-2.0),
    row(1, 1, 2.0, first=60),
]
# Longer than the windows of the families that have one.
LONG = [answer(tuple(range(3, 16)), *range(20, 34))]
LONG += [answer(tuple(range(3, 16)), *range(20, 29), *range(50, 60), advantage=-1.0)]


def test_gradients_of_a_token_that_is_read_often_are_added_in_fp32():
    layout = layout_of(to_tensors([answer((5, 6), *tail) for tail in ((7, 2), (8, 2), (9, 2))], pad_token=0))
    line_NHD = torch.randn(len(layout.source_N), 2, 4, dtype=torch.bfloat16, requires_grad=True)
    _, read = layout.rows(line_NHD, layout.keys_AK, layout.keys_N)
    gradient = torch.randn_like(read)
    exact_NHD = line_NHD.detach().float().requires_grad_()
    expected = exact_NHD[layout.keys_AK]
    assert torch.equal(read.float(), expected)
    (found,) = torch.autograd.grad(read, line_NHD, gradient)
    (wanted,) = torch.autograd.grad(expected, exact_NHD, gradient.float())
    assert torch.equal(found, wanted.bfloat16())


def tiny(kind: str, dtype=torch.float32, **options):
    return family(kind, **options).to(dtype)


def adapted(kind: str, checkpointing: bool):
    model = tiny(kind)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model = add_adapter(model, Lora(targets="all", r=4))
    with torch.no_grad():
        for number, (name, value) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                value.copy_(0.1 * torch.sin(torch.arange(value.numel()) * (1 + number)).view_as(value))
    return model.train()


def pass_over(module):
    batch = to_tensors([*ROWS, *LONG], pad_token=0)
    module.zero_grad()
    scores = module(batch)
    (scores.logprobs_BT.sum(dim=1) * batch.advantages_B + scores.entropy_BT.sum(dim=1)).sum().backward()
    gradients = [value.grad.clone() for value in module.parameters() if value.requires_grad]
    return [scores.logprobs_BT.detach(), scores.entropy_BT.detach(), *gradients]


@pytest.mark.parametrize("kind", FAMILIES)
def test_values_and_gradients_are_those_of_padded_rows(kind):
    """In fp64, where layers differ by rounding in fp32 alone: random weights of Gemma 4 enlarge that tenfold."""
    plain, *others = (
        LogProbs(adapted(kind, checkpointing).double(), 0.7, train_entropy=True, flat=is_flat)
        for is_flat in (False, True)
        for checkpointing in (False, True)
    )
    assert [plain.is_flat, *(other.is_flat for other in others)] == [False, False, True, True]
    for expected, *results in zip(*map(pass_over, (plain, *others)), strict=True):
        largest = max(1.0, float(expected.abs().max()))  # these sums are not divided by anything
        for found in results:
            torch.testing.assert_close(found / largest, expected / largest, atol=1e-5, rtol=0)


def test_repeated_keys_give_the_same_values_and_gradients(monkeypatch):
    """As on cards whose quick kernels want as many heads of keys as of queries."""
    module = LogProbs(adapted("llama", checkpointing=False), 0.7, train_entropy=True)
    expected = pass_over(module)
    monkeypatch.setattr(shared_prefix, "needs_repeated_keys", lambda device, dtype: True)
    torch.testing.assert_close(pass_over(module), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "layer"), [("qwen2", "mlp"), ("lfm2", "conv.in_proj"), ("qwen3.5", "linear_attn.in_proj_qkv")]
)
def test_layers_and_output_see_every_token_once(kind, layer):
    module, seen = LogProbs(tiny(kind), 1.0), []
    for part in (module.model.model.layers[0].get_submodule(layer), module.output):
        part.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].numel() // 32))
    module(to_tensors(ROWS, pad_token=0))
    prompts = [5, 6, 7, 8, 9, 60]
    answers = [20, 21, 22, 23, 30, 40, 41, 50]  # a last token is no input, but 22 is the last of one answer only
    assert seen == [len(prompts) + len(answers), 5 + 2 + 3 + 2 + 1]  # 20 21 22 23 2; 30 2; 40 41 2; 50 2; 67


def test_sampling_is_not_disturbed():
    plain, flat = tiny("qwen2").eval(), tiny("qwen2").eval()
    assert make_flat(flat)
    assert make_flat(tiny("qwen2", dtype=torch.bfloat16)), "it is exact enough"
    asked = {"inputs": torch.tensor([[0, 5, 6], [7, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    answers = [model.generate(**asked, max_new_tokens=8, do_sample=False) for model in (plain, flat)]
    assert torch.equal(*answers)


# Falcon does not hand the layout on, and Blenderbot counts positions itself.
SMALL_BOT = {"decoder_layers": 1, "decoder_attention_heads": 2, "init_std": 0.001, "dropout": 0.0}
OTHERS = [("gemma2", {}), ("falcon", {}), ("blenderbot-small", SMALL_BOT), ("qwen2", {"attn_implementation": "eager"})]


@pytest.mark.parametrize(("kind", "own"), OTHERS)
def test_attention_that_knows_no_layout_stays_as_it_is(kind, own):
    model = family(kind, **own)
    before = model.config._attn_implementation
    assert not make_flat(model)
    assert model.config._attn_implementation == before


def test_an_attention_that_computes_something_else_is_found_out(monkeypatch):
    def wrong(batch):
        right = layout_of(batch)
        return right._replace(keys_N=right.keys_N.roll(1))

    monkeypatch.setattr(shared_prefix, "layout_of", wrong)
    assert not make_flat(tiny("qwen2"))


def test_a_saved_model_says_nothing_of_it(tmp_path):
    model = tiny("qwen2")
    assert make_flat(model)
    model.save_pretrained(tmp_path)
    assert FLAT not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=5)


@given(st.lists(st.tuples(st.integers(0, 2), TOKENS), min_size=1, max_size=8))
def test_any_rows_come_back_as_they_were(drawn):
    """Each place in the line holds its token, behind the same beginning."""
    prompts = [(5,), (5, 1), (5, 1, 2)]
    rows = [answer(prompts[which], *tokens) for which, tokens in drawn]
    batch = to_tensors(rows, pad_token=0)
    tree, inputs_N = batch.tree, batch.inputs_BT.flatten()
    assert torch.equal(inputs_N[tree.line_N][tree.place_BT][batch.present_BT], batch.inputs_BT[batch.present_BT])
    targets = batch.targets_BT.flatten()[tree.edge_E][tree.edge_BT]
    assert torch.equal(targets[batch.mask_BT], batch.targets_BT[batch.mask_BT])
    beginnings = {(*one.prompt, *one.completion)[:end] for one in rows for end in range(1, one.length)}
    assert len(tree.line_N) == len(beginnings)
    layout = layout_of(batch)
    assert len(layout.prompts_PT) == len({one.prompt for one in rows}), "a prompt stands there once"
    assert len(layout.answers_AC) <= len({(one.prompt, one.completion) for one in rows}), "and so does an answer"
    together = torch.cat([layout.prompts_PT.flatten(), layout.answers_AC.flatten()])
    assert together[layout.source_N].tolist() == list(range(len(tree.line_N)))
    assert torch.equal(layout.with_tokens_before(2)[0][:, 2:], layout.answers_AC)
    prompt_A1, width, longest = layout.prompt_A[:, None], layout.prompts_PT.shape[1], layout.answers_AC.shape[1]
    query_AC, own = prompt_A1 + torch.arange(longest), torch.arange(width).expand(len(prompt_A1), -1)
    behind_ACK = query_AC[:, :, None] - torch.cat([own, query_AC], dim=1)[:, None]
    is_key_AK = torch.cat([own < prompt_A1, torch.ones_like(query_AC, dtype=torch.bool)], dim=1)
    for window in (1, 2, 3, 5, 99):
        seen_ACK = layout.mask(window, torch.empty(0))[:, 0] == 0
        assert torch.equal(seen_ACK, is_key_AK[:, None] & (behind_ACK >= 0) & (behind_ACK < window))
