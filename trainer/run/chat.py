"""Ask the models of a run, and show their answers, one below the other, while they are generated."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import TextIOWrapper
from itertools import cycle
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError
from trainer.machine.console import Console
from trainer.machine.quiet import no_progress_bars
from trainer.machine.safe_text import print
from trainer.model.load import fits, load_model, load_tokenizer, resolve_dtype
from trainer.model.lora import load_adapter
from trainer.problem.prompts import Prompter
from trainer.problem.task import evaluation_problems
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, Sampling
from trainer.reports.terminal import earlier_turns
from trainer.reward.make import make_verifier
from trainer.reward.scorer import Scorer
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.interface import Sampler
from trainer.rollout.limits import check_context, on_stderr
from trainer.rollout.make import make_sampler
from trainer.run import assemble
from trainer.run.data import prompter_of, task_of
from trainer.run_folder.model_source import Source

ASKED = "a question of yours"  # the id of a person's question, which errors of an environment name


class ChatModel(NamedTuple):
    """A model that answers inside the context `active`: the base is the trained model with its adapter disabled."""

    name: str
    sampler: Sampler
    active: Callable[[], AbstractContextManager[Any]]


def chat(source: Source, config: Config, temperature: float, question: str = "", as_json: bool = False) -> None:
    """Answer a question, or all on standard input, with base and trained model; in JSON, a line for each question."""
    no_progress_bars()
    task = task_of(config.task, source.run)
    prompter = prompter_of(config, task, load_tokenizer(config.model))
    models, scorer, console = list(_models(source, config, prompter)), make_verifier(config, task), Console()
    reader = Scorer(replace(scorer.rules, task=None))  # a person's question has no columns for tests or a task's score
    sampling = Sampling(1, temperature, config.rollout.max_new_tokens, config.run.seed)
    held_out: Iterator[Problem] | None = None
    if not question:
        if not as_json:
            small = " The embedded model can answer only problems like those." * (config.model.name == "nano")
            console.print(f"Ask, or press Enter for a held-out problem.{small} Ctrl-D ends it.")
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # input that is not UTF-8 does not end the conversation
    for number, line in enumerate([question] if question else iter(sys.stdin.readline, "")):
        reseeded = replace(sampling, seed=sampling.seed + number)  # repeating a question samples another answer
        try:
            if text := line.strip():
                problem = Problem(ASKED, text, "")
            else:  # the first empty line reads the data
                held_out = held_out or cycle(evaluation_problems(task, max(1, config.eval.problems)))
                problem = next(held_out)
            prompt = prompter.prompt(problem)
            check_context(models[0].sampler.context_limit(), [prompt], sampling.max_new_tokens)
            if as_json:
                by = reader if problem.id == ASKED else scorer
                print(json.dumps(_record(prompt, models, reseeded, by)), flush=True)
            else:
                _answer(prompt, models, reseeded, scorer, console)
        except (ConfigError, DataError) as error:  # a question is too long for the model or for the memory
            if question and not as_json:
                raise
            print(json.dumps({"error": str(error)}) if as_json else error, flush=True)


def _models(source: Source, config: Config, prompter: Prompter) -> Iterator[ChatModel]:
    """Yield the base, and the adapter over it or the whole model."""
    base, sampler = _load(config, prompter, source.adapter)
    yield ChatModel("base", sampler, getattr(base, "disable_adapter", nullcontext))
    if source.adapter:
        yield ChatModel("adapter", sampler, nullcontext)
    elif fits(folder := source.folder or Path(), distributed.device()):
        model = config.model.clean.model_copy(update={"name": str(folder), "revision": None})
        yield ChatModel("model", _load(config.model_copy(update={"model": model}), prompter)[1], nullcontext)
    else:
        on_stderr(f"octet: {folder} is left out: it does not fit on this card beside the base")


def _load(config: Config, prompter: Prompter, adapter: Path | None = None) -> tuple[Any, Sampler]:
    device = distributed.device()
    model = load_model(config.model, resolve_dtype(config.model.dtype, device), device)
    model = load_adapter(model, adapter) if adapter else model
    stops = assemble.stops_of(config.rollout.stop, prompter, model)
    sampler = make_sampler(config.rollout, model, stops, copies=False, prompter=prompter)
    return model, assemble.leader(config, prompter, stops)(sampler)


def _answer(prompt: Prompt, models: list[ChatModel], sampling: Sampling, scorer: Scorer, console: Console) -> None:
    """Show the answers of all models while they are generated, and what the verifier reads in each."""
    if prompt.problem.id != ASKED:
        print(prompt.problem.question)
    for model in models:
        console.rule(model.name, align="left")
        completion = _stream(model, prompt, sampling)
        if not prompt.problem.gold:
            print()
            continue
        (score,) = scorer.score(prompt, [completion]).scores
        found = score.strict if score.strict is not None else score.lenient
        read = "nothing" if found is None else found + (" elsewhere" if score.strict is None else "")
        print(f"\nread: {read}, {'right' if score.correct_strict else 'wrong'}; the answer is {prompt.problem.gold}")
    print(flush=True)


def _record(prompt: Prompt, models: list[ChatModel], sampling: Sampling, scorer: Scorer) -> dict[str, Any]:
    """Return the answers of all models, and what the verifier reads in each."""
    answers = []
    for model in models:
        with model.active():
            ((_, (completion,)),) = model.sampler.sample([prompt], sampling)
        (score,) = scorer.score(prompt, [completion]).scores
        right = score.correct_strict if prompt.problem.gold else None
        read = {"strict": score.strict, "lenient": score.lenient, "right": right}
        answers.append({"model": model.name, "answer": completion.text, **read, **completion.transcript})
    return {"question": prompt.problem.question, "gold": prompt.problem.gold, "answers": answers}


def _stream(model: ChatModel, prompt: Prompt, sampling: Sampling) -> Completion:
    """Print the answer of a model while it is generated, and return it."""
    printed = ""

    def show(text: str) -> None:
        nonlocal printed
        if text.startswith(printed):
            print(text[len(printed) :], end="", flush=True)
            printed = text

    if isinstance(model.sampler, DecodeSampler):
        stops = model.sampler.stops
        held_back = max(map(len, stops.strings), default=0)  # the last characters may begin a stop string
        model.sampler.on_tokens = lambda tokens: show(
            stops.completion(tokens, []).text[: -held_back or None].rstrip("\ufffd")  # an incomplete character
        )
    with model.active():
        ((_, (completion,)),) = model.sampler.sample([prompt], sampling)
    earlier = earlier_turns({"completion": completion.text, **completion.transcript})
    text = "\n".join([*(indent(one["text"], "> " * (one["role"] != "model")) for one in earlier), completion.text])
    show(text)
    if printed != text:  # the model started again, with less memory or after the reply of a tool
        print(f"\n{text}", end="")
    return completion
