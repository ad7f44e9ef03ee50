"""The problems of GSM8K with few steps in their solutions, as a folder for `task.data_dir`.

python bench/short_gsm8k.py GSM8K FOLDER         at most two steps: 1,937 problems to train on, and 321 held out
python bench/short_gsm8k.py GSM8K FOLDER 3       at most three
python bench/short_gsm8k.py GSM8K FOLDER 3 equations

GSM8K is a folder with train.jsonl and test.jsonl, or `hub`. A step is a line of the solution with an annotation such as
<<48/2=24>>; a solution with lines or annotations beyond the limit, or without any annotation, is left out. With
`equations`, a solution becomes its annotations, a line each; the last 256 training problems go into valid.jsonl, to
choose settings by, and all 1,319 test problems are held out.
"""

import json
import re
import sys
from pathlib import Path

STEPS = 2
VALID = 256


def is_short(line: str, most: int) -> bool:
    """Return True if the solution of this record has at most so many steps."""
    solution = json.loads(line)["answer"].rpartition("\n####")[0].strip()
    return 1 <= solution.count("<<") <= most and len(solution.splitlines()) <= most


def in_equations(line: str) -> str:
    """Return the record with a solution of nothing but equations."""
    record = json.loads(line)
    steps = re.findall(r"<<(.*?)>>", record["answer"])
    _, mark, result = record["answer"].rpartition("####")
    return json.dumps({"question": record["question"], "answer": "\n".join([*steps, mark + result])})


def lines_of(source: str, split: str) -> list[str]:
    if source != "hub":
        return (Path(source) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    from datasets import load_dataset

    return [json.dumps(record) for record in load_dataset("openai/gsm8k", "main", split=split)]


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    source, folder = sys.argv[1], Path(sys.argv[2])
    most = int(sys.argv[3]) if sys.argv[3:] else STEPS
    equations = sys.argv[4:] == ["equations"]
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {}
    for split in ("train", "test"):
        lines = lines_of(source, split)
        parts[split] = [line for line in lines if is_short(line, most) or (equations and split == "test")]
    if equations:
        parts = {split: [in_equations(line) for line in lines] for split, lines in parts.items()}
        parts["train"], parts["valid"] = parts["train"][:-VALID], parts["train"][-VALID:]
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{name}: {len(lines):,}")


if __name__ == "__main__":
    main()
