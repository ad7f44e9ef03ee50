"""Train from Python, in a script or a notebook: the job of `octet train`, in this process and on its first card.

The functions and the data that are passed are also written into `given/` in the run folder, so that the commands can
resume, evaluate and repeat the run.
"""

import io
import json
import os
import random
import re
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants

from trainer.config.paths import GIVEN
from trainer.config.request import Request
from trainer.config.resolve import code_and_servers, resolve, validated
from trainer.config.settings import Config, function_name
from trainer.errors import ConfigError, DataError, OctetError
from trainer.machine import disk, hardware, user_code
from trainer.machine import quiet as libraries
from trainer.machine.safe_text import print
from trainer.plan import preflight
from trainer.problem.own_records import OwnTask
from trainer.problem.task import DataTask, make_task
from trainer.ranks import slurm
from trainer.run.copy_function import name_of, source_of
from trainer.run_folder import layout

if TYPE_CHECKING:
    from trainer.run.job import Result

Reward = Callable[..., Iterable[float | None]]
Rows = Iterable[Mapping[str, Any]]


def train(
    config: Config | None = None,
    reward: Reward | Sequence[Reward] | Mapping[Reward, float] = (),
    data: Rows | None = None,
    test: Rows | None = None,
    on_step: Callable[[int, Mapping[str, float]], object] | None = None,
    quiet: bool = False,
) -> "Result":
    """Train a model in this process, and return the run folder, the evaluations and the verdict.

    Args:
        config: The settings, from `Config` or `resolve`; by default the embedded model.
        reward: A function with TRL's signature, or several, perhaps with weights, as `{score: 0.5}`. Their sum is the
            reward; `reward.weights` is added if you set it yourself, and that of a preset is not.
        data: The training problems, as a list of dictionaries or a `datasets.Dataset`.
        test: The held-out problems; by default a share of `data`.
        on_step: A function that is called after each step with its number and its metrics. If it raises StopIteration,
            the run saves this step and stops.
        quiet: Print nothing, neither progress nor warnings. What `on_step` prints is printed.

    Raises:
        OctetError: The error that the command would print. Nothing here ends the process. After the
            StopIteration of `on_step` it is `Interrupted`.
    """
    config = resolve("nano") if config is None else config
    if not isinstance(config, Config):
        remedy = "Write train(resolve(...)) or train(Config(...))"
        raise ConfigError("config", f"it is a {type(config).__name__}", remedy)
    slurm.must_be_numbers()
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        remedy = "Start it without a launcher, or use octet train for several"
        raise ConfigError(f"WORLD_SIZE={ranks}", "train() runs in one process", remedy)
    user_code.named.update(code_and_servers(config).keys() - user_code.of_runs.keys())
    machine = hardware.detect()
    machine = replace(machine, gpus=machine.gpus[:1])
    on_step = _aloud(on_step) if quiet and on_step else on_step
    with as_it_was(config.rollout.engine, quiet):
        from trainer.run import job  # torch, deepspeed, transformers
        from trainer.run_folder import create

        folder = create.folder_of(Request(config, "python", ""))
        new = [path for path in (folder, folder / GIVEN) if config.run.dir is None or not path.exists()]
        functions: list[Any] = list(reward) if isinstance(reward, list | tuple | Mapping) else [reward]
        config = config.changed({"run.dir": folder})
        preflight.must_be_writable(folder)  # where functions and data are copied to
        try:
            config = _with_functions(config, folder, functions, reward.values() if isinstance(reward, Mapping) else ())
            config = _with_rows(config, folder, functions, data, test)
            preflight.check(config, machine)
            only_here = not all(map(_is_copied, functions))
            result = job.run(Request(config, "python", "", is_python=True, only_here=only_here, on_step=on_step))
        except (OctetError, KeyboardInterrupt) as error:
            error.args = (_of_python(str(error), folder),)
            raise
        finally:
            for path in new if not (folder / "config.yaml").exists() else ():  # it was refused
                disk.remove(path)
        assert result is not None, "a run of one process has its result on rank 0"
        return result


