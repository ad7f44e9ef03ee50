"""How a process ends that is told to stop."""

import subprocess
import sys

from tests.conftest import ROOT
from trainer.errors import RewardError
from trainer.exits import answering_errors
from trainer.ranks import slurm

DELETED = """
import os, signal, time
from trainer.exits import answering_errors, listen

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # the handler runs here

def command():
    listen()
    Slow()
    time.sleep(60)

raise SystemExit(answering_errors(command))
"""


def test_a_signal_is_not_lost_while_an_object_is_deleted():
    done = subprocess.run([sys.executable, "-c", DELETED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "octet: stopped.\n")


FAILS = """
import os, signal
from trainer.errors import OctetError
from trainer.exits import answering_errors, leave, listen

class Late(OctetError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return "rank 0 died"

def command():
    raise Late

listen()
leave(answering_errors(command))
"""


def test_a_signal_does_not_disturb_what_is_said_at_the_end():
    """When a rank fails, the launcher stops the others, which find it out at the same time."""
    done = subprocess.run([sys.executable, "-c", FAILS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "octet: rank 0 died\n")


def test_a_folder_that_is_gone_is_named(tmp_path):
    gone = tmp_path / "gone"
    code = f"import os, sys; os.mkdir({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    code += f"sys.path.insert(0, {str(ROOT)!r}); from trainer.commands.main import main; main()"
    command = [sys.executable, "-c", code, "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "the folder in which you are has been deleted" in done.stderr


def test_an_error_quotes_no_key(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    monkeypatch.setenv("OCTET_FAILED", str(tmp_path / "failed"))

    def command():
        slurm.report_failure("it said canary-of-a-token")
        raise RewardError("it said canary-of-a-token")

    assert answering_errors(command) == RewardError.status
    assert capsys.readouterr().err == "octet: it said $HF_TOKEN\n"
    assert (tmp_path / "failed").read_text() == "it said $HF_TOKEN\n"
