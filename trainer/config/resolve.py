"""Combine the settings of a run.

    preset (presets/8gb.yaml) -> recipe (presets/recipes/*.yaml) -> key=value on the command line

A later layer wins, but weights of rewards give way to a function of the user (`_leave_out_rewards`). The result is
validated and frozen.
"""

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.nearest_name import did_you_mean, setting_for
from trainer.config.paths import placed
from trainer.config.read_yaml import BadYaml, read_setting, read_yaml, written
from trainer.config.settings import Config, Reward, fields
from trainer.config.train_options import PRESETS, RECIPES, names_in
from trainer.errors import ConfigError
from trainer.machine import disk, user_code
from trainer.machine.exits import OTHER_LOCALE
from trainer.machine.safe_text import visible

LONGEST_SHOWN = 200  # characters of a value in a message
BY_ITS_VERSION = "Read it with the version that wrote it"
SPLIT = "Put quotes around a setting with spaces, at which the shell splits it: 'reward.weights={correct: 1.0}'"
WANTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "tuple": "a list: [a, b]"}
WANTED |= {"dict": "a mapping: {key: value}", "missing": "a list with all its values: [a, b]", "path": "a path"}
WANTED |= {"string": "a text"}
YAML_KINDS = {bool: "true or false", int: "a number", float: "a number", date: "a date", datetime: "a date"}
YAML_KINDS |= {dict: "a mapping"}
# Settings that name code, a command, or a server that may get a key, and those that let other code run.
OF_OTHERS = ["task.name", "task.mix", "task.agent", "task.tools", "reward.custom", "reward.judge.url", "teacher.url"]
OF_OTHERS += ["rollout.vllm.urls", "rollout.vllm.python", "rollout.vllm.arguments", "model.trust_remote_code"]
OF_OTHERS += ["reward.code.unsafe"]
RIVALS = {"steps": "epochs", "epochs": "steps"}  # of the section `run`
WEIGHTS = ("reward", "weights")
OF_REWARDS = (WEIGHTS, ("rollout", "dead_by"))

Layer = dict[str, Any]  # the settings of one source, by section


def resolve(preset: str | None, recipe: str | None = None, overrides: Iterable[str] = ()) -> Config:
    """Return the frozen configuration of a preset, a recipe and `key=value` overrides."""
    preset = preset and os.path.expanduser(preset)
    files = _files(preset, recipe)
    texts: list[Any] = [None] if isinstance(overrides, str) or not isinstance(overrides, Iterable) else [*overrides]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError("overrides", f"{_shown(repr(overrides))} is not a list of texts", "Write ['run.steps=100']")
    overrides = ["".join(map(str.strip, text.partition("="))) for text in texts]
    parsed = [_parsed(text) for text in overrides]
    command = reduce(_merge, parsed, Layer())
    files, others = _leave_out_rewards(files, command, overrides)
    above = reduce(_merge, [*files[bool(preset) :], command], Layer())  # everything but the preset
    folder = Path(preset).parent if preset and Path(preset).name == "config.yaml" else None  # of a run
    if folder:
        files[0] = placed(files[0], folder)
    merged = _merged(files, command, zip(overrides, parsed))
    typed = dict(text.partition("=")[::2] for text in overrides)
    if not _names_dead_by(files, preset, above):
        plain = _merge(merged, {"rollout": {"dead_by": "reward"}})
        merged = merged if validated(plain, typed).can_drop_by_correct else plain
    config = validated(merged, typed)
    for section, key in others:  # so that `train(config, reward=function)` leaves them out, too
        getattr(config, section).model_fields_set.discard(key)
    # the settings that the command names, if others may be somebody else's
    named = flat(above) if folder and not disk.is_made_here(folder) else {}
    stored = code_and_servers(config, [key for key in OF_OTHERS if named and named[key] is None])
    user_code.of_runs |= stored
    user_code.named |= code_and_servers(config).keys() - stored.keys()
    return config.warmed_up_in(config.run.dir) if config.is_warmup else config


def _files(preset: str | None, recipe: str | None) -> list[Layer]:
    layers = [_load_layer(preset, PRESETS, "--preset")] if preset else []
    if isinstance(recipe, list | tuple):
        raise ConfigError("recipe", f"it is a {type(recipe).__name__}", "Write resolve(preset, None, [...])")
    return [*layers, _load_layer(os.path.expanduser(recipe), RECIPES, "--recipe")] if recipe else layers


