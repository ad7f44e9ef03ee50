"""The table "Where is ...?" of docs/architecture.md, and the command that counts rooms and imports."""

import ast
import re

from scripts.count import arrows
from tests.conftest import ROOT

ROW = re.compile(r"^\| [^|]+ \| `([^`|]+)` \| `([^`|]+)` \|$", flags=re.MULTILINE)


def names_in(source: str) -> set[str]:
    """Return what a file defines: functions, classes, `Class.method`s and assigned names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_what_the_table_names_is_there():
    rows = ROW.findall((ROOT / "docs/architecture.md").read_text())
    assert len(rows) >= 30
    missing = [
        (file, name)
        for file, name in rows
        if not (ROOT / "trainer" / file).is_file() or name not in names_in((ROOT / "trainer" / file).read_text())
    ]
    assert missing == []


def test_arrows_are_counted_from_the_importing_room():
    found = arrows()
    assert ("loop", "step") in found
    assert ("step", "loop") not in found
    assert not [pair for pair in found if pair[0] == pair[1]]
