"""rollout by vLLM in the trainer's own process, asleep while the policy trains. The only file that imports vllm.

The base is on the card twice: once to sample, once to train. Each rank has an engine of its own, so groups need no
further dealing out, and one adapter on disk is read by all of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from trainer.config.settings import SERVED_RANKS
from trainer.errors import ConfigError
from trainer.memory import search
from trainer.memory.planner import Planner
from trainer.ranks import distributed
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.collect import Sampler
from trainer.rollout.vllm import check as vllm_check
from trainer.rollout.vllm.process import DTYPES, ON_A_CPU, tokens_at_once
from trainer.rollout.vllm.publish import NEUTRAL, Outside, Publisher, seed_of

UNPLANNED = 0.3  # share of a card, for a model of a family that is not planned for
CPU_CACHE_BYTES = 256 << 20  # by default vLLM takes half of the machine


class VllmColocateSampler(Sampler):
    """`settings.vllm.memory` of the card belongs to it while it samples."""

    def __init__(self, run: Outside) -> None:
        if (found := vllm_check.installed()) is None:
            raise ConfigError(
                "rollout.engine=vllm_colocate: vLLM is not in this environment. pip install octet-grpo[vllm], or write "
                "rollout.engine=decode."
            )
        vllm_check.check_version(found, "rollout.engine=vllm_colocate", run.say, vllm_check.COLOCATED)
        self.source, self.tokenizer = run.source, run.tokenizer
        self.stop_tokens = sorted(run.stop_tokens)
        self.sleeps = bool(run.config.rollout.vllm.sleep) and distributed.on_gpu()  # a CPU never sleeps
        self.publisher = Publisher(run.folder / "published")
        self.adapter: Any = None
        self.whole = not run.config.lora.enabled
        self._shown: int | None = None  # the engine starts with the base
        with undisturbed(), explained():
            self.llm = _engine(run, self.sleeps)
        self._fall_asleep()

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        from vllm import SamplingParams

        if self.sleeps:
            self.llm.wake_up()
        try:
            version = self.sync()
            if not prompts:
                return
            settings = [
                SamplingParams(
                    n=sampling.group,
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_new_tokens,
                    seed=seed_of(sampling.seed, index),
                    stop_token_ids=self.stop_tokens,
                    logprobs=0,
                    detokenize=False,
                    **NEUTRAL,
                )
                for index in range(len(prompts))
            ]
            asked = [{"prompt_token_ids": list(prompt.tokens)} for prompt in prompts]
            adapter = None if version is None else self.adapter  # of a whole model there is none
            answered = self.llm.generate(asked, settings, lora_request=adapter, use_tqdm=False)
        finally:
            self._fall_asleep()
        for index, output in enumerate(answered):
            yield index, [self._completion(answer, version) for answer in output.outputs]

    def sync(self) -> int | None:
        """Every rank calls it: what the engine samples with is the policy of this moment; None is the base."""
        version = self.source.version
        if self.whole:
            self._take_weights(version)
        elif version is not None and (self.adapter is None or self.adapter.lora_int_id != version + 1):
            self._take_adapter(version)
        return version

    def _take_adapter(self, version: int) -> None:
        from vllm.lora.request import LoRARequest

        published, before = self.publisher.publish(self.source, version), self.adapter
        self.adapter = LoRARequest(published.name, version + 1, str(published.path))
        if before is not None:
            self.llm.llm_engine.remove_lora(before.lora_int_id)

    def _take_weights(self, version: int | None) -> None:
        if version == self._shown:
            return
        published = self.publisher.publish(self.source, version)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(published.path)})
        self.llm.reset_prefix_cache()
        self._shown = version

    def close(self) -> None:
        """The engine gives its memory back. It ends with our process group, because it would end that with its own."""
        self.publisher.close()
        if distributed.on_gpu():
            self.llm.sleep(level=2)
        distributed.before_disconnect(self.llm.llm_engine.engine_core.shutdown)

    def _fall_asleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=1)

    def _completion(self, answer: Any, version: int | None) -> Completion:
        tokens = tuple(answer.token_ids)
        logprobs = tuple(float(choices[token].logprob) for token, choices in zip(tokens, answer.logprobs, strict=True))
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(tokens, logprobs, text, tokens[-1] not in self.stop_tokens, version)


def _engine(run: Outside, sleeps: bool) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, and not in one beside it
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the screen belongs to the run
    on_a_card = distributed.on_gpu()
    for name, value in {} if on_a_card else ON_A_CPU.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    settings, lora = run.config.rollout, run.config.lora
    if not on_a_card and not lora.enabled:
        from trainer.rollout.vllm import worker as vllm_worker  # noqa: F401  packed weights could not be replaced
    rank = next((rank for rank in SERVED_RANKS if rank >= lora.served_rank), SERVED_RANKS[0])
    on_a_cpu = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    on_a_cpu["max_num_batched_tokens"] = tokens_at_once(settings.rows, run.context)
    memory = {"gpu_memory_utilization": _share(run)} if on_a_card else {}
    return LLM(
        model=run.location,
        revision=run.config.model.revision,
        trust_remote_code=run.config.model.trust_remote_code,
        dtype=DTYPES[run.dtype],
        seed=run.config.run.seed % 2**32,  # vLLM seeds numpy with it
        max_model_len=run.context,
        max_num_seqs=settings.rows,
        enable_lora=lora.enabled,
        max_loras=vllm_check.SLOTS,
        max_lora_rank=rank,
        logprobs_mode=vllm_check.MODE,
        generation_config="vllm",
        distributed_executor_backend="external_launcher",
        enable_sleep_mode=on_a_card,
        enforce_eager=not on_a_card,
        disable_log_stats=True,
        **(memory or on_a_cpu),
    )


def _share(run: Outside) -> float:
    """Of the card: what was asked for, else what `octet plan` counts."""
    if run.config.rollout.vllm.memory:
        return run.config.rollout.vllm.memory
    if (shape := search.planned_shape(run.config)) is None:
        return UNPLANNED
    card = torch.cuda.get_device_properties(distributed.device()).total_memory
    return Planner(shape, run.config, distributed.world_size(), card).vllm / card


@contextmanager
def explained() -> Iterator[None]:
    """What an engine that cannot be built says, as an error of the setting that wanted it."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"rollout.engine=vllm_colocate: vLLM cannot start in this process ({reason}). Where memory is short, write "
            "another rollout.vllm.memory or a smaller rollout.rows; without vLLM, rollout.engine=decode."
        ) from error


@contextmanager
def undisturbed() -> Iterator[None]:
    """Building the engine seeds everything anew and writes into the environment; outside, nothing of that is seen."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cards = torch.cuda.get_rng_state_all() if distributed.on_gpu() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cards:
            torch.cuda.set_rng_state_all(cards)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)
