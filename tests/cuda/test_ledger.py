"""What an operation costs: bytes, arithmetic and launches, as counted from its tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.cuda.ledger import Ledger, Operation

BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def operations(work: Callable[[], Any]) -> list[Operation]:
    ledger = Ledger()
    with ledger, ledger.counting("work"):
        work()
    return list(ledger.counts["work"].operations.elements())


def test_a_matmul_reads_its_inputs_and_writes_its_output():
    a, b = torch.zeros(4, 8, **BF16), torch.zeros(8, 16, **BF16)
    (found,) = operations(lambda: a @ b)
    assert found[:5] == ("mm", 2 * (4 * 8 + 8 * 16 + 4 * 16), 2 * 4 * 8 * 16, False, 1)


def test_a_product_in_place_costs_what_it_does_elsewhere():
    a, b, total = torch.zeros(4, 8, **BF16), torch.zeros(8, 16, **BF16), torch.zeros(4, 16, **BF16)
    beside = torch.empty_like(total)
    for work in (lambda: total.addmm_(a, b), lambda: torch.mm(a, b, out=beside)):
        assert [one.flops for one in operations(work)] == [2 * 4 * 8 * 16]
    assert [one.bytes for one in operations(work)] == [2 * (4 * 8 + 8 * 16 + 4 * 16)]


def test_composite_operations_are_taken_apart_where_no_gradient_is_recorded():
    with torch.inference_mode():
        x, weight = torch.zeros(4, 8, **BF16), torch.zeros(16, 8, **BF16)
        assert [one.name for one in operations(lambda: F.linear(x, weight))] == ["mm"]


def test_operations_with_a_kernel_of_their_own_stay_whole():
    x = torch.zeros(4, device="cuda")
    assert [one.name for one in operations(lambda: torch.ops.aten.silu_backward(x, x))] == ["silu_backward"]


def test_views_cost_nothing_and_a_lookup_reads_what_it_returns():
    table, rows = torch.zeros(1000, 8, device="cuda"), torch.arange(3, device="cuda")
    assert operations(table[2:].t) == []
    (found,) = operations(lambda: F.embedding(rows, table))
    assert found.bytes == 2 * (3 * 8 * 4) + 3 * 8


def test_writing_into_a_tensor_reads_it_unless_all_of_it_is_replaced():
    x, row = torch.zeros(4, 8, device="cuda"), torch.zeros(8, device="cuda")
    assert [one.bytes for one in operations(lambda: x.add_(row))] == [4 * (32 + 8 + 32)]
    assert [one.bytes for one in operations(lambda: x.copy_(row.expand(4, 8)))] == [4 * (8 + 32)]


def test_a_replay_counts_what_was_captured_as_one_launch():
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    ledger = Ledger()
    with ledger:
        with torch.cuda.graph(graph):
            x.add_(1)
        with ledger.counting("replays"):
            graph.replay()
            graph.replay()
    (operation,) = ledger.counts["replays"].operations
    assert operation.captured
    assert ledger.counts["replays"].operations[operation] == 2
    assert ledger.counts["replays"].counters["graph_launches"] == 2
    assert x.tolist() == [2.0] * 4
