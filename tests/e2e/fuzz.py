"""Broken input of every kind that Octet reads. Each is used or refused by a short message, within seconds.

python -m tests.e2e.fuzz INPUTS [SEED]

Most inputs are made from a good one: some bytes are changed, or some values of its JSON. What came of each is counted;
a fault is an exception that is not ours, a message that is long or has control characters, or an input that takes too
long. From LARGE inputs on, the counts are written into bench/results.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import describe
from tests.config.test_wrong_settings import FILES, ODD
from tests.conftest import ROOT
from trainer.commands import eval as eval_command
from trainer.config.resolve import resolve
from trainer.config.settings import Config, fields
from trainer.config.train_options import PRESETS
from trainer.errors import OctetError
from trainer.evaluation.best import EvaluationHistory
from trainer.loss.objectives import Coefficient
from trainer.machine.http_client import NoReply
from trainer.model import hub, lora, shapes
from trainer.model.load import load_tokenizer
from trainer.problem.curriculum import CURRICULA
from trainer.problem.task import make_task
from trainer.ranks import slurm
from trainer.records import Prompt, Sampling
from trainer.reward.judge import Judge
from trainer.reward.scorer import Meter
from trainer.rollout.interface import SamplingContext, StaticPolicy
from trainer.rollout.turns import Stops
from trainer.rollout.vllm.client import Server
from trainer.rollout.vllm.server import VllmServerSampler
from trainer.run_folder import changed_settings, checkpoints
from trainer.run_folder.journal import Journal, read_records
from trainer.run_folder.model_source import Source
from trainer.run_folder.provenance import Provenance
from trainer.run_folder.run_log import Logs

LARGE = 100_000
LONGEST_S = 10.0
LONGEST_MESSAGE = 3000
VALUES: list[Any] = [None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), 10**30, "", "x", "x" * 5000, [], {}]
VALUES += ["../../x", "/etc/passwd", "nano", [[[]]], {"": None}, "1e999", [1, "a"], "\u202e"]
VALUES += ["\x1b[2J", "\0", "\ud800"]
BYTES = [b"\0", b"\xff", b"\x1b[2J", b"\n", b'"', b"{", b"[" * 3000, b"9" * 4400, b"\xed\xa0\x80"]
BYTES += [b"NaN", b"1e999", b","]


class TooLong(BaseException):
    """An input that takes too long. No `except` of the program catches it."""


@lru_cache
def nano(*overrides: str) -> Config:
    return resolve("nano", None, overrides)


def other_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return the content with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        place, length = rng.randrange(len(content) + 1), rng.choice([0, 1, 2, 20])
        put = rng.choice([b"", bytes([rng.randrange(256)]), rng.choice(BYTES), content[place : place + 30]])
        content = content[:place] + put + content[place + length :]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.1 else content


def other_value(rng: random.Random, value: Any) -> Any:
    """Return the value with one thing in it replaced, left out, or called something else."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(VALUES)
    changed: Any = value.copy()
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.15:
        changed.pop(key)
    elif isinstance(value, dict) and rng.random() < 0.1:
        changed[rng.choice(["x", "\x1b", "", "\ud800"])] = changed.pop(key)
    else:
        changed[key] = other_value(rng, value[key])
    return changed


def other_json(rng: random.Random, value: Any) -> bytes:
    if rng.random() < 0.4:
        return other_bytes(rng, json.dumps(value).encode())
    for _ in range(rng.randint(1, 3)):
        value = other_value(rng, value)
    return json.dumps(value).encode()


def of_presets(rng: random.Random, folder: Path) -> None:
    path = folder / "mine.yaml"
    good = rng.choice(sorted(PRESETS.glob("*.yaml"))).read_bytes()
    path.write_bytes(rng.choice(FILES) if rng.random() < 0.02 else other_bytes(rng, good))
    resolve(str(path)).to_yaml().encode()


def of_overrides(rng: random.Random, folder: Path) -> None:
    values = [*ODD, *map(str, VALUES), json.dumps(rng.choice(VALUES)), str(rng.getrandbits(rng.choice([4, 70, 2000])))]
    keys = [rng.choice(fields()) for _ in range(rng.randint(1, 3))]
    resolve("nano", None, [f"{key}={rng.choice(values)}" for key in keys]).to_yaml().encode()


ROWS = [{"question": f"What is {n} + 1?", "answer": f"It is\n#### {n + 1}", "level": n} for n in range(4)]


