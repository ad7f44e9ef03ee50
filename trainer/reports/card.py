"""The model card of a run: what the model is, how good it is and how that was measured, and how to make it again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from trainer.config.command_line import flat
from trainer.estimates import wilson
from trainer.machine.visible import visible
from trainer.reports import repeat
from trainer.run_folder.evaluation_table import percent, rows
from trainer.run_folder.reader import RunFiles, facts_of
from trainer.watch.alarms import alarms_of

HUB_NAMES = {
    "gsm8k": "openai/gsm8k",
    "gsm8k-renumbered": "openai/gsm8k",
    "math": "DigitalLearningGmbH/MATH-lighteval",
    "multiple_choice": "Idavidrein/gpqa",
}
LICENCES = {  # of the data, as their pages on the hub say
    "openai/gsm8k": "MIT",
    "DigitalLearningGmbH/MATH-lighteval": "MIT",
    "Idavidrein/gpqa": "CC BY 4.0",
}
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
USE_ADAPTER = """\
    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained("{name}")"""
USE_ADAPTER_OF_NANO = """\
    from peft import PeftModel                        # the base is in the package: pip install octet-grpo
    from trainer.model.hub import NANO
    from transformers import AutoModelForCausalLM
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(NANO), "{name}")"""
USE_ADAPTER_OF_A_FOLDER = """\
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    base = {base}  # is not on the hub: write the path of a copy of it
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{name}")"""
USE_MODEL = """\
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{name}")"""
USE_GGUF = """\
    llama-cli -hf {name}"""


def card(run: RunFiles, name: str, kind: str, licence: str | None, curves: str | None, made: Mapping[str, Any]) -> str:
    """Return the card as Markdown with the hub's metadata. `kind` is adapter, gguf or model, and `licence` that of the
    base if it is known. `curves` names a picture beside the card. `made` has the step of the model, and what octet
    export recorded."""
    parts = [*_metadata(run, kind, licence), *_text(run, name, kind, licence, curves, made)]
    for value in sorted(filter(_is_path, _strings(run.settings.values())), key=len, reverse=True):
        own = Path(value.rstrip("/")).name  # a folder of this machine is nobody's business
        parts = [part.replace(value, own) for part in parts]
    return "\n".join(map(_without_html, parts))


def _without_html(part: str) -> str:
    """Return a part of the card with which no HTML begins. Code is indented, and so is every line of it."""
    if part.startswith("    "):
        return re.sub("\n(?! {4})", "\n    ", visible(part))
    return visible(part).replace("<", "&lt;")


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _strings([*value, *value.values()])
        elif isinstance(value, list | tuple):
            yield from _strings(value)


def _is_path(value: str) -> bool:
    """True for a path with a folder in it: `/no_think` is none."""
    return value.startswith(("/", "~/", "./", "../")) and "/" in value.strip("/")


def data_of(run: RunFiles) -> str | None:
    """Return the name on the hub of the data that the run was trained on."""
    path, folder = run.settings["task.path"], run.settings["task.data_dir"]
    if path and path.count("/") == 1 and not Path(path).exists():
        return str(path)
    return None if path or folder else HUB_NAMES.get(run.settings["task.name"])


def _is_on_the_hub(model: str) -> bool:
    return model.count("/") == 1 and not _is_path(model) and not Path(model).exists()


def _metadata(run: RunFiles, kind: str, licence: str | None) -> Iterator[str]:
    data, base = data_of(run), run.settings["model.name"]
    facts = ModelCardData(
        base_model=base if _is_on_the_hub(base) else None,
        library_name={"adapter": "peft", "model": "transformers", "gguf": "llama.cpp"}[kind],
        pipeline_tag="text-generation",
        license=licence,
        datasets=[data] if data else None,
        tags=["octet", "warmup" if run.settings["warmup.only"] else "grpo", *(["lora"] if kind == "adapter" else [])],
    )
    yield from ("---", facts.to_yaml(), "---", "")


def _text(
    run: RunFiles, name: str, kind: str, licence: str | None, curves: str | None, made: Mapping[str, Any]
) -> Iterator[str]:
    settings, base = run.settings, run.settings["model.name"]
    what = {"adapter": f"A LoRA adapter of {base}", "model": f"{base}", "gguf": f"A GGUF file of {base}"}[kind]
    how = "supervised training on worked solutions" if settings["warmup.only"] else "GRPO"
    yield f"# {name.rpartition('/')[2]}\n"
    yield f"{what}, trained by {how} on the task `{settings['task.name']}` with Octet.\n"
    of_folder = USE_ADAPTER_OF_NANO if base == "nano" else USE_ADAPTER_OF_A_FOLDER
    of_base = USE_ADAPTER if _is_on_the_hub(base) else of_folder
    yield {"adapter": of_base, "model": USE_MODEL, "gguf": USE_GGUF}[kind].format(
        name=name, base=json.dumps(base, ensure_ascii=False)
    )
    yield f"\n## Licence\n\nThe base: {licence or 'see its page'}. The data: {_data(run)}."
    yield "\n## Evaluation\n"
    yield from _evaluation_of(run, made["step"])
    if kind == "gguf" or "source" in made:
        yield "\n## What was written\n"
        yield from _export(made)
    yield "\n## Training\n"
    yield from _training(run, curves)
    yield "\n## How it was made\n"
    yield from (f"- {line}" for line in run.made_with)
    yield "\nWith the same packages, data and number of ranks, this repeats it:\n"
    yield from (f"    {line}" for line in repeat.commands(flat(run.config.model_dump(mode="json")), run.made_with))
    yield "\n## Limits\n"
    yield from _limits(run, kind, made)


