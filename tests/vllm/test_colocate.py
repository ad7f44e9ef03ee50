"""rollout.engine=vllm_colocate: the real vLLM and the real DeepSpeed engine in one process."""

import json
import sys

import pytest

from tests.conftest import NANO, ran
from tests.vllm.serving import largest, metrics, samples, save_random_adapter, surroundings, train

SAME = """
import json, os, random, numpy, torch
from dataclasses import replace
from pathlib import Path
from trainer.ranks import distributed
from trainer.errors import ConfigError
from trainer.rollout.interface import SamplingContext, StaticPolicy
from trainer.rollout.turns import Stops
from trainer.rollout.vllm.colocate import VllmColocateSampler
from trainer.model.load import load_tokenizer
from trainer.config.resolve import resolve

def seed():
    for of_one in (random.seed, numpy.random.seed, torch.manual_seed):
        of_one(7)

def drawn():
    return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]

distributed.connect(60)
config = resolve("nano", None, ["rollout.engine=vllm_colocate"])
stops = Stops(load_tokenizer(config.model), [2])
seed()
expected = drawn()
seed()
before = dict(os.environ), torch.get_num_threads()
said = []
run = SamplingContext(config, StaticPolicy(), NANO, "fp32", 128, stops, Path("."), said.append)
try:
    VllmColocateSampler(replace(run, location="/nowhere"))
except ConfigError as error:
    refused = str(error)
sampler = VllmColocateSampler(run)
is_left = [drawn() == expected, (dict(os.environ), torch.get_num_threads()) == before]
print("FOUND", json.dumps([refused, is_left, said]))
"""


WHOLE = ["lora.enabled=false", "algorithm.lr=0.001"]


@pytest.mark.parametrize(("more", "ranks"), [([], 1), ([], 2), (WHOLE, 1)], ids=["alone", "two ranks", "whole model"])
def test_what_samples_is_what_is_trained_at_every_step(tmp_path, more, ranks):
    """In the program that also trains: each step begins with the policy of the step before."""
    folder = tmp_path / "run"
    colocated = ["rollout.engine=vllm_colocate", "rollout.dead_groups=keep"]  # every step changes the policy
    said = train(folder, *colocated, *more, "run.steps=4", "eval.problems=4", ranks=ranks)
    assert "log-probs of sampler and trainer differ by" in said
    assert "Traceback" not in said
    assert largest(folder, "sampler_difference/max") < 1e-4
    assert [one["version"] for one in samples(folder)][::8] == [0, 1, 2, 3]
    assert {one["groups"] for one in metrics(folder) if "groups" in one} == {4.0}
    assert not (folder / "published").exists()


def test_answers_end_with_the_token_that_completes_a_stop_string(tmp_path):
    folder = tmp_path / "run"
    train(folder, "rollout.engine=vllm_colocate", "run.steps=2", "rollout.stop='= '", "rollout.dead_groups=keep")
    assert largest(folder, "sampler_difference/max") < 1e-4
    texts = [one["completion"] for one in samples(folder)]
    assert not any("= " in text[:-2] for text in texts)
    assert any(text.endswith("= ") for text in texts)


def test_building_the_engine_leaves_random_numbers_and_environment_alone():
    code = f"NANO = {str(NANO)!r}\n{SAME}"
    answer = ran(sys.executable, "-c", code, timeout=580, env=surroundings())
    found = [line for line in answer.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, answer.stderr[-3000:]
    refused, *rest = json.loads(found[0].removeprefix("FOUND "))
    assert refused.startswith("rollout.engine=vllm_colocate: vLLM cannot start in this process")
    assert rest == [[True, True], []]


def test_octet_eval_has_base_and_adapter_answered_in_its_own_process(tmp_path):
    """Log-probs are compared for each, because the adapter is loaded after the base was checked."""
    adapter = tmp_path / "adapter"
    save_random_adapter(adapter)
    settings = [f"--adapter={adapter}", "--model=nano", "--problems=8", f"--out={tmp_path / 'out'}"]
    command = [sys.executable, "-m", "trainer.commands.main", "eval", *settings, "rollout.engine=vllm_colocate"]
    answer = ran(*command, check=True, timeout=580, env=surroundings())
    assert answer.stderr.count("log-probs of sampler and trainer differ by") == 2
    assert not (tmp_path / "out" / "published").exists()
