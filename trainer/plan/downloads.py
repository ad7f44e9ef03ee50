"""Check within seconds that the model and the data are available, before anything heavy is imported."""

import glob
import os
from pathlib import Path

from huggingface_hub import constants

from trainer.config.settings import Config, Model, TaskSettings
from trainer.errors import DataError, ModelError
from trainer.machine.safe_text import visible
from trainer.model.hub import FETCH, NOTHING, Found, Refused, Unreachable, find_model, listing, naming, stay_offline
from trainer.problem.sources import HubSet
from trainer.problem.task import make_task
from trainer.run_folder.model_source import Source


def check(config: Config, needs_data: bool = True) -> Found:
    """Return the model. Raise ModelError or DataError if it or the data is neither on this machine nor on the hub."""
    model = find_model(config.model)
    if needs_data:
        find_all_data(config.task)
    return model


def find_all_data(task: TaskSettings) -> None:
    for data in make_task(task).hub_sets():
        find_data(data, task)


def find_teacher(model: Model | None) -> Found:
    """Return the model that a run loads as its teacher; NOTHING if it loads none. Raise ModelError if it is missing."""
    if model is None:
        return NOTHING
    with naming("teacher.name"):
        return find_model(model)


def find_adapters(config: Config) -> None:
    """Raise ModelError if the adapter that a run starts from, or that of its teacher, does not exist, or is known to
    have another base. One of a base with the same shapes would fit, and compute something else."""
    start = ("lora.start", config.lora.start, config.model, "model.name")
    teacher = ("teacher.adapter", config.teacher.adapter, config.teacher_model or config.model, "teacher.name")
    for key, folder, model, of_base in (start, teacher):
        if folder is None:
            continue
        if not (folder / "adapter_config.json").is_file():
            raise ModelError(f"{key}={folder}", "there is no adapter_config.json in it", "Name the adapter of a run")
        source = Source(folder, is_adapter=True)
        if source.is_over(model) is False:
            base = visible(source.base)
            reason = f"it was trained over {base}, not over {model.name}"
            raise ModelError(f"{key}={folder}", reason, f"Write {of_base}={base}, or correct its adapter_config.json")


def find_data(data: HubSet, task: TaskSettings) -> bool:
    """Return True if the data is in the cache, False if only the hub has it. Raise DataError if neither does."""
    cached = is_prepared(data)
    try:
        listing("datasets", data.name, None)
    except (Refused, Unreachable) as error:
        if not cached:
            reason = f"{data} is neither in the cache ({data_cache()}) nor given by the hub: {error}"
            remedy = "Check the spelling, `hf auth login` if it is private or gated, or write task.data_dir=FOLDER, "
            remedy += f"with train.jsonl and test.jsonl. {FETCH}"
            raise DataError(f"task.name={task.name}", reason, remedy) from None
        if isinstance(error, Unreachable):
            stay_offline(error)
    return cached


def data_cache() -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE", f"{constants.HF_HOME}/datasets"))


def is_prepared(data: HubSet) -> bool:
    """Return True if the cache of `datasets` holds this split of this subset, so that it is read without the hub."""
    split, subset = data.split.partition("[")[0], glob.escape(data.subset or "") or "*"
    plain = data.name.replace("/", "").replace("_", "").casefold()  # `datasets` writes owner/MyData as owner___my_data
    folders = [*data_cache().glob(f"*___*/{subset}")]
    ours = [folder for folder in folders if folder.parent.name.replace("_", "").casefold() == plain]
    return any(file for folder in ours for file in folder.rglob(f"*-{split}*.arrow"))
