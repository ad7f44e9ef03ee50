"""GSM8K: 7,473 training and 1,319 test problems, from the hub or from `train.jsonl` and `test.jsonl` in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.types import Problem

_CALCULATOR = re.compile(r"<<[^>]*>>")


class Gsm8kTask:
    name = "gsm8k"
    prompt_style = "gsm8k"
    answer_style = "gsm8k"

    def __init__(self, data_dir: Path | None = None) -> None:
        self.data_dir = data_dir

    def train(self) -> list[Problem]:
        return self._problems("train")

    def test(self) -> list[Problem]:
        return self._problems("test")

    def _problems(self, split: str) -> list[Problem]:
        records = _from_hub(split) if self.data_dir is None else _from_file(self.data_dir / f"{split}.jsonl")
        return [_problem(f"gsm8k/{split}/{index}", where, record) for index, (where, record) in enumerate(records)]


def _problem(name: str, where: str, record: dict[str, Any]) -> Problem:
    for column in ("question", "answer"):
        if not isinstance(record.get(column), str) or not record[column].strip():
            raise DataError(f"{where}: `{column}` is missing or empty. GSM8K has the columns `question` and `answer`.")
    solution, marker, gold = record["answer"].rpartition("####")
    if not marker or not gold.strip():
        raise DataError(f"{where}: `answer` has no `#### <number>` at its end.")
    gold = gold.strip()
    return Problem(name, record["question"].strip(), gold, f"{_CALCULATOR.sub('', solution).strip()}\n#### {gold}")


def _from_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise DataError(f"task.data_dir={path.parent}: there is no {path.name} in it.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected an object with `question` and `answer`.")
            yield f"{path}:{number}", record


def _from_hub(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    try:
        records = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except (
        OSError,
        ValueError,
    ) as error:  # ConnectionError is an OSError; not in the cache while offline, a ValueError
        raise DataError(
            f"task.name=gsm8k: openai/gsm8k cannot be had from the hub ({type(error).__name__}). "
            "Connect to the internet once, or write task.data_dir=FOLDER with train.jsonl and test.jsonl."
        ) from None
    for index, record in enumerate(records):
        yield f"openai/gsm8k {split}[{index}]", dict(record)
