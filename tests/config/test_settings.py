"""Layers, and what a person is told when a setting cannot be used."""

import json
import re
import shlex
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml

from scripts import make_configuration_page
from tests.commands.conftest import config_of, write
from tests.conftest import ROOT, refuses
from trainer.config import ds_config
from trainer.config.choose_preset import choose_preset
from trainer.config.nearest_name import OTHER_NAMES
from trainer.config.read_yaml import written
from trainer.config.request import parse_command_line
from trainer.config.resolve import full_names, resolve
from trainer.config.settings import Algorithm, fields, is_section
from trainer.config.train_options import PRESETS, RECIPES, names_in
from trainer.errors import ConfigError
from trainer.machine.hardware import Gpu, Hardware


def test_a_mixture_replaces_that_of_a_run_whose_parts_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("mine.py").touch()
    before = resolve("nano", None, ["task.name=mix", "task.mix={mine.py:f: 1}"])
    Path("run/config.yaml").write_text(before.to_yaml(Path("run")))
    settings = resolve("run/config.yaml", None, ["task.mix={mine.py:f: 2}", "task.mix.nano=1"])
    assert settings.task.mix == {"mine.py:f": 2.0, "nano": 1.0}
    task = resolve("run/config.yaml", None, ["task.name=addition"]).task
    assert (task.name, task.mix) == ("addition", {})
    for others in ([], ["task={limit: 40}"]):  # a share changes no other part
        mix = resolve("run/config.yaml", None, ["task.mix.nano=2", *others]).task.mix
        assert mix == {str(Path("mine.py:f").absolute()): 1.0, "nano": 2.0}


def test_a_warm_up_leaves_vllm_and_rounded_weights_to_the_run_after_it():
    """A process may have one vLLM, and rounded weights need a correction."""
    for key, value, instead in (("engine", "vllm_colocate", "auto"), ("weights", "int8", "same")):
        config = resolve("nano", None, ["warmup.steps=4", f"rollout.{key}={value}"])
        runs = (config.warmed_up_in(None), config.after_warmup(Path("it")))
        assert [getattr(run.rollout, key) for run in runs] == [instead, value]


TABLE = yaml.safe_load((ROOT / "tests/data/settings.yaml").read_text())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join([row.get("preset", "nano"), *row["settings"]]))
def test_settings_become_what_the_table_says(row):
    config = resolve(row.get("preset", "nano"), row.get("recipe"), row["settings"])
    found = full_names(config.model_dump(mode="json"))
    assert {key: found[key] for key in row["become"]} == row["become"]


@pytest.mark.parametrize(("preset", "settings", "paid"), [
    ("8gb", [], "1.0 correct + 0.1 format + 0.05 length"),
    ("8gb", ["reward.weights={correct: 1, length: -0.5, format: 0}"], "1.0 correct - 0.5 length"),
    ("8gb", ["reward.custom=a.py:f"], "1.0 f; {correct: 1, f: 1}"),
    ("nano", ["reward.weights={correct: 0, format: 0.1}"], "0.1 format; {correct: 1, format: 0.1}"),
    ("nano", ["task.name=records", "task.path=a", "task.answer=none", "reward.weights.length=2"], "2.0 length"),
    ("nano", ["task.name=records", "task.path=a", "task.answer=none"], "nothing"),
])  # fmt: skip
def test_a_dry_run_says_what_is_paid(preset, settings, paid):
    request = parse_command_line(["--preset", preset, "--dry-run", *settings])
    said = request.resolved.partition("\n")[0]
    assert said.startswith(f"# reward: {paid.partition(';')[0]}")
    assert re.findall(r"reward.weights='(.+)'", said) == re.findall("{.+", paid)  # what would pay right answers, too
    assert "octet doctor" in request.resolved
    assert yaml.safe_load(request.resolved) == request.config.model_dump(mode="json")


def test_steps_displace_the_epochs_of_the_preset_and_epochs_become_steps():
    assert resolve("8gb", None, ["run.steps=7"]).total_steps(train_problems=1000) == 7
    assert resolve(None, None, ["run.seed=3"]).run == resolve(None).run.model_copy(update={"seed": 3})
    assert resolve("8gb", None, ["run.epochs=2", "rollout.problems=8"]).total_steps(train_problems=100) == 25


@pytest.mark.parametrize("value", ['"e/x" y', "[/INST] hi", ' "it\'s" #2'])
def test_what_is_said_about_quotes_can_be_typed(value):
    with pytest.raises(ConfigError) as refused:
        resolve("nano", None, [f"prompt.system={value}"])
    (argument,) = shlex.split(str(refused.value).partition("Put quotes around it: ")[2].removesuffix("."))
    assert resolve("nano", None, [argument]).prompt.system == value.strip()


