"""Build a run from its configuration. This is the only module that knows every concrete class."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.batch.pack import Packer
from trainer.config.request import Request
from trainer.config.resolve import flat
from trainer.config.settings import Config
from trainer.errors import ConfigError, ModelError
from trainer.evaluation.best import EvaluationHistory, Evaluator
from trainer.evaluation.evaluate import Evaluation, ShowProgress, evaluate
from trainer.loss.before_update import TeacherLogprobs
from trainer.loss.logprobs import LogProbs
from trainer.loss.objectives import Coefficient
from trainer.machine.console import Console
from trainer.model import hub
from trainer.model.fast_lora import use_own
from trainer.model.fewer_kernels import use_fewer_kernels
from trainer.model.load import check_vocabulary, load_model, load_tokenizer, location, resolve_dtype, stage, stop_tokens
from trainer.model.lora import add_adapter, add_teacher, experts_of, load_adapter
from trainer.plan.read_data import Data, read
from trainer.policy import Policy
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.ranks.stopping import Stopping
from trainer.records import Draws, Prompt, TrainingBatch
from trainer.reports import terminal
from trainer.reward.make import make_scorer, make_verifier, worked
from trainer.rollout.collect import Rollouts
from trainer.rollout.hf import HfSampler
from trainer.rollout.interface import Exportable, Sampler, SamplingContext
from trainer.rollout.limits import Say, check_context, context_of, on_stderr, within_context
from trainer.rollout.make import make_sampler, make_vllm_sampler
from trainer.rollout.turns import Stops
from trainer.rollout.vllm.teacher import ServedTeacher
from trainer.run.data import Prompts, make_prompts, prompter_of, report
from trainer.run_folder import checkpoints, create, lock
from trainer.run_folder.checkpoints import Learned
from trainer.run_folder.journal import Journal, read_records
from trainer.run_folder.provenance import Provenance
from trainer.run_folder.run_log import Logs, RunLog
from trainer.step.update import Updater
from trainer.watch.alarms import Alarms
from trainer.watch.footer import TimeLeft
from trainer.watch.history import History
from trainer.watch.measure import measure_of
from trainer.watch.phases import GB, total_memory
from trainer.watch.rules import RULES
from trainer.watch.screen import Screen
from trainer.watch.trackers import Tracker


class Run(NamedTuple):
    """The objects that the loop works with."""

    rollouts: Rollouts
    updater: Updater
    evaluator: Evaluator
    log: RunLog


def build(request: Request, data: Data | None = None) -> Run:
    """Build a run from its configuration, and from its data if they have been read already."""
    config = request.config
    config.refuse_idle(distributed.world_size())
    data = data or read(config)
    for model in filter(None, (config.model, config.teacher_model)):
        stage(model)
    tokenizer = load_tokenizer(config.model)
    prompts = make_prompts(config, data, tokenizer)
    folder = lock.claim(request)  # only now: bad data must not leave a folder that refuses the corrected settings
    scorer = make_scorer(config, data.task, folder)
    scorer.rehearse(prompts.prompter.prompt(prompts.problems[0]), worked(prompts.problems[0]))
    teacher = make_teacher(config, tokenizer, len(prompts.longest.tokens))
    policy = make_policy(config, prompts.total_steps)
    check_vocabulary(tokenizer, policy.model)
    context, new_tokens = context_of(policy.model), config.rollout.max_new_tokens
    if context and context < config.prompt.max_tokens + new_tokens:
        check_context(context, [*prompts.prompter.longer(prompts.problems, context - new_tokens)], new_tokens)
    teacher = partial(by_adapter, policy) if config.shares_base else teacher
    kl = Coefficient(config.algorithm.kl)
    origin = Provenance(config, folder, prompts.problems, data.task.test(), request.accepts_changes)
    learned: Learned = {"origin": origin, "curriculum": prompts.curriculum, "kl": kl, "logs": Logs(folder)}
    log = open_log(request, folder, policy, prompts, learned)
    sampler, evaluating, held_out = make_sampling(config, policy, prompts, log)
    report(folder, log.screen, data, prompts.problems, origin.checksums, len(held_out))
    if whole := getattr(policy.model, "taken_from", None):
        log.screen.say(f"octet: the text model of {whole} is trained: adapter/ and merged/ know no images or sound")
    if config.lora.enabled and experts_of(policy.model):
        log.screen.say("octet: the experts of this model are not trained: adapters are on its linear layers")
    packer = Packer(config.optim.tokens_per_micro_batch, tokenizer.pad_token_id, policy.is_flat)
    give_back = sampler.give_back, evaluating.give_back
    progress = log.screen.progress
    left_out = len(prompts.held_out) - len(held_out)
    run = (log.first_step, log.total_steps, origin.run, measure_of(config))
    history = EvaluationHistory(folder, config.eval, len(held_out), *run)
    if history.lost:
        log.screen.say(f"octet: warning: {history.lost}, so the best that was kept is lost")
    samples = 0 if config.is_warmup else config.eval.samples
    draws = Draws(samples, config.rollout.temperature, 1, config.run.seed) if samples else None
    longest = prompts.longest if config.is_warmup else sampler.longest(prompts.longest)
    return Run(
        Rollouts(config, prompts.curriculum, prompts.prompter, sampler, scorer, longest),
        Updater(policy, config, distributed.device(), packer, kl, log.screen.warn, give_back, teacher),
        Evaluator(policy, evaluating, scorer, held_out, new_tokens, history, progress, left_out, draws=draws),
        log,
    )


def make_policy(config: Config, total_steps: int) -> Any:
    """Load the model, add the adapter, and start the engine."""
    from trainer.step.engine import DeepSpeedPolicy

    dtype = resolve_dtype(config.model.dtype, distributed.device())
    torch.manual_seed(config.run.seed)  # the adapter's first values
    model = load_model(config.model, dtype, distributed.device())
    use_fewer_kernels(model)
    model = add_adapter(model, config.lora, config.model.revision) if config.lora.enabled else model
    if config.shares_base and config.teacher.adapter:
        add_teacher(model, config.teacher.adapter)
    if config.lora.enabled:
        use_own(model)
    return DeepSpeedPolicy(model, config, dtype, total_steps)


def by_adapter(policy: Policy, batches: Sequence[TrainingBatch]) -> list[Tensor]:
    """Return the log-probs of a teacher that is an adapter over the policy's base."""
    with policy.as_teacher():
        return [policy.measure(batch).logprobs_BT for batch in batches]


