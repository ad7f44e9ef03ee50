"""The options of vLLM engines, and servers on this machine: one per `tensor_parallel` devices, until the run ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.read_yaml import written
from trainer.config.settings import SERVED_RANKS
from trainer.errors import ConfigError, TrainingError
from trainer.machine import disk, hardware
from trainer.machine.user_code import must_be_named
from trainer.ranks import distributed
from trainer.records import Sampling
from trainer.rollout.draw_tokens import group_seed
from trainer.rollout.interface import SamplingContext
from trainer.rollout.turns import OpenAnswer
from trainer.rollout.vllm.publish import MODE, SLOTS

SUPERVISOR = Path(__file__).parent / "supervisor.py"
MODULES = Path(__file__).parent / "server_modules"  # a folder of their own, because our packages would hide a server's
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Variables that describe our ranks. vLLM would read them as a description of its own ranks.
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}
RANK_VARIABLES |= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
PYTHON_S = 60.0  # timeout for the start of an interpreter
LAST_LINES = 300  # lines of a log to search; earlier ones may belong to an earlier start
COLOURS = re.compile("\x1b\\[[0-9;]*m")
RAISED = re.compile(r"(?:\(.*? pid=\d+\) )?(?:ERROR .*?\] )?(\w[\w.]*Error: .*)")
# Sent with every request, so that the model's own generation config cannot change the distribution.
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; vLLM's default is half of the machine's memory
ON_A_CPU |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}  # leave cores to the trainer


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that this rank has started, and the process that supervises it."""

    url: str
    log: Path
    supervisor: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raise TrainingError if the server has ended."""
        if (status := self.supervisor.poll()) is not None:
            lines = error_lines(self.log.read_text(errors="replace"))
            reason = f"vLLM has ended (status {status}). From {self.log}:"
            raise TrainingError("rollout.vllm.start=true", "\n".join([reason, *lines]))

    def stop(self) -> None:
        if self.supervisor.poll() is None:
            self.supervisor.send_signal(signal.SIGTERM)
        self.supervisor.wait()


def error_lines(log: str) -> list[str]:
    """Return the last error messages of a log, which may be far above its end, or its last lines if it has none."""
    lines = COLOURS.sub("", log).splitlines()[-LAST_LINES:]
    raised = [found[1] for line in lines if (found := RAISED.match(line))]
    return list(dict.fromkeys(raised))[-3:] or lines[-8:]


def start(context: SamplingContext) -> list[ServerProcess]:
    """Start the servers, and do not wait until they are ready. Every rank calls it; only rank 0 gets the processes."""
    if distributed.ranks_here() < distributed.world_size():
        reason = "these servers listen on one machine only, and the run has ranks on other machines"
        raise ConfigError("rollout.vllm.start=true", reason, "Start them yourself and write rollout.vllm.urls").of_all()
    servers: list[ServerProcess] = []  # filled on rank 0, because a process cannot be sent to other ranks
    distributed.on_main(lambda: servers.extend(_start_all(context)))
    return servers


def _start_all(context: SamplingContext) -> list[ServerProcess]:
    settings = context.config.rollout.vllm
    python, size = str(settings.python or sys.executable), settings.tensor_parallel
    for setting in (f"python={python}", f"arguments={written([*settings.arguments])}"):
        must_be_named(f"rollout.vllm.{setting}")
    _must_have_vllm(python)
    shares = [settings.devices[first : first + size] for first in range(0, len(settings.devices), size)] or [()]
    command = [python, *arguments(context)]
    logs = [context.folder / f"vllm-{number}.log" for number in range(len(shares))]
    return [_start(command, devices, log) for devices, log in zip(shares, logs)]


def arguments(context: SamplingContext) -> list[str]:
    """Return the arguments of a server, except its address."""
    config, settings = context.config, context.config.rollout.vllm
    options = engine_options(context, bool(settings.devices))
    options |= {"served_model_name": "base", "tensor_parallel_size": settings.tensor_parallel}
    options |= {"middleware": "vllm_key_check.KeyCheck"}
    if settings.devices:
        options["gpu_memory_utilization"] = settings.memory or 0.9
    if not config.lora.enabled:
        options["worker_extension_cls"] = "vllm_worker.WholeModel"
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items() if value not in (None, False)]
    named = [text for name, value in given for text in ([name] if value is True else [name, str(value)])]
    return ["-m", "vllm.entrypoints.openai.api_server", *named, *settings.arguments]


def engine_options(context: SamplingContext, on_cards: bool) -> dict[str, Any]:
    """Return the options of an engine, of any kind, under vLLM's names."""
    config, lora, rows = context.config, context.config.lora, context.config.rollout.rows
    options = {
        "model": context.location,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": DTYPES[context.dtype],
        "max_model_len": context.context_length,
        "logprobs_mode": MODE,
        "generation_config": "vllm",  # the model's own may set top-k
        "seed": config.run.seed % 2**32,  # NumPy, which vLLM seeds, takes 32 bits
        "enable_lora": lora.enabled,
        "enforce_eager": not on_cards,
    }
    if lora.enabled:
        rank = next(rank for rank in SERVED_RANKS if rank >= lora.served_rank)
        options |= {"max_lora_rank": rank, "max_loras": SLOTS}
    if not on_cards:
        # The limit is large enough that no prompt is read in parts, for which vLLM 0.32 rewinds the generator of a
        # request with a seed, which a CPU generator does not support.
        options |= {"max_num_seqs": rows, "max_num_batched_tokens": rows * context.context_length}
    return options


