"""What NCCL says is kept until an error needs it. It writes the file itself, on GPUs; here the tests do."""

import os
from pathlib import Path

import pytest

from trainer.ranks.nccl_log import NCCL_PARTS, NcclLog

INFO = "node2:41:90 [0] NCCL INFO NET/Socket : Using [0]ib0:10.0.0.2<0>"
WARN = "node2:41:90 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error"


@pytest.fixture
def log(monkeypatch, tmp_path):
    """A log where the user has set none of NCCL's variables; temporary files go into a folder of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "to be deleted at the end")
        monkeypatch.delenv(name)
    yield (log := NcclLog())
    log.stop()


def write(*lines: str) -> Path:
    """Write a log as NCCL does; `%p` is the process."""
    file = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    file.write_text("".join(f"\n{line}\n" if " WARN " in line else f"{line}\n" for line in lines))
    return file


INFOS = [f"{INFO} {number}" for number in range(20)]
WARNINGS = [f"{WARN} {number}" for number in range(30)]


@pytest.mark.parametrize(
    ("written", "shown"),
    [([*INFOS[:10], WARN, *INFOS[10:]], [WARN, *INFOS[-7:]]), ([INFO, *WARNINGS, INFO], WARNINGS[-8:])],
    ids=["warnings are first", "many warnings leave no room for the rest"],
)
def test_its_last_words_are_shown(log, written, shown):
    log.start()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"], log.excerpt()) == ("INFO", NCCL_PARTS, "")
    file = write(*written)
    head, *lines = log.excerpt().splitlines()
    assert str(file) in head
    assert [line.strip() for line in lines] == shown


def test_a_file_that_an_error_has_named_stays_and_another_goes(log, tmp_path):
    log.start()
    write(INFO)
    log.stop()
    assert list(tmp_path.iterdir()) == []
    log.start()
    file = write(WARN)
    assert log.excerpt()
    log.stop()
    assert file.read_text().strip() == WARN
    assert not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & set(os.environ)


@pytest.mark.parametrize("chosen", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_what_somebody_has_chosen_is_left_alone(log, tmp_path, monkeypatch, chosen):
    monkeypatch.setenv(chosen, "WARN")
    log.start()
    assert os.environ[chosen] == "WARN"
    assert len({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"} & set(os.environ)) == 1
    assert (log.excerpt(), list(tmp_path.iterdir())) == ("", [])


def test_parts_that_somebody_has_chosen_stay(log, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "ALL")
    log.start()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "ALL")
