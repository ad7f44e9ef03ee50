"""`octet eval` on the embedded model: what it prints and stores is recomputed here from the answers it stored."""

import json
import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from tests.conftest import NANO, launch, lines_of, said_by, write_lines
from tests.forks import forked
from tests.rollout.test_decoder import move_adapter
from trainer.commands.shared_options import must_be_writable
from trainer.config.resolve import resolve
from trainer.config.settings import Model
from trainer.model import merge
from trainer.model.load import load_model
from trainer.model.lora import add_adapter, save_adapter
from trainer.problem.task import evaluation_problems, make_task
from trainer.run_folder.provenance import checksums

SAMPLES, TRIALS, PROBLEMS = 4, 2, 12
MODELS = [(0, "base"), (1, "adapter"), (2, "merged")]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """Make what a run leaves within a second: an adapter that spoils many answers, and the merged model."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    config = resolve("nano")
    model = add_adapter(load_model(config.model, "fp32", torch.device("cpu")), config.lora)
    move_adapter(model, seed=0)
    save_adapter(model, folder / "adapter")
    (folder / "config.yaml").write_text(config.to_yaml())
    merge.write_merged(Model(name="nano"), folder / "adapter", folder / "merged", "fp32")
    return folder


@pytest.fixture(scope="module")
def side_by_side(run_folder, tmp_path_factory) -> tuple[dict, Path]:
    """The real command in a process of its own; what it printed, and where it wrote."""
    out = tmp_path_factory.mktemp("out")
    command = [*forked(), "-c", "from trainer.commands.main import main; main()", "eval", "--json", f"--out={out}"]
    command += [f"--adapter={run_folder / 'adapter'}", f"--merged={run_folder / 'merged'}", f"--problems={PROBLEMS}"]
    command += [f"--samples={SAMPLES}", f"--trials={TRIALS}", "--temperature=1.5"]
    return json.loads(launch(*command, folder=out).stdout), out


def answers(out: Path, model: str, sampled: bool) -> list[dict]:
    records = [record for record in lines_of(out / "eval_answers.jsonl") if record["model"] == model]
    return [record for record in records if (record["temperature"] > 0) == sampled]


def greedy(out: Path, model: str) -> dict[str, dict]:
    return {record["problem"]: record for record in answers(out, model, sampled=False)}


def test_three_models_are_asked_the_same_problems_and_what_is_printed_is_stored(side_by_side):
    printed, out = side_by_side
    assert [one["name"] for one in printed["evaluations"]] == ["base", "adapter", "merged"]
    base, adapter, merged = (greedy(out, name) for _, name in MODELS)
    assert list(base) == list(adapter) == list(merged)
    assert len(base) == PROBLEMS
    stored = json.loads((out / "eval.json").read_text())
    assert ({key: printed[key] for key in stored}, stored["settings"]["model"]) == (stored, "nano")
    assert f"merged against adapter: {PROBLEMS} of {PROBLEMS} greedy answers identical" in printed["said"][0]
    assert [one["completion"] for one in adapter.values()] == [one["completion"] for one in merged.values()]


@pytest.mark.parametrize(("number", "name"), MODELS)
def test_greedy_numbers_follow_from_the_answers(side_by_side, number, name):
    printed, out = side_by_side
    summary, records = printed["evaluations"][number], greedy(out, name).values()
    assert summary["accuracy"] == fmean(record["correct_strict"] for record in records)
    assert summary["lenient_accuracy"] == fmean(record["correct_lenient"] for record in records)
    assert Counter(summary["categories"]) == Counter(record["category"] for record in records)
    assert summary["truncated"] == fmean(record["truncated"] for record in records)
    assert summary["mean_tokens"] == fmean(record["tokens"] for record in records)
    assert summary["interval"][0] < summary["accuracy"] < summary["interval"][1] or summary["accuracy"] in (0, 1)


@pytest.mark.parametrize(("number", "name"), MODELS)
def test_sampled_numbers_follow_from_the_answers(side_by_side, number, name):
    printed, out = side_by_side
    summary, records = printed["evaluations"][number]["sampled"], answers(out, name, sampled=True)
    assert len({(one["problem"], one["trial"], one["sample"]) for one in records}) == PROBLEMS * SAMPLES * TRIALS
    assert len(records) == PROBLEMS * SAMPLES * TRIALS
    accuracies = [fmean(one["correct_strict"] for one in records if one["trial"] == trial) for trial in range(TRIALS)]
    assert summary["trial_accuracies"] == pytest.approx(accuracies)
    assert (summary["mean"], summary["deviation"]) == pytest.approx((fmean(accuracies), stdev(accuracies)))
    assert summary[f"avg@{SAMPLES}"]["value"] == pytest.approx(fmean(accuracies))
    assert len({(record["problem"], record["completion"]) for record in records}) > 2 * PROBLEMS
    first, second = ([one["completion"] for one in records if one["trial"] == trial] for trial in range(TRIALS))
    assert first != second


def test_flips_are_saved_and_counted(side_by_side):
    printed, out = side_by_side
    before, after = greedy(out, "base"), greedy(out, "adapter")
    right = {problem: (before[problem]["correct_strict"], after[problem]["correct_strict"]) for problem in before}
    flips = [flip for flip in lines_of(out / "eval_flips.jsonl") if flip["models"] == "base -> adapter"]
    assert {flip["problem"] for flip in flips} == {problem for problem, (old, new) in right.items() if old != new}
    assert all(right[flip["problem"]] == (flip["direction"] == "lost", flip["direction"] == "gained") for flip in flips)
    assert all(flip["after_completion"] == after[flip["problem"]]["completion"] for flip in flips)
    counted = Counter(flip["direction"] for flip in flips)
    comparison = printed["comparisons"][0]
    assert (comparison["gained"], comparison["lost"]) == (counted["gained"], counted["lost"])
    assert flips, "the adapter of this test is meant to spoil answers"


def test_the_table_the_comparison_and_the_flips_are_printed(run_folder, capsys):
    status, said, _ = said_by(capsys, "eval", "--adapter", run_folder / "adapter", "--problems", 8)
    assert (status, f"written to {run_folder}/eval: eval.json" in said) == (0, True)
    table, found, _ = said.partition("base -> adapter: ")
    assert (bool(found), "base" in table) == (True, True)
    assert max(map(len, table.splitlines())) <= 80
    counted = Counter(flip["direction"] for flip in lines_of(run_folder / "eval/eval_flips.jsonl"))
    shown = sum(line.startswith("  nano/test/") for line in said.splitlines())
    assert shown == min(3, counted["gained"]) + min(3, counted["lost"]) > 0


def test_problems_that_the_run_was_trained_on_are_counted(run_folder, tmp_path, capsys):
    config = resolve(str(run_folder / "config.yaml"))
    asked = evaluation_problems(make_task(config.task), 4)
    arguments = ("eval", run_folder, "--problems", 4, "--out", tmp_path / "out")
    for trained, told in ((asked[:2], "2 of 4 problems are training problems of"), ([], "")):
        (run_folder / "data.json").write_text(json.dumps({"checksums": checksums(trained)}))
        status, _, error = said_by(capsys, *arguments)
        assert (status, "training problems" in error, told in error) == (0, bool(trained), True)
    (run_folder / "data.json").unlink()
    assert "base is nano without first, with which" in said_by(capsys, *arguments, "lora.start=first")[2]


def test_a_table_of_which_a_part_is_asked_is_named(run_folder, tmp_path, capsys):
    write_lines(tmp_path / "mine.jsonl", [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)])
    path = f"task.path={tmp_path}/mine.jsonl"
    arguments = ["eval", run_folder, "--out", tmp_path / "out", "--problems", 1, "task.name=records", path]
    assert f"a part of {tmp_path}/mine.jsonl; task.test_path=" in said_by(capsys, *arguments)[2]
    assert "a part of" not in said_by(capsys, *arguments, f"task.test_{path[5:]}")[2]
    write_lines(tmp_path / "asked.jsonl", [{"question": "8 + 1?", "answer": "9"}])
    data = f"{{name: records, path: {tmp_path}/mine.jsonl, test_path: {tmp_path}/asked.jsonl}}"
    (tmp_path / "own.yaml").write_text(f"model: {{name: nano}}\ntask: {data}\n")
    named = ["--model", "nano", "--preset", tmp_path / "own.yaml", "--out", tmp_path / "out"]
    said = said_by(capsys, "eval", *named, "rollout.max_new_tokens=4", path)[2]
    assert f"are those of {tmp_path}/asked.jsonl; " in said


def test_trials_alone_take_one_sample_each(tmp_path, capsys):
    arguments = ("--model", "nano", "--problems", 8, "--trials", 3, "--json", "--out", tmp_path)
    _, first, _ = said_by(capsys, "eval", *arguments)
    _, again, _ = said_by(capsys, "eval", *arguments)
    _, other, _ = said_by(capsys, "eval", *arguments, "run.seed=7", "--temperature", 2)
    draws = json.loads(first)["evaluations"][0]["sampled"]
    assert (draws["samples"], draws["temperature"], len(draws["trial_accuracies"])) == (1, 0.7, 3)
    assert "maj@1" not in draws
    assert (first, json.loads(other)["evaluations"][0]["sampled"]["seed"]) == (again, 7)


@pytest.fixture
def foreign_model(tmp_path) -> Path:
    """A folder with a model of another kind, without a chat template and without a padding token."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "tiny-gpt2"
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    tokenizer.chat_template, tokenizer.pad_token = None, None
    tokenizer.save_pretrained(folder)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512, "vocab_size": len(tokenizer)}
    GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    return folder


