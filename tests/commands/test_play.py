"""`octet task play`, with a person who types through a pipe."""

from __future__ import annotations

import io
import re

import pytest

from trainer.commands.main import main
from trainer.commands.task import typed


def play(monkeypatch, capsys, text: str, *options: str, task: str = "nano") -> tuple[object, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as ended:
        main(["task", "play", task, *options])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_texts_end_with_an_empty_line_or_the_input():
    assert list(typed(["\n", "a\n", " b\n", "\n", " \n", "c"])) == ["a\n b", "c"]
    assert list(typed([])) == []


def test_a_right_and_a_wrong_answer(monkeypatch, capsys):
    status, shown, said = play(monkeypatch, capsys, "Let me think.\n#### 0\n\nThe answer is 0")
    golds = re.findall(r"gold +'(\d+)'", shown)
    assert (status, said, len(golds)) == (0, "", 2)
    assert "  strict       '0' is wrong\n  lenient      '0' is wrong\n  correct         0.000  x 1" in shown
    assert "  strict       nothing found\n  lenient      '0' is wrong\n" in shown
    _, shown, _ = play(monkeypatch, capsys, f"So:\n#### {golds[0]}")
    assert f"  strict       '{golds[0]}' is right" in shown
    assert "  reward          1.000" in shown
    assert "  overlong         none  x 0" in shown


def test_gsm8k_from_a_folder_with_weights(monkeypatch, capsys, gsm8k_folder):
    options = ("--data-dir", str(gsm8k_folder), "reward.weights={format: 0.25}")
    status, shown, _ = play(monkeypatch, capsys, "#### 3\n", *options, task="gsm8k")
    assert status == 0
    assert "gsm8k/train/" in shown
    assert "  format          1.000  x 0.25" in shown
    assert "  reward          0.250" in shown


def test_a_function_of_ones_own(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def short(completions, **c): return [1.0 / len(text) for text in completions]")
    _, shown, _ = play(monkeypatch, capsys, "1234", f"reward.custom={tmp_path}/mine.py:short")
    assert "  short           0.250  x 1" in shown


def test_errors_end_with_status_two(monkeypatch, capsys):
    status, _, said = play(monkeypatch, capsys, "a", "--data-dir", "nowhere", task="gsm8k")
    assert status == 2
    assert said.startswith("octet: ")
