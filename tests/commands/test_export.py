"""What `octet export` takes, and what it refuses before it begins."""

import shutil
from importlib.util import find_spec

import pytest

from tests.commands.conftest import config_of, write
from tests.conftest import NANO, said_by
from trainer.commands import push
from trainer.commands.export import OF_LLAMA_CPP, best_of
from trainer.config.resolve import resolve
from trainer.model.merge import write_merged
from trainer.run_folder.model_source import Source
from trainer.run_folder.reader import read_run

EVALUATED = {"step": 9, "eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6, "eval/problems": 64}
RUN = {"config.yaml": config_of(), "adapter/adapter_config.json": "{}", "metrics.jsonl": EVALUATED}


@pytest.mark.parametrize(("best", "last", "is_taken"), [
    (None, EVALUATED, False), (0.75, EVALUATED, True), (0.5, EVALUATED, False), (0.25, EVALUATED, False),
    (0.75, {"step": 9}, False),
])  # fmt: skip
def test_the_best_is_exported_where_it_is_better_than_the_last(best, last, is_taken, tmp_path, capsys):
    kept = {"best/best.json": {"step": 3, "accuracy": best, "problems": 64}} if best else {}
    write(tmp_path, RUN | {"metrics.jsonl": last} | kept)
    assert best_of(tmp_path) == (tmp_path / "best" if is_taken else tmp_path)
    assert ("of step 3, with 75.0%. The last step, 9, has 50.0%" in capsys.readouterr().err) == is_taken


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
@pytest.mark.parametrize("fmt", OF_LLAMA_CPP)
def test_a_format_of_llama_cpp_is_refused_before_anything_is_read(fmt, tmp_path, capsys):
    status, _, complained = said_by(capsys, "export", tmp_path, "--to", "gguf", "--format", fmt)
    assert (status, f"--format {fmt}: " in complained) == (2, True)


@pytest.mark.parametrize(("folder", "name"), [("日本 3", "3"), ("Modèle.", "Mod-le"), ("..日", "model")])
def test_a_model_gets_a_name_that_ollama_takes(folder, name, tmp_path, capsys):
    model, out = shutil.copytree(NANO, tmp_path / folder), tmp_path / "out"
    status, said, _ = said_by(capsys, "export", model, "--to", "ollama", "--format", "f32", "--no-check", "--out", out)
    assert (status, f"ollama create {name.lower()} -f" in said) == (0, True)
    assert (out / f"{name}-F32.gguf").is_file()


def test_the_best_is_exported_from_a_run_that_was_interrupted(tmp_path, capsys):
    best = {"step": 3, "accuracy": 0.5, "problems": 64}
    write(tmp_path, {"config.yaml": config_of(), "best/best.json": best})
    assert best_of(tmp_path) == tmp_path / "best"
    assert f"exporting best/, of step 3: there is no {tmp_path / 'adapter'} yet" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["", "/adapter"])
def test_the_export_of_a_checkpoint_outlives_it(named, tmp_path, capsys):
    """A run deletes its old checkpoints, with everything in them."""
    checkpoint = tmp_path / "run/checkpoints/step_000003"
    shutil.copytree(NANO, checkpoint / "adapter")
    write(tmp_path, {"run/config.yaml": config_of()})
    status, _, _ = said_by(capsys, "export", f"{checkpoint}{named}", "--to", "safetensors", "--no-check")
    assert (status, [path.name for path in checkpoint.iterdir()]) == (0, ["adapter"])
    assert (tmp_path / "run/step_000003-safetensors/model.safetensors").is_file()
    made = push._export_of(read_run(tmp_path / "run"), tmp_path / "run/step_000003-safetensors")
    assert made["step"] == 3


@pytest.mark.parametrize(("made", "merge", "step"), [
    ({}, "true", 9), ({}, "false", None), ({"step": 3}, "true", 3), ({"step": 3}, "false", 3),
])  # fmt: skip
def test_the_merged_model_is_of_the_last_step_only_if_the_run_wrote_it(made, merge, step, tmp_path):
    """Its card would give it the evaluation of another model."""
    files = {"config.yaml": config_of(f"run.merge={merge}"), "metrics.jsonl": {"step": 9}, "verdict.json": "{}"}
    (tmp_path / "merged").mkdir()
    write(tmp_path, files | ({"merged/export.json": made} if made else {}))
    assert read_run(tmp_path).step_of(tmp_path / "merged") == step


def test_the_run_of_an_adapter_is_known_in_its_folder_and_through_a_link(tmp_path, monkeypatch):
    """Otherwise it would be evaluated on another task."""
    run = write(tmp_path / "run", {"config.yaml": "", "adapter/adapter_config.json": "{}"})
    (tmp_path / "link").symlink_to(run / "adapter")
    monkeypatch.chdir(run / "adapter")
    assert {Source.of(named).run.resolve() for named in (".", tmp_path / "link", "../adapter", run)} == {run}


def test_a_run_that_merges_over_an_export_forgets_where_that_was_from(tmp_path):
    write(tmp_path, {"merged/export.json": {"step": 3}})
    write_merged(resolve("nano").model, None, tmp_path / "merged", None)
    assert not (tmp_path / "merged/export.json").exists()
