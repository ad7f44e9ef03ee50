"""What a run prints at its end, or when it is stopped, and the commands that may come next."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.text import Text

from trainer.config.choose_preset import preset_for
from trainer.config.request import Request
from trainer.config.resolve import flat
from trainer.config.settings import Config, function_name
from trainer.errors import ModelError, counted
from trainer.evaluation import results
from trainer.evaluation.best import EvaluationHistory
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.merge_check import agreement
from trainer.machine import disk, hardware
from trainer.machine.installed_files import octet_here, train_here
from trainer.machine.safe_text import as_command, print
from trainer.model.shapes import known_shape
from trainer.reports import command_of_run
from trainer.run.teaching import START
from trainer.run_folder import checkpoints
from trainer.run_folder.journal import VERDICT, read_records
from trainer.run_folder.layout import step_of
from trainer.run_folder.run_log import RunLog
from trainer.watch.screen import Screen
from trainer.watch.verdict import LEARNED, Verdict, verdict_of

# Settings that suit the embedded model only.
OF_NANO = r"(model|teacher|warmup|optim|engine|lora|run|eval)\..*|algorithm\.lr"
OF_NANO += r"|rollout\.(problems|group_size|temperature|max_new_tokens|rows|engine|ahead|vllm\..*)"
# Settings of the reward and the data that train() is given.
OF_ARGUMENTS = ("reward.custom=", "task.name=", "task.path=", "task.test_path=", "task.answer=none")
# Settings that a warm-up has of its own.
OF_WARMUP = r"(algorithm|eval|run|teacher|warmup)\..*|rollout\.(temperature|ahead)"


def conclude(request: Request, folder: Path, screen: Screen, evaluations: Mapping[str, Evaluation]) -> Verdict:
    """Print the commands that may come next and the three closing lines, and return the verdict."""
    verdict, facts = summarise(request.config, folder, screen, evaluations)
    if line := of_samples(evaluations.values()):
        screen.say(line)
    result, where, command = three_lines(verdict, folder)
    for title, commands in _next(request, folder, command):
        screen.say(title)
        for one in commands:
            screen.say(f"  {one}", is_command=True)
    screen.say("")
    screen.say(result)
    screen.say(where)
    screen.say(command, is_command=True)
    if request.json:
        print(json.dumps({"run_folder": str(folder), **facts}, indent=2))
    return verdict


def of_samples(evaluations: Iterable[Evaluation]) -> str:
    """Return pass@k of each model whose answers were also sampled, or avg@k if answers earn rewards."""
    shares, metric = [], ""
    for one in evaluations:
        if one.sampled:
            *_, (metric, share) = one.sampled.shares(one.measure).items()
            shares.append(f"{one.name} {one.measure.text(share.value)}")
    return f"{metric}: {', '.join(shares)}" if shares else ""


def three_lines(verdict: Verdict, folder: Path) -> tuple[Text, str, str]:
    """Return the result of a run, its folder, and the command that shows more."""
    models = [f"{name}/" for name in ("adapter", "model", "best", "merged") if (folder / name).is_dir()]
    command = "chat" if verdict.kind == LEARNED else "report"
    where = f"run folder {folder}, with {', '.join(models) or 'no model'}"
    return verdict.shown, where, f"{octet_here()} {command} {as_command([str(folder)])}"


def summarise(
    config: Config, folder: Path, screen: Screen, evaluations: Mapping[str, Evaluation]
) -> tuple[Verdict, dict[str, Any]]:
    """Write the results and the verdict, and compare the merged model. Return the verdict and the facts for --json."""
    models, settings = list(evaluations.values()), results.settings_of(config)
    document = results.document(settings, models)
    verdict = verdict_of(document, read_records(folder / "metrics.jsonl"), config)
    if models:
        results.write(folder, settings, models)
    text = json.dumps({"verdict": verdict.kind, "evidence": verdict.evidence}) + "\n"
    disk.replace(folder / VERDICT, text.encode())  # last, because it marks the run as ended
    lines = [f"verdict: {verdict.text}"]
    if "merged" in evaluations:
        alike = agreement(evaluations["trained"], evaluations["merged"])
        lines.append(f"{results.merged_against('trained', config.model.rounded)}: {alike}")
        screen.say(lines[-1])
    return verdict, {**document, "verdict": verdict.kind, "said": lines}


def _next(request: Request, folder: Path, last: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a title and the commands that may come next, as they can be typed in this folder."""
    config, where, octet = request.config, as_command([str(folder)]), octet_here()
    shape = None
    with suppress(ModelError):  # its family is unknown
        shape = known_shape(config.model.name, config.model.revision)
    form = "ollama" if shape and shape.family.arch else "safetensors"
    commands = [f"{octet} {one}" for one in (f"report {where}", f"chat {where}", f"export {where} --to {form}")]
    if request.is_python:
        commands[-1] = f"import octet; octet.export({json.dumps(str(folder))}, to={json.dumps(form)})"
    yield "next", [one for one in commands if one != last]
    settings = flat(config.model_dump(mode="json"))
    if config.is_warmup:
        start = "lora.start" if config.lora.enabled else "model.name"
        same = {key: value for key, value in settings.items() if not re.fullmatch(OF_WARMUP, key)}
        further = {**same, "warmup.steps": 0, start: f"{folder}/{config.lora.product}"}
        preset, differences = command_of_run.nearest_preset(further)
        yield "GRPO from here on", [_start(request, preset, command_of_run.written(differences))]
    elif config.model.name == "nano":
        preset = preset_for(hardware.detect().memory_gb) or "8gb"
        of_nano = OF_NANO + r"|algorithm\.kl\..*" * (config.teacher.form == "loss")  # they weigh the teacher
        changed = [one for one in command_of_run.changes(settings, "nano") if not re.fullmatch(of_nano, one.key)]
        own = {one.key for one in changed if (one.key, one.now) != ("prompt.style", "chat")}
        changes = [one for one in command_of_run.changes(settings, preset) if one.key in own]
        start = _start(request, preset, command_of_run.written(changes))
        yield f'on a card ({octet} plan --card "RTX 4060" says what fits yours)', [start]


