"""The ranks find each other, and one that is missing is named: ranks as threads, and once as processes over gloo."""

import os
import re
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from tests.conftest import ROOT, refuses
from tests.forks import forked
from tests.run_on_ranks import on_ranks, started
from trainer.errors import ClusterError, Interrupted, LostRank
from trainer.machine.hardware import free_port
from trainer.ranks import distributed, stores, watchdog
from trainer.ranks.watchdog import Ranks


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


PROCESSES = pytest.mark.parametrize("address", ["files", slow("TCP")], indirect=True)


@pytest.fixture
def files(monkeypatch, tmp_path) -> Path:
    """The folder in which the ranks of one machine meet."""
    monkeypatch.setenv("OCTET_RANKS", str(tmp_path / "ranks"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return tmp_path / "ranks"


@pytest.fixture(params=["files", "TCP"])
def address(files, monkeypatch, request) -> None:
    """Ranks on one machine, which use files, or some that each think they are alone on theirs."""
    if request.param == "TCP":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def patient(monkeypatch):
    """No rank of the test is missing, so however slow the machine is, the others wait for its words."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 60.0)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_S", 2.0)


def together(rank_does, ranks=(0, 1, 2)) -> list:
    """Return what each rank returns or raises."""

    def caught(rank: int):
        try:
            return rank_does(rank)
        except Exception as error:  # noqa: BLE001 - it is what is looked at
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def meet(rank: int) -> Ranks:
    """Meet with time enough for a busy machine: all three ranks come."""
    return distributed.meet(rank, 3, seconds=60.0)


def test_every_rank_learns_where_all_are(address, monkeypatch):
    monkeypatch.setattr(distributed, "host", iter(["node1", "node1", "node2"]).__next__)
    met = together(meet)
    assert {tuple(sorted(ranks.hosts)) for ranks in met} == {("node1", "node1", "node2")}
    here = []
    for ranks in met:
        monkeypatch.setattr(distributed._connection, "ranks", ranks)
        here.append(distributed.ranks_here())
    assert sorted(here) == [1, 2, 2]


def test_a_rank_that_does_not_come_is_named_to_all_the_others(address, quick):
    for error in together(lambda rank: distributed.meet(rank, 3, seconds=3.0), ranks=(0, 2)):
        assert isinstance(error, ClusterError)
        assert "rank 1 of 3 did not answer within 3 s (engine.connect_s)" in str(error)
        assert "Those that did: rank 0 on " in str(error)


def test_a_main_rank_that_does_not_come_is_named_with_its_address(address):
    with refuses(f"rank 1 on {watchdog.host()}", ClusterError, names=os.environ["MASTER_PORT"]):
        distributed.meet(1, 2, seconds=0.5)


def fails_at(rank: int, silent: int | None = None, raises: Mapping[int, Exception] = MappingProxyType({})):
    ranks = meet(rank)
    if rank == silent:
        return
    with ranks.naming_the_missing("9 s"):
        if rank in raises:
            raise raises[rank]
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting 9000ms")


OF_ITSELF = [
    ValueError("out of cheese"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),  # by the watchdog of a display
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 214 'uncorrectable ECC error'"
    ),
    dist.DistBackendError("Process group watchdog thread terminated with exception: CUDA error: unspecified failure"),
    RuntimeError("the simulator timed out"),  # in a reward function
]


def test_the_last_error_of_nccl_is_quoted():
    assert watchdog.short(OF_ITSELF[4]) == "DistBackendError: Cuda failure 214 'uncorrectable ECC error'"


@pytest.mark.parametrize("error", OF_ITSELF, ids=lambda error: str(error)[:60])
def test_a_rank_that_ended_by_itself_or_by_its_card_is_no_lost_one(address, patient, tmp_path, monkeypatch, error):
    """The others name it with its reason, and the job is not tried again."""
    monkeypatch.setenv("OCTET_FAILED", str(tmp_path / "failed"))
    first, failed, last = together(lambda rank: fails_at(rank, raises={1: error}))
    assert failed is error
    for other in (first, last):
        assert type(other) is ClusterError
        assert f"it ended with {watchdog.short(error)}" in str(other)
    assert (tmp_path / "failed").read_text().startswith("rank 1 on ")


OF_ANOTHER_RANK = [
    dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited or there was a network error"),
    dist.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 9000 milliseconds"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:535] Connection closed by peer"),
]


@pytest.mark.parametrize("error", OF_ANOTHER_RANK, ids=lambda error: str(error)[:60])
def test_an_error_of_a_collective_makes_a_silent_rank_a_lost_one(address, quick, error):
    first, _, last = together(lambda rank: fails_at(rank, silent=1, raises={0: error}))
    for other in (first, last):
        assert isinstance(other, LostRank)
        assert "rank 1 on " in str(other)


def test_when_all_are_there_the_network_is_named(address, patient, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    for error in together(fails_at):
        assert "all ranks are alive" in str(error)
        assert "GLOO_SOCKET_IFNAME=ib0" in str(error)


def test_an_interface_that_this_node_lacks_is_refused_before_the_others_are_asked(monkeypatch):
    """Ranks asked each other for a minute, and the job was requeued three times."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib9")
    with refuses("GLOO_SOCKET_IFNAME", ClusterError, names="ib9"):
        distributed.connect(9)


def test_a_rank_that_is_heard_no_more_is_named_while_the_others_wait(address, monkeypatch, capfd):
    """A collective of NCCL does not fail when a rank has died."""
    monkeypatch.setattr(watchdog, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(watchdog, "SILENT_S", 3.0)
    report, reported = Ranks._report_silent, threading.Event()
    monkeypatch.setattr(Ranks, "_report_silent", lambda *of: (report(*of), reported.set()))

    def waits(rank: int) -> bool:
        ranks = meet(rank)
        if rank == 2:
            return True
        with ranks.naming_the_missing("9 s"):
            return reported.wait(60)

    assert together(waits) == [True] * 3
    (told,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("octet: ")]
    assert told.startswith("octet: rank 2 on ")
    assert "its process died, was stopped, or cannot be reached" in told


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("out of cheese"), True), (Interrupted("later"), False), (LostRank("3"), False)]
)
def test_the_job_is_told_of_a_rank_that_fails_by_itself(address, tmp_path, monkeypatch, error, told):
    """Being told to stop is no failure, and losing another rank is none either."""
    failed = tmp_path / "run/failed"
    monkeypatch.setenv("OCTET_FAILED", str(failed))
    alone = distributed.meet(0, 1, seconds=3.0)
    with pytest.raises(type(error)), alone.naming_the_missing("9 s"):
        raise error
    assert failed.exists() == told
    if told:
        assert failed.read_text() == f"rank 0 on {watchdog.host()} ended with ValueError: out of cheese\n"