def read_data(rng: random.Random, path: Path) -> None:
    handling = rng.choice(["error", "skip"])
    settings = ["task.name=records", f"task.path={path}", f"task.on_bad_record={handling}"]
    task = make_task(nano(*settings).task)
    for problem in [*task.train(), *task.test()]:
        problem.question.encode()


def of_jsonl(rng: random.Random, folder: Path) -> None:
    lines = [json.dumps(row).encode() for row in ROWS]
    lines[rng.randrange(4)] = other_json(rng, rng.choice(ROWS))
    (folder / "mine.jsonl").write_bytes(b"\n".join(lines))
    read_data(rng, folder / "mine.jsonl")


def of_csv(rng: random.Random, folder: Path) -> None:
    good = "question,answer,level\n" + "".join(f'"{row["question"]}",{row["level"]},x\n' for row in ROWS)
    (folder / "mine.csv").write_bytes(other_bytes(rng, good.encode()))
    read_data(rng, folder / "mine.csv")


def of_parquet(rng: random.Random, folder: Path) -> None:
    path, columns = folder / "mine.parquet", {name: [row[name] for row in ROWS] for name in ROWS[0]}
    if rng.random() < 0.5:
        kind = rng.choice([pa.binary(), pa.int64(), pa.timestamp("us"), pa.list_(pa.string()), pa.null(), pa.bool_()])
        values: list[Any] = [None, *[rng.choice([b"\xff", 2**62, [], None, True, "x"]) for _ in range(3)]]
        with contextlib.suppress(pa.ArrowException, OverflowError, TypeError):
            columns[rng.choice(list(columns))] = pa.array(values, kind)
    pq.write_table(pa.table(columns), path)
    if rng.random() < 0.7:
        path.write_bytes(other_bytes(rng, path.read_bytes()))
    read_data(rng, path)


METRICS = {"step": 1, "reward": 0.5, "eval/accuracy": 0.25, "eval/lenient": 0.5, "eval/problems": 8, "time/save": 0.1}
PROBLEMS = make_task(nano().task).train()[:8]
ORIGIN, SETTINGS = Provenance(nano(), Path("no-folder"), PROBLEMS, [], accepts=False), nano().to_yaml().encode()


def learned() -> checkpoints.Learned:
    config = nano("task.curriculum=solve_rate", "algorithm.kl.coef=0.1")
    curriculum = CURRICULA[config.task.curriculum](PROBLEMS, 2, 0, 10)
    return {"origin": ORIGIN, "curriculum": curriculum, "kl": Coefficient(config.algorithm.kl), "logs": Logs(ROOT)}


def save_state(folder: Path, parts: checkpoints.Learned, change: Callable[[Any], bytes]) -> Path:
    """Save a checkpoint with a changed `state.json`, and a manifest that is right."""
    saved = folder / "checkpoints" / "step_000001"
    saved.mkdir(parents=True)
    state = {"step": 1, **{name: part.state() for name, part in parts.items()}}
    (saved / "state.json").write_bytes(change(state))
    checkpoints.seal(saved)
    return saved


def go_on(folder: Path, parts: checkpoints.Learned) -> None:
    checkpoints.resume(SimpleNamespace(load=lambda _: None), folder, 2, parts)  # type: ignore[arg-type]


def of_states(rng: random.Random, folder: Path) -> None:
    parts = learned()
    save_state(folder, parts, lambda state: other_json(rng, state))
    changed_settings.refuse_other_settings(folder, nano())
    go_on(folder, parts)
    parts["curriculum"].draw(2)


def of_manifests(rng: random.Random, folder: Path) -> None:
    parts = learned()
    path = save_state(folder, parts, lambda state: json.dumps(state).encode()) / "manifest.json"
    path.write_bytes(other_json(rng, json.loads(path.read_text())))
    go_on(folder, parts)


def of_logs(rng: random.Random, folder: Path) -> None:
    lines = [json.dumps(METRICS | {"step": step}).encode() for step in range(4)]
    lines[rng.randrange(4)] = other_json(rng, METRICS)
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "samples.jsonl").write_bytes(other_bytes(rng, b"\n".join(lines)))
    journal = Journal(folder, 3)
    with contextlib.closing(journal):
        journal.add(3, {"eval/accuracy": 0.5})
    read_records(folder / "metrics.jsonl")
    history = EvaluationHistory(folder, nano("eval.patience=2", "eval.every=5").eval, 8, 3, 10)
    _ = history.best, history.has_stopped_rising


