"""The evaluations of a run: the best adapter is kept, a run that no longer rises stops, and a resumed run counts on."""

import json
import os
import shutil
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import launch, lines_of
from tests.evaluation.test_evaluate import evaluation, outcome
from tests.forks import forked
from trainer import loop
from trainer.config.resolve import resolve
from trainer.config.settings import Eval
from trainer.evaluation.best import EvaluationHistory, describe, metrics_of
from trainer.evaluation.evaluate import Evaluation
from trainer.run import closing
from trainer.watch.measure import LENIENT, REWARD, STRICT

KEPT = ("best/best.json", "best/adapter_model.safetensors", "metrics.jsonl")


def level(right: int) -> Evaluation:
    """The evaluation of four answers with so many right."""
    return evaluation("", "y" * right + "n" * (4 - right))


def course(
    folder: Path, first_step: int = 0, total_steps: int = 9, problems: int = 4, run: str = "", **settings
) -> EvaluationHistory:
    return EvaluationHistory(folder, Eval(**{"every": 1, **settings}), problems, first_step, total_steps, run)


def go(course: EvaluationHistory, *levels: int) -> list[bool]:
    """Evaluations after the next steps; whether each is a new best. They are journalled as in a run."""
    new = []
    for seen in map(level, levels):
        step = max([course.first_step, *(one.step for one in course.milestones)]) + 1
        with (course.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": 0.1, **metrics_of(seen)}) + "\n")
        new.append(course.add(step, seen))
    return new


def kept(folder: Path, *levels: int, text: str = "whole", run: str = "it") -> EvaluationHistory:
    """A run with these evaluations, which keeps the model of the last one. It is this text."""
    history = course(folder, run=run)
    go(history, *levels)
    history.keep(weights(text))
    return history


def weights(text: str):
    """What exports a model that is this text."""
    return lambda folder: (folder.mkdir(), (folder / "weights").write_text(text))


def test_a_new_best_is_better_and_not_just_as_good_and_of_the_same_problems(tmp_path):
    """The base model is no candidate."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics_of(evaluation("base", "yyyy"))}) + "\n")
    run = course(tmp_path)
    assert go(run, 1, 3, 2, 3, 4) == [True, True, False, False, True]
    run.keep(weights("best"))
    assert run.kept == json.loads((tmp_path / "best/best.json").read_text())
    assert go(course(tmp_path, first_step=5, every=None), 3) == [False]
    assert go(course(tmp_path, first_step=5, problems=9), 1) == [True]


@pytest.mark.parametrize(("levels", "patience", "stops"), [
    ((1, 2, 2), 2, False), ((2, 1, 2), 2, True), ((3, 1, 4), 2, False), ((3,), 2, False), ((4, 0, 0, 0), None, False),
])  # fmt: skip
def test_it_stops_after_so_many_evaluations_without_a_new_best(tmp_path, levels, patience, stops):
    run = course(tmp_path, patience=patience)
    go(run, *levels)
    assert run.has_stopped_rising == stops


def test_a_resumed_run_counts_on_from_its_checkpoint(tmp_path):
    go(course(tmp_path), 2, 1, 3, 4)
    resumed = course(tmp_path, first_step=2, patience=2)  # steps 3 and 4 will be done again
    assert not resumed.has_stopped_rising
    assert go(resumed, 2) == [False]
    assert resumed.has_stopped_rising


def test_a_warm_up_may_be_judged_by_its_loss_of_which_less_is_better(tmp_path):
    run = course(tmp_path, metric="loss", patience=2)
    found = [replace(level(right), loss=loss) for right, loss in enumerate([0.5, 0.25, 0.75, 0.25])]
    assert [run.add(step, seen) for step, seen in enumerate(found, 1)] == [True, True, False, False]
    assert run.has_stopped_rising
    assert (run.best.step, metrics_of(found[1])["eval/loss"]) == (2, 0.25)
    assert "0.250 the loss of a token" in describe(found[1])


@pytest.mark.parametrize(("losses", "right", "praised"), [([], 0, False), ([], 1, True), ([0.5], 0, True)])
def test_a_first_result_of_0_is_not_called_the_best(losses, right, praised, tmp_path):
    """A later one may be: a mean reward of 0 after a negative one, such as that of a loss."""
    history, said = course(tmp_path, metric="loss" if losses else "accuracy"), []
    for step, loss in enumerate(losses):
        history.add(step, replace(level(0), loss=loss))
    stopping, screen = Namespace(evaluating=lambda step: nullcontext()), Namespace(say=said.append)
    log = Namespace(stopping=stopping, screen=screen, evaluation=lambda step, metrics: None)
    seen = replace(level(right), loss=0.0 if losses else None)
    evaluator = Namespace(history=history, evaluate=lambda name: seen, keep_if_best=history.add)
    loop.evaluate(evaluator, log, 1)
    assert ["the best so far" in line for line in said] == [praised]


def test_the_metric_decides(tmp_path):
    right = outcome("18")
    in_no_format = replace(right, score=replace(right.score, strict=None, correct_strict=False))
    strict_better, lenient_better = (Evaluation("", pair) for pair in ((right, outcome("7")), (in_no_format,) * 2))
    for metric, measure, better in (
        ("accuracy", STRICT, False),
        ("lenient", STRICT, True),
        ("accuracy", LENIENT, True),  # that which reward.answer=lenient pays
    ):
        run = EvaluationHistory(tmp_path, Eval(every=1, metric=metric), 4, 0, 9, measure=measure)
        assert [run.add(1, strict_better), run.add(2, lenient_better)] == [True, better]
    seen = [Evaluation("", (right, in_no_format), measure=measure) for measure in (STRICT, LENIENT)]
    assert [describe(one).partition("%")[0] for one in seen] == ["50.0", "100.0"]


@pytest.mark.parametrize(("every", "problems", "steps"), [(None, 4, [5]), (2, 4, [2, 4, 5]), (2, 0, [])])
def test_the_last_step_is_always_due_if_there_are_problems(tmp_path, every, problems, steps):
    run = course(tmp_path, total_steps=5, every=every, problems=problems)
    assert [step for step in range(1, 6) if run.is_due(step)] == steps
    assert go(run, 3) == [every is not None], "a run that evaluates once keeps no best"


def test_an_evaluation_that_was_cut_short_is_owed(tmp_path):
    """Its step has a line, which is without it; a step after which there is none owes nothing, nor does the base."""
    go(course(tmp_path), 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0.1}\n')
    owed = [course(tmp_path, first_step=step).was_interrupted_at(step) for step in (0, 1, 2, 3)]
    assert owed == [False, False, False, True]
    assert not course(tmp_path, first_step=3, every=2).was_interrupted_at(3)
    assert not course(tmp_path, first_step=2, problems=9).was_interrupted_at(2)


def test_a_finished_run_replaces_its_best_by_what_is_known_to_be_better(tmp_path):
    """The last evaluation was cut short: of the same problems it is what the undisturbed run would have had."""
    first = course(tmp_path, total_steps=2)
    go(first, 2)
    first.keep(Path.mkdir)
    for problems, is_new in ((4, True), (9, False)):
        again = course(tmp_path, first_step=2, total_steps=2, problems=problems)
        assert again.was_interrupted_at(2)
        assert again.add(2, evaluation("", "yyyn")) == is_new
    assert course(tmp_path, first_step=2, total_steps=3, problems=9).add(3, evaluation("", "nnnn"))


# --- a real run: with next to no learning rate no evaluation after the first is a new best


def train(folder: Path, *overrides: str) -> str:
    settings = ["run.merge=false", "eval.every=1", "eval.problems=16", "eval.patience=2", "rollout.problems=2"]
    settings += ["algorithm.lr=1e-9", "optim.warmup=0", "optim.schedule=constant", "task.limit=64"]
    return said_by_train("--preset", "nano", f"run.dir={folder}", *settings, *overrides)


def said_by_train(*arguments: object) -> str:
    return launch(*forked(), "train.py", *arguments, check=True).stdout


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Two steps, then resumed for six: patience ends it after the third."""
    folder = tmp_path_factory.mktemp("course") / "run"
    return folder, train(folder, "run.steps=2"), said_by_train("--resume", folder, "run.steps=6")


def test_resume_keeps_the_best_and_the_patience(interrupted):
    folder, first, said = interrupted
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    base, then, *_ = lines_of(folder / "metrics.jsonl")
    assert base["eval/accuracy"] == then["eval/accuracy"]  # nothing was learned
    assert f"base model: {base['eval/accuracy']:.1%}" in first
    assert (first.count("the best so far"), said.count("the best so far")) == (1, 0)
    assert "(eval.patience=2)" in said
    assert json.loads((folder / "best/best.json").read_text())["step"] == 1
    assert (folder / "checkpoints/latest").resolve().name == "step_000003"
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("eval/accuracy")] == [0, 1, 2, 3]


