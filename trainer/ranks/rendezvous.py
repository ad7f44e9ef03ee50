"""Connects the ranks of a run, and names those that are missing.

Before any weights are loaded, every rank writes its host into a small store (`stores.py`), and all ranks take part in
one all-reduce. `watchdog.py` names the missing rank if a collective fails later.
"""

import json
import os
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ClusterError
from trainer.ranks import slurm, stores, watchdog
from trainer.ranks.stores import UNREACHABLE, absent
from trainer.ranks.watchdog import Ranks, host, interfaces, short


def meet(rank: int, world_size: int, seconds: float) -> Ranks:
    """Connect to the store and exchange hosts. Raise a ClusterError that names the ranks missing after `seconds`."""
    try:
        exchange = partial(_exchange_hosts, rank, world_size, seconds)
        store, hosts = stores.within(seconds + 2 * watchdog.ANSWER_S, exchange)
    except PermissionError as error:
        raise ClusterError(str(error.filename), str(error.strerror), "Set TMPDIR to a folder of your own") from None
    except UNREACHABLE as error:
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
        reason = f"rank 0 did not answer within {seconds:g} s at {where} ({short(error)})"
        remedy = f"Is it running, and is its port free? {interfaces()}"
        raise ClusterError(f"rank {rank} on {host()}", reason, remedy) from None
    if isinstance(hosts, str):
        raise ClusterError(hosts)
    return Ranks(store, rank, hosts)


def _exchange_hosts(rank: int, world_size: int, seconds: float) -> tuple[Any, list[str] | str]:
    """Return the store, and the hosts of all ranks or a message that names the missing ranks."""
    store = stores.connect(rank, seconds)
    store.set(f"host/{rank}", host())
    if rank == 0:
        store.set("hosts", _roll_call(store, world_size, seconds))
    if absent(store, ["hosts"], seconds + watchdog.ANSWER_S):
        raise dist.DistNetworkError("it has not published the hosts")
    hosts = json.loads(store.get("hosts"))
    store.set(f"read/{rank}", "yes")
    if rank == 0 and isinstance(hosts, str):  # this process will end, and the store with it
        absent(store, [f"read/{reader}" for reader in range(world_size)], 1.0)
        stores.close(store)
    return store, hosts


def smoke_test(device: torch.device, seconds: float) -> None:
    """Check that an all-reduce works over the network that training will use."""
    count = torch.ones(1, device=device)
    dist.all_reduce(count, async_op=True).wait(timedelta(seconds=seconds))
    assert count.item() == dist.get_world_size(), f"{count.item()} of {dist.get_world_size()} ranks were added up"


def _roll_call(store: Any, world_size: int, seconds: float) -> str:
    """Return the hosts as a JSON list, or a message that names the missing ranks as a JSON string."""
    keys = [f"host/{rank}" for rank in range(world_size)]
    missing = absent(store, keys, seconds)
    hosts = {rank: store.get(key).decode() for rank, key in enumerate(keys) if rank not in missing}
    if not missing:
        return json.dumps(list(hosts.values()))
    silent: list[str] = []
    with suppress(ClusterError):  # a container may have no scontrol
        silent = [node for node in slurm.nodes() if node not in hosts.values()]
    nodes = f" No rank on {', '.join(silent)} has answered." if silent else ""
    present = ", ".join(f"rank {rank} on {name}" for rank, name in hosts.items())
    return json.dumps(
        f"rank {', '.join(map(str, missing))} of {world_size} did not answer within {seconds:g} s "
        f"(engine.connect_s).{nodes} Those that did: {present}. If they are only slow to start, use a larger "
        f"engine.connect_s. {interfaces()}"
    )
