"""The emulation is honest: what would fail on a card fails here, and what cannot be computed is not passed over."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda.stub.library import counted
from tests.rollout.test_decoder import SOME, adapted, family, prompts, sampling, tokens_of, turns
from trainer.rollout.decoder.cuda_graphs import DecodeStep
from trainer.rollout.decoder.sampler import DecodeSampler


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_and_its_gradients(causal):
    torch.manual_seed(0)
    q_BHTD, k_BKTD, v_BKTD = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    mask = None if causal else torch.rand(2, 1, 8, 8) > 0.3

    def results(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.to(device, dtype).requires_grad_() for x in (q_BHTD, k_BKTD, v_BKTD)]
        q, k, v = inputs[0], *(x.repeat_interleave(2, dim=1) for x in inputs[1:])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else mask.to(device), is_causal=causal
        )
        out.square().sum().backward()
        return [out.detach().cpu().float(), *(x.grad.cpu().float() for x in inputs)]

    for found, wanted in zip(results("cuda", torch.half), results("cpu", torch.float)):
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("places", [lambda x, rows: x.index_select(0, rows), lambda x, rows: x[rows]])
def test_the_gradient_of_an_index_is_written_in_place_as_it_is_without_a_mode(places):
    x, rows = numbers(1.0, 2.0, 3.0).requires_grad_(), torch.tensor([2, 0, 2], device="cuda")
    found, gradient = places(x, rows), numbers(1.0, 2.0, 3.0)
    before = counted()["copies"]
    found.backward(gradient)
    assert counted()["copies"] == before
    assert x.grad.tolist() == [2.0, 0.0, 4.0]


def test_an_operation_without_a_counterpart_fails():
    @torch.library.custom_op("octet_tests::on_cards_only", mutates_args=(), device_types="cuda")
    def on_cards_only(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with pytest.raises(Exception, match="on_cards_only has no counterpart on the CPU"):
        on_cards_only(numbers(1.0))


def test_a_kernel_outside_of_an_operation_fails():
    x = numbers(1.0)
    with _disable_current_modes(), pytest.raises(RuntimeError, match="operation not supported"):
        x + 1


def test_tensors_of_two_devices_raise():
    with pytest.raises(RuntimeError, match="same device"):
        numbers(1.0) + torch.ones(3)


# --- graphs


def captured(work) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def test_a_stale_pointer_changes_the_answer():
    y, weights = numbers(0.0), [torch.full([1024], 2.0, device="cuda")]
    graph = captured(lambda: y.copy_(weights[0].mean().view(1)))
    graph.replay()
    assert y.item() == 2.0
    address = weights.pop().data_ptr()
    others = torch.full([1024], 5.0, device="cuda")
    assert others.data_ptr() == address
    graph.replay()
    assert y.item() == 5.0, "a replay reads what lies at the address now"


def test_random_numbers_of_replays_are_those_of_the_same_steps():
    generator, found = torch.Generator("cuda"), numbers(0.0)

    def draw() -> None:
        found.copy_(torch.rand(1, device="cuda", generator=generator))

    def three(again: Callable[[], None]) -> list[float]:
        generator.manual_seed(1)
        drawn = []
        for step in (draw, again, again):
            step()
            drawn.append(found.item())
        return drawn

    one_by_one, graph = three(draw), torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        draw()
    assert three(graph.replay) == one_by_one
    assert len(set(one_by_one)) == 3


@pytest.mark.parametrize("broken", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x[x > 0], torch.nonzero])
def test_a_step_that_waits_for_the_card_breaks_its_capture(broken):
    x, said = numbers(1.0), []
    decode = DecodeStep(torch.device("cuda"), said.append)
    for _ in range(3):
        decode(lambda rows, width: broken(x), 1, 1, 256, 256)
    assert not decode._graphs
    assert "cannot be captured" in said[0]
    assert (x + 1).item() == 2.0, "the card goes on"


def test_steps_are_captured_again_when_the_weights_have_moved():
    x, said, kept = numbers(1.0), [], []  # a library keeps its workspace, whose memory is of the first capture
    decode = DecodeStep(torch.device("cuda"), said.append)
    for address in (1, 2):
        decode.depends_on = (address,)
        for rows in (1, 1, 2, 2):
            decode(lambda rows, width: kept.append(x.add_(x.sum()) + 1), rows, 2, 256, 256)
        assert len(decode._graphs) == 2
    assert not said


@pytest.mark.parametrize("weights", ["same", "int8"])
def test_captured_decode_steps_give_the_tokens_of_the_cpu(weights, tokenizer):
    fast = DecodeSampler(adapted(family()).cuda(), turns(tokenizer, SOME), 8, weights=weights)
    found = dict(fast.sample(prompts(9, 3), sampling(group=4, max_new_tokens=40)))
    on_cpu = DecodeSampler(adapted(family()), turns(tokenizer, SOME), 8, weights=weights)
    assert tokens_of(found) == tokens_of(dict(on_cpu.sample(prompts(9, 3), sampling(group=4, max_new_tokens=40))))
    assert fast.batch.decode_step._graphs


def test_a_mask_on_the_cpu_raises_in_a_decode_step(tokenizer):
    fast = DecodeSampler(adapted(family()).cuda(), turns(tokenizer, SOME), 8)
    dict(fast.sample(prompts(9, 3), sampling(group=4, max_new_tokens=2)))
    batch = fast._prepare(8, 9, sampling(group=4, max_new_tokens=2))
    batch.mask_RT = batch.mask_RT.cpu()
    with pytest.raises(RuntimeError, match="device"), torch.inference_mode():
        batch._step(8, 16)
