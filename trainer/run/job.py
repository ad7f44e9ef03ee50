"""The whole job: train, then say honestly what came of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.config.command_line import Request
from trainer.config.settings import Config
from trainer.evaluation import results
from trainer.evaluation.best import describe, metrics_of
from trainer.evaluation.comparison import agreement
from trainer.evaluation.evaluate import Evaluation
from trainer.loop import Parts, train
from trainer.machine import disk
from trainer.machine.out_of_memory import explained
from trainer.machine.quiet import no_progress_bars
from trainer.machine.shipped import TRAIN
from trainer.model import merge as export
from trainer.model.load import fits, load_model, load_tokenizer, resolve_dtype
from trainer.ranks import distributed, slurm
from trainer.ranks.stopping import Stopping
from trainer.run import assemble, sampler_check
from trainer.run.rehearsal import rehearse, report
from trainer.watch.memory_use import total
from trainer.watch.screen import Screen

WHAT_IT_IS = {
    "adapter": "  adapter/  the LoRA adapter (PEFT)",
    "model": "  model/    the whole model, for any program that reads transformers models",
}


def run(request: Request) -> None:
    no_progress_bars()
    distributed.refuse_an_idle_card()
    with explained(), assemble.process_group(request.config):
        folder, screen, stopping, evaluations = _train_and_evaluate(request)
        gc.collect()
        if request.config.merges:
            with stopping.merging():
                evaluations += _merge_and_evaluate(request.config, folder, screen)
        if distributed.is_main():
            conclude(request, folder, screen, evaluations)


def _train_and_evaluate(request: Request) -> tuple[Path, Screen, Stopping, list[Evaluation]]:
    parts = assemble.build(request)
    evaluations: list[Evaluation] = []
    try:
        _introduce(parts, request)
        _look_ahead(parts)
        if parts.held_out:
            with parts.stopping.timing_an_evaluation():
                evaluations.append(_evaluate_base(parts))
        train(parts)
        parts.screen.close()
        if parts.held_out:
            last = parts.course.last or parts.evaluate("trained")  # a finished run that is resumed made no step
            evaluations.append(replace(last, name="trained"))
    finally:
        parts.close()
    for line in _of_the_best(parts):
        parts.screen.say(line)
    with parts.stopping.exporting():
        _export(parts)
    parts.policy.release()  # so that the merged model fits where it was
    return parts.folder, parts.screen, parts.stopping, evaluations


def _export(parts: Parts) -> None:
    with parts.policy.gathered():
        if distributed.is_main():
            product = parts.folder / parts.config.lora.product
            with disk.writing(product, "the result", "Make room; the same command then goes on to its end."):
                parts.policy.export(product)
        distributed.barrier()


def _look_ahead(parts: Parts) -> None:
    """What would go wrong later, now: memory, and a sampler that has another model."""
    outside = assemble.samples_outside(parts.sampler)
    if parts.first_step < parts.total_steps:
        peaks = rehearse(parts)
        if distributed.on_gpu() and (text := report(parts.config, len(parts.longest.tokens), peaks, total(), outside)):
            parts.screen.say(text)
    if outside:
        sampler_check.check(parts)


def _evaluate_base(parts: Parts) -> Evaluation:
    """What training starts from. It is step 0 of the curves."""
    with parts.policy.as_base():
        base = parts.evaluate("base")
    parts.screen.say(f"base model: {describe(base)}")
    if parts.journal and parts.first_step == 0:
        parts.journal.metrics(0, metrics_of(base))
    return base


def _of_the_best(parts: Parts) -> Iterator[str]:
    """Which step was the best, when it was not the last, and why the run ended early."""
    course, kept = parts.course, parts.course.kept
    if not course.milestones or kept is None:
        return
    last, metric = course.milestones[-1], parts.config.eval.metric
    if course.has_stopped_rising and last.step < parts.total_steps:
        patience = parts.config.eval.patience
        yield f"stopped after step {last.step}: {patience} evaluations without a new best (eval.patience={patience})"
    if kept["step"] != last.step:
        yield (
            f"step {kept['step']} was best: {metric} {kept[metric]:.1%}, against {last.value:.1%} after step "
            f"{last.step}. Its {parts.config.lora.product} is in {course.folder}/best; "
            f"of {len(course.milestones)} evaluations on the same problems the highest is partly luck"
        )


def _merge_and_evaluate(config: Config, folder: Path, screen: Screen) -> list[Evaluation]:
    """The merged model has the clean base, so it may be larger than a quantised one that was trained over."""
    device = distributed.device()
    dtype = resolve_dtype(config.model.dtype, device)
    if distributed.is_main():
        export.merge(config.model, folder / "adapter", folder / "merged", dtype)
    distributed.barrier()
    if not config.eval.problems:
        return []
    if not all(distributed.gather(fits(folder / "merged", device))):  # ranks evaluate together, or not at all
        screen.say("merged/ was not evaluated: with its clean base it does not fit on this card")
        return []
    merged = config.model.clean.model_copy(update={"name": str(folder / "merged"), "revision": None})
    model = load_model(merged, dtype, device)
    return [assemble.evaluate_model("merged", model, load_tokenizer(merged), config)]


def _introduce(parts: Parts, request: Request) -> None:
    config = parts.config
    rollout, resumed = config.rollout, f", going on after step {parts.first_step}" if parts.first_step else ""
    if parts.first_step >= parts.total_steps:
        resumed = f", all done: {parts.first_step} steps were made. run.steps={2 * parts.first_step} would go on"
    base = f", base in {config.model.quantize}" if config.model.quantize != "none" else ""
    if job := slurm.describe():
        parts.screen.say(f"octet: {job}{parts.stopping.limit}")
    if request.reason and not request.resumes:
        parts.screen.say(f"octet: {request.reason}")
    parts.screen.say(
        f"{config.model.name} on {config.task.name} ({len(parts.problems)} problems): {parts.total_steps} steps of "
        f"{rollout.problems} x {rollout.group_size} answers on {distributed.world_size()} x {parts.device.type}, "
        f"engine {config.engine.ds_config}{base}{resumed}\nrun folder: {parts.folder}"
    )


def conclude(request: Request, folder: Path, screen: Screen, evaluations: Sequence[Evaluation]) -> None:
    """The table, the verdict, and where everything is."""
    said = []
    if evaluations:
        results.write(folder, results.settings_of(request.config), evaluations)
        screen.show(results.evaluation_table(evaluations))
        said += results.verdicts(evaluations)[:1]
    if len(evaluations) == 3:
        said.append(f"{results.merged_against('trained', request.config)}: {agreement(evaluations[1], evaluations[2])}")
    for line in [*said, *_where_everything_is(request.config, folder)]:
        screen.say(line)
    if request.json:
        facts = results.document(results.settings_of(request.config), evaluations)
        print(json.dumps({"run_folder": str(folder), **facts, "said": said}, indent=2))


def _where_everything_is(config: Config, folder: Path) -> Iterator[str]:
    product = config.lora.product
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
    yield f"  tensorboard --logdir {folder}/tensorboard"
    base = f" model.quantize={config.model.quantize}" if config.model.quantize != "none" else ""
    yield f"  octet eval --{product} {folder}/{product} --problems 1000 --samples 8{base}"
    if config.model.name == "nano":
        yield f"  {TRAIN} --preset 8gb     on a machine with a GPU"
