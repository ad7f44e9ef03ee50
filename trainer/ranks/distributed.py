"""The process group: ranks, devices and collective operations, which return immediately in a single process.

Before any weights are loaded, every rank writes its host into a small store (`stores.py`), and all ranks take part in
one all-reduce. `watchdog.py` names the missing rank if a collective fails later.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from trainer import errors
from trainer.errors import ClusterError, ConfigError, OctetError, TrainingError
from trainer.machine import hardware
from trainer.ranks import slurm, stores, watchdog
from trainer.ranks.stores import UNREACHABLE, absent
from trainer.ranks.watchdog import Ranks, host, interfaces, short

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Item = TypeVar("Item")
Sent = TypeVar("Sent", bound=Json)
WSL_RESERVE = 10**9  # bytes that CUDA reports as free but that Windows does not provide


@dataclass
class Connection:
    """The state of the process group of this process, from connect() to disconnect()."""

    ranks: Ranks | None = None  # None in a group of one rank


_connection = Connection()
_before_disconnect = ExitStack()
before_disconnect = _before_disconnect.callback  # registers a function that needs the group, or destroys it itself


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return rank() == 0


def on_gpu() -> bool:
    """Return True if training runs on a GPU. DS_ACCELERATOR=cpu keeps PyTorch and DeepSpeed off the GPUs."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def refuse_an_idle_card() -> None:
    """Raise ConfigError if PyTorch cannot use the card of this machine. Training would silently run on the CPU."""
    gpus = [] if os.environ.get("DS_ACCELERATOR") == "cpu" else hardware.detect().gpus
    if gpus and not torch.cuda.is_available():
        remedy = "`octet doctor` says why. To train on the CPU, set DS_ACCELERATOR=cpu in the environment"
        raise ConfigError(gpus[0].name, f"torch {torch.__version__} cannot use this card", remedy)


def device() -> torch.device:
    """Return the device of this rank. A task of srun may see only one card, whatever its local rank."""
    number = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number % torch.cuda.device_count()) if on_gpu() else torch.device("cpu")


def take_card() -> None:
    """Select the card of this rank, and write its index to LOCAL_RANK, from which DeepSpeed reads it. Raise
    ClusterError if ranks would share a card."""
    if not on_gpu():
        return
    ranks, cards = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > cards > 1:  # a rank that sees only one card may have it to itself
        remedy = f"Start one for each: --num_gpus={cards} with deepspeed, --nproc-per-node={cards} with torchrun, "
        remedy += f"--ntasks-per-node={cards} with srun, or --gpus-per-task=1 where the node has {ranks}"
        reason = f"{ranks} ranks on this node, and each sees {cards} GPUs"
        raise ClusterError(f"LOCAL_WORLD_SIZE={ranks}", reason, remedy)
    os.environ["LOCAL_RANK"] = str(device().index)
    torch.cuda.set_device(device())
    if hardware.is_wsl():  # beyond the card's memory, the driver uses that of the machine, and can crash Windows
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(max(0.1, (free - WSL_RESERVE) / total))


def connect(timeout_s: float, connect_s: float = 60.0) -> None:
    """Join the process group. A plain `python train.py` is a group of one rank."""
    present = {name for _, name in socket.if_nameindex()}
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name.partition(":")[0] not in present:  # eth0:1 is an address of eth0
            raise ClusterError(f"GLOO_SOCKET_IFNAME={name}", "there is no such network interface", interfaces())
    port = str(hardware.free_port())
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    take_card()
    if stores.is_one_machine() and "lo" in present:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # no other machine can connect
    # Python objects and barriers use gloo even with NCCL, because its errors can be caught, and name the problem
    backend, timeout = "cpu:gloo,cuda:nccl" if on_gpu() else "gloo", timedelta(seconds=timeout_s)
    dist.distributed_c10d.default_pg_timeout = timeout  # the timeout of the groups that DeepSpeed makes
    if world_size() == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    ranks = meet(rank(), world_size(), connect_s)
    with ranks.naming_the_missing(f"{connect_s:g} s (engine.connect_s), in the first all-reduce"):
        store = stores.for_group(ranks.store, world_size())
        stores.within(connect_s, lambda: dist.init_process_group(backend, None, timeout, world_size(), rank(), store))
        count = torch.ones(1, device=device())  # becomes the number of ranks, over the network of the training
        dist.all_reduce(count, async_op=True).wait(timedelta(seconds=connect_s))
        assert count.item() == world_size(), f"{count.item()} of {world_size()} ranks were added up"
    _connection.ranks = ranks


def naming_the_missing(timeout_s: float) -> AbstractContextManager[None]:
    """Turn the error of a failed collective into one that names the missing rank."""
    ranks = _connection.ranks
    return ranks.naming_the_missing(f"{timeout_s:g} s (engine.timeout_s)") if ranks else nullcontext()


def keep_stacks_in(folder: Path) -> None:
    """Set the folder into which a rank that is stuck, and the ranks that wait for it, write the stacks of threads."""
    if _connection.ranks:
        _connection.ranks.stacks = folder


def ranks_here() -> int:
    ranks = _connection.ranks
    return ranks.hosts.count(ranks.hosts[ranks.mine]) if ranks else 1


def is_first_here() -> bool:
    """Return True on exactly one rank per node."""
    ranks = _connection.ranks
    return not ranks or ranks.hosts.index(ranks.hosts[ranks.mine]) == ranks.mine


def disconnect() -> None:
    _before_disconnect.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if _connection.ranks:
        stores.close(_connection.ranks.store)
        _connection.ranks = None


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def gather(item: Sent) -> list[Sent]:
    """Return the items of all ranks, in order, on every rank. JSON, which runs no code, makes tuples into lists."""
    if world_size() == 1:
        return [item]
    sent = torch.frombuffer(bytearray(json.dumps(item), "ascii"), dtype=torch.uint8)
    sizes = list(torch.zeros(world_size(), dtype=torch.int64).split(1))
    dist.all_gather(sizes, torch.tensor([len(sent)]))
    parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(sent, (0, len(parts[0]) - len(sent))))
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]


def on_main(work: Callable[[], Item]) -> Item:
    """Call a function on rank 0. Return its result, or raise its error, on every rank. Every rank must call this."""
    try:
        result: Any = work() if is_main() else None
    except Exception as error:  # of any kind, because the other ranks are waiting
        sent = (TrainingError.__name__, f"rank 0 failed: {type(error).__name__}: {error}")
        if isinstance(error, OctetError):
            error.of_all()
            sent = (type(error).__name__, str(error))
        gather((None, sent))
        raise
    result, failure = gather((result, None))[0]
    if failure is not None:
        kind, message = failure
        raise getattr(errors, kind, TrainingError)(message).of_all()
    return cast("Item", result)


def sum_in_place(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks, on every rank."""
    if world_size() > 1:
        dist.all_reduce(tensor)


def mine(items: Sequence[Item]) -> list[Item]:
    """Return this rank's share, every `world_size`-th item. Shares differ in length by at most one."""
    return list(items[rank() :: world_size()])


def dealt(items: list[Any]) -> list[Any]:
    """Return the items of all ranks, on every rank, in the order of a sequence that `mine` has split."""
    everywhere = gather(items)
    return [part[at] for at in range(max(map(len, everywhere))) for part in everywhere if at < len(part)]


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
