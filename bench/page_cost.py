"""What `octet ui` costs the run that it shows: CPU seconds of its server beside those of the run.

python bench/page_cost.py [--minutes 3]

Chromium shows the embedded model while it trains. To open a page costs once, so that is a number of its own; what
follows is a share of the CPU seconds of the run, and of one core. The browser is not counted.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from machine import ROOT, describe, python_path

RESULTS = ROOT / "bench/results/page_cost.json"
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu"]
OPENING_S = 20.0  # until a page that was opened has loaded its parts, on a busy machine


@contextmanager
def started(command: list[str], folder: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "text": True} | options
    process = subprocess.Popen(command, cwd=folder, env=environment, **streams)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def seconds(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a process, and of all that it has started."""
    family = [(one := psutil.Process(process.pid)), *one.children(recursive=True)]
    return sum(sum(member.cpu_times()[:4]) for member in family)


def measured(folder: Path, browser: str, minutes: float) -> dict[str, float]:
    octet, settings = [sys.executable, "-m", "octet"], ["--preset", "nano", "run.steps=9999", "run.dir=runs/one"]
    with ExitStack() as stack:
        server = stack.enter_context(started([*octet, "ui"], folder, stdout=subprocess.PIPE))
        address = re.search(r"http://\S+", server.stdout.readline())[0]
        run = stack.enter_context(started([*octet, "train", *settings], folder))
        while not (folder / "runs/one/metrics.jsonl").is_file():
            time.sleep(1)
        before = seconds(server)
        show = [browser, *BROWSER, f"--user-data-dir={folder / 'profile'}", f"{address}?run=one&--preset=nano"]
        stack.enter_context(started(show, folder))
        time.sleep(OPENING_S)
        opened, of_run, began = seconds(server), seconds(run), time.monotonic()
        time.sleep(60 * minutes)
        found = {"server_s": seconds(server) - opened, "run_s": seconds(run) - of_run}
        return {"opening_s": opened - before, **found, "wall_s": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3, help="that are measured (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    browser = os.environ.get("OCTET_BROWSER") or shutil.which("chromium") or sys.exit("Chromium is not installed.")
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), browser, options.minutes)
    shares = {"of_the_run": found["server_s"] / found["run_s"], "of_a_core": found["server_s"] / found["wall_s"]}
    options.out.write_text(json.dumps({"machine": describe(), **found, **shares}, indent=1) + "\n")
    print(f"opening {found['opening_s']:.1f} CPU s; then {shares['of_the_run']:.1%} of the run, ", end="")
    print(f"{shares['of_a_core']:.1%} of a core")


if __name__ == "__main__":
    main()
