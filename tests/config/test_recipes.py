"""Every recipe, found by itself: it goes over every preset, says the objective and not the hardware, and it trains."""

import math

import pytest
import yaml

from tests.conftest import ROOT, lines_of, refuses
from tests.e2e.short_job import train
from trainer.config.resolve import full_names, resolve
from trainer.config.settings import fields
from trainer.config.train_options import PRESETS, RECIPES, names_in

NAMES = names_in(RECIPES)
# Decided by the card: a preset's business.
HARDWARE = {"model.dtype", "model.gradient_checkpointing", "optim.tokens_per_micro_batch"}
HARDWARE |= {"optim.name", "optim.layout", "rollout.rows", "rollout.engine", "run.threads", "engine.ds_config"}


def layer(recipe: str) -> dict:
    return full_names(yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text()))


@pytest.mark.parametrize("preset", names_in(PRESETS))
@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_goes_over_every_preset(recipe, preset, tmp_path):
    if preset == "8gb-4b" and layer(recipe).get("lora.enabled") is False:
        with refuses("model.quantize"):
            resolve(preset, recipe)
        return
    config = resolve(preset, recipe)
    resolved = full_names(config.model_dump(mode="json"))
    for name, value in layer(recipe).items():
        if isinstance(value, dict):  # the weights: those of the preset stay beside them
            assert resolved[name].items() >= value.items()
        else:
            assert resolved[name] == value
    shaped = any(config.reward.weights.get(name) for name in SHAPED)
    assert not shaped or config.rollout.dead_by == "correct"  # it gives way to some objectives
    written = tmp_path / "config.yaml"
    written.write_text(config.to_yaml())
    assert resolve(str(written)) == config


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_leaves_the_hardware_to_the_preset_and_says_where_it_comes_from(recipe):
    assert {*fields()} >= HARDWARE
    assert not HARDWARE & layer(recipe).keys()
    head = (RECIPES / f"{recipe}.yaml").read_text().partition("\n")[0]
    sources = ("A first look",) if recipe == "try" else ("arXiv 2", "Write-up", "Williams")  # it sets no objective
    assert any(source in head for source in sources), head


SHAPED = ("format", "length", "overlong", "repetition", "think_tags", "judge")
LAYERS = {path: yaml.safe_load(path.read_text()) for path in [*PRESETS.rglob("*.yaml"), *ROOT.glob("bench/**/*.yaml")]}


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_rewards_beside_right_answers_never_decide_alone(path):
    weights = LAYERS[path].get("reward", {}).get("weights", {})
    if any(weights.get(name) for name in SHAPED):
        assert LAYERS[path]["rollout"]["dead_by"] == "correct"


@pytest.mark.parametrize("name", ["config.yaml", "job.yaml"])
def test_what_a_run_says_of_dead_groups_stays(tmp_path, name):
    config = resolve("nano", None, ["reward.weights={correct: 0, format: 1}", "rollout.dead_by=correct"])
    (tmp_path / name).write_text(config.to_yaml())
    stored = str(tmp_path / name)
    assert resolve(stored, None, ["run.steps=9", "task.decimal=comma"]).rollout.dead_by == "correct"
    assert resolve(stored, None, ["reward.weights={correct: 0, format: 2}"]).rollout.dead_by == "reward"


def test_a_file_with_functions_keeps_its_own_weights(tmp_path):
    paid, named = "weights: {correct: 1.0}", "reward.custom=/copied/mine.py:score"
    for name, functions in (
        ("both.yaml", "custom: a.py:f, "),
        ("config.yaml", "custom: a.py:f, "),
        ("without.yaml", ""),
    ):
        (tmp_path / name).write_text(f"reward: {{{functions}{paid}}}\nrollout: {{dead_by: correct}}")
        weights = {"correct": 1.0} if functions else {}
        for files in ((str(tmp_path / name), None), ("nano", str(tmp_path / name))):
            config = resolve(*files, [named])
            assert (config.reward.weights, config.reward.custom) == (weights, ("/copied/mine.py:score",))
            assert config.rollout.dead_by == ("correct" if weights else "reward")


# Two steps of a recipe with the embedded model need less of everything that a write-up says about size.
SMALL = ["model.name=nano", "task.name=nano", "prompt.style=auto", "eval.problems=8", "run.steps=2", "run.threads=1"]
SMALL += ["rollout.problems=8", "rollout.group_size=4", "rollout.max_new_tokens=40", "run.merge=false", "task.limit=64"]
OF_ONE = {"distill": ["teacher.name=nano", "teacher.quantize=none"]}
OF_ONE |= {name: ["warmup.steps=3", "warmup.problems=4"] for name in ("star", "warm_grpo")}
OF_ONE["star"] += ["warmup.asked=16"]


# commands/test_printed.py starts dapo, and model/test_variants.py trains a whole model.
@pytest.mark.parametrize(
    "recipe", [name if name == "star" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_recipe_trains_the_embedded_model_and_what_it_asks_for_is_measured(recipe, tmp_path):
    settings, folder = [*SMALL, *OF_ONE.get(recipe, [])], tmp_path / recipe
    train(tmp_path, "--preset", "nano", "--recipe", recipe, *settings, f"run.dir={recipe}")
    config = resolve("nano", recipe, settings)
    steps = lines_of(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(step["grad_norm"] > 0 and step["skipped"] == 0 for step in steps[1:])
    assert (folder / "warmup/verdict.json").is_file() == (config.warmup.steps > 0)
    assert (folder / "verdict.json").is_file()
    algorithm, step = config.algorithm, steps[-1]  # a setting without an effect is not in the log either
    assert ("kl" in step) == ("kl_coef" in step) == (algorithm.kl.coef > 0)
    assert ("gradreg/first_norm" in step) == (algorithm.gradreg.strength > 0)
    assert (step["ratio/max"] > 1 + 1e-4) == (algorithm.minibatches * algorithm.epochs > 1)
