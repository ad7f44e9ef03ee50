"""Write a GGUF file, and compare its answers: the work of `octet export --to gguf` and `--to ollama`."""

import re
import shlex
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trainer.config.settings import Config, TaskSettings
from trainer.errors import MergeError, ModelError
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.merge_check import agreement
from trainer.evaluation.results import Comparison
from trainer.export import FORMATS, gguf_file, llama_cpp, ollama, vocabulary
from trainer.machine import disk
from trainer.model import hub, merge
from trainer.model.load import end_of_turn, load_tokenizer, location
from trainer.model.lora import load_adapter
from trainer.plan.read_data import read_held_out
from trainer.problem.environment import environments_of
from trainer.problem.prompts import begun
from trainer.rollout.limits import within_context
from trainer.run import assemble, evaluate_models
from trainer.run.data import prompter_of, task_of
from trainer.run.evaluate_models import Answer
from trainer.run_folder.model_source import Source


def to_gguf(config: Config, source: Source, out: Path, made_of: Mapping[str, Any], options: Namespace) -> Answer:
    """Write a GGUF file, and for Ollama a Modelfile, and compare its answers."""
    adapter = source.adapter
    weights = merge.stored_weights(config.model.clean, adapter, None)
    if weights is None:
        gguf_file.family_of(AutoConfig.from_pretrained(location(config.model)))  # usually raises a more precise error
        reason = "its weights, or the adapter's, cannot be read one by one"
        remedy = "Write octet export --to safetensors first, and export that folder"
        raise ModelError(f"model.name={config.model.name}", reason, remedy)
    tokenizer = load_tokenizer(config.model)
    # Ollama knows only these letters, and a Modelfile names the file without quotes
    name = re.sub(r"[^\w.-]+", "-", made_of["name"], flags=re.ASCII).strip("-.") or "model"
    file = out / f"{name}-{options.format.upper()}.gguf"  # the naming scheme of the hub
    modelfile = ""
    if options.to == "ollama":
        prompter = prompter_of(config, task_of(config.task, source.run), tokenizer)
        stops = assemble.stops_of(config.rollout.stop, prompter, weights.model)
        ends = [*tokenizer.convert_ids_to_tokens(sorted(stops.tokens)), *stops.strings]
        modelfile = ollama.modelfile(file.name, config, prompter, ends, weights.config.max_position_embeddings)
    why_not = "--no-check was given" if options.no_check else ""
    if not why_not and find_spec("llama_cpp") is None:
        why_not = "llama-cpp-python is not installed, so nothing has read this file. `pip install llama-cpp-python`"
    elif not why_not and _may_have_turns(config.task, source.run):
        why_not = "an answer may have several turns, which this check does not support"
    base, licence = config.model.name if adapter else "", hub.licence(config.model)
    about = {"name": made_of["name"], "base": base, "licence": licence}
    facts: dict[str, Any] = {"not_checked": why_not}
    evaluations: list[Evaluation] = []
    lines: list[str] = []
    with disk.named_when_checked(file) as unchecked:
        _write(unchecked, weights, tokenizer, options.format, about)
        if not why_not:
            facts, evaluations, lines = _checked(config, adapter, unchecked, weights.config.max_position_embeddings)
        evaluate_models.record(out, {**made_of, "file": file.name, "format": options.format}, facts)
    lines += [f"written to {file}", *([f"not checked: {why_not}"] if why_not else [])]
    if modelfile:  # written only after the file has passed its check
        (out / "Modelfile").write_text(modelfile)
        turns, alone = _may_have_turns(config.task, source.run), "type the question alone, the Modelfile adds the rest"
        lines += ["Ollama does not run the tools, the environment or the agent of this run" if turns else alone]
        lines += [f"ollama create {name.lower()} -f {shlex.quote(str(out / 'Modelfile'))} && ollama run {name.lower()}"]
    return {**facts, "out": str(file), "said": lines}, evaluations


def _write(file: Path, weights: merge.Weights, tokenizer: Any, fmt: str, about: Mapping[str, str | None]) -> None:
    """Write the file, from a temporary one in f32 if llama.cpp quantises."""
    gguf_file.family_of(weights.config)
    file.parent.mkdir(parents=True, exist_ok=True)
    remedy, progress = "Make room, or name another --out.", evaluate_models.progress
    with disk.writing(file.parent, "the GGUF file", remedy), weights.counted(progress, "writing"):
        if fmt in FORMATS:
            gguf_file.write(file, weights, tokenizer, fmt, about)
            return
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            exact = Path(scratch) / "f32.gguf"
            gguf_file.write(exact, weights, tokenizer, "f32", about)
            llama_cpp.quantise(exact, file, fmt)


def _may_have_turns(settings: TaskSettings, run: Path | None) -> bool:
    return bool(settings.tools or settings.agent or environments_of(task_of(settings, run), settings))


def _checked(
    config: Config, adapter: Path | None, file: Path, context: int
) -> tuple[dict[str, Any], list[Evaluation], list[str]]:
    """Answer the same held-out problems with Octet and with llama.cpp, and compare the answers."""
    model, tokenizer = evaluate_models.load(config.model)
    model = load_adapter(model, adapter) if adapter else model
    data = read_held_out(config)
    own = evaluate_models.evaluate_model("Octet", model, tokenizer, config, data)
    prompter = prompter_of(config, data.task, tokenizer)
    stops = assemble.stops_of(config.rollout.stop, prompter, model)
    held_out = [prompter.prompt(problem) for problem in data.held_out]
    longest = config.rollout.max_new_tokens
    prompts = within_context(held_out, context, longest)
    sampler = llama_cpp.LlamaCppSampler(file, stops, max(len(one.tokens) for one in prompts) + longest)
    try:
        for prompt in prompts:
            adds_special = begun(tokenizer, prompt.text) == prompt.tokens
            if tuple(sampler.tokens(prompt.text, adds_special)) != prompt.tokens:
                of = f"the prompt of problem {prompt.problem.id}"
                raise MergeError(file, f"llama.cpp reads {of} as other tokens than transformers")
        must_ask_and_end_alike(file, sampler, tokenizer)
        theirs = evaluate_models.evaluate_model("llama.cpp", model, tokenizer, config, data, outside=sampler)
    finally:
        sampler.close()
    alike = agreement(own, theirs)
    lines = [f"llama.cpp against Octet: {alike}", Comparison(own, theirs).sentence]
    return evaluate_models.checked(alike, [own, theirs]), [own, theirs], lines


def must_ask_and_end_alike(file: Path, sampler: llama_cpp.LlamaCppSampler, tokenizer: Any) -> None:
    """Raise MergeError if chat template or end tokens differ from the tokenizer's, which no other check notices."""
    if sampler.template != vocabulary.template_of(tokenizer):
        raise MergeError(file, "its chat template is not that of the tokenizer", "Export it again")
    if sampler.end != tokenizer.eos_token_id:
        raise MergeError(file, f"it names {sampler.end} as the end of a text, not {tokenizer.eos_token_id}")
    ends, turn = sampler.ends(), end_of_turn(tokenizer)
    if turn is not None and turn not in ends:
        raise MergeError(file, f"llama.cpp does not stop at the end of a turn, token {turn}", "Export it again")
    if ordinary := sorted(ends - tokenizer.added_tokens_decoder.keys()):
        text = tokenizer.convert_ids_to_tokens(ordinary[0])
        raise MergeError(file, f"llama.cpp stops at {text!r}, token {ordinary[0]}, which is ordinary text")
