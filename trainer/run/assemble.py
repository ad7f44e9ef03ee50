"""From the configuration to a run. This is the only file that knows every concrete piece."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.batch.pack import Packer
from trainer.batch.shrinker import Shrinker
from trainer.config.command_line import Request, flat
from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError, ModelError
from trainer.evaluation.best import EvaluationHistory
from trainer.evaluation.evaluate import Evaluation, ShowProgress, evaluate
from trainer.evaluation.evaluator import Evaluator
from trainer.loss.kl import Coefficient
from trainer.loss.logprobs import LogProbs
from trainer.loss.teacher import Ask
from trainer.machine import disk
from trainer.model import hub
from trainer.model.load import check_vocabulary, load_model, load_tokenizer, location, resolve_dtype, stop_tokens
from trainer.model.lora import load_adapter
from trainer.model.staging import stage
from trainer.policy import Policy
from trainer.problem import lessons
from trainer.problem.curriculum import CURRICULA
from trainer.problem.environment import environments_of
from trainer.problem.prompts import Prompter
from trainer.problem.task import Task, evaluation_problems, make_task, training_problems
from trainer.ranks import distributed
from trainer.ranks.stopping import Stopping
from trainer.records import Draws, Problem, Prompt, TrainingBatch
from trainer.reports import terminal
from trainer.reward import gold_check, placebo
from trainer.reward.make import make_scorer, make_verifier, worked
from trainer.rollout.collect import Rollouts, Sampler
from trainer.rollout.context import Exportable, SamplingContext
from trainer.rollout.hf import HfSampler
from trainer.rollout.limits import Say, check_context, context_of, within_context
from trainer.rollout.make import make_sampler, make_vllm_sampler
from trainer.rollout.vllm.teacher import ServedTeacher
from trainer.run_folder import checkpoints, lock
from trainer.run_folder.journal import Journal, read_records
from trainer.run_folder.provenance import Origin, checksums
from trainer.run_folder.run_log import Logs, RunLog
from trainer.step.schedule import schedule
from trainer.step.update import Updater
from trainer.watch import memory_use
from trainer.watch.alarms import Alarms
from trainer.watch.history import History
from trainer.watch.rules import RULES
from trainer.watch.screen import Screen
from trainer.watch.trackers import Tracker


class Run(NamedTuple):
    """What the loop works with."""

    rollouts: Rollouts
    updater: Updater
    evaluator: Evaluator
    log: RunLog


def build(request: Request) -> Run:
    """Put a run together from its configuration."""
    config = request.config
    config.refuse_idle(distributed.world_size())
    task = make_task(config.task)
    # bad data fails early
    training = placebo.shuffle_golds(training_problems(task, config.task, config.run.seed), config)
    gold_check.check(config, task, [*training, *evaluation_problems(task, config.eval.problems)])
    if config.is_warmup and config.warmup.source == "solutions":
        lessons.check(task, training)
    for model in filter(None, (config.model, config.teacher_model)):
        stage(model)
    tokenizer = load_tokenizer(config.model)
    prompter = prompter_of(config, task, tokenizer)
    problems = prompter.fitting(training)
    total_steps = config.total_steps(len(problems))
    longest = longest_prompt(problems, prompter)
    later = partial(later_pass, config, task, prompter, problems, longest) if task.later(1) else None
    kind, per_step = CURRICULA[config.task.curriculum], config.rollout.problems
    curriculum = kind(problems, per_step, config.run.seed, total_steps, None if config.task.limit else later)
    held_out = held_out_prompts(config, task, prompter)
    folder = lock.claim(request)  # not before: bad data leaves no folder that refuses the mended settings
    scorer = make_scorer(config, task, folder)
    scorer.rehearse(prompter.prompt(problems[0]), worked(problems[0]))
    ask = make_teacher(config, tokenizer, len(longest.tokens))
    policy = make_policy(config, total_steps)
    teacher = partial(by_adapter, policy) if config.shares_base else ask
    check_vocabulary(tokenizer, policy.model)
    check_context(policy.model, [longest], config.rollout.max_new_tokens)
    kl = Coefficient(config.algorithm.kl)
    origin = Origin(config, folder, problems, task.test(), request.accepts_changes)
    learned = checkpoints.Learned(origin, curriculum, kl, Logs(folder))
    first_step = checkpoints.resume(policy, folder, config.run.keep, learned)
    if first_step > total_steps:
        raise ConfigError(
            f"run.steps={total_steps}",
            f"the run in {folder} has made {first_step}",
            f"Write run.steps={first_step} or more",
        ).of_all()
    log = open_log(request, folder, learned, first_step, total_steps, len(problems))
    if config.optim.layout == "flat" and not policy.is_flat:
        log.screen.say("training: with padded rows, which is slower, because of this model's kind of attention")
    with policy.gathered():
        outside = sampling_context(config, policy, policy.model, prompter, held_out, folder, log.screen.say)
        copies = not policy.splits_weights
        sampler, evaluating = make_samplers(outside, policy.model, log.screen.warn, copies)
    evaluated = within_context(held_out, room_of(evaluating, policy.model), config.rollout.max_new_tokens)
    too_long, left_out = len(training) - len(problems), len(held_out) - len(evaluated)
    report_data(folder, log.screen, task, problems, too_long, len(evaluated), left_out)
    packer = Packer(config.optim.tokens_per_micro_batch, tokenizer.pad_token_id, policy.is_flat)
    shrinker = Shrinker(policy, (sampler.give_back, evaluating.give_back), packer, log.screen.warn)
    progress = log.screen.progress
    history = EvaluationHistory(folder, config.eval, len(evaluated), first_step, total_steps, origin.run)
    if history.lost:
        log.screen.say(f"octet: warning: {history.lost}, so the best that was kept is lost")
    return Run(
        Rollouts(config, curriculum, prompter, sampler, scorer, longest),
        Updater(policy, config, distributed.device(), packer, shrinker, kl, teacher),
        Evaluator(policy, evaluating, scorer, evaluated, config.rollout.max_new_tokens, history, progress, left_out),
        log,
    )


def open_log(
    request: Request, folder: Path, learned: checkpoints.Learned, first_step: int, total_steps: int, problems: int
) -> RunLog:
    """Write the configuration down, and open the log and the screen."""
    steps = lock.steps_before(folder) if distributed.is_main() else None
    lock.write_config(folder, request.config)
    if not first_step:
        lock.write_machine(folder, request.config)
    config, is_main = request.config, distributed.is_main()
    view = partial(terminal.of_folder, folder)
    screen = Screen(total_steps, first_step, config.reward.answer, quiet=not is_main, stderr=request.json, view=view)
    track = config.run.track
    tracker = Tracker(track, folder, flat(config.model_dump(mode="json")), screen.warn) if track and is_main else None
    journal = Journal(folder, first_step, tracker) if is_main else None
    is_stretched = steps not in (None, total_steps) and config.optim.schedule != "constant"
    if steps and is_stretched and 0 < first_step < total_steps:
        screen.say(stretched(config, folder, steps, first_step, total_steps))
    before = [one for one in read_records(folder / "metrics.jsonl") if one["step"] <= first_step]
    history = History(config, before, problems, memory_use.total() / memory_use.GB)
    alarms = Alarms(history, screen.warn, [rule for rule in RULES if is_main or rule.of_each_rank])
    return RunLog(config, folder, learned, journal, alarms, screen, Stopping(), first_step, total_steps)


def make_policy(config: Config, total_steps: int) -> Any:
    """Load the model, add the adapter, and start the engine."""
    from trainer.model.lora import add_adapter, add_teacher
    from trainer.step.engine import DeepSpeedPolicy

    dtype = resolve_dtype(config.model.dtype, distributed.device())
    torch.manual_seed(config.run.seed)  # the adapter's first values
    model = load_model(config.model, dtype, distributed.device())
    model = add_adapter(model, config.lora) if config.lora.enabled else model
    if config.shares_base and config.teacher.adapter:
        add_teacher(model, config.teacher.adapter)
    return DeepSpeedPolicy(model, config, dtype, total_steps)


def by_adapter(policy: Policy, batches: Sequence[TrainingBatch]) -> list[Tensor]:
    """Return the log-probs of a teacher that is an adapter of the policy's base."""
    with policy.as_teacher():
        return [policy.measure(batch).logprobs_BT for batch in batches]


