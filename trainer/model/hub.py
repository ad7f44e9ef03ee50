"""Find a model in a folder, in the cache, or on the hub, before anything heavy is imported.

If the hub cannot be reached, a complete model in the cache suffices. The run then goes offline, because otherwise each
library would wait for its own timeout. `octet fetch` prepares such a cache for a machine without internet.
"""

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from huggingface_hub import constants

from trainer.config.read_yaml import read_yaml
from trainer.config.settings import RUNS, Model
from trainer.errors import CheckpointError, ModelError
from trainer.machine import manifest, threads

CONNECT_S = 3.0
LONGEST_FILE = 255  # bytes of a file name
DEADLINE_S = 10.0  # for the whole reply, including the DNS look-up, which no timeout of a socket covers
SAMPLES, SAMPLE_BYTES = 64, 4096  # the samples of each file of weights that make its fingerprint
UNPACKED = "mxfp4"  # a quantisation of experts to 4 bits, which transformers can convert to 16 bits
PAGE = 1000  # entries of a listing that the hub sends at once
REFUSED = (401, 403, 404)
OF_GGUF = "Name a model with config.json and *.safetensors; a GGUF file can be tried out, but not trained"
FETCH = "`octet fetch`, on a machine with internet, downloads what is missing: docs/offline.md."
NANO = Path(__file__).parent / "nano"


class Unreachable(Exception):
    """The hub does not reply, or requests are forbidden."""


class ServerError(Unreachable):
    """The hub replies with an internal error."""


class Refused(Exception):
    """The hub denies access, or has no such repository or revision."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a model with their sizes in bytes. `folder` is None for a model that has to be downloaded."""

    folder: Path | None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        names = [path.name for path in weights(self.folder)] if self.folder else filter(_is_weights, self.sizes)
        return sum(self.sizes.get(name, 0) for name in names)

    @property
    def download(self) -> int:
        return 0 if self.folder else sum(self.sizes.values())


NOTHING = Found(None)


def find_model(model: Model, elsewhere: str = FETCH) -> Found:
    """Find a model. Raise ModelError if it is neither on this machine nor available on the hub."""
    folder = NANO if model.name == "nano" else local_folder(model.name)
    if folder:
        _must_be_whole(model.name, folder)
        return Found(folder, _sizes(folder))
    refuse_missing_folder(model.name)
    cached = snapshot(model)
    try:
        listed = listing("models", model.name, model.revision)
    except Refused as refusal:
        if not cached:
            remedy = "Check the spelling, `hf auth login` if it is private or gated, or write the path of a folder"
            raise ModelError(f"model.name={model.name}", f"the hub does not give it ({refusal})", remedy) from None
    except Unreachable as unreachable:
        if not cached:
            reason = f"it is neither a folder nor complete in the cache ({cache()}), and {unreachable}"
            remedy = f"Write the path of a local folder, or try --preset nano, which needs no download. {elsewhere}"
            raise ModelError(f"model.name={model.name}", reason, remedy) from None
        stay_offline(unreachable)
    if cached:
        return Found(cached, _sizes(cached))
    files = {name: listed[name] for name in wanted(listed, model.trust_remote_code)}
    if listed and not any(map(_is_weights, files)):
        reason = "its repository on the hub has no weights of a model (model*.safetensors)"
        raise ModelError(f"model.name={model.name}", reason, OF_GGUF)
    return Found(None, files)


