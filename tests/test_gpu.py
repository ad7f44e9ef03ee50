"""What only a CUDA device shows: bf16 and fp16 through the engine, pinned offload, decode steps captured as graphs."""

import json
import os
import shutil
import sys

import pytest

from tests.conftest import ROOT, launch, lines_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no CUDA device here")]

DS_CONFIGS = ["zero2_offload", "zero2", "zero3", "zero3_offload"]


STUB = "CUDA_STUB" in os.environ  # computes in software: two steps show that it runs, not that it learns
FEW = ["run.steps=2", "rollout.problems=2", "rollout.max_new_tokens=24", "eval.problems=4"]
STUB_TOO = pytest.mark.cuda  # the few that the stub has time for; `bash tests/run.sh cuda -m gpu` runs all


def has_learned(base: float, trained: float) -> bool:
    return STUB or trained > base + 0.1


def train(folder, *settings: str) -> list[float]:
    """Accuracy of the base, the trained model and the merged one, if there is one."""
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "nano", *settings, "run.dir=it"]
    command += FEW if STUB else ["run.steps=20", "eval.problems=128"]
    answer = launch("env", "-u", "DS_ACCELERATOR", *command, folder=folder, check=True)  # which conftest.py sets
    assert "on 1 x cuda" in answer.stdout
    return [one["accuracy"] for one in json.loads((folder / "it/eval.json").read_text())["evaluations"]]


QUICK = {("fp16", "zero2"), ("bf16", "zero3")}
PAIRS = [(dtype, ds_config) for dtype in ("bf16", "fp16") for ds_config in DS_CONFIGS]


@pytest.mark.parametrize(
    "dtype, ds_config", [pytest.param(*pair, marks=[STUB_TOO] * (pair in QUICK)) for pair in PAIRS]
)
def test_the_embedded_model_trains_on_the_card(tmp_path, dtype, ds_config):
    base, trained, _ = train(tmp_path, f"model.dtype={dtype}", f"engine.ds_config={ds_config}")
    assert has_learned(base, trained)
    metrics = lines_of(tmp_path / "it/metrics.jsonl")
    assert all(record["sampler_difference"] < 0.05 for record in metrics if "sampler_difference" in record)


@STUB_TOO
def test_8_bit_states_on_the_card(tmp_path):
    base, trained, _ = train(tmp_path, "optim.name=adamw_8bit", "engine.ds_config=zero2")
    assert has_learned(base, trained)


@pytest.mark.parametrize("variant", ["lora.dora=true", "lora.init=pissa algorithm.lr=3e-4", "lora.plus_ratio=4"])
def test_adapters_of_each_kind_train_and_merge_on_the_card(tmp_path, variant):
    base, trained, merged = train(tmp_path, "model.dtype=bf16", *variant.split())
    assert has_learned(base, trained)
    assert has_learned(base, merged)


@pytest.mark.parametrize("ds_config", DS_CONFIGS)
def test_the_whole_model_trains_on_the_card(tmp_path, ds_config):
    settings = ["model.dtype=bf16", "lora.enabled=false", "algorithm.lr=3e-4", f"engine.ds_config={ds_config}"]
    base, trained = train(tmp_path, *settings)
    assert has_learned(base, trained)


@STUB_TOO
@pytest.mark.parametrize("rows", [64, 12])
def test_captured_steps_give_the_tokens_of_generate(rows, tokenizer):
    import torch

    from tests.rollout.test_decoder import SOME, adapted, family, prompts, sampling, turns
    from trainer.rollout.decoder.sampler import DecodeSampler
    from trainer.rollout.hf import HfSampler

    model, asked, said = adapted(family()).cuda(), prompts(9, 3, 30, 4, 17, 11, 23, 6), []
    fast = DecodeSampler(model, turns(tokenizer, SOME), rows, said.append)
    for new_tokens in (40, 20):  # the second finds other steps captured
        greedy = sampling(group=8, temperature=0.0, max_new_tokens=new_tokens)
        wanted = dict(HfSampler(model, turns(tokenizer, SOME), 64).sample(asked, greedy))
        got = dict(fast.sample(asked, greedy))
        tokens = [{n: [one.tokens for one in group] for n, group in found.items()} for found in (got, wanted)]
        assert tokens[0] == tokens[1]
    assert said == [], "the step could not be captured"
    assert fast.batch.decode_step._graphs
    once, again = (dict(fast.sample(asked, sampling(group=8, max_new_tokens=40))) for _ in range(2))
    assert once == again
    torch.cuda.synchronize()


@pytest.mark.skipif(STUB, reason="the stub takes no time")
def test_the_bandwidth_table_can_be_filled(tmp_path):
    command = [sys.executable, str(ROOT / "bench/decode.py"), "--device", "cuda", "--dtype", "bf16", "--rows", "64"]
    command += ["--repetitions", "1", "--json", "--out", str(tmp_path / "decode.json")]
    assert json.loads(launch(*command, check=True).stdout)["speedup"]["64"] > 1
