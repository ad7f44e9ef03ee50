"""Which card is this rank's, and who is the first on its node."""

import os

import pytest
import torch

from tests.conftest import refuses
from tests.run_on_ranks import on_ranks
from trainer.errors import ClusterError
from trainer.ranks import distributed
from trainer.ranks.watchdog import Ranks


@pytest.fixture
def cards(monkeypatch):
    """A process that sees so many cards, as torch would say it."""
    taken = []
    for name in ("DS_ACCELERATOR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)

    def see(count: int, local_rank: str) -> list:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        return taken

    return see


@pytest.mark.parametrize("here", ["", "4"])
@pytest.mark.parametrize(
    ("count", "local_rank", "card"),
    [(1, "3", 0), (4, "3", 3), (8, "1", 1)],  # --gpus-per-task=1; all tasks see as many cards, or more
)
def test_deepspeed_is_told_a_card_that_this_process_sees(cards, monkeypatch, count, local_rank, card, here):
    """It calls set_device(LOCAL_RANK). Each of the ranks here has a card."""
    taken = cards(count, local_rank)
    if here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    distributed.take_card()
    assert os.environ["LOCAL_RANK"] == str(card)
    assert taken == [torch.device("cuda", card)]
    distributed.take_card()  # and stays with it
    assert distributed.device() == torch.device("cuda", card)


def test_ranks_that_would_share_a_card_are_refused(cards, monkeypatch):
    taken = cards(2, "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with refuses("LOCAL_WORLD_SIZE", ClusterError, names="--num_gpus"):
        distributed.take_card()
    assert not taken


def test_on_the_cpu_the_number_stays(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    distributed.take_card()
    assert os.environ["LOCAL_RANK"] == "3"
    assert distributed.device() == torch.device("cpu")


@pytest.mark.parametrize(("mine", "first"), [(0, True), (1, True), (2, False), (3, False)])
def test_one_rank_of_each_node_is_its_first(monkeypatch, mine, first):
    """Whatever number its card has."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(distributed._connection, "ranks", Ranks(None, mine, ["node1", "node2", "node1", "node2"]))
    assert distributed.is_first_here() == first


GATHER = """
import json
from math import inf
from trainer.errors import DataError
from trainer.ranks import distributed
distributed.connect(60)
own = distributed.rank()
items = [{"of": own, "text": "\\u20ac\\ud800" * own, "numbers": [0.1 + own, -0.0, inf], "none": None}, "", (own, True)]
print([distributed.gather(item) for item in items], distributed.on_main(lambda: own + 7))
def fail():
    raise DataError("no such record")
try:
    distributed.on_main(fail)
except DataError as error:
    print(error, error.is_of_all)
"""


def test_every_rank_gets_the_items_and_errors_of_all_ranks():
    numbers = [[0.1 + own, -0.0, float("inf")] for own in range(3)]
    of = [{"of": own, "text": "\u20ac\ud800" * own, "numbers": numbers[own], "none": None} for own in range(3)]
    items = [of, ["", "", ""], [[0, True], [1, True], [2, True]]]
    assert on_ranks(3, GATHER) == [f"{items} 7\nno such record True"] * 3


ATTACK = """
import sys
import torch.distributed as dist
from tests.conftest import Opens
from trainer.ranks import distributed
distributed.connect(60)
try:
    distributed.gather("mine") if distributed.is_main() else dist.all_gather_object([None] * 2, Opens(sys.argv[1]))
except ValueError as error:
    print(type(error).__name__)
"""


def test_what_a_rank_sends_is_never_run(tmp_path):
    assert on_ranks(2, ATTACK, str(tmp_path / "made"))[0] == "UnicodeDecodeError"
    assert [*tmp_path.iterdir()] == []


def test_the_groups_that_deepspeed_makes_wait_as_long_as_the_settings_say(alone):
    """This process has connected with 580 seconds."""
    made = torch.distributed.new_group()._get_backend(torch.device("cpu"))
    assert made.options._timeout.seconds == 580
