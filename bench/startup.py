"""How much CPU time commands take with the embedded model, most of it for imports.

python bench/startup.py [--repeats 5] [--other FOLDER] [--only NAME ...]

User and system seconds of whole commands, with compiled modules as pip leaves them. `--other` names another checkout,
whose commands take turns with these, so that whatever else the machine does hits both. Medians.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from machine import describe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/startup.json"
OCTET = [sys.executable, "-m", "trainer.commands.main"]
ONE_STEP = ["train", "--preset", "nano", "run.steps=1", "run.merge=false", "eval.problems=64", "run.dir={out}"]
COMMANDS = {
    "one step": ONE_STEP,
    "chat": ["chat", "{run}"],
    "merge": ["merge", "--adapter", "{run}/adapter", "--out", "{out}"],
    "task show": ["task", "show", "addition"],
    "doctor": ["doctor"],
}


def seconds(checkout: Path, scratch: Path, command: list[str]) -> float:
    variables = {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": str(scratch / "compiled"), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        filled = [part.format(run=scratch / f"run-{checkout.name}", out=f"{out}/out") for part in command]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            OCTET + filled, cwd=scratch, env=environment, input="\n", text=True, check=True, capture_output=True
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=[*COMMANDS], help="names of commands")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    checkouts = {"this": ROOT, **({"other": options.other.resolve()} if options.other else {})}
    chosen = {name: COMMANDS[name] for name in options.only}
    found: dict[str, dict[str, list[float]]] = {name: {label: [] for label in checkouts} for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "{run}" in str(chosen):
            for checkout in checkouts.values():
                seconds(checkout, scratch, [part.replace("{out}", "{run}") for part in ONE_STEP])
        for repeat in range(options.repeats + 1):
            for name, command in chosen.items():
                for label, checkout in checkouts.items():
                    took = seconds(checkout, scratch, command)
                    if repeat:  # the first time modules are compiled
                        found[name][label].append(took)
    medians = {name: {label: median(times) for label, times in sides.items()} for name, sides in found.items()}
    options.out.write_text(json.dumps({"machine": describe(), "cpu_s": medians, "all": found}, indent=1) + "\n")
    for name, sides in medians.items():
        print(f"{name:10}", "  ".join(f"{label} {value:.1f} CPU s" for label, value in sides.items()))


if __name__ == "__main__":
    main()
