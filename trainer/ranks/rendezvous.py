"""Connect the ranks of a run, and name the rank that is missing when something fails.

Before any weights load, every rank writes its host into a small store at rank 0, and all of them take part in one
all-reduce. When a collective fails later, every rank that is alive writes so into the store: the one that does not is
missing. A rank that ends with an error of its own writes that, too; then no rank is lost, and starting again would not
help. NCCL does not fail when a rank has died, it waits, so each rank sends heartbeats from a thread, and rank 0 names
the first rank whose heartbeats stop.

A rank that is alive but stuck does not write its state either. A thread of it sees that another rank waits in vain,
writes where its main thread is, and ends the process when the others had time to end. Until a collective has failed,
nothing is done about a rank that is slow. NCCL's own watchdog ends a rank that waits in a collective of NCCL, and no
error of it could be caught here: such a wait is reported by NCCL only.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ClusterError, Interrupted, LostRank
from trainer.ranks import slurm, stacks
from trainer.ranks.nccl_log import NcclLog

WAITING = "waiting"  # the state of a rank whose collective has failed
GLOO_SOURCE = re.compile(r"^\[[^]]*gloo[^]]*\] ")  # the source file and line that gloo's messages begin with
OF_THIS_CARD = re.compile("cuda (error|failure)", re.IGNORECASE)
INTERFACE_KEYS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")
LOOPBACK = ("127.0.0.1", "localhost")  # with one of these, a run on one machine can be reached only from there
ANSWER_S = 5.0  # how long a rank that has failed waits for the others to write their state
HEARTBEAT_S = 0.5
SILENT_S = 30.0  # without heartbeats before a rank is named; srun ends the other ranks after a minute


def host() -> str:
    """Return the name of this node, as Slurm calls it where there is Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(slots=True)
