"""The model card of a run: what the model is, how good it is and how that was measured, and how to reproduce it."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, try_to_load_from_cache
from jinja2 import Environment

from trainer.config.resolve import flat
from trainer.machine.safe_text import visible
from trainer.reports import command_of_run
from trainer.run_folder.reader import OF_WARMUP, RunFiles, facts_of, table_rows
from trainer.stats import wilson
from trainer.watch.alarms import alarms_of
from trainer.watch.measure import percent

TEMPLATE = Path(__file__).with_suffix(".md")
DATA_SETS = {  # by task: the name on the hub, and the licence on its page
    "gsm8k": ("openai/gsm8k", "MIT"),
    "gsm8k-renumbered": ("openai/gsm8k", "MIT"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "MIT"),
    "multiple_choice": ("Idavidrein/gpqa", "CC BY 4.0"),
}
FILES = (".csv", ".json", ".jsonl", ".parquet")  # endings of tables; one that is named may have been moved since
OF_GRPO = {
    "learning rate": "algorithm.lr",
    "loss": "algorithm.loss",
    "advantage": "algorithm.advantage",
    "problems in a step": "rollout.problems",
    "answers to each (group size)": "rollout.group_size",
    "sampling temperature": "rollout.temperature",
    "tokens of an answer, at most": "rollout.max_new_tokens",
}
OF_A_WARMUP = {"learning rate": "warmup.lr", "worked solutions in a step": "warmup.problems"}
OF_LORA = {"LoRA rank": "lora.r", "LoRA alpha": "lora.alpha", "LoRA targets": "lora.targets"}


class Code(str):
    """A text in an indented block, in which Markdown has no markup."""


def card(run: RunFiles, name: str, kind: str, licence: str | None, curves: str | None, made: Mapping[str, Any]) -> str:
    """Return the card as Markdown with the hub's metadata. `kind` is adapter, gguf or model, `licence` that of the base
    if it is known, and `curves` the name of a picture beside the card. `made` has the step of the model, and what
    `octet export` recorded."""
    settings = run.settings
    whole, is_warmup = flat(run.config.model_dump(mode="json")), settings["warmup.only"]
    first = flat(run.before_training.config.model_dump(mode="json"))
    needs_warmup = kind == "adapter" and whole["model.name"] != first["model.name"]
    base = "merged" if needs_warmup else first["model.name"]  # the folder of the model after the warm-up
    whole |= {key: first[key] for key in OF_WARMUP}
    preset, changes = command_of_run.nearest_preset(whole)
    template = Environment(finalize=_harmless, trim_blocks=True, lstrip_blocks=True)
    template.filters["code"] = Code
    values = {"run": run, "settings": settings, "name": name, "kind": kind, "licence": licence, "made": made}
    values |= {"curves": curves, "base": base, "is_on_the_hub": _is_on_the_hub(base), "facts": facts_of(run)}
    values |= {"metadata": _metadata(run, base, kind, licence), "title": name.rpartition("/")[2], "data": _data(run)}
    values["had_warmup"] = run.before_training is not run
    recipe = (OF_A_WARMUP if is_warmup else OF_GRPO) | (OF_LORA if settings["lora.enabled"] else {})
    values |= {"recipe": recipe, "preset": preset, "changes": command_of_run.written(changes)}
    alarms = [alarm.finding.name for alarm in alarms_of(run.history) if alarm.lasts]
    values["results"] = made.get("accuracy") or made.get("reward")
    values |= {"commands": command_of_run.commands(whole, run.made_with), "alarms": alarms}
    values |= _evaluation(run, made["step"])
    values["base_in_code"] = json.dumps(base, ensure_ascii=False)
    text = template.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)
    own = f"{run.folder}{os.sep}"  # a resumed run reads the copies in its folder
    texts = _strings([*settings.values(), *run.given.values(), *whole.values()])
    local = [value for value in texts if _is_path(value) or value.startswith(own)]
    for value in sorted(local, key=len, reverse=True):
        text = text.replace(value, Path(value.rstrip("/")).name)  # local paths are not published
    return text


def _harmless(value: object) -> str:
    """Return a value as text that cannot start HTML or leave its block of code."""
    text = visible(str(value))
    return text.replace("\n", "\n    ") if isinstance(value, Code) else text.replace("<", "&lt;")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _strings([*value, *value.values()])
        elif isinstance(value, list | tuple):
            yield from _strings(value)


def _is_path(value: str) -> bool:
    """Return True for a path with a folder in it, which excludes `/no_think`."""
    return value.startswith(("/", "~/", "./", "../")) and "/" in value.strip("/")


def _is_on_the_hub(name: str) -> bool:
    if "/" in name:
        return name.count("/") == 1 and not _is_path(name) and not Path(name).exists()
    with suppress(ValueError):  # it can be no name there
        return isinstance(try_to_load_from_cache(name, "config.json"), str)  # as gpt2, and no folder moved elsewhere
    return False


def _data_set(run: RunFiles) -> tuple[str | None, str]:
    """Return the name on the hub of the training data, and its licence."""
    path, folder = run.settings["task.path"], run.settings["task.data_dir"]
    if path and path.count("/") == 1 and not path.lower().endswith(FILES) and not Path(path).exists():
        return path, dict(DATA_SETS.values()).get(path, "with the licence on its page")
    return (None, "") if path or folder else DATA_SETS.get(run.settings["task.name"], (None, ""))


def _metadata(run: RunFiles, base: str, kind: str, licence: str | None) -> str:
    data, _ = _data_set(run)
    facts = ModelCardData(
        base_model=base if _is_on_the_hub(base) else None,
        library_name={"adapter": "peft", "model": "transformers", "gguf": "llama.cpp"}[kind],
        pipeline_tag="text-generation",
        license=licence,
        datasets=[data] if data else None,
        tags=["octet", "warmup" if run.settings["warmup.only"] else "grpo", *(["lora"] if kind == "adapter" else [])],
    )
    return str(facts.to_yaml())


def _data(run: RunFiles) -> str:
    task, (data, licence) = run.settings["task.name"], _data_set(run)
    if task in ("nano", "addition") or task.startswith("reasoning_gym:"):
        return f"generated by {'reasoning_gym' if ':' in task else 'Octet'}, Apache-2.0"
    if task == "mix":
        return f"a mixture of {', '.join(run.settings['task.mix'])}; see the pages of its parts"
    return f"{data}, {licence}" if data else "of the author; not named by the run"


def _evaluation(run: RunFiles, step: int | None) -> dict[str, Any]:
    """Return the evaluation of the model after this step, if there is one."""
    models, pairs = run.evaluation.get("evaluations", []), run.evaluation.get("comparisons", [])
    if step == run.steps and run.has_ended:  # otherwise eval.json may be of an earlier end
        if not models:
            return {"evaluated": "never"}
        names, cells = [model["name"] for model in models], table_rows(models, pairs)
        return {"evaluated": "last", "problems": models[0]["problems"], "columns": names, "rows": cells}
    if step is None or step != run.best.get("step"):
        return {"evaluated": "unknown" if step is None else "other"}
    kept, problems = run.best, run.best["problems"]
    base = [one for one in models[:1] if one["problems"] == problems]
    rows, measure = [], run.measure
    if measure.is_reward:
        before = [measure.text(one["reward"], one["interval"]) for one in base]
        rows.append(["reward", *before, measure.text(kept["reward"], kept["interval"])])
    else:
        for name, key, prefix in (("correct", "accuracy", ""), ("in any format", "lenient", "lenient_")):
            before = [percent(one[f"{prefix}accuracy"], one[f"{prefix}interval"]) for one in base]
            rows.append([name, *before, percent(kept[key], wilson(kept[key] * problems, problems))])
    columns = [*("base" for _ in base), f"step {kept['step']}"]
    return {"evaluated": "best", "problems": problems, "columns": columns, "rows": rows}
