"""What NCCL says is kept until an error needs it. It writes the file itself, on GPUs; here the tests do."""

import os
from pathlib import Path

import pytest

from trainer.ranks import nccl_log

INFO = "node2:41:90 [0] NCCL INFO NET/Socket : Using [0]ib0:10.0.0.2<0>"
WARN = "node2:41:90 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """As if nobody had chosen anything; temporary files go into a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "to be deleted at the end")
        monkeypatch.delenv(name)
    yield
    nccl_log._needed.clear()
    nccl_log.forget()


def write(*lines: str) -> Path:
    """As NCCL does: `%p` is the process."""
    file = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    file.write_text("".join(f"\n{line}\n" if " WARN " in line else f"{line}\n" for line in lines))
    return file


def test_its_last_words_are_shown_with_the_warnings_first(tmp_path):
    nccl_log.listen()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", nccl_log.PARTS)
    infos = [f"{INFO} {number}" for number in range(20)]
    file = write(*infos[:10], WARN, *infos[10:])
    head, *shown = nccl_log.said().splitlines()
    assert str(file) in head
    assert [line.strip() for line in shown] == [WARN, *infos[-7:]]


def test_many_warnings_leave_no_room_for_the_rest():
    nccl_log.listen()
    write(INFO, *[f"{WARN} {number}" for number in range(30)], INFO)
    shown = nccl_log.said().splitlines()[1:]
    assert [line.strip() for line in shown] == [f"{WARN} {number}" for number in range(22, 30)]


def test_a_file_that_an_error_has_named_stays_and_another_goes(tmp_path):
    nccl_log.listen()
    write(INFO)
    nccl_log.forget()
    assert list(tmp_path.iterdir()) == []
    nccl_log.listen()
    file = write(WARN)
    assert nccl_log.said()
    nccl_log.forget()
    assert file.read_text().strip() == WARN
    assert not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & set(os.environ)


@pytest.mark.parametrize("chosen", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_what_somebody_has_chosen_is_left_alone(tmp_path, monkeypatch, chosen):
    monkeypatch.setenv(chosen, "WARN")
    nccl_log.listen()
    assert os.environ[chosen] == "WARN"
    assert len({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"} & set(os.environ)) == 1
    assert (nccl_log.said(), list(tmp_path.iterdir())) == ("", [])


def test_parts_that_somebody_has_chosen_stay(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    nccl_log.listen()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "ALL")


def test_when_it_has_said_nothing_nothing_is_shown():
    nccl_log.listen()
    assert nccl_log.said() == ""
