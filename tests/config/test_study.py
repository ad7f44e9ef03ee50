"""The file of a study: arms, seeds, controls, and every mistake by its name."""

import pytest

from tests.conftest import ROOT
from trainer.config.study import read_study

GOOD = """
settings: {run: {steps: 4}, eval.problems: 64}
seeds: [0, 3]
arms:
  grpo:
  small: {lora: {r: 4}, reward.weights: {correct: 1.0, format: 0.1}}
controls: [random, format]
"""


def study_of(folder, text):
    (folder / "study.yaml").write_text(text)
    return read_study(folder / "study.yaml")


def test_every_arm_and_control_has_a_run_for_each_seed(tmp_path):
    study = study_of(tmp_path, GOOD)
    arms = ("grpo", "small", "random", "format")
    assert [one.name for one in study.runs()] == [f"{arm}-{seed}" for seed in (0, 3) for arm in arms]
    configs = {one.name: study.config(one) for one in study.runs()}
    assert (configs["small-3"].lora.r, configs["small-3"].run.seed, configs["small-3"].run.steps) == (4, 3, 4)
    assert configs["small-0"].reward.weights == {"correct": 1.0, "format": 0.1}
    assert (configs["random-0"].reward.control, configs["grpo-0"].reward.control) == ("random", "none")
    assert configs["format-0"].reward.weights == {"format": 1.0}
    assert str(configs["grpo-0"].run.dir) == "runs/study/grpo-0"
    study = read_study(tmp_path / "study.yaml", ["run.steps=7"])
    assert {study.config(one).run.steps for one in study.runs()} == {7}


@pytest.mark.parametrize("path", sorted((ROOT / "bench/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_behind_the_published_numbers_can_be_read(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert [*read_study(path).runs()]


def test_the_control_of_the_format_pays_for_nothing_else(tmp_path):
    judge = "{reward.judge: {url: 'http://here:1', model: one}, reward.weights: {judge: 1.0, correct: 1.0}}"
    custom = f"{{reward.custom: ['{ROOT / 'examples/minimal.py'}:main'], reward.weights: {{correct: 1}}}}"
    of_all = "preset: 8gb\nsettings: {reward.weights: {correct: 1.0}}"
    (tmp_path / "mine.yaml").write_text(
        f"reward:\n  judge: {{url: 'http://here:1', model: one}}\n  custom: ['{ROOT / 'examples/minimal.py'}:main']\n"
        "  weights: {judge: 1.0, main: 0.5, correct: 1.0, length: 0.1}"
    )
    mine = f"preset: {tmp_path / 'mine.yaml'}"
    for shared, settings in (("", judge), ("", custom), (of_all, "{reward.weights.overlong: 1.0}"), (mine, "")):
        study = study_of(tmp_path, f"{shared}\narms: {{a: {settings}}}\ncontrols: [format]")
        paid = {one.arm: study.config(one).reward.all_weights for one in study.runs()}
        assert {name for name, weight in paid["format"].items() if weight} == {"format"}
        assert paid["a"]["correct"] == 1
    coded = "preset: nano\nsettings: {reward.weights: {code: 1}, task: {name: records, path: x, answer: none}}"
    study = study_of(tmp_path, f"{coded}\narms: {{a: }}\ncontrols: [format]")
    assert {one.arm: study.config(one).reward.weights for one in study.runs()}["format"] == {"code": 0, "format": 1}
    mixed = "settings: {reward.weights: {correct: 1}, reward.weights.length: 0.1}"
    study = study_of(tmp_path, f"{mixed}\narms: {{a: , b: {{reward.weights: {{code: 1}}}}}}\ncontrols: [format]")
    assert {one.arm: study.config(one).reward.weights for one in study.runs()}["b"] == {"code": 1}
