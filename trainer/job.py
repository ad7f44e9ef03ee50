"""The whole job: train, then say honestly what came of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer import assemble, distributed, export
from trainer.config import Config, Request
from trainer.evaluate import Evaluation, agreement, verdict
from trainer.loop import Parts, train
from trainer.policy.base import load_model, load_tokenizer, resolve_dtype
from trainer.quiet import no_progress_bars
from trainer.watch.live import Screen


def run(request: Request) -> None:
    no_progress_bars()
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
        parts.screen.say(
            f"base model: {evaluations[0].accuracy:.1%} of {len(parts.held_out)} held-out problems correct"
        )
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
    said = []
    if evaluations:
        write_evaluations(folder, evaluations)
        screen.evaluations(evaluations)
        said.append(verdict(evaluations[0], evaluations[1]))
    if len(evaluations) == 3:
        said.append(f"merged against trained: {agreement(evaluations[1], evaluations[2])}")
    for line in [*said, *_where_everything_is(request.config, folder)]:
        screen.say(line)
    if request.json:
        summaries = [evaluation.summary() for evaluation in evaluations]
        print(json.dumps({"run_folder": str(folder), "evaluations": summaries, "said": said}, indent=2))


def _where_everything_is(config: Config, folder: Path) -> Iterator[str]:
    yield f"\nrun folder  {folder}"
    yield "  adapter/  the LoRA adapter (PEFT)"
    if config.run.merge:
        yield "  merged/   the whole model, for any program that reads transformers models"
    yield "  metrics.jsonl, samples.jsonl, tensorboard/, eval.json, eval_answers.jsonl, config.yaml, checkpoints/"
    yield "next"
    yield f"  tensorboard --logdir {folder}/tensorboard"
    yield f"  octet eval --adapter {folder}/adapter --problems 1000"
    if config.model.name == "nano":
        yield "  ./run_deepspeed.sh --preset 8gb     on a machine with a GPU"


def write_evaluations(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    summaries = [evaluation.summary() for evaluation in evaluations]
    (folder / "eval.json").write_text(json.dumps(summaries, indent=2) + "\n")
    with (folder / "eval_answers.jsonl").open("w", encoding="utf-8") as file:
        for evaluation in evaluations:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in evaluation.records())
