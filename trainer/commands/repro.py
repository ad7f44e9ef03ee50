"""`octet repro`: repeat the first steps of a run in a scratch folder, and compare them with the run."""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from tempfile import TemporaryDirectory

from trainer.commands.shared_options import add_overrides, add_run, positive
from trainer.config.resolve import overrides_of, resolve
from trainer.machine import hardware
from trainer.plan import preflight
from trainer.run_folder.reader import read_run


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet repro runs/demo --steps 3. Exit status: 0 if all is identical, on another "
    parser.epilog += "processor up to rounding; 1 if not."
    add_run(parser)
    add_overrides(parser, "run.threads=1, to see whether it changes anything")
    parser.add_argument("--steps", type=positive, default=5, help="how many steps (default 5)")


def run(options: Namespace) -> None:
    stored = read_run(options.run).folder / "config.yaml"
    with TemporaryDirectory(prefix="octet-repro-") as scratch:
        config = resolve(str(stored), None, [*options.overrides, *overrides_of({"run.dir": scratch}), "run.track=null"])
        machine = hardware.detect()
        preflight.check(config, replace(machine, gpus=machine.gpus[:1]))
        preflight.import_libraries(config)
        from trainer.run import repeat_steps

        is_identical = repeat_steps.replay(options.run, config, options.steps)
    if not is_identical:
        sys.exit(1)
