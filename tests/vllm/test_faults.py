"""Real servers with little memory, another model, or arguments that cannot work."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import NANO, random_model, refuses
from tests.rollout.test_decoder import tokens_of
from tests.vllm import serving
from tests.vllm.serving import RealServer, built
from trainer.config.resolve import resolve
from trainer.errors import TrainingError
from trainer.machine.http_client import exchange
from trainer.model.load import load_tokenizer
from trainer.records import Sampling
from trainer.rollout.interface import SamplingContext, StaticPolicy
from trainer.rollout.turns import Stops
from trainer.rollout.vllm.client import Server
from trainer.rollout.vllm.publish import Published
from trainer.rollout.vllm.server import connect

BLOCKS = 16  # of 32 tokens; the answers of a step want about five times as many
SMALL = ["--num-gpu-blocks-override", str(BLOCKS), "--max-loras", "1", "--logprobs-mode", "processed_logprobs"]
pytestmark = pytest.mark.usefixtures("alone")


class Servers(NamedTuple):
    small: RealServer  # a small cache, one adapter, no development mode
    plain: RealServer  # no adapters, and the log-probs that vLLM has by default


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Path:
    """Another one than that of the other tests, random, with heads as large as vLLM wants them on a CPU."""
    return random_model(tmp_path_factory.mktemp("model"), tokenizer, 128)


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("servers")
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    small = RealServer(logs / "small", [*serving.ARGUMENTS, *SMALL], allowed, model)
    plain = RealServer(logs / "plain", serving.BASIC, serving.ALLOWED, model)
    try:
        small.start(), plain.start()
        yield Servers(small.ready(), plain.ready())
    finally:
        small.end()
        plain.end()


def test_answers_that_the_cache_has_no_room_for_wait_and_are_right(servers, model, tmp_path):
    """Some are thrown out when they are half done, and begun again. Where a server does not say that it has one
    slot for adapters, that goes well, too, because nothing is asked of the one before by then."""
    more = [f"model.name={model}", f"rollout.vllm.urls={servers.small.url}", "run.steps=2", "algorithm.lr=0.01"]
    more += ["rollout.group_size=8", "rollout.max_new_tokens=64", "rollout.vllm.wait_s=30"]
    with built(tmp_path / "run", *more) as run:
        serving.train_all(run)
        assert serving.apart(run) < 1e-4
        served, local = serving.served_and_local(run, Sampling(1, 0.0, 64, 0))
    said = exchange(f"{servers.small.url}/metrics", None, 5, 1 << 24, direct=True).decode()
    assert sum(map(float, re.findall(r"^vllm:num_preemptions_total\S* (\S+)$", said, re.MULTILINE))) > 4
    assert tokens_of(served) == tokens_of(local)
    assert serving.largest(tmp_path / "run", "sampler_difference/max") < 1e-4
    assert {one["version"] for one in serving.samples(tmp_path / "run")} == {0, 1}
    assert {one["groups"] for one in serving.metrics(tmp_path / "run")} == {4.0}


def test_a_server_with_another_model_is_refused(servers, tmp_path):
    with (
        built(tmp_path / "run", f"rollout.vllm.urls={servers.small.url}", "run.steps=1") as run,
        refuses("rollout.vllm.urls", names="adapter"),
    ):
        run.rollouts.sampler.sync()


def test_a_server_without_adapters_is_told_from_one_that_forbids_them(servers, tmp_path):
    with refuses("rollout.vllm.urls", names="--enable-lora"):
        Server(servers.plain.url).load_adapter(Published("octet-x-v1", tmp_path, 1))


def test_a_context_that_the_whole_cache_does_not_hold_is_the_end_of_the_log(tmp_path):
    started = ["rollout.vllm.start=true", f"rollout.vllm.python={serving.PYTHON}"]
    started += ["rollout.vllm.arguments=--block-size,32,--num-gpu-blocks-override,3"]
    config, said = resolve("nano", None, started), []
    of_nano = (str(NANO), "fp32", 128, Stops(load_tokenizer(config.model), [2]))
    run = SamplingContext(config, StaticPolicy(), *of_nano, tmp_path, said.append)
    with refuses("rollout.vllm.start", TrainingError, names="ValueError: To serve"):
        connect(run)