def test_a_stopped_run_that_is_resumed_does_no_step(interrupted):
    folder = interrupted[0]
    before = lines_of(folder / "metrics.jsonl")
    said = train(folder, "run.steps=6")
    assert lines_of(folder / "metrics.jsonl") == before
    assert "verdict: " in said


def test_a_run_that_goes_on_does_not_ask_the_base_again(interrupted, tmp_path):
    """Unless the answers are of other problems, or cannot be read."""
    folder = shutil.copytree(interrupted[0], tmp_path / "run")
    kept = json.loads((folder / "base.json").read_text())
    for answered in kept["evaluation"]["outcomes"]:
        answered["score"]["correct_strict"] = True
    (folder / "base.json").write_text(json.dumps(kept))
    assert "base model: 100.0%" in said_by_train("--resume", folder, "run.steps=6")
    told = interrupted[1].partition("base model: ")[2].splitlines()[0]
    (folder / "base.json").write_text("{")
    assert f"base model: {told}" in said_by_train("--resume", folder, "run.steps=6")
    assert json.loads((folder / "base.json").read_text())["evaluation"]["sampled"] is None


@pytest.mark.slow
def test_a_finished_run_that_is_looked_at_more_closely_keeps_its_best(interrupted):
    folder = interrupted[0]
    before = [(folder / name).read_bytes() for name in KEPT]
    said = said_by_train("--resume", folder, "run.steps=3", "eval.problems=24")
    assert [(folder / name).read_bytes() for name in KEPT] == before
    assert "of 24 held-out problems" in said
    assert "the best so far" not in said


