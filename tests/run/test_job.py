"""The program as a person runs it: the real launcher, the real engine, a run folder, an exit code."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, launch, learned, lines_of, until
from tests.e2e.short_job import ADAPTER
from tests.e2e.vllm_double import VllmDouble
from tests.forks import forked
from trainer.ranks import signal_handlers

FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24"]
FEW += ["eval.problems=16", "run.save_every=2"]
ONCE = ["run.steps=4", "run.dir=it", "run.keep=9", "eval.samples=2"]
ACTIVE = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}  # this interpreter's environment


def run(*command: object, folder: Path, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    answer = launch(*command, folder=folder, **ACTIVE, **environment)
    assert answer.returncode == status, answer.stderr
    return answer


def train(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run(*forked(), ROOT / "train.py", *arguments, folder=folder, status=status)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Four steps through run_deepspeed.sh."""
    folder = tmp_path_factory.mktemp("job")
    return folder / "it", run(ROOT / "run_deepspeed.sh", *FEW, *ONCE, folder=folder)


def test_it_ends_with_the_three_models_a_verdict_and_what_to_do_next_and_prints_no_noise(job):
    said = job[1].stdout
    assert said.startswith("octet: preset nano (no GPU found, ")
    assert job[1].stderr == ""
    assert ("warn" in said.lower(), "\n\n\n" in said) == (False, False)
    verdict = json.loads((job[0] / "verdict.json").read_text())
    assert f"\nverdict: {verdict['verdict']}: {verdict['evidence']}\n" in said
    assert "of 16 held-out problems" in verdict["evidence"]
    assert "16 of 16 greedy answers identical" in said
    *before, card, empty, result, where, command = said.splitlines()
    assert (empty, where) == ("", "run folder it, with adapter/, merged/")
    assert result.startswith("verdict: ")
    assert command.endswith(f"octet {'chat' if verdict['verdict'] == 'learned' else 'report'} it")
    assert card.endswith("octet train --preset 8gb")  # without what is set here for the small model
    assert before[-6].startswith("merged against trained")
    assert re.fullmatch(r"pass@2: base [\d.]+%, trained [\d.]+%", before[-5])


def test_the_run_folder_has_what_was_promised(job):
    folder = job[0]
    metrics = lines_of(folder / "metrics.jsonl")
    assert "eval/accuracy" in metrics[0]  # the base, before the first step
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    assert abs(metrics[1]["advantage/mean"]) < 1e-6
    assert metrics[1]["sampler_difference"] < 1e-4
    samples = lines_of(folder / "samples.jsonl")
    assert {"completion", "reward", "strict", "gold"} <= set(samples[0])
    assert [one["step"] for one in samples] == [step for step in (1, 2, 3, 4) for _ in range(2 * 4)]
    assert list((folder / "tensorboard").glob("events*"))
    assert "torch" in (folder / "config.yaml").read_text().splitlines()[0]
    evaluations = json.loads((folder / "eval.json").read_text())["evaluations"]
    assert [one["name"] for one in evaluations] == ["base", "trained", "merged"]
    assert ["pass@2" in one.get("sampled", {}) for one in evaluations] == [True, True, False]
    (pass_at_2,) = [line for line in (folder / "eval.md").read_text().splitlines() if line.startswith("| pass@2")]
    assert pass_at_2.count("|") == 5  # with an empty cell for the merged model
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000002", "step_000004"]
    assert os.readlink(checkpoints / "latest") == "step_000004"
    trainable = (folder / ADAPTER).stat().st_size
    size = sum(path.stat().st_size for path in (checkpoints / "step_000004").rglob("*") if path.is_file())
    assert size < 8 * trainable  # adapter twice, fp32 master weights, two moments: and no base


def test_a_resumed_run_is_the_undisturbed_run(job, tmp_path):
    """Cut off after step 2, with a half-written checkpoint and half a line left behind."""
    cut = shutil.copytree(job[0], tmp_path / "it", symlinks=True)
    shutil.rmtree(cut / "adapter")
    (cut / "checkpoints/step_000004").rename(cut / "checkpoints/step_000004.partial")
    (cut / "checkpoints/latest").unlink()
    (cut / "checkpoints/latest").symlink_to("step_000002")
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    said = train(tmp_path, "--resume", "it", "run.keep=8").stdout
    assert ("continuing after step 2" in said, "\n  run.keep=8 (it has 9)" in said) == (True, True)
    assert (cut / ADAPTER).read_bytes() == (job[0] / ADAPTER).read_bytes()
    assert learned(cut) == learned(job[0])
    refused = train(tmp_path, "--resume", "it", "run.steps=3", status=2)
    assert "has made 4" in refused.stderr
    assert "it continues" not in refused.stdout


