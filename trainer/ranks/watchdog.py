"""Names the missing rank when a collective fails, and ends a rank that is stuck.

When a collective fails, every rank that is alive writes its state into the store (`stores.py`), so a rank without a
state is missing. A rank that ends with an error of its own writes that, too; then no rank is lost, and a restart would
not help. NCCL does not fail when a rank has died, but waits, so each rank sends heartbeats from a thread. Rank 0 names
a rank whose heartbeats stop, and rank 1 names rank 0.

A rank that is alive but stuck does not write its state either. A thread of that rank notices that another rank has
waited in vain, writes the place of its main thread, and ends the process when the waiting rank sends no more
heartbeats. A slow rank is left alone until a collective has failed. NCCL's own watchdog ends a rank that waits in a
collective of NCCL, without an error that could be caught here, so only NCCL reports such a wait.
"""

import faulthandler
import operator
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.errors import ClusterError, Interrupted, LostRank, OctetError
from trainer.machine import disk
from trainer.ranks import slurm, stores
from trainer.ranks.stores import UNREACHABLE, absent

WAITING = "waiting"  # the state of a rank whose collective has failed
GLOO_SOURCE = re.compile(r"^\[[^]]*gloo[^]]*\] ")  # the source file and line at the beginning of gloo's messages
OF_THIS_CARD = re.compile("cuda (error|failure)", re.IGNORECASE)
COLLECTIVE = "/torch/distributed/"  # in the path of a source file that waits for other ranks
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
INTERFACE_KEYS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")
ANSWER_S = 5.0  # how long a rank that has failed waits for the states of the others
HEARTBEAT_S = 0.5
SILENT_S = 30.0  # without heartbeats, after which a rank is named; srun ends the other ranks after a minute