@pytest.mark.parametrize("content", ["{", "3", "[" * 100_000])
def test_a_note_that_cannot_be_read_is_named(tmp_path, content):
    go(course(tmp_path), 2)
    (tmp_path / "best").mkdir()
    (tmp_path / "best/best.json").write_text(content)
    lost = course(tmp_path, first_step=1)
    assert (lost.kept, (tmp_path / "best.damaged/best.json").read_text()) == (None, content)
    assert "best is damaged (it has no manifest.json) and was moved to best.damaged" in lost.lost


@pytest.mark.parametrize(("lines", "lost_at"), [([], 4), (["1"], 4), (["1", "2"], 2)])
def test_a_worse_one_never_replaces_the_best_when_lines_of_the_log_are_lost(tmp_path, lines, lost_at):
    """best.json knows the value of its step. An evaluation that was the last one is made again."""
    go(kept(tmp_path, 1, 3, text="second"), 2, 2)
    log = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in log if line[9] in lines))
    again = course(tmp_path, first_step=lost_at, patience=2, run="it")
    assert again.best.step == (2 if lost_at == 4 or "2" in lines else 1)
    assert go(again, 2, 2) == [False, False]
    assert again.has_stopped_rising
    assert (tmp_path / "best/weights").read_text() == "second"


AWRY = {
    "gone": lambda best, other: shutil.rmtree(best),
    "cut short": lambda best, other: (best / "weights").write_text("w"),
    "a pipe": lambda best, other: ((best / "best.json").unlink(), os.mkfifo(best / "best.json")),
    "of another run": lambda best, other: (shutil.rmtree(best), shutil.copytree(other, best)),
}


