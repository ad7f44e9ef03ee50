"""Generate the reference of all settings, for people and for editors:

python -m scripts.make_configuration_page > docs/configuration.md
python -m scripts.make_configuration_page --schema > docs/config.schema.json
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from trainer.config.settings import Config, is_section
from trainer.config.train_options import PRESETS, RECIPES, names_in

HEAD = f"""# Configuration

This page lists every setting with its default. It is made from `trainer/config/sections/`.

    preset -> recipe -> key=value on the command line

Later layers override earlier ones, and `--dry-run` prints the result. A preset has the settings for a size of card. It
is one of
`{"`, `".join(names_in(PRESETS))}`
(in `trainer/config/presets/`), or your own YAML file: `--preset mine.yaml`. A recipe sets an objective on top of a
preset, with `--recipe NAME` or your own file:
`{"`, `".join(names_in(RECIPES))}`
(in `trainer/config/presets/recipes/`; see [objectives.md](objectives.md)). The files in `ds_configs/` set memory and
precision of the engine.

On the command line, values in quotes or brackets are read as YAML (`rollout.stop='["\\n\\n"]'`). Numbers, `true`,
`null` and dates have their meaning, and anything else is text: `run.dir="runs/run #2"` is a folder of that name.

With this first line in a YAML file of your own, editors that read JSON schemas complete and check it:

    # yaml-language-server: $schema=docs/config.schema.json
"""


def page() -> str:
    head = "| setting | default | |\n| --- | --- | --- |"
    sections = {name: info.annotation for name, info in Config.model_fields.items()}
    return HEAD + "".join(f"\n## {name}\n\n{head}\n{''.join(_rows(name, part))}" for name, part in sections.items())


def schema() -> str:
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


def _rows(name: str, section: Any) -> Iterator[str]:
    for own, info in section.model_fields.items():
        key = info.alias or own
        if is_section(info.annotation):
            yield from _rows(f"{name}.{key}", info.annotation)
        else:
            described = " ".join((info.description or "").split())
            yield f"| `{name}.{key}` | `{_default(info.default)}` | {described} |\n"


def _default(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(schema() if "--schema" in sys.argv else page(), end="")
