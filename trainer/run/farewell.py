"""What a run prints at its start and at its end."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from trainer.config.command_line import Request, choose_preset, flat
from trainer.config.settings import Config
from trainer.errors import ModelError, counted
from trainer.evaluation import results
from trainer.evaluation.best import EvaluationHistory
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.merge_check import agreement
from trainer.machine import disk, hardware
from trainer.machine.installed_files import octet_here, train_here
from trainer.machine.safe_text import as_command, print
from trainer.model.shapes import known_shape
from trainer.plan import hours
from trainer.ranks import distributed, slurm
from trainer.reports import rerun
from trainer.reward import gold_check
from trainer.reward.judge import Judge
from trainer.reward.scorer import Scorer
from trainer.run.assemble import Run
from trainer.run.teaching import START
from trainer.run_folder import checkpoints
from trainer.run_folder.journal import VERDICT, read_records
from trainer.run_folder.previous_run import step_of
from trainer.run_folder.run_log import RunLog
from trainer.watch.measure import measure_of
from trainer.watch.screen import Screen
from trainer.watch.verdict import LEARNED, Verdict, verdict_of

# Settings that suit the embedded model only.
OF_NANO = r"(model|teacher|warmup|optim|engine|lora|run|eval)\..*|algorithm\.lr"
OF_NANO += r"|rollout\.(problems|group_size|temperature|max_new_tokens|rows|engine|ahead|vllm\..*)"
# Settings that a warm-up has of its own.
OF_WARMUP = r"(algorithm|eval|run|teacher|warmup)\..*|rollout\.(temperature|ahead)"
SHOWN = 90  # characters of the first prompt that are shown


def introduce(run: Run, request: Request) -> None:
    """Print what is trained on what, after which step it continues, and what answers earn."""
    config, log, rollout = request.config, run.log, request.config.rollout
    resumed = f", continuing after step {log.first_step}" if log.first_step else ""
    if log.first_step >= log.total_steps:
        longer = f"--resume {shlex.quote(str(log.folder))} run.steps={2 * log.first_step}"
        further = "" if config.is_warmup else f". {longer} would continue"  # the length of a warm-up is fixed
        resumed = f", all {counted(log.first_step, 'step')} done{further}"
    base = f", base in {config.model.quantize}" if config.model.quantize != "none" else ""
    if job := slurm.describe():
        log.screen.say(f"octet: {job}{log.stopping.limit}")
    if request.reason and not request.resumes:
        log.screen.say(f"octet: {request.reason}")
    batch = f"{rollout.problems} x {rollout.group_size} answers"
    if config.is_warmup:
        lessons = "worked solutions" if config.warmup.source == "solutions" else "own right answers"
        batch = f"{config.warmup.problems} {lessons}"
    log.screen.say(
        f"{config.model.name} on {config.task.name} ({len(run.rollouts.curriculum.problems)} problems): "
        f"{counted(log.total_steps, 'step')} of {batch} on "
        f"{distributed.world_size()} x {run.updater.device.type}, engine {config.engine.ds_config}{base}{resumed}\n"
        f"run folder: {log.folder}{f', a link to {log.folder.resolve()}' * log.folder.is_symlink()}"
    )
    if time := hours.at_start(config, log.first_step, log.total_steps, distributed.world_size()):
        log.screen.say(f"octet: {time}")
    if not log.first_step:
        log.screen.say(_example(run))


def _example(run: Run) -> str:
    """Return the end of the first prompt, and what a right and an empty answer to it earn."""
    rollouts = run.rollouts
    prompt = rollouts.prompter.prompt(rollouts.curriculum.problems[0])
    ending = f"a prompt ends with {prompt.text[-SHOWN:]!r}"
    if rollouts.config.task.agent:
        ending = "the agent writes its own prompts"
    if measure_of(rollouts.config).is_reward or not prompt.problem.gold:
        return ending
    judges = [grader for grader in rollouts.scorer.graders if isinstance(grader, Judge)]
    others = [grader for grader in rollouts.scorer.graders if grader not in judges]
    scorer = Scorer(rollouts.scorer.rules, others, rollouts.scorer.symbolic)
    left_out = [judge.name for judge in judges] + ["environment"] * bool(scorer.weights.get("environment"))
    gold = replace(gold_check.written(prompt.problem, scorer.rules), reward=0.0)
    tokens = rollouts.prompter.answer_tokens(prompt, gold.text)  # `overlong` counts them
    answers = [replace(gold, tokens=tokens), replace(gold, tokens=tokens[-1:], text="")]
    right, empty = scorer.scores([(prompt, answer) for answer in answers])
    note = f"; {', '.join(left_out)} not counted" if left_out else ""
    earned = ["no reward" if score.reward is None else f"{score.reward:.2f}" for score in (right, empty)]
    return f"{ending}\n{gold.text!r} earns {earned[0]}, an empty answer {earned[1]}{note}"


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
    export = f"export {where} --to {'ollama' if shape and shape.family.arch else 'safetensors'}"
    commands = [f"{octet} {one}" for one in (f"report {where}", f"chat {where}", export)]
    yield "next", [one for one in commands if one != last]
    if config.is_warmup:
        start = "lora.start" if config.lora.enabled else "model.name"
        settings, of_warmup = flat(config.model_dump(mode="json")), re.compile(OF_WARMUP).fullmatch
        same = {key: value for key, value in settings.items() if not of_warmup(key)}
        further = {**same, "warmup.steps": 0, start: f"{folder}/{config.lora.product}"}
        preset, differences = rerun.nearest_preset(further)
        yield "GRPO from here on", [_start(request, preset, rerun.written(differences))]
    elif config.model.name == "nano":
        preset, _ = choose_preset(hardware.detect())
        preset, settings = "8gb" if preset == "nano" else preset, flat(config.model_dump(mode="json"))
        of_teacher = r"|algorithm\.kl\..*" * (config.teacher.form == "loss")  # they weigh it
        fits_nano = re.compile(OF_NANO + of_teacher).fullmatch
        own = {one.key for one in rerun.changes(settings, "nano") if one[::2] != ("prompt.style", "chat")}
        changes = [one for one in rerun.changes(settings, preset) if one.key in own and not fits_nano(one.key)]
        start = _start(request, preset, rerun.written(changes))
        yield f'on a card ({octet} plan --card "RTX 4060" says what fits yours)', [start]


def _start(request: Request, preset: str, settings: list[str]) -> str:
    """Return the Python call or the command that starts another run, whichever started this one."""
    if request.is_python:
        return f"train(resolve({json.dumps(preset)}, None, {json.dumps(settings, ensure_ascii=False)}))"
    return f"{train_here()} {as_command(['--preset', preset, *settings])}"


def what_is_saved(log: RunLog) -> str:
    """Return whether a run that ends before its last step can be resumed, and how."""
    saved, config, place = checkpoints.latest(log.folder), log.config, log.folder
    after = f"step {step_of(saved)}" if saved else "its warm-up" if (place / "warmup" / START).exists() else ""
    if not after:
        every = [config.run.save_every, config.eval.every if config.eval.problems else None, log.total_steps]
        minutes = "" if config.rollout.ahead else f", or after {config.run.save_minutes:g} minutes"
        first = f"the first checkpoint comes after step {min(filter(None, every))}{minutes}"
        return f"Nothing is saved yet: {first}. The same command starts again."
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