@pytest.mark.parametrize("name", AWRY)
def test_a_best_that_is_not_what_the_run_kept_is_said_and_never_used(tmp_path, name):
    for folder in ("it", "other"):
        (tmp_path / folder).mkdir()
        kept(tmp_path / folder, 3, run=folder)
    AWRY[name](tmp_path / "it/best", tmp_path / "other/best")
    again = course(tmp_path / "it", first_step=1, run="it")
    assert (again.kept, (tmp_path / "it/best").exists()) == (None, False)
    assert {"gone": "best is not there", "of another run": "of another run"}.get(name, "is damaged (") in again.lost
    assert go(again, 2, 4) == [False, True]
    again.keep(weights("better"))
    assert (again.lost, course(tmp_path / "it", first_step=3, run="it").kept["step"]) == ("", 3)
    if name != "gone":  # no earlier one that was moved is deleted
        assert "and was moved to best.damaged-2" in course(tmp_path / "it", run="another").lost


def test_a_best_that_another_measure_chose_is_said_to_be_that(tmp_path):
    history = kept(tmp_path, 3)
    again = EvaluationHistory(tmp_path, history.settings, 4, 1, 9, "it", REWARD)
    assert (again.kept, "was chosen by another measure" in again.lost) == (None, True)


def test_a_best_without_a_manifest_stays(tmp_path):
    kept(tmp_path, 3)
    (tmp_path / "best/manifest.json").unlink()
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "best.partial").mkdir()  # of an export that was killed before it replaced a file
    again = course(tmp_path, first_step=2, run="it")
    assert (again.best.step, again.lost) == (1, "")


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_a_replacement_that_a_kill_interrupted_is_finished(tmp_path, moved):
    best, partial, old = (tmp_path / name for name in ("best", "best.partial", "old"))
    run = kept(tmp_path, 3, text="first")
    shutil.copytree(best, old)
    go(run, 4)
    run.keep(weights("second"))
    best.rename(partial)
    old.rename(best)
    for name in ["best.json", "weights", "manifest.json"][:moved]:
        (partial / name).rename(best / name)
    again = course(tmp_path, first_step=2, run="it")
    assert ((best / "weights").read_text(), again.kept["step"]) == (("second", 2) if moved else ("first", 1))
    assert (again.lost, (tmp_path / "best.damaged").exists()) == ("", False)


# evaluations of four problems, each after a step; what best/ holds then; what is said at the end
ENDS = [((1, 3, 2), "whole", "step 2 was best: "), ((1, 3, 3), "whole", "step 2 was as good as the last one: ")]
ENDS += [((1, 3, 4), "whole", ""), ((1, 3, 2), "gone", "It is not kept: ")]


@pytest.mark.parametrize(("levels", "left", "told"), ENDS)
def test_the_end_says_what_was_best(tmp_path, levels, left, told):
    kept(tmp_path, *levels[:-1], run="")
    if left == "gone":
        shutil.rmtree(tmp_path / "best")
    run = course(tmp_path, first_step=len(levels) - 1, total_steps=len(levels))  # a run that is continued
    if go(run, levels[-1]) == [True]:
        run.keep(weights("last"))
    said = " ".join(closing.best_step(resolve("nano", None, ["eval.every=1"]), run, len(levels)))
    assert told in said if told else not said