def make_teacher(config: Config, tokenizer: Any, longest_prompt: int) -> TeacherLogprobs | None:
    """Load the frozen teacher, or connect to its server. Raise ModelError if it has another vocabulary."""
    teacher, settings, device = config.teacher, config.teacher_model, distributed.device()
    if teacher.url:
        return ServedTeacher(config, tokenizer, longest_prompt, partial(print, file=sys.stderr, flush=True))
    if settings is None:
        return None
    with hub.naming("teacher.name"):
        theirs, ours = load_tokenizer(settings).get_vocab(), tokenizer.get_vocab()
        if differing := sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)):
            differ = f"{len(differing)} tokens differ, the first of them {differing[0]!r}"
            reason = f"its tokenizer is not that of the model, {config.model.name}: {differ}"
            raise ModelError(f"teacher.name={teacher.name}", reason, "Take a teacher of the same family")
        model = load_model(settings, resolve_dtype(settings.dtype, device), device)
    if teacher.adapter:
        model = load_adapter(model, teacher.adapter, setting="teacher.adapter")
    score = LogProbs(model.requires_grad_(False), config.rollout.temperature, flat=config.optim.layout == "flat")
    return lambda batches: [score(batch).logprobs_BT for batch in batches]


def make_sampling(config: Config, policy: Any, prompts: Prompts, log: RunLog) -> tuple[Sampler, Sampler, list[Prompt]]:
    """Return the samplers for training and for evaluation, and the held-out prompts that fit into the context."""
    model, say = policy.model, log.screen.say
    with policy.gathered():
        context = sampling_context(config, policy, model, prompts.prompter, prompts.held_out, log.folder, say)
        sampler, evaluating = make_samplers(context, model, log.screen.warn, copies=not policy.splits_weights)
    held_out = within_context(prompts.held_out, context_limit(evaluating, model), config.rollout.max_new_tokens)
    return sampler, evaluating, held_out


