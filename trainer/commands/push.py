"""`octet push`: send the adapter, the merged model or an export of a run to the hub, with a card made from the run."""

import json
import sys
from argparse import ArgumentParser, Namespace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, errors, get_session
from huggingface_hub.utils import validate_repo_id

from trainer.commands.shared_options import add_run
from trainer.errors import CheckpointError, ConfigError
from trainer.machine import manifest
from trainer.machine.disk import amount
from trainer.machine.safe_text import print
from trainer.model import hub
from trainer.reports import curves as drawn
from trainer.reports import model_card
from trainer.run_folder.reader import RunFiles, as_written, exported, read_run

ANSWER_S = 300.0  # of the hub, which takes minutes over a large commit
ADAPTER, CURVES, EXPORT = "adapter_config.json", "curves.svg", "export.json"
SENT = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "model*.safetensors", "*.gguf"]
SENT += ["config.json", "generation_config.json", "model.safetensors.index.json", "Modelfile", "merges.txt"]
SENT += ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
SENT += ["vocab.json", "vocab.txt", "spiece.model", "processor_config.json", "preprocessor_config.json"]
SENT += ["chat_template.jinja", "additional_chat_templates/*.jinja"]


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet push runs/demo --to you/model --what export-gguf-q8_0 --yes"
    add_run(parser)
    parser.add_argument("--to", required=True, metavar="OWNER/NAME", help="the repository, which is created if missing")
    parser.add_argument("--what", metavar="FOLDER", help="a folder of the run (default: adapter, or model)")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument("--yes", action="store_true", help="send the files; without it they are only listed")


def run(options: Namespace) -> None:
    try:
        validate_repo_id(options.to)
        _owner, _name = options.to.split("/")
    except ValueError:
        raise ConfigError(f"--to {options.to}", "it is not the name of a repository", "Write OWNER/NAME") from None
    run = read_run(options.run)
    folder = options.run / (options.what or run.config.lora.product)
    manifest.must_be_whole(folder)
    files, exported_as = _files(folder), _export_of(run, folder)
    licence = hub.licence(run.before_training.config.model)
    with as_written(run.folder, remedy="Repair it"):
        curves = {CURVES: drawn.files([run])[CURVES]} if run.steps else {}
        picture = CURVES if curves else None
        text = model_card.card(run, options.to, _kind(folder), licence, picture, exported_as)
    contents: dict[str, Any] = {**files, "README.md": text.encode(), **curves}
    if ADAPTER in files:
        stored, key = hub.read_json(str(folder), files[ADAPTER]), "base_model_name_or_path"
        base = Path(str(stored.get(key) or run.config.model.name))
        stored[key] = base.name if base.is_absolute() else str(base)  # only the name of a local folder is published
        contents[ADAPTER] = json.dumps(stored, indent=2).encode()
    if options.yes:
        print(_send(options.to, contents, private=not options.public))
        return
    print(text)
    for name, content in contents.items():
        print(f"{amount(content.stat().st_size if isinstance(content, Path) else len(content)):>9}  {name}")
    kind = "public" if options.public else "private"
    print(f"nothing was sent: --yes sends these files to {options.to}, {kind} if the repository is new")


def _export_of(run: RunFiles, folder: Path) -> dict[str, Any]:
    """Return step and export of the model in a folder. Raise CheckpointError if it is another run's."""
    export = exported(folder)
    source = (folder / export.get("source", "")).resolve()
    if not source.is_relative_to(run.folder.resolve()):
        origin = f"it was exported from {source}" if export else "it lies elsewhere, and has no export.json"
        raise CheckpointError(folder, f"it is not part of the run {run.folder}: {origin}", "Name a folder of this run")
    if any(path.name != export.get("file") for path in folder.glob("*.gguf")):  # the rest of it is of another file
        export = {}
    return {**export, "step": run.step_of(folder)}


def _files(folder: Path) -> dict[str, Path]:
    """Return the files that belong to a model, by name, and print which other files are left out."""
    paths = sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
    files = {str(path.relative_to(folder)): path for path in paths if path.is_file()}
    if refused := [name for name in (folder.name, *files) if name.endswith((".refused", ".unchecked"))]:
        raise CheckpointError(folder, f"{refused[0]} did not pass its check", "Export it again, in another format")
    visible = {name: path for name, path in files.items() if not path.name.startswith(".")}
    sent = {name: path for name, path in visible.items() if any(fnmatch(name, known) for known in SENT)}
    if others := [name for name in files if name not in (*sent, "README.md", EXPORT, manifest.NAME)]:
        print(f"octet: left out, because they are not files of a model: {', '.join(others)}", file=sys.stderr)
    for name, path in sent.items():
        if path.resolve() != folder.resolve() / name:
            raise CheckpointError(folder, f"{name} is a link, or lies in one, to {path.resolve()}", "Copy it there")
    return sent


def _kind(folder: Path) -> str:
    for file, kind in {ADAPTER: "adapter", "config.json": "model", "*.gguf": "gguf"}.items():
        if any(folder.glob(file)):
            return kind
    raise CheckpointError(folder, "it holds neither an adapter nor a model", "Name a folder that does with --what")


def _send(to: str, contents: dict[str, Any], private: bool) -> str:
    """Send everything in one commit, and return its address."""
    get_session().timeout = ANSWER_S  # by default it waits forever
    api = HfApi(token=True)  # without a login it raises; the hub itself would only answer 401
    try:
        api.create_repo(to, private=private, exist_ok=True)
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        return str(api.create_commit(to, added, commit_message="Add a model trained with Octet").commit_url)
    except errors.LocalTokenNotFoundError:
        remedy = "Run `hf auth login`, or set HF_TOKEN"
        raise ConfigError(f"--to {to}", "there is no login on this machine", remedy) from None
    except Exception as error:  # of every class: of the network, a proxy, large files, a reply that is not the hub's
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0].rstrip(": ")
        remedy = "Check the connection, and that the login may write there"
        raise ConfigError(f"--to {to}", f"the upload failed ({reason})", remedy) from error
