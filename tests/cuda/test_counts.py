"""A decode step and an update ask no more of the card than they did."""

import json
from pathlib import Path

from tests.cuda.conftest import on_card

TABLE = json.loads((Path(__file__).parent / "counts.json").read_text())


def test_launches_copies_and_synchronisations_do_not_rise():
    found = json.loads(on_card(["-m", "tests.cuda.counting"], check=True).stdout)
    more = {(name, what) for name in TABLE for what in TABLE[name] if found[name][what] > TABLE[name][what]}
    assert not more, f"{found}\nwhere this has a reason: tests/cuda/python.sh -m tests.cuda.counting"
    replays = [counted for name, counted in found.items() if name.startswith("captured")]
    assert {(one["graph_launches"], one["copies"], one["synchronisations"]) for one in replays} == {(1, 0, 0)}
