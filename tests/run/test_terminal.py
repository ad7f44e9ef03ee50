"""A run on a terminal: its screen stands below what is printed, by whomever, and is gone when Ctrl-C ends it."""

import os
import re
import signal

from tests.conftest import ROOT
from tests.forks import forked
from tests.terminal import Terminal, on_a_terminal, read

FEW = ["--preset", "nano", "rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.problems=8"]
FEW += ["run.steps=500", "run.dir=it", "reward.custom=mine.py:talks"]
TALKS = """
import os
def talks(completions, **columns):
    os.write(1, b"a line that Octet does not know of\\n")
    return [0.0] * len(completions)
"""


def test_a_run_on_a_terminal(tmp_path):
    (tmp_path / "mine.py").write_text(TALKS)
    process, terminal = on_a_terminal([*forked(), str(ROOT / "train.py"), *FEW], tmp_path, 80, 24)
    said = b""
    while not re.search(r"step [1-9]\d* of 500", said.decode(errors="ignore")) and (part := read(terminal)):
        said += part
    on_screen = Terminal(80).feed(said.decode(errors="ignore")).text
    process.send_signal(signal.SIGINT)
    while part := read(terminal):
        said += part
    os.close(terminal)
    left = Terminal(80).feed(said.decode()).text
    assert process.wait(60) == 130
    assert "base model: " in on_screen
    assert on_screen.index("run folder: it") < on_screen.index("│ step ")
    assert next(line for line in left.splitlines() if " rollout " in line).startswith("  1/500  rollout ")
    kept = ["octet: loading nano", "base model: ", "--resume it continues after step ", "a line that Octet does"]
    assert [text for text in kept if text not in left] == []
    assert said.count(b"a line that Octet") == left.count("a line that Octet")
    assert [line for line in left.splitlines() if line.startswith(("│", "╭", "╰"))] == []
