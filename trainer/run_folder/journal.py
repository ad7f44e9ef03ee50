"""The records of a run: `metrics.jsonl`, `samples.jsonl` and TensorBoard. Only rank 0 writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.records import ScoredGroup

SAMPLED_GROUPS = 2  # per step in samples.jsonl


class Journal:
    """Appends records. A run that resumes at `first_step` first drops the records of later steps."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.folder = folder
        self._board: Any = None
        for name in ("metrics.jsonl", "samples.jsonl"):
            _keep_before(folder / name, first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", {"step": step, **values})
        self._draw(step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values to the record of the step, which is the last line, or append one if that line was lost."""
        path = self.folder / "metrics.jsonl"
        lines = _lines(path)
        if lines and (last := json.loads(lines[-1]))["step"] == step:
            _replace(path, [*lines[:-1], _line(last | values)])
        else:
            self._append(path.name, {"step": step, **values})
        self._draw(step, values)

    def samples(self, step: int, groups: Iterable[ScoredGroup]) -> None:
        for group in list(groups)[:SAMPLED_GROUPS]:
            for completion, score in zip(group.completions, group.scores, strict=True):
                self._append(
                    "samples.jsonl",
                    {
                        "step": step,
                        "problem": group.prompt.problem.id,
                        "prompt": group.prompt.text,
                        "gold": group.prompt.problem.gold,
                        "completion": completion.text,
                        "truncated": completion.truncated,
                        "version": completion.version,
                        "strict": score.strict,
                        "lenient": score.lenient,
                        "reward": score.reward,
                        **{f"reward/{name}": value for name, value in score.components.items()},
                    },
                )

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._tensorboard().add_scalar(name, value, step)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(_line(record))

    def _tensorboard(self) -> Any:
        if self._board is None:  # not at the start: the import takes longer than a step
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"))
        return self._board


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, one per line; none if there is no file. Raise DataError if a line is damaged, but
    ignore a last line that a crash cut short."""
    return [_record(path, number, line) for number, line in enumerate(_lines(path), 1) if line.endswith(b"\n")]


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: it is not JSON ({error}). Repair or delete that line.") from None
    if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
        raise DataError(f"{path}, line {number}: it is not the record of a step. Repair or delete that line.")
    return record


def _keep_before(path: Path, first_step: int) -> None:
    """Drop the records of steps that will be done again, all if the run begins again, and a last line that was cut."""
    lines = _lines(path)
    kept = [line for line, record in zip(lines, read_records(path)) if first_step and record["step"] <= first_step]
    if kept != lines:
        _replace(path, kept)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the file as a whole, so that a crash leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(lines))
    partial.replace(path)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
