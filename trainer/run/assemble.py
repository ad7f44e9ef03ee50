"""From the configuration to the parts of a run. The only file that knows every concrete piece."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.batch.pack import Packer
from trainer.config.command_line import Request
from trainer.config.settings import Config
from trainer.evaluation.best import Course
from trainer.evaluation.evaluate import Evaluation, evaluate
from trainer.loop import Parts
from trainer.loss.kl import Coefficient
from trainer.model.load import load_model, load_tokenizer, location, resolve_dtype, stop_tokens
from trainer.model.staging import stage
from trainer.problem.curriculum import CURRICULA
from trainer.problem.prompts import Prompter
from trainer.problem.task import Task, evaluation_problems, make_task, notes, training_problems
from trainer.ranks import distributed
from trainer.ranks.stopping import Stopping
from trainer.records import Draws, Problem, Prompt
from trainer.reward.make import make_scorer, make_verifier, worked
from trainer.rollout.collect import Sampler
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.limits import Say, check_context, context_of
from trainer.rollout.make import make_outside, make_sampler
from trainer.rollout.vllm.publish import Outside, Source
from trainer.run_folder import checkpoints, claim
from trainer.run_folder.journal import Journal
from trainer.watch.screen import Screen


def build(request: Request) -> Parts:
    config = request.config
    config.refuse_idle(distributed.world_size())
    task = make_task(config.task)
    training = training_problems(task, config.task, config.run.seed)  # bad data is answered before a model loads
    stage(config.model)
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(tokenizer, config.prompt, task)
    problems = prompter.fitting(training)
    total_steps = config.total_steps(len(problems))
    curriculum = CURRICULA[config.task.curriculum](problems, config.rollout.problems, config.run.seed, total_steps)
    held_out = held_out_prompts(config, task, prompter)
    folder = claim.claim(request)  # not before: bad data leaves no folder that refuses the mended settings
    scorer = make_scorer(config, task, folder)
    scorer.rehearse(prompter.prompt(problems[0]), worked(problems[0]))
    policy = make_policy(config, total_steps)
    model = policy.model
    longest = longest_prompt(problems, prompter)
    check_context(model, [*held_out, longest], config.rollout.max_new_tokens)
    kl = Coefficient(config.algorithm.kl)
    first_step = checkpoints.resume(policy, folder, {"curriculum": curriculum, "kl": kl})
    claim.describe(folder, config)
    journal = Journal(folder, first_step) if distributed.is_main() else None
    screen = Screen(total_steps, first_step, quiet=not distributed.is_main(), stderr=request.json)
    if config.optim.layout == "flat" and not policy.is_flat:
        screen.say("training: with padded rows, which is slower, because this model has an attention of another kind")
    report_data(folder, screen, task, len(problems), len(training) - len(problems), len(held_out))
    with policy.gathered():
        outside = around(config, policy, model, tokenizer, folder, screen.say)
        sampler, evaluator = make_samplers(outside, model, screen.warn, copies=not policy.splits_weights)
    return Parts(
        config=config,
        folder=folder,
        device=distributed.device(),
        packer=Packer(config.optim.tokens_per_micro_batch, tokenizer.pad_token_id, policy.is_flat),
        problems=problems,
        curriculum=curriculum,
        kl=kl,
        longest=longest,
        held_out=held_out,
        prompter=prompter,
        sampler=sampler,
        evaluator=evaluator,
        scorer=scorer,
        policy=policy,
        journal=journal,
        screen=screen,
        course=Course(folder, config.eval, len(held_out), first_step, total_steps),
        stopping=Stopping(),
        first_step=first_step,
        total_steps=total_steps,
    )


def make_policy(config: Config, total_steps: int) -> Any:
    """What is trained, inside its engine."""
    from trainer.model.lora import add_adapter
    from trainer.step.engine import DeepSpeedPolicy

    dtype = resolve_dtype(config.model.dtype, distributed.device())
    torch.manual_seed(config.run.seed)  # the adapter's first values
    model = load_model(config.model, dtype, distributed.device())
    model = add_adapter(model, config.lora) if config.lora.enabled else model
    return DeepSpeedPolicy(model, config, dtype, total_steps)


def around(config: Config, source: Source, model: Any, tokenizer: Any, folder: Path, say: Say) -> Outside:
    """What an engine outside needs to know of this model."""
    context = context_of(model) or config.prompt.max_tokens + config.rollout.max_new_tokens
    return Outside(
        config,
        source,
        location(config.model),
        resolve_dtype(config.model.dtype, distributed.device()),
        min(context, config.prompt.max_tokens + config.rollout.max_new_tokens),
        tokenizer,
        stop_tokens(tokenizer, model),
        folder,
        say,
    )


def make_samplers(run: Outside, model: Any, warn: Say, copies: bool) -> tuple[Sampler, Sampler]:
    """For training and for evaluation: the same without shortcuts. Copies of weights that are split over the ranks
    would be as large as what splitting saves."""
    if outside := make_outside(run):
        return outside, outside
    choose = partial(make_sampler, run.config.rollout, model, run.tokenizer, run.stop_tokens, warn)
    sampler = choose(copies=copies)
    return sampler, sampler if isinstance(sampler, HfSampler) else choose(copies=False)


def samples_outside(sampler: Sampler) -> bool:
    """With a copy of the model, which may differ from the one that is trained."""
    return not isinstance(sampler, (DecodeSampler, HfSampler))


def longest_prompt(problems: Sequence[Problem], prompter: Prompter) -> Prompt:
    """What is too long is answered now, not when its turn comes. Only the longest in characters are counted."""
    candidates = heapq.nlargest(64, problems, key=lambda problem: len(problem.question))
    return max(map(prompter.prompt, candidates), key=lambda prompt: len(prompt.tokens))


def report_data(folder: Path, screen: Screen, task: Task, training: int, too_long: int, held_out: int) -> None:
    """What was read and what was left out, on the screen and in the run folder."""
    said = notes(task)
    if too_long:
        said.append(f"training problems left out because they are longer than prompt.max_tokens: {too_long}")
    for note in said:
        screen.say(f"data: {note}")
    if distributed.is_main():
        facts = {"task": task.name, "training_problems": training, "held_out": held_out, "notes": said}
        (folder / "data.json").write_text(json.dumps(facts, indent=2) + "\n")


def held_out_prompts(config: Config, task: Task, prompter: Prompter) -> list[Any]:
    if not config.eval.problems:
        return []
    return [prompter.prompt(problem) for problem in prompter.fitting(evaluation_problems(task, config.eval.problems))]


def evaluate_model(
    name: str,
    model: Any,
    tokenizer: Any,
    config: Config,
    draws: Draws | None = None,
    outside: Sampler | None = None,
) -> Evaluation:
    """A model that is not being trained, on the held-out problems of the configuration; `outside` has it, too."""
    task = make_task(config.task)
    prompter = Prompter(tokenizer, config.prompt, task)
    stops = stop_tokens(tokenizer, model)
    sampler = outside or make_sampler(config.rollout, model, tokenizer, stops, copies=False)
    scorer = make_verifier(config, task)
    prompts = held_out_prompts(config, task, prompter)
    return evaluate(name, sampler, scorer, prompts, config.rollout.max_new_tokens, draws)


@contextmanager
def process_group(config: Config) -> Iterator[None]:
    distributed.connect(config.engine.timeout_s, config.engine.connect_s)
    shared = None if distributed.on_gpu() else max(1, len(os.sched_getaffinity(0)) // distributed.ranks_here())
    if threads := config.run.threads or shared:
        torch.set_num_threads(threads)
    try:
        with distributed.naming_the_missing(config.engine.timeout_s):
            yield
            distributed.barrier()  # nobody hangs up while another one is still talking
    finally:
        distributed.disconnect()