def test_in_a_container_without_slurm_the_missing_rank_is_named_all_the_same(address, quick, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClusterError, match=r"^rank 1 of 2"):
        distributed.meet(0, 2, seconds=0.5)


PROGRAM = """
import os, signal, sys, threading, time
import torch.distributed as dist
from pathlib import Path
from trainer import errors
from trainer.ranks import distributed, stores, watchdog
BEFORE
try:
    DOES
except errors.OctetError as error:
    print(error, flush=True)  # os._exit writes nothing
    AFTER
    os._exit(error.status)
"""


CONNECT = "distributed.connect(timeout_s=60, connect_s=20)"


def program(does: str, before: str = CONNECT, after: str = "") -> str:
    """A rank that prints its error."""
    does = does.strip().replace("\n", "\n    ")
    return PROGRAM.replace("BEFORE", before.strip()).replace("DOES", does).replace("AFTER", after)


def start_two(*arguments: object, folder: Path = ROOT) -> list[subprocess.Popen]:
    return started(2, *arguments, folder=folder, SLURMD_NODENAME="far")


def said_by(rank: subprocess.Popen) -> str:
    return rank.communicate(timeout=180)[0]


RANK = """
assert distributed.gather(distributed.rank()) == [0, 1]
if distributed.rank() == 1:
    os._exit(9)
with distributed.naming_the_missing(60):
    distributed.barrier()
    distributed.gather("never")
"""


@PROCESSES
def test_a_rank_that_dies_is_named_over_gloo(address):
    first, second = start_two("-c", program(RANK, after="distributed.disconnect()"))
    assert said_by(second) == ""
    said = said_by(first)
    assert second.returncode == 9
    assert "rank 1 on far: it died, or did not answer within 60 s (engine.timeout_s)" in said


ERROR = """
with distributed.naming_the_missing(60):
    if distributed.rank() == 0:
        raise errors.ConfigError("out of cheese")
    distributed.barrier()
"""


