"""Signals at every moment of a real run: nothing is lost, the next start comes to the end, and it is the same end."""

import json

import pytest

from tests.conftest import launch
from tests.e2e import chaos
from tests.e2e.interrupted import RUNS
from tests.forks import forked
from trainer.ranks import signal_handlers

STOPPED = "octet: stopped after step {}, which is saved: SIGUSR1 was received."
IN_THE_EVALUATION = "octet: stopped in the evaluation after step {}, which is saved: SIGUSR1 was received."


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    launch(*forked(), "-m", "tests.e2e.interrupted", folder, check=True)
    return folder, json.loads((folder / "starts.json").read_text())


STATUSES = {"undisturbed": [0], "early": [75, 75, 0], "best": [75, 0], "merge": [75, 0], "time limit": [75, 0]}
STATUSES |= {"last evaluation": [75, 0]}  # a start that makes no step goes to the end, or it would go on for ever
STATUSES |= {"signals": [130, 130, 0], "Ctrl-C": [130, 130, 130, 0]}


@pytest.mark.parametrize("run", RUNS)
def test_each_start_ends_as_it_should(runs, run):
    found = runs[1][run]
    assert [status for status, _ in found] == STATUSES[run], found
    assert "Traceback" not in "".join(said for _, said in found)


def test_before_the_first_step_one_step_is_made_and_saved(runs):
    """So that a limit that is too short does not start the run for ever. Its evaluation is left to the next start."""
    first, second, _ = (said for _, said in runs[1]["early"])
    assert STOPPED.format(1) in first
    assert "after step 1: " not in first
    assert second.index("after step 1: ") < second.index(STOPPED.format(2))


def test_an_evaluation_is_ended_at_once_and_only_it_is_done_again(runs):
    (_, first), (_, second) = runs[1]["last evaluation"]
    assert IN_THE_EVALUATION.format(2) in first
    assert "after step 2: " not in first
    assert "all 2 steps done" in second
    assert "after step 2: " in second
    (_, first), (_, second) = runs[1]["best"]  # whose export is a part of the evaluation
    assert (IN_THE_EVALUATION.format(1) in first, "after step 1: " in second) == (True, True)
    (_, first), (_, second) = runs[1]["time limit"]  # without time for it, it is not begun
    assert "octet: stopped after step 1, which is saved: the time limit" in first
    assert ("after step 1: " in first, "after step 1: " in second) == (False, True)
    assert "the merge is left to the next start" in runs[1]["merge"][0][1]


def test_a_checkpoint_is_finished_before_a_signal_ends_the_run(runs):
    """The second start makes its first step after that of the first one."""
    for step, (_, said) in zip((1, 2), runs[1]["signals"]):
        assert f"octet: stopped. --resume {runs[0] / 'signals'} continues after step {step}, which is saved." in said
    assert "continuing after step 1" in runs[1]["signals"][1][1]


def test_ctrl_c_finishes_the_step_and_saves_it(runs):
    first = runs[1]["Ctrl-C"][0][1]
    going = signal_handlers.AFTER_THIS_STEP
    saved = f"octet: stopped. --resume {runs[0] / 'Ctrl-C'} continues after step 1, "
    assert first.index(going) < first.index("\n1/2  rollout") < first.index(saved)
    assert saved.replace("step 1", "step 2") in runs[1]["Ctrl-C"][2][1]  # all that is left is the end


@pytest.mark.parametrize("run", [name for name in RUNS if name != "undisturbed"])
def test_it_ends_as_the_undisturbed_run(runs, run):
    assert chaos.differences(runs[0] / run, chaos.result(runs[0] / "undisturbed")) == []
