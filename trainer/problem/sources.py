"""Read records from a file (.jsonl, .json, .csv, .parquet) or a data set on the hub. Each record knows its place."""

import codecs
import csv
import glob
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import islice
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, TextIO

from trainer.config.settings import TaskSettings
from trainer.errors import DataError

LONGEST_LIST = 1000  # characters of the column names in an error
LARGEST_FIELD = 1 << 30  # characters of a CSV value; the rest of a longer one would be read as rows
NESTED = "A task in Python can take text out of a column that holds more: docs/bring.md"
USUAL = {
    "question": ("problem", "query", "instruction", "input", "prompt", "messages"),
    "answer": ("ground_truth", "solution", "output", "target", "label"),
}


class MissingColumn(DataError): ...


@dataclass(frozen=True, slots=True)
class Record:
    """A record with its place in the source. `flaw` says why it could not be read."""

    where: str
    values: Mapping[str, Any] = field(default_factory=dict)
    flaw: str = ""
    header: str = ""  # the place of the column names, if it is not that of the record
    note: str = ""  # a remark about the file

    def text(self, column: str, setting: str, expected: str = "text") -> str:
        """Return the text of a column, which must not be empty. `setting` is the setting that names the column."""
        value = self._value(column, setting)
        if not isinstance(value, str):
            remedy = NESTED if isinstance(value, Mapping) else ""
            raise DataError(self.where, f"`{column}` is {_kind(value)}; expected {expected}", remedy)
        if not value.strip():
            raise DataError(self.where, f"`{column}` is empty; expected text")
        if not is_unicode(value):
            raise DataError(self.where, f"`{column}` has a lone surrogate; expected UTF-8 text")
        return value.strip()

    def answer(self, column: str, setting: str) -> str:
        """Return the text of a column that may also hold a number."""
        value = self._value(column, setting)
        is_number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
        if is_number and (isinstance(value, int) or isfinite(value)):
            return str(value)
        return self.text(column, setting, "text or a number")

    def others(self, used: str) -> dict[str, Any]:
        return {column: value for column, value in self.values.items() if column != used}

    def must_have(self, columns: Mapping[str, str]) -> None:
        """Raise MissingColumn if columns are missing. `columns` maps each to the setting that names it."""
        missing = {column: setting for column, setting in columns.items() if column not in self.values}
        if missing:
            present = ", ".join(map(str, self.values))[:LONGEST_LIST] or "none"
            names = " and no column ".join(f"`{column}`" for column in missing)
            known = {str(name).strip().lower(): str(name) for name in reversed([*self.values])}
            usual = {one: [name for name in (one.lower(), *USUAL.get(one, ())) if name in known] for one in missing}
            meant = {column: known[names[0]] if names else "COLUMN" for column, names in usual.items()}
            settings = " ".join(f"{setting}={meant[column]}" for column, setting in missing.items())
            if "task.answer=COLUMN" in settings:
                settings += ", or task.answer=none if there are no gold answers"
                settings += f". {NESTED}" * any(isinstance(value, Mapping) for value in self.values.values())
            place = self.header or self.where
            raise MissingColumn(place, f"there is no column {names}; the columns are: {present}", f"Write {settings}")

    def _value(self, column: str, setting: str) -> Any:
        self.must_have({column: setting})
        value = self.values[column]
        if value is None:
            raise DataError(self.where, f"`{column}` is empty; expected text")
        return value


def _kind(value: Any) -> str:
    text = str(value)
    return f"a {type(value).__name__}: {text[:40]}{'...' * (len(text) > 40)}"


def is_unicode(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)


@dataclass(frozen=True, slots=True)
class File:
    path: Path  # or a pattern, or a folder of Parquet files
    parts: tuple[Path, ...] = ()  # the files that the pattern or the folder stands for
    has_splits: bool = False

    def __str__(self) -> str:
        return str(self.path)

    def records(self) -> Iterator[Record]:
        try:
            for part in self.parts or (self.path,):
                yield from READERS[part.suffix.lower()](part)
        except OSError as error:
            reason = error.strerror or str(error).partition("\n")[0]  # pyarrow's for a damaged page has only a text
            raise DataError(self.path, f"it cannot be read ({reason})") from None