def make_samplers(context: SamplingContext, model: Any, warn: Say, copies: bool) -> tuple[Sampler, Sampler]:
    """Return the samplers for training and for evaluation. Weights that are split over the ranks are not copied for
    sampling, because copies would be as large as what splitting saves."""
    lead = leader(context.config, context.prompter, context.stops)
    if outside := make_vllm_sampler(context):
        return lead(outside), lead(outside)
    choose = partial(make_sampler, context.config.rollout, model, context.stops, warn, prompter=context.prompter)
    sampler = choose(copies=copies)
    return lead(sampler), lead(sampler if isinstance(sampler, HfSampler) else choose(copies=False))


def leader(config: Config, prompter: Prompter | None, stops: Stops) -> Callable[[Sampler], Sampler]:
    """Return a function that puts a sampler under the control of the configured agent, if there is one."""
    if not config.task.agent or prompter is None:
        return lambda sampler: sampler
    from trainer.rollout.agents.sampler import Agents, AgentSampler

    agents = Agents(config.task.agent, on_stderr)
    return lambda sampler: AgentSampler(sampler, agents, prompter, stops, config)


def sampling_context(
    config: Config, policy: Exportable, model: Any, prompter: Prompter, held_out: list[Prompt], folder: Path, say: Say
) -> SamplingContext:
    """Return what an external engine needs to know about this model. Its context is long enough for held-out prompts,
    which may be longer than those of the training, up to the tokens that are planned for all rows."""
    is_outside = config.rollout.uses_servers or config.rollout.engine == "vllm_colocate"
    if is_outside and (whole := getattr(model, "taken_from", None)):
        reason = f"vLLM reads the whole {whole}, and an adapter of its text model would have no effect there"
        remedy = f"Write rollout.engine=decode, or train what octet export {config.model.name} --to safetensors writes"
        raise ConfigError(f"rollout.engine={config.rollout.engine}", reason, remedy)
    trained = config.prompt.max_tokens + config.rollout.max_new_tokens
    longest = max((len(prompt.tokens) for prompt in held_out), default=0) + config.rollout.max_new_tokens
    wanted = min(max(trained, longest), trained * config.rollout.rows)
    stops = stops_of(config.rollout.stop, prompter, model)
    dtype, length = resolve_dtype(config.model.dtype, distributed.device()), min(context_of(model) or wanted, wanted)
    at, tokens = location(config.model), model.config.get_text_config().vocab_size
    return SamplingContext(config, policy, at, dtype, length, stops, folder, say, prompter, tokens)


def stops_of(configured: Sequence[str], prompter: Prompter, model: Any) -> Stops:
    """Return the tokens and the strings at which a turn ends: those of the model, the prompt style and the settings.
    The text of an answer is decoded without special tokens, so a string that names one stands for the token."""
    tokenizer = prompter.tokenizer
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: index for index, token in added if token.special and token.content.strip()}
    strings = (*prompter.stop_strings, *configured)
    for string in strings:
        if string not in special and (inside := next((name for name in special if name in string), None)):
            reason = f"no answer has {inside} in its text, because it is a special token"
            remedy = "Write it alone to end answers at this token, or leave it out"
            raise ConfigError(f"rollout.stop={string!r}", reason, remedy)
    tokens = {*stop_tokens(tokenizer, model), *(special[string] for string in strings if string in special)}
    return Stops(tokenizer, sorted(tokens), tuple(string for string in strings if string not in special))


