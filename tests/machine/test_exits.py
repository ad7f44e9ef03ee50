"""How a process ends that is told to stop."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, ran
from trainer.errors import Interrupted, RewardError
from trainer.machine import user_code
from trainer.machine.exits import answering_errors, finishing, handling, shell_status
from trainer.machine.safe_text import without_keys
from trainer.ranks import slurm

DELETED = """
import os, signal, time
from trainer.machine.exits import answering_errors, listen

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
FAILS = """
import os, signal
from trainer.errors import OctetError
from trainer.machine.exits import answering_errors, leave, listen

class Late(OctetError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return "rank 0 died"

def command():
    raise Late("rank 0 died")

listen()
leave(answering_errors(command))
"""
LEFT = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from trainer.machine.exits import answering_errors, leave, listen

def command():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    globals()["kept"] = ProcessPoolExecutor(2)
    print(list(kept.map(abs, [-1, 2])))

listen()
leave(answering_errors(command))
"""
NO_PLACE = """
import tempfile
from trainer.machine.exits import answering_errors
tempfile.tempdir, tempfile._candidate_tempdir_list = None, list
raise SystemExit(answering_errors(tempfile.gettempdir))
"""
EARLY = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores

class Finder:
    def find_spec(name, *places):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
from trainer.commands.main import main
main([sys.argv[1].rpartition(".")[2], "--preset", "nano"])
"""
PRINTS = """
from trainer.machine.exits import answering_errors
from trainer.machine.safe_text import print
raise SystemExit(answering_errors(lambda: print("\u2713\u2717\u2581\u6f22")))
"""
FOREIGN = "from trainer.commands.main import main; main(['plan', '--preset', 'nano', 'run.dir=j\\udcc3b'])"
ENDS = {
    "a signal while an object is deleted": (["-c", DELETED], 130, "octet: stopped."),
    "a signal while an error is printed": (["-c", FAILS], 2, "octet: rank 0 died"),  # the launcher stops the others
    "no place for temporary files": (["-c", NO_PLACE], 2, "octet: no temporary file can be written"),
    "a signal while a start imports": (["-c", EARLY, "argparse"], 130, "octet: stopped."),
    "a signal while train is imported": (["-c", EARLY, "trainer.commands.train"], 130, "octet: stopped."),
    "a signal while another command is imported": (["-c", EARLY, "trainer.commands.plan"], 130, "octet: stopped."),
    "bytes that are no text": (["-c", FOREIGN], 2, "octet: run.dir=j<U+DCC3>b: this locale lacks one"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_its_status_and_one_line(end):
    arguments, status, said = ENDS[end]
    done = ran(sys.executable, *arguments)
    assert (done.returncode, done.stderr.count("\n"), done.stderr.startswith(said)) == (status, 1, True)


def test_characters_that_the_locale_lacks_are_written_as_their_codes():
    done = ran(sys.executable, "-c", PRINTS, env=os.environ | {"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2713\\u2717\\u2581\\u6f22\n", "")


def test_processes_that_user_code_has_left_running_are_ended():
    done = ran(sys.executable, "-c", LEFT, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2]\n", "")


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="this Python cannot import socket in such a folder")
def test_a_folder_that_is_gone_is_named(tmp_path):
    gone = tmp_path / "gone"
    code = f"import os, sys; os.mkdir({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    code += f"sys.path.insert(0, {str(ROOT)!r}); from trainer.commands.main import main; main()"
    done = ran(sys.executable, "-c", code, "doctor")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "the current folder has been deleted" in done.stderr


def test_each_signal_that_came_in_the_meantime_counts():
    """The first Ctrl-C asks for the end of the step, and the second one ends the run at once."""
    sent, received = [signal.SIGINT, signal.SIGINT, signal.SIGUSR1], []
    with handling({*sent}, lambda number, frame: received.append(number)), finishing():
        for number in sent:
            signal.raise_signal(number)
        assert not received
    assert received == sent


def test_the_status_of_a_launcher_becomes_that_of_a_shell():
    assert [shell_status(status) for status in (0, 2, 137, 247, -9)] == [0, 2, 137, 137, 137]


ERRORS = [(RewardError("no"), "octet: rank 1: no\n"), (RewardError("no").of_all(), ""), (Interrupted("no"), "")]


@pytest.mark.parametrize(("error", "said"), ERRORS)
def test_an_error_of_all_ranks_is_said_by_one(monkeypatch, capsys, error, said):
    def command() -> None:
        raise error

    monkeypatch.setenv("RANK", "1")
    assert (answering_errors(command), capsys.readouterr().err) == (error.status, said)


def test_an_error_quotes_no_key(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    monkeypatch.setenv("OCTET_FAILED", str(tmp_path / "failed"))

    def command():
        slurm.report_failure("it said canary-of-a-token")
        raise RewardError("it said canary-of-a-token")

    assert answering_errors(command) == RewardError.status
    assert capsys.readouterr().err == "octet: it said $HF_TOKEN\n"
    assert (tmp_path / "failed").read_text() == "it said $HF_TOKEN\n"


SECRETS = "OPENAI_API_KEY HF_TOKEN SLURM_JWT AWS_SECRET_ACCESS_KEY CLIENT_SECRET DB_PASSWORD PGPASSWORD MYSQL_PWD"
SECRETS += " SSH_PASSPHRASE GITHUB_PAT GOOGLE_CREDENTIALS api_token HF_TOKEN_2 DEPLOY_KEYS BASIC_AUTH AUTHORIZATION"
SECRETS += " BEARER SESSION_COOKIE API_CREDS API_KEY_PROD TOKEN_A DBPASS"
OFFSETS = [*((name, 0) for name in SECRETS.split()), ("HF_TOKEN", 470), ("HF_TOKEN", 490)]


@pytest.mark.parametrize(("name", "before"), OFFSETS)
def test_an_error_of_a_users_code_quotes_no_secret_and_no_part_of_one(monkeypatch, capsys, tmp_path, name, before):
    secret = "hunter2-hunter2-hunter2"
    monkeypatch.setenv(name, f"{secret}\n")
    monkeypatch.setenv("OCTET_KEY", secret[:12])  # a part of the other
    (tmp_path / "mine.py").write_text(f"raise ValueError('x' * {before} + '{secret} is refused')")

    def command() -> None:
        user_code.load("task.name", f"{tmp_path}/mine.py:build")

    assert answering_errors(command) == 2
    said = capsys.readouterr().err.partition("(mine.py, line")[0]  # the line itself is the user's own text
    assert [text in said for text in ("ValueError", f"${name}"[: 500 - before], "hunter2")] == [True, True, False]


ORDINARY = ["COMPASS", "KEYBOARD_LAYOUT", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "XAUTHORITY", "PWD", "HOMEPAGE"]


def test_other_variables_are_quoted(monkeypatch):
    for name in ORDINARY:
        monkeypatch.setenv(name, "https://host:8000/ordinary")
    assert without_keys("at https://host:8000/ordinary") == "at https://host:8000/ordinary"


def test_the_password_of_an_address_and_an_escaped_key_are_not_quoted(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:hunter2-hunter2@host/db")
    monkeypatch.setenv("REDIS_URL", "redis://:short12@host")
    monkeypatch.setenv("API_KEY", "a\"b\\c'd\u00e9-hunter3")
    said = [os.environ["DATABASE_URL"], "hunter2-hunter2", os.environ["REDIS_URL"], repr(os.environ["API_KEY"])]
    said += [json.dumps(os.environ["API_KEY"]), repr(os.environ["API_KEY"].encode().decode())]
    shown = without_keys(" ".join(said))
    assert not re.search("hunter|short12", shown)
    assert "postgres://$DATABASE_URL@host/db" in shown


def unread(*command: str, errors: int | None = None) -> tuple[int, str]:
    """Run a program whose output nobody reads, nor its messages unless they have a pipe of their own."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=writing, stderr=errors or writing)
    os.close(writing)
    said = process.communicate()[1]
    return process.returncode, (said or b"").decode()


OCTET = ("-m", "trainer.commands.main")


def test_a_program_whose_output_nobody_reads_says_so_only_if_it_is_a_run(tmp_path, monkeypatch):
    """As in `octet train | head -9`."""
    assert unread(*OCTET, "--help", errors=subprocess.PIPE) == (141, "")
    monkeypatch.setenv("RANK", "0")
    run = ("train.py", "--preset", "nano", "run.steps=9", "eval.problems=0", f"run.dir={tmp_path}")
    status, said = unread(*run, errors=subprocess.PIPE)
    assert (status, "octet: stopped, because nothing reads its output." in said) == (141, True)


@pytest.mark.parametrize("arguments", ["train --preset nano", "plan --preset nano", "train --preset nano nope=1"])
def test_a_command_whose_messages_nobody_reads_either_has_the_status_of_a_closed_pipe(arguments):
    """As in `octet train 2>&1 | head -1`."""
    assert unread(*OCTET, *arguments.split())[0] == 141
