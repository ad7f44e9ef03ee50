"""Generate docs/reliability.md from scripts/reliability.md and from results:

python -m scripts.make_reliability_page > docs/reliability.md          from the results in bench/results/
python -m scripts.make_reliability_page --run > docs/reliability.md    the same, with new runs on disks that fail

`bash tests/chaos.sh` makes the other results, those of runs that are killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.machine.shipped import ROOT

TEXT = ROOT / "scripts/reliability.md"
KILLED = ROOT / "bench/results/chaos.json"
FAULTS = ROOT / "bench/results/reliability.json"


def page() -> str:
    found = json.loads(FAULTS.read_text())
    packages = ", ".join(f"{name} {version}" for name, version in found["machine"]["packages"].items())
    made = f"Made with {packages} on {found['machine']['cores']} cores ({found['machine']['processor']})."
    starts = "".join(map(_start, found["starts"]))
    return TEXT.read_text().replace("{killed}", _killed()).replace("{faults}", starts).replace("{made}", made)


def _killed() -> str:
    rows = json.loads(KILLED.read_text())["rows"] if KILLED.is_file() else []
    return "".join(f"| {row['run']} | {row['kills']} | {row['outcome']} |\n" for row in rows)


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
