"""What a run writes down: `metrics.jsonl`, `samples.jsonl` and TensorBoard. Only rank 0 keeps one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.records import ScoredGroup

SAMPLED_GROUPS = 2  # groups of each step that go into samples.jsonl: enough to read along, small enough to keep


class Journal:
    """Appends as it goes. A run that resumes at `first_step` drops what an earlier try wrote from there on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.folder = folder
        self._board: Any = None
        for name in ("metrics.jsonl", "samples.jsonl"):
            _keep_before(folder / name, first_step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", {"step": step, **values})
        self._draw(step, values)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Into the line of its step, which is the last one; into one of its own if that was lost."""
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
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def _tensorboard(self) -> Any:
        if self._board is None:  # imported with the first metrics: the import takes longer than a step
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder / "tensorboard"))
        return self._board


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _keep_before(path: Path, first_step: int) -> None:
    """Drop the lines of steps that will be done again, and a last line that a crash cut short."""
    lines = _lines(path)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first_step]
    if kept != lines:
        _replace(path, kept)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="\n") as file:  # a model may write other ends of lines: no splitlines()
        return list(file)


def _replace(path: Path, lines: Iterable[str]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