def turn_options(context: SamplingContext, answer: OpenAnswer, sampling: Sampling, count: int) -> dict[str, Any]:
    """Return the sampling options for `count` alternatives of the next turn of an answer, for an engine of any kind."""
    later = f"/{answer.number}/{len(answer.tokens)}" if answer.tokens else ""
    return NEUTRAL | {
        "n": count,
        "temperature": sampling.temperature,
        "max_tokens": answer.end - len(answer.tokens),
        "seed": group_seed(sampling, answer.prompt, later),
        "stop_token_ids": sorted(context.stops.tokens),
        "stop": list(context.stops.strings),
        "include_stop_str_in_output": True,  # otherwise vLLM may withhold the tokens of a stop string
        "logprobs": 0,
    }


def _start(command: Sequence[str], devices: Sequence[int], log: Path) -> ServerProcess:
    port = hardware.free_port()
    supervise = [sys.executable, str(SUPERVISOR), str(os.getpid())]
    with open(log, "ab", opener=disk.not_a_link) as file:
        supervisor = subprocess.Popen(
            [*supervise, *command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=_environment(devices),
            start_new_session=True,  # Ctrl-C must reach only the trainer, which then stops the supervisor
        )
    return ServerProcess(f"http://127.0.0.1:{port}", log, supervisor)


def _environment(devices: Sequence[int]) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    if variables.get("PYTORCH_ALLOC_CONF") == hardware.GROWING:
        del variables["PYTORCH_ALLOC_CONF"]  # the cards of a server cannot share such memory
    # enables the routes that load adapters, and in development mode those that report settings and load weights
    variables |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(MODULES), variables.get("PYTHONPATH")]))
    if devices:
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return ON_A_CPU | variables


def _must_have_vllm(python: str) -> None:
    """Raise ConfigError if an interpreter has no vLLM. It is not imported, because that takes long."""
    look = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('vllm') else 3)"
    try:
        status = subprocess.run([python, "-c", look], capture_output=True, timeout=PYTHON_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"rollout.vllm.python={python}", f"it cannot be run as a Python ({error})") from None
    if status:
        remedy = f"Write the interpreter of one that has it, or run: {python} -m pip install vllm"
        raise ConfigError(f"rollout.vllm.python={python}", "there is no vLLM in its environment", remedy)