class Ranks:
    """The hosts of all ranks, and the store that they share."""

    store: Any
    mine: int
    hosts: Sequence[str]
    nccl_log: NcclLog = field(default_factory=NcclLog)
    state_of_main: str = ""  # the final state of rank 0, once it has written one
    stacks: Path | None = None  # the folder for the stacks of ranks, if one of them is stuck

    @property
    def here(self) -> int:
        """Number of ranks on this node."""
        return self.hosts.count(self.hosts[self.mine])

    @property
    def is_first_here(self) -> bool:
        return self.hosts.index(self.hosts[self.mine]) == self.mine

    @contextmanager
    def naming_the_missing(self, waited: str) -> Iterator[None]:
        """Turn an error of a collective into one that names the missing rank."""
        try:
            with self._exchanging_heartbeats():
                yield
        except BaseException as error:
            if not _is_of_a_collective(error):
                self._publish_own_error(error)
                raise
            self._publish("state", WAITING)
            reason, is_lost = self._diagnose(waited, error)
            self._publish("diagnosed", "yes")
            self._keep_store_for([f"diagnosed/{rank}" for rank in self._all() if self.mine == 0 and self._waits(rank)])
            kind = LostRank if is_lost else ClusterError
            raise kind(f"{reason} ({_short(error)}){self.nccl_log.excerpt()}") from error

    def _publish_own_error(self, error: BaseException) -> None:
        """Tell the job script and the other ranks that this rank ends with an error of its own."""
        if isinstance(error, Exception) and not isinstance(error, Interrupted | LostRank):
            slurm.report_failure(f"rank {self.mine} on {host()} ended with {_short(error)}")
        self._publish("noticed", "yes")
        self._publish("state", f"it ended with {_short(error)}")
        self._keep_store_for([f"noticed/{rank}" for rank in self._all()])

    def _keep_store_for(self, keys: Sequence[str]) -> None:
        """Wait on rank 0, whose end is the end of the store, until the other ranks have written these keys."""
        if self.mine == 0:
            absent(self.store, keys, ANSWER_S)

    @contextmanager
    def _exchanging_heartbeats(self) -> Iterator[None]:
        over = threading.Event()
        for target in (self._send_heartbeats if self.mine else self._check_heartbeats, self._end_if_stuck):
            threading.Thread(target=target, args=(over,), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _send_heartbeats(self, over: threading.Event) -> None:
        """Send heartbeats until rank 0 has ended, and keep its final state: when the collectives of the other ranks
        fail, the store may be gone."""
        try:
            store = _connection(SILENT_S)  # not self.store, on which the rank itself may be waiting
            while not store.check(["state/0"]):
                store.add(f"heartbeats/{self.mine}", 1)
                if over.wait(HEARTBEAT_S):
                    return
            self.state_of_main = store.get("state/0").decode()
            store.set(f"noticed/{self.mine}", "yes")
        except dist.DistError:  # rank 0 is gone, and has not written its state
            if self.mine == 1 and not over.wait(ANSWER_S):
                self._report_silent(0)

    def _check_heartbeats(self, over: threading.Event) -> None:
        """Check on rank 0 that every rank still sends heartbeats, and name each one that does not."""
        heard = {rank: (0, time.monotonic()) for rank in self._all() if rank != self.mine}
        with suppress(dist.DistError):  # torchrun, which has the store, may end first
            store = _connection(SILENT_S)
            while not over.wait(SILENT_S / 10):
                for rank in list(heard):
                    self._check_heartbeats_of(rank, store, heard)

    def _check_heartbeats_of(self, rank: int, store: Any, heard: dict[int, tuple[int, float]]) -> None:
        before, since = heard[rank]
        count, now = store.add(f"heartbeats/{rank}", 0), time.monotonic()
        if count != before:
            heard[rank] = (count, now)
        elif now - since > SILENT_S:
            del heard[rank]
            if not store.check([f"state/{rank}"]):  # otherwise it has ended by itself
                self._report_silent(rank)

    def _end_if_stuck(self, over: threading.Event) -> None:
        """Say where this rank is if it is not in the collective in which another one has waited in vain, and end it."""
        try:
            store = _connection(SILENT_S)
            while not store.check(["somebody waits"]):
                if over.wait(HEARTBEAT_S):
                    return
            if over.wait(ANSWER_S / 2):  # a collective of its own has failed at about the same time
                return
            store.set(f"place/{self.mine}", place := stacks.place())
        except dist.DistError:  # the store is gone with rank 0, and this rank's next collective fails
            return
        if place and self.stacks:
            stacks.write(self.stacks, self.mine)
        if not over.wait(2 * ANSWER_S):  # the others end by themselves
            where = f"at {place}" if place else "in a collective"
            print(f"octet: rank {self.mine} on {host()} is ended {where}: the others have ended", file=sys.stderr)
            sys.stderr.flush()
            os._exit(LostRank.status)

    def _report_silent(self, rank: int) -> None:
        what = "its process died, was stopped, or cannot be reached. The others may wait for it until they are ended."
        print(f"octet: {self._name(rank)}: {what}", file=sys.stderr, flush=True)

    def _waits(self, rank: int) -> bool:
        return self.store.check([f"state/{rank}"]) and self._get(f"state/{rank}") == WAITING

    def _get(self, key: str) -> str:
        return str(self.store.get(key).decode())

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    def _publish(self, key: str, value: str) -> None:
        with suppress(dist.DistError):  # the store is gone with rank 0, so nobody can read it
            self.store.set(f"{key}/{self.mine}", value)

    def _diagnose(self, waited: str, error: BaseException) -> tuple[str, bool]:
        """Return why a collective has failed, and whether a rank is lost. All ranks that are alive fail, and so write
        their state, at about the same time; one that is stuck writes where it is."""
        try:
            self.store.set("somebody waits", "yes")
            silent = absent(self.store, [f"state/{rank}" for rank in self._all()], ANSWER_S)
            states = {rank: self._get(f"state/{rank}") for rank in self._all() if rank not in silent}
            places = {rank: self._get(f"place/{rank}") for rank in silent if self.store.check([f"place/{rank}"])}
        except dist.DistError:
            return self._diagnose_without_store()
        ended = [f"{self._name(rank)}: {state}" for rank, state in states.items() if state != WAITING]
        gone = [rank for rank in silent if rank not in places]
        lost = [f"{self._name(rank)}: it died, or did not answer within {waited}" for rank in gone]
        stuck = [
            f"{self._name(rank)} is alive, but took no part in the collective within {waited}: it is at {place}"
            for rank, place in places.items()
            if place
        ]
        if stuck and self.stacks:
            stacks.write(self.stacks, self.mine, error)
            stuck.append(f"the stacks of all ranks are in {self.stacks}")
        if ended or lost or stuck:
            return "; ".join([*ended, *lost, *stuck]), bool(lost or stuck)
        network = f"one was late, or what they send does not arrive within {waited}. {interfaces()}"
        return f"all ranks are there: {network}", True

    def _diagnose_without_store(self) -> tuple[str, bool]:
        where = self._name(0)
        if self.state_of_main not in ("", WAITING):
            return f"{where}: {self.state_of_main}", False
        return f"{where} died, was stopped, or cannot be reached. Its last message is in the log", True

    def _all(self) -> range:
        return range(len(self.hosts))


def meet(rank: int, world_size: int, seconds: float) -> Ranks:
    """Connect to the store and exchange hosts. Raise ClusterError that names the ranks that did not come in time."""
    where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    try:
        is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has one already
        store = _connection(seconds, is_server)
        store.set(f"host/{rank}", host())
        if rank == 0:
            store.set("hosts", _roll_call(store, world_size, seconds))
        store.wait(["hosts"], timedelta(seconds=seconds + ANSWER_S))
        found = json.loads(store.get("hosts"))
        store.set(f"read/{rank}", "yes")
        if rank == 0 and isinstance(found, str):  # this process ends now, and the store with it
            absent(store, [f"read/{reader}" for reader in range(world_size)], 1.0)
    except (dist.DistError, OSError) as error:
        raise ClusterError(
            f"rank {rank} on {host()}: rank 0 did not answer within {seconds:g} s at {where} ({_short(error)}). "
            f"Is it running, and is its port free? {interfaces()}"
        ) from None
    if isinstance(found, str):
        raise ClusterError(found)
    return Ranks(store, rank, found)


def smoke_test(ranks: Ranks, device: torch.device, seconds: float) -> None:
    """Check that an all-reduce works over the network that training will use."""
    count = torch.ones(1, device=device)
    with ranks.naming_the_missing(f"{seconds:g} s (engine.connect_s), in the first all-reduce"):
        dist.all_reduce(count, async_op=True).wait(timedelta(seconds=seconds))
    assert count.item() == len(ranks.hosts), f"{count.item()} of {len(ranks.hosts)} ranks were added up"


def absent(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """Return the indices of the keys that are still not written after so many seconds."""
    deadline = time.monotonic() + seconds
    missing = [place for place, key in enumerate(keys) if not store.check([key])]
    while missing and time.monotonic() < deadline:
        time.sleep(0.05)
        missing = [place for place in missing if not store.check([keys[place]])]
    return missing


def interfaces() -> str:
    """Return the sentences of an error message about the network interfaces of this node."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    chosen = ", ".join(f"{key}={os.environ[key]}" for key in INTERFACE_KEYS if key in os.environ) or "none is chosen"
    return (
        f"Network interfaces of {host()}: {names} ({chosen}). Choose the fast one with NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME, in slurm/site.env under Slurm; NCCL_DEBUG=INFO shows what NCCL does"
    )


def _connection(seconds: float, is_server: bool = False) -> Any:
    """Connect to the store of rank 0, or create it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
    if is_server and address in LOOPBACK:
        with suppress(OSError):  # TCPStore says what is wrong with the port
            options["master_listen_fd"] = socket.create_server(("127.0.0.1", port)).detach()
    store = dist.TCPStore(address, port, is_master=is_server, **options)
    return dist.PrefixStore(f"octet-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _roll_call(store: Any, world_size: int, seconds: float) -> str:
    """Return the hosts as a JSON list, or, as a JSON string, a message that says which ranks are missing."""
    keys = [f"host/{rank}" for rank in range(world_size)]
    missing = absent(store, keys, seconds)
    hosts = {rank: store.get(key).decode() for rank, key in enumerate(keys) if rank not in missing}
    if not missing:
        return json.dumps(list(hosts.values()))
    silent: list[str] = []
    with suppress(ClusterError):  # there is no scontrol in a container
        silent = [node for node in slurm.nodes() if node not in hosts.values()]
    nodes = f" Nothing was heard from {', '.join(silent)}." if silent else ""
    return json.dumps(
        f"rank {', '.join(map(str, missing))} of {world_size} did not answer within {seconds:g} s "
        f"(engine.connect_s).{nodes} Those that did: {_listed(hosts)}. If they are only slow to start, use a larger "
        f"engine.connect_s. {interfaces()}"
    )


def _listed(hosts: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} on {name}" for rank, name in hosts.items())


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True for an error that another rank or the network may have caused, and False for one of this rank.

    NCCL and the store raise a DistError, NCCL also where it only reports a failure of this rank's card. Gloo raises a
    RuntimeError that begins with its source file."""
    text = str(error)
    if isinstance(error, dist.DistError):
        return not OF_THIS_CARD.search(text)
    return isinstance(error, RuntimeError) and "gloo/" in text


def _short(error: BaseException) -> str:
    """Return the class and the first line of an error, without gloo's source file."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {GLOO_SOURCE.sub('', text)[:120]}"