def test_a_number_with_a_zero_in_front_is_decimal_in_a_file_too(tmp_path):
    (tmp_path / "mine.yaml").write_text("run: {seed: 010}\neval:  # {every: 2}\n")  # an empty section
    assert resolve(str(tmp_path / "mine.yaml")).run.seed == 10


def test_a_mixture_is_written_in_its_order_which_the_order_of_problems_follows():
    assert written({"nano": 1.0, "addition": 2.0}) == "{nano: 1.0, addition: 2.0}"


def test_the_folder_of_a_model_needs_no_slash_to_be_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodel").mkdir()
    written = yaml.safe_load(resolve("nano", None, ["model.name=mymodel"]).to_yaml(tmp_path / "run"))
    assert written["model"]["name"] == str(tmp_path / "mymodel")


def test_the_folder_of_the_user_is_found_in_a_file_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("run: {dir: ~/runs/it}\n")
    assert resolve("~/mine.yaml", None, ["lora.start=~/a"]).run.dir == tmp_path / "runs/it"
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "config.yaml").write_text("task: {name: records, path: data.jsonl}")  # of a run, with paths from here
    assert resolve("~/config.yaml").task.path == str(tmp_path / "data.jsonl")


def test_a_resolved_configuration_is_frozen_and_its_yaml_plain():
    with pytest.raises(ValueError, match="frozen"):
        resolve("nano").run.seed = 3
    assert yaml.safe_load(resolve("nano").to_yaml())["model"]["name"] == "nano"


CARDS = [({}, "nano"), ({"GTX 1650": 4.3}, "nano"), ({"RTX 3070": 8.6}, "8gb"), ({"RTX 3060": 12.9}, "12gb")]
CARDS += [({"T4": 16.1}, "16gb"), ({"A10G": 24.1}, "24gb"), ({"H100": 85.5}, "80gb")]
CARDS += [({"RTX 3090": 25.8, "RTX 3070": 8.6}, "8gb")]


@pytest.mark.parametrize(("cards", "preset"), CARDS)
def test_the_hardware_chooses_and_says_why(cards, preset):
    gpus = tuple(Gpu(number, f"GPU-{number}", *card) for number, card in enumerate(cards.items()))
    chosen, why = choose_preset(machine := Hardware(gpus=gpus, cores=8))
    assert chosen == preset
    assert str(machine) in why


def test_options_and_settings_may_be_mixed_and_what_the_user_names_needs_no_reason():
    assert parse_command_line(["--preset", "8gb"]).reason == ""
    request = parse_command_line(["run.seed=3", "--preset", "nano", "--dry-run", "run.steps=2", "--local_rank=0"])
    assert (request.config.run.seed, request.config.run.steps, request.dry_run) == (3, 2, True)


@pytest.mark.parametrize("name", ["run", "lr=1e-3"])
def test_resume_takes_the_settings_from_the_folder(tmp_path, name):
    folder = write(tmp_path / name, {"config.yaml": config_of("algorithm.lr=0.5", "run.steps=9")})
    request = parse_command_line(["--resume", str(folder), "run.steps=12"])
    assert (request.config.algorithm.lr, request.config.run.steps, request.config.run.dir) == (0.5, 12, folder)


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_ds_config_is_filled(path, dtype):
    filled = ds_config.fill(ds_config.read(path.stem), dtype, max_grad_norm=0.7, trained=1000)
    assert filled["zero_optimization"]["reduce_bucket_size"] == 1000
    assert filled["bf16"]["enabled"] is (dtype == "bf16")
    assert filled["fp16"]["enabled"] is (dtype == "fp16")
    assert filled["gradient_clipping"] == 0.7
    assert not [key for key in filled if key.startswith("//")]


def test_buffers_are_as_large_as_what_is_trained_unless_somebody_says_otherwise():
    asked = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}
    assert ds_config.fill(asked, "fp32", 1.0, trained=1000)["zero_optimization"] == asked["zero_optimization"]
    whole = ds_config.fill({"zero_optimization": {"stage": 2}}, "fp32", 1.0, trained=1_500_000_000)
    assert whole["zero_optimization"]["reduce_bucket_size"] == ds_config.LARGEST_BUCKET


def test_a_ds_config_may_say_that_nothing_is_offloaded():
    assert not ds_config.is_offloaded({"stage": 2, "offload_optimizer": None}, "optimizer")


def test_every_setting_has_a_line_in_the_reference():
    page = (ROOT / "docs/configuration.md").read_text()
    assert make_configuration_page.page() == page
    assert set(fields()) <= set(page.split("`"))


def test_what_stands_for_a_name_of_another_program_is_a_setting():
    meant = yaml.safe_load(OTHER_NAMES.read_text())
    named = {word.partition("=")[0] for text in meant for word in re.findall(r"(?<![/\w])\w+\.[\w.=]+", text)}
    assert named <= {*fields()}


