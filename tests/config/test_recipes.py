"""Every recipe, found by itself: it goes over every preset, says the objective and not the hardware, and it trains."""

import json
import math
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from tests.e2e.recipes import small
from tests.forks import forked
from trainer.config.arguments import PRESETS, RECIPES, names_in
from trainer.config.command_line import resolve
from trainer.config.settings import fields
from trainer.errors import ConfigError

NAMES = names_in(RECIPES)
# Decided by the card: a preset's business.
HARDWARE = {"model.dtype", "model.gradient_checkpointing", "optim.tokens_per_micro_batch"}
HARDWARE |= {"optim.name", "optim.layout", "rollout.rows", "rollout.engine", "run.threads", "engine.ds_config"}


def flat(settings: dict, prefix: str = "") -> dict:
    """Every setting of a layer by its dotted name."""
    found = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= {name: value} if name in fields() else flat(value, f"{name}.")
    return found


def layer(recipe: str) -> dict:
    return flat(yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text()))


@pytest.mark.parametrize("preset", names_in(PRESETS))
@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_goes_over_every_preset(recipe, preset, tmp_path):
    if preset == "8gb-7b" and layer(recipe).get("lora.enabled") is False:
        with pytest.raises(ConfigError, match=r"model\.quantize=nf4: quantised weights cannot be trained"):
            resolve(preset, recipe)
        return
    config = resolve(preset, recipe)
    resolved = flat(config.model_dump(mode="json"))
    for name, value in layer(recipe).items():
        if isinstance(value, dict):  # the weights: those of the preset stay beside them
            assert resolved[name].items() >= value.items()
        else:
            assert resolved[name] == value
    written = tmp_path / "config.yaml"
    written.write_text(config.to_yaml())
    assert resolve(str(written)) == config


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_leaves_the_hardware_to_the_preset(recipe):
    assert {*fields()} >= HARDWARE
    assert not HARDWARE & layer(recipe).keys()


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_says_where_it_comes_from(recipe):
    head = (RECIPES / f"{recipe}.yaml").read_text().partition("\n")[0]
    assert any(source in head for source in ("arXiv 2", "Write-up", "Williams")), head


def test_the_command_line_takes_a_recipe_and_still_wins():
    command = [
        sys.executable,
        "train.py",
        "--preset",
        "8gb",
        "--recipe",
        "dapo",
        "--dry-run",
        "algorithm.clip_high=0.3",
    ]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240).stdout
    settings = yaml.safe_load(printed)
    assert (settings["algorithm"]["clip_high"], settings["rollout"]["dead_groups"]) == (0.3, "refill")
    assert settings["reward"]["weights"] == {"correct": 1.0, "format": 0.1, "length": 0.05, "overlong": 0.5}


SOME = ("dapo", "full_finetune", "gradreg")
TRAINED = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiers):
    """Two steps of each: the run folders, and how far each adapter went."""
    folder = tmp_path_factory.mktemp("recipes")
    recipes = [name for name in NAMES if ("quick" if name in SOME else "slow") in tiers]
    subprocess.run([*forked(), "-m", "tests.e2e.recipes", folder, *recipes], cwd=ROOT, check=True, timeout=580)
    return folder


@pytest.mark.parametrize("recipe", TRAINED)
def test_a_recipe_trains_the_embedded_model(recipe, trained):
    steps = [json.loads(line) for line in (trained / recipe / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(step["grad_norm"] > 0 and step["skipped"] == 0 for step in steps)
    assert json.loads((trained / "moved.json").read_text())[recipe] > 0


@pytest.mark.parametrize("recipe", TRAINED)
def test_what_a_recipe_asks_for_is_measured(recipe, trained):
    """A setting without an effect on a run is not in its log either."""
    algorithm = small(recipe).algorithm
    step = json.loads((trained / recipe / "metrics.jsonl").read_text().splitlines()[-1])
    assert ("kl" in step) == ("kl_coef" in step) == (algorithm.kl.coef > 0)
    assert ("gradreg/first_norm" in step) == (algorithm.gradreg.strength > 0)
    assert (step["ratio/max"] > 1 + 1e-4) == (algorithm.minibatches * algorithm.epochs > 1)
