"""How many programs a second the sandbox runs: `python bench/sandbox.py`.

Short programs, one more side by side than there are cores, in four ways: a program that reads and prints; a function
with three assertions, which takes two processes; the first beside one that hangs, again and again; and the first by a
fresh interpreter without any walls, which is what the warm process saves. CPU time is that of all processes.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from machine import describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.machine import threads  # noqa: E402  the checkout, installed or not
from trainer.sandbox.confine import Limits  # noqa: E402
from trainer.sandbox.pool import Sandbox  # noqa: E402

RESULTS = ROOT / "bench/results/sandbox.json"
SOURCE = "numbers = list(map(int, input().split()))\nprint(sum(numbers) // len(numbers))"
FUNCTION = "def mean(numbers):\n    return sum(numbers) // len(numbers)"
TESTS = "assert mean([1, 2, 3]) == 2\nassert mean([5]) == 5\nassert mean([1, 8]) == 4"
GIVEN, PRINTED = b"1 2 3", b"2\n"
HANG_S = 1.0


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(run: Callable[[Sandbox], bool], programs: int, at_once: int) -> dict[str, float]:
    before, sandbox = cpu(), Sandbox(Limits())
    run(sandbox)
    began = time.perf_counter()
    right = [good for _, good in threads.each([lambda: run(sandbox)] * programs, at_once)]
    seconds = time.perf_counter() - began
    sandbox.close()  # only then is the time of its processes known
    assert all(right)
    return {"per_second": round(programs / seconds, 1), "cpu_ms": round(1000 * (cpu() - before) / programs, 2)}


def program(sandbox: Sandbox) -> bool:
    return sandbox.run(SOURCE, GIVEN).output == PRINTED


def function(sandbox: Sandbox) -> bool:
    return sandbox.judge(FUNCTION, TESTS, "mean").passed == 3


def fresh(sandbox: Sandbox) -> bool:
    command = [sys.executable, "-I", "-c", SOURCE]
    return subprocess.run(command, input=GIVEN, capture_output=True, check=True).stdout == PRINTED


def beside_a_hang(programs: int, at_once: int) -> dict[str, float]:
    """Measure programs while another one hangs until its deadline, is ended, and is started again."""
    with Sandbox(Limits()) as sandbox:
        stop, hangs = threading.Event(), 0

        def hang() -> None:
            nonlocal hangs
            while not stop.is_set():
                hangs += sandbox.run("import time\ntime.sleep(600)", b"", HANG_S).timed_out

        hanging = threading.Thread(target=hang)
        hanging.start()
        began = time.perf_counter()
        assert all(good for _, good in threads.each([lambda: program(sandbox)] * programs, at_once))
        seconds = time.perf_counter() - began
        stop.set()
        hanging.join()
    return {"per_second": round(programs / seconds, 1), "hangs": hangs}


def repeated(run: Callable[[], dict[str, float]], repetitions: int) -> dict[str, float]:
    runs = [run() for _ in range(repetitions)]
    middle = {name: round(statistics.median(one[name] for one in runs), 2) for name in runs[0]}
    return {
        **middle,
        "slowest": min(one["per_second"] for one in runs),
        "fastest": max(one["per_second"] for one in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    at_once = len(os.sched_getaffinity(0)) + 1  # as the reward does
    with Sandbox(Limits()) as sandbox:
        held = str(sandbox.held)
    results = {
        "a program": repeated(lambda: measure(program, args.programs, at_once), args.repetitions),
        "a function with three assertions": repeated(
            lambda: measure(function, args.programs, at_once), args.repetitions
        ),
        "a program, beside one that hangs": repeated(lambda: beside_a_hang(args.programs, at_once), args.repetitions),
        "a program by a fresh Python": repeated(lambda: measure(fresh, args.programs // 4, at_once), args.repetitions),
    }
    for name, result in results.items():
        cost = f"   {result['cpu_ms']:.2f} ms of CPU time" if "cpu_ms" in result else ""
        print(f"{name:34} {result['per_second']:>6} a second ({result['slowest']} to {result['fastest']}){cost}")
    document = {
        "what": "programs a second on all cores, and CPU time for each over all processes; medians",
        "machine": {**describe(), "kernel": platform.release(), "load": os.getloadavg()[0]},
        "held_in_by": held,
        "programs": args.programs,
        "at_once": at_once,
        "repetitions": args.repetitions,
        "results": results,
    }
    args.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
