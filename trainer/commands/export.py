"""`octet export`: write the model of a run as safetensors, as GGUF or for Ollama, and compare its answers."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.eval import add_model_arguments, names_a_model, settings_for
from trainer.commands.shared_options import add_run, must_be_empty, options_of
from trainer.errors import CheckpointError, ConfigError
from trainer.export import FORMATS
from trainer.machine.safe_text import print
from trainer.plan import preflight
from trainer.run_folder.model_source import Source
from trainer.run_folder.reader import as_written, read_run

if TYPE_CHECKING:
    from trainer.run.evaluate_models import Answer
    from trainer.run.job import Result

TARGETS = ("safetensors", "gguf", "ollama")
OF_LLAMA_CPP = ("q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q3_k_m")  # written by llama.cpp


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet export runs/demo --to ollama --format q8_0"
    add_run(parser, "a run folder, or an adapter or a model in it")
    parser.add_argument("--to", required=True, choices=TARGETS, help="what to write")
    by_llama_cpp = f"written by llama.cpp (pip install llama-cpp-python, which compiles it): {', '.join(OF_LLAMA_CPP)}"
    formats = f"of gguf and ollama: {', '.join(FORMATS)} (default q8_0); or, {by_llama_cpp}"
    parser.add_argument("--format", default="q8_0", choices=FORMATS + OF_LLAMA_CPP, metavar="FORMAT", help=formats)
    parser.add_argument("--out", type=Path, help="the folder to write (default: in the run folder or beside a model)")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems for the comparison (default 32)")
    parser.add_argument("--no-check", action="store_true", help="do not compare the answers")
    add_model_arguments(parser)


def run(options: Namespace) -> None:
    written = write(options)
    from trainer.run import evaluate_models

    evaluate_models.answer(*written, options.json)


def export(
    run: "Result | Path | str",
    to: str = "safetensors",
    format: str = "q8_0",
    out: Path | str | None = None,
    problems: int = 32,
    check: bool = True,
    settings: Sequence[str] = (),
    quiet: bool = False,
) -> Path:
    """Write the model of a run, as `octet export` does, and return the folder, or the GGUF file, that was written.

    Args:
        run: The result of `train`, a run folder, or an adapter or a model in it.
        to: `safetensors`, `gguf` or `ollama`.
        format: The format of a GGUF file, such as `q8_0`.
        out: The folder to write; by default in the run folder.
        problems: How many held-out problems compare the answers of both.
        check: Compare answers before the files get their names.
        settings: Further settings, such as `["task.data_dir=FOLDER"]`.
        quiet: Do not show progress and warnings.
    """
    choices = {"to": (to, TARGETS), "format": (format, FORMATS + OF_LLAMA_CPP)}
    for name, (value, known) in choices.items():
        if value not in known:
            raise ConfigError(name, f"{value!r} is not known", f"Write one of {', '.join(known)}")
    named: Any = getattr(run, "folder", run)
    chosen = {
        "run": Path(named).expanduser(),
        "to": to,
        "format": format,
        "out": Path(out).expanduser() if out else None,
        "problems": problems,
    }
    from trainer.run import python_api

    with python_api.as_it_was("auto", quiet):
        facts, _ = write(options_of("export", no_check=not check, overrides=[*settings], **chosen))
    return Path(facts["out"])


def write(options: Namespace) -> "Answer":
    """Write what the options of the command ask for."""
    if options.to != "safetensors" and options.format in OF_LLAMA_CPP and find_spec("llama_cpp") is None:
        reason = "llama.cpp writes it, and llama-cpp-python is not installed"
        remedy = f"Install it (pip compiles it, which takes minutes), or take one of {', '.join(FORMATS)}"
        raise ConfigError(f"--format {options.format}", reason, remedy)
    source = Source.of(best_of(options.run))
    if source.folder is None:
        raise CheckpointError(options.run, "there is no such folder", "Name the folder of a run")
    if source.adapter is None:
        if names_a_model(options):
            reason = f"{source.folder} is a whole model, and --model and model.name name the base of an adapter"
            remedy = "Leave them out, or name the folder of the other model in place of this one"
            raise ConfigError("--model", reason, remedy)
        options.model = str(source.folder)
    kind = options.to if options.to == "safetensors" else f"{options.to}-{options.format}"
    named = options.run.resolve()
    # an export of a model that was named itself lies beside it, because `octet push` sends everything inside it
    beside = named.with_name(f"{named.name}-{kind}") if source.folder == options.run else None
    checkpoint = source.folder.resolve().parent
    if source.run and checkpoint.parent.name == "checkpoints":  # not in there, because the run deletes old checkpoints
        beside = source.run / f"{checkpoint.name}-{kind}"
    out = options.out or beside or options.run / f"export-{kind}"
    must_be_empty(out, is_replaced=options.to == "safetensors")
    config, made_of = settings_for(options, source), source.described(out)
    preflight.import_libraries(config)
    if options.to == "safetensors":
        from trainer.run import evaluate_models

        return evaluate_models.merge_and_compare(config, source.adapter, out, made_of, not options.no_check)
    from trainer.run import export

    return export.to_gguf(config, source, out, made_of, options)


def best_of(run: Path) -> Path:
    """Return best/ of a run, with a message, if it is better than the model of the last step, or if the run was
    interrupted before it wrote that model; else the run."""
    if not (run / "config.yaml").is_file() or not (run / "best/best.json").is_file():
        return run
    files = read_run(run)
    logged, product = files.measure.logged, run / files.config.lora.product
    # not of eval.json, because the run may have been asked other problems than the best since
    line: dict[str, Any] = next((line for line in files.metrics[::-1] if logged in line), {})
    last, value = line.get(logged), files.best.get(logged.removeprefix("eval/"))
    if not product.exists():
        print(f"octet: exporting best/, of step {files.best.get('step')}: there is no {product} yet", file=sys.stderr)
        return run / "best"
    with as_written(run / "best/best.json", remedy=f"Name {product}"):
        if last is None or value is None or value <= last or files.best["problems"] != line.get("eval/problems"):
            return run
    text = files.measure.text
    print(
        f"octet: exporting best/, of step {files.best['step']}, with {text(value)}. The last step, {files.steps}, has "
        f"{text(last)}; to export that one, name {product}",
        file=sys.stderr,
    )
    return run / "best"