def of_best(rng: random.Random, folder: Path) -> None:
    (folder / "best").mkdir()
    good = {"step": 3, "accuracy": 0.5, "lenient": 0.5, "problems": 8}
    (folder / "best/best.json").write_bytes(other_json(rng, good))
    history = EvaluationHistory(folder, nano().eval, 8, 3, 10)
    if kept := history.kept:
        f"step {kept['step']} was best: {kept['accuracy']:.1%}"


def of_run_settings(rng: random.Random, folder: Path) -> None:
    (folder / "checkpoints/step_000001").mkdir(parents=True)
    (folder / "config.yaml").write_bytes(other_bytes(rng, SETTINGS))
    changed_settings.refuse_other_settings(folder, nano())


def of_judge_budgets(rng: random.Random, folder: Path) -> None:
    (folder / "judge.json").write_bytes(other_json(rng, {"requests": 3, "tokens": 40}))
    REPLIES.say(b"HTTP/1.1 200 OK\r\n\r\n{}")
    judge(folder).ask({}, Meter())


CONFIG = json.loads((ROOT / "trainer/model/nano/config.json").read_text())
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "nano", "r": 4, "target_modules": ["q_proj"]}


def of_models(rng: random.Random, folder: Path) -> None:
    (folder / "config.json").write_bytes(other_json(rng, CONFIG))
    (folder / "a.safetensors").touch()
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_bytes(other_json(rng, index))
    config = nano(f"model.name={folder}")
    with contextlib.suppress(OctetError):
        shapes.known_shape(str(folder))
    hub.find_model(config.model)


