"""The families of today, from their own configurations with random weights: what each of them promises, in one table.

tests/rollout/test_decoder.py, tests/rollout/test_turns.py and tests/loss/test_shared_prefix.py hold the greedy tokens,
the log-probs and the gradients of all families in fp32; tests/llama has llama.cpp read their files.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.conftest import NANO, ROOT, launch, learned, lines_of
from tests.forks import forked
from tests.rollout.test_decoder import SOME, adapted, family, prompts, sample
from trainer.batch.pack import to_tensors
from trainer.loss.logprobs import LogProbs
from trainer.records import TrainingRow
from trainer.rollout.decoder.sampler import DecodeSampler

TODAY = ["smollm3", "lfm2", "qwen3.5", "gemma4"]
FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16", "reward.control=random"]
FEW += ["eval.problems=4", "run.steps=2", "run.save_every=1", "run.keep=9", "run.dir=it"]


@pytest.mark.parametrize("name", TODAY)
def test_in_bf16_sampling_and_training_are_as_close_to_the_exact_log_probs(name, tokenizer):
    """Random weights enlarge what is rounded, so neither is close to the other: both are to fp32, alike."""
    model, exact = adapted(family(name)).bfloat16(), adapted(family(name)).bfloat16().float()
    asked = prompts(9, 3, 30, 4, 17)
    groups = sample(DecodeSampler, model, tokenizer, asked, stops=SOME)
    rows = [
        TrainingRow(asked[index].tokens, one.tokens, one.logprobs, 0.0)
        for index, group in groups.items()
        for one in group
    ]
    batch = to_tensors(rows, 0)
    modules = [LogProbs(exact, 1.0), LogProbs(model, 1.0), LogProbs(model, 1.0, flat=True)]
    with torch.no_grad():
        wanted_BT, padded_BT, tree_BT = (module(batch).logprobs_BT for module in modules)
    assert modules[2].is_flat

    def distance(found_BT):
        return float((found_BT - wanted_BT)[batch.mask_BT].abs().mean())

    assert 0 < distance(batch.sampled_logprobs_BT) < 1.5 * distance(padded_BT)
    assert 0 < distance(tree_BT) < 1.5 * distance(padded_BT)


def trained(folder, *arguments):
    done = launch(*forked(), str(ROOT / "train.py"), *arguments, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", TODAY)
def test_a_run_merges_what_it_trained_and_resumes_to_the_bit(name, tmp_path):
    family(name).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(NANO).save_pretrained(tmp_path / "base")
    said = trained(tmp_path, "--preset", "nano", f"model.name={tmp_path / 'base'}", *FEW)
    assert "4 of 4 greedy answers identical" in said
    assert "model.generate" not in said
    whole = tmp_path / "it"
    steps = lines_of(whole / "metrics.jsonl")[1:]
    assert all(one["grad_norm"] > 0 and one["sampler_difference"] < 1e-4 for one in steps)
    shutil.move(whole, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", whole, symlinks=True)
    shutil.rmtree(whole / "checkpoints/step_000002")
    (whole / "checkpoints/latest").unlink()
    (whole / "checkpoints/latest").symlink_to("step_000001")
    shutil.rmtree(whole / "adapter")
    assert "going on after step 1" in trained(tmp_path, "--resume", "it")
    assert learned(whole) == learned(tmp_path / "whole")
    one, other = (load_file(run / "adapter/adapter_model.safetensors") for run in (whole, tmp_path / "whole"))
    assert all(torch.equal(one[part], other[part]) for part in other)