def _leave_out_rewards(
    files: Sequence[Layer], command: Layer, overrides: Sequence[str]
) -> tuple[list[Layer], list[tuple[str, str]]]:
    """Return the files without weights that fit other rewards than the functions of the user, and the settings of
    rewards that the user has not chosen, on the command line or in a file that names functions or the weight of one."""
    rewards = [layer.get("reward", {}) for layer in (*files, command)]
    functions = [custom for one in rewards if (custom := one.get("custom"))]
    texts = [text for custom in functions for text in (custom if isinstance(custom, list) else [custom])]
    names = {str(text).rpartition(":")[2] for text in texts}

    def is_own(layer: Layer) -> bool:
        own = layer.get("reward", {})
        weights = own.get("weights")
        return bool(own.get("custom") or (isinstance(weights, Mapping) and names & weights.keys()))

    chosen = [*filter(is_own, files), command]
    others = [(section, key) for section, key in OF_REWARDS if not any(key in one.get(section, {}) for one in chosen)]
    changes_one = any(text.startswith("reward.weights.") for text in overrides)
    if functions:
        left_out = others if WEIGHTS in others else [WEIGHTS]
        files = [one if is_own(one) else _without(one, left_out) for one in files]
    elif changes_one and not any("weights" in one for one in rewards[:-1]):
        files = [*files, {"reward": {"weights": Reward.model_fields["weights"].default}}]
    return [*files], others


def _merged(files: Iterable[Layer], command: Layer, overrides: Iterable[tuple[str, Layer]]) -> Layer:
    """Merge the files, and the overrides of which `command` consists."""
    merged: Layer = {"run": {"steps": Config.model_fields["run"].default.steps}}  # unless a layer has others
    for layer in files:
        merged = _merge(_without(merged, [*_rivals(layer), *_earlier_tasks(layer)]), layer)
    merged = _without(merged, _rivals(command))  # a command that names both is refused later
    for text, layer in overrides:
        replaced = _earlier_tasks(layer, is_share=text.startswith("task.mix."))
        if merged.get("task", {}).get("mix") and layer.get("task", {}).get("mix") == {}:
            raise ConfigError(text, "a mixture has one task or more", "Write task.name=NAME for one task")
        if text.startswith("reward.weights="):  # the weights of a preset fit its own task
            replaced.append(WEIGHTS)
        merged = _merge(_without(merged, replaced), layer)
    return merged


def _rivals(layer: Layer) -> list[tuple[str, str]]:
    """Return `run.epochs` if the layer has `run.steps`, and the other way round: those of the later layer apply."""
    return [("run", rival) for key, rival in RIVALS.items() if layer.get("run", {}).get(key) is not None]


def _earlier_tasks(layer: Layer, is_share: bool = False) -> list[tuple[str, str]]:
    """Return the settings of earlier tasks that the layer replaces. A share only changes a part of a mixture."""
    task = layer.get("task", {})
    replaces_mix = task.get("name", "mix") != "mix" or ("mix" in task and not is_share)
    return [("task", "mix")] * replaces_mix + [("task", "name")] * bool(task.get("mix"))


def _without(layer: Layer, settings: Iterable[tuple[str, str]]) -> Layer:
    for section, key in settings:
        layer = {**layer, section: {name: value for name, value in layer.get(section, {}).items() if name != key}}
    return layer


def _names_dead_by(files: Sequence[Layer], preset: str | None, above: Layer) -> bool:
    """Return True if `rollout.dead_by` is chosen for these rewards. That of a preset is for its own rewards only."""
    is_run = preset and Path(preset).name in ("config.yaml", "job.yaml")
    pays = {"task": {"name", "mix", "answer"}, "reward": {"weights", "custom"}}
    is_paid_otherwise = any(keys & above.get(section, {}).keys() for section, keys in pays.items())
    chosen = [above, files[0]] if is_run and not is_paid_otherwise else [above]
    return any("dead_by" in layer.get("rollout", {}) for layer in chosen)


