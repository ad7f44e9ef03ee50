"""Check the results of `octet speedrun` in gallery/speedrun/, and write the table of gallery/speedrun.md.

    python -m scripts.make_speedrun_page           # writes
    python -m scripts.make_speedrun_page --check   # writes nothing; status 1 if a file or the page is wrong

The names of the files are chosen by whoever adds them. A file with a key that is not below is refused, so that nothing
is published by accident.
"""

import json
import re
import sys
from typing import Any

from scripts.count import ROOT
from trainer.commands.speedrun import COLUMNS, FREE, GOAL, row_of

FOLDER = ROOT / "gallery/speedrun"
PAGE = ROOT / "gallery/speedrun.md"
KINDS: dict[str, type | tuple[type, ...]] = {"cpu_seconds": (int, float), "wall_seconds": (int, float), "steps": int}
KINDS |= {"answers": int, "accuracy": float, "settings": list, "processor": str, "cores": int, "system": str}
KINDS |= {"date": str, "made_with": dict}
MADE_WITH = {"base weights", "octet-grpo", "torch", "deepspeed", "transformers", "peft", "python", "git revision"}
MADE_WITH |= {"ranks", "threads", "device"}
WEIGHTS = "f03522c01f4258ba"  # of the embedded model: a race with another one is another race


def wrong_in(result: dict[str, Any]) -> list[str]:
    """Return what is wrong in a result, in words."""
    if apart := result.keys() ^ KINDS.keys():
        return [f"keys that are missing or too many: {', '.join(sorted(apart))}"]
    if others := [name for name, kind in KINDS.items() if not isinstance(result[name], kind)]:
        return [f"values of another kind: {', '.join(others)}"]
    settings, made = result["settings"], result["made_with"]
    said = [*settings, *map(str, made.values()), result["system"]]
    checks = {
        f"made_with has other keys: {', '.join(sorted(made.keys() ^ MADE_WITH))}": made.keys() == MADE_WITH,
        "the base weights are not those of the embedded model": made.get("base weights") == WEIGHTS,
        f"the accuracy is below {GOAL}": result["accuracy"] >= GOAL,
        "a setting is not free": all(re.fullmatch(FREE, one.partition("=")[0]) for one in settings),
        "a text looks like a path": not any(set("/\\~") & set(text) for text in said),
        "a number is not above zero": min(result["cpu_seconds"], result["wall_seconds"], result["steps"]) > 0,
        "the date is not like 2026-11-25": bool(re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])),
    }
    return [what for what, holds in checks.items() if not holds]


def table() -> str:
    """Return the table of all results, the fewest CPU seconds first. Raise ValueError for a file that is wrong."""
    results = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    for name, result in results.items():
        if wrong := wrong_in(result):
            raise ValueError(f"{name}: {'; '.join(wrong)}")
    ranked = sorted(results.values(), key=lambda result: result["cpu_seconds"])
    heads = "| --- " * (COLUMNS.count("|") - 1) + "|"
    return "\n".join([COLUMNS, heads, *map(row_of, ranked)]) + "\n"


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(COLUMNS)
    return before + table() + "\n" + rest.partition("\n\n")[2]


def main() -> None:
    made = page()
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif PAGE.read_text() != made:
        sys.exit(f"{PAGE.name} is not what the files give: python -m scripts.make_speedrun_page")


if __name__ == "__main__":
    main()
