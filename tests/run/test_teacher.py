"""A teacher beside the policy, through the real engine."""

import json
import shutil

import pytest
import torch

from tests.conftest import NANO, learned, refuses
from tests.e2e.short_job import ADAPTER, resumes_to_the_bit, train
from tests.e2e.vllm_double import VllmDouble
from tests.run.test_warmup import FEW
from trainer.config.resolve import resolve
from trainer.config.settings import Lora, Model
from trainer.errors import CheckpointError, ModelError, TrainingError
from trainer.model.load import load_model, load_tokenizer
from trainer.model.lora import add_adapter, save_adapter, trainable
from trainer.run.assemble import make_teacher

TAUGHT = [*FEW, "algorithm.loss=reinforce_baseline", "algorithm.lr=0.01", "eval.problems=0", "run.dir=it"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two steps with a teacher whose adapter is of more layers than the student's, and of another kind."""
    folder = tmp_path_factory.mktemp("taught")
    settings = Lora(r=4, alpha=8, dora=True, targets="all")
    model = add_adapter(load_model(Model(name="nano"), "fp32", torch.device("cpu")), settings)
    for name, value in trainable(model).items():
        if "magnitude" not in name:
            value.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    save_adapter(model, folder / "teacher")
    train(folder, *TAUGHT, f"teacher.adapter={folder / 'teacher'}")
    return folder / "it"


def test_the_policy_comes_nearer_to_its_teacher(job):
    first, second = learned(job)
    assert first["advantage/token"] < second["advantage/token"] < 0
    assert first["advantage/mean"] == 0.0  # teacher.reward=0: the verifier is not heard
    assert first["grad_norm"] > 0


def test_a_resumed_run_is_the_undisturbed_run(job):
    resumes_to_the_bit(job)


def test_over_the_same_base_it_says_what_it_says_loaded_apart(job, tmp_path, monkeypatch):
    """To the last bit. A copy of the model is another one for the run, so it is loaded beside the policy, and copied to
    the disk of the node before."""
    monkeypatch.setenv("OCTET_SCRATCH", str(tmp_path / "scratch"))
    shutil.copytree(NANO, tmp_path / "copy")
    train(tmp_path, *TAUGHT, f"teacher.name={tmp_path / 'copy'}", f"teacher.adapter={job.parent / 'teacher'}")
    assert learned(tmp_path / "it") == learned(job)
    assert (tmp_path / "it" / ADAPTER).read_bytes() == (job / ADAPTER).read_bytes()
    assert len([*(tmp_path / "scratch").glob("octet-models-*/copy-*")]) == 1


def test_over_the_same_base_it_is_not_saved(job):
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    assert {path.name for path in (job / "adapter").iterdir()} == names
    (state,) = (job / "checkpoints/step_000002/engine").glob("*model_states.pt")
    saved = torch.load(state, weights_only=True)["module"]
    assert saved
    assert all(".default." in name for name in saved)


@pytest.mark.slow
def test_the_teacher_as_the_reference_of_the_kl(job, tmp_path):
    settings = ["teacher.form=loss", "algorithm.kl.coef=1", "algorithm.kl.estimator=k2"]
    train(tmp_path, *TAUGHT, "teacher.name=nano", *settings, f"teacher.adapter={job.parent / 'teacher'}")
    theirs, ours = learned(tmp_path / "it")[0], learned(job)[0]
    assert theirs["kl"] > 0
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)  # both forms have one gradient at first


@pytest.mark.slow
def test_a_server_says_what_the_same_teacher_says_beside_the_policy(job, tmp_path):
    with VllmDouble().serving() as server:
        server.load("taught", str(job.parent / "teacher"))
        train(tmp_path, *TAUGHT, f"teacher.url=http://127.0.0.1:{server.server_port}", "teacher.name=taught", ranks=2)
    for one, other in zip(learned(job), learned(tmp_path / "it"), strict=True):
        assert other["advantage/token"] == pytest.approx(one["advantage/token"], abs=1e-4)
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)


def test_a_teacher_that_is_not_there_or_counts_in_other_tokens_is_refused_by_name(tiny_model, tmp_path, alone):
    other = shutil.copytree(tiny_model, tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    (one, first), (two, second) = [*vocabulary.items()][40:42]
    vocabulary |= {one: second, two: first}
    (other / "tokenizer.json").write_text(json.dumps(words))
    config = resolve("nano", None, [f"teacher.name={other}", f"model.name={tiny_model}"])
    adapter = [f"teacher.name={tiny_model}", f"teacher.adapter={tmp_path}"]
    server = ["teacher.url=http://127.0.0.1:1", "rollout.vllm.wait_s=0.01"]
    for wrong, error, key, named in (
        (config, ModelError, "teacher.name", "2 tokens"),
        (resolve("nano", None, [f"teacher.name={tmp_path / 'none'}"]), ModelError, "teacher.name", ""),
        (resolve("nano", None, adapter), CheckpointError, "teacher.adapter", "adapter_config.json"),
        (resolve("nano", None, server), TrainingError, "teacher.url", "ConnectionRefused"),
    ):
        with refuses(key, error, names=named):
            make_teacher(wrong, load_tokenizer(wrong.model), 8)
