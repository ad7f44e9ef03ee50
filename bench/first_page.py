"""Draw the pictures of README.md, for light and for dark pages: a run on a terminal, and its curve beside TRL's.

    octet train --preset nano run.dir=runs/demo
    python bench/first_page.py runs/demo

The curve is that of bench/report.py in other colours.
"""

import io
import re
import sys
from pathlib import Path

from rich.terminal_theme import TerminalTheme

from trainer.machine.console import Console
from trainer.reports import terminal
from trainer.run_folder.reader import read_run

DOCS = Path(__file__).parent.parent / "docs"
CURVE = DOCS / "vs_trl_seconds.svg"
PAPER = {"light": ("#ffffff", "#222222"), "dark": ("#0d1117", "#e6edf3")}  # page and ink, those of GitHub
SIDES = {"trl": "TRL", "octet": "Octet, training on every group as TRL does", "octet, dropping": "Octet as it is"}
WIDTH = 92
# Those of GitHub for black, red, green, yellow, blue, magenta and cyan.
COLOURS = {
    "light": "222222 cf222e 1a7f37 9a6700 3b82c4 8250df 1b7c83",
    "dark": "6e7681 f85149 3fb950 d29922 58a6ff bc8cff 39c5cf",
}


def of_terminal(folder: Path, name: str) -> str:
    """Return the panel of `octet watch`. Fonts are those of the reader: a picture on a page loads nothing."""
    page, ink = (_bytes(colour[1:]) for colour in PAPER[name])
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(terminal.shown([read_run(folder)], console))
    theme = TerminalTheme(page, ink, [*map(_bytes, COLOURS[name].split()), _bytes("6e7681")], None)
    drawn = console.export_svg(title=f"octet watch {folder}", theme=theme, unique_id=name)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def _bytes(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour)
    return red, green, blue


def of_curve(name: str) -> str:
    page, ink = PAPER[name]
    drawn = CURVE.read_text().replace('color="#222222"', f'color="{ink}"').replace('fill="#fff"', f'fill="{page}"')
    for side, shown in SIDES.items():
        drawn = drawn.replace(f">{side}</text>", f">{shown}</text>")
    return drawn


def main() -> None:
    if "--help" in sys.argv:
        sys.exit(__doc__)
    for name in PAPER:
        (DOCS / f"first_curve_{name}.svg").write_text(of_curve(name))
        if len(sys.argv) > 1:
            (DOCS / f"first_run_{name}.svg").write_text(of_terminal(Path(sys.argv[1]), name))


if __name__ == "__main__":
    main()
