"""docs/configuration.md from the configuration itself: `python -m trainer.config.reference > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.arguments import PRESETS, RECIPES, names_in
from trainer.config.settings import is_section, sections

HEAD = f"""# Configuration

Every setting, its default, and what it does. Made from `trainer/config/settings.py` by
`python -m trainer.config.reference`.

    preset -> recipe -> key=value on the command line

A later layer wins. Presets are `{"`, `".join(names_in(PRESETS))}` (`trainer/config/presets/`), or a YAML file of yours:
`--preset mine.yaml`. `--dry-run` prints what comes out. Settings of the engine's memory and precision are in
`ds_configs/`.

Recipes hold an objective, not the hardware, and go over any preset, with `--recipe NAME` or a file of yours:
`{"`, `".join(names_in(RECIPES))}` (`trainer/config/presets/recipes/`; see [objectives.md](objectives.md)).
"""


def page() -> str:
    return HEAD + "".join(_section(name, section) for name, section in sections().items())


def _section(name: str, section: Any) -> str:
    return f"\n## {name}\n\n| setting | default | |\n| --- | --- | --- |\n" + "".join(_rows(name, section))


def _rows(name: str, section: Any) -> Iterator[str]:
    for key, info in section.model_fields.items():
        if is_section(info.annotation):
            yield from _rows(f"{name}.{key}", info.annotation)
        else:
            described = " ".join((info.description or "").split())
            yield f"| `{name}.{key}` | `{_default(info.default)}` | {described} |\n"


def _default(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(page(), end="")
