"""The whole job: train, then say honestly what came of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path

from trainer import assemble, distributed, export
from trainer.config import Config, Request
from trainer.evaluate import Evaluation, agreement, mcnemar
from trainer.loop import Parts, train
from trainer.policy.base import load_model, load_tokenizer, resolve_dtype
from trainer.watch.live import Screen


def run(request: Request) -> None:
    with assemble.process_group(request.config):
        folder, screen, evaluations = _train_and_evaluate(request)
        gc.collect()  # the training engine is gone, so the merged model fits where it was
        if request.config.run.merge:
            evaluations += _merge_and_evaluate(request.config, folder)
        if distributed.is_main():
            conclude(request, folder, screen, evaluations)


def _train_and_evaluate(request: Request) -> tuple[Path, Screen, list[Evaluation]]:
    parts = assemble.build(request)
    _introduce(parts, request)
    evaluations: list[Evaluation] = []
    if parts.held_out:
        with parts.policy.as_base():
            evaluations.append(parts.evaluate("base"))
        parts.screen.say(f"base model: {evaluations[0].accuracy:.1%} of {len(parts.held_out)} held-out problems correct")
    try:
        train(parts)
    finally:
        parts.screen.close()
        if parts.journal:
            parts.journal.close()
    if parts.held_out:
        evaluations.append(parts.evaluate("trained"))
    if distributed.is_main():
        parts.policy.save_adapter(parts.folder / "adapter")
    distributed.barrier()
    return parts.folder, parts.screen, evaluations


def _merge_and_evaluate(config: Config, folder: Path) -> list[Evaluation]:
    device = distributed.device()
    dtype = resolve_dtype(config.model.dtype, device)
    if distributed.is_main():
        export.merge(config.model, folder / "adapter", folder / "merged", dtype)
    distributed.barrier()
    if not config.eval.problems:
        return []
    merged = config.model.model_copy(update={"name": str(folder / "merged"), "revision": None})
    model = load_model(merged, dtype, device)
    return [assemble.evaluate_model("merged", model, load_tokenizer(merged), config)]


def _introduce(parts: Parts, request: Request) -> None:
    config = parts.config
    rollout, resumed = config.rollout, f", going on after step {parts.first_step}" if parts.first_step else ""
    if request.reason:
        parts.screen.say(f"octet: preset {request.preset} ({request.reason})")
    parts.screen.say(
        f"{config.model.name} on {config.task.name} ({len(parts.problems)} problems): {parts.total_steps} steps of "
        f"{rollout.problems} x {rollout.group_size} answers on {distributed.world_size()} x {parts.device.type}, "
        f"engine {config.engine.ds_config}{resumed}\nrun folder: {parts.folder}"
    )


def conclude(request: Request, folder: Path, screen: Screen, evaluations: Sequence[Evaluation]) -> None:
    """The table, the verdict, and where everything is."""
    if evaluations:
        write_evaluations(folder, evaluations)
        screen.evaluations(evaluations)
        screen.say(verdict(evaluations))
    if len(evaluations) == 3:
        screen.say(f"merged against trained: {agreement(evaluations[1], evaluations[2])}")
    screen.say(f"\nrun folder  {folder}\n  adapter/  the LoRA adapter (PEFT)")
    if request.config.run.merge:
        screen.say("  merged/   the whole model, for any program that reads transformers models")
    screen.say("  metrics.jsonl, samples.jsonl, tensorboard/, eval.json, config.yaml, checkpoints/")
    screen.say(f"next        {next_steps(request.config, folder)}")


def write_evaluations(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    summaries = [evaluation.summary() for evaluation in evaluations]
    (folder / "eval.json").write_text(json.dumps(summaries, indent=2) + "\n")
    with (folder / "eval_answers.jsonl").open("w", encoding="utf-8") as file:
        for evaluation in evaluations:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in evaluation.records())


def verdict(evaluations: Sequence[Evaluation]) -> str:
    """Better, worse, or not told apart by so few problems."""
    base, trained = evaluations[0], evaluations[1]
    gained, lost, p = mcnemar(base.correct, trained.correct)
    change = f"{base.accuracy:.1%} -> {trained.accuracy:.1%}"
    if p >= 0.05:
        return f"verdict: {change} is within the noise of {len(base.outcomes)} problems (p = {p:.2f})."
    return f"verdict: {'better' if gained > lost else 'worse'}, {change} (p = {p:.1g}, exact McNemar test)."


def next_steps(config: Config, folder: Path) -> str:
    if config.model.name == "nano":
        return (
            f"tensorboard --logdir {folder}/tensorboard   |   octet eval --adapter {folder}/adapter   |   "
            "./run_deepspeed.sh --preset 8gb on a machine with a GPU"
        )
    return f"tensorboard --logdir {folder}/tensorboard   |   octet eval --adapter {folder}/adapter --problems 1000"
