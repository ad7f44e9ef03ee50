"""Ranks change nothing: the same global batch through the real loop on one rank and on two, with every engine."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.loops import DEAD_STEP, PROBLEMS

ENGINES = ("zero1", "zero2", "zero2_offload")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict]:
    """Of one rank and of two, by engine; the three processes run at the same time."""
    folder = tmp_path_factory.mktemp("loops")
    command = [sys.executable, "-m", "tests.e2e.loops", str(folder), *ENGINES]
    ranks = []
    for world in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        for rank in range(world):
            own = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.DEVNULL))
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0, 0]
    return {world: json.loads((folder / f"{world}.json").read_text()) for world in (1, 2)}


def flat(result: dict) -> torch.Tensor:
    return torch.tensor([value for values in result["adapter"].values() for value in values], dtype=torch.float64)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_train_the_adapter_of_one(results, engine):
    one, two = (flat(results[world][engine]) for world in (1, 2))
    assert (one - two).abs().max() <= 1e-6
    moved = max(
        max(map(abs, values)) for name, values in results[1][engine]["adapter"].items() if "lora_B" in name
    )  # from zero
    assert moved > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_the_same_adapter(results, engine):
    assert (flat(results[1]["zero2"]) - flat(results[1][engine])).abs().max() <= 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_logged_is_of_all_ranks(results, engine):
    """Sums over sums: means of the two ranks' means would be others, because their answers are of unequal length."""
    one, two = (results[world][engine]["metrics"] for world in (1, 2))
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-5, abs=1e-6)


def test_the_second_rank_had_nothing_to_train_on_in_one_step(results):
    """So that what is compared above has the cases in it that go wrong."""
    lines = results[2]["zero2"]["metrics"]
    assert [line["dead_groups"] for line in lines] == [0, 0.5, 0]
    assert lines[DEAD_STEP]["groups"] == PROBLEMS
    assert lines[-1]["eval/problems"] == 7
