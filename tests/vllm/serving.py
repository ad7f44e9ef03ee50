"""What the tests against the real vLLM share: a server that can be killed and started again, and runs that use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.conftest import NANO, ROOT, lines_of
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.config.settings import Lora, Model
from trainer.loop import train as run_loop
from trainer.machine import hardware
from trainer.machine.http_client import NoReply, exchange
from trainer.model.load import load_model
from trainer.model.lora import add_adapter, save_adapter, trainable
from trainer.records import Completion, Sampling
from trainer.rollout.hf import HfSampler
from trainer.rollout.turns import TurnTaking
from trainer.rollout.vllm.process import RANK_VARIABLES
from trainer.run import assemble, sampler_check
from trainer.run.assemble import Run

# A cache block is 32 tokens here, and prompts are longer than two of them: in a shorter one a stale cache stays hidden.
LONG = "Think it through: " + "read the story, write down what is known, and work towards what is asked. " * 3
BASIC = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "64", "--enforce-eager"]
BASIC += ["--no-enable-chunked-prefill", "--block-size", "32", "--generation-config", "vllm"]
BASIC += ["--max-num-batched-tokens", "16384"]  # no prompt in parts; see engine_options
ARGUMENTS = [*BASIC, "--enable-lora", "--max-lora-rank", "16"]
PROCESSED = ["--logprobs-mode", "processed_logprobs", "--max-loras", "2"]
# The servers' vLLM; by default that of this environment. Another one shows whether another version works.
PYTHON = os.environ.get("OCTET_VLLM_PYTHON", sys.executable)
# one process, no compiler, one thread, a small cache
QUICK = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
QUICK |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
QUICK |= {"VLLM_NO_USAGE_STATS": "1"}
ALLOWED = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}


def surroundings(**more: str) -> dict[str, str]:
    """Return the environment for another process: this one may be a group of one, which others must not join."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | QUICK | more


class RealServer:
    """vLLM with one model, always on the same port."""

    def __init__(self, log: Path, arguments: list[str], environment: dict[str, str], model: Path = NANO) -> None:
        self.port = hardware.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.arguments = arguments
        self.environment = environment
        self.model = model
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RealServer:
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(self.port), *self.arguments]
        with self.log.open("ab") as log:
            own = {"env": surroundings(**self.environment), "cwd": ROOT, "start_new_session": True}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **own)
        return self

    def ready(self) -> RealServer:
        assert self.process is not None, "start it first"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                exchange(f"{self.url}/v1/models", None, 5, 1 << 20, direct=True)
            except NoReply:
                time.sleep(0.2)
            else:
                return self
        raise AssertionError(f"vLLM does not answer:\n{self.log.read_text()[-3000:]}")

    @contextmanager
    def running(self) -> Iterator[RealServer]:
        try:
            yield self.start().ready()
        finally:
            self.end()

    def end(self, number: int = signal.SIGINT) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, number)
            self.process.wait()

    def loaded(self) -> list[str]:
        models = json.loads(exchange(f"{self.url}/v1/models", None, 5, 1 << 20, direct=True))["data"]
        return [model["id"] for model in models if model["parent"]]


def overrides(folder: Path, *more: str) -> list[str]:
    """A small run whose prompts are long."""
    small = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.problems=0"]
    small += ["reward.weights={repetition: 1.0}", "reward.repetition_words=1"]  # the model babbles, and differs in that
    return [f"run.dir={folder}", f"prompt.system={json.dumps(LONG)}", "run.merge=false", *small, *more]


def built(folder: Path, *more: str) -> AbstractContextManager[Run]:
    """A small run, with the real engine and the real server."""
    return opened(*overrides(folder, *more))


@contextmanager
def opened(*settings: str) -> Iterator[Run]:
    run = assemble.build(Request(resolve("nano", None, settings), "nano", ""))
    try:
        yield run
    finally:
        run.rollouts.close()
        run.log.close()


def train_all(run: Run) -> None:
    run_loop(run.log.config, *run)


def apart(run: Run) -> float:
    """The largest difference of a log-prob between what samples and what is trained."""
    return max(difference for of_one in sampler_check.differences_of(run).values() for difference in of_one)


def served_and_local(run: Run, drawn: Sampling) -> tuple[dict[int, list[Completion]], dict[int, list[Completion]]]:
    """Return what the sampler of a run answers to the prompts of a later step, and what the local one does."""
    prompts, sampler = run.rollouts.prompts_of(7), run.rollouts.sampler
    local = HfSampler(run.updater.policy.model, TurnTaking(sampler.context.stops), 8)
    return dict(sampler.sample(prompts, drawn)), dict(local.sample(prompts, drawn))


def save_random_adapter(folder: Path) -> torch.nn.Module:
    """Save an adapter that makes the embedded model another one, and return that one."""
    model = add_adapter(load_model(Model(), "fp32", torch.device("cpu")), Lora(r=8, targets="all"))
    for value in trainable(model).values():
        value.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    save_adapter(model, folder)
    return model


def start(folder: Path, *more: str, ranks: int = 1) -> subprocess.Popen[str]:
    """Start a small run in a process of its own, or in one for each rank."""
    programs = Path(sys.executable).parent
    launcher = [f"{programs}/deepspeed", f"--num_gpus={ranks}", "--no_local_rank"]
    launcher += [f"--master_port={hardware.free_port()}"]
    launched = [sys.executable] if ranks == 1 else launcher
    command = [*launched, f"{ROOT}/train.py", "--preset", "nano", *overrides(folder, *more)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=surroundings(PATH=f"{programs}:{os.environ['PATH']}"), cwd=ROOT, **pipes)


def train(folder: Path, *more: str, ranks: int = 1) -> str:
    """The whole output of a run that has to end well."""
    process = start(folder, *more, ranks=ranks)
    said, _ = process.communicate(timeout=580)
    assert process.returncode == 0, said[-4000:]
    return said


def metrics(folder: Path) -> list[dict[str, float]]:
    return lines_of(folder / "metrics.jsonl")


def largest(folder: Path, name: str) -> float:
    """Over the steps that trained on something."""
    return max(one[name] for one in metrics(folder) if name in one)


def samples(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "samples.jsonl")
