"""Write tables as CSV and LaTeX."""

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

WORDS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL = str.maketrans(WORDS | {character: f"\\{character}" for character in "&%$#_{}"})


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return records as lines of CSV below a header with their keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys(chain.from_iterable(rows))], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def as_latex(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a tabular below a comment with its title."""
    lines = [" & ".join(cell.translate(SPECIAL) for cell in row) + r" \\" for row in [head, *rows]]
    lines[0] += r" \hline"
    return "\n".join([f"% {title}", rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", *lines, r"\end{tabular}"])