def make_teacher(config: Config, tokenizer: Any, longest_prompt: int) -> Ask | None:
    """Load the teacher, frozen, beside the policy, or connect to its server. Raise ModelError if it counts in other
    tokens."""
    own, settings, device = config.teacher, config.teacher_model, distributed.device()
    if own.url:
        return ServedTeacher(config, tokenizer, longest_prompt, partial(print, file=sys.stderr, flush=True))
    if settings is None:
        return None
    with hub.naming("teacher.name"):
        theirs, ours = load_tokenizer(settings).get_vocab(), tokenizer.get_vocab()
        if apart := sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)):
            raise ModelError(
                f"teacher.name={own.name}",
                f"its tokenizer is not that of the model, {config.model.name}: {len(apart)} tokens differ, the first "
                f"of them {apart[0]!r}",
                "Take a teacher of the same family",
            )
        model = load_model(settings, resolve_dtype(settings.dtype, device), device)
    if own.adapter:
        model = load_adapter(model, own.adapter)
    score = LogProbs(model.requires_grad_(False), config.rollout.temperature, flat=config.optim.layout == "flat")
    return lambda batches: [score(batch).logprobs_BT for batch in batches]


def sampling_context(
    config: Config,
    policy: Exportable,
    model: Any,
    prompter: Prompter,
    held_out: Sequence[Prompt],
    folder: Path,
    say: Say,
) -> SamplingContext:
    """Return what an engine outside needs to know about this model.

    Held-out prompts may be longer than those of the training, up to the memory that is planned for all its rows.
    """
    trained = config.prompt.max_tokens + config.rollout.max_new_tokens
    longest = max((len(prompt.tokens) for prompt in held_out), default=0) + config.rollout.max_new_tokens
    wanted = min(max(trained, longest), trained * config.rollout.rows)
    stops, strings = ends(config, prompter, model)
    return SamplingContext(
        config,
        policy,
        location(config.model),
        resolve_dtype(config.model.dtype, distributed.device()),
        min(context_of(model) or wanted, wanted),
        prompter.tokenizer,
        stops,
        folder,
        say,
        strings,
        prompter,
    )


