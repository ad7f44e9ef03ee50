"""Training from Python: in a script as a person writes it, and what is refused."""

import ast
import json
import re
import sys
import threading
from functools import cache, partial
from pathlib import Path

import numpy
import pytest
import torch

from examples import json_extract
from octet import Config, OctetError, evaluate, export, resolve, train
from tests.conftest import ROOT, launch, learned, refuses
from tests.e2e.short_job import ADAPTER
from tests.e2e.short_job import train as train_by_command
from tests.forks import forked
from trainer.config.request import Request
from trainer.errors import ConfigError, DataError, ModelError
from trainer.machine import user_code
from trainer.problem.task import make_task
from trainer.run import closing, python_api
from trainer.run.copy_function import source_of
from trainer.run_folder.reader import read_run
from trainer.run_folder.stopped import stopped

FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.problems=8", "run.steps=2"]
FEW += ["prompt.style=chat", "run.merge=false"]
SCORE = """
def score(completions, answer, **columns):
    return [len(text) % 7 + float(gold in text) for text, gold in zip(completions, answer)]
"""
SCRIPT = f"""
import gc, io, json, logging, math, os, random, re, signal, sys, threading, warnings
from typing import List, Text
from contextlib import redirect_stderr, redirect_stdout
from octet import Interrupted, evaluate, export, resolve, train
from trainer.machine.quiet import BITSANDBYTES, DEEPSPEED, KERNELS, MODELS, MXFP4
from trainer.problem.word_problems import NanoTask

louder = [logging.getLogger(name) for name in (BITSANDBYTES, KERNELS, MXFP4)]
filtered = [logging.getLogger(name) for name in (MODELS, DEEPSPEED)]

def state():
    import torch
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils.logging import is_progress_bar_enabled
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    hooks = [sys.excepthook, threading.excepthook, sys.unraisablehook, warnings.filters[:], torch.get_num_threads()]
    hooks += [torch.get_default_dtype(), torch.is_grad_enabled()]
    group = [torch.distributed.is_initialized(), os.getpgrp(), torch.random.get_rng_state().tolist()]
    loggers = [logger.level for logger in louder], [logger.filters[:] for logger in filtered]
    bars = [is_progress_bar_enabled(), are_progress_bars_disabled()]
    return handlers, hooks, group, dict(os.environ), loggers, bars, random.getstate()

{SCORE}
NINE, DIGIT = 9, re.compile("[0-9]", re.ASCII)

def shorter(text: Text) -> float:
    return len(text) / NINE + len(DIGIT.findall(text))

def rounded(completions: List[Text], **columns) -> List[float]:
    random.seed(len(completions))  # of the whole process, which has its numbers back afterwards
    return [math.floor(shorter(text)) for text in completions]

data = [{{"question": one.question, "answer": one.gold}} for one in NanoTask().train()[:60]]
few = {FEW!r}
for logger in louder:  # whoever started this process may have called quiet()
    logger.setLevel(10)
for logger in filtered:
    logger.filters.clear()
import torch
torch.set_grad_enabled(False)  # as in a notebook that computes with other models
torch.set_default_dtype(torch.float64)
before = state()
seen = []
def keep(step, metrics):
    seen.append([step, metrics["reward/mean"]])
    if step == 2:
        raise StopIteration  # nothing is left to stop
    return True  # as the `update` of a progress bar does, which stops nothing

result = train(
    resolve("nano", None, [*few, "run.dir=first"]), reward=score, data=data[:50], test=data[50:], on_step=keep
)
assert state() == before
try:
    train(resolve("nano", None, [*few, "run.dir=first"]), reward=score, data=data[:40], test=data[50:])
except Exception as error:
    refused = f"{{type(error).__name__}}: {{error}}"
assert state() == before

def late(completions, calls=[], **columns):
    calls.append(1)
    return [0.0 if len(calls) < 5 else 1 / 0 for _ in completions]

try:
    train(resolve("nano", None, [*few, "run.dir=late"]), reward=late, data=data)
except Exception as error:
    failed = str(error)
with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
    try:
        train(
            resolve("nano", None, [*few, "run.dir=stopped", "run.steps=3"]),
            reward=lambda completions, **columns: [math.sqrt(len(text)) for text in completions],
            data=data,
            on_step=lambda step, metrics: print("made", step) or next(iter(())),
            quiet=True,
        )
    except Interrupted as error:
        stopped = str(error)
assert state() == before
quietly = [out.getvalue(), err.getvalue()]

def faulty(step, metrics):
    raise LookupError("mine")

try:
    train(resolve("nano", None, [*few, "run.dir=faulty"]), data=data, on_step=faulty)
except LookupError as error:
    raised = [str(error), error.__traceback__.tb_next is not None]
gc.collect()
left = [type(one).__name__ for one in gc.get_objects() if type(one).__name__.endswith("ForCausalLM")]
import datasets, huggingface_hub
huggingface_hub.utils.disable_progress_bars()
before = state()
rows = datasets.Dataset.from_list([{{"question": row["question"]}} for row in data])
second = train(resolve("nano", None, [*few, "run.dir=second"]), reward={{rounded: 0.5}}, data=rows)
assert state() == before
with redirect_stdout(io.StringIO()) as out:
    asked = evaluate(result, problems=3, samples=2)
    written = [str(export("first", problems=2)), str(export(result, to="gguf", check=False, out="files"))]
assert state() == before
print(json.dumps({{
    "seen": seen, "stopped": stopped, "quietly": quietly, "raised": raised, "printed": out.getvalue(),
    "asked": {{name: [len(one.outcomes), one.sampled is not None] for name, one in asked.items()}}, "written": written,
    "refused": refused, "failed": failed, "left": left,
    "evaluations": {{name: one.accuracy for name, one in result.evaluations.items()}},
    "adapter": str(result.adapter), "model": result.model, "verdict": result.verdict.kind,
    "second": second.config.task.answer,
}}))
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "mine.py").write_text(SCRIPT)
    (folder / "said").write_text(launch(*forked(), "mine.py", folder=folder, check=True).stdout)
    return folder, json.loads((folder / "said").read_text().splitlines()[-1])


def test_it_comes_to_the_same_as_the_command(scripted, tmp_path):
    """To the last bit, with the function in a file of its own."""
    given = scripted[0] / "first/given"
    (tmp_path / "rewards.py").write_text(SCORE)
    data = [f"task.path={given}/train.jsonl", f"task.test_path={given}/test.jsonl", "task.name=records"]
    settings = [*FEW, *data, "reward.custom=rewards.py:score", "run.dir=it"]
    train_by_command(tmp_path, "--preset", "nano", *settings)
    first, command = scripted[0] / "first", tmp_path / "it"
    assert learned(first) == learned(command)
    assert (first / "samples.jsonl").read_text() == (command / "samples.jsonl").read_text()
    assert (first / ADAPTER).read_bytes() == (command / ADAPTER).read_bytes()
    assert learned(command)[-1]["grad_norm"] > 0


def test_the_result_names_what_is_wanted_next(scripted):
    folder, result = scripted
    assert [*result["evaluations"]] == ["base", "trained"]
    assert result["adapter"] == "first/adapter"
    assert (folder / result["adapter"] / "adapter_model.safetensors").is_file()
    assert (result["model"], result["verdict"]) == (None, "cannot tell")
    assert result["refused"].startswith("ConfigError: run.dir=first: ")  # with other data in the folder
    assert "1 / 0" in result["failed"]
    assert result["left"] == []  # the next run needs the memory of the card
    assert len((folder / "first/given/train.jsonl").read_text().splitlines()) == 50


def test_a_function_sees_each_step_and_may_stop_the_run(scripted):
    folder, result = scripted
    assert result["seen"] == [[one["step"], one["reward/mean"]] for one in learned(folder / "first") if one["step"]]
    assert result["stopped"].startswith("stopped after step 1, which is saved")
    assert "octet train --resume stopped" in result["stopped"]
    assert (folder / "stopped/checkpoints/step_000001").is_dir()
    assert not (folder / "stopped/verdict.json").exists()
    assert stopped(read_run(folder / "stopped")) == "stopped after step 1"
    assert result["raised"] == ["mine", True]


def test_nothing_is_printed_but_what_the_function_prints(scripted):
    assert scripted[1]["quietly"] == ["made 1\n", ""]


def test_a_lambda_is_copied_under_a_name_of_its_own(scripted):
    function = user_code.load("reward.custom", f"{scripted[0] / 'stopped/given/function.py'}:function")
    assert function(["x" * 9]) == [3.0]


def test_evaluations_and_exports_are_returned_and_not_printed(scripted):
    folder, result = scripted
    assert result["asked"] == {"base": [3, True], "adapter": [3, True]}
    assert (folder / "first/eval/eval.json").is_file()
    safetensors, gguf = result["written"]
    assert json.loads((folder / safetensors / "export.json").read_text())["problems"] == 2
    assert (folder / gguf).read_bytes()[:4] == b"GGUF"
    assert result["printed"] == ""


def test_what_cannot_be_exported_or_evaluated_is_named(tmp_path):
    for call in (partial(export, to="onnx"), partial(export, format="q9"), evaluate, export):
        with pytest.raises(OctetError, match=r"onnx|q9|there is no such folder"):
            call(tmp_path / "nowhere")


def test_functions_that_only_this_process_has_are_left_to_the_caller():
    custom, paths = ["reward.custom=it/given/Right.py:Right"], ["task.path=it/given/train.jsonl", "task.name=records"]
    weights = "reward.weights={Right: 0.5, format: 0.1}"
    config = resolve("nano", None, [*custom, weights])
    request = Request(config, "python", "", is_python=True, only_here=True)
    line, given = closing._start(request, "8gb", [*custom, *paths, weights, "task.limit=9"]), []
    names = {"resolve": resolve, "train": lambda *settings, **arguments: given.append((*settings, arguments))}
    exec(line, names)  # noqa: S102
    assert given[0][1] == {"reward": ..., "data": ...}
    assert given[0][0] == resolve("8gb", None, ["reward.weights={format: 0.1}", "task.limit=9"])


def test_what_is_proposed_next_is_python(scripted):
    """The proposal has the settings of the task, which name its copies of data and functions."""
    said = (scripted[0] / "said").read_text()
    assert "run_deepspeed.sh" not in said
    settings = []
    for line in said.splitlines():
        if line.startswith("  train("):
            exec(line.strip(), {"resolve": resolve, "train": settings.append})  # noqa: S102
    few = [f"task.{key}=first/given/{name}.jsonl" for key, name in (("path", "train"), ("test_path", "test"))]
    few += ["task.name=records"]
    first, _second = settings
    assert first == resolve("8gb", None, [*few, "reward.custom=first/given/score.py:score"])


def test_another_run_in_the_same_process_has_data_without_answers(scripted):
    folder, result = scripted
    assert result["second"] == "none"
    last = learned(folder / "second")[-1]
    assert last["reward/mean"] == pytest.approx(0.5 * last["reward/rounded"])
    function = user_code.load("reward.custom", f"{folder / 'second/given/rounded.py'}:rounded")
    assert function(["x" * 20, "12"]) == [2, 2]  # the copy has the modules, the function and the constants that it uses


GIVEN = [("8gb", "7", "records"), ("12gb", "Paris", "records"), ("smollm2", 7, "records")]


@pytest.mark.parametrize(("preset", "answer", "task"), [*GIVEN, ("8gb", "3 + 4\n#### 7", "gsm8k")])
def test_data_take_the_place_of_the_task_of_a_preset(tmp_path, preset, answer, task):
    data = [{"question": f"{number} + {number}?", "answer": answer} for number in range(9)]
    config = python_api._with_rows(resolve(preset), tmp_path, [], data, None)
    assert config.task.name == task
    assert {problem.gold for problem in make_task(config.task).train()} == {str(answer).rpartition("#### ")[2]}


def test_settings_name_the_columns_of_data(tmp_path):
    config = resolve("nano", None, ["task.name=records", "task.question=Frage", "task.answer=Zahl"])
    config = python_api._with_rows(config, tmp_path, [], [{"Frage": "a", "Zahl": 7}, {"Frage": "b", "Zahl": 7}], None)
    assert make_task(config.task).train()[0].gold == "7"


def test_a_run_that_is_interrupted_says_how_the_command_continues(tmp_path, monkeypatch):
    def stopped(request):
        assert request.config.rollout.max_new_tokens == 40  # that of the preset nano, which fits the embedded model
        raise KeyboardInterrupt("--resume it continues after step 1, which is saved.")

    monkeypatch.setattr("trainer.run.job.run", stopped)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt, match=r"^octet train --resume it continues"):
        train()


def test_data_without_answers_go_with_the_preset_of_a_card(tmp_path):
    config = python_api._with_rows(resolve("8gb"), tmp_path, [len], [{"question": "a"}], None)
    assert (config.task.name, config.task.answer, config.rollout.dead_by) == ("records", "none", "reward")


@pytest.mark.parametrize(("settings", "weights", "dead_by"), [
    ([], {"len": 1.0}, "reward"),
    (["rollout.dead_by=correct"], {"len": 1.0}, "correct"),
    (["reward.weights={correct: 1}"], {"correct": 1.0, "len": 1.0}, "correct"),
])  # fmt: skip
def test_a_function_is_the_whole_reward_unless_weights_are_named(tmp_path, settings, weights, dead_by):
    for config in (resolve("8gb", None, settings), resolve("8gb", "dapo", settings)):
        changed = python_api._with_functions(config, tmp_path, [len])
        assert (changed.reward.all_weights, changed.rollout.dead_by) == (weights, dead_by)


def test_a_function_that_cannot_be_copied_is_named(tmp_path, capsys):
    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [1.0 for _ in completions]

    class Right:
        def __call__(self, completions):
            return [1.0] * len(completions)

    def measured(completions):
        return [alias(measure(text)) for text in completions]

    alias, (_, measure) = locked, (lambda text: 0,
                                   lambda text: 2)  # fmt: skip
    changed = python_api._with_functions(Config(), tmp_path, [locked, Right(), measured])
    said = capsys.readouterr().err
    assert "reward locked: a copy lacks lock, so octet train --resume" in said
    assert "reward measured: a copy lacks alias, so" in said
    assert "reward Right: Python has no source of it" in said
    assert changed.reward.custom[1] == f"{tmp_path}/given/Right.py:Right"
    assert changed.reward.all_weights == {"locked": 1.0, "Right": 1.0, "measured": 1.0}


def test_a_copy_has_a_global_that_is_only_added_to():
    def graded(completions):
        global calls  # noqa: PLW0603
        calls += 1
        return [1.0 for _ in completions]

    assert "calls = 0\n" in source_of(graded)[0]


calls = 0


def test_a_copy_has_functions_that_are_awaited_or_wrapped():
    async def grade(text):
        return 1.0

    @cache
    async def graded(completions):
        return [await grade(text) for text in completions]

    text, missing = source_of(graded)
    assert (text.count("async def grade"), missing) == (2, [])


WORD = "four"


def test_a_copy_has_a_constant_that_an_inner_function_hides_and_names_a_module_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    (tmp_path / "beside.py").write_text("def beside(text):\n    return len(text)\n")
    import beside

    def graded(completions):
        least: int = beside.beside(WORD)
        return [min(least, *(WORD + 1 for WORD in [len(text)])) for text in completions]

    text, missing = source_of(graded)
    assert ("WORD = 'four'\n" in text, missing) == (True, ["beside"])


def test_nothing_is_imported_before_it_is_used():
    code = "import sys, octet; print([name for name in sys.modules if name.startswith('trainer')])"
    code += "; print(dir(octet)); from octet import train; print('torch' in sys.modules)"
    names = ["Config", "Interrupted", "OctetError", "OpenEnv", "Verifiers", "__version__"]
    names += ["evaluate", "export", "resolve", "train"]
    assert launch(sys.executable, "-c", code).stdout == f"[]\n{names}\nFalse\n"


def test_the_example_of_json_runs_and_its_reward_reads_what_is_in_the_mail(tmp_path):
    for order in json_extract.orders():
        mail = order["question"].rpartition("Mail: ")[2]
        assert all(order[field] in mail for field in json_extract.FIELDS)
    first, columns = json_extract.orders()[0], json_extract.FIELDS
    right = {field: first[field] for field in columns}
    texts = [json.dumps(right), json.dumps({**right, "city": "Rome"}), "[]", f"{json.dumps(right)} Thanks!", "{}"]
    paid = json_extract.score(texts, *([first[field]] * len(texts) for field in columns))
    assert paid == [1.0, 0.75, 0.0, 0.0, 0.25]
    few = ["rollout.group_size=2", "rollout.problems=2", "run.steps=1", "eval.problems=2", "rollout.max_new_tokens=4"]
    script = ROOT / "examples/json_extract.py"
    said = launch(*forked(), script, "nano", *few, "run.dir=it", folder=tmp_path, check=True).stdout
    assert (tmp_path / "it/verdict.json").is_file()
    assert said.splitlines()[-1], "the last line is the answer of the model"


def test_settings_of_the_page_and_of_the_notebook_are_accepted():
    cells = json.loads((ROOT / "examples/octet.ipynb").read_text())["cells"]
    texts = [(ROOT / "docs/python.md").read_text(), *("".join(cell["source"]) for cell in cells)]
    calls = [call for text in texts for call in re.findall(r'resolve\(\s*("[^)]*)\)', text)]
    assert len(calls) == 3
    for call in calls:
        resolve(*ast.literal_eval(f"({call})"))


def test_what_cannot_be_used_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve("nano", None, [f"run.dir={tmp_path}"])

    def correct(completions):
        return [0.0] * len(completions)

    good = {"question": "a", "answer": "1"}
    refused = [(ConfigError, "reward", {"reward": one}) for one in (3, "rewards.py:score", [3])]
    refused += [(ConfigError, "reward.custom", {"reward": correct})]
    refused += [(DataError, "data", {"data": one}) for one in ("mine.jsonl", tmp_path, good, 3, [], ["question"])]
    refused += [(DataError, "data[1]", {"data": [good, {"question": "b", "answer": {1}}]})]
    refused += [(DataError, "data[1]", {"data": [good, {"question": "\ud800", "answer": "1"}]})]
    refused += [(DataError, "test", {"data": [good], "test": "mine.jsonl"}), (DataError, "test", {"test": []})]
    refused += [(ConfigError, "config", {"config": one}) for one in ("nano", {})]
    for error, key, given in refused:
        with refuses(key, error):
            train(**{"config": config, **given})
    (tmp_path / "mine.py").write_text("class Own:\n    def train(self): ...\ndef build(settings): return Own()\n")
    for own in ("task.name=mine.py:build", "task.name=reasoning_gym:gcd", "task.mix={nano: 1, addition: 1}"):
        with refuses("data", DataError, names="has problems of its own"):
            train(resolve("nano", None, [own]), data=[good])
    with refuses("run.dir", names="is a file"):
        train(resolve("nano", None, ["run.dir=mine.py/it"]), data=[good])
    with refuses("data[1]", DataError):
        train(data=[good, {"question": "b", "answer": float("nan")}])
    for overrides in ("run.steps=1", None, 3, [3], ["run.steps=1", None]):
        with refuses("overrides", names="['run.steps=100']"):
            resolve("nano", None, overrides)
    with refuses("recipe", names="resolve(preset, None, [...])"):
        resolve("nano", ["run.steps=1"])
    with refuses("data", DataError, names="such as sets['train']; a file"):
        train(data={"train": [good], "test": [good]})

    def nothing(completions):
        return [0.0] * len(completions)

    for folder in ("new", "."):
        with refuses("model.name", ModelError):
            train(resolve("nano", None, [f"run.dir={folder}", "model.name=no/such/one"]), nothing, [good])
    assert not list((tmp_path / "runs").iterdir())
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "mine.py", "__pycache__"}


def test_rows_may_have_numbers_of_other_libraries():
    row = {"answer": numpy.int64(3), "scores": numpy.array([0.5, 1.0]), "level": torch.tensor(2)}
    assert json.loads(python_api._line("train", 0, row)) == {"answer": 3, "scores": [0.5, 1.0], "level": 2}
    with refuses("data[0]", DataError, names="Object of type set is not JSON serializable"):
        python_api._line("train", 0, {"answer": {3}})


def test_a_process_group_and_ranks_of_somebody_else_are_left_alone(alone, monkeypatch):
    with refuses("train()", names="destroy_process_group"):
        train(Config())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refuses("WORLD_SIZE"):
        train(Config())
