"""How fast answers are found and compared: `python bench/answers.py --json`.

Every solution of GSM8K is written as a model would, in four ways; one score is `strict`, `lenient` and `equal` of both.
One core, median of several repetitions. GSM8K is read from $OCTET_GSM8K, or from ../shared/gsm8k beside the project.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.answers import compare, find  # noqa: E402  the checkout, installed or not
from trainer.machine.hardware import processor  # noqa: E402

RESULTS = ROOT / "bench/results/answers.json"
SHAPES: dict[str, Callable[[str, str], str]] = {
    "asked for: #### 18": lambda work, gold: f"{work}\n#### {gold}",
    "\\boxed{18}": lambda work, gold: f"{work}\nSo the final answer is $\\boxed{{{gold}}}$.",
    "The answer is $18.": lambda work, gold: f"{work}\nThe answer is ${gold}.",
    "last number": lambda work, gold: f"{work}\nSo that makes **{gold}** dollars in total.",
}


def solutions() -> list[tuple[str, str]]:
    folder = Path(os.environ.get("OCTET_GSM8K", ROOT.parent / "shared/gsm8k"))
    lines = [line for split in ("train", "test") for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
    parts = [json.loads(line)["answer"].rpartition("\n####") for line in lines]
    return [(work, gold.strip()) for work, _, gold in parts]


def seconds_to_score(texts: list[tuple[str, str]]) -> tuple[float, int]:
    start, right = time.perf_counter(), 0
    for text, gold in texts:
        strict, lenient = find.strict(text, "gsm8k", gold), find.lenient(text, gold)
        right += strict is not None and compare.equal(strict, gold)
        right += lenient is not None and compare.equal(lenient, gold)
    return time.perf_counter() - start, right


def measure(texts: list[tuple[str, str]], repetitions: int) -> dict[str, float]:
    runs = [seconds_to_score(texts) for _ in range(repetitions)]
    rates = [len(texts) / seconds for seconds, _ in runs]
    return {
        "texts": len(texts),
        "right": runs[0][1],
        "per_second": round(statistics.median(rates)),
        "slowest": round(min(rates)),
        "fastest": round(max(rates)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()

    by_shape = {name: [(shape(work, gold), gold) for work, gold in solutions()] for name, shape in SHAPES.items()}
    rates = {name: measure(texts, args.repetitions) for name, texts in by_shape.items()}
    rates["all four"] = measure([text for texts in by_shape.values() for text in texts], args.repetitions)
    for name, rate in rates.items():
        print(f"{name:24} {rate['per_second']:>8,} a second   ({rate['slowest']:,} to {rate['fastest']:,})")
    if args.json:
        result = {
            "what": "strict + lenient + equal of both, answers a second on one core, median",
            "command": "python bench/answers.py " + " ".join(sys.argv[1:]),
            "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
            "versions": {"python": platform.python_version()},
            "repetitions": args.repetitions,
            "results": rates,
        }
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
