"""The word problems of SVAMP as its paper uses them: MAWPS and ASDiv-A to train on, the 1,000 of SVAMP held out.

git clone https://github.com/arkilpatel/SVAMP
python bench/svamp.py SVAMP svamp       writes svamp/train.jsonl and svamp/test.jsonl

The training problems have placeholders for their numbers and an equation in prefix notation, which becomes a line such
as `3 * (9 - 7) = 6` before the answer. Of questions that are repeated, the first is kept.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

Record = dict[str, str]
TRAINING = "data/mawps-asdiv-a_svamp/train.csv"


def number(text: str) -> str:
    return f"{float(text):.10g}"


def infix(prefix: str) -> str:
    """Return `* 3 - 9 7` as `3 * (9 - 7)`."""
    stack: list[str] = []
    for token in reversed(prefix.split()):
        if token not in ("+", "-", "*", "/"):
            stack.append(token)
            continue
        left, right = (f"({part})" if " " in part else part for part in (stack.pop(), stack.pop()))
        stack.append(f"{left} {token} {right}")
    return stack.pop()


def training_record(row: Mapping[str, str]) -> Record:
    values = [number(value) for value in row["Numbers"].split()]

    def filled(text: str) -> str:
        return re.sub(r"\bnumber(\d+)", lambda found: values[int(found[1])], text)

    question = re.sub(r" (?=[.,?%;:'])", "", filled(row["Question"]).replace("$ ", "$"))
    answer = number(row["Answer"])
    return {"question": question, "answer": f"{infix(filled(row['Equation']))} = {answer}\n#### {answer}"}


def training_records(clone: Path) -> Iterator[Record]:
    seen = set()
    with (clone / TRAINING).open(encoding="utf-8", newline="") as file:
        for record in map(training_record, csv.DictReader(file)):
            letters = "".join(filter(str.isalnum, record["question"].lower()))
            if letters not in seen:
                seen.add(letters)
                yield record


def held_out_records(clone: Path) -> Iterator[Record]:
    for row in json.loads((clone / "SVAMP.json").read_text(encoding="utf-8")):
        question = f"{row['Body'].strip().removesuffix('.')}. {row['Question'].strip()}".replace("$ ", "$")
        yield {"question": question, "answer": number(row["Answer"])}


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    clone, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for split, records in (("train", training_records(clone)), ("test", held_out_records(clone))):
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(lines):,}")


if __name__ == "__main__":
    main()
