"""Real pretrained models, SmolLM2-135M-Instruct and Gemma 3 270M, which Python packages hold."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, launch, lines_of
from tests.run.test_repro import repeats_the_first_step

pytestmark = pytest.mark.slow


def model_of(variable: str, program: str, folder: Path) -> Path:
    """Return the folder of a model: the one that a variable names, or what a program makes out of a Python package."""
    if variable in os.environ:
        return Path(os.environ[variable])
    made = launch(sys.executable, "-m", program, folder, timeout=900)
    if made.returncode:
        assert "pip" in made.stderr, made.stderr
        pytest.skip(f"{program} cannot download its package; set {variable} to a folder with the model")
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    return model_of("OCTET_SMOLLM2", "scripts.smollm2", tmp_path_factory.mktemp("smollm2") / "model")


def test_the_first_step_of_its_run_in_the_gallery_is_repeated(smollm2, tmp_path):
    (tmp_path / "smollm2").symlink_to(smollm2)
    repeats_the_first_step(ROOT / "gallery/sums", tmp_path)


def test_a_step_of_a_real_model_on_real_text(smollm2, gsm8k_folder, tmp_path):
    settings = [f"model.name={smollm2}", f"task.data_dir={gsm8k_folder}", "run.dir=it", "run.steps=1"]
    settings += ["rollout.problems=1", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
    settings += ["model.dtype=fp32", "run.threads=1", "reward.length_band=[50, 90]", "eval.problems=2"]
    answer = launch(sys.executable, ROOT / "train.py", "--preset", "8gb", *settings, folder=tmp_path, check=True)
    metrics = lines_of(tmp_path / "it/metrics.jsonl")
    assert [record["step"] for record in metrics] == [0, 1]
    assert metrics[1]["sampler_difference"] < 1e-3
    sample = lines_of(tmp_path / "it/samples.jsonl")[0]
    assert len(sample["completion"].split()) > 5, "a real model writes sentences"
    assert "2 of 2 greedy answers identical" in answer.stdout


def test_a_step_of_gemma(tmp_path):
    model = model_of("OCTET_GEMMA3", "scripts.gemma3", tmp_path / "gemma3")
    settings = [f"model.name={model}", "task.name=addition", "prompt.style=few_shot", "prompt.shots=2", "run.dir=it"]
    settings += ["run.steps=1", "rollout.problems=1", "rollout.dead_groups=keep", "eval.problems=2", "run.merge=false"]
    launch(sys.executable, ROOT / "train.py", "--preset", "smollm2", *settings, folder=tmp_path, check=True)
    metrics = lines_of(tmp_path / "it/metrics.jsonl")
    assert metrics[1]["sampler_difference"] < 1e-3
    assert metrics[1]["entropy"] < 4, "a trained model is surer than that; log(262,144) is 12.5"
