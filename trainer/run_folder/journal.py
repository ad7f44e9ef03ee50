"""The records of a run: `metrics.jsonl`, `samples.jsonl` and TensorBoard. Only rank 0 writes them."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from sys import intern
from textwrap import indent
from typing import Any

from trainer.errors import DataError
from trainer.machine import disk
from trainer.machine.safe_text import visible
from trainer.records import ScoredGroup
from trainer.watch.trackers import Tracker, tracked_name

SAMPLED_GROUPS = 2  # per step in samples.jsonl
TRACKED = 4  # answers of each of these groups that a tracker gets
FILES = ("metrics.jsonl", "samples.jsonl")
VERDICT = "verdict.json"  # of a run that has ended


class Journal:
    """Appends records. When a run resumes at `first_step`, the records of later steps are dropped, and damaged ones are
    moved to another file, because no checkpoint depends on them. The verdict is deleted until the run ends again."""

    def __init__(self, folder: Path, first_step: int, tracker: Tracker | None = None) -> None:
        self.folder = folder
        self.tracker = tracker
        self._board: Any = None
        self._without_board = False
        (folder / VERDICT).unlink(missing_ok=True)
        for name in FILES:
            _keep_before(folder / name, first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", {"step": step, **values})
        self._draw(step, values)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values to the record of the step, which is the last line, or append one if that line was lost."""
        path = self.folder / "metrics.jsonl"
        lines = [*lines_of(path)]
        if lines and (last := json.loads(lines[-1]))["step"] == step:
            disk.replace(path, b"".join([*lines[:-1], _line(last | values)]))
        else:
            self._append(path.name, {"step": step, **values})
        self._draw(step, values)

    def samples(self, step: int, groups: Iterable[ScoredGroup]) -> None:
        for number, group in enumerate(list(groups)[:SAMPLED_GROUPS]):
            self._on_board("add_text", f"answer {number + 1}", _as_markdown(group), step)
            problem = group.prompt.problem
            asked = {"step": step, "problem": problem.id, "prompt": group.prompt.text, "gold": problem.gold}
            for one, score in zip(group.completions, group.scores, strict=True):
                written = {"completion": one.text, **one.transcript, "truncated": one.truncated, "version": one.version}
                read = {"strict": score.strict, "lenient": score.lenient, "reward": score.reward}
                parts = {f"reward/{name}": value for name, value in score.components.items()}
                self._append("samples.jsonl", {**asked, **written, **read, **parts})

    def tracked_answers(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Send some of the answers in samples.jsonl to the tracker, with their rewards."""
        shown = [
            (group.prompt.problem.question, "\n".join(turn.text for turn in one.turns) or one.text, score)
            for group in groups[:SAMPLED_GROUPS]
            for one, score in list(zip(group.completions, group.scores, strict=True))[:TRACKED]
        ]
        names = [*dict.fromkeys(name for *_, score in shown for name in score.components)]
        rows: list[list[Any]] = []
        for *texts, score in shown:
            code = [indent(visible(text), "    ", lambda line: True) for text in texts]  # trackio reads it as Markdown
            rows.append([*code, score.reward, *map(score.components.get, names)])
        if rows and self.tracker:
            self.tracker.answers(step, ["question", "answer", "reward", *(f"reward/{name}" for name in names)], rows)

    def sync(self) -> None:
        """Sync all records to disk, so that a checkpoint never has more steps than the log."""
        for name in FILES:
            if (self.folder / name).is_file():
                disk.keep(self.folder / name)

    def close(self) -> None:
        if self._board is not None:
            self._on_board("close")
        if self.tracker:
            self.tracker.close()

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        named = {tracked_name(name): value for name, value in values.items()}
        for name, value in named.items():
            self._on_board("add_scalar", name, value, step)
        if self.tracker:
            self.tracker.log(step, named)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        path = self.folder / name
        with disk.naming(path), open(path, "ab", opener=disk.not_a_link) as file:
            file.write(_line(record))

    def _on_board(self, method: str, *values: Any) -> None:
        """Call a method of TensorBoard's writer. If its files cannot be written, the run continues without them."""
        if self._without_board:
            return
        try:
            if self._board is None:  # imported late, because the import takes longer than a step
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.folder / "tensorboard"))
            getattr(self._board, method)(*values)
        except OSError as error:
            self._without_board = True
            warn(f"{self.folder}/tensorboard cannot be written ({error.strerror}). metrics.jsonl has all metrics")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without an incomplete last line. Raise DataError if a line is damaged."""
    records = []
    for number, line in enumerate(lines_of(path), 1):
        try:
            records += [_parsed(line)] if line.endswith(b"\n") else []
        except ValueError as error:
            raise DataError(f"{path}, line {number}", str(error), "Repair or delete that line") from None
    return records


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the record in a line, with interned names. Raise ValueError if the line is not a record."""
    try:
        record = disk.parsed(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if isinstance(record, dict) and type(record.get("step")) is int and record["step"] >= 0:
        return {intern(name): value for name, value in record.items()}
    raise ValueError("it is not the record of a step")


def _keep_before(path: Path, first_step: int) -> None:
    """Drop the records of steps that will be repeated, and move damaged lines to a file beside the log."""
    lines = [*lines_of(path)]
    kept, damaged = [], {}
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            step = _parsed(line)["step"]
        except ValueError:
            damaged[number] = line
        else:
            kept += [line] if 0 < first_step >= step else []
    if damaged:
        aside = path.with_suffix(".damaged")
        with open(aside, "ab", opener=disk.not_a_link) as file:
            file.writelines(damaged.values())
        warn(f"{path}: line {', '.join(map(str, damaged))} is damaged and was moved to {aside.name}")
    if kept != lines:
        disk.replace(path, b"".join(kept))


def warn(text: str) -> None:
    print(f"octet: warning: {visible(text)[:1000]}.", file=sys.stderr, flush=True)


def lines_of(path: Path, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file from byte `start` on, or none if there is no file."""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(start)
            yield from file


def _as_markdown(group: ScoredGroup) -> str:
    """Return the first answer of a group for TensorBoard, as blocks of code, so that nothing in it becomes markup."""
    completion, score, problem = group.completions[0], group.scores[0], group.prompt.problem
    result = f"reward {score.reward}, read {score.strict!r}, the answer is {problem.gold!r}"
    turns = [turn.text for turn in completion.turns] or [completion.text]
    texts = (visible(text) for text in (group.prompt.text, *turns, result))
    return "\n\n---\n\n".join(indent(text, "    ", lambda line: True) for text in texts)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
