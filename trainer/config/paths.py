"""The settings that name files, as a run folder stores them: the folder can be read from anywhere, and be moved."""

import os
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial, reduce
from pathlib import Path
from typing import Any

from trainer.machine import user_code

GIVEN = "given"  # the folder in a run's of what was handed over, and of copies of small files
CODE = Path(GIVEN, "code")
DATA = ("task.path", "task.test_path", "task.data_dir")
FOLDERS = ("task.data_dir", "lora.start", "teacher.adapter")
NAMES = ("model.name", "teacher.name", "prompt.style", "reward.judge.rubric", "engine.ds_config")  # or paths
PATHS = (*DATA, *FOLDERS[1:], *NAMES, "task.name", "task.mix", "task.agent", "reward.custom")


def file_of(text: str) -> str:
    """Return the file that a setting names, without the name of a function in it."""
    return text.rpartition(":")[0] if ".py:" in text else text


def apart(code: str | Path) -> Path:
    """Return where the copies of a folder of code stand that has names in common with another one."""
    return CODE / f"{zlib.crc32(os.fsencode(os.path.abspath(code))):08x}"


def place(folder: Path, path: str) -> str:
    """Return an absolute path, or the path relative to the run folder of what is in it."""
    own, whole = os.path.abspath(folder), os.path.abspath(os.path.expanduser(path))
    return os.path.relpath(whole, own) if whole.startswith(own + os.sep) else whole


def stored(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings whose paths are absolute, or relative to the run folder for what is in it."""
    return _with_paths(settings, partial(place, folder), lambda text: os.path.exists(os.path.expanduser(text)))


def placed(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings that a run folder has stored, with paths that lead from here to what is in it. Code that is not
    where it was is replaced by its copy. Code in the folder may be a stranger's, and is run only if it is named."""

    def own(text: str) -> str:
        path = folder / text
        if path.suffix == ".py" and (path != Path(text) or path.resolve().is_relative_to(folder.resolve())):
            user_code.of_runs.add(path.resolve())
        return str(path)

    def copy(text: str) -> str:
        places = (apart(os.path.dirname(text)), CODE)
        return str(next(one for one in places if one == CODE or (folder / one).exists()) / os.path.basename(text))

    def is_copied(text: str) -> bool:
        return text.endswith(".py") and not os.path.exists(text) and os.path.exists(folder / copy(text))

    found = _with_paths(settings, own, lambda text: os.path.exists(folder / text))
    return _with_paths(found, lambda text: own(copy(text)), is_copied)


def _with_paths(
    settings: Mapping[str, Any], path: Callable[[str], str], is_there: Callable[[str], bool]
) -> dict[str, Any]:
    found = deepcopy(dict(settings))

    def other(text: Any, key: str) -> Any:
        file = file_of(text) if isinstance(text, str) else ""
        is_path = (key in FOLDERS or "." in file or os.sep in file) and is_there(file)
        return f"{path(file)}{text[len(file) :]}" if is_path else text

    for key in PATHS:
        *sections, name = key.split(".")
        section = reduce(lambda part, one: part.get(one) or {}, sections, found)
        if isinstance(value := section.get(name), Mapping):  # of a mixture: the keys are its parts
            section[name] = {other(part, key): share for part, share in value.items()}
        elif value is not None:
            section[name] = [other(one, key) for one in value] if isinstance(value, list) else other(value, key)
    return found
