"""The whole job: train, evaluate, and report."""

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.config.request import Request
from trainer.config.settings import Config
from trainer.errors import CheckpointError, EndedByAlarm
from trainer.evaluation.best import describe, metrics_of
from trainer.evaluation.evaluate import Evaluation, keep_base, kept_base
from trainer.machine import disk, manifest
from trainer.machine.out_of_memory import explained
from trainer.machine.quiet import no_progress_bars
from trainer.model.load import fits, load_model, load_tokenizer, resolve_dtype
from trainer.model.merge import write_merged
from trainer.plan.read_data import Data, read
from trainer.ranks import distributed, signal_handlers
from trainer.run import assemble, closing, opening, sampler_check, teaching
from trainer.run.assemble import Run
from trainer.run.evaluate_models import must_be_rounding
from trainer.run.rehearsal import planned, rehearse, report
from trainer.run_folder import changed_settings, create, lock
from trainer.run_folder.run_log import RunLog
from trainer.watch.phases import total_memory
from trainer.watch.verdict import Verdict

Evaluations = Mapping[str, Evaluation]  # by name: `base`, `trained`, `merged`


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run, on rank 0."""

    config: Config = field(repr=False)
    folder: Path
    evaluations: Evaluations = field(repr=False)
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


def run(request: Request, data: Data | None = None) -> Result | None:
    """Train, export, merge, evaluate, and report. Return the result on rank 0. `data` is read if it is not given."""
    no_progress_bars()
    distributed.refuse_an_idle_card()
    with explained(), assemble.process_group(request.config):
        data = data or read(request.config)
        if request.config.warmup.steps and not request.config.is_warmup:
            request = _warm_up_first(request, data)
        config = request.config
        log, evaluations = _train_and_evaluate(request, data)
        gc.collect()
        with _saying_what_is_saved(log):
            if config.merges:
                with log.stopping.merging():
                    evaluations = {**evaluations, **_merge_and_evaluate(config, log, data, evaluations.get("trained"))}
            if distributed.is_main():
                verdict = closing.conclude(request, log.folder, log.screen, evaluations)
    must_be_rounding(config, [*evaluations.values()])
    if not distributed.is_main():
        return None
    if config.run.strict_verdict:
        verdict.must_be_learned()
    return Result(config, log.folder, evaluations, verdict)


def _warm_up_first(request: Request, data: Data) -> Request:
    """Run the warm-up in a folder of its own unless it is done, and return the request for the run that follows."""
    folder = create.folder_of(request)
    whole = request.config.changed({"run.dir": folder})
    warmup, config = folder / "warmup", whole.warmed_up_in(folder / "warmup")
    changed_settings.refuse_other_settings(warmup, config)
    lock.hold(folder)
    if not distributed.gather((warmup / teaching.START).exists())[0]:
        create.write_config(folder, whole)  # for --resume
        log, evaluations = _train_and_evaluate(replace(request, config=config), data)
        gc.collect()
        if distributed.is_main():
            log.screen.say(closing.summarise(config, warmup, log.screen, evaluations)[0].shown)
        with _saying_what_is_saved(log), log.stopping.merging():
            teaching.leave_start(config, whole.warmup.then, warmup)
    return replace(request, config=whole.after_warmup(warmup))


def _train_and_evaluate(request: Request, data: Data) -> tuple[RunLog, Evaluations]:
    config, (run, train) = request.config, teaching.built(request, data)
    evaluator, log = run.evaluator, run.log
    evaluations: dict[str, Evaluation] = {}
    try:
        opening.introduce(run, request)
        _rehearse_and_check(config, run)
        if evaluator.held_out:
            evaluations["base"] = _of_base(run)
            log.screen.say(f"base model: {describe(evaluations['base'])}")
        with signal_handlers.ctrl_c_waits_for_the_step():
            train()
        log.screen.close()
        if evaluator.held_out:
            last = None if evaluator.draws else evaluator.history.last  # a finished run makes no step
            last = last or evaluator.evaluate("trained", evaluator.draws)
            evaluations["trained"] = replace(last, name="trained")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(closing.what_is_saved(log)) from None
    except OSError as error:
        if log.folder.is_dir() and not disk.failure(error):
            raise
        gone = "" if log.folder.is_dir() else f"{log.folder} has disappeared: "
        reason = disk.failure(error) or f"{error.strerror}."
        named = f"{gone}{error.filename or 'while writing'}"
        raise CheckpointError(named, f"{reason} {closing.what_is_saved(log)}") from error
    except EndedByAlarm as alarm:
        raise EndedByAlarm(f"{alarm.key}={alarm.value}", alarm.reason, closing.what_is_saved(log)) from None
    finally:
        run.rollouts.close()
        log.close()
    for line in closing.best_step(config, evaluator.history, log.total_steps):
        log.screen.say(line)
    with _saying_what_is_saved(log):
        _export(run)
    return log, evaluations


@contextmanager
def _saying_what_is_saved(log: RunLog) -> Iterator[None]:
    """Say how a run that is stopped after its last step can be finished."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or closing.what_is_saved(log)) from None


