"""Ask the models of a run, and show their answers, one below the other, while they are written."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError
from trainer.machine.console import Console
from trainer.machine.quiet import no_progress_bars
from trainer.machine.visible import print
from trainer.model.load import fits, load_model, load_tokenizer, resolve_dtype
from trainer.model.lora import load_adapter
from trainer.problem.prompts import Prompter
from trainer.problem.task import evaluation_problems
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, Sampling
from trainer.reward.make import make_verifier
from trainer.reward.scorer import Scorer
from trainer.rollout.collect import Sampler
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.limits import context_of, on_stderr
from trainer.rollout.make import make_sampler
from trainer.run import assemble
from trainer.run.data import prompter_of, task_of
from trainer.run_folder.source import Source

ASKED = "chat"  # the id of a question of a person


class Voice(NamedTuple):
    """A model that answers. `as_itself` is entered meanwhile: the base is the model with its adapter switched off."""

    name: str
    sampler: Sampler
    context: int | None
    as_itself: Callable[[], AbstractContextManager[Any]]


def chat(source: Source, config: Config, temperature: float, asked: str = "", as_json: bool = False) -> None:
    """Answer a question with the base and with what was trained, or all that are read from standard input. As JSON, the
    answers to a question are a line."""
    no_progress_bars()
    task = task_of(config.task, source.run)
    prompter = prompter_of(config, task, load_tokenizer(config.model))
    voices, scorer, console = list(_voices(source, config, prompter)), make_verifier(config, task), Console()
    sampling = Sampling(1, temperature, config.rollout.max_new_tokens, config.run.seed)
    held_out = partial(evaluation_problems, task, max(1, config.eval.problems))
    if not asked:
        if not as_json:
            console.print("Ask, or press Enter for a held-out problem. Ctrl-D ends it.")
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # what is no text is no reason to end
    for number, problem in enumerate(_questions([asked] if asked else iter(sys.stdin.readline, ""), held_out)):
        another = replace(sampling, seed=sampling.seed + number)  # or the same question has the same answer
        try:
            if isinstance(problem, DataError):
                raise problem
            prompt = _prompt(problem, prompter, another, voices[0].context)
            if as_json:
                print(json.dumps(_record(prompt, voices, another, scorer)), flush=True)
            else:
                _answer(prompt, voices, another, scorer, console)
        except (ConfigError, DataError) as error:  # a question that is too long for the model, or for the memory
            print(json.dumps({"error": str(error)}) if as_json else error, flush=True)


def _voices(source: Source, config: Config, prompter: Prompter) -> Iterator[Voice]:
    """Yield the base, and the adapter over it or the whole model."""
    base, sampler = _load(config, prompter, source.adapter)
    context = context_of(base)
    yield Voice("base", sampler, context, getattr(base, "disable_adapter", nullcontext))
    if source.adapter:
        yield Voice("adapter", sampler, context, nullcontext)
    elif fits(folder := source.folder or Path(), distributed.device()):
        model = config.model.clean.model_copy(update={"name": str(folder), "revision": None})
        yield Voice("model", _load(config.model_copy(update={"model": model}), prompter)[1], context, nullcontext)
    else:
        on_stderr(f"octet: {folder} is left out: it does not fit on this card beside the base")


def _load(config: Config, prompter: Prompter, adapter: Path | None = None) -> tuple[Any, Sampler]:
    device = distributed.device()
    model = load_model(config.model, resolve_dtype(config.model.dtype, device), device)
    model = load_adapter(model, adapter) if adapter else model
    stops = assemble.stops_of(config.rollout.stop, prompter, model)
    return model, make_sampler(config.rollout, model, stops, copies=False, prompter=prompter)


def _questions(lines: Iterable[str], held_out: Callable[[], list[Problem]]) -> Iterator[Problem | DataError]:
    """Yield what a person asks, and a held-out problem for an empty line. Data are read when they are asked for."""
    problems: list[Problem] = []
    for line in lines:
        if text := line.strip():
            yield Problem(ASKED, text, "")
        else:
            try:
                problems = problems or held_out()
            except DataError as error:
                yield error
                continue
            yield problems[0]
            problems = [*problems[1:], problems[0]]


def _prompt(problem: Problem, prompter: Prompter, sampling: Sampling, context: int | None) -> Prompt:
    """Return the prompt. Raise ConfigError if an answer has no room behind it."""
    prompt = prompter.prompt(problem)
    length, longest = len(prompt.tokens), sampling.max_new_tokens
    if context is not None and length + longest > context:
        reason = f"with such an answer a prompt of {length} tokens exceeds the context of this model, {context}"
        remedy = "Ask a shorter question, or start again with a smaller rollout.max_new_tokens"
        raise ConfigError(f"rollout.max_new_tokens={longest}", reason, remedy)
    return prompt


def _answer(prompt: Prompt, voices: list[Voice], sampling: Sampling, scorer: Scorer, console: Console) -> None:
    """Show the answers of all models while they are written, and what the verifier reads in each."""
    if prompt.problem.id != ASKED:
        print(prompt.problem.question)
    for voice in voices:
        console.rule(voice.name, align="left")
        completion = _ask(voice, prompt, sampling)
        if not prompt.problem.gold:
            print()
            continue
        (score,) = scorer.score(prompt, [completion]).scores
        found = score.strict if score.strict is not None else score.lenient
        read = "nothing" if found is None else found + (" elsewhere" if score.strict is None else "")
        print(f"\nread: {read}, {'right' if score.correct_strict else 'wrong'}; the answer is {prompt.problem.gold}")
    print(flush=True)


def _record(prompt: Prompt, voices: list[Voice], sampling: Sampling, scorer: Scorer) -> dict[str, Any]:
    """Return the answers of all models, and what the verifier reads in each."""
    answers = []
    for voice in voices:
        with voice.as_itself():
            ((_, (completion,)),) = voice.sampler.sample([prompt], sampling)
        (score,) = scorer.score(prompt, [completion]).scores
        read = {"strict": score.strict, "lenient": score.lenient, "right": score.correct_strict}
        answers.append({"model": voice.name, "answer": completion.text, **read})
    return {"question": prompt.problem.question, "gold": prompt.problem.gold, "answers": answers}


def _ask(voice: Voice, prompt: Prompt, sampling: Sampling) -> Completion:
    """Print the answer of a model while it is written, and return it."""
    printed = ""

    def show(text: str) -> None:
        nonlocal printed
        if text.startswith(printed):
            print(text[len(printed) :], end="", flush=True)
            printed = text

    if isinstance(voice.sampler, DecodeSampler):
        stops = voice.sampler.stops
        held_back = max(map(len, stops.strings), default=0)  # a stop string may have begun, and is not shown then
        voice.sampler.on_tokens = lambda tokens: show(
            stops.completion(tokens, []).text[: -held_back or None].rstrip("\ufffd")  # a character that has begun
        )
    with voice.as_itself():
        ((_, (completion,)),) = voice.sampler.sample([prompt], sampling)
    show(completion.text)
    if printed != completion.text:  # the model began again, with less memory or after the answer of a tool
        print(f"\n{completion.text}", end="")
    return completion
