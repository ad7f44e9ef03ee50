"""`octet merge`: write the model with an adapter merged in, and compare its answers with the adapted model's."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trainer.commands.eval import adapter_of, add_model_arguments, settings_for
from trainer.commands.shared_options import latest, must_be_empty, pop_folder
from trainer.plan import preflight
from trainer.run_folder.model_source import Source


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet merge runs/demo/best --out merged. A run stands for its last adapter."
    add_model_arguments(parser)
    parser.add_argument("--adapter", type=Path, help="the adapter folder of a run (default: that of the latest run)")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems for the comparison (default 32)")


def run(options: Namespace) -> None:
    must_be_empty(options.out)
    if not options.adapter:
        folder = pop_folder(options.overrides) or latest()
        options.adapter = Source.of(folder).adapter or folder
    source = adapter_of(options)
    config = settings_for(options, source)
    preflight.import_libraries(config)
    from trainer.run import evaluate_models

    made_of = source.described(options.out)
    written = evaluate_models.merge_and_compare(config, options.adapter, options.out, made_of)
    evaluate_models.answer(*written, options.json)
