"""Generate bench/results/reliability.md from scripts/reliability.md and from the results beside it:

python -m scripts.make_reliability_page > bench/results/reliability.md
python -m scripts.make_reliability_page --run > bench/results/reliability.md    with new runs on disks that fail

`bash tests/chaos.sh 100 0 bench/results/chaos.json` and `python bench/soak.py` make the other results.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.count import ROOT

TEXT = ROOT / "scripts/reliability.md"
KILLED = ROOT / "bench/results/chaos.json"
SOAK = ROOT / "bench/results/soak.json"
FAULTS = ROOT / "bench/results/reliability.json"


def page() -> str:
    found = json.loads(FAULTS.read_text())
    packages = ", ".join(f"{name} {version}" for name, version in found["machine"]["packages"].items())
    made = f"Made with {packages} on {found['machine']['cores']} cores ({found['machine']['processor']})."
    starts = "".join(map(_start, found["starts"]))
    tables = {"killed": _killed(), "faults": starts, "made": made, "soak": _soak()}
    text = TEXT.read_text()
    for name, table in tables.items():
        text = text.replace(f"{{{name}}}", table)
    return text


def _killed() -> str:
    found = json.loads(KILLED.read_text())
    rows = found["rows"]
    return "".join(f"| {row['run']} | {row['kills']} | {row['faults'] or 'none'} |\n" for row in rows)


def _soak() -> str:
    return "".join(
        f"| {run['run']} | {_quarters(run['memory_mb'])} | {_quarters(run['files'])} | {_quarters(run['threads'])} | "
        f"{_quarters(run['cpu_ms_per_step'])} |\n"
        for run in json.loads(SOAK.read_text())["runs"]
    )


def _quarters(values: dict[str, float]) -> str:
    return f"{values['second_quarter']:.0f}, {values['last_quarter']:.0f}"


def _start(start: dict[str, Any]) -> str:
    """Return the line of a start that fails, "" for one that a failing one is compared with."""
    if not start["told"]:
        return ""
    message = start["told"].rstrip(":, ")
    return f"| `{start['name']}` | {start['fails'] or 'deleted'} | `{message}` | {start['wrong'] or 'nothing'} |\n"


def run() -> None:
    """Make the runs on disks that fail."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests/e2e/faults.c", "-ldl"], check=True
        )
        command = [sys.executable, "-m", "tests.e2e.faults", str(FAULTS)]
        environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    if "--run" in sys.argv:
        run()
    print(page(), end="")
