"""The whole job: train, evaluate, and report."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.command_line import Request, flat
from trainer.config.settings import Config
from trainer.errors import CheckpointError, EndedByAlarm, counted
from trainer.evaluation import results
from trainer.evaluation.best import EvaluationHistory, describe, metrics_of
from trainer.evaluation.comparison import agreement
from trainer.evaluation.evaluate import Evaluation
from trainer.loop import train, warm_up
from trainer.machine import disk, manifest
from trainer.machine.out_of_memory import explained
from trainer.machine.quiet import no_progress_bars
from trainer.machine.shipped import TRAIN
from trainer.machine.visible import print
from trainer.model.load import fits, load_model, load_tokenizer, resolve_dtype
from trainer.model.merge import write_merged
from trainer.ranks import distributed, slurm
from trainer.ranks.stopping import Stopping
from trainer.reports import repeat
from trainer.reward import gold_check
from trainer.run import assemble, sampler_check, teaching
from trainer.run.assemble import Run
from trainer.run.rehearsal import planned, rehearse, report
from trainer.run_folder import checkpoints, lock, previous_run
from trainer.run_folder.journal import VERDICT, read_records
from trainer.run_folder.run_log import RunLog
from trainer.watch.memory_use import total
from trainer.watch.screen import Screen
from trainer.watch.verdict import Verdict, verdict_of

MANY = 1000  # problems of the evaluation that is proposed
OF_NANO = ("rollout.problems", "rollout.group_size", "rollout.max_new_tokens", "rollout.rows", "lora.start")
SHOWN = 90  # characters of the first prompt that are shown
WHAT_IT_IS = {
    "adapter": "  adapter/  the LoRA adapter (PEFT)",
    "model": "  model/    the whole model, for any program that reads transformers models",
}


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has come to, on rank 0."""

    config: Config
    folder: Path
    evaluations: dict[str, Evaluation]
    """Those that were made, by name: `base`, `trained`, `merged`."""
    verdict: Verdict

    @property
    def adapter(self) -> Path | None:
        """Return the folder of the adapter, or None if the whole model was trained."""
        return self.folder / "adapter" if self.config.lora.enabled else None

    @property
    def model(self) -> Path | None:
        """Return the folder of the whole model, or None if the adapter was not merged."""
        product = "merged" if self.config.lora.enabled else "model"
        return self.folder / product if self.config.merges or not self.config.lora.enabled else None


def run(request: Request) -> Result | None:
    """Train, export, merge, evaluate, and report. Return the result on rank 0."""
    no_progress_bars()
    distributed.refuse_an_idle_card()
    with explained(), assemble.process_group(request.config):
        if request.config.warmup.steps and not request.config.is_warmup:
            request = _warmed_up(request)
        folder, screen, stopping, evaluations = _train_and_evaluate(request)
        gc.collect()
        if request.config.merges:
            with stopping.merging():
                evaluations += _merge_and_evaluate(request.config, folder, screen)
        if distributed.is_main():
            verdict = conclude(request, folder, screen, evaluations)
    if len(evaluations) == 3 and request.config.model.quantize == "none":  # else the bases differ as well
        dtype = resolve_dtype(request.config.model.dtype, distributed.device())
        agreement(*evaluations[1:]).must_be_rounding(dtype)
    if not distributed.is_main():
        return None
    if request.config.run.strict_verdict:
        verdict.must_be_learned()
    return Result(request.config, folder, {one.name: one for one in evaluations}, verdict)


def _warmed_up(request: Request) -> Request:
    """Make the warm-up in a folder of its own unless it is done, and return the request for the run that follows."""
    folder = lock.folder_of(request)
    asked = request.config.model_copy(update={"run": request.config.run.model_copy(update={"dir": folder})})
    warmup, config = folder / "warmup", asked.warmed_up_in(folder / "warmup")
    previous_run.refuse_other_settings(warmup, config)
    if not distributed.gather((warmup / teaching.START).exists())[0]:
        folder.mkdir(parents=True, exist_ok=True)
        lock.write_config(folder, asked)  # for --resume
        stage = replace(request, config=config)
        _, screen, stopping, evaluations = _train_and_evaluate(stage)
        gc.collect()
        if distributed.is_main():
            _summarise(stage, warmup, screen, evaluations)
        with stopping.merging():
            teaching.leave_start(config, asked.warmup.then, warmup)
    return replace(request, config=asked.after_warmup(warmup))


def build(request: Request) -> tuple[Run, Callable[..., None]]:
    """Return the parts of a run, and the function that trains with them."""
    run = assemble.build(request)
    if not request.config.is_warmup:
        return run, train
    lessons, run = teaching.lessons_of(request.config, run)
    return run, partial(warm_up, lessons=lessons)


