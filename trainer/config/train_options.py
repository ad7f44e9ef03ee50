"""The options of `octet train` and `train.py`. This module imports almost nothing, so that `--help` is fast."""

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from trainer.config.nearest_name import did_you_mean, setting_for

PRESETS = Path(__file__).parent / "presets"
RECIPES = PRESETS / "recipes"


def names_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


class Parser(argparse.ArgumentParser):
    """A parser that suggests the setting that an unknown option may mean: `run.steps` for `--steps`."""

    def error(self, message: str) -> NoReturn:
        if option := re.match(r"unrecognized arguments: --([\w-]+)", message):
            from trainer.config.settings import fields

            name, known = option[1].replace("-", "_"), fields()
            meant = f"{name}.name" if f"{name}.name" in known else name
            nearest = setting_for(meant) or did_you_mean(meant, known)
            hint = "" if "SBATCH_" in nearest else " Settings are written without dashes, as key=value."
            message += f".{hint}{nearest}"
        super().error(message)


FLAGS = {
    "--dry-run": "print the resolved configuration and stop; octet doctor checks data and machine",
    "--accept-changes": "continue although the code of a reward or task has changed",
    "--json": "print the result as JSON on standard output, progress on standard error",
    "--strict-health": "the same as run.strict_health=true",
    "--strict-verdict": "the same as run.strict_verdict=true",
    "--debug": "show tracebacks",
}
EXAMPLES = {
    "train": "octet train --preset 8gb algorithm.lr=2e-5 run.steps=100",
    "warmup": "octet warmup --preset 8gb warmup.steps=200",
}


def argument_parser(command: str = "train") -> argparse.ArgumentParser:
    how = "with GRPO" if command == "train" else "on worked solutions; see docs/warmup.md"
    parser = Parser(
        prog="train.py" if sys.argv[0].endswith("train.py") else f"octet {command}",
        description=f"Train a language model {how}. Every setting is in docs/configuration.md.",
        epilog=f"example: {EXAMPLES[command]}",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as rollout.group_size=16")
    parser.add_argument(
        "--preset", help=f"{', '.join(names_in(PRESETS))}, or a YAML file; by default the hardware decides"
    )
    parser.add_argument("--recipe", help=f"an objective on top: {', '.join(names_in(RECIPES))}, or a YAML file")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="resume the run in DIR, by default the latest run"
    )
    for flag, effect in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=effect)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # added by deepspeed; the environment is read instead
    return parser
