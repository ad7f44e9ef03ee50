"""What a run prints at its start and at its end."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.command_line import Request, flat
from trainer.config.settings import Config
from trainer.errors import counted
from trainer.evaluation import results
from trainer.evaluation.best import EvaluationHistory
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.merge_check import agreement
from trainer.machine import disk
from trainer.machine.shipped import TRAIN
from trainer.machine.visible import print
from trainer.plan import hours
from trainer.ranks import distributed, slurm
from trainer.reports import repeat
from trainer.reward import gold_check
from trainer.reward.judge import Judge
from trainer.reward.scorer import Scorer
from trainer.run.assemble import Run
from trainer.run_folder import checkpoints
from trainer.run_folder.journal import VERDICT, read_records
from trainer.run_folder.run_log import RunLog
from trainer.watch.measure import measure_of
from trainer.watch.screen import Screen
from trainer.watch.verdict import Verdict, verdict_of

MANY = 1000  # problems of the evaluation that is proposed
NANO_ONLY = ("rollout.problems", "rollout.group_size", "rollout.max_new_tokens", "rollout.rows", "lora.start")
SHOWN = 90  # characters of the first prompt that are shown
PRODUCTS = {
    "adapter": "  adapter/  the LoRA adapter (PEFT)",
    "model": "  model/    the whole model, for any program that reads transformers models",
}


def introduce(run: Run, request: Request) -> None:
    """Say what is trained on what, where it goes on, and what answers earn."""
    config, log, rollout = request.config, run.log, request.config.rollout
    resumed = f", going on after step {log.first_step}" if log.first_step else ""
    if log.first_step >= log.total_steps:
        resumed = f", all {counted(log.first_step, 'step')} done. run.steps={2 * log.first_step} would go on"
    base = f", base in {config.model.quantize}" if config.model.quantize != "none" else ""
    if job := slurm.describe():
        log.screen.say(f"octet: {job}{log.stopping.limit}")
    if request.reason and not request.resumes:
        log.screen.say(f"octet: {request.reason}")
    of_a_step = f"{rollout.problems} x {rollout.group_size} answers"
    if config.is_warmup:
        what = "worked solutions" if config.warmup.source == "solutions" else "own right answers"
        of_a_step = f"{config.warmup.problems} {what}"
    log.screen.say(
        f"{config.model.name} on {config.task.name} ({len(run.rollouts.curriculum.problems)} problems): "
        f"{counted(log.total_steps, 'step')} of {of_a_step} on "
        f"{distributed.world_size()} x {run.updater.device.type}, engine {config.engine.ds_config}{base}{resumed}\n"
        f"run folder: {log.folder}{f', a link to {log.folder.resolve()}' * log.folder.is_symlink()}"
    )
    if time := hours.at_start(config, log.first_step, log.total_steps, distributed.world_size()):
        log.screen.say(f"octet: {time}")
    if not log.first_step:
        log.screen.say(_example(run))


def _example(run: Run) -> str:
    """Return what the model is asked for in the first problem, and what answers to it earn."""
    rollouts = run.rollouts
    prompt = rollouts.prompter.prompt(rollouts.curriculum.problems[0])
    ending = f"a prompt ends with {prompt.text[-SHOWN:]!r}"
    if measure_of(rollouts.config).is_reward:
        return ending
    everything = rollouts.scorer
    costly = [grader for grader in everything.graders if isinstance(grader, Judge)]
    asked = [grader for grader in everything.graders if grader not in costly]
    scorer = Scorer(everything.rules, asked, everything.symbolic)
    outside = [grader.name for grader in costly] + ["environment"] * bool(scorer.weights.get("environment"))
    gold = replace(gold_check.written(prompt.problem, scorer.rules), reward=0.0)
    tokens = rollouts.prompter.answer_tokens(prompt, gold.text)  # `overlong` counts them
    answers = [replace(gold, tokens=tokens), replace(gold, text="")]
    right, empty = scorer.scores([(prompt, answer) for answer in answers])
    beside = f"; {', '.join(outside)} not counted" if outside else ""
    earned = ["no reward" if one.reward is None else f"{one.reward:.2f}" for one in (right, empty)]
    return f"{ending}\n{gold.text!r} earns {earned[0]}, an empty answer {earned[1]}{beside}"


def conclude(request: Request, folder: Path, screen: Screen, evaluations: Mapping[str, Evaluation]) -> Verdict:
    """Print the table, the verdict, and where everything is. Return the verdict."""
    verdict, facts = summarise(request.config, folder, screen, evaluations)
    for line in _where_everything_is(request, folder):
        screen.say(line)
    if request.json:
        print(json.dumps({"run_folder": str(folder), **facts}, indent=2))
    return verdict


def summarise(
    config: Config, folder: Path, screen: Screen, evaluations: Mapping[str, Evaluation]
) -> tuple[Verdict, dict[str, Any]]:
    """Print the table and the verdict, and write verdict.json. Return the verdict, and all of it for programs."""
    models, settings = list(evaluations.values()), results.settings_of(config)
    document = results.document(settings, models)
    verdict = verdict_of(document, read_records(folder / "metrics.jsonl"), config)
    if models:
        results.write(folder, settings, models)
        screen.say(results.evaluation_table(models))
    text = json.dumps({"verdict": verdict.kind, "evidence": verdict.evidence}) + "\n"
    disk.replace(folder / VERDICT, text.encode())  # last, because it marks the run as ended
    said = [f"verdict: {verdict.text}"]
    if "merged" in evaluations:
        alike = agreement(evaluations["trained"], evaluations["merged"])
        said.append(f"{results.merged_against('trained', config)}: {alike}")
    for line in said:
        screen.say(line)
    return verdict, {**document, "verdict": verdict.kind, "said": said}


def _where_everything_is(request: Request, folder: Path) -> Iterator[str]:
    config, product = request.config, request.config.lora.product
    yield f"\nrun folder  {folder}"
    yield PRODUCTS[product]
    if (folder / "best").is_dir():
        yield f"  best/     the {product} of the best evaluation"
    if config.merges:
        yield "  merged/   the whole model, for any program that reads transformers models"
    yield "  metrics.jsonl, samples.jsonl, tensorboard/, config.yaml, checkpoints/"
    if config.eval.problems:
        yield f"  {results.FILES}"
    yield "next"
    where = shlex.quote(str(folder))
    yield f"  octet report {where}"
    yield f"  tensorboard --logdir {where}/tensorboard"
    problems = min(MANY, json.loads((folder / "data.json").read_text())["test_problems"])
    base = f" model.quantize={config.model.quantize}" if config.model.quantize != "none" else ""
    yield f"  octet eval --{product} {where}/{product} --problems {problems} --samples 8{base}"
    if config.is_warmup:
        preset, _ = repeat.nearest_preset(flat(config.model_dump(mode="json")))
        start = f"{'lora.start' if config.lora.enabled else 'model.name'}={folder}/{product}"
        yield f"  {_start(request, preset, [start])}   # GRPO goes on with it; other settings as they were here"
    elif config.model.name == "nano":
        own = repeat.changes(flat(config.model_dump(mode="json")), "nano")
        kept = [one for one in own if not one.key.startswith(("model.", "warmup.")) and one.key not in NANO_ONLY]
        yield f"  {_start(request, '8gb', repeat.written(kept))}   # on a machine with a GPU"


def _start(request: Request, preset: str, settings: list[str]) -> str:
    """Return what starts another run, in the language in which this one was started."""
    if request.is_python:
        return f"train(resolve({json.dumps(preset)}, None, {json.dumps(settings, ensure_ascii=False)}))"
    return f"{TRAIN} {shlex.join(['--preset', preset, *settings])}"


def what_is_saved(config: Config, log: RunLog) -> str:
    """Say whether a run that ends before its last step can go on."""
    saved = checkpoints.latest(log.folder)
    if saved is None:
        first = min(config.run.save_every, log.total_steps)
        return (
            f"Nothing is saved yet: the first checkpoint comes after step {first}, or after "
            f"{config.run.save_minutes:g} minutes. The same command begins anew."
        )
    step, where = int(saved.name.removeprefix("step_")), shlex.quote(str(log.folder))
    return f"--resume {where} goes on after step {step}, which is saved."


def best_step(config: Config, history: EvaluationHistory, total_steps: int) -> Iterator[str]:
    """Say which step was the best, if it was not the last, and why the run ended early."""
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
