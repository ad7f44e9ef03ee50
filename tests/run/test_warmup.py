"""A warm-up and the run that goes on with it, through the real engine: one command, one folder inside the other."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT, learned, lines_of, refuses
from tests.e2e.short_job import ADAPTER, resumes_to_the_bit, train
from trainer.config.resolve import resolve
from trainer.errors import CheckpointError
from trainer.problem.word_problems import NanoTask
from trainer.run.closing import what_is_saved
from trainer.run.teaching import leave_start
from trainer.run_folder import changed_settings
from trainer.run_folder.provenance import shared

FEW = ["--preset", "nano", "rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=40", "run.steps=2"]
FEW += ["run.save_every=1", "run.merge=false", "eval.problems=8", "rollout.dead_groups=keep", "task.limit=64"]
WARMUP = [*FEW, "warmup.steps=3", "warmup.problems=6", "warmup.every=1", "warmup.lr=0.01"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm")
    return folder / "it", train(folder, *WARMUP, "run.dir=it")


def test_the_loss_of_solutions_falls_and_is_measured_on_held_out_ones(job):
    steps = learned(job[0] / "warmup")
    assert [one["step"] for one in steps] == [0, 1, 2, 3]
    assert steps[3]["eval/loss"] < steps[0]["eval/loss"]
    assert {"loss", "entropy", "grad_norm", "lr"} <= steps[1].keys()
    assert not {"reward/mean", "sampler_difference", "ratio", "advantage/mean"} & steps[1].keys()
    assert "3 steps of 6 worked solutions" in job[1]
    assert "no reward" not in job[1]


def test_grpo_goes_on_with_the_adapter_of_the_best_evaluation(job):
    folder, said = job
    assert os.readlink(folder / "warmup/start") == "best"
    settings = resolve(str(folder / "config.yaml"))
    assert (settings.lora.start, settings.warmup.steps) == (folder / "warmup/start", 0)
    best = json.loads((folder / "warmup/best/best.json").read_text())
    assert f"{best['loss']:.3f} the loss of a token of their solutions" in said
    assert learned(folder)[0]["eval/accuracy"] == best["accuracy"]  # the base of the run is what it begins with


def test_the_data_of_both_runs_are_recorded(job):
    for folder in (job[0], job[0] / "warmup"):
        assert shared(folder, NanoTask().train()) == 64


def test_the_reference_is_the_policy_at_its_start(job, tmp_path):
    """Were it the base without the adapter, the KL of the first step would not be 0."""
    shutil.copytree(job[0] / "warmup/start", tmp_path / "start")
    settings = ["lora.start=start", "algorithm.kl.coef=0.1", "algorithm.loss=reinforce", "eval.problems=0"]
    train(tmp_path, *FEW, *settings, "run.dir=it")
    first, second = learned(tmp_path / "it")
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl"] > 0


def test_a_run_cut_off_in_its_warm_up_comes_to_the_same_end(job, tmp_path):
    cut, own = shutil.copytree(job[0], tmp_path / "it", symlinks=True), tmp_path / "it/warmup"
    for path in (cut / "checkpoints", cut / "adapter", own / "adapter", own / "checkpoints/step_000003"):
        shutil.rmtree(path)
    for path in (cut / "metrics.jsonl", own / "start", own / "checkpoints/latest"):
        path.unlink()
    config = resolve(str(cut / "config.yaml"), None, ["warmup.steps=3", "lora.start=null"])
    (cut / "config.yaml").write_text(config.to_yaml())
    assert "continuing after step 2" in train(tmp_path, "--resume", "it")
    for folder in ("warmup", "."):
        assert learned(cut / folder) == learned(job[0] / folder)
        assert (cut / folder / ADAPTER).read_bytes() == (job[0] / folder / ADAPTER).read_bytes()


def test_a_run_that_is_stopped_in_or_after_its_warm_up_is_named_in_the_command_that_continues(job, tmp_path):
    """`--resume it/warmup` would end after the warm-up, and the same command may make a new folder."""
    folder = job[0] / "warmup"
    log = SimpleNamespace(folder=folder, config=resolve(str(folder / "config.yaml")), total_steps=3)
    assert what_is_saved(log) == f"--resume {job[0]} continues after step 3 of its warm-up, which is saved."
    shutil.copytree(folder, tmp_path / "warmup", symlinks=True)
    log = SimpleNamespace(folder=tmp_path, config=resolve(str(job[0] / "config.yaml")), total_steps=2)
    assert what_is_saved(log) == f"--resume {tmp_path} continues after its warm-up, which is saved."


def test_only_a_warm_up_alone_may_be_longer(job, tmp_path):
    alone, begun = shutil.copytree(job[0] / "warmup", tmp_path / "alone", symlinks=True), job[0] / "warmup"
    longer = {folder: resolve(str(folder / "config.yaml"), None, ["warmup.steps=9"]) for folder in (alone, begun)}
    assert [change.key for change in changed_settings.changes(alone, longer[alone])] == ["warmup.steps"]
    changed_settings.refuse_other_settings(alone, longer[alone])
    with refuses("run.dir", names="warmup.steps=9 (it has 3)"):
        changed_settings.refuse_other_settings(begun, longer[begun])


@pytest.mark.slow
def test_the_same_command_again_makes_no_warm_up(job, tmp_path):
    shutil.copytree(job[0], tmp_path / "it", symlinks=True)
    said = train(tmp_path, *WARMUP, "run.dir=it")
    assert "worked solutions" not in said
    assert "all 2 steps done. --resume it run.steps=4 would continue" in said
    assert "all 3 steps done\n" in train(tmp_path, "--resume", "it/warmup")


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(job, tmp_path):
    """Six solutions on two ranks, in micro-batches of one."""
    settings = ["run.dir=it", "warmup.only=true", "optim.tokens_per_micro_batch=1", "eval.problems=7"]
    train(tmp_path, *WARMUP, *settings, ranks=2)
    assert all("memory/fullest_rank" in step for step in lines_of(tmp_path / "it/metrics.jsonl")[1:])
    for one, other in zip(learned(job[0] / "warmup")[1:], learned(tmp_path / "it")[1:], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    ours, theirs = (load_file(folder / ADAPTER) for folder in (job[0] / "warmup", tmp_path / "it"))
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, atol=1e-3, rtol=0)  # a tenth of a step


@pytest.mark.slow
def test_a_fresh_adapter_over_the_merged_warm_up(tmp_path):
    train(tmp_path, *WARMUP, "warmup.then=merged", "run.dir=it")
    settings = resolve(str(tmp_path / "it/config.yaml"))
    assert (settings.model.name, settings.lora.start) == (str(tmp_path / "it/warmup/merged"), None)
    best = json.loads((tmp_path / "it/warmup/best/best.json").read_text())
    assert learned(tmp_path / "it")[0]["eval/accuracy"] == best["accuracy"]


def test_a_full_disk_at_its_merge_names_the_command_that_continues(small_disk):
    warmup = small_disk(1_500_000) / "it/warmup"
    shutil.copytree(ROOT / "gallery/default/adapter", warmup / "adapter")
    with refuses(warmup, CheckpointError, names=f"`--resume {warmup.parent}`"):
        leave_start(resolve("nano"), "merged", warmup)


def test_a_warm_up_ends_on_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    shutil.copytree(ROOT / "gallery/default/adapter", tmp_path / "adapter")
    leave_start(resolve("nano"), "same", tmp_path)
    assert (tmp_path / "start/adapter_config.json").is_file()


@pytest.mark.slow
def test_a_whole_model_is_trained_further(tmp_path):
    train(tmp_path, *WARMUP, "lora.enabled=false", "warmup.lr=1e-4", "algorithm.lr=1e-3", "run.dir=it")
    assert resolve(str(tmp_path / "it/config.yaml")).model.name == str(tmp_path / "it/warmup/start")
    assert (tmp_path / "it/model/model.safetensors").is_file()


SAMPLES = [*FEW, "warmup.only=true", "warmup.from=samples", "warmup.steps=4", "warmup.rounds=2", "warmup.asked=8"]
SAMPLES += ["warmup.problems=4", "warmup.keep=2", "run.dir=it"]


def test_own_right_answers_in_rounds_and_the_same_after_an_interruption(tmp_path):
    """Cut off in the second round, after its first step: the model that sampled its answers is gone by then."""
    said = train(tmp_path, *SAMPLES)
    first, _, third, _ = steps = learned(tmp_path / "it")[1:]
    assert [index for index, one in enumerate(steps) if "samples/right" in one] == [0, 2]
    assert 0 < first["samples/right"] <= first["samples/solved"] <= 1
    assert f"{first['samples/kept']:.0f} answers of" in said
    rows = lines_of(tmp_path / "it/samples/round_002.jsonl")
    assert len(rows) == third["samples/kept"]
    prompts = [tuple(row["prompt"]) for row in rows]
    assert max(map(prompts.count, prompts)) <= 2
    assert len({(*row["prompt"], *row["completion"]) for row in rows}) == len(rows)
    resumes_to_the_bit(tmp_path / "it", steps=4)


@pytest.mark.slow
def test_what_is_said_at_the_end_of_a_warm_up_names_its_own_settings(tmp_path):
    settings = ["warmup.patience=1", "warmup.lr=1e-12", "optim.warmup=0", "optim.schedule=constant", "run.dir=it"]
    said = train(tmp_path, *WARMUP, *settings)
    assert "1 evaluation without a new best (warmup.patience=1)" in said
    assert "warmup." not in next(line for line in said.splitlines() if "octet train " in line)