def prompter_of(config: Config, task: Task, tokenizer: Any) -> Prompter:
    """Return what writes the prompts of a task, with its tools or environment."""
    found = environments_of(task, config.task, tokenizer.chat_template, config.rollout.turns.seconds)
    if found is None and config.reward.weights.get("environment"):
        raise ConfigError(
            f"reward.weights.environment={config.reward.weights['environment']:g}",
            f"nothing gives this reward, because task.name={config.task.name} has no environment",
            "Leave it out; docs/environments.md says how to have one",
        )
    return Prompter(tokenizer, config.prompt, task, found)


def ends(config: Config, prompter: Prompter, model: Any) -> tuple[list[int], tuple[str, ...]]:
    """Return the tokens and the strings at which a turn ends: those of the model, the prompt style and the settings.

    The text of an answer is decoded without special tokens, so a string that names one stands for the token.
    """
    tokenizer = prompter.tokenizer
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: index for index, token in added if token.special and token.content.strip()}
    strings = (*prompter.stop_strings, *config.rollout.stop)
    for string in strings:
        if string not in special and (inside := next((name for name in special if name in string), None)):
            raise ConfigError(
                f"rollout.stop={string!r}",
                f"no answer has {inside} in its text, because it is a special token",
                "Write it alone to end answers at this token, or leave it out",
            )
    tokens = {*stop_tokens(tokenizer, model), *(special[string] for string in strings if string in special)}
    return sorted(tokens), tuple(string for string in strings if string not in special)


def make_samplers(run: SamplingContext, model: Any, warn: Say, copies: bool) -> tuple[Sampler, Sampler]:
    """Return the samplers for training and for evaluation, which is the same without shortcuts.

    Copies of weights that are split over the ranks would be as large as what splitting saves.
    """
    if outside := make_vllm_sampler(run):
        return outside, outside
    choose = partial(make_sampler, run.config.rollout, model, run.tokenizer, run.stop_tokens, warn)
    sampler = choose(copies=copies, stop_strings=run.stop_strings, prompter=run.prompter)
    if isinstance(sampler, HfSampler):
        return sampler, sampler
    return sampler, choose(copies=False, stop_strings=run.stop_strings, prompter=run.prompter)


def longest_prompt(problems: Sequence[Problem], prompter: Prompter) -> Prompt:
    """Return the longest prompt, so that one that is too long is an error now. Only the longest texts are tokenised."""
    candidates = heapq.nlargest(64, problems, key=lambda problem: len(problem.question))
    return max(map(prompter.prompt, candidates), key=lambda prompt: len(prompt.tokens))


