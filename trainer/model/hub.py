"""Look for a model in a folder, in the cache, or on the hub, before anything heavy is imported.

A model that is complete in the cache is enough when the hub cannot be reached. The hub is then not asked again in this
run, because each library would wait for its own timeout. `octet fetch` brings such a cache to a machine without
internet.
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
from trainer.errors import ModelError
from trainer.machine import manifest, threads

CONNECT_S = 3.0
DEADLINE_S = 10.0  # for the whole answer, including the DNS look-up, which no timeout of a socket covers
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights, for their fingerprint
UNPACKED = "mxfp4"  # 4 bits of experts, which transformers can write out in 16
PAGE = 1000  # entries of a listing that the hub sends at once
REFUSED = (401, 403, 404)
FETCH = "`octet fetch`, on a machine with internet, brings what is missing: docs/offline.md."
NANO = Path(__file__).parent / "nano"


class Unreachable(Exception):
    """The hub does not answer, or must not be asked."""


class ServerError(Unreachable):
    """The hub answers, but with an error of its own."""


class Refused(Exception):
    """The hub does not give access, or has no such repository or revision."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model with the sizes of its files in bytes. `folder` is None for a model that has to be downloaded."""

    folder: Path | None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        return sum(size for name, size in self.sizes.items() if _is_weights(name))

    @property
    def download(self) -> int:
        return 0 if self.folder else sum(self.sizes.values())


NOTHING = Found(None)


def find_model(model: Model) -> Found:
    """Find a model. Raise ModelError if it is not on this machine and the hub does not give it."""
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
            remedy = f"Write the path of a local folder, or try --preset nano, which needs no download. {FETCH}"
            raise ModelError(f"model.name={model.name}", reason, remedy) from None
        stay_offline(unreachable)
    else:
        if not cached:
            return Found(None, {name: listed[name] for name in wanted(listed, model.trust_remote_code)})
    return Found(cached, _sizes(cached))


def quantisation_of(config: Any) -> str:
    """Return how a model is quantised by its config.json, or "" if it is not. MXFP4 is written out while it is read."""
    own = config if isinstance(config, Mapping) else config.to_dict()
    found = own.get("quantization_config") or {"quant_method": ""}
    return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else "unknown"


def refuse_quantised(name: str, config: Any) -> None:
    if (method := quantisation_of(config)) not in ("", UNPACKED):
        reason = f"it is quantised already ({method}), so an adapter could not be merged into its base"
        remedy = "Name the model that it was made from, and write model.quantize=nf4 or int8"
        raise ModelError(f"model.name={name}", reason, remedy)


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Name this setting in errors about a model, in place of model.name."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{setting}={error.value}", error.reason, error.remedy) from None


# ---------------------------------------------------------------- on this machine


def cache() -> Path:
    return Path(constants.HF_HUB_CACHE)


def snapshot(model: Model) -> Path | None:
    """Return the folder of a model in the cache, or None if its configuration or a part of its weights is missing."""
    folder = cache() / f"models--{model.name.replace('/', '--')}"
    revision = model.revision or "main"
    reference = folder / "refs" / revision
    commit = reference.read_text(errors="replace").strip() if reference.is_file() else revision
    found = folder / "snapshots" / commit
    if Path(commit).name != commit or not (found / "config.json").is_file():
        return None
    try:
        indices = [_shards(index) for index in found.glob("*.index.json")]
    except ModelError:
        return None
    here = {file.name for file in found.iterdir() if file.is_file()}
    is_complete = any(shards <= here for shards in indices) if indices else any(map(_is_weights, here))
    return found if is_complete else None