@dataclass(frozen=True, slots=True)
class HubSet:
    """A data set on the hub: its name, its configuration and its split."""

    name: str
    subset: str | None
    split: str
    has_splits: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.name} {self.split}"

    def records(self) -> Iterator[Record]:
        import datasets

        for name in ("load", "packaged_modules.cache.cache"):  # do not warn that an offline run reads the cache
            logging.getLogger(f"datasets.{name}").setLevel(logging.ERROR)
        try:
            rows = datasets.load_dataset(self.name, self.subset, split=self.split)
        # OSError: no connection; ValueError: no such split, or offline and not in the cache; RuntimeError: a script
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            first_line = str(error).strip().partition("\n")[0]
            reason = f"it cannot be loaded from the hub ({type(error).__name__}: {first_line})"
            remedy = "Connect to the internet once, `hf auth login` if it is gated, or write task.data_dir=FOLDER"
            raise DataError(self, reason, remedy) from None
        yield from _records(str(self), rows)


@dataclass(frozen=True, slots=True)
class Saved:
    """A folder that `save_to_disk` of the package `datasets` has written for a `Dataset`."""

    folder: Path
    has_splits: bool  # it is part of the folder of a `DatasetDict`

    def __str__(self) -> str:
        return str(self.folder)

    def records(self) -> Iterator[Record]:
        import datasets

        try:
            yield from _records(str(self), datasets.load_from_disk(str(self)))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(self, f"it cannot be read ({type(error).__name__}: {error})") from None


Source = File | HubSet | Saved


def _records(source: str, rows: Any) -> Iterator[Record]:
    import datasets

    kinds = getattr(rows, "features", {})
    short = [name for name, kind in kinds.items() if kind == datasets.Value("float32")]  # and no array of it
    for index, row in enumerate(rows):
        yield Record(f"{source}[{index}]", {**row, **{name: _shortest(row[name]) for name in short}})


def _shortest(value: float | None) -> float | None:
    """Return the shortest decimal that 32 bits round to this value: 0.4, not 0.4000000059604645."""
    import numpy

    return None if value is None else float(str(numpy.float32(value)))


def _jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:
        yield from json_records(lines, str(path))


def _json(path: Path) -> Iterator[Record]:
    """Read a list of objects, or, if the file does not begin with `[`, an object from each line."""
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not text.lstrip().startswith(b"["):
        columns: list[Any] = []
        with suppress(ValueError, RecursionError):
            columns = [*json.loads(text).values()] if b"\n{" not in text else []  # else it has several objects
        if columns and all(isinstance(column, dict | list) for column in columns):
            remedy = "Write a list of them, in pandas with to_json(orient='records')"
            raise DataError(path, "it is one object, not a list of records", remedy)
        yield from _jsonl(path)
        return
    try:
        for index, values in enumerate(json.loads(text)):
            yield Record(f"{path}[{index}]", values, _flaw(values))
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"not JSON: {error}", "Write a list of objects, or one on each line") from None


