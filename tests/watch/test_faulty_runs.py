"""Real runs that are broken in one way raise the alarm of that fault and no wrong one; healthy ones raise none.

All of them are in docs/troubleshooting.md, from `python -m tests.e2e.faulty_runs`; these are some of each kind, and the
broken ones end a few steps after their alarm.
"""

import json

import pytest

from tests.conftest import launch
from tests.e2e.faulty_runs import FAULTS, HEALTHY
from tests.forks import forked

SOME = {"rate x 1/1000": 8, "temperature 0.05": 8, "reward inverted": 12, "reward is the length": 8, "stale sampler": 8}
SOME_HEALTHY = ("seed 0", "dapo")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    broken = [f"{name}={steps}" for name, steps in SOME.items()]
    launch(*forked(), "-m", "tests.e2e.faulty_runs", folder, *broken, *SOME_HEALTHY, check=True, timeout=600)
    return json.loads((folder / "alarms.json").read_text())


@pytest.mark.parametrize("fault", SOME)
def test_a_broken_run_is_named_by_its_own_alarm_and_no_wrong_one(found, fault):
    _, expected, _ = FAULTS[fault]
    assert expected[0] in found[fault]
    assert {*found[fault]} <= {*expected}


@pytest.mark.parametrize("run", SOME_HEALTHY)
def test_a_healthy_run_is_left_alone(found, run):
    assert run in HEALTHY
    assert found[run] == {}
