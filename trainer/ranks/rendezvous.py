"""Connect the ranks of a run, and name those that did not come.

Before any weights load, every rank writes its host into a small store (`stores.py`), and all of them take part in one
all-reduce. `watchdog.py` names the rank that is missing when a collective fails later.
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
    """Connect to the store and exchange hosts. Raise ClusterError that names the ranks that did not come in time."""
    try:
        exchange = partial(_exchange_hosts, rank, world_size, seconds)
        store, found = stores.within(seconds + 2 * watchdog.ANSWER_S, exchange)
    except PermissionError as error:
        raise ClusterError(str(error.filename), str(error.strerror), "Set TMPDIR to a folder of your own") from None
    except UNREACHABLE as error:
        where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
        reason = f"rank 0 did not answer within {seconds:g} s at {where} ({short(error)})"
        remedy = f"Is it running, and is its port free? {interfaces()}"
        raise ClusterError(f"rank {rank} on {host()}", reason, remedy) from None
    if isinstance(found, str):
        raise ClusterError(found)
    return Ranks(store, rank, found)


def _exchange_hosts(rank: int, world_size: int, seconds: float) -> tuple[Any, list[str] | str]:
    """Return the store, and the hosts of all ranks or a message that names those that are missing."""
    store = stores.connect(rank, seconds)
    store.set(f"host/{rank}", host())
    if rank == 0:
        store.set("hosts", _roll_call(store, world_size, seconds))
    if absent(store, ["hosts"], seconds + watchdog.ANSWER_S):
        raise dist.DistNetworkError("it has not said who is there")
    found = json.loads(store.get("hosts"))
    store.set(f"read/{rank}", "yes")
    if rank == 0 and isinstance(found, str):  # this process ends now, and the store with it
        absent(store, [f"read/{reader}" for reader in range(world_size)], 1.0)
        stores.close(store)
    return store, found


def smoke_test(device: torch.device, seconds: float) -> None:
    """Check that an all-reduce works over the network that training will use."""
    count = torch.ones(1, device=device)
    dist.all_reduce(count, async_op=True).wait(timedelta(seconds=seconds))
    assert count.item() == dist.get_world_size(), f"{count.item()} of {dist.get_world_size()} ranks were added up"


def _roll_call(store: Any, world_size: int, seconds: float) -> str:
    """Return the hosts as a JSON list, or, as a JSON string, a message that says which ranks are missing."""
    keys = [f"host/{rank}" for rank in range(world_size)]
    missing = absent(store, keys, seconds)
    hosts = {rank: store.get(key).decode() for rank, key in enumerate(keys) if rank not in missing}
    heard = ", ".join(f"rank {rank} on {name}" for rank, name in hosts.items())
    if not missing:
        return json.dumps(list(hosts.values()))
    silent: list[str] = []
    with suppress(ClusterError):  # there is no scontrol in a container
        silent = [node for node in slurm.nodes() if node not in hosts.values()]
    nodes = f" Nothing was heard from {', '.join(silent)}." if silent else ""
    return json.dumps(
        f"rank {', '.join(map(str, missing))} of {world_size} did not answer within {seconds:g} s "
        f"(engine.connect_s).{nodes} Those that did: {heard}. If they are only slow to start, use a larger "
        f"engine.connect_s. {interfaces()}"
    )
