"""The commands of docs/use.md for lm-evaluation-harness: it measures what Octet measures, answer by answer."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from tests.conftest import ROOT, launch, lines_of, octet, program
from tests.forks import forked
from tests.llama.families import FAMILIES, make
from tests.test_pages import blocks

pytestmark = pytest.mark.llama
RUN = ["--preset", "nano", "run.dir=runs/demo", "run.steps=6", "eval.problems=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of a few steps, and what the page makes of it."""
    folder = tmp_path_factory.mktemp("page")
    octet = [*forked(), "-m", "trainer.commands.main"]
    for name, command in (("octet", octet), ("lm_eval", [sys.executable, "-m", "lm_eval"])):
        program(folder / "bin" / name, f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (page,) = blocks("use.md")
    for script in (shlex.join([sys.executable, f"{ROOT}/train.py", *RUN]), page):
        own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
        answer = launch("bash", "-euo", "pipefail", "-c", script, folder=folder, timeout=2400, **own)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


def test_the_exact_match_is_the_strict_accuracy(folder):
    (results,) = (folder / "measured").rglob("results_*.json")
    measured = json.loads(results.read_text())["results"]["held_out"]
    base, _, merged = json.loads((folder / "runs/demo/eval.json").read_text())["evaluations"]
    assert merged["name"] == "merged"
    assert measured["sample_len"] == merged["problems"] == 64
    assert measured["exact_match,strict"] == merged["accuracy"] != base["accuracy"]


def test_every_answer_is_the_same_and_is_read_alike(folder):
    (samples,) = (folder / "measured").rglob("samples_*.jsonl")
    for sample in lines_of(samples):
        ours = sample["doc"]
        assert sample["resps"] == [[ours["completion"]]]
        assert sample["filtered_resps"] == [ours["strict"] or "[invalid]"]
        assert sample["exact_match"] == ours["correct_strict"]


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_of_all_families_answer_alike(name, folder, tmp_path):
    """The same task, in this process. Random models are hardly ever right: it is their texts that have to agree."""
    from lm_eval import evaluate, tasks
    from lm_eval.models.huggingface import HFLM

    model, engine = make(name, tmp_path / "model"), "hf" if "beyond" in name else "decode"
    settings = ["rollout.max_new_tokens=12", "model.dtype=fp32", f"rollout.engine={engine}"]
    assert octet("eval", "--preset", "nano", "--model", model, "--problems", 8, "--out", tmp_path, *settings) == 0
    asked = lines_of(tmp_path / "eval_answers.jsonl")
    task = yaml.safe_load((folder / "tasks/held_out.yaml").read_text())
    task["generation_kwargs"]["max_gen_toks"] = 12
    task["custom_dataset"] = lambda **_: {"test": Dataset.from_list(asked)}
    own = tasks.TaskManager(include_defaults=False).load([task])
    theirs = HFLM(pretrained=str(model), device="cpu", batch_size=8)
    measured = evaluate(theirs, own, apply_chat_template=True, bootstrap_iters=0)
    samples = measured["samples"]["held_out"]
    assert [sample["resps"] for sample in samples] == [[[one["completion"]]] for one in asked]
    assert len({one["completion"] for one in asked}) > 1
    accuracy = json.loads((tmp_path / "eval.json").read_text())["evaluations"][0]["accuracy"]
    assert measured["results"]["held_out"]["exact_match,strict"] == accuracy
