"""Settings that name files, as a run folder stores them, so that it can be read from anywhere and be moved."""

import glob
import os
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

GIVEN = "given"  # the subfolder of a run folder with copies of small files, and of objects passed from Python
CODE = Path(GIVEN, "code")
PARTS = (".parquet", ".arrow", ".json")  # of a set in a folder
DATA = ("task.path", "task.test_path", "task.data_dir")
FOLDERS = ("task.data_dir", "lora.start", "teacher.adapter")
MODELS = ("model.name", "teacher.name")  # the folder of a model may have any name
NAMES = ("model.name", "teacher.name", "prompt.style", "reward.judge.rubric", "engine.ds_config")  # may be paths
PATHS = (*DATA, *FOLDERS[1:], *NAMES, "task.name", "task.mix", "task.agent", "task.tools", "reward.custom")


def file_of(text: str) -> str:
    """Return the file that a setting names, without the name of a function."""
    return text.rpartition(":")[0] if ".py:" in text else text


def data_files(source: Path) -> list[Path]:
    """Return the local files that a setting names: a file, those of a pattern, or the data files of a folder."""
    if source.is_file():  # its name may have characters of a pattern
        return [source]
    if not source.is_dir():
        return [Path(file) for file in sorted(glob.glob(str(source)))]
    found = sorted(file for end in ("train.*", "test.*") for file in source.glob(end) if file.is_file())
    in_parts = (file for depth in ("*", "*/*") for file in source.glob(depth) if file.suffix in PARTS)
    return found or sorted(file for file in in_parts if file.is_file())


def apart(code: str | Path) -> Path:
    """Return the folder for copies of code whose file names clash with those of other code."""
    return CODE / f"{zlib.crc32(os.fsencode(os.path.abspath(code))):08x}"


def place(folder: Path, path: str) -> str:
    """Return the path relative to the run folder if it is inside, else the absolute path."""
    inside, absolute = os.path.abspath(folder), os.path.abspath(os.path.expanduser(path))
    return os.path.relpath(absolute, inside) if absolute.startswith(inside + os.sep) else absolute


def stored(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings whose paths are relative to the run folder if they are inside, else absolute."""
    return _with_paths(settings, lambda text: place(folder, text) if _exists(os.path.expanduser(text)) else text)


def placed(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings that a run folder has stored, with paths that are valid here. Code that no longer exists is
    replaced by its copy in the folder."""

    def here(text: str) -> str:
        own = apart(os.path.dirname(text))
        copy = folder / (own if (folder / own).exists() else CODE) / os.path.basename(text)
        return next(filter(_exists, (str(folder / text), text, str(copy))), text)

    return _with_paths(settings, here)


def _exists(text: str) -> bool:
    return os.path.exists(text) or bool(glob.glob(text))  # a pattern, such as train-*.parquet


def _with_paths(settings: Mapping[str, Any], path: Callable[[str], str]) -> dict[str, Any]:
    """Return settings in which `path` has replaced the texts that may name a file."""
    values = deepcopy(dict(settings))

    def replaced(text: Any, key: str) -> Any:
        file = file_of(text) if isinstance(text, str) else ""
        is_path = key in (*DATA, *FOLDERS) or "." in file or os.sep in file or (key in MODELS and file != "nano")
        return f"{path(file)}{text[len(file) :]}" if is_path and file else text

    for key in PATHS:
        *sections, name = key.split(".")
        section = reduce(lambda part, inner: part.get(inner) or {}, sections, values)
        if isinstance(value := section.get(name), Mapping):  # the keys of a mixture are its parts
            section[name] = {replaced(part, key): share for part, share in value.items()}
        elif value is not None:
            section[name] = [replaced(text, key) for text in value] if isinstance(value, list) else replaced(value, key)
    return values