def wanted(names: Iterable[str], code: bool = False) -> list[str]:
    """Return the files that a run reads: configuration, tokenizer, and one set of weights, preferably safetensors."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.startswith("model") and _is_weights(name)]
    weights = weights or [name for name in top if name.startswith("pytorch_model") and _is_weights(name)]
    endings = (".json", ".txt", ".model", ".jinja", *([".py"] if code else []))
    # model-00001-of-00002.safetensors belongs to model.safetensors.index.json
    own = {re.sub(r"-\d+-of-\d+", "", name) + ".index.json" for name in weights}
    indices = {name for name in top if name.endswith(".index.json")} - own
    return sorted({*weights, *(name for name in top if name.endswith(endings))} - indices)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _shards(index: Path) -> set[str]:
    """Return the files that an index of weights names. Raise ModelError if it is damaged or leads elsewhere."""
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(index, f"it cannot be read ({type(error).__name__})", "Download the model again") from None
    if strange := [name for name in shards if not isinstance(name, str) or Path(name).name != name]:
        named = repr(strange[0])[:200]
        raise ModelError(index, f"it names {named}, which is no file of this folder", "Do not use this model")
    return shards


def _must_be_whole(name: str, folder: Path) -> None:
    """Raise an error for a folder without weights, without a file that their index names, or not as Octet wrote it."""
    manifest.must_be_whole(folder)
    sizes = _sizes(folder)
    if not any(map(_is_weights, sizes)):
        reason = "there are no weights (*.safetensors) in this folder"
        raise ModelError(f"model.name={name}", reason, "Download it again")
    if (folder / "model.safetensors").is_file():  # transformers reads no index then
        return
    for index in sorted(folder.glob("*.safetensors.index.json")):
        if missing := sorted(_shards(index) - sizes.keys()):
            reason = f"{', '.join(missing)[:500]} is missing in this folder, and {index.name} names it"
            raise ModelError(f"model.name={name}", reason, "Download the model again")


def fingerprint(model: Model) -> str:
    """Return a hash of samples from each file of a model's weights, or "" for weights that are not on this machine."""
    folder = NANO if model.name == "nano" else local_folder(model.name) or snapshot(model)
    files = sorted(path for path in folder.iterdir() if _is_weights(path.name)) if folder else []
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(1, size // SAMPLES)):
                file.seek(place)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest() if files else ""


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def local_folder(name: str) -> Path | None:
    """Return the folder that a name stands for, or None. Raise ModelError if it holds no model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    if not (folder / "config.json").is_file():
        adapter = next((one for one in (folder, folder / "adapter") if (one / "adapter_config.json").is_file()), None)
        if adapter:
            config = read_json(f"model.name={name}", adapter / "adapter_config.json")
            base, named = str(config.get("base_model_name_or_path"))[:200], shlex.quote(str(adapter))
            reason = f"that is {'an adapter' if adapter == folder else 'a run folder'}, not a model. Its base is {base}"
            remedy = f"Write octet eval --adapter {named}, or octet merge --adapter {named} --out FOLDER"
            raise ModelError(f"model.name={name}", reason, remedy)
        reason = "there is no config.json in this folder, so it is not a model"
        remedy = "Name a folder that save_pretrained has written, or a model of the hub"
        raise ModelError(f"model.name={name}", reason, remedy)
    return folder


def refuse_missing_folder(name: str) -> None:
    """Raise ModelError for a name that is plainly a path, where there is no folder: the hub need not be asked."""
    if name.startswith(("/", "./", "../", "~", f"{RUNS}/")) or name.count("/") > 1:  # of a hub id: one
        raise ModelError(f"model.name={name}", "there is no such folder", "Check the path")


def read_json(whose: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model or an adapter. Raise ModelError if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(whose, f"its {path.name} cannot be read ({error})", "Restore that file") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ModelError(whose, f"its {path.name} holds a {kind}, and not an object", "Restore that file")
    return found


# ---------------------------------------------------------------- on the hub


def listing(kind: Literal["models", "datasets"], name: str, revision: str | None) -> dict[str, int]:
    """Return the files at the top of a repository with their sizes; none if the hub has an error of its own."""
    try:
        entries = _get(f"/api/{kind}/{name}/tree/{_quoted(revision)}?limit={PAGE}")
        return {entry["path"]: entry.get("size", 0) for entry in entries if entry["type"] == "file"}
    except ServerError:
        return {}


def configuration(model: Model) -> dict[str, Any]:
    """Return the config.json of a model on the hub."""
    found = _get(f"/{model.name}/resolve/{_quoted(model.revision)}/config.json")
    return found if isinstance(found, dict) else {}


def licence(model: Model) -> str | None:
    """Return the licence that the card of a model names: the card in its folder or in the cache, or that on the hub."""
    if model.name == "nano":
        return "apache-2.0"
    folder = local_folder(model.name) or snapshot(model)
    card = folder / "README.md" if folder else None
    try:
        if card and card.is_file():
            _, head, _ = card.read_text(encoding="utf-8").split("---\n", 2)
            found = read_yaml(head)["license"]
        elif Path(model.name).is_dir():
            return None
        else:
            found = _get(f"/api/models/{model.name}/revision/{_quoted(model.revision)}")["cardData"]["license"]
    except (Unreachable, Refused, LookupError, TypeError, ValueError):  # the last of a card without YAML
        return None
    return found if isinstance(found, str) and re.fullmatch(r"[\w.-]+", found) else None


def _quoted(revision: str | None) -> str:
    return quote(revision or constants.DEFAULT_REVISION, safe="")


def _get(path: str) -> Any:
    """Return the hub's answer in JSON. Raise Refused, ServerError or Unreachable, at the latest after the deadline."""
    if constants.is_offline_mode():
        raise Unreachable("HF_HUB_OFFLINE forbids asking the hub")
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):  # pip reads it; huggingface_hub reads only the other two
        os.environ.setdefault("SSL_CERT_DIR" if os.path.isdir(bundle) else "SSL_CERT_FILE", bundle)

    import httpx2
    from huggingface_hub import get_session, get_token

    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}  # build_hf_headers sends a request of its own

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
    """Stop this process and its children from asking the hub, and say so once on each machine."""
    if not constants.is_offline_mode():
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"octet: {reason}: going on with what is in the cache", file=sys.stderr, flush=True)
