"""A console that prints every text literally, without markup or control characters; tables, and times in words."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from rich import console
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.segment import Segment
from rich.table import Table

from trainer.machine.safe_text import visible

GAP = 3  # characters between the columns of a table


class Console(console.Console):
    """Prints texts and tables. `wide` is the width in characters if the output is no terminal."""

    def __init__(self, wide: int | None = None, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if (wide and not self.is_terminal) or not self.width:  # COLUMNS=0, with which rich prints nothing
            self.width = wide or 80

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def print(self, *texts: Any, **options: Any) -> None:
        """Print texts. In a text file, leave out the blanks with which rich fills the lines of a table."""
        if self.is_terminal or self.is_jupyter:
            super().print(*texts, **options)
            return
        with self.capture() as printed:
            super().print(*texts, **options)
        self.file.write(re.sub(" +$", "", printed.get(), flags=re.MULTILINE))
        self.file.flush()

    def on_broken_pipe(self) -> None:
        """Leave the error to `exits.answering_errors`; rich would exit with status 1 and no message."""
        raise BrokenPipeError


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[str] = (), title: str = "") -> Table:
    """Return a table of numbers, except for the first column and those in `texts`. Only the latter wrap."""
    grid = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, head in enumerate(heads):
        justify: Literal["left", "right"] = "right" if index and head not in texts else "left"
        grid.add_column(head, justify=justify, no_wrap=head not in texts, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def folded(
    heads: Sequence[str], rows: Iterable[Sequence[str]], width: int, texts: Collection[str] = (), title: str = ""
) -> Iterator[Table]:
    """Yield one table, or if it is too wide several, each with the first column and some of the others."""
    first, *others = ([head, *cells] for head, *cells in zip(heads, *rows, strict=True))
    while others:
        shown = [first, others.pop(0)]
        while others and sum(max(map(cell_len, column)) + GAP for column in [*shown, others[0]]) <= width:
            shown.append(others.pop(0))
        names, *cells = zip(*shown, strict=True)
        yield table(names, cells, texts, title)
        title = ""


def spoken(*hours: float) -> list[str]:
    """Return times in words, in the unit of the longest: 40 min, 2.5 h, 3 days."""
    units = ((48, 24, "days"), (1.5, 1, "h"), (0, 1 / 60, "min"))
    size, unit = next((size, unit) for least, size, unit in units if max(hours) >= least)
    numbers = (time / size for time in hours)
    return [f"{one:.0f} {unit}" if one >= 9.5 else f"{one:.1f}".removesuffix(".0") + f" {unit}" for one in numbers]


def until(hours: float) -> str:
    """Return the time of day or week at which a task of this length will end; "" if that is days away."""
    end = datetime.now() + timedelta(hours=hours)
    return f", until {end:%H:%M}" if hours < 12 else f", until {end:%A %H:%M}" if hours < 100 else ""
