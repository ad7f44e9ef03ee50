"""What the tests of commands share: the files of a run."""

import json
from pathlib import Path

from trainer.config.resolve import resolve


def write(folder: Path, files: dict[str, object]) -> Path:
    """Write these files with the folders they are in, and what is no text as JSON."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    return folder


def config_of(*overrides: str) -> str:
    """Return the config.yaml of a run with these settings."""
    return resolve("nano", None, overrides).to_yaml()
