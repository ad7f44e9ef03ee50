"""What a long run holds on to: resident memory, open files, threads and CPU time of a step, over thousands of steps.

python bench/soak.py --steps 2000 [--only NAME ...]

The steps are small (2 x 4 answers of at most 16 tokens of the embedded model), so that there are many. The process is
looked at from outside. `ahead` samples from a server (tests/e2e/vllm_double.py). The result has the medians of the
second and of the last quarter of the steps; the first quarter is warm-up.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from machine import describe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/soak.json"
FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
FEW += ["run.threads=1", "run.merge=false", "run.save_every=200", "eval.problems=8"]
REWARD = "def score(completions, **columns):\n    return [len(text) / 100 for text in completions]\n"
EVERY_S = 1.0


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as place, _server() as port:
        (Path(place) / "mine.py").write_text(REWARD)
        ahead = ["rollout.engine=vllm_server", f"rollout.vllm.urls=http://127.0.0.1:{port}", "rollout.ahead=1"]
        runs = {
            "plain": [],
            "evaluation every 50 steps": ["eval.every=50"],
            "a reward of one's own": [f"reward.custom={place}/mine.py:score"],
            "one step ahead, with a server": ahead,
        }
        found = list[dict[str, Any]]()
        for name in options.only or runs:
            found.append({"run": name, **soak(Path(place) / str(len(found)), options.steps, runs[name])})
            facts = {"machine": describe(), "steps": options.steps, "runs": found}
            options.out.write_text(json.dumps(facts, indent=1) + "\n")
            print(json.dumps(found[-1]), flush=True)


def soak(folder: Path, steps: int, settings: list[str]) -> dict[str, Any]:
    command = [sys.executable, "train.py", "--preset", "nano", *FEW, *settings]
    command += [f"run.steps={steps}", f"run.dir={folder}"]
    said = folder.with_suffix(".txt")
    with said.open("w") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as run:
        seen = list(_looks(psutil.Process(run.pid), run, folder / "metrics.jsonl"))
    assert run.returncode == 0, said.read_text()
    found = {name: _quarters(seen, name, steps) for name in ("memory_mb", "files", "threads")}
    second, last = _cpu(seen, steps // 4, steps // 2), _cpu(seen, 3 * steps // 4, steps - 1)
    return found | {"cpu_ms_per_step": {"second_quarter": second, "last_quarter": last}}


def _looks(process: psutil.Process, run: subprocess.Popen[bytes], log: Path) -> Iterator[dict[str, float]]:
    while run.poll() is None:
        step = _lines(log)
        if step:
            with process.oneshot():
                times = process.cpu_times()
                yield {
                    "step": step,
                    "memory_mb": process.memory_info().rss / 1e6,
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "cpu_s": times.user + times.system,
                }
        time.sleep(EVERY_S)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _quarters(seen: list[dict[str, float]], name: str, steps: int) -> dict[str, float]:
    second = [one[name] for one in seen if steps // 4 <= one["step"] < steps // 2] or [seen[0][name]]
    last = [one[name] for one in seen if 3 * steps // 4 <= one["step"] < steps] or [seen[-1][name]]
    return {"second_quarter": round(median(second), 1), "last_quarter": round(median(last), 1)}


def _cpu(seen: list[dict[str, float]], first: int, last: int) -> float:
    inside = [one for one in seen if first <= one["step"] <= last] or seen
    steps = inside[-1]["step"] - inside[0]["step"] or 1
    return round((inside[-1]["cpu_s"] - inside[0]["cpu_s"]) / steps * 1000, 1)


@contextmanager
def _server() -> Iterator[int]:
    sys.path.insert(0, str(ROOT))
    from trainer.machine.hardware import free_port

    port = free_port()
    command = [sys.executable, "-m", "tests.e2e.vllm_double", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet) as server:
        try:
            yield port
        finally:
            server.kill()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="*", help="names of runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