def _of_base(run: Run) -> Evaluation:
    """Return the evaluation of the base, which is step 0 of the curves. A resumed run has kept it."""
    evaluator, log = run.evaluator, run.log
    wanted = log.folder, evaluator.held_out, evaluator.draws, evaluator.history.measure
    if log.first_step and (kept := kept_base(*wanted)):
        evaluation, log.stopping.longest_evaluation_s = kept
        log.screen.left.evaluated(kept[1])
        return evaluation
    with log.stopping.timing_an_evaluation(), run.updater.policy.as_base():
        evaluation = evaluator.evaluate("base", evaluator.draws)
    keep_base(log.folder, evaluation, log.stopping.longest_evaluation_s)
    if log.first_step == 0:
        log.base(metrics_of(evaluation))
    return evaluation


def _export(run: Run) -> None:
    """Write the adapter or the model, and free the memory of the policy for the merged model."""
    policy, product = run.updater.policy, run.log.folder / run.log.config.lora.product
    with run.log.stopping.exporting(), policy.gathered():
        if distributed.is_main():
            remedy = "Make room; `--resume` then finishes the run."
            with manifest.replacing(product, "the result", remedy) as folder:
                policy.write_model(folder)
        distributed.barrier()
    policy.release()


def _rehearse_and_check(config: Config, run: Run) -> None:
    """Detect now what would fail later: too little memory, or a sampler that serves another model."""
    outside = run.rollouts.sampler.owns_copy
    if run.log.first_step < run.log.total_steps:
        peaks, longest = rehearse(run.rollouts, run.updater), len(run.rollouts.longest.tokens)
        if distributed.on_gpu() and (plan := planned(config, longest, total_memory(), outside)):
            run.log.screen.say(report(plan, peaks, total_memory()))
            if distributed.is_main():
                disk.replace(run.log.folder / "memory_plan.json", (json.dumps(plan) + "\n").encode())
    if outside:
        sampler_check.check(run)


def _merge_and_evaluate(config: Config, log: RunLog, data: Data, trained: Evaluation | None) -> Evaluations:
    """Merge the adapter into the clean base, which may be larger than the quantised one, and evaluate the result."""
    device, folder = distributed.device(), log.folder
    dtype = resolve_dtype(config.model.dtype, device)
    if distributed.is_main():
        write_merged(config.model, folder / "adapter", folder / "merged", dtype, log.screen.progress)
    distributed.barrier()
    if not config.eval.problems:
        return {}
    if not all(distributed.gather(fits(folder / "merged", device))):  # ranks evaluate together, or not at all
        log.screen.say("merged/ was not evaluated: with its clean base it does not fit on this card")
        return {}
    merged = config.model.clean.model_copy(update={"name": str(folder / "merged"), "revision": None})
    model = load_model(merged, dtype, device)
    tokenizer = load_tokenizer(merged)
    return {"merged": assemble.evaluate_model("merged", model, tokenizer, config, data, folder=folder, like=trained)}
