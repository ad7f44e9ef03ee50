"""Evaluate or merge models outside of a run: the work of `octet eval` and `octet merge`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.batch.pack import Packer
from trainer.config.settings import Config, Model
from trainer.evaluation import results
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.merge_check import Agreement, agreement
from trainer.evaluation.results import Comparison, flip_lines
from trainer.loss.logprobs import LogProbs
from trainer.machine import disk, hardware
from trainer.machine.console import Console, table
from trainer.machine.quiet import no_progress_bars
from trainer.machine.safe_text import print
from trainer.model.load import load_model, load_tokenizer, resolve_dtype, stored_dtype
from trainer.model.lora import load_adapter
from trainer.model.merge import stored_weights, write_merged
from trainer.plan import preflight
from trainer.plan.read_data import Data, read_held_out
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.records import Draws, Prompt, Sampling
from trainer.rollout import limits
from trainer.rollout.interface import Sampler, StaticPolicy
from trainer.rollout.make import make_vllm_sampler
from trainer.run import assemble, sampler_check
from trainer.run.data import prompter_of
from trainer.watch.footer import Footer, Progress
from trainer.watch.screen import Screen

Answer = tuple[dict[str, Any], list[Evaluation]]  # what a command prints: facts for --json, `said` for people


def progress(task: str, total: int) -> Progress:
    """Show progress on rank 0 only, on standard error."""
    return Progress(task, total, Footer(Console(stderr=True, quiet=not distributed.is_main(), soft_wrap=True)))


evaluate_model = partial(assemble.evaluate_model, progress=progress)


def evaluate(config: Config, data: Data, models: dict[str, Path], draws: Draws | None, out: Path) -> Answer:
    """Evaluate the model of the configuration, and those in `models` (`adapter`, `merged`), on all ranks together."""
    preflight.must_leave_our_cards(hardware.detect(), config.rollout.vllm, distributed.world_size())
    joins = distributed.world_size() > 1 or config.rollout.engine == "vllm_colocate"
    with assemble.process_group(config) if joins else nullcontext():
        evaluations = list(_evaluations(config, data, models, draws, out))
    if not distributed.is_main():
        return {}, evaluations
    settings = {**results.settings_of(config), **{name: str(path) for name, path in models.items()}}
    results.write(out, settings, evaluations)
    flips = [line for pair in pairwise(evaluations) for line in flip_lines(Comparison(*pair))]
    lines = [*results.verdicts(evaluations), *flips, f"written to {out}: {results.FILES}"]
    alike = agreement(evaluations[1], evaluations[2]) if len(models) == 2 else None
    if alike:
        lines.insert(0, f"{results.merged_against('adapter', config.model.rounded)}: {alike}")
    return {**results.document(settings, evaluations), "out": str(out), "said": lines}, evaluations


def must_be_rounding(config: Config, evaluations: Sequence[Evaluation]) -> None:
    """Raise MergeError if there are a base, an adapter and a merged model, and the last two differ by more than
    rounding, although they have the same base and are sampled by the same engine."""
    if len(evaluations) == 3 and config.model.rounded == "none" and not config.rollout.uses_vllm:
        alike = agreement(evaluations[1], evaluations[2])
        alike.must_be_rounding(resolve_dtype(config.model.dtype, distributed.device()))


def _evaluations(
    config: Config, data: Data, models: Mapping[str, Path], draws: Draws | None, out: Path
) -> Iterator[Evaluation]:
    """Evaluate one model after the other, so that only one is in memory. vLLM can serve the base and the adapter."""
    model, tokenizer = load(config.model)
    if adapter := models.get("adapter"):
        stored_weights(config.model.clean, adapter, None)  # raises now if the adapter is of another base
    prompter = prompter_of(config, data.task, tokenizer)
    held_out = [prompter.prompt(problem) for problem in data.held_out]
    served = StaticPolicy()  # by vLLM, if the settings select it: the base at first
    out.mkdir(parents=True, exist_ok=True)
    sampler = make_vllm_sampler(assemble.sampling_context(config, served, model, prompter, held_out, out, say))
    with closing(sampler) if sampler else nullcontext():
        if sampler:
            _must_serve(model, prompter, held_out, config, sampler)
        first = evaluate_model("base" if models else "model", model, tokenizer, config, data, draws, sampler)
        yield first
        if adapter:
            adapted, served.adapter = load_adapter(model, adapter), adapter
            if sampler:
                _must_serve(adapted, prompter, held_out, config, sampler)
            yield evaluate_model("adapter", adapted, tokenizer, config, data, draws, sampler)
            del adapted
    del model
    if "merged" in models:
        model, tokenizer = load(config.model, str(models["merged"]))
        yield evaluate_model("merged", model, tokenizer, config, data, draws, like=first)


def say(text: str) -> None:
    """Print on rank 0 only."""
    if distributed.is_main():
        limits.on_stderr(text)


def _must_serve(model: Any, prompter: Prompter, held_out: Sequence[Prompt], config: Config, sampler: Sampler) -> None:
    """Raise an error if vLLM serves another model or adapter than the one to be evaluated."""
    limit, new_tokens = assemble.context_limit(sampler, model), config.rollout.max_new_tokens
    prompts = limits.within_context(held_out, limit, new_tokens)
    sampling = Sampling(4, 1.0, new_tokens, config.run.seed)
    packer = Packer(config.optim.tokens_per_micro_batch, prompter.tokenizer.pad_token_id, flat=False)
    measure = LogProbs(model, sampling.temperature, flat=False)
    differences = sampler_check.of_each(measure, packer, model.device, sampler, prompts, sampling)
    sampler_check.judge(differences, config.rollout.vllm.max_difference, say)


def merge_and_compare(
    config: Config, adapter: Path | None, out: Path, made_of: Mapping[str, Any], check: bool = True
) -> Answer:
    """Write the model with its adapter merged in, load it again, and compare its answers with the adapted model's."""
    if adapter is None or not check:
        with disk.named_when_checked(out) as unchecked:
            write_merged(config.model, adapter, unchecked, None, progress)
            why_not = "--no-check was given" if adapter else "nothing was merged: these are the weights of the run"
            record(unchecked, made_of, {"not_checked": why_not})
        return {"out": str(out), "said": [f"written to {out}", f"not checked: {why_not}"]}, []
    (model, tokenizer), data = load(config.model), read_held_out(config)
    adapted = evaluate_model("adapter", load_adapter(model, adapter), tokenizer, config, data)
    del model
    say(f"octet: merging {adapter} into the base, and writing {out}")
    with disk.named_when_checked(out) as unchecked:
        write_merged(config.model, adapter, unchecked, None, progress)
        model, tokenizer = load(config.model, str(unchecked))
        merged = evaluate_model("merged", model, tokenizer, config, data)
        alike = agreement(adapted, merged)
        if config.model.rounded == "none":  # otherwise the two have different bases
            files = stored_dtype(Model(name=str(unchecked)))
            here = resolve_dtype(config.model.dtype, distributed.device())
            alike.must_be_rounding(max(files, here, key=["fp32", "fp16", "bf16"].index))  # the coarser of the two
        facts = checked(alike, [adapted, merged])
        record(unchecked, made_of, facts)
    lines = [f"{results.merged_against('adapter', config.model.rounded)}: {alike}", f"written to {out}"]
    return {**facts, "out": str(out), "said": lines}, [adapted, merged]


