"""A console on which every text is shown as it is: nothing in it is markup, and nothing in it acts on the terminal."""

from collections.abc import Iterator
from typing import Any

from rich import console
from rich.segment import Segment

from trainer.machine.visible import visible


class Console(console.Console):
    """Prints texts and tables. `wide` is the number of columns where there is no terminal."""

    def __init__(self, wide: int | None = None, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if wide and not self.is_terminal:
            self.width = wide

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> None:
        """Leave it to `exits.answering_errors`, where rich would end the program with status 1 and no word."""
        raise BrokenPipeError
