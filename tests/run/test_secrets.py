"""Keys in the environment reach nothing that a run leaves: its folder, its output, its report, or a job script."""

import pytest

from tests.conftest import ROOT, launch
from tests.forks import forked
from tests.reward.test_judge import GOOD, Server, chat

KEYS = ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "OCTET_JUDGE_KEY")
CANARIES = {name: f"canary-{number}-of-a-secret" for number, name in enumerate(KEYS)}
FEW = ["rollout.problems=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "run.steps=1", "eval.problems=2"]
FEW += ["reward.weights={judge: 1, correct: 1}", "reward.judge.model=m", "reward.judge.retries=0"]
FEW += ["reward.judge.cache=cache", "rollout.dead_groups=keep"]


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What each command says, and every file that they write."""
    folder = tmp_path_factory.mktemp("secrets")
    with Server().serving() as server:
        # one good reply, and then errors that quote the key
        server.replies = [chat(GOOD), lambda: (500, f"who is {server.headers[-1]['Authorization']}?")]
        octet = ["-m", "trainer.commands.main"]
        train = [ROOT / "train.py", "--preset", "nano", *FEW, f"reward.judge.url={server.url}"]
        commands = {
            "train": [*train, "run.dir=it"],
            "dry run": [*train, "--dry-run"],
            "report": [*octet, "report", "it"],
        }
        commands["slurm"] = [*octet, "slurm", "--preset", "cluster", "run.dir=job", "--dry-run"]
        found = {}
        for name, command in commands.items():
            done = launch(*forked(), *command, folder=folder, check=True, **CANARIES)
            found[name] = (done.stdout + done.stderr).encode()
        assert len(server.requests) > 1
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {"it/config.yaml", "it/metrics.jsonl", "it/report.html"} <= set(files)
    assert b"#SBATCH" in found["slurm"]
    return found | files


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_nowhere(left, name):
    assert [where for where, content in left.items() if CANARIES[name].encode() in content] == []


def test_a_run_says_why_grades_are_missing(left):
    assert b"octet: the judge gave no grade for 4 of 4 completions: HTTP 500 who is Bearer " in left["train"]
