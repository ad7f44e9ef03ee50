"""Can the model and the data be had? Asked before anything heavy is imported, so that the answer takes seconds.

What is whole in the cache is enough where the hub cannot be reached: it is then not asked again in this run, because
the libraries would try for half a minute. `octet fetch` brings such a cache to a machine without internet.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.settings import Model
from trainer.errors import ModelError

DEADLINE_S = 3.0  # for one answer, the look-up of the name included
PAGE = 1000  # entries of a listing that the hub sends at once
REFUSED = (401, 403, 404)
FETCH = "`octet fetch`, on a machine with internet, brings what is missing: docs/offline.md."
NANO = Path(__file__).parent / "nano"


class Unreachable(Exception):
    """The hub does not answer, or is not to be asked."""


class Unwell(Unreachable):
    """The hub is there, but cannot say now."""


class Refused(Exception):
    """The hub answers, and does not give."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model: its files and their bytes, in a folder, or on the hub where there is none."""

    folder: Path | None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        return sum(size for name, size in self.sizes.items() if _is_weights(name))

    @property
    def download(self) -> int:
        return 0 if self.folder else sum(self.sizes.values())


def find_model(model: Model) -> Found:
    folder = NANO if model.name == "nano" else _local(model.name)
    if folder:
        return Found(folder, _sizes(folder))
    cached = snapshot(model)
    try:
        listed = listing("models", model.name, model.revision or "main")
    except Refused as refusal:
        if not cached:
            raise ModelError(
                f"model.name={model.name}: the hub does not give it ({refusal}). Check the spelling, and log in with "
                "`hf auth login` if it is private or gated, or write the path of a local folder."
            ) from None
    except Unreachable as reason:
        if not cached:
            raise ModelError(
                f"model.name={model.name}: it is neither a folder nor whole in the cache ({cache()}), and {reason}. "
                f"Write the path of a local folder, or try --preset nano, which needs no download. {FETCH}"
            ) from None
        _stay_offline(reason)
    else:
        if not cached:
            names = wanted(listed, model.trust_remote_code)
            return Found(None, {name: listed[name] for name in names})
    return Found(cached, _sizes(cached))


# ---------------------------------------------------------------- what is here


def cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE", _home() / "hub"))


def snapshot(model: Model) -> Path | None:
    """The folder of a model in the cache, when it is there with all its weights."""
    folder = cache() / f"models--{model.name.replace('/', '--')}"
    revision = model.revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    here = folder / "snapshots" / commit
    return here if _is_whole(here) else None


def wanted(names: Iterable[str], code: bool = False) -> list[str]:
    """What a run reads of a model: its configuration, its tokenizer, and its weights once, safetensors if they are."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.startswith("model") and _is_weights(name)]
    weights = weights or [name for name in top if name.startswith("pytorch_model") and _is_weights(name)]
    endings = (".json", ".txt", ".model", ".jinja", *([".py"] if code else []))
    indices = {name for name in top if name.endswith(".index.json")} - {_index_of(name) for name in weights}
    return sorted({*weights, *(name for name in top if name.endswith(endings))} - indices)


def _index_of(weights: str) -> str:
    """`model.safetensors.index.json` of `model-00001-of-00002.safetensors`."""
    return re.sub(r"-\d+-of-\d+", "", weights) + ".index.json"


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _is_whole(folder: Path) -> bool:
    """With a configuration and weights; all of them, where there is a list of their files."""
    if not (folder / "config.json").is_file():
        return False
    lists = [set(json.loads(index.read_text())["weight_map"].values()) for index in folder.glob("*.index.json")]
    if lists:
        return any(all((folder / shard).is_file() for shard in shards) for shards in lists)
    return any(_is_weights(file.name) for file in folder.iterdir())


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def _local(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"model.name={name}: there is no config.json in this folder, so it is not a model.")
    return folder if folder.is_dir() else None


def _home() -> Path:
    return Path(os.environ.get("HF_HOME", Path("~/.cache/huggingface").expanduser()))


# ---------------------------------------------------------------- what the hub says


def listing(kind: str, name: str, revision: str) -> dict[str, int]:
    """The files at the top of a repository and their bytes; none when the hub is there but cannot say now."""
    path = f"/api/{kind}/{urllib.parse.quote(name)}/tree/{urllib.parse.quote(revision, safe='')}?limit={PAGE}"
    try:
        return {entry["path"]: entry.get("size", 0) for entry in _answer(path) if entry["type"] == "file"}
    except Unwell:
        return {}


def configuration(model: Model) -> dict[str, Any]:
    """The config.json of a model on the hub."""
    revision = urllib.parse.quote(model.revision or "main", safe="")
    found = _answer(f"/{urllib.parse.quote(model.name)}/resolve/{revision}/config.json")
    return found if isinstance(found, dict) else {}


def _answer(path: str) -> Any:
    try:
        return json.loads(_get(path))
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        kind = Refused if error.code in REFUSED else Unwell
        raise kind(f"{error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        raise Unreachable(f"the hub cannot be reached ({_reason(error)})") from None


def is_offline() -> bool:
    """As huggingface_hub reads it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _get(path: str) -> bytes:
    """Within the deadline: a name server that is silent keeps `urlopen` for longer than its time limit."""
    if is_offline():
        raise Unreachable("HF_HUB_OFFLINE forbids to ask the hub")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}{path}")
    if token := _token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    outcome: list[bytes | Exception] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                outcome.append(answer.read())
        except (OSError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    answer = outcome[0] if outcome else TimeoutError(f"no answer within {DEADLINE_S:g} s")
    if isinstance(answer, Exception):
        raise answer
    return answer


def _token() -> str:
    """That of `hf auth login`, or of the environment."""
    stored = Path(os.environ.get("HF_TOKEN_PATH", _home() / "token"))
    return os.environ.get("HF_TOKEN") or (stored.read_text().strip() if stored.is_file() else "")


def _reason(error: Exception) -> str:
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or str(cause)


def _stay_offline(reason: Unreachable) -> None:
    """Spare the libraries their attempts, each with its own time limit."""
    if not is_offline():
        os.environ["HF_HUB_OFFLINE"] = "1"
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"octet: {reason}: going on with what is in the cache", file=sys.stderr, flush=True)
