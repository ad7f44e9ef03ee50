"""Servers of the run's own: started by rank 0, one for every `tensor_parallel` devices, gone when the run is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.settings import SERVED_RANKS, Config
from trainer.errors import ConfigError, TrainingError
from trainer.machine import hardware
from trainer.ranks import distributed
from trainer.rollout.vllm import check as vllm_check
from trainer.rollout.vllm.publish import Outside

KEEPER = Path(__file__).parent / "supervisor.py"
EXTENSION = Path(__file__).parent / "worker.py"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# What tells our ranks about each other would mislead those of vLLM.
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}
LAUNCHER |= {"MASTER_ADDR", "MASTER_PORT"}
LOOK_S = 60.0  # for a Python to start
LAST_LINES = 300  # of a log; what is above is of another start
COLOURS = re.compile("\x1b\\[[0-9;]*m")
RAISED = re.compile(r"(?:\(.*? pid=\d+\) )?(?:ERROR .*?\] )?(\w[\w.]*Error: .*)")
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; by default it takes half of the machine
ON_A_CPU |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}  # the trainer has threads too


@dataclass(frozen=True, slots=True)
class Started:
    """One server and the process that keeps it."""

    url: str
    log: Path
    keeper: subprocess.Popen[bytes]

    def check(self) -> None:
        """An error when it has ended by itself."""
        if (status := self.keeper.poll()) is not None:
            raise TrainingError(
                f"rollout.vllm.start=true: vLLM has ended (status {status}). From {self.log}:\n"
                + "\n".join(last_words(self.log.read_text(errors="replace")))
            )

    def stop(self) -> None:
        if self.keeper.poll() is None:
            self.keeper.send_signal(signal.SIGTERM)
        self.keeper.wait()


def last_words(log: str) -> list[str]:
    """What it raised, because the reason is far above the end; else the end."""
    lines = COLOURS.sub("", log).splitlines()[-LAST_LINES:]
    raised = [found[1] for line in lines if (found := RAISED.match(line))]
    return list(dict.fromkeys(raised))[-3:] or lines[-8:]


def start(run: Outside) -> list[Started]:
    """As many servers as the devices make; they are not ready yet. Every rank calls it, rank 0 has them."""
    if len(set(distributed.gather(socket.gethostname()))) > 1:
        raise ConfigError(
            "rollout.vllm.start=true: these servers listen on one machine only, and the run has ranks on others. Start "
            "them yourself and write rollout.vllm.urls."
        ).of_all()
    servers: list[Started] = []  # a process does not travel to other ranks
    distributed.on_main(lambda: servers.extend(_start_all(run)))
    return servers


def _start_all(run: Outside) -> list[Started]:
    settings = run.config.rollout.vllm
    python, size = str(settings.python or sys.executable), settings.tensor_parallel
    _must_have_vllm(python)
    shares = [settings.devices[first : first + size] for first in range(0, len(settings.devices), size)] or [()]
    command = [python, *arguments(run.config, run.location, run.dtype, run.context)]
    modules = None if run.config.lora.enabled else _folder_of_the_extension(run.folder)
    logs = [run.folder / f"vllm-{number}.log" for number in range(len(shares))]
    return [_start(command, devices, log, modules) for devices, log in zip(shares, logs)]


def _folder_of_the_extension(folder: Path) -> Path:
    """With nothing else in it: our own packages would come before those of the server's environment."""
    modules = folder.resolve() / "vllm_modules"
    modules.mkdir(exist_ok=True)
    shutil.copy(EXTENSION, modules / "vllm_worker.py")
    return modules


def arguments(config: Config, location: str, dtype: str, context: int) -> list[str]:
    """Of the server, but for its port."""
    settings, lora = config.rollout.vllm, config.lora
    options = {
        "model": location,
        "served-model-name": "base",
        "dtype": DTYPES[dtype],
        "max-model-len": context,
        "tensor-parallel-size": settings.tensor_parallel,
        "logprobs-mode": vllm_check.MODE,
        "generation-config": "vllm",  # the model's own could set top-k
        "seed": config.run.seed,
    }
    if config.model.revision:
        options["revision"] = config.model.revision
    if settings.devices:
        options["gpu-memory-utilization"] = settings.memory or 0.9
    if lora.enabled:
        rank = next(rank for rank in SERVED_RANKS if rank >= lora.served_rank)
        options |= {"max-lora-rank": rank, "max-loras": vllm_check.SLOTS}
    else:
        options["worker-extension-cls"] = "vllm_worker.WholeModel"
    flags = ["--enable-lora"] * lora.enabled + ["--trust-remote-code"] * config.model.trust_remote_code
    flags += [] if settings.devices else _on_a_cpu(config.rollout.rows, context)
    named = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *named, *flags, *settings.arguments]


def tokens_at_once(rows: int, context: int) -> int:
    """So many that no prompt is read in parts: after one, vLLM 0.32 winds the random numbers of a request with a seed
    back, which those of a CPU cannot."""
    return rows * context


def _on_a_cpu(rows: int, context: int) -> list[str]:
    sizes = {"max-num-seqs": rows, "max-num-batched-tokens": tokens_at_once(rows, context)}
    return ["--enforce-eager", *(text for name, size in sizes.items() for text in (f"--{name}", str(size)))]


def _start(command: Sequence[str], devices: Sequence[int], log: Path, modules: Path | None = None) -> Started:
    port = hardware.free_port()
    keep = [sys.executable, str(KEEPER), str(os.getpid())]
    with log.open("ab") as file:
        keeper = subprocess.Popen(
            [*keep, *command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=_environment(devices, modules),
            start_new_session=True,  # Ctrl-C is for the trainer, which then asks the keeper
        )
    return Started(f"http://127.0.0.1:{port}", log, keeper)


def _environment(devices: Sequence[int], modules: Path | None = None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    # adapters come and go while it runs; development mode adds the routes that report settings and take weights
    own |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if modules is not None:
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(modules), own.get("PYTHONPATH")]))
    if devices:
        return own | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return ON_A_CPU | own


def _must_have_vllm(python: str) -> None:
    """Asked without importing it, which takes long."""
    look = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
    try:
        status = subprocess.run([python, "-c", look], capture_output=True, timeout=LOOK_S, check=False).returncode
    except OSError as error:
        raise ConfigError(f"rollout.vllm.python={python}: it cannot be run ({error.strerror}).") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"rollout.vllm.python={python}: it did not answer in {LOOK_S:g} s. Is it a Python? Is its disk slow?"
        ) from None
    if status:
        raise ConfigError(
            f"rollout.vllm.python={python}: there is no vLLM in its environment. Write the interpreter of one that has "
            "it, or pip install octet-grpo[vllm]."
        )
