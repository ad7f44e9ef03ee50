"""`octet speedrun`: measure the seconds until the embedded model solves 90 % of its problems; write a file to send."""

import json
import os
import platform
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from trainer.commands.shared_options import add_overrides
from trainer.config.resolve import overrides_of, resolve
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.machine.safe_text import print
from trainer.plan import preflight
from trainer.reports.study import totals
from trainer.run_folder.reader import read_run

GOAL = 0.9
# Settings that an entry may change. All entries share the model, the problems and the evaluation.
FREE = r"(algorithm|optim|rollout|lora)\.(?!vllm|start|engine)[\w.]+|run\.(seed|steps|threads)|eval\.every"
COLUMNS = "| CPU seconds | wall seconds | answers | processor | threads | settings | date |"


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet speedrun algorithm.lr=4e-3. Exit status: 0 at 90 %, 1 if the run ends below."
    add_overrides(parser, "algorithm.lr=4e-3; the model, the problems and the evaluation are fixed")
    parser.add_argument("--out", type=Path, default=Path("speedrun.json"), metavar="FILE", help="file of the result")


def run(options: Namespace) -> None:
    for override in options.overrides:
        key = override.partition("=")[0].strip()
        if not re.fullmatch(FREE, key):
            remedy = "Set algorithm, optim, rollout, lora, run.seed, run.steps, run.threads or eval.every"
            raise ConfigError(key, "every speedrun has the same model, problems and evaluation", remedy)
    if options.out.is_dir() or not (options.out.parent.is_dir() and os.access(options.out.parent, os.W_OK)):
        raise ConfigError(f"--out {options.out}", "no file of this name can be written", "Name another place")
    with TemporaryDirectory(prefix="octet-speedrun-") as scratch:
        fixed = ["run.merge=false", "run.track=null", *overrides_of({"run.dir": scratch})]
        config = resolve("nano", None, ["eval.every=2", *options.overrides, *fixed])
        preflight.check(config, hardware.detect())
        preflight.import_libraries(config)
        from trainer.run import repeat_steps

        reached = repeat_steps.race(config, GOAL)
        wall, cpu = time.time() - psutil.Process().create_time(), sum(os.times()[:4])  # with the imports
        if reached.value < GOAL:
            print(f"octet: {reached.value:.1%} after the last step, which is below {GOAL:.0%}", file=sys.stderr)
            sys.exit(1)
        race = read_run(Path(scratch))
        machine, answers = dict(race.machine), int(totals(race)["samples"])
        machine.pop("memory")  # which is part of no race
    result: dict[str, Any] = {"cpu_seconds": round(cpu, 2), "wall_seconds": round(wall, 2), "steps": reached.step}
    result |= {"answers": answers, "accuracy": round(reached.value, 4), "settings": options.overrides}
    result |= {"processor": machine.pop("processor"), "cores": os.cpu_count()}
    result |= {"system": f"{platform.system()} {platform.machine()}", "date": str(date.today()), "made_with": machine}
    print(f"{COLUMNS}\n{row_of(result)}")
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n{options.out} is the file to send")


def row_of(result: Mapping[str, Any]) -> str:
    """Return a result as a row of the table in gallery/speedrun.md."""
    settings = " ".join(result["settings"]) or "as they are"
    threads = f"{result['made_with']['threads']} of {result['cores']}"
    cells = [f"{result['cpu_seconds']:.1f}", f"{result['wall_seconds']:.1f}", result["answers"]]
    cells += [result["processor"], threads, settings, result["date"]]
    return f"| {' | '.join(str(cell).replace('|', ' ') for cell in cells)} |"
