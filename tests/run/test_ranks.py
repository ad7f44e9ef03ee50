"""Ranks change nothing: the same global batch through the real loop on one rank and on two, with every engine."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.loops import DEAD_STEP, PROBLEMS
from tests.forks import forked
from tests.run_on_ranks import start_ranks
from trainer.config.settings import Model
from trainer.machine.hardware import free_port
from trainer.model.load import load_model

SOME = ("zero2", "zero2_offload", "zero3", "zero3 whole")
REST = ("zero1", "zero3_offload", "zero2 whole")
SAMPLED, PENALISED = "zero2 sampled", "zero3 penalised"
NEEDED = {"quick": (*SOME, SAMPLED), "slow": ("zero2", "zero3 whole", *REST, PENALISED)}  # by the tests of a tier
CASES = (*SOME, SAMPLED, *(pytest.param(case, marks=pytest.mark.slow) for case in (*REST, PENALISED)))


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiers) -> dict[int, dict]:
    """The results of one rank and of two, by case; the three processes run at the same time."""
    folder = tmp_path_factory.mktemp("loops")
    cases = sorted({case for tier in tiers for case in NEEDED[tier]})
    forked()  # starts the server, before there are threads
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda world: start_ranks(world, "-m", "tests.e2e.loops", folder, *cases), (1, 2)))
    return {world: json.loads((folder / f"{world}.json").read_text()) for world in (1, 2)}


def flat(result: dict) -> torch.Tensor:
    return torch.tensor([value for values in result["learned"].values() for value in values], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_does(results, case):
    one, two = (flat(results[world][case]) for world in (1, 2))
    assert (one - two).abs().max() <= 3e-6


@pytest.mark.parametrize(
    "case", [*SOME[:-1], *(pytest.param(case, marks=pytest.mark.slow) for case in (*REST, "zero3 whole"))]
)
def test_every_engine_trains_the_same(results, case):
    same = results[1]["zero2" + case.removeprefix(case.partition(" ")[0])]
    assert (flat(same) - flat(results[1][case])).abs().max() <= 3e-6


def test_the_rank_with_the_most_memory_is_logged(results):
    (one, two) = (set(results[world]["zero2"]["fullest"]) for world in (1, 2))
    assert (one, two <= {0, 1}) == ({None}, True)


def test_what_is_trained_has_moved(results):
    """So that what is the same above is not the same because nothing happened."""
    started = {name: value for name, value in results[1]["zero2"]["learned"].items() if "lora_B" in name}
    assert max(max(map(abs, values)) for values in started.values()) > 1e-4  # from zero
    original = load_model(Model(name="nano"), "fp32", torch.device("cpu")).state_dict()
    whole = results[1]["zero3 whole"]["learned"]
    assert all(torch.tensor(values).sub(original[name].flatten()).abs().max() > 1e-5 for name, values in whole.items())


@pytest.mark.parametrize("case", CASES)
def test_what_is_logged_is_of_all_ranks(results, case):
    """Sums over sums: means of the two ranks' means would be others, because their answers are of unequal length."""
    one, two = (results[world][case]["metrics"] for world in (1, 2))
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, rel=1e-5, abs=1e-6 if case != SAMPLED else 1e-5)  # how far samplers round


@pytest.mark.slow
def test_a_hostfile_starts_a_rank_on_each_node(tmp_path):
    """The launcher is started on both nodes by hand, without ssh."""
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    launcher = [f"{sys.prefix}/bin/deepspeed", f"--hostfile={tmp_path / 'hosts'}", "--no_ssh", "--no_local_rank"]
    launcher += ["--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    few = ["run.steps=1", "rollout.problems=2", "rollout.group_size=2", "eval.problems=0", "run.merge=false"]
    run = [str(ROOT / "train.py"), "--preset", "nano", *few, f"run.dir={tmp_path / 'run'}"]
    own = os.environ | {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    start = {"cwd": tmp_path, "env": own, "stdout": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen([*launcher, f"--node_rank={node}", *run], **start) for node in (0, 1)]
    try:
        said = [node.communicate(timeout=580)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    assert "1 step of 2 x 2 answers on 2 x cpu" in said[0]
    assert "answers on" not in said[1]  # of two ranks one speaks


def test_the_second_rank_had_nothing_to_train_on_in_one_step(results):
    """So that what is compared above has the cases in it that go wrong."""
    lines = results[2]["zero2"]["metrics"]
    assert [line["dead_groups"] for line in lines] == [0, 0.5, 0]
    assert lines[DEAD_STEP]["groups"] == PROBLEMS
    assert lines[-1]["eval/problems"] == 7