def test_any_model_on_any_task(foreign_model, gsm8k_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, said, error = said_by(
        *(capsys, "eval", "--model", foreign_model, "--task", "gsm8k", "--problems", 4, "--json"),
        *(f"task.data_dir={gsm8k_folder}", "rollout.max_new_tokens=4"),
    )
    assert status == 0, error
    summary = json.loads(said)["evaluations"][0]
    assert (summary["name"], summary["problems"], summary["accuracy"]) == ("model", 4, 0.0)
    assert [one["temperature"] for one in lines_of(tmp_path / "eval-tiny-gpt2/eval_answers.jsonl")] == [0.0] * 4
    assert json.loads((tmp_path / "eval-tiny-gpt2/eval.json").read_text())["comparisons"] == []


def test_an_adapter_of_other_layers_is_refused_before_the_evaluation(run_folder, foreign_model, tmp_path, capsys):
    shutil.copytree(run_folder / "adapter", tmp_path / "adapter")
    described = tmp_path / "adapter/adapter_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"base_model_name_or_path": "some/model"}))
    status, _, error = said_by(
        *(capsys, "eval", "--model", foreign_model, "--adapter", tmp_path / "adapter", "--problems", 2),
        *("rollout.max_new_tokens=4", "--out", tmp_path / "o"),
    )
    assert status == 2
    assert f"it was trained over some/model; is model.name={foreign_model} the same?" in error
    assert f"{tmp_path}/adapter: it does not fit {foreign_model} (" in error
    assert "It was trained over some/model: name that base," in error
    assert not (tmp_path / "o").exists()


def test_ranks_that_start_together_do_not_refuse_each_others_folder(tmp_path, monkeypatch):
    """slurm/eval.sbatch runs the command once for each card."""

    def mkdir(folder: Path, *arguments, **named):
        raise FileExistsError(17, "File exists", str(folder))  # another rank was faster

    monkeypatch.setattr(Path, "mkdir", mkdir)
    must_be_writable(tmp_path / "run/eval")
    assert not [*tmp_path.iterdir()]
