"""What a run writes down: `metrics.jsonl`, `samples.jsonl` and TensorBoard. Only rank 0 keeps one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.types import ScoredGroup

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
        """Into the line of its step, which is the last one."""
        path = self.folder / "metrics.jsonl"
        *before, last = path.read_text(encoding="utf-8").splitlines(keepends=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join([*before, _line(json.loads(last) | values)]), encoding="utf-8")
        partial.replace(path)  # whole or not at all
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
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first_step]
    path.write_text("".join(kept), encoding="utf-8")
