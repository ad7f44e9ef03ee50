"""What a checkpoint was made from: settings, data, the base model, the user's files, and versions of packages."""

import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trainer
from trainer.config.paths import PATHS, file_of, place, stored
from trainer.config.resolve import flat
from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError
from trainer.machine.installed_files import CHECKOUT
from trainer.model import hub
from trainer.ranks import distributed
from trainer.records import Problem
from trainer.run_folder import changed_settings, journal

PACKAGES = ("torch", "deepspeed", "transformers", "peft")
DIGITS = 8  # of the checksum of a problem
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, in its text
ACCEPT = "--accept-changes"
TEACHER = "teacher.name="  # prefix of the one entry among the checksums of files that is not a file


class Provenance:
    """A part of every checkpoint. Loading it compares it with what this run is made from."""

    def __init__(
        self, config: Config, folder: Path, training: Sequence[Problem], held_out: Sequence[Problem], accepts: bool
    ) -> None:
        self.config, self.folder, self.training, self.accepts = config, folder, training, accepts
        self.weights = hub.fingerprint(config.model)
        self.checksums = checksums(training)
        self.data = {"training": _digest(self.checksums), "held_out": _digest(checksums(held_out))}
        self.files = files_of(config, folder)
        self.run = self._identifier()  # a resumed run keeps its first one, although later versions have more settings

    def _identifier(self) -> str:
        """Return a digest of everything that the steps depend on. It stays the same if the run is moved."""
        settings = flat(stored(self.config.model_dump(mode="json"), self.folder))
        named = {key: Path(str(value)).name if key in PATHS else value for key, value in settings.items()}
        kept = {key: value for key, value in named.items() if key not in changed_settings.MAY_CHANGE}
        return _digest(json.dumps([kept, self.data["training"], self.weights]))[:16]

    def state(self) -> dict[str, Any]:
        made_from = {"weights": self.weights, "data": self.data, "files": self.files, "versions": versions()}
        return {**made_from, "run": self.run, "settings": stored(self.config.model_dump(mode="json"), self.folder)}

    def load(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint of other data, weights or files, and warn if other versions wrote it."""
        self.run = state.get("run", self.run)
        hub.must_have(self.config.model, state["weights"], "choose another run.dir")
        self._compare_data(state["data"])
        self._compare_files(state["files"])
        others = [f"{name} {had}" for name, had in state["versions"].items() if versions().get(name) != had]
        if others and distributed.is_main():
            journal.warn(f"the checkpoint was written with {', '.join(others)}: the run continues, but not bit for bit")

    def _compare_data(self, had: Mapping[str, str]) -> None:
        if had == self.data:
            return
        task, difference = self.config.task, "the held-out problems differ"
        if had["training"] != self.data["training"]:
            difference, before = "the training problems differ", recorded(self.folder)
            if _digest(before) == had["training"]:
                difference = apart(before, self.checksums, [problem.id for problem in self.training])
        source = f"task.path={task.path}" if task.path else f"task.data_dir={task.data_dir}" if task.data_dir else ""
        reason = f"the data are not those that this run began with: {difference}"
        raise DataError(source or f"task.name={task.name}", reason, "Restore them, or choose another run.dir")

    def _compare_files(self, had: Mapping[str, Any]) -> None:
        # A module that is imported later in a run is not in self.files yet, so it is read from its old place.
        now = {name: _checksum(self.folder / name) for name in had if not name.startswith(TEACHER)} | self.files
        moved = {name for name in had if now.get(name) is None and had[name] in self.files.values()}
        if others := sorted(name for name in had.keys() & now.keys() - moved if had[name] != now[name]):
            files, reason = ", ".join(others), "changed since this run began"
            if not self.accepts:
                raise ConfigError(files, reason, f"Restore what it had, or continue with the change: {ACCEPT}")
            if distributed.is_main():
                without = "the completed steps were made without the change"
                journal.warn(f"{files}: {reason}, which {ACCEPT} accepts: {without}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(path: Path) -> int | None:
    return zlib.crc32(path.read_bytes()) if path.is_file() else None


def checksums(problems: Sequence[Problem]) -> str:
    """Return eight hexadecimal digits for each problem, in the order of the run."""
    parts = ([one.question, one.gold, one.solution, dict(one.extra)] for one in problems)
    return "".join(f"{zlib.crc32(_text(part).encode()):08x}" for part in parts)


def _text(value: Any) -> str:
    """Return a value of a record as text that is the same in every process, also if it is not JSON."""
    try:
        return json.dumps(value, default=_plain)
    except TypeError:  # a key is no text, such as (0, 1)
        return json.dumps(_with_text_keys(value), default=_plain)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_text(key): _with_text_keys(part) for key, part in value.items()}
    return [*map(_with_text_keys, value)] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    return sorted(map(_text, value)) if isinstance(value, set | frozenset) else ADDRESS.sub("", str(value))


def recorded(folder: Path) -> str:
    """Return the checksums of the training problems in data.json, or "" if there are none."""
    try:
        return str(json.loads((folder / "data.json").read_text())["checksums"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def apart(before: str, now: str, names: Sequence[str]) -> str:
    """Return how training problems differ, by their checksums: in number, in order, or the first changed one; or ""."""
    old, new = _each(before), _each(now)
    if len(old) != len(new):
        return f"{len(new)} training problems; the run had {len(old)}"
    others = [name for name, one, other in zip(names, old, new, strict=True) if one != other]
    if others and sorted(old) == sorted(new):
        return "the order of the training problems, which follows from run.seed"
    return f"{others[0]} is not what it was ({len(others)} of {len(new)} training problems)" if others else ""


def shared(folder: Path, problems: Sequence[Problem]) -> int:
    """Return how many of these problems are training problems of the run in a folder."""
    trained = {*_each(recorded(folder))}
    return sum(one in trained for one in _each(checksums(problems)))


def _each(text: str) -> list[str]:
    return [text[start : start + DIGITS] for start in range(0, len(text), DIGITS)]


def files_of(config: Config, folder: Path) -> dict[str, Any]:
    """Return the checksum of each of the user's files that a run depends on: the code of rewards and tasks, with what
    it has imported from its folder; templates, rubrics and settings of DeepSpeed; adapters and the teacher."""
    paths = _named(config) + [code / name for code, names in code_of(config).items() for name in names]
    paths += [path for one in (config.lora.start, config.teacher.adapter) if one for path in one.glob("adapter_*")]
    teacher = {f"{TEACHER}{one.name}": hub.fingerprint(one) for one in [config.teacher_model] if one}
    return {place(folder, str(path)): _checksum(path) for path in paths} | teacher


def _named(config: Config, keys: Container[str] | None = None) -> list[Path]:
    """Return the files that settings, or some of them, name, except data."""
    settings = flat(config.model_dump(mode="json", exclude={"run", "model"}))
    wanted = {key: value for key, value in settings.items() if keys is None or key in keys}
    texts = [text for key, value in wanted.items() for text in _texts(value) if key[:5] != "task." or ".py:" in text]
    files = (os.path.expanduser(file_of(text)) for text in texts)
    return [Path(file) for file in files if os.path.isfile(file)]  # unlike Path.is_file, for a text of any length


def code_of(config: Config) -> dict[Path, list[Path]]:
    """Return the folders of the user's code, templates and the like, with the files that are named or imported."""
    code: dict[Path, list[Path]] = {}
    for path in _named(config, PATHS):
        imported = _imported(path.parent.resolve()) if path.suffix == ".py" else ()
        code.setdefault(path.parent, []).extend([*imported, Path(path.name)])
    return {folder: [*dict.fromkeys(names)] for folder, names in code.items()}


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a setting. In a mapping these are the keys, which are the parts of a mixture."""
    for one in value if isinstance(value, list | dict) else [value]:
        if isinstance(one, str):
            yield one


def _imported(folder: Path) -> Iterator[Path]:
    """Yield the imported files below a folder, relative to it, except packages and Octet, which have versions."""
    outside = (Path(sys.prefix), CHECKOUT / "octet", CHECKOUT / "trainer")
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.is_relative_to(folder) and path.is_file() and not any(map(path.is_relative_to, outside)):
            inner = path.relative_to(folder)
            if not any(part[0] == "." or part.endswith("-packages") for part in inner.parts):  # ~/.local, ~/.cache
                yield inner


def versions() -> dict[str, str]:
    return {"octet-grpo": trainer.__version__, **{name: version(name) for name in PACKAGES}}