def _start(request: Request, preset: str, settings: list[str]) -> str:
    """Return the Python call or the command that starts another run, whichever started this one."""
    if request.is_python:
        more = ", reward=..., data=..." if request.only_here else ""
        own = [one for one in settings if not (more and one.startswith(OF_ARGUMENTS))]
        weights, functions = request.config.reward.weights, map(function_name, request.config.reward.custom)
        if more and (kept := {name: weights[name] for name in weights.keys() - {*functions}}) != weights:
            own = [f"reward.weights={json.dumps(kept)}" if one.startswith("reward.weights=") else one for one in own]
        return f"train(resolve({json.dumps(preset)}, None, {json.dumps(own, ensure_ascii=False)}){more})"
    return f"{train_here()} {as_command(['--preset', preset, *settings])}"


def what_is_saved(log: RunLog) -> str:
    """Return whether a run that ends before its last step can be resumed, and how."""
    saved, config, place = checkpoints.latest(log.folder), log.config, log.folder
    after = f"step {step_of(saved)}" if saved else "its warm-up" if (place / "warmup" / START).exists() else ""
    if not after:
        return "Nothing is saved yet, so the same command starts again."
    if config.is_warmup and (place.parent / "config.yaml").is_file():  # of the run that the warm-up begins
        place, after = place.parent, f"{after} of its warm-up"
    return f"--resume {shlex.quote(str(place))} continues after {after}, which is saved."


def best_step(config: Config, history: EvaluationHistory, total_steps: int) -> Iterator[str]:
    """Yield why the run ended early, and which step was the best if it was not the last."""
    kept, best = history.kept, history.best
    if best is None or not (kept or history.lost):
        return
    last, metric, patience = history.milestones[-1], history.metric, config.eval.patience
    if patience and history.has_stopped_rising and last.step < total_steps:
        key = "warmup.patience" if config.is_warmup else "eval.patience"
        yield f"stopped after step {last.step}: {counted(patience, 'evaluation')} without a new best ({key}={patience})"
    if best.step == last.step:
        return
    is_there = kept and (kept["step"], kept["problems"]) == (best.step, history.problems)
    why = history.lost or f"{history.folder}/best is of step {kept and kept['step']}"
    where = f"Its {config.lora.product} is in {history.folder}/best" if is_there else f"It is not kept: {why}"
    text = history.measure.text
    values = [f"loss {-x:.4f}" if metric == "loss" else f"{metric} {text(x)}" for x in (best.value, last.value)]
    shown = f"{values[0]}, against {values[1]} after step {last.step}. {where}"
    many = f"; of {len(history.milestones)} evaluations on the same problems the highest is partly luck"
    is_better = best.value > last.value
    yield f"step {best.step} was {'best' if is_better else 'as good as the last one'}: {shown}{many * is_better}"