def code_and_servers(config: Config, keys: Iterable[str] = OF_OTHERS) -> dict[str, str]:
    """Return the code, commands and servers that may get a key, as far as these settings name them, each with the
    whole setting as it is written on a command line."""
    values = {key: attrgetter(key)(config) for key in keys}
    if arguments := values.get("rollout.vllm.arguments"):
        values["rollout.vllm.arguments"] = written([*arguments])  # as one text
    found: dict[str, str] = {}
    for key, stored in values.items():
        value = "true" if stored is True else stored
        parts = [value] if isinstance(value, str | Path) else value or ()
        whole = dict(value) if isinstance(value, Mapping) else [*parts]
        is_text = len(parts) == 1 and not isinstance(value, Mapping)
        for one in (f"{key}={part}" for part in parts):
            found[user_code.code_in(one)] = one if is_text else f"{key}={written(whole)}"
    return found


def validated(values: Mapping[str, Any], typed: Mapping[str, str] | None = None) -> Config:
    """Return the configuration with these values. `typed` has the values of the command line as they were typed."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first, *others = _explained(error.errors(), typed or {})
        first.args = ("\n".join(map(str, (first, *others))),)
        raise first from None


def _load_layer(name: str, folder: Path, flag: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not os.path.isfile(path):  # unlike Path.is_file, this accepts a name that is too long
        known = names_in(folder)
        reason = f"there is no such file or name.{did_you_mean(name, known)}"
        raise ConfigError(f"{flag} {name}", reason, f"Known: {', '.join(known)}")
    try:
        if not (layer := read_yaml(path.read_bytes()) or {}) and path.name == "config.yaml":
            raise BadYaml("it is empty")
        if not isinstance(layer, dict):
            raise BadYaml(f"expected sections such as `rollout:`, found a {type(layer).__name__}")
        layer = {name: {} if part is None and name in Config.model_fields else part for name, part in layer.items()}
        _refuse_unknown_keys(layer)
    except BadYaml as error:
        reason = f"it cannot be read: {error}"
        if path.name != "config.yaml":
            raise ConfigError(f"{flag} {name}", reason) from None
        again = f"repeat the first command of the run with run.dir={path.parent}, which writes it anew"
        raise ConfigError(path, reason, f"Restore it, or {again}") from None
    except ConfigError as error:
        if path.name == "config.yaml":  # of a run of another version, which no command line names
            raise ConfigError(f"{path}: {error.key}", error.reason, BY_ITS_VERSION) from None
        raise
    return dict(_expanded(layer))


def _expanded(value: Any) -> Any:
    """Return settings with the folder of the user in place of `~`, which the shell leaves after an equals sign."""
    if isinstance(value, Mapping):
        return {key: _expanded(part) for key, part in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~") else value


def overrides_of(named: Mapping[str, Any]) -> list[str]:
    """Return settings as they are written on a command line, without those that are None."""
    return [f"{key}={written(value)}" for key, value in named.items() if value is not None]


def _parsed(text: str) -> dict[str, Any]:
    """Return an override such as `rollout.group_size=16` as nested dictionaries. `read_setting` reads its value."""
    key, equals, value = text.partition("=")
    if not equals and os.path.exists(text):
        raise ConfigError(_shown(text), "expected key=value, not a file or folder", "--help shows what takes it")
    if not equals or not key.strip(".") or not value.strip():
        raise ConfigError(_shown(text), "expected key=value, such as rollout.group_size=16", SPLIT)
    if text != text.encode(errors="replace").decode():  # bytes that Python could not decode
        raise ConfigError(_shown(text), "this locale lacks one of its characters", OTHER_LOCALE)
    try:
        nested: Any = _expanded(read_setting(value))
        for part in reversed(key.split(".")):
            nested = {part: nested}
        _refuse_unknown_keys(nested)
    except BadYaml as error:
        quoted = _shown(shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}"))
        is_open = any(value.count(begin) > value.count(end) for begin, end in ("[]", "{}"))
        remedy = f"Close its bracket. {SPLIT}" if is_open else f"Put quotes around it: {quoted}"
        raise ConfigError(_shown(text), f"the value is not valid YAML: {error}", remedy) from None
    return nested


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both_nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both_nested else value
    return merged


def _refuse_unknown_keys(layer: Mapping[str, Any]) -> None:
    sections, known = Config.model_fields, fields()
    for section, settings in layer.items():
        for key, value in full_names({section: settings}).items():
            inner = key.removeprefix(f"{section}.")
            is_dotted = "." in inner and isinstance(settings, Mapping) and inner in settings
            if section in sections and key in known and not is_dotted:
                continue
            if any(name.startswith(f"{key}.") for name in known):
                raise ConfigError(f"{key}={_shown(written(value))}", f"{key} is a section", f"Write {key}.KEY=VALUE")
            nearest = setting_for(key) or did_you_mean(key, [*sections, *known])
            if key in known:  # with dots in a file
                nearest = f" Write {key.replace('.', ': {')}: ...{'}' * key.count('.')}"
            raise ConfigError(_shown(key), f"there is no such setting.{nearest}")


def full_names(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return settings by their full names: `{lora: {r: 4}}` and `{lora.r: 4}` are the same."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}{key}"
        is_empty = not value and not any(key.startswith(f"{name}.") for key in fields())  # and so no section
        is_section = isinstance(value, dict) and name not in fields() and not is_empty
        inner = full_names(value, f"{name}.") if is_section else {name: value}
        if twice := settings.keys() & inner:
            raise BadYaml(f"{min(twice)} is written twice. Remove one")
        settings |= inner
    return settings


def _explained(errors: Sequence[Any], typed: Mapping[str, str]) -> list[ConfigError]:
    """Return one error for each wrong setting, although pydantic reports one for each type that a setting may have.
    `typed` has the overrides as they were typed."""
    explained: dict[str, ConfigError] = {}
    for detail in errors:
        place = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]  # of a list that is too short
        key = ".".join(str(part) for part in place if str(part).isalnum() or str(part).isidentifier())
        text = _shown(detail["input"])
        if detail["type"] == "value_error":
            error = detail["ctx"]["error"]
            name = key if isinstance(detail["input"], dict) or "url" in key else f"{key}={text}"  # which may have a key
            explained[key] = error if isinstance(error, ConfigError) else ConfigError(name, *str(error).rsplit(". ", 1))
        elif "url" in key:
            explained[key] = ConfigError(key, "it is not the address of a server", "Write http://127.0.0.1:8000")
        elif detail["type"] in ("string_type", "path_type") and (kind := YAML_KINDS.get(type(detail["input"]))):
            if key not in typed and isinstance(detail["input"], int | float):  # a file may have `no` or 007
                explained[key] = ConfigError(key, f"YAML reads it as {kind}, and a text is needed", "Quote it")
                continue
            text = written(detail["input"])[1:-1].removesuffix(" null") if kind == "a mapping" else text  # [Question:]
            text = _shown(typed.get(key, text))
            quoted = f"'{key}=\"{text}\"'" if key in fields() else f'"{text}"'  # the latter in a list or a mapping
            reason = f"YAML reads {text} as {kind}, and a text is needed"
            explained[key] = ConfigError(f"{key}={text}", reason, f"Quote it: {quoted}")
        elif detail["input"] is None and (names := [part for part in detail["loc"] if ":" in str(part)]):
            reason = f"{_shown(names[0])} is read as one name"
            explained[key] = ConfigError(key, reason, "Write a space after the colon")
        else:
            text = repr(text) if isinstance(detail["input"], str) else text
            other = f"{explained[key].remedy}, or " if key in explained else ""
            remedy = _remedy(detail).removeprefix("Write ") if other else _remedy(detail)
            explained[key] = ConfigError(f"{key}={text}", remedy=other + remedy)
    return list(explained.values())


def _shown(value: Any) -> str:
    try:
        text = visible(str(value))
    except ValueError:  # Python refuses to write numbers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _remedy(detail: Any) -> str:
    if detail["loc"] == ("algorithm", "loss") and detail["input"] in names_in(RECIPES):  # TRL's loss_type=dapo
        return f"Write --recipe {detail['input']}"
    if detail["loc"] == ("rollout", "engine") and detail["input"] == "vllm":
        return setting_for("use_vllm").strip()
    if choices := detail.get("ctx", {}).get("expected"):
        return f"Write one of {choices}"
    kind = detail["type"].removesuffix("_type").removesuffix("_parsing").removesuffix("_from_float")
    return f"Write {WANTED[kind]}" if kind in WANTED else detail["msg"].replace("Input should", "It should")


def flat(settings: dict[str, Any], missing: Any = None) -> dict[str, Any]:
    """Return every setting as `section.key`. A setting that is not there, as in an older version, is `missing`."""
    named = full_names(settings or {})
    return {key: named.get(key, missing) for key in fields()}
