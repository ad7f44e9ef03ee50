"""The problems of GSM8K with few steps in their solutions, as a folder for `task.data_dir`.

python bench/short_gsm8k.py GSM8K FOLDER         at most two steps: 1,937 problems to train on, and 321 held out
python bench/short_gsm8k.py GSM8K FOLDER 3       at most three

GSM8K is a folder with train.jsonl and test.jsonl. A step is a line of the solution with an annotation such as
<<48/2=24>>; a solution with lines or annotations beyond the limit, or without any annotation, is left out.
"""

import json
import sys
from pathlib import Path

STEPS = 2


def is_short(line: str, most: int) -> bool:
    """Return True if the solution of this record has at most so many steps."""
    solution = json.loads(line)["answer"].rpartition("\n####")[0].strip()
    return 1 <= solution.count("<<") <= most and len(solution.splitlines()) <= most


def main() -> None:
    source, folder = map(Path, sys.argv[1:3])
    most = int(sys.argv[3]) if sys.argv[3:] else STEPS
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = (source / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        short = [line for line in lines if is_short(line, most)]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in short), encoding="utf-8")
        print(f"{split}: {len(short):,} of {len(lines):,}")


if __name__ == "__main__":
    main()