def _train_and_evaluate(request: Request) -> tuple[Path, Screen, Stopping, list[Evaluation]]:
    config = request.config
    run, learn = build(request)
    evaluator, log = run.evaluator, run.log
    evaluations: list[Evaluation] = []
    try:
        _introduce(run, request)
        _rehearse_and_check(config, run)
        if evaluator.held_out:
            with log.stopping.timing_an_evaluation():
                evaluations.append(_evaluate_base(run))
        learn(config, *run)
        log.screen.close()
        if evaluator.held_out:
            last = evaluator.history.last or evaluator.evaluate("trained")  # a finished run makes no step
            evaluations.append(replace(last, name="trained"))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_saved(config, log)) from None
    except OSError as error:
        if log.folder.is_dir() and not disk.failure(error):
            raise
        gone = "" if log.folder.is_dir() else f"{log.folder} has disappeared: "
        what = disk.failure(error) or f"{error.strerror}."
        raise CheckpointError(f"{gone}{error.filename}", f"{what} {_what_is_saved(config, log)}") from error
    except EndedByAlarm as alarm:
        raise EndedByAlarm(f"{alarm} {_what_is_saved(config, log)}") from None
    finally:
        run.rollouts.close()
        log.close()
    for line in _best_step(config, evaluator.history, log.total_steps):
        log.screen.say(line)
    policy, product = run.updater.policy, log.folder / config.lora.product
    with log.stopping.exporting(), policy.gathered():
        if distributed.is_main():
            remedy = "Make room; the same command then goes on to its end."
            with manifest.replacing(product, "the result", remedy) as folder:
                policy.write_model(folder)
        distributed.barrier()
    policy.release()  # so that the merged model fits where it was
    return log.folder, log.screen, log.stopping, evaluations


def _what_is_saved(config: Config, log: RunLog) -> str:
    """Say whether a run that ends before its last step can go on."""
    saved = checkpoints.latest(log.folder)
    if saved is None:
        first = min(config.run.save_every, log.total_steps)
        return (
            f"Nothing is saved yet: the first checkpoint comes after step {first}, and earlier with a smaller "
            "run.save_every. The same command begins anew."
        )
    step, where = int(saved.name.removeprefix("step_")), shlex.quote(str(log.folder))
    return f"--resume {where} goes on after step {step}, which is saved."


def _rehearse_and_check(config: Config, run: Run) -> None:
    """Find now what would go wrong later: too little memory, or a sampler that has another model."""
    outside = run.rollouts.sampler.owns_copy
    if run.log.first_step < run.log.total_steps:
        peaks, longest = rehearse(run.rollouts, run.updater), len(run.rollouts.longest.tokens)
        if distributed.on_gpu() and (plan := planned(config, longest, total(), outside)):
            run.log.screen.say(report(plan, peaks, total()))
            if distributed.is_main():
                disk.replace(run.log.folder / "memory_plan.json", (json.dumps(plan) + "\n").encode())
    if outside:
        sampler_check.check(run)


def _evaluate_base(run: Run) -> Evaluation:
    """Evaluate what training starts from, which is step 0 of the curves."""
    log = run.log
    with run.updater.policy.as_base():
        base = run.evaluator.evaluate("base")
    log.screen.say(f"base model: {describe(base, log.config.reward.answer)}")
    if log.first_step == 0:
        log.base(metrics_of(base))
    return base


def _best_step(config: Config, history: EvaluationHistory, total_steps: int) -> Iterator[str]:
    """Say which step was the best, if it was not the last, and why the run ended early."""
    kept, best = history.kept, history.best
    if best is None or not (kept or history.lost):
        return
    last, metric, patience = history.milestones[-1], config.eval.metric, config.eval.patience
    if patience and history.has_stopped_rising and last.step < total_steps:
        key = "warmup.patience" if config.is_warmup else "eval.patience"
        yield f"stopped after step {last.step}: {counted(patience, 'evaluation')} without a new best ({key}={patience})"
    if best.step == last.step:
        return
    is_there = kept and (kept["step"], kept["problems"]) == (best.step, history.problems)
    why = history.lost or f"{history.folder}/best is of step {kept and kept['step']}"
    where = f"Its {config.lora.product} is in {history.folder}/best" if is_there else f"It is not kept: {why}"
    shown = f"{_shown(metric, best.value)}, against {_shown(metric, last.value)} after step {last.step}"
    many = f"of {len(history.milestones)} evaluations on the same problems the highest is partly luck"
    if best.value > last.value:
        yield f"step {best.step} was best: {shown}. {where}; {many}"
    else:
        yield f"step {best.step} was as good as the last one: {shown}. {where}"