@PROCESSES
def test_an_error_of_rank_0_is_heard_before_its_store_goes(address):
    """Over gloo: the barrier of the other one fails only when rank 0 has gone."""
    first, second = start_two("-c", program(ERROR))
    assert said_by(first) == "out of cheese\n"
    assert "rank 0 on far: it ended with ConfigError: out of cheese" in said_by(second)
    assert (first.returncode, second.returncode) == (2, 2)


@PROCESSES
def test_an_error_that_rank_0_has_too_is_one_of_all(address):
    """It is printed once."""
    shared = program(ERROR.replace("distributed.rank() == 0", "True"), f"watchdog.ANSWER_S = 60\n{CONNECT}")
    shared = shared.replace("print(error,", "print(error.is_of_all,")
    assert [said_by(one) for one in start_two("-c", shared)] == ["True\n"] * 2


CONNECTED = """
watchdog.ANSWER_S = 1.5
distributed.connect(timeout_s=3, connect_s=60)
distributed.keep_stacks_in(Path("stacks"))

def score():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # which never comes back
"""
STUCK = """
with distributed.naming_the_missing(3):
    if distributed.rank() == int(sys.argv[1]):
        time.sleep(0.5)  # it is slow, which is no fault
    distributed.barrier()
    if distributed.rank() == int(sys.argv[1]):
        score() if sys.argv[2] == "stuck" else os.kill(os.getpid(), signal.SIGSTOP)
    distributed.barrier()
"""
STUCK = program(STUCK, CONNECTED)


@PROCESSES
@pytest.mark.parametrize("stuck", [0, slow(1)])
def test_a_rank_that_is_alive_and_stuck_is_named_with_its_place_and_ended(address, tmp_path, stuck):
    (tmp_path / "my_reward.py").write_text(STUCK)
    ranks = start_two("my_reward.py", stuck, "stuck", folder=tmp_path)
    said = [rank.communicate(timeout=180) for rank in ranks]
    line = STUCK[: STUCK.index("  # which never comes back")].count("\n") + 1
    place = f"my_reward.py:{line} in score"
    told = f"rank {stuck} on far is alive, but took no part in the collective within 3 s (engine.timeout_s): it is at "
    assert f"{told}{place}; the stacks of all ranks are in stacks (RuntimeError: " in said[1 - stuck][0]
    assert said[stuck][1] == f"octet: rank {stuck} on far is ended at {place}: the others have ended\n"
    assert [rank.returncode for rank in ranks] == [LostRank.status] * 2
    stacks = [(tmp_path / f"stacks/rank_{rank}.txt").read_text() for rank in (0, 1)]
    assert f"line {line} in score" in stacks[stuck]
    assert "in barrier" in stacks[1 - stuck]


@PROCESSES
@pytest.mark.parametrize("stopped", [slow(0), 1])
def test_a_rank_that_was_stopped_is_named(address, tmp_path, stopped):
    """It may be stopped by a debugger, by SIGSTOP, or by the machine. If the TCPStore is in it, that never answers."""
    ranks = start_two("-c", STUCK, stopped, "stopped", folder=tmp_path)
    said = said_by(ranks[1 - stopped])
    assert re.search(rf"rank {stopped} on far(: it died, or did not answer within 3 s| died, was stopped, or)", said)
    assert ranks[1 - stopped].returncode == LostRank.status
    ranks[stopped].kill()
    said_by(ranks[stopped])


STOPS = """
watchdog.ANSWER_S = 1.5
meet = distributed.meet

def stop(*of, **named):
    os.kill(os.getpid(), signal.SIGSTOP)

def meet_all(*of):
    ranks = meet(*of)
    stores.absent(ranks.store, ["read/1"], 60)
    return ranks

if distributed.is_main():
    distributed.meet = meet_all
    if sys.argv[1] == "before it meets the others":
        stop()
    setattr(dist, {"while it connects": "init_process_group"}.get(sys.argv[1], "all_reduce"), stop)
"""
STOPPED_EARLY = program("distributed.connect(timeout_s=600, connect_s=4)", STOPS)


@PROCESSES
@pytest.mark.parametrize(("when", "status"), [
    slow("before it meets the others", 2), ("while it connects", 76), slow("in the first all-reduce", 76),
])  # fmt: skip
def test_a_main_rank_that_is_stopped_at_the_start_is_named(address, when, status):
    stopped, waits = start_two("-c", STOPPED_EARLY, when)
    assert re.search(r"^rank (1 on far: rank 0 did not answer|0 on far)", said_by(waits))
    assert waits.returncode == status
    stopped.kill()
    said_by(stopped)


