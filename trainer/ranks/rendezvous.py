"""The ranks of a run find each other, and a rank that is missing is called by its name and node.

Before any weights load, every rank writes its host into a small store at rank 0, and all of them add up a number.
Later, when a collective fails, they say in the same store that they are still there: who does not is the one. A rank
that ends with an error of its own says that, too: then nobody is lost, and another start would end the same way. NCCL
does not fail when a rank has died, it waits: so a thread of each rank says all the time that the process is there, and
rank 0 names one of which it hears no more. A process that is there and stuck is not found out in this way.
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
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ClusterError, Interrupted, LostRank
from trainer.ranks import slurm
from trainer.ranks.nccl_log import NcclLog

WAITS = "waits"
SOURCE = re.compile(r"^\[[^]]*gloo[^]]*\] ")  # a file and a line of gloo's
OF_THIS_CARD = re.compile("cuda (error|failure)", re.IGNORECASE)
ANSWER_S = 5.0  # what a rank that has failed waits for the others to say that they are there
LISTEN_S = 0.5  # between two looks at what rank 0 says, and two beats
SILENT_S = 30.0  # without a beat, and a rank is named: before srun ends the others, which it does after a minute


def host() -> str:
    """As Slurm calls it, if Slurm is there."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where every rank is, and the store they share."""

    store: Any
    mine: int
    hosts: Sequence[str]
    last_word: list[str] = field(default_factory=list)  # of rank 0, once it has said one
    nccl_log: NcclLog = field(default_factory=NcclLog)

    @property
    def here(self) -> int:
        """Ranks on this node."""
        return self.hosts.count(self.hosts[self.mine])

    @property
    def is_first_here(self) -> bool:
        return self.hosts.index(self.hosts[self.mine]) == self.mine

    @contextmanager
    def naming_the_missing(self, waited: str) -> Iterator[None]:
        """An error of a collective becomes one that says which rank was not there."""
        try:
            with self._listening():
                yield
        except BaseException as error:
            if not _is_of_a_collective(error):
                if isinstance(error, Exception) and not isinstance(error, Interrupted | LostRank):
                    slurm.say_that_it_failed(f"rank {self.mine} on {host()} ended with {_short(error)}")
                self._say("heard", "yes")
                self._say("state", f"it ended with {_short(error)}")
                self._keep_the_store([f"heard/{rank}" for rank in self._all()])
                raise
            self._say("state", WAITS)
            reason, is_lost = self._who(waited)
            self._say("knows", "yes")
            self._keep_the_store([f"knows/{rank}" for rank in self._all() if self.mine == 0 and self._waits(rank)])
            kind = LostRank if is_lost else ClusterError
            raise kind(f"{reason} ({_short(error)}){self.nccl_log.excerpt()}") from error

    def _keep_the_store(self, keys: Sequence[str]) -> None:
        """It goes with rank 0, so that one stays until the others have written these."""
        if self.mine == 0:
            absent(self.store, keys, ANSWER_S)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Rank 0 to the others, and they to it."""
        over = threading.Event()
        threading.Thread(target=self._listen if self.mine else self._watch, args=(over,), daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _listen(self, over: threading.Event) -> None:
        """The collectives of the others fail when rank 0 has gone, and then its last word cannot be read."""
        try:
            store = _connection(SILENT_S)  # of its own: on the other one the rank itself may be waiting
            while not store.check(["state/0"]):
                store.add(f"beats/{self.mine}", 1)
                if over.wait(LISTEN_S):
                    return
            self.last_word.append(store.get("state/0").decode())
            store.set(f"heard/{self.mine}", "yes")
        except dist.DistError:  # it is gone without a word
            if self.mine == 1 and not over.wait(ANSWER_S):
                self._name_the_silent(0)

    def _watch(self, over: threading.Event) -> None:
        """By rank 0: the beats of the others go on, or one is named."""
        heard = {rank: (0, time.monotonic()) for rank in self._all() if rank != self.mine}
        with suppress(dist.DistError):  # torchrun, which has the store, may go first
            store = _connection(SILENT_S)
            while not over.wait(SILENT_S / 10):
                for rank in list(heard):
                    self._look_at(rank, store, heard)

    def _look_at(self, rank: int, store: Any, heard: dict[int, tuple[int, float]]) -> None:
        before, since = heard[rank]
        beats, now = store.add(f"beats/{rank}", 0), time.monotonic()
        if beats != before:
            heard[rank] = (beats, now)
        elif now - since > SILENT_S:
            del heard[rank]
            if not store.check([f"state/{rank}"]):  # it has not said itself how it ended
                self._name_the_silent(rank)

    def _name_the_silent(self, rank: int) -> None:
        told = f"octet: rank {rank} on {self.hosts[rank]}: its process died, or cannot be reached. The others may wait"
        print(f"{told} for it until they are ended.", file=sys.stderr, flush=True)

    def _waits(self, rank: int) -> bool:
        return self.store.check([f"state/{rank}"]) and self.store.get(f"state/{rank}").decode() == WAITS

    def _keys(self, word: str) -> list[str]:
        return [f"{word}/{rank}" for rank in range(len(self.hosts))]

    def _say(self, word: str, text: str) -> None:
        with suppress(dist.DistError):  # rank 0 is gone and the store with it: there is nobody left to tell
            self.store.set(f"{word}/{self.mine}", text)

    def _who(self, waited: str) -> tuple[str, bool]:
        """The reason, and whether a rank is lost. Asked by a rank whose collective has failed: all that are alive fail
        at about the same time."""
        try:
            silent = absent(self.store, self._keys("state"), ANSWER_S)
            states = {rank: self.store.get(f"state/{rank}").decode() for rank in self._all() if rank not in silent}
        except dist.DistError:
            return self._without_the_store()
        ended = [f"rank {rank} on {self.hosts[rank]}: {state}" for rank, state in states.items() if state != WAITS]
        lost = [f"rank {rank} on {self.hosts[rank]}: it died, or did not answer within {waited}" for rank in silent]
        if ended or lost:
            return "; ".join([*ended, *lost]), bool(lost)
        network = f"one was late, or what they send does not arrive within {waited}. {interfaces()}"
        return f"all ranks are there: {network}", True

    def _without_the_store(self) -> tuple[str, bool]:
        where = f"rank 0 on {self.hosts[0]}"
        if self.last_word and self.last_word[0] != WAITS:
            return f"{where}: {self.last_word[0]}", False
        return f"{where} is gone. What it said last is in the log", True

    def _all(self) -> range:
        return range(len(self.hosts))


def meet(rank: int, world_size: int, seconds: float) -> Ranks:
    """The store, and the host of every rank; an error that names those that did not come within the time."""
    where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    try:
        store = _store(rank, seconds)
        store.set(f"host/{rank}", host())
        if rank == 0:
            store.set("hosts", _roll_call(store, world_size, seconds))
        store.wait(["hosts"], timedelta(seconds=seconds + ANSWER_S))
        found = json.loads(store.get("hosts"))
        store.set(f"read/{rank}", "yes")
        if rank == 0 and isinstance(found, str):  # the store goes with this process
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
    """One number from every rank, added up, over the network that training will use."""
    count = torch.ones(1, device=device)
    with ranks.naming_the_missing(f"{seconds:g} s (engine.connect_s), in the first all-reduce"):
        dist.all_reduce(count, async_op=True).wait(timedelta(seconds=seconds))
    assert count.item() == len(ranks.hosts), f"{count.item()} of {len(ranks.hosts)} ranks were added up"


def absent(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """The places of the keys that nobody has written when the time is over."""
    deadline = time.monotonic() + seconds
    missing = [place for place, key in enumerate(keys) if not store.check([key])]
    while missing and time.monotonic() < deadline:
        time.sleep(0.05)
        missing = [place for place in missing if not store.check([keys[place]])]
    return missing


def interfaces() -> str:
    """What to look at when packets do not arrive."""
    names = ", ".join(name for _, name in socket.if_nameindex())
    chosen = ", ".join(f"{key}={os.environ[key]}" for key in SETTINGS if key in os.environ) or "none is chosen"
    return (
        f"Network interfaces of {host()}: {names} ({chosen}). Choose the fast one with NCCL_SOCKET_IFNAME and "
        "GLOO_SOCKET_IFNAME, in slurm/site.env under Slurm; NCCL_DEBUG=INFO shows what NCCL does"
    )


SETTINGS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")


def _store(rank: int, seconds: float) -> Any:
    """At rank 0; torchrun has one already."""
    return _connection(seconds, rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def _connection(seconds: float, is_server: bool = False) -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, is_master=is_server, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"octet-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _roll_call(store: Any, world_size: int, seconds: float) -> str:
    """The hosts as JSON, or a text that says who is missing."""
    keys = [f"host/{rank}" for rank in range(world_size)]
    missing = absent(store, keys, seconds)
    hosts = {rank: store.get(key).decode() for rank, key in enumerate(keys) if rank not in missing}
    if not missing:
        return json.dumps(list(hosts.values()))
    silent: list[str] = []
    with suppress(ClusterError):  # in a container there is no Slurm to ask
        silent = [node for node in slurm.nodes() if node not in hosts.values()]
    nodes = f" Nothing was heard of {', '.join(silent)}." if silent else ""
    return json.dumps(
        f"rank {', '.join(map(str, missing))} of {world_size} did not answer within {seconds:g} s "
        f"(engine.connect_s).{nodes} Those that did: {_listed(hosts)}. If they are only slow to start, write a larger "
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
    """Kind and first line, without the source file that gloo begins with."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {SOURCE.sub('', text)[:120]}"