def _data(run: RunFiles) -> str:
    if run.settings["task.name"] in ("nano", "addition"):
        return "made up by Octet, Apache-2.0"
    if run.settings["task.name"].startswith("reasoning_gym:"):
        return "made up by reasoning_gym, Apache-2.0"
    if run.settings["task.name"] == "mix":
        return f"a mixture of {', '.join(run.settings['task.mix'])}; see the pages of its parts"
    found = data_of(run)
    if found is None:
        return "of the author; not named by the run"
    return f"{found}, {LICENCES.get(found, 'with the licence on its page')}"


def _evaluation_of(run: RunFiles, step: int | None) -> Iterator[str]:
    """Return the evaluation of the model after this step, and of no other one."""
    if step == run.steps and run.has_ended:  # else eval.json is of an earlier end
        yield from _evaluation(run)
    elif step is None:
        yield "The step of the run that this model is from is not recorded, so no evaluation is shown."
    elif step == run.best.get("step"):
        yield from _evaluation_of_the_best(run, run.best)
    else:
        yield f"This is the model after step {step} of {run.steps}. The evaluation of the run is that of another step,"
        yield "so it is not shown."


def _export(made: Mapping[str, Any]) -> Iterator[str]:
    """Say in which format the model was written, and what its check found."""
    if "format" in made:
        yield f"The format is `{made['format']}`."
    if why_not := made.get("not_checked", None if made.get("problems") else "nothing is recorded about a check"):
        yield f"**Not checked:** {why_not}."
        return
    before, after = made["accuracy"]
    yield f"{before} and {after} answered the same {made['problems']} held-out problems: {made['identical']} greedy"
    yield f"answers are identical, and log-probs differ by up to {made['largest_difference']:.1e}, and by"
    yield f"{made['mean_difference']:.1e} in the mean, where the tokens agree. Correct:"
    yield ", ".join(f"{name} {value:.1%}" for name, value in made["accuracy"].items()) + "."
    if same := made.get("with_the_weights_of_the_file"):
        yield f"With the weights of the file, llama.cpp and transformers differ by up to {same['largest']:.1e}, and by"
        yield f"{same['mean']:.1e} in the mean (bound {same['bound']:.1e})."


def _evaluation(run: RunFiles) -> Iterator[str]:
    models, pairs = run.evaluation.get("evaluations", []), run.evaluation.get("comparisons", [])
    if not models:
        yield "The run has not been evaluated."
        return
    yield f"Greedy answers to {models[0]['problems']} held-out problems after the last step, {run.steps}, with 95 %"
    yield "intervals. `correct` asks for the requested format, `in any format` does not.\n"
    yield f"| | {' | '.join(model['name'] for model in models)} |\n| --- |{' --- |' * len(models)}"
    yield from (f"| {' | '.join(row)} |" for row in rows(models, pairs))
    kind, evidence = run.verdict
    yield f"\nVerdict: {kind}: {evidence}"


def _evaluation_of_the_best(run: RunFiles, kept: Mapping[str, Any]) -> Iterator[str]:
    problems = kept["problems"]
    yield f"This is the model after step {kept['step']} of {run.steps}, the first with the best"
    yield f"`eval.metric={run.settings['eval.metric']}` of the run. It was chosen by its answers to these problems, so"
    yield f"part of its lead is luck. Greedy answers to {problems} held-out problems, with 95 % intervals. `correct`"
    yield "asks for the requested format, `in any format` does not.\n"
    base = [one for one in run.evaluation.get("evaluations", [])[:1] if one["problems"] == problems]
    yield f"| |{' base |' * len(base)} step {kept['step']} |\n| --- |{' --- |' * len(base)} --- |"
    for name, key, of_base in (("correct", "accuracy", ""), ("in any format", "lenient", "lenient_")):
        before = [percent(one[f"{of_base}accuracy"], one[f"{of_base}interval"]) for one in base]
        yield f"| {' | '.join([name, *before, percent(kept[key], wilson(kept[key] * problems, problems))])} |"


def _training(run: RunFiles, curves: str | None) -> Iterator[str]:
    facts, settings = facts_of(run), run.settings
    recipe = (OF_A_WARMUP if settings["warmup.only"] else OF_GRPO) | (OF_LORA if settings["lora.enabled"] else {})
    yield f"| steps | {facts['steps']} |\n| --- | --- |"
    yield from (f"| {what} | {settings[key]} |" for what, key in recipe.items())
    yield f"\nThe training took {facts['training_s']:,.0f} s."
    if curves:
        yield f"\n![Curves of the run]({curves})"
    preset, changes = repeat.nearest_preset(flat(run.config.model_dump(mode="json")))
    yield f"\nThe settings are those of the preset `{preset}`{', but:' if changes else '.'}\n"
    yield from (f"    {line}" for line in repeat.written(changes))


def _limits(run: RunFiles, kind: str, made: Mapping[str, Any]) -> Iterator[str]:
    yield f"- It was measured on held-out problems of `{run.settings['task.name']}` alone. What it gained or lost"
    yield "  elsewhere is not known, and neither is how safe its answers are."
    if kind == "gguf":
        yield "- The evaluation is that of the model before it was written to this file. What the format of the file"
        yield f"  costs is {'what its check found' if made.get('problems') else 'not known'}."
    yield "- One seed. Another seed can give another result."
    if alarms := [alarm.finding.name for alarm in alarms_of(run.history) if alarm.lasts]:
        yield f"- Alarms at the end of the run: {', '.join(alarms)}."