def checked(alike: Agreement, evaluations: list[Evaluation]) -> dict[str, Any]:
    """Return how the answers of an export compare with those of its source, for export.json and for --json."""
    facts = {"identical": alike.identical, "problems": alike.problems, "largest_difference": alike.largest_difference}
    measured = {one.name: one.result.value for one in evaluations}
    return {**facts, "mean_difference": alike.mean_difference, evaluations[0].measure.name: measured}


def record(folder: Path, made_of: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write what was exported, and the result of its check, beside it. The card of `octet push` shows both."""
    (folder / "export.json").write_text(json.dumps({**made_of, **facts}, indent=2) + "\n")


def load(settings: Model, name: str | None = None) -> tuple[Any, Any]:
    no_progress_bars()
    settings = settings.clean.model_copy(update={"name": name, "revision": None}) if name else settings
    device = distributed.device()
    say(f"octet: loading {settings.name}")
    model = load_model(settings, resolve_dtype(settings.dtype, device), device)
    return model, load_tokenizer(settings)


def answer(facts: Mapping[str, Any], evaluations: Sequence[Evaluation], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    screen = Screen()
    if evaluations:
        names, rows = [one.name for one in evaluations], results.rows(evaluations)
        screen.say(table(["", *names], rows, title=results.title(evaluations)))
    for line in facts["said"]:
        screen.say(line)
