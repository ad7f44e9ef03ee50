"""Damaged lines of metrics.jsonl and samples.jsonl, found at resume."""

import json
import tracemalloc

import pytest

from tests.conftest import refuses, write_lines
from trainer.errors import DataError
from trainer.run_folder.journal import Journal, read_records
from trainer.run_folder.run_log import Logs


@pytest.fixture
def metrics(tmp_path):
    return write_lines(tmp_path / "metrics.jsonl", ({"step": step, "loss": 0.5} for step in range(4)))


@pytest.mark.parametrize("cut", ['{"step": 4, "lo', '{"step": 3}', "é".encode()[:1]])
def test_a_last_line_that_a_crash_cut_short_is_dropped(metrics, cut):
    """In the middle of a character, too."""
    with metrics.open("ab") as file:
        file.write(cut if isinstance(cut, bytes) else cut.encode())
    Journal(metrics.parent, 3)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2, 3]


BROKEN = [(line, "it is not JSON") for line in (b"\0\0\0", b'{"text": "\xff"}')]
BROKEN += [(line, "it is not the record of a step") for line in (b"[1]", b'{"loss": 1}', b'{"step": "1"}')]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize(("line", "told"), BROKEN)
def test_a_broken_line_is_moved_aside_and_named(metrics, capsys, name, line, told):
    path = metrics.rename(metrics.with_name(name))
    first, _, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, line + b"\n", *rest]))
    path.with_suffix(".damaged").write_bytes(b"an earlier one\n")
    with refuses(f"{path}, line 2", DataError, names=told):
        read_records(path)
    Journal(path.parent, 3)
    assert path.read_bytes() == b"".join([first, *rest])
    assert path.with_suffix(".damaged").read_bytes() == b"an earlier one\n" + line + b"\n"
    assert f"{name}: line 2 is damaged and was moved to {path.stem}.damaged" in capsys.readouterr().err


LEFT, CHANGED = "{} of 3 lines are left", "its lines were changed"
CHANGES = {
    "": (lambda path: None, ""),
    "later lines": (lambda path: path.write_text(path.read_text() + '{"step": 4}\n'), ""),
    "cut": (lambda path: path.write_text("".join(path.read_text().splitlines(True)[:2])), LEFT.format(2)),
    "emptied": (lambda path: path.write_text(""), LEFT.format(0)),
    "gone": (lambda path: path.unlink(), LEFT.format(0)),
    "a digit": (lambda path: path.write_text(path.read_text().replace("0.5", "0.7", 1)), CHANGED),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("change", CHANGES)
def test_lines_that_were_lost_or_changed_since_the_checkpoint_are_said(metrics, capsys, name, change):
    lines, logs = metrics.read_text().splitlines(keepends=True), Logs(metrics.parent)
    for count in (2, 3):  # the last line of the metrics gets what is measured after the step
        metrics.write_text("".join(lines[: count + 1]))
        metrics.with_name("samples.jsonl").write_text("".join(lines[:count]))
        state = logs.state()
    CHANGES[change][0](metrics.parent / name)
    Logs(metrics.parent).load(json.loads(json.dumps(state)))
    told, said = CHANGES[change][1], capsys.readouterr().err
    warning = f"octet: warning: {metrics.parent / name}: {told} since the checkpoint was saved. The run continues.\n"
    assert said == (warning if told else "")


def test_an_evaluation_goes_into_the_line_of_its_step_and_a_start_begins_at_its_checkpoint(metrics):
    again = Journal(metrics.parent, first_step=3)  # the start before was ended in the evaluation
    again.add(3, {"eval/accuracy": 0.25})
    again.metrics(4, {"loss": 1.5})
    again.close()
    *_, third, fourth = map(json.loads, metrics.read_text().splitlines())
    assert third == {"step": 3, "loss": 0.5, "eval/accuracy": 0.25}
    assert fourth == {"step": 4, "loss": 1.5}
    lines = metrics.read_text()
    metrics.with_suffix(".jsonl.partial").mkdir()  # in the way: nothing can be written there
    with pytest.raises(IsADirectoryError):
        Journal(metrics.parent, first_step=2)
    assert metrics.read_text() == lines
    metrics.with_suffix(".jsonl.partial").rmdir()
    (metrics.parent / "verdict.json").write_text("{}")
    Journal(metrics.parent, 0)  # killed between the line of step 0 and the first checkpoint
    assert (metrics.read_bytes(), (metrics.parent / "verdict.json").exists()) == (b"", False)


@pytest.mark.parametrize("left", [None, "", '{"step": 3, "loss": 0.5}\n'])
def test_an_evaluation_whose_line_was_lost_gets_one_of_its_own(tmp_path, capsys, left):
    if left is not None:
        (tmp_path / "metrics.jsonl").write_text(left)
    (tmp_path / "tensorboard").write_text("in the way")
    journal = Journal(tmp_path, first_step=4)
    journal.add(4, {"eval/low": 0.25, "eval/high": 0.5})
    journal.close()
    added = '{"step": 4, "eval/low": 0.25, "eval/high": 0.5}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == (left or "") + added
    assert capsys.readouterr().err.count("tensorboard cannot be written") == 1


def test_a_line_ends_where_json_says_and_not_where_the_model_does(tmp_path):
    lines = [json.dumps({"step": step, "completion": "a\u2028b\u0085c"}, ensure_ascii=False) for step in (1, 2)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    Journal(tmp_path, first_step=1).close()
    assert (tmp_path / "samples.jsonl").read_text() == lines[0] + "\n"


def test_a_long_log_is_read_line_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1{" " * 2000}}}\n' * 2000)
    tracemalloc.start()
    assert len(read_records(path)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2
