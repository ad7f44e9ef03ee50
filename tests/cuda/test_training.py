"""The real program on the stub: the numbers of the CPU, with graphs captured and nothing left out."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT
from tests.cuda.conftest import on_card

SHORT = ["--preset", "nano", "run.steps=2", "eval.problems=4", "rollout.problems=2", "rollout.max_new_tokens=24"]


def train(folder, *settings: str, device: str = "cuda", **card) -> str:
    done = on_card([str(ROOT / "train.py"), *SHORT, *settings, f"run.dir={device}"], folder, device, **card)
    assert done.returncode == 0, done.stderr
    assert f"on 1 x {device}" in done.stdout
    return done.stdout


def metrics(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_numbers_of_the_cpu(tmp_path):
    """By `model.generate`: Octet's decoder rounds the number of rows up on a card, and so draws other numbers."""
    for device in ("cuda", "cpu"):
        train(tmp_path, "rollout.engine=hf", "model.dtype=fp32", device=device)
    card, cpu = (tmp_path / device for device in ("cuda", "cpu"))
    assert (card / "samples.jsonl").read_text() == (cpu / "samples.jsonl").read_text()
    for found, wanted in zip(metrics(card), metrics(cpu), strict=True):
        names = [name for name in wanted if not name.startswith(("time/", "memory/"))]
        assert {name: found[name] for name in names} == pytest.approx(
            {name: wanted[name] for name in names}, rel=1e-4, abs=1e-5
        )


def test_the_default_run_on_a_card(tmp_path):
    said = train(tmp_path)
    assert "memory in GB, measured (planned)" in said
    assert "cannot be captured" not in said
    assert all(record["sampler_difference"] < 0.05 for record in metrics(tmp_path / "cuda") if "loss" in record)


def test_a_full_card_is_asked_for_less(tmp_path):
    said = train(tmp_path, "rollout.problems=8", memory_gib=0.5)
    assert "out of memory" in said