def _of_python(text: str, folder: Path) -> str:
    """Return an error with the row that was passed, not its line in a file, and with the command that continues."""
    places = rf"{re.escape(str(folder / GIVEN))}/(?:train|(test))\.jsonl(?::(\d+))?"
    text = re.sub(places, lambda at: (at[1] or "data") + (f"[{int(at[2]) - 1}]" if at[2] else ""), text)
    text = text.replace("The same command with the same run.dir", f"octet train --resume {shlex.quote(str(folder))}")
    return re.sub("(?<!train )--resume", "octet train --resume", text)


def _is_copied(function: Reward) -> bool:
    text, missing = source_of(function)
    return bool(text) and not missing


class Nowhere(io.TextIOBase):
    """Prints nothing until `is_over`, then to the stream in whose place it stood: a library may have kept it for its
    log, and a thread of a reward that still runs puts back the streams that it found."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.is_over = stream, False

    def write(self, text: str) -> int:
        return int(self.stream.write(text)) if self.is_over else len(text)

    def flush(self) -> None:
        if self.is_over:
            self.stream.flush()


@contextmanager
def as_it_was(engine: str, quiet: bool) -> Iterator[None]:
    """Restore afterwards what a run changes in its process, and if `quiet` print nothing. DeepSpeed is imported before,
    because its log keeps the stream of that moment."""
    with _process_restored(engine), ExitStack() as streams:
        if quiet:
            import trainer.step.engine  # noqa: F401

            for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
                nowhere = streams.enter_context(redirect(Nowhere(stream)))
                streams.callback(setattr, nowhere, "is_over", True)
        yield


def _aloud(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function as one that prints to the present streams in a block that prints nothing."""
    out, err = sys.stdout, sys.stderr

    def called(step: int, metrics: Mapping[str, float]) -> object:
        with redirect_stdout(out), redirect_stderr(err):
            return function(step, metrics)

    return called


def _with_functions(config: Config, folder: Path, functions: Sequence[Reward], weights: Iterable[float] = ()) -> Config:
    """Return the settings with reward functions, which are referred to by the paths of their copies."""
    settings = []
    for function in functions:
        if not callable(function):
            raise ConfigError("reward", f"{function!r} is not a function", "Files of functions belong to reward.custom")
        name = name_of(function)
        if not name.isidentifier():
            raise ConfigError("reward", f"{name} has no name for the log", "Write a function with `def`")
        settings.append(f"{folder / GIVEN / name}.py:{name}")
        user_code.given[settings[-1]] = function
    if not settings:
        return config
    is_chosen = "weights" in config.reward.model_fields_set  # by the user: see resolve()
    known = config.reward.weights if is_chosen else {}
    known = {**known, **dict(zip(map(function_name, settings), weights))}
    changes: dict[str, Any] = {"reward.custom": (*config.reward.custom, *settings), "reward.weights": known}
    if not is_chosen and "dead_by" not in config.rollout.model_fields_set:
        changes["rollout.dead_by"] = "reward"
    changed = validated(config.changed(changes).model_dump(warnings=False))
    for function, setting in zip(functions, settings):
        path = Path(setting.rpartition(":")[0])
        text, missing = source_of(function)
        if text:
            _write(path, text)
        if missing or not text:
            why = f"a copy lacks {', '.join(missing)}" if text else "Python has no source of it"
            print(
                f"octet: warning: reward {path.stem}: {why}, so octet train --resume, octet eval and octet repro "
                f"cannot call it from {path}. Define it in that file yourself to use them.",
                file=sys.stderr,
            )
    return changed