@pytest.mark.slow
def test_the_latest_run_goes_on_through_the_launcher(job, tmp_path):
    shutil.copytree(job[0], tmp_path / "runs/it", symlinks=True)
    answer = run(ROOT / "run_deepspeed.sh", "--resume", "run.steps=5", "run.merge=false", folder=tmp_path)
    assert "run.steps=5 (it has 4): the schedule of the learning rate changes too" in answer.stdout
    assert answer.stdout.splitlines()[0] == "octet: resuming runs/it"
    assert "continuing after step 4" in answer.stdout
    assert lines_of(tmp_path / "runs/it/metrics.jsonl")[-1]["step"] == 5


def test_a_stopped_run_says_how_to_go_on_and_a_second_one_cannot_disturb_it(tmp_path):
    """Ctrl-Z and Ctrl-C to the launcher while a run goes on, and another run in its folder between them."""
    command = [str(ROOT / "run_deepspeed.sh"), *FEW, "run.steps=500", "run.dir=it", "eval.problems=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, cwd=tmp_path, env=os.environ | ACTIVE, preexec_fn=os.setpgrp, **pipes)  # noqa: PLW1509
    next(line for line in first.stdout if line.startswith("  1/500"))
    launcher = psutil.Process(first.pid)
    os.killpg(first.pid, signal.SIGTSTP)
    try:
        until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in (launcher, *launcher.children())))
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    second = train(tmp_path, "--preset", "nano", *FEW, "run.steps=500", "run.dir=it", "eval.problems=0", status=2)
    first.send_signal(signal.SIGINT)
    said, complained = first.communicate(timeout=240)
    assert first.returncode == 130
    assert "run.dir=it: another run is writing to it." in second.stderr
    assert complained.startswith(signal_handlers.AFTER_THIS_STEP)
    steps = len(lines_of(tmp_path / "it/metrics.jsonl"))
    assert f"octet: stopped. --resume it continues after step {steps}" in complained
    assert "Traceback" not in said + complained


def test_an_old_checkpoint_is_followed_by_another_before_it_is_due(tmp_path):
    few = [*FEW, "run.save_every=50", "run.steps=3", "run.keep=9", "eval.problems=0", "run.merge=false", "run.dir=it"]
    train(tmp_path, *few, "run.save_minutes=1e-6")
    assert {one.name for one in tmp_path.glob("it/checkpoints/step_*")} == {f"step_00000{step}" for step in (1, 2, 3)}


def test_an_alarm_that_ends_the_run_is_said_once(tmp_path):
    few = [*FEW, "run.steps=9", "run.save_every=50", "rollout.max_new_tokens=2"]
    answer = train(tmp_path, *few, "--strict-health", status=5)
    assert (answer.stdout + answer.stderr).count("cut off: ") == 1
    assert re.match(r"octet: run\.strict_health=true: .* step \d\. Nothing is saved yet", answer.stderr)


def test_json_is_all_that_stands_on_standard_output(tmp_path):
    answer = train(tmp_path, *FEW, "run.steps=1", "run.merge=false", "--json", "--strict-verdict", status=4)
    result = json.loads(answer.stdout)
    assert result["verdict"] == "cannot tell"
    assert "octet: run.strict_verdict=true: exit status 4, for `cannot tell`." in answer.stderr
    assert answer.stderr.count("cannot tell: ") == 1
    assert [one["name"] for one in result["evaluations"]] == ["base", "trained"]
    assert (tmp_path / result["run_folder"] / "adapter").is_dir()


@pytest.mark.slow
def test_the_merged_model_is_asked_no_more_than_its_server_has_room_for(tmp_path):
    with VllmDouble(context=85).serving() as server:
        url = f"rollout.vllm.urls=http://127.0.0.1:{server.server_port}"
        few = ["--preset", "nano", *FEW, "run.steps=1", "prompt.max_tokens=40", "rollout.max_new_tokens=40"]
        train(tmp_path, *few, "eval.problems=64", url, "run.dir=it")
    assert json.loads((tmp_path / "it/eval.json").read_text())["evaluations"][0]["left_out"]


@pytest.mark.slow
def test_two_ranks_through_the_launcher(tmp_path):
    launcher = [f"{sys.prefix}/bin/deepspeed", "--num_gpus=2", "--master_port=29517", ROOT / "train.py"]
    answer = run(*launcher, *FEW, "run.steps=2", "run.dir=two", folder=tmp_path)
    assert "on 2 x cpu" in answer.stdout
    assert [one["step"] for one in lines_of(tmp_path / "two/metrics.jsonl")] == [0, 1, 2]
    assert len(lines_of(tmp_path / "two/eval_answers.jsonl")) == 3 * 16
    assert "16 of 16 greedy answers identical" in answer.stdout
    log = tmp_path / "two/metrics.jsonl"
    log.write_bytes(b"\0\n" + log.read_bytes())
    answer = run(*launcher, "--resume", "two", "run.steps=3", "run.merge=false", folder=tmp_path)
    assert "line 1 is damaged and was moved" in answer.stderr