def quantisation_of(config: Any) -> str:
    """Return the method with which a model is quantised according to its config.json; "" if it is not."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    section = values.get("quantization_config") or {"quant_method": ""}
    return str(section.get("quant_method", "unknown")) if isinstance(section, dict) else "unknown"


def refuse_quantised(name: str, config: Any) -> None:
    """Raise ModelError for a quantised model, except in MXFP4, which is unpacked while it is loaded."""
    if (method := quantisation_of(config)) not in ("", UNPACKED):
        reason = f"it is quantised already ({method}), so an adapter could not be merged into its base"
        remedy = "Name the model that it was made from, and write model.quantize=nf4 or int8"
        raise ModelError(f"model.name={name}", reason, remedy)


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Name this setting in errors about a model instead of model.name."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{setting}={error.value}", error.reason, error.remedy) from None


# ---------------------------------------------------------------- on this machine


def cache() -> Path:
    return Path(constants.HF_HUB_CACHE)


def snapshot(model: Model) -> Path | None:
    """Return the folder of a model in the cache; None if its configuration or a part of its weights is missing."""
    folder = cache() / f"models--{model.name.replace('/', '--')}"
    revision = model.revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text(errors="replace").strip() if reference.is_file() else revision
    cached = folder / "snapshots" / commit
    if Path(commit).name != commit or not (cached / "config.json").is_file():
        return None
    try:
        files = weights(cached)
    except ModelError:
        return None
    return cached if files and all(path.is_file() for path in files) else None


def wanted(names: Iterable[str], code: bool = False) -> list[str]:
    """Return the files that a run reads: configuration, tokenizer, and one set of weights, preferably safetensors."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.startswith("model") and _is_weights(name)]
    weights = weights or [name for name in top if name.startswith("pytorch_model") and _is_weights(name)]
    endings = (".json", ".txt", ".model", ".jinja", *([".py", ".tiktoken"] if code else []))
    return sorted({*weights, *(name for name in top if name.endswith(endings))})


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _shards(index: Path) -> set[str]:
    """Return the files that an index of weights names. Raise ModelError if it is damaged or names other folders."""
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        strange = [name for name in shards if Path(name).name != name or len(os.fsencode(name)) > LONGEST_FILE]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(index, f"it cannot be read ({type(error).__name__})", "Download the model again") from None
    if strange:
        reason = f"it names {repr(strange[0])[:200]}, which is no file of this folder"
        raise ModelError(index, reason, "Do not use this model")
    return shards


def _must_be_whole(name: str, folder: Path) -> None:
    """Raise an error if weights, or a file that their index names, are missing, or if a file differs from its
    manifest."""
    manifest.must_be_whole(folder)
    sizes = _sizes(folder)
    if not (files := weights(folder)):
        reason = "there are no weights (*.safetensors) in this folder"
        remedy = OF_GGUF if any(file.endswith(".gguf") for file in sizes) else "Download it again"
        raise ModelError(f"model.name={name}", reason, remedy)
    if missing := [path.name for path in files if not path.is_file()]:
        reason = f"{', '.join(missing)[:500]} is missing in this folder, and its index names it"
        raise ModelError(f"model.name={name}", reason, "Download the model again")
    if (folder / "generation_config.json").is_file():  # transformers would ignore one that it cannot read
        read_json(f"model.name={name}", folder / "generation_config.json")