def json_records(lines: Iterable[bytes], name: str) -> Iterator[Record]:
    """Read an object from each line that is not empty. `name` is the name of the file."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                flaw = _flaw(values := json.loads(line.decode("utf-8-sig").rstrip()))
            except (ValueError, RecursionError) as error:  # also of a line that is not UTF-8
                is_opened = line.strip() in (b"{", b"[")  # an object of several lines
                hint = "Write each object on one line, or a list of them into a .json file" * is_opened
                is_utf16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                hint = "It is UTF-16; save it as UTF-8" if is_utf16 else hint or "Correct that line"
                values, flaw = {}, f"not JSON: {error}. {hint}"
            yield Record(f"{name}:{number}", values, flaw)


def _flaw(values: Any) -> str:
    return "" if isinstance(values, dict) else f"it is {_kind(values)}; expected an object such as {{...}}"


def _encoding(path: Path) -> str:
    """Return UTF-16 if the file says so, Windows-1252 if no line is UTF-8 beyond ASCII and some line is invalid UTF-8,
    and UTF-8 otherwise."""
    with path.open("rb") as file:
        start = file.read(3)
        are_utf8 = {line.decode(errors="ignore").encode() == line for line in file if not line.isascii()}
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    return "cp1252" if are_utf8 == {False} and start != codecs.BOM_UTF8 else "utf-8-sig"


def _columns(file: TextIO, separator: str) -> tuple[bool, int]:
    """Return whether the first rows of a CSV file have an equal number of columns, more than one, and that number."""
    file.seek(0)
    rows = (row for row in csv.reader(file, delimiter=separator) if "".join(row).strip())
    counts = [0]
    with suppress(csv.Error):  # a null byte
        counts = [*map(len, islice(rows, 2))] or counts
    return len({*counts}) == 1 < counts[0], counts[0]


def _csv(path: Path) -> Iterator[Record]:
    encoding = _encoding(path)
    note = "" if encoding == "utf-8-sig" else f"{path} is not UTF-8; it was read as {ENCODINGS[encoding]}"
    # turn invalid bytes into lone surrogates, so that an error can name the line
    errors = "replace" if encoding == "utf-16" else "surrogateescape"
    with path.open(encoding=encoding, errors=errors, newline="") as file:
        csv.field_size_limit(LARGEST_FIELD)
        separator = max(",;\t|", key=partial(_columns, file))
        file.seek(0)
        rows = csv.reader(file, strict=True, delimiter=separator)
        header: list[str] = []
        while True:
            where = f"{path}:{rows.line_num + 1}"
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Record(where, flaw=f"broken CSV: {error}")
                continue
            text = "".join(row)
            if not header and text.strip().lower() in ("", "sep="):  # the line `sep=;` is written for Excel
                continue
            if not header:
                header, header_at = [name.strip() for name in row], where
                if "\0" in text or not is_unicode(text):
                    yield Record(where, flaw="the column names are not UTF-8 text, so it may be another kind of file")
                    return
                if twice := [name for name, count in Counter(header).items() if name and count > 1]:
                    yield Record(where, flaw=f"two columns are called `{twice[0]}`")
                    return
            elif [value.strip() for value in row] == header:
                yield Record(where, flaw="it names the columns again")
            elif row and len(row) != len(header):
                count = f"{len(row)} value{'s' * (len(row) != 1)}"
                yield Record(where, flaw=f"it has {count}, and the first line names {len(header)} columns")
            elif row:
                yield Record(where, dict(zip(header, row)), "" if is_unicode(text) else "not UTF-8", header_at, note)


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow.lib
    import pyarrow.parquet
    import pyarrow.types

    index = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for place in range(batch.num_rows):
                values, flaw = {}, ""
                for name, column in zip(batch.schema.names, batch.columns):
                    try:
                        values[name] = column[place].as_py()
                        if pyarrow.types.is_float32(column.type):
                            values[name] = _shortest(values[name])
                    except (ValueError, OverflowError) as error:  # not UTF-8, or a date out of Python's range
                        flaw = flaw or f"column {name}: {error}"
                yield Record(f"{path}: row {index}", values, flaw)
                index += 1
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        raise DataError(path, f"not Parquet: {str(error).partition(chr(10))[0]}") from None


READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
ENDINGS = ", ".join(READERS)
HERE = ", the path as seen from here"
ENCODINGS = {"cp1252": "Windows-1252 (cp1252)", "utf-16": "UTF-16"}


def locate(settings: TaskSettings, split: str, published: Mapping[str, HubSet]) -> Source | None:
    """Return the source of the `train` or `test` problems, or None if no test set is named."""
    if settings.data_dir is not None:
        folder = settings.data_dir.expanduser()
        if not folder.is_dir():
            raise DataError(f"task.data_dir={folder}", "there is no such folder", f"Write task.data_dir=FOLDER{HERE}")
        files = [file for ending in READERS if (file := folder / f"{split}{ending}").is_file()]
        if len(files) > 1:
            reason = f"it has {files[0].name} and {files[1].name}"
            raise DataError(f"task.data_dir={folder}", reason, "Keep one of them, or write task.path=FILE")
        return File(files[0]) if files else None
    if settings.path is None:
        return published.get(split)
    key, named = ("split", settings.split) if split == "train" else ("test_split", settings.test_split)
    setting, name = "task.path", settings.path
    if split == "test" and settings.test_path is not None:
        setting, name = "task.test_path", settings.test_path
    elif named is None:
        return None
    source = _named(setting, name, settings.subset, named or "test")
    if not source.has_splits and (key, named) not in (("split", "train"), ("test_split", None)):
        other = ", or write task.test_path=FILE" if settings.test_path is None else ""
        raise DataError(f"task.{key}={named}", f"{source} has no splits", f"Leave it out{other}")
    return source


def _named(setting: str, name: str, subset: str | None, split: str) -> Source:
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(f"{setting}={name}", path / (subset or ""), split)
    if path.exists() and path.suffix.lower() not in READERS:
        remedy = "Save a spreadsheet as CSV and an Arrow table as Parquet, and call a .tsv file .csv"
        raise DataError(f"{setting}={name}", f"files end in {ENDINGS}, so that their format is known", remedy)
    if path.suffix.lower() in READERS:
        parts = () if path.is_file() else tuple(Path(part) for part in sorted(glob.glob(str(path))))
        if not path.is_file() and not parts:
            raise DataError(f"{setting}={name}", "there is no such file", f"Write {setting}=FILE{HERE}")
        return File(path, parts)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise DataError(f"{setting}={name}", f"it is neither a file ({ENDINGS}) nor a name on the hub, owner/name")
    return HubSet(name, subset, split)


def _in_folder(named: str, folder: Path, split: str) -> Source:
    """Return the set of this split that `datasets` has saved in a folder, or the Parquet files that name the split."""
    has_splits = (folder / "dataset_dict.json").is_file()
    saved = folder / split if has_splits else folder
    if (saved / "state.json").is_file():
        return Saved(saved, has_splits)
    if has_splits:
        splits = ", ".join(sorted(state.parent.name for state in folder.glob("*/state.json")))
        raise DataError(named, f"{folder} has no split {split}", f"There are: {splits}")
    files = sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")])
    parts = _of_split(files, folder, split)
    if not parts:
        reason = f"{folder} has neither a set of `datasets` nor Parquet files of the split {split}"
        pattern = f"task.path='{folder}/*.parquet' for all of these, or "
        remedy = f"Write {pattern if files else ''}task.data_dir={folder}, with train.jsonl in it"
        raise DataError(named, reason, remedy)
    if len(parts) > 1:
        found = ", ".join(sorted(parts))
        remedy = f"Write task.subset=NAME if these are folders, or task.path='{folder}/{min(parts)}*.parquet'"
        raise DataError(named, f"{folder} has several sets of the split {split}: {found}", remedy)
    (of_split,) = parts.values()
    return File(folder, tuple(of_split), has_splits=True)


def _of_split(files: Iterable[Path], folder: Path, split: str) -> dict[str, list[Path]]:
    """Return the files that name a split, by the beginning of their paths, such as main/train. Those that begin
    `train_sft` are of the split `train` only if no others are."""
    word = re.compile(rf".*?(?<![A-Za-z0-9]){re.escape(split)}(?![A-Za-z0-9])[A-Za-z_]*")
    parts = defaultdict[str, list[Path]](list)
    for file in files:
        if match := word.match(str(file.relative_to(folder))):
            parts[match[0].rstrip("_")].append(file)
    exact = {begin: found for begin, found in parts.items() if begin.endswith(split)}
    return exact or parts