def _with_rows(
    config: Config, folder: Path, functions: Sequence[Reward], data: Rows | None, test: Rows | None
) -> Config:
    """Return the settings with the files of the data. If the data have no answers, only the reward functions count."""
    if data is None:
        if test is not None:
            raise DataError("test", "held-out problems come with the problems to train on", "Pass data as well")
        return config
    takes_data = [isinstance(part, DataTask) and not isinstance(part, OwnTask) for part in make_task(config.task).parts]
    if config.task.name not in ("nano", "addition") and not any(takes_data):
        raise DataError("data", f"task.name={config.task.name} has problems of its own", "Leave one of the two out")
    parts = {"train": _rows("data", data)} | ({} if test is None else {"test": _rows("test", test)})
    paths = {name: folder / GIVEN / f"{name}.jsonl" for name in parts}
    name, column = config.task.name, config.task.answer or "answer"
    is_of_gsm8k = name == "gsm8k" and all("####" in str(row.get(column)) for row in parts["train"])
    is_of_preset = name in ("nano", "addition", "gsm8k") and not is_of_gsm8k  # not a task that was chosen for the data
    changes = {"task.name": "records" if is_of_preset else name, "task.path": str(paths["train"])}
    changes |= {"task.test_path": str(paths["test"])} if "test" in paths else {}
    if functions and config.task.answer is None and not any("answer" in row for row in parts["train"]):
        changes["task.answer"] = "none"
        if "code" not in config.reward.weights:
            changes["rollout.dead_by"] = "reward"  # that of a preset is for its own task
    changed = validated(config.changed(changes).model_dump())
    for split, rows in parts.items():
        _write(paths[split], "".join(_line(split, index, row) for index, row in enumerate(rows)))
    return changed


def _rows(name: str, rows: Rows) -> list[Mapping[str, Any]]:
    found = [] if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable) else list(rows)
    if not found or not all(isinstance(row, Mapping) for row in found):
        remedy = "Pass a list of dictionaries, such as frame.to_dict('records'), or one split of a data set, such as "
        remedy += "sets['train']; a file belongs to task.name=records, task.path and task.test_path"
        raise DataError(name, f"it is a {type(rows).__name__} without dictionaries", remedy)
    return found


def _line(name: str, index: int, row: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(row), ensure_ascii=False, default=_of_numpy) + "\n"
        text.encode()  # refuses half a character
        return text
    except (TypeError, ValueError) as error:
        where = f"{'data' if name == 'train' else name}[{index}]"
        remedy = "Use dictionaries of text, numbers, lists and dictionaries"
        raise DataError(where, f"it cannot be written as JSON ({error})", remedy) from None


def _of_numpy(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else json.JSONEncoder().default(value)  # which raises TypeError


def _write(path: Path, text: str) -> None:
    """Write a file that was passed. Raise ConfigError if the run is going on, or has saved something with another."""
    if disk.is_locked(path.parents[1] / ".lock"):
        remedy = "Wait for it, or choose another folder"
        raise ConfigError(f"run.dir={path.parents[1]}", "another run is writing to it", remedy)
    if path.is_file() and path.read_bytes() != text.encode() and layout.has_saved(path.parents[1]):
        reason = f"it holds a run with another {path.name}"
        raise ConfigError(f"run.dir={path.parents[1]}", reason, "Pass what it had, or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(path, text.encode())


@contextmanager
def _process_restored(engine: str) -> Iterator[None]:
    """Restore what a run changes in its process: environment, warnings, loggers, random numbers, threads."""
    environment, hooks, is_offline = dict(os.environ), (sys.excepthook, threading.excepthook), constants.HF_HUB_OFFLINE
    hardware.prepare_cuda(engine)  # must precede the first import of torch
    import torch

    if torch.distributed.is_initialized():
        remedy = "Call torch.distributed.destroy_process_group() first"
        raise ConfigError("train()", "this process has a process group already", remedy)
    threads, numbers, dtype = torch.get_num_threads(), random.getstate(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        grad = torch.inference_mode(False)  # switches gradients on, which a notebook may have switched off
        with warnings.catch_warnings(), libraries.put_back(), torch.random.fork_rng(devices=[]), grad:
            libraries.quiet()
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        random.setstate(numbers)
        (sys.excepthook, threading.excepthook), constants.HF_HUB_OFFLINE = hooks, is_offline
        os.environ.clear()
        os.environ.update(environment)
        user_code.given.clear()