def later_pass(
    config: Config, task: Any, prompter: Prompter, first: Sequence[Problem], longest: Prompt, passes: int
) -> Sequence[Problem]:
    """Return the problems of a later pass, none longer than the longest of the first; that again if there are none."""
    with suppress(DataError):
        problems = placebo.shuffle_golds(training_problems(task.later(passes), config.task, config.run.seed), config)
        return prompter.fitting(problems, len(longest.tokens))
    return first


def stretched(config: Config, folder: Path, before: int, first_step: int, total_steps: int) -> str:
    """Return what another run.steps does to the learning rate of a run that goes on, and the commands to do without."""
    rates = [
        config.algorithm.lr * schedule(config.optim, step, total)
        for step, total in ((first_step - 1, before), (first_step, total_steps))
    ]
    said = (
        f"run.steps={total_steps}, and it was {before}: the {config.optim.schedule} schedule is stretched, so the "
        f"learning rate goes from {rates[0]:.2g} in step {first_step} to {rates[1]:.2g} in step {first_step + 1}."
    )
    if total_steps < before or (config.lora.enabled and not config.run.merge):
        return said
    old, product = shlex.quote(str(folder)), "merged" if config.lora.enabled else "model"
    return (
        f"{said} No setting keeps the old schedule. To train the further steps with a schedule of their own, stop this "
        "run, let it end as it was meant to, and start a new run from its result:\n"
        f"  octet train --resume {old} run.steps={before}\n"
        f"  octet train --preset {old}/config.yaml model.name={old}/{product} run.steps={total_steps - before} "
        f"run.dir={old}-further"
    )


def report_data(
    folder: Path, screen: Screen, task: Task, training: Sequence[Problem], too_long: int, held_out: int, left_out: int
) -> None:
    """Say what was read and what was left out, on the screen and in the run folder."""
    said = task.notes()
    if too_long:
        said.append(f"training problems left out because they are longer than prompt.max_tokens: {too_long}")
    if left_out:
        said.append(f"held-out problems left out because they exceed the context with an answer: {left_out}")
    for note in said:
        screen.say(f"data: {note}")
    if distributed.is_main():
        text = "\n".join(f"{problem.question}\t{problem.gold}" for problem in training)
        facts = {
            "task": task.name,
            "training_problems": len(training),
            "sha256": hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest(),  # of what is trained on
            "checksums": checksums(training),
            "held_out": held_out,
            "test_problems": len(task.test()),
            "notes": said,
        }
        disk.replace(folder / "data.json", (json.dumps(facts, indent=2) + "\n").encode())


def held_out_prompts(config: Config, task: Task, prompter: Prompter) -> list[Prompt]:
    """Return the prompts of the evaluation, of any length."""
    if not config.eval.problems:
        return []
    return [prompter.prompt(problem) for problem in evaluation_problems(task, config.eval.problems)]


def room_of(sampler: Sampler, model: Any) -> int | None:
    """Return how many tokens a prompt and its answer may have, or None if there is no limit."""
    return min((room for room in (sampler.context_limit(), context_of(model)) if room), default=None)


def evaluate_model(
    name: str,
    model: Any,
    tokenizer: Any,
    config: Config,
    draws: Draws | None = None,
    outside: Sampler | None = None,
    progress: ShowProgress | None = None,
) -> Evaluation:
    """Evaluate a model that is not being trained on the held-out problems. If given, `outside` samples from it."""
    task = make_task(config.task)
    check_vocabulary(tokenizer, model)
    prompter = prompter_of(config, task, tokenizer)
    stops, strings = ends(config, prompter, model)
    choose = partial(make_sampler, config.rollout, model, tokenizer, stops, copies=False)
    sampler = outside or choose(stop_strings=strings, prompter=prompter)
    scorer = make_verifier(config, task)
    held_out, new_tokens = held_out_prompts(config, task, prompter), config.rollout.max_new_tokens
    prompts = within_context(held_out, room_of(sampler, model), new_tokens)
    left_out = len(held_out) - len(prompts)
    return evaluate(name, sampler, scorer, prompts, new_tokens, draws, progress, left_out)


@contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Join the ranks of the run, and name the one that is missing when a collective fails."""
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
