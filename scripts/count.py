"""Print how much there is to carry: lines, words, rooms and the imports between them.

    python -m scripts.count

A room is a folder or a file of `trainer/`, or a folder beside it. An arrow is a pair of rooms of which one imports the
other.
"""

import ast
import signal
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("trainer", "bench", "scripts")


def room_of(path: Path) -> str:
    first, *rest = path.relative_to(ROOT).parts
    return Path(rest[0]).stem if first == "trainer" else first


def imported_by(path: Path) -> Iterator[str]:
    """Return every name that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")] + [ROOT / "train.py"]
    room = {".".join(path.relative_to(ROOT).with_suffix("").parts): room_of(path) for path in files}
    found = set()
    for path in files:
        for name in imported_by(path):
            module = name if name in room else name.rpartition(".")[0]
            if module in room and room[module] != room_of(path):
                found.add((room_of(path), room[module]))
    return found


def lines(folder: str) -> int:
    return sum(path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py"))


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head -1` ends it without an error
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    between = arrows()
    print(f"trainer  {lines('trainer'):>6,} lines")
    print(f"tests    {lines('tests'):>6,} lines")
    print(f"docs     {sum(len(page.read_text().split()) for page in pages):>6,} words, with README.md")
    print(f"rooms    {len({room for arrow in between for room in arrow}):>6}")
    print(f"arrows   {len(between):>6}")


if __name__ == "__main__":
    main()
