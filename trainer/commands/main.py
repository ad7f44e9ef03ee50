"""The entry point of `octet`: find the requested command, parse its options and run it.

Each command is a module of this folder with `add_arguments(parser)` and `run(options)`, imported only when requested.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import trainer
from trainer.machine.import_guard import naming_missing_packages

with naming_missing_packages():
    from argparse import ArgumentParser, Namespace

    from trainer.config.nearest_name import did_you_mean
    from trainer.config.train_options import Parser, argument_parser
    from trainer.machine import hardware
    from trainer.machine.exits import answering_errors, leave
    from trainer.machine.safe_text import print
    from trainer.ranks import slurm

GROUPS = {
    "train": {
        "train": "Train a model, or resume a run.",
        "ui": "Serve a local page that starts and follows runs; see docs/ui.md.",
        "warmup": "Teach a model worked solutions first; see docs/warmup.md.",
        "study": "Train and judge the arms of an experiment; see docs/studies.md.",
        "speedrun": "Measure the seconds until the embedded model solves 90 %.",
        "slurm": "Submit a run to a Slurm cluster; see docs/slurm.md.",
    },
    "look": {
        "eval": "Measure the accuracy on held-out problems, with 95 % intervals.",
        "list": "List runs: state, model, task, steps and result.",
        "compare": "Show the settings and results of runs side by side.",
        "watch": "Show runs in the terminal, while they train or afterwards.",
        "report": "Write a page about runs: result, curves, answers, alarms.",
        "plot": "Draw the curves of runs, as SVG.",
        "repro": "Repeat the first steps of a run, and compare them bit for bit.",
        "score": "Score the completions in a JSON lines file; see docs/rewards.md.",
        "chat": "Ask the base and the trained model of a run the same question.",
        "reward": "Test rewards on texts with which a model might exploit them.",
    },
    "prepare": {
        "doctor": "Check whether a run can start on this machine, and finish.",
        "plan": "Estimate whether a run fits a card, and how long it takes.",
        "task": "Show the problems of a task as a model sees them, or answer them.",
        "fetch": "Collect model, data and packages for a machine without internet.",
    },
    "share": {
        "export": "Write the model for llama.cpp, Ollama or vLLM; compare its answers.",
        "merge": "Write the model with an adapter merged in, and compare the two.",
        "push": "Send a model to the hub, with a card; a dry run without --yes.",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(answering_errors(_help) or (0 if arguments else 2))
    name, *rest = arguments
    if name == "--version":
        print(f"octet {trainer.__version__}")
    elif name in ("train", "warmup"):
        _train(name, rest)
    elif name in COMMANDS:
        _run(name, rest)
    else:
        is_script = name.endswith(".py") and rest and rest[0] in COMMANDS  # octet train.py study
        nearest = did_you_mean(rest[0] if is_script else name, [*COMMANDS, "--help", "--version"])
        print(f"octet: {name}: there is no such command.{nearest}", file=sys.stderr)
        print(f"Commands: {', '.join(COMMANDS)}. `octet --help` explains them.", file=sys.stderr)
        sys.exit(2)


def _help() -> None:
    print("usage: octet COMMAND ...\n\nGRPO training of language models, on one card or on a cluster.")
    for group, commands in GROUPS.items():
        print("", f"{group}:", *(f"  {name:<10} {summary}" for name, summary in commands.items()), sep="\n")
    print("\nStart with `octet train --preset nano`: it needs no GPU, and less than a minute.")
    print("`octet COMMAND --help` shows the options of a command, and an example.")


def _train(name: str, arguments: Sequence[str]) -> None:
    with naming_missing_packages():
        parser_of(name).parse_intermixed_args(arguments)  # answers --help before the import below, which takes a while
        from trainer.commands import train
        from trainer.config.request import refuse_replaced

    def run() -> None:
        if name == "warmup":
            refuse_replaced(arguments)
        train.main(["warmup.only=true", *arguments] if name == "warmup" else arguments)

    sys.exit(answering_errors(run, debug="--debug" in arguments))


def _run(name: str, arguments: Sequence[str]) -> None:
    with naming_missing_packages():
        module = import_module(f"trainer.commands.{name}")
        from trainer.commands.shared_options import fill_in_run

        options = parser_of(name).parse_intermixed_args(arguments, Namespace(words=arguments))
        hardware.prepare_cuda()

    def run() -> None:
        slurm.adopt_ranks()
        fill_in_run(options)
        module.run(options)

    status = answering_errors(run, options.debug)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        leave(status)
    sys.exit(status)


def parser_of(name: str) -> ArgumentParser:
    if name in ("train", "warmup"):
        return argument_parser(name)
    parser = Parser(prog=f"octet {name}", description=COMMANDS[name], allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    import_module(f"trainer.commands.{name}").add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
