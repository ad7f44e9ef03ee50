"""Every preset for a card: it fits with room, and takes an evening on the slowest card that it is for."""

import re

import pytest
import yaml

from tests.conftest import ROOT
from trainer.config.choose_preset import GPU_PRESETS, preset_for
from trainer.config.resolve import resolve
from trainer.config.train_options import PRESETS, names_in
from trainer.model.shapes import shape_of
from trainer.plan.cards import CARDS as TABLE
from trainer.plan.cards import COMMON, card_of
from trainer.plan.hours import on_card
from trainer.plan.planner import GB, Planner

EVENING = 5.0  # hours
BOARDS = {"RTX 4060 Ti": "RTX 4060 Ti 16GB", "RTX 5060 Ti": "RTX 5060 Ti 16GB", "A100": "A100-SXM4-80GB"}  # larger ones
CARDS = [card_of(name) for name in (*TABLE, *BOARDS.values())]
# The slowest card for each, as the head of its file says. Two of them are for no card of their size in particular.
SLOWEST = {"8gb": "RTX 3050", "8gb-4b": "RTX 3050", "12gb": "RTX 3060", "16gb": "RTX 4060 Ti 16GB", "24gb": "L4"}
SLOWEST |= {"80gb": "A100-SXM4-80GB", "cluster": "A100-SXM4-80GB", "smollm2-gsm8k": "RTX 4060"}
RANKS = {"cluster": 4}


def planner(preset: str) -> Planner:
    config = resolve(preset)
    return Planner(shape_of(config.model.name), config, RANKS.get(preset, 1), GPU_PRESETS[preset] * GB)


def hours(preset: str, card: str) -> tuple[float, float]:
    return on_card(card, planner(preset)).hours


def test_every_preset_for_a_card_is_here():
    assert {*SLOWEST} == {*GPU_PRESETS} == {*names_in(PRESETS)} - {"nano", "smollm2"}


@pytest.mark.parametrize("preset", SLOWEST)
def test_a_preset_ends_in_an_evening_on_the_slowest_card_that_it_is_for(preset):
    assert hours(preset, SLOWEST[preset])[1] <= EVENING
    head = (PRESETS / f"{preset}.yaml").read_text().partition("\nmodel:")[0].replace("\n# ", " ")
    assert re.search(rf"at most 5 h on (a|an|four) {re.split(' 16GB|-', SLOWEST[preset])[0]}\b", head)


@pytest.mark.parametrize("preset", sorted({*SLOWEST} - {"smollm2-gsm8k"}))
def test_no_card_of_the_table_is_slower(preset):
    sized = {"8gb-4b": "8gb", "cluster": "80gb"}.get(preset, preset)
    times = {card.name: hours(preset, card.name)[1] for card in CARDS if preset_for(card.memory_gb) == sized}
    assert max(times, key=times.get) == SLOWEST[preset]
    assert len(times) > 2


@pytest.mark.parametrize("preset", GPU_PRESETS)
def test_a_preset_fits_with_room_on_one_card(preset):
    own = planner(preset)
    own.world_size = 1
    assert 0.6 < own.plan.peak / own.vram < 0.89
    assert own.plan.ram_peak < 2 * own.vram
    assert own.decodes


def rows(page: str) -> dict[str, list[str]]:
    """The cells of the table of presets, by the name in its first column."""
    lines = (ROOT / page).read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("preset", sorted({*GPU_PRESETS} - {"cluster", "smollm2-gsm8k"}))
def test_the_pages_say_what_is_planned(preset):
    config, plan = resolve(preset), planner(preset).plan
    rollout, size = config.rollout, GPU_PRESETS[preset]
    model, answers, steps, peak, time = rows("README.md")[preset]
    assert model.split()[0] == config.model.name.rpartition("/")[2]
    assert answers == f"{rollout.problems} x {rollout.group_size} of up to {rollout.max_new_tokens} tokens"
    assert (steps, peak) == (str(config.run.steps), f"{plan.peak / GB:.1f} GB")
    found = on_card(COMMON[size], planner(preset))
    assert time == f"{found.about:.1f} h on {re.sub('^(?=RTX|H)', 'an ', COMMON[size])}"
    *_, peak, slowest = rows("docs/memory.md")[preset]
    assert peak == f"{plan.peak / GB:.1f} GB ({plan.peak / plan.vram:.0%})"
    least, most = hours(preset, SLOWEST[preset])
    assert slowest == f"{SLOWEST[preset]}: {least:.1f} to {most:.1f} h"


def test_a_first_look_takes_the_minutes_that_the_first_page_says():
    own = planner("8gb")
    own.config = resolve("8gb", "try")
    minutes, page = on_card(COMMON[8], own).about * 60, (ROOT / "README.md").read_text()
    assert f"--preset 8gb --recipe try    # ten steps: {minutes:.0f} minutes on an {COMMON[8]}\n" in page


def test_a_preset_without_thoughts_switches_them_off():
    """Qwen3 and SmolLM3 think by default, and their thoughts take thousands of tokens."""
    for preset in GPU_PRESETS:
        layer = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())
        thinks = re.search("Qwen3|SmolLM3", layer["model"]["name"]) and "Instruct" not in layer["model"]["name"]
        assert (layer["prompt"].get("template") == {"enable_thinking": False}) == bool(thinks)