def of_adapters(rng: random.Random, folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(other_json(rng, ADAPTER))
    (folder / "adapter_model.safetensors").touch()
    with contextlib.suppress(OctetError):
        hub.local_folder(str(folder))
    with contextlib.suppress(OctetError):
        eval_command._refuse_another_base(Source(folder, is_adapter=True), nano().model, is_named=False)
    lora._read(folder, str(folder))


class Replies(threading.Thread):
    """A server that answers every connection with the same bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._reply = b""
        self.start()

    def say(self, reply: bytes) -> None:
        self._reply = reply

    def run(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1)
                connection.recv(1 << 16)
                connection.sendall(self._reply)


REPLIES = Replies()
TOKENIZER = load_tokenizer(resolve("nano").model)


def reply(rng: random.Random, body: Any) -> bytes:
    content, status = other_json(rng, body), rng.choice([200] * 8 + [204, 302, 400, 404, 500])
    wait = rng.choice([b"0", b"nan", b"-1", b"1e999", b"Sun, 31 Dec 9999 23:59:60 -2400", b"x" * 3000])
    head = b"HTTP/1.1 %d OK\r\nRetry-After: %s\r\nContent-Length: %d\r\n\r\n" % (status, wait, len(content))
    whole = head + content
    return other_bytes(rng, whole) if rng.random() < 0.3 else whole


def judge(folder: Path) -> Judge:
    named = [f"reward.judge.url={REPLIES.url}", "reward.judge.model=m", "reward.judge.retries=0"]
    named += ["reward.judge.timeout_s=2", "reward.judge.cache=null", "reward.weights={judge: 1}"]
    return Judge(nano(*named).reward.judge, folder)


def of_judges(rng: random.Random, folder: Path) -> None:
    grades = {"factual_accuracy": 1, "conciseness": 1, "formatting": 1}
    choice = {"message": {"content": other_json(rng, grades).decode("utf-8", "replace")}}
    REPLIES.say(reply(rng, {"choices": [choice], "usage": {"total_tokens": 9}}))
    judge(folder).ask({"model": "m"}, Meter())


def of_vllm(rng: random.Random, folder: Path) -> None:
    settings = ["rollout.engine=vllm_server", f"rollout.vllm.urls={REPLIES.url}", "rollout.vllm.timeout_s=2"]
    config = nano(*settings)
    stops = Stops(TOKENIZER, [2])
    context = SamplingContext(config, StaticPolicy(), "nano", "fp32", 64, stops, folder, lambda text: None)
    server = Server(REPLIES.url)
    REPLIES.say(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"data": [{"id": "base", "max_model_len": 64}]}).encode())
    sampler = VllmServerSampler(context, [server])
    sampler._stop.set()  # one attempt
    answer = {"token_ids": [7, 8, 2], "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0]}}
    choices = [{"index": number, **answer} for number in range(2)]
    REPLIES.say(reply(rng, {"model": "base", "choices": choices}))
    with contextlib.suppress(NoReply):
        server.ask("/version")
    sampler.group(None, [server], Sampling(2, 1.0, 3, 0), 0, Prompt(PROBLEMS[0], "x", (5, 6)))


SLURM = ["PROCID", "LOCALID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "NODEID", "STEP_ID", "JOB_ID", "STEP_NODELIST"]
SLURM += ["RESTART_COUNT", "ARRAY_TASK_ID", "ARRAY_JOB_ID", "JOB_END_TIME", "JOB_NODELIST"]
OF_SLURM = ["", "x", "-1", "2(x", "(x2)", "1,2,,", "9" * 4400, "1.5", "0x2", "a[1-", "\x1b[2J", " 3 ", "4"]


def of_slurm(rng: random.Random, folder: Path) -> None:
    good = {"STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2(x1)", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    good |= {"STEP_ID": "0", "JOB_ID": "7", "RESTART_COUNT": "0", "STEP_NODELIST": "a[1-2]"}
    good |= {name: rng.choice(OF_SLURM) for name in rng.sample(SLURM, rng.randint(1, 4))}
    variables = {f"SLURM_{name}": value for name, value in good.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, variables):
        if slurm.is_step():
            slurm.adopt_ranks()
        slurm.restarts(), slurm.describe(), slurm.seconds_left(), slurm.port(), slurm.nodes()


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    **{"settings in a preset": of_presets, "settings on the command line": of_overrides},
    **{"data, jsonl": of_jsonl, "data, csv": of_csv, "data, parquet": of_parquet},
    **{"state.json of a checkpoint": of_states, "manifest.json of a checkpoint": of_manifests},
    **{"metrics.jsonl and samples.jsonl": of_logs, "best.json": of_best, "judge.json": of_judge_budgets},
    **{"config.yaml of a run": of_run_settings, "config.json and index of a model": of_models},
    **{"adapter_config.json": of_adapters, "replies of a judge": of_judges, "replies of vLLM": of_vllm},
    **{"Slurm's environment": of_slurm},
}
# What takes a millisecond is tried seven times as often as what takes ten.
QUICK = ("data, jsonl", "data, csv", "manifest.json of a checkpoint", "best.json", "adapter_config.json")
QUICK += ("config.json and index of a model", "Slurm's environment")
ORDER = [*KINDS, *(QUICK * 6)]


def outcome(kind: str, number: int, seed: int, folder: Path) -> str:
    """Return "used", "refused", or what is wrong with the answer to one input."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    said = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            KINDS[kind](random.Random(f"{seed} {kind} {number}"), folder)
        result = "used"
    except (OctetError, NoReply) as error:
        result = "refused" if 0 < len(str(error)) < LONGEST_MESSAGE else f"a message of {len(str(error))} characters"
    except TooLong:
        result = f"it takes longer than {LONGEST_S:g} s"
    except Exception as error:  # noqa: BLE001  this is what is looked for
        place = traceback.extract_tb(error.__traceback__)
        ours = next((frame for frame in reversed(place) if "/trainer/" in frame.filename), place[-1])
        result = f"{type(error).__name__} at {Path(ours.filename).name}:{ours.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", said.getvalue()):
        return "a control character is printed"
    return result


def end(number: int, frame: FrameType | None) -> None:
    raise TooLong


def main(inputs: int, seed: int = 0) -> int:
    signal.signal(signal.SIGALRM, end)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    faults: set[str] = set()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(inputs):
            if number % 5000 == 0 and number:
                print(f"{number} inputs, {len(faults)} kinds of faults", flush=True)
            kind = ORDER[number % len(ORDER)]
            result = outcome(kind, number, seed, Path(scratch) / "it")
            counts[kind][result] += 1
            if result not in ("used", "refused"):
                if f"{kind}: {result}" not in faults:
                    print(f"FAULT  {kind}: {result} (input {number} of seed {seed})", flush=True)
                faults.add(f"{kind}: {result}")
    wrong = sum(counts[kind].total() - counts[kind]["used"] - counts[kind]["refused"] for kind in KINDS)
    print(f"{inputs} inputs of {len(KINDS)} kinds, {wrong} faults")
    if inputs >= LARGE:
        facts = {**describe(), "command": f"bash tests/fuzz.sh {inputs} {seed}", "inputs": inputs, "faults": wrong}
        facts |= {"seconds": round(time.monotonic() - began), "kinds": {name: dict(counts[name]) for name in counts}}
        (ROOT / "bench/results/fuzz.json").write_text(json.dumps(facts, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
