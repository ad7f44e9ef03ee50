"""What a new user types wrong, and what is answered."""

import json

import pytest

from tests.conftest import refuses, said_by
from trainer.config.command_line import resolve
from trainer.errors import ModelError
from trainer.model import shapes
from trainer.problem.task import make_task


def test_an_adapter_or_a_run_in_place_of_a_model_names_what_to_write(tmp_path):
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}))
    with refuses("model.name", ModelError, names="Qwen/Qwen2.5-0.5B"):
        shapes.known_shape(str(adapter))
    with refuses("model.name", ModelError, names=f"--adapter {adapter}"):
        shapes.known_shape(str(tmp_path / "run"))


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_table_is_read_with_the_separator_of_its_first_line(tmp_path, separator):
    path = tmp_path / "mine.csv"
    rows = ["question", "answer"], ['"1 + 1; is?"', "2"], ['"2 + 1; is?"', "3"]
    path.write_text("\n".join(map(separator.join, rows)))
    task = make_task(resolve("nano", None, ["task.name=records", f"task.path={path}"]).task)
    found = sorted((problem.question, problem.gold) for problem in [*task.train(), *task.test()])
    assert found == [("1 + 1; is?", "2"), ("2 + 1; is?", "3")]


def test_text_answers_are_asked_for_with_a_text(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("question,answer\nCapital of Peru?,Lima\nCapital of Cuba?,Havana\nCapital of Iraq?,Bagdad\n")
    status, out, _ = said_by(capsys, "task", "show", "records", f"task.path={path}", "-n", "1")
    assert status == 0
    assert "like this:\n#### Paris<" in out
    path.write_text("question,answer\n1 + 1?,2\n2 + 2?,4\n")
    assert "like this:\n#### 42<" in said_by(capsys, "task", "show", "records", f"task.path={path}", "-n", "1")[1]


def test_an_evaluation_of_a_run_folder_names_its_adapter(capsys, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "nano"}')
    status, _, complained = said_by(capsys, "eval", "--model", str(tmp_path))
    assert (status, f"Write octet eval --adapter {tmp_path}/adapter" in complained) == (2, True)