def test_the_schema_for_editors_is_that_of_the_settings():
    written = (ROOT / "docs/config.schema.json").read_text()
    assert make_configuration_page.schema() == written
    weight = json.loads(written)["$defs"]["Reward"]["properties"]["weights"]["additionalProperties"]
    assert {"type": "null"} in weight["anyOf"]  # it takes away the weight of a preset
    for name in names_in(PRESETS):
        for section, settings in yaml.safe_load((PRESETS / f"{name}.yaml").read_text()).items():
            own = json.loads(written)["properties"][section]["$ref"].rpartition("/")[2]
            assert {*settings} <= {*json.loads(written)["$defs"][own]["properties"]}, name


def choices(section=Algorithm, prefix="algorithm.") -> list[str]:
    """Every `key=choice` of a section where the choices are named."""
    found = []
    for name, info in section.model_fields.items():
        if is_section(info.annotation):
            found += choices(info.annotation, f"{prefix}{name}.")
        elif get_origin(info.annotation) is Literal:
            found += [f"{prefix}{name}={choice}" for choice in get_args(info.annotation)]
    return found


def test_the_page_of_objectives_has_every_choice_setting_and_recipe():
    words = re.split(r"[`,\s]+", (ROOT / "docs/objectives.md").read_text())
    assert {"algorithm.loss=cispo", "algorithm.kl.estimator=k2"} <= set(choices())
    assert sorted({*choices()} - {*words}) == []
    settings = {name.rpartition(".")[2] for name in fields() if name.startswith("algorithm.")} - {"lr"}
    assert sorted(settings - {part for word in words for part in re.split(r"[.=]", word)}) == []
    assert sorted({*names_in(RECIPES)} - {*words}) == []


WARMUPS = ["", "warmup.from=samples warmup.rounds=2", "warmup.then=merged", "warmup.every=2 warmup.patience=1"]
BESIDE = ["", "algorithm.loss=reinforce", "algorithm.loss=gspo", "algorithm.dual_clip=3", "algorithm.kl.coef=1"]
BESIDE += ["algorithm.kl.coef=1 algorithm.kl.where=reward", "algorithm.minibatches=4", "rollout.dead_groups=refill"]
BESIDE += ["rollout.dead_by=correct", "rollout.temperature=0.7", "teacher.name=nano", "teacher.adapter=x"]
BESIDE += ["rollout.vllm.urls=http://a rollout.ahead=1", "eval.problems=0", "eval.every=2 eval.patience=2", "lora.r=7"]
BESIDE += ["eval.metric=lenient", "run.merge=false", "run.epochs=1", "reward.control=random", "task.tools=calculator"]
BESIDE += ["lora.enabled=false", "lora.init=pissa", "lora.start=x", "lora.dora=true", "model.quantize=nf4"]


@pytest.mark.parametrize("warmup", WARMUPS)
def test_settings_with_a_warm_up_are_refused_at_once_or_hold_for_both_runs(warmup):
    taken = 0
    for beside in BESIDE:
        try:
            config = resolve("nano", None, ["warmup.steps=4", *warmup.split(), *beside.split()])
        except ConfigError:
            continue
        assert config.warmed_up_in(Path("warmup")).is_warmup
        after, taken = config.after_warmup(Path("warmup")), taken + 1
        assert after.warmup.steps == 0
        assert after.lora.start != config.lora.start or config.lora.start is None
    assert taken > len(BESIDE) / 2


def test_what_makes_a_group_dead_follows_from_the_objective():
    assert not resolve("nano", None, ["algorithm.loss=reinforce"]).drops_dead_groups
    assert resolve("nano").drops_dead_groups
    assert not resolve("nano", None, ["rollout.dead_groups=keep"]).drops_dead_groups
    own = ["task.name=records", "task.path=it.jsonl", "task.answer=none"]
    for settings in (own, ["rollout.dead_groups=keep"], ["algorithm.loss=reinforce", "rollout.dead_groups=drop"]):
        for preset in ("nano", None):
            with refuses("rollout.dead_by"):
                resolve(preset, "dapo", settings)
        assert resolve("nano", "dapo", [*settings, "rollout.dead_by=reward"]).rollout.dead_by == "reward"


def test_a_file_that_weighs_a_function_keeps_its_weights(tmp_path):
    (tmp_path / "mine.yaml").write_text("reward: {weights: {correct: 1.0, f: 0.5}}\n")
    assert resolve("8gb", str(tmp_path / "mine.yaml"), ["reward.custom=a.py:f"]).reward.weights == {
        "correct": 1.0,
        "f": 0.5,
    }