def weights(folder: Path) -> list[Path]:
    """Return the files of weights that transformers reads in a folder, which may also have files of an earlier save."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / shard for shard in sorted(_shards(index))]
    return []


def fingerprint(model: Model) -> str:
    """Return a hash of samples from each file of a model's weights; "" for weights that are not on this machine."""
    folder = NANO if model.name == "nano" else local_folder(model.name) or snapshot(model)
    files = [path for path in weights(folder) if path.is_file()] if folder else []
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for offset in range(0, size, max(1, size // SAMPLES)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def must_have(model: Model, before: str, remedy: str) -> None:
    """Raise CheckpointError if the fingerprint of a model's weights does not begin with `before`."""
    if (now := fingerprint(model)[: len(before)]) and now != before:
        reason = "its weights are not those that this run began with"
        remedy = f"Restore them, name their revision (model.revision), or {remedy}"
        raise CheckpointError(f"model.name={model.name}", reason, remedy)


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def local_folder(name: str) -> Path | None:
    """Return the folder of this name; None if there is none. Raise ModelError if it contains no model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    has_config = (folder / "config.json").is_file()
    folders = (folder,) if has_config else (folder, folder / "adapter")
    if adapter := next((path for path in folders if (path / "adapter_config.json").is_file()), None):
        config = read_json(f"model.name={name}", adapter / "adapter_config.json")
        base, quoted = str(config.get("base_model_name_or_path"))[:200], shlex.quote(str(adapter))
        what = "there is an adapter in it" if adapter == folder else "that is a run folder, not a model"
        remedy = f"Write lora.start={quoted} to train it further, octet eval --adapter {quoted}, or "
        remedy += f"octet merge --adapter {quoted} --out FOLDER"
        raise ModelError(f"model.name={name}", f"{what}. Its base is {base}", remedy)
    if not has_config:
        reason = "there is no config.json in this folder, so it is not a model"
        remedy = "Name a folder that save_pretrained has written, or a model of the hub"
        raise ModelError(f"model.name={name}", reason, remedy)
    return folder


def refuse_missing_folder(name: str) -> None:
    """Raise ModelError for a name that can only be the path of a folder, since there is none."""
    if name.startswith(("/", "./", "../", "~", f"{RUNS}/")) or name.count("/") > 1:  # a name on the hub has one slash
        if Path(name).expanduser().is_file():
            raise ModelError(f"model.name={name}", "that is a file, and not the folder of a model", OF_GGUF)
        raise ModelError(f"model.name={name}", "there is no such folder", "Check the path")


def read_json(whose: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model or an adapter. Raise ModelError if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(whose, f"its {path.name} cannot be read ({error})", "Restore that file") from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ModelError(whose, f"its {path.name} holds a {kind}, and not an object", "Restore that file")
    return content


# ---------------------------------------------------------------- on the hub


def listing(kind: Literal["models", "datasets"], name: str, revision: str | None) -> dict[str, int]:
    """Return the files at the top of a repository with their sizes; none if the hub has an internal error."""
    try:
        entries = _get(f"/api/{kind}/{name}/tree/{_quoted(revision)}?limit={PAGE}")
        return {entry["path"]: entry.get("size", 0) for entry in entries if entry["type"] == "file"}
    except ServerError:
        return {}
    except (LookupError, TypeError):
        raise Unreachable("the hub cannot be reached (something else answers in its place)") from None


def configuration(model: Model) -> dict[str, Any]:
    """Return the config.json of a model on the hub."""
    config = _get(f"/{model.name}/resolve/{_quoted(model.revision)}/config.json")
    return config if isinstance(config, dict) else {}


def licence(model: Model) -> str | None:
    """Return the licence in the card of a model: in its folder, in the cache, or on the hub."""
    if model.name == "nano":
        return "apache-2.0"
    folder = local_folder(model.name) or snapshot(model)
    card = folder / "README.md" if folder else None
    try:
        if card and card.is_file():
            _, head, _ = card.read_text(encoding="utf-8").split("---\n", 2)
            name = read_yaml(head)["license"]
        elif Path(model.name).is_dir():
            return None
        else:
            name = _get(f"/api/models/{model.name}/revision/{_quoted(model.revision)}")["cardData"]["license"]
    except (Unreachable, Refused, LookupError, TypeError, ValueError):  # a card without YAML raises the last one
        return None
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) else None


def _quoted(revision: str | None) -> str:
    return quote(revision or constants.DEFAULT_REVISION, safe="")


def _get(path: str) -> Any:
    """Return the hub's reply in JSON. Raise Refused, ServerError or Unreachable, at the latest after the deadline."""
    if constants.is_offline_mode():
        raise Unreachable("HF_HUB_OFFLINE forbids asking the hub")
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):  # pip reads it, but huggingface_hub only the other two
        os.environ.setdefault("SSL_CERT_DIR" if os.path.isdir(bundle) else "SSL_CERT_FILE", bundle)

    import httpx2
    from huggingface_hub import get_session, get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}  # build_hf_headers would send another request

    def ask() -> httpx2.Response:
        timeout = httpx2.Timeout(DEADLINE_S, connect=CONNECT_S)
        return get_session().get(f"{constants.ENDPOINT}{path}", headers=headers, timeout=timeout)

    try:
        response = threads.begin(ask).result(DEADLINE_S)
        if response.is_success:
            return response.json()
    except (OSError, ValueError, ImportError, httpx2.HTTPError, httpx2.InvalidURL, FutureTimeout) as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or f"no answer within {DEADLINE_S:g} s"
        raise Unreachable(f"the hub cannot be reached ({reason})") from None
    kind = Refused if response.status_code in REFUSED else ServerError
    raise kind(f"{response.status_code} {response.reason_phrase}")


def stay_offline(reason: Unreachable) -> None:
    """Switch this process and its children to offline mode, and report that once on each machine."""
    if not constants.is_offline_mode():
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"octet: {reason}: continuing with the files in the cache", file=sys.stderr, flush=True)