def context_limit(sampler: Sampler, model: Any) -> int | None:
    """Return how many tokens a prompt and its answer may have, or None if there is no limit."""
    return min((limit for limit in (sampler.context_limit(), context_of(model)) if limit), default=None)


def evaluate_model(
    name: str,
    model: Any,
    tokenizer: Any,
    config: Config,
    data: Data,
    draws: Draws | None = None,
    outside: Sampler | None = None,
    progress: ShowProgress | None = None,
    folder: Path | None = None,
    like: Evaluation | None = None,
) -> Evaluation:
    """Evaluate a model on the held-out problems, or those of `like`. The costs of a judge are counted in `folder`."""
    check_vocabulary(tokenizer, model)
    prompter = prompter_of(config, data.task, tokenizer)
    stops = stops_of(config.rollout.stop, prompter, model)
    own = outside or make_sampler(config.rollout, model, stops, copies=False, prompter=prompter)
    sampler = leader(config, prompter, stops)(own)
    held_out, new_tokens = [prompter.prompt(problem) for problem in data.held_out], config.rollout.max_new_tokens
    prompts = within_context(held_out, context_limit(sampler, model), new_tokens)
    if like:  # it may have been asked fewer by a server with a shorter context
        asked = {one.problem_id for one in like.outcomes}
        prompts = [prompt for prompt in prompts if prompt.problem.id in asked]
    left_out, measure = len(held_out) - len(prompts), measure_of(config)
    scorer = make_scorer(config, data.task, folder) if measure.is_reward else make_verifier(config, data.task)
    return evaluate(name, sampler, scorer, prompts, new_tokens, draws, progress, left_out, measure)


def open_log(request: Request, folder: Path, policy: Any, prompts: Prompts, learned: Learned) -> RunLog:
    """Load the newest checkpoint, write the configuration, and open the log and the screen."""
    config, is_main, total_steps = request.config, distributed.is_main(), prompts.total_steps
    first_step = checkpoints.resume(policy, folder, config.run.keep, learned)
    if first_step > total_steps:
        reason = f"the run in {folder} has made {first_step}"
        raise ConfigError(f"run.steps={total_steps}", reason, f"Write run.steps={first_step} or more").of_all()
    create.say_how_it_continues(request, folder)
    create.write_config(folder, config)
    if not first_step:
        create.write_machine(folder, config)
    view = partial(terminal.of_folder, folder)
    left = TimeLeft(total_steps, config.eval.every, (1 + config.merges) * bool(config.eval.problems))
    console = Console(quiet=not is_main, stderr=request.json, soft_wrap=True)
    screen = Screen(total_steps, measure_of(config), console, view, left, config.rollout.dead_by)
    track = config.run.track
    tracker = Tracker(track, folder, flat(config.model_dump(mode="json")), screen.warn) if track and is_main else None
    journal = Journal(folder, first_step, tracker) if is_main else None
    distributed.barrier()  # no rank reads the log before damaged lines have been moved away
    records = [record for record in read_records(folder / "metrics.jsonl") if record["step"] <= first_step]
    history = History(config, records, len(prompts.problems), total_memory() / GB)
    alarms = Alarms(history, screen.warn, [rule for rule in RULES if is_main or rule.of_each_rank])
    if config.optim.layout == "flat" and not policy.is_flat:
        screen.say("training: with padded rows, which is slower, because of this model's kind of attention")
    # nothing can be sampled ahead of a save, so with rollout.ahead only save_every decides
    stopping = Stopping(inf if config.rollout.ahead else config.run.save_minutes)
    own = request.on_step
    return RunLog(config, folder, learned, journal, alarms, screen, stopping, first_step, total_steps, own)


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
            distributed.barrier()  # no rank disconnects while another one still communicates
    finally:
        distributed.disconnect()
