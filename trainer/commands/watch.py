"""`octet watch`: show runs in the terminal, while they train or afterwards, from the files in their folders."""

import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress

from rich.live import Live

from trainer.commands.shared_options import add_runs
from trainer.errors import DataError
from trainer.machine.console import Console
from trainer.reports import terminal
from trainer.run_folder.reader import read_run, read_runs

SECONDS = 2.0  # between two updates of the screen


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet watch runs/demo"
    add_runs(parser, "run folders, also of jobs on another node")
    parser.add_argument("--once", action="store_true", help="print once and end, as in a pipe")


def run(options: Namespace) -> None:
    """Show the runs until all of them have ended or were stopped, or until Ctrl-C."""
    console, runs = Console(wide=terminal.WIDE), read_runs(options.runs)  # plain text if the output is not a terminal
    if console.is_terminal and not options.once:
        with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while terminal.are_live(runs):
                with suppress(DataError):  # a file is just being written, and is complete at the next update
                    live.update(terminal.shown(runs, console, console.height), refresh=True)
                time.sleep(SECONDS)
                runs = [read_run(run.folder) for run in runs]
    console.print(terminal.shown(runs, console))
