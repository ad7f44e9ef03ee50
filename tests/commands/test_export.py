"""What `octet export` takes, and what it refuses before it begins."""

import json
import shutil
from importlib.util import find_spec

import pytest

from tests.conftest import NANO, said_by
from trainer.commands.export import OF_LLAMA_CPP, best_of
from trainer.config.command_line import resolve


@pytest.mark.parametrize(
    ("best", "last", "is_taken"),
    [(None, 0.5, False), (0.75, 0.5, True), (0.5, 0.5, False), (0.25, 0.5, False), (0.75, None, False)],
)
def test_the_best_is_exported_where_it_is_better_than_the_last(best, last, is_taken, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(resolve("nano").to_yaml())
    evaluated = {"eval/accuracy": last, "eval/low": 0.4, "eval/high": 0.6, "eval/problems": 64} if last else {}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 9, **evaluated}) + "\n")
    if best is not None:
        (tmp_path / "best").mkdir()
        (tmp_path / "best/best.json").write_text(json.dumps({"step": 3, "accuracy": best, "problems": 64}))
    assert best_of(tmp_path) == (tmp_path / "best" if is_taken else tmp_path)
    assert ("of step 3, with 75.0%. The last step, 9, has 50.0%" in capsys.readouterr().err) == is_taken


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
@pytest.mark.parametrize("fmt", OF_LLAMA_CPP)
def test_a_format_of_llama_cpp_is_refused_before_anything_is_read(fmt, tmp_path, capsys):
    status, _, complained = said_by(capsys, "export", tmp_path, "--to", "gguf", "--format", fmt)
    assert status == 2
    assert f"--format {fmt}: " in complained


@pytest.mark.parametrize(("folder", "name"), [("日本 3", "3"), ("Modèle.", "Mod-le"), ("..日", "model")])
def test_a_model_gets_a_name_that_ollama_takes(folder, name, tmp_path, capsys):
    model, out = shutil.copytree(NANO, tmp_path / folder), tmp_path / "out"
    options = ["--to", "ollama", "--format", "f32", "--no-check", "--out", out]
    status, said, _ = said_by(capsys, "export", model, *options)
    assert (status, f"ollama create {name.lower()} -f" in said) == (0, True)
    assert (out / f"{name}-F32.gguf").is_file()