def test_a_rank_is_not_ended_by_a_word_in_the_store(address, monkeypatch):
    """Whoever reaches a TCPStore can say that rank 1 waits in vain; its heartbeats say that it goes on."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 1.0)
    store, is_dead = distributed.meet(0, 1, seconds=60.0).store, threading.Event()
    store.set("state/1", watchdog.WAITING)

    def beat() -> None:
        while not is_dead.wait(0.01):
            store.add("heartbeats/1", 1)

    heart = threading.Thread(target=beat, daemon=True)
    heart.start()
    ranks = Ranks(store, 0, ["here", "here"])
    assert not ranks._has_one_ended(store, threading.Event())
    is_dead.set()
    heart.join()
    assert ranks._has_one_ended(store, threading.Event())


KILLED = """
import os
from trainer.ranks import stores
stores.connect(0, 60).set("host/1", "an earlier machine")
print("up", flush=True)
input()
"""


def test_what_a_killed_start_has_left_is_not_read(files):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed = subprocess.Popen([*forked(), "-c", KILLED], cwd=ROOT, **pipes)
    assert killed.stdout.readline() == "up\n"
    with refuses(f"rank 0 on {watchdog.host()}", ClusterError, names="MASTER_PORT"):
        distributed.meet(0, 2, seconds=1.0)
    killed.kill()
    killed.communicate()
    with refuses(f"rank 1 on {watchdog.host()}", ClusterError, names=os.environ["MASTER_PORT"]):
        distributed.meet(1, 2, seconds=0.1)
    met = together(lambda rank: distributed.meet(rank, 2, 60.0), (0, 1))
    assert [ranks.hosts for ranks in met] == [[watchdog.host()] * 2] * 2


def test_what_killed_runs_have_left_is_deleted_and_what_is_in_use_stays(files, monkeypatch):
    used = distributed.meet(0, 1, seconds=60.0).store.folder
    (files / "1-0").mkdir()
    (files / "1-0/lock").touch()
    (files / "end").touch()
    monkeypatch.setenv("MASTER_PORT", "2")
    mine = distributed.meet(0, 1, seconds=60.0).store.folder
    assert {*files.iterdir()} == {used, mine, files / "end"}
    assert (used / "lock").stat().st_mode & 0o111 == 0


def test_what_ranks_on_one_machine_say_is_for_this_user_alone(files):
    ranks = distributed.meet(0, 1, seconds=60.0)
    assert ranks.store.folder.parent == files
    assert {path.stat().st_mode & 0o077 for path in (files, ranks.store.folder)} == {0}
    stores.close(ranks.store)
    assert list(files.iterdir()) == []


OTHERS = {
    "others may read it": lambda folder: folder.mkdir(mode=0o755),
    "a link": lambda folder: (folder.with_name("its").mkdir(mode=0o700), folder.symlink_to(folder.with_name("its"))),
    "a file": lambda folder: folder.write_text(""),
    "another user's": lambda folder: (folder.mkdir(mode=0o700), os.chown(folder, 65534, 65534)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_folder_that_others_can_enter_is_refused(files, what):
    if what == "another user's" and os.geteuid():
        pytest.skip("only root can give a folder away")
    OTHERS[what](files)
    for rank in (0, 1):
        with refuses(files, ClusterError, names="TMPDIR"):
            distributed.meet(rank, 2, seconds=0.1)


LISTENING = """
import psutil
from trainer.ranks import distributed
distributed.connect(60)
distributed.barrier()
print({one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"} & {"::", "0.0.0.0"})
distributed.barrier()
distributed.disconnect()
"""


def test_a_run_on_one_machine_listens_on_no_outer_interface():
    assert [*on_ranks(1, LISTENING), *on_ranks(2, LISTENING)] == ["set()"] * 3


LEAVING = """
import os, time
from trainer.ranks import distributed, stores
distributed.connect(60)
folder = distributed._connection.ranks.store.folder
time.sleep(0.5 * int(os.environ["RANK"]))
print((folder / stores.GROUP).exists())
distributed.disconnect()
print(folder.exists())
"""


def test_the_last_rank_to_leave_deletes_the_files():
    """Torch would abort a rank whose file vanished meanwhile."""
    assert on_ranks(2, LEAVING) == ["True\nTrue", "True\nFalse"]
