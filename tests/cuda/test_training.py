"""The real program on the stub: the numbers of the CPU, with graphs captured and nothing left out."""

import json

import pytest

from tests.conftest import ROOT, learned, lines_of
from tests.cuda.conftest import on_card

SHORT = ["--preset", "nano", "run.steps=2", "eval.problems=4", "rollout.problems=2", "run.merge=false"]


def train(folder, *settings: str, device: str = "cuda", **card) -> str:
    command = [str(ROOT / "train.py"), *SHORT, *settings, f"run.dir={device}"]
    said = on_card(command, folder, device, check=True, **card).stdout
    assert f"on 1 x {device}" in said
    return said


def test_the_numbers_of_the_cpu(tmp_path):
    for device in ("cuda", "cpu"):
        train(tmp_path, "model.dtype=fp32", "rollout.max_new_tokens=12", device=device)
    card, cpu = (tmp_path / device for device in ("cuda", "cpu"))
    assert (card / "samples.jsonl").read_text() == (cpu / "samples.jsonl").read_text()
    for found, wanted in zip(learned(card), learned(cpu), strict=True):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_a_full_card_goes_on_to_the_same_result(tmp_path):
    """On 8 GiB the steps are captured and memory suffices; on half a GiB training runs out of it."""
    enough, short = tmp_path / "enough", tmp_path / "short"
    settings = ["rollout.problems=8", "rollout.max_new_tokens=24", "model.dtype=fp32"]
    for folder, memory_gib in ((enough, 8), (short, 0.5)):
        folder.mkdir()
        said = train(folder, *settings, memory_gib=memory_gib)
        assert "memory in GB, measured (planned)" in said
        assert "cannot be captured" not in said
        assert ("out of memory" in said) == (folder == short)
    enough, short = enough / "cuda", short / "cuda"
    assert (enough / "samples.jsonl").read_text() == (short / "samples.jsonl").read_text()
    for found, wanted in zip(learned(short), learned(enough), strict=True):
        same = {"loss", "grad_norm", "reward", "entropy"} & set(wanted)
        assert [found[name] for name in same] == pytest.approx([wanted[name] for name in same], rel=1e-4, abs=1e-5)
    assert all(record["sampler_difference"] < 0.01 for record in learned(enough) if "loss" in record)


def test_an_orthogonal_update_fits_into_fp16(tmp_path):
    """It has the same size whatever the gradient, so a loss scale of 2 ** 16 would make it infinite."""
    train(tmp_path, "optim.name=muon", "rollout.problems=4", capability=7.5)
    steps = [one for one in lines_of(tmp_path / "cuda/metrics.jsonl") if one.get("update_size")]
    assert steps
    assert {one["skipped"] for one in steps} == {0.0}


def test_the_energy_of_a_card_that_counts_it(tmp_path):
    """The card of the stub draws 100 W: a run records it, and its page shows it."""
    counted, uncounted = tmp_path / "counted", tmp_path / "uncounted"
    for folder in (counted, uncounted):
        folder.mkdir()
        train(folder, "run.steps=3", nvml=folder == counted)
    steps = [one for one in lines_of(counted / "cuda/metrics.jsonl") if one["step"]]
    # the counter is read around the clock, and another program may run between the two
    surplus = [one["energy/rollout"] / one["time/rollout"] / 100 - 1 for one in steps]
    assert -0.01 < min(surplus) < 0.01
    assert not any(name.startswith("energy/") for one in lines_of(uncounted / "cuda/metrics.jsonl") for name in one)
    on_card(["-m", "trainer.commands.main", "report", "cuda"], counted, check=True)
    assert "energy of a card" in (counted / "cuda/report.html").read_text()


def test_launches_copies_and_synchronisations_do_not_rise():
    table = json.loads((ROOT / "tests/cuda/counts.json").read_text())
    found = json.loads(on_card(["-m", "tests.cuda.counting"], check=True).stdout)
    more = {(name, what) for name in table for what in table[name] if found[name][what] > table[name][what]}
    assert not more, f"{found}\nwhere this has a reason: tests/cuda/python.sh -m tests.cuda.counting"
    replays = [counted for name, counted in found.items() if name.startswith("captured")]
    assert {(one["graph_launches"], one["copies"], one["synchronisations"]) for one in replays} == {(1, 0, 0)}