def _shown(metric: str, value: float) -> str:
    return f"loss {abs(value):.4f}" if metric == "loss" else f"{metric} {value:.1%}"


def _merge_and_evaluate(config: Config, folder: Path, screen: Screen) -> list[Evaluation]:
    """Merge the adapter into the clean base, which may be larger than the quantised one that was trained over."""
    device = distributed.device()
    dtype = resolve_dtype(config.model.dtype, device)
    if distributed.is_main():
        write_merged(config.model, folder / "adapter", folder / "merged", dtype)
    distributed.barrier()
    if not config.eval.problems:
        return []
    if not all(distributed.gather(fits(folder / "merged", device))):  # ranks evaluate together, or not at all
        screen.say("merged/ was not evaluated: with its clean base it does not fit on this card")
        return []
    merged = config.model.clean.model_copy(update={"name": str(folder / "merged"), "revision": None})
    model = load_model(merged, dtype, device)
    return [assemble.evaluate_model("merged", model, load_tokenizer(merged), config)]


def _introduce(run: Run, request: Request) -> None:
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
    if not log.first_step:
        log.screen.say(_example(run))


def _example(run: Run) -> str:
    """Return what the model is asked for in the first problem, and what answers to it earn."""
    rollouts = run.rollouts
    prompt = rollouts.prompter.prompt(rollouts.curriculum.problems[0])
    scorer = rollouts.scorer.verifier()
    outside = [grader.name for grader in rollouts.scorer.graders if grader not in scorer.graders]
    outside += ["environment"] if scorer.weights.get("environment") else []
    gold = replace(gold_check.written(prompt.problem, scorer.rules), reward=0.0)
    tokens = rollouts.prompter.answer_tokens(prompt, gold.text)  # `overlong` counts them
    answers = [replace(gold, tokens=tokens), replace(gold, text="")]
    right, empty = scorer.scores([(prompt, answer) for answer in answers])
    beside = f"; {', '.join(outside)} not counted" if outside else ""
    return (
        f"a prompt ends with {prompt.text[-SHOWN:]!r}\n"
        f"{gold.text!r} earns {right.reward:.2f}, an empty answer {empty.reward:.2f}{beside}"
    )


def conclude(request: Request, folder: Path, screen: Screen, evaluations: Sequence[Evaluation]) -> Verdict:
    """Print the table, the verdict, and where everything is. Return the verdict, which is also in verdict.json."""
    verdict, document, said = _summarise(request, folder, screen, evaluations)
    for line in _where_everything_is(request, folder):
        screen.say(line)
    if request.json:
        facts = {"run_folder": str(folder), **document, "verdict": verdict.kind, "said": said}
        print(json.dumps(facts, indent=2))
    return verdict


def _summarise(
    request: Request, folder: Path, screen: Screen, evaluations: Sequence[Evaluation]
) -> tuple[Verdict, dict[str, Any], list[str]]:
    """Print the table and the verdict. Return the verdict, the table for programs, and the lines."""
    document = results.document(results.settings_of(request.config), evaluations)
    verdict = verdict_of(document, read_records(folder / "metrics.jsonl"), request.config)
    if evaluations:
        results.write(folder, results.settings_of(request.config), evaluations)
        screen.show(results.evaluation_table(evaluations))
    text = json.dumps({"verdict": verdict.kind, "evidence": verdict.evidence}) + "\n"
    disk.replace(folder / VERDICT, text.encode())  # last, because it marks the run as ended
    said = [f"verdict: {verdict.text}"]
    if len(evaluations) == 3:
        said.append(f"{results.merged_against('trained', request.config)}: {agreement(evaluations[1], evaluations[2])}")
    for line in said:
        screen.say(line)
    return verdict, document, said


def _where_everything_is(request: Request, folder: Path) -> Iterator[str]:
    config, product = request.config, request.config.lora.product
    yield f"\nrun folder  {folder}"
    yield WHAT_IT_IS[product]
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
        kept = [
            change for change in own if not change.key.startswith(("model.", "warmup.")) and change.key not in OF_NANO
        ]
        yield f"  {_start(request, '8gb', repeat.written(kept))}   # on a machine with a GPU"


def _start(request: Request, preset: str, settings: list[str]) -> str:
    """Return what starts another run, in the language in which this one was started."""
    if request.is_python:
        return f"train(resolve({json.dumps(preset)}, None, {json.dumps(settings, ensure_ascii=False)}))"
    return f"{TRAIN} {shlex.join(['--preset', preset, *settings])}"
