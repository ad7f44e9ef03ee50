"""What a path or a name on a command line stands for: an adapter or a model, of a run, of a folder or on the hub."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.settings import Model
from trainer.errors import CheckpointError
from trainer.machine.safe_text import as_command
from trainer.model import hub
from trainer.run_folder.layout import checkpoints
from trainer.run_folder.reader import read_run

LONGEST_NAME = 500  # characters of the name of a model


class Source(NamedTuple):
    folder: Path | None  # None for a model on the hub, and for the embedded one
    is_adapter: bool = False

    @classmethod
    def of(cls, named: Path | str) -> "Source":
        """Return the source with this path or name. The folder of a run stands for its adapter or its model."""
        folder = Path(named)
        for place in (folder / "adapter", folder / "model", folder):
            for file in ("adapter_config.json", "config.json"):
                if (place / file).is_file():
                    return cls(place, file == "adapter_config.json")
        if folder.exists():
            remedy = "Name the folder of a run that has ended"
            if saved := checkpoints(folder):
                resumed = as_command(["octet", "train", "--resume", str(folder)])
                remedy = f"Name {saved[-1]}, or end the run first: `{resumed}`"
            raise CheckpointError(folder, "there is neither an adapter nor a model in it", remedy)
        return cls(None)

    @property
    def adapter(self) -> Path | None:
        return self.folder if self.is_adapter else None

    @property
    def run(self) -> Path | None:
        """Return the folder of the run that made it, also for the adapter of a checkpoint."""
        if self.folder is None:
            return None
        place = self.folder.resolve()
        is_of_checkpoint = place.parent.parent.name == "checkpoints"
        runs = [place.parents[2]] if is_of_checkpoint else [self.folder.parent, place.parent]  # the last for `.`, links
        return next((run for run in runs if (run / "config.yaml").is_file()), None)

    @property
    def base(self) -> str:
        """Return the name of the model that the adapter was trained over, or "" if it is not recorded."""
        base = Path(self._recorded("base_model_name_or_path"))
        if base.parts[:1] == ("unsloth",):  # adapters of unsloth name a 4-bit copy of the 16-bit model
            return str(base).removesuffix("-bnb-4bit").removesuffix("-unsloth")
        return "nano" if base.parts[-3:] == ("trainer", "model", "nano") else str(base) if base.parts else ""

    @property
    def revision(self) -> str | None:
        """Return the revision of the base that the adapter was trained over, if it names one."""
        return self._recorded("revision") or None

    def _recorded(self, name: str) -> str:
        """Return a text in the configuration of the adapter, or "" if it is not there."""
        assert self.folder is not None, "it is an adapter"
        text = hub.read_json(str(self.folder), self.folder / "adapter_config.json").get(name)
        if isinstance(text, str) and len(text) <= LONGEST_NAME and text.isprintable() and not text.startswith("~"):
            return text
        return ""

    def is_over(self, model: Model) -> bool | None:
        """Return whether the adapter was trained over this model, or None if that cannot be known."""
        wanted, found = _on_the_hub(self.base), _on_the_hub(model.name)
        if self.base == model.name or (wanted and wanted == found):  # another owner's copy may have other files
            return True
        weights = self.base and hub.fingerprint(Model(name=self.base)), hub.fingerprint(model)
        if all(weights):
            return weights[0] == weights[1]
        if folder := hub.local_folder(model.name):
            if wanted == folder.resolve().name.lower():
                return True
            stored = hub.read_json(f"model.name={model.name}", folder / "config.json")
            found = _on_the_hub(str(stored.get("_name_or_path")))
        return wanted == found if wanted and found else None

    def must_have_its_base(self, model: Model) -> None:
        """Raise CheckpointError if this was made by a run, and the base has other weights than in that run."""
        if self.run:
            before = str(read_run(self.run).machine.get("base weights", ""))
            hub.must_have(model, before, f"write model.name={model.name} to take them as they are")

    def described(self, out: Path) -> dict[str, Any]:
        """Return what an export in `out` records about the model that it was made from."""
        assert self.folder is not None, "it is an adapter or a model in a folder"
        step = read_run(self.run).step_of(self.folder) if self.run else None
        source = os.path.relpath(self.folder.resolve(), out.resolve())
        return {"name": (self.run or self.folder).resolve().name, "source": source, "step": step}


def _on_the_hub(model: str) -> str:
    """Return the name of a model on the hub without its owner, "nano" for the embedded model, or "" for a folder."""
    if model == "nano":
        return model
    return "" if Path(model).exists() or model.count("/") != 1 else model.partition("/")[2].lower()