def host() -> str:
    """Return the name of this node, under Slurm the one that Slurm uses."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(slots=True)
class Ranks:
    """The hosts of all ranks, and the store that they share."""

    store: Any
    mine: int
    hosts: Sequence[str]
    state_of_main: str = ""  # the final state of rank 0, once it has written one
    stacks: Path | None = None  # the folder for the stacks of all ranks if one is stuck

    @contextmanager
    def naming_the_missing(self, waited: str) -> Iterator[None]:
        """Turn the error of a failed collective into one that names the missing rank."""
        over = threading.Event()
        for target in (self._exchange_heartbeats, self._end_if_stuck):
            threading.Thread(target=target, args=(over,), daemon=True).start()
        try:
            yield
        except BaseException as error:
            over.set()
            if not _is_of_a_collective(error):
                self._publish_own_error(error)
                raise
            try:
                reason, is_lost = stores.within(3 * ANSWER_S, partial(self._diagnose, waited, error))
            except UNREACHABLE:
                reason, is_lost = self._diagnose_without_store()
            kind = LostRank if is_lost else ClusterError
            raise kind(f"{reason} ({short(error)})") from error
        finally:
            over.set()

    def _publish_own_error(self, error: BaseException) -> None:
        """Report to the job script and the other ranks that this rank ends with an error of its own."""
        if isinstance(error, Exception) and not isinstance(error, Interrupted | LostRank):
            slurm.report_failure(f"rank {self.mine} on {host()} ended with {short(error)}")

        state = f"it ended with {short(error)}"

        def publish() -> None:
            self.store.set(f"state/{self.mine}", state)
            if not absent(self.store, ["state/0"], ANSWER_S / 2):
                self.state_of_main = self.store.get("state/0").decode()
            self.store.set(f"noticed/{self.mine}", "yes")
            self._keep_store_for([f"noticed/{rank}" for rank in self._all()])

        with suppress(*UNREACHABLE):  # the store is gone, so no rank can read it
            stores.within(3 * ANSWER_S, publish)
        if isinstance(error, OctetError):
            error.is_of_all |= self.state_of_main == state

    def _keep_store_for(self, keys: Sequence[str]) -> None:
        """Wait on rank 0, with which the store ends, until the other ranks have written these keys."""
        if self.mine == 0:
            absent(self.store, keys, ANSWER_S)

    def _exchange_heartbeats(self, over: threading.Event) -> None:
        """Send heartbeats, and report each watched rank that sends none."""
        watched = {0: self._all()[1:], 1: [0]}.get(self.mine, [])
        last_beats = {rank: (0, time.monotonic()) for rank in watched}
        try:
            store = stores.within(SILENT_S, partial(stores.another, self.store, SILENT_S))
            while True:
                try:
                    stores.within(SILENT_S, partial(self._exchange_heartbeat, store, last_beats))
                except OSError as error:
                    if not disk.failure(error):  # a full disk says nothing about a rank
                        raise
                if over.wait(HEARTBEAT_S):
                    return
        except UNREACHABLE:  # rank 0 is gone, and has not written its state
            if self.mine == 1 and not self.state_of_main and not over.wait(ANSWER_S):
                self._report_silent(0)

    def _exchange_heartbeat(self, store: Any, last_beats: dict[int, tuple[int, float]]) -> None:
        store.add(f"heartbeats/{self.mine}", 1)
        for rank, (before, since) in list(last_beats.items()):
            count, now = store.add(f"heartbeats/{rank}", 0), time.monotonic()
            if count != before:
                last_beats[rank] = (count, now)
            elif now - since > SILENT_S:
                del last_beats[rank]
                if not store.check([f"state/{rank}"]):  # with a state, the rank has ended by itself
                    self._report_silent(rank)
        if self.mine and not self.state_of_main and store.check(["state/0"]):  # the store may soon be gone
            self.state_of_main = store.get("state/0").decode()
            store.set(f"noticed/{self.mine}", "yes")

    def _end_if_stuck(self, over: threading.Event) -> None:
        """End this rank if another one has waited for it in vain, and publish the place where this rank is stuck."""
        try:
            store = stores.another(self.store, SILENT_S)
            while not store.check(["somebody waits"]):
                if over.wait(HEARTBEAT_S):
                    return
            if over.wait(ANSWER_S / 2):  # this rank's own collective has failed at about the same time
                return
            store.set(f"place/{self.mine}", place := _place())
        except UNREACHABLE:  # the store is gone with rank 0, so this rank's next collective will fail
            return
        if place and self.stacks:
            _write_stacks(self.stacks, self.mine)
        while not self._has_one_ended(store, over):
            if over.is_set():
                return
        where = f"at {place}" if place else "in a collective"
        text = f"octet: rank {self.mine} on {host()} is ended {where}: the others have ended"
        print(text, file=sys.stderr, flush=True)
        os._exit(LostRank.status)

    def _has_one_ended(self, store: Any, over: threading.Event) -> bool:
        """Return True if a rank that has waited sends no more heartbeats. Its state alone is not enough, because any
        program that can reach a TCPStore can write it."""
        try:
            keys = {rank: f"state/{rank}" for rank in self._all()}
            waiting = [one for one, key in keys.items() if store.check([key]) and store.get(key).decode() == WAITING]
            before = [store.add(f"heartbeats/{rank}", 0) for rank in waiting]
            is_over = over.wait(2 * ANSWER_S)
            now = [store.add(f"heartbeats/{rank}", 0) for rank in waiting]
            return not is_over and any(map(operator.eq, before, now))
        except UNREACHABLE:  # rank 0 has ended, and the store with it
            return not over.wait(2 * ANSWER_S)

    def _report_silent(self, rank: int) -> None:
        what = "its process died, was stopped, or cannot be reached. The others may wait for it until they are ended."
        print(f"octet: {self._name(rank)}: {what}", file=sys.stderr, flush=True)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    def _diagnose(self, waited: str, error: BaseException) -> tuple[str, bool]:
        """Return the reason why a collective has failed, and whether a rank is lost. All ranks that are alive fail at
        about the same time, and write their state; one that is stuck writes its place."""
        self.store.set(f"state/{self.mine}", WAITING)
        self.store.set("somebody waits", "yes")
        silent = absent(self.store, [f"state/{rank}" for rank in self._all()], ANSWER_S)
        states = {rank: self.store.get(f"state/{rank}").decode() for rank in self._all() if rank not in silent}
        placed = [rank for rank in silent if self.store.check([f"place/{rank}"])]
        places = {rank: self.store.get(f"place/{rank}").decode() for rank in placed}
        with suppress(*UNREACHABLE):  # the store is gone with rank 0, which has diagnosed it, too
            self.store.set(f"diagnosed/{self.mine}", "yes")
        self._keep_store_for([f"diagnosed/{rank}" for rank, state in states.items() if state == WAITING])
        ended = [f"{self._name(rank)}: {state}" for rank, state in states.items() if state != WAITING]
        gone = [rank for rank in silent if rank not in places]
        lost = [f"{self._name(rank)}: it died, or did not answer within {waited}" for rank in gone]
        alive = f"is alive, but took no part in the collective within {waited}: it is at"
        stuck = [f"{self._name(rank)} {alive} {place}" for rank, place in places.items() if place]
        if stuck and self.stacks:
            _write_stacks(self.stacks, self.mine, error)
            stuck.append(f"the stacks of all ranks are in {self.stacks}")
        if ended or lost or stuck:
            return "; ".join([*ended, *lost, *stuck]), bool(lost or stuck)
        network = f"one was late, or their messages do not arrive within {waited}. {interfaces()}"
        return f"all ranks are alive: {network}", True

    def _diagnose_without_store(self) -> tuple[str, bool]:
        where = self._name(0)
        if self.state_of_main not in ("", WAITING):
            return f"{where}: {self.state_of_main}", False
        return f"{where} died, was stopped, or cannot be reached. Its last message is in the log", True

    def _all(self) -> range:
        return range(len(self.hosts))


def interfaces() -> str:
    """Return sentences about the network interfaces of this node, for an error message."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    chosen = ", ".join(f"{key}={os.environ[key]}" for key in INTERFACE_KEYS if key in os.environ) or "none is chosen"
    return (
        f"Network interfaces of {host()}: {names} ({chosen}). Choose the fast one with NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME, in slurm/site.env under Slurm; NCCL_DEBUG=INFO shows what NCCL does"
    )


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True for an error that another rank or the network may have caused, and False for one of this rank. NCCL
    and the store raise a DistError, but NCCL also for a failure of this rank's card. Gloo raises a RuntimeError that
    begins with its source file, or is a short message about a timeout."""
    text = str(error)
    if isinstance(error, dist.DistError):
        return not OF_THIS_CARD.search(text)
    return isinstance(error, RuntimeError) and ("gloo/" in text or text == "Operation timed out!")


def short(error: BaseException) -> str:
    """Return the class and the first line of an error, without gloo's source file, or the last error of NCCL."""
    text = str(error).rpartition("\nLast error:\n")[2].strip().partition("\n")[0]
    return f"{type(error).__name__}: {GLOO_SOURCE.sub('', text)[:120]}"


def _place() -> str:
    """Return the current line of the main thread, outside of libraries, or "" while it waits in a collective."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])  # type: ignore[index]
    if any(COLLECTIVE in frame.filename for frame in stack):
        return ""
    ours = [frame for frame in stack if not frame.filename.startswith(LIBRARIES)]
    last = (ours or stack)[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def _write_stacks(folder: Path, rank: int, error: BaseException | None = None) -> None:
    """Write the stacks of all threads into a file of this rank, after the traceback of its error."""
    with suppress(OSError):  # a full disk must not hide the error
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.txt"
        path.unlink(missing_ok=True)  # it may be a link to another file
        with path.open("x") as file:
            if error:
                traceback.print_exception(error, file=file)
                file.flush()
            faulthandler.dump_traceback(file)
