"""Options that several commands share."""

from __future__ import annotations

from argparse import ArgumentParser

TASKS = "nano, gsm8k, math, multiple_choice or records"


def add_overrides(parser: ArgumentParser, example: str = "task.data_dir=FOLDER") -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings, such as {example}")


def add_settings_of_a_run(parser: ArgumentParser) -> None:
    parser.add_argument("--preset", help="by default the one for this hardware")
    parser.add_argument("--recipe", help="an objective on top of the preset")
    add_overrides(parser, "rollout.group_size=16")
