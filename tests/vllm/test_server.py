"""rollout.engine=vllm_server against the real vLLM."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT, is_running, lines_of, refuses, until
from tests.rollout.test_agents import worst_difference
from tests.rollout.test_decoder import tokens_of
from tests.vllm import serving
from tests.vllm.serving import RealServer, apart, built, served_and_local, train_all
from trainer.errors import TrainingError
from trainer.machine.http_client import NoReply, exchange
from trainer.records import Sampling
from trainer.rollout.vllm.client import Server
from trainer.rollout.vllm.publish import Published
from trainer.rollout.vllm.server import VllmServerSampler

pytestmark = pytest.mark.usefixtures("alone")


UPDATES = ("algorithm.lr=0.01", "rollout.dead_groups=keep")  # in each step


@pytest.fixture
def of_server(server, tmp_path):
    """Builds a run of the server with more settings."""
    return partial(built, tmp_path / "run", f"rollout.vllm.urls={server.url}")


@pytest.fixture
def run(of_server):
    with of_server(*UPDATES, "run.steps=3") as run:
        yield run


def test_calls_of_an_agent_are_recorded_as_the_tokens_and_logprobs_of_vllm(of_server, tmp_path):
    agent = f"task.agent={ROOT}/tests/rollout/agents.py:twice"
    with of_server(*UPDATES, agent, "run.steps=2") as run:
        train_all(run)
        prompts = run.rollouts.prompts_of(7)[:2]
        groups = dict(run.rollouts.sampler.sample(prompts, Sampling(2, 1.0, 24, 0)))
        model = run.updater.policy.model
        for answer in (one for group in groups.values() for one in group):
            assert [turn.role for turn in answer.turns] == ["environment", "model"] * 2
            [segment] = answer.segments
            assert sum(segment.written) > 2
            assert worst_difference(model, segment) < 1e-4
    assert serving.largest(tmp_path / "run", "sampler_difference/max") < 1e-4


def test_after_three_updates_the_served_policy_is_the_trained_one(run, server):
    """The next test shows that this check finds a sampler that misses an update."""
    train_all(run)
    assert apart(run) < 1e-4
    name = run.rollouts.sampler.published.name
    assert server.loaded() == [name]
    assert name.endswith("-v3")
    assert min(len(prompt.tokens) for prompt in run.rollouts.prompts_of(7)) > 64
    served, local = served_and_local(run, Sampling(1, 0.0, 24, 0))
    assert tokens_of(served) == tokens_of(local)
    assert {group[0].version for group in served.values()} == {3}
    with run.updater.policy.as_base():
        base, local = served_and_local(run, Sampling(1, 0.0, 24, 0))
    assert tokens_of(base) == tokens_of(local)
    assert base[0][0].version is None
    assert tokens_of(served) != tokens_of(base), "three updates should change something"


def test_answers_end_with_the_token_that_completes_a_stop_string(of_server):
    """Each line of the shipped model is a calculation, so nearly every answer has such a string in it."""
    stops = ["= ", "7\n"]
    with of_server(f"rollout.stop={json.dumps(stops)}", "run.steps=1") as run:
        served, local = served_and_local(run, Sampling(1, 0.0, 24, 0))
        assert tokens_of(served) == tokens_of(local)
        assert any(group[0].text.endswith("= ") for group in served.values())
        assert apart(run) < 1e-4
        groups = run.rollouts.sampler.sample(run.rollouts.prompts_of(7), Sampling(8, 1.0, 24, 0))
        tokenizer = run.rollouts.sampler.context.stops.tokenizer
        for answer in (one for _, group in groups for one in group):
            before = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=True)
            assert not any(stop in before for stop in stops)


def test_a_sampler_that_misses_the_updates_is_found_out(of_server, monkeypatch):
    with of_server(*UPDATES, "run.steps=3", "rollout.vllm.max_difference=1e-3") as run:
        first = run.rollouts.sampler.sync()
        monkeypatch.setattr(VllmServerSampler, "sync", lambda self: first)
        with pytest.raises(TrainingError):
            train_all(run)
        assert apart(run) > 1e-2


def test_a_run_with_a_server_learns_what_one_without_learns(server, tmp_path):
    """The local sampler brings these settings from 48 % of the problems to about 90 %."""
    short = ["run.steps=24", "rollout.problems=8", "algorithm.lr=0.002", "eval.problems=128", "run.merge=false"]
    with serving.opened(f"run.dir={tmp_path / 'run'}", f"rollout.vllm.urls={server.url}", *short) as run:
        with run.updater.policy.as_base():
            assert run.evaluator.evaluate("base").accuracy < 0.6
        train_all(run)
        assert run.evaluator.evaluate("trained").accuracy > 0.75
    assert serving.largest(tmp_path / "run", "sampler_difference/max") < 1e-4


def test_a_seed_repeats_and_answers_differ(run):
    prompts = run.rollouts.prompts_of(0)
    one, same, other = (dict(run.rollouts.sampler.sample(prompts, Sampling(4, 1.0, 24, seed))) for seed in (1, 1, 2))
    assert tokens_of(one) == tokens_of(same)
    assert one != other
    assert len({c.tokens for c in one[0]}) > 1


def test_an_adapter_above_the_servers_rank_is_refused(of_server):
    with refuses("rollout.vllm.urls", names="rank 32"), of_server("run.steps=1", "lora.r=32") as run:
        run.rollouts.sampler.sync()


TRAINED = {"PiSSA": ["lora.r=8", "lora.init=pissa"]}  # which is served as a plain one of twice the rank
TRAINED |= {"rsLoRA": ["lora.rslora=true", "lora.r=16"], "LoRA+": ["lora.plus_ratio=16", "algorithm.lr=0.0005"]}
TRAINED |= {"temperature": ["rollout.temperature=0.7"]}


@pytest.mark.parametrize("name", TRAINED)
def test_with_another_scale_rate_or_temperature_it_is_served_as_it_was_trained(of_server, name):
    """After two updates: before the first one every adapter computes what the base does, whatever its scale."""
    with of_server("run.steps=2", "rollout.dead_groups=keep", "algorithm.lr=0.002", *TRAINED[name]) as run:
        train_all(run)
        assert apart(run) < 1e-4


def test_a_folder_that_the_server_cannot_see_is_said_so(server, tmp_path):
    with refuses("rollout.vllm.urls", names="nowhere"):
        Server(server.url).load_adapter(Published("octet-x-v1", tmp_path / "nowhere", 1))


def test_a_server_without_runtime_adapters_is_refused(tmp_path):
    """As somebody might start it."""
    plain = RealServer(tmp_path / "log", serving.ARGUMENTS, {})
    with plain.running(), refuses("rollout.vllm.urls", names="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        Server(plain.url).load_adapter(Published("octet-x-v1", tmp_path, 1))


def test_a_server_that_is_killed_and_started_again_in_the_middle_of_a_run(server, tmp_path):
    """The run waits, hands the adapter over again, and counts each group once; ahead, in two threads at once."""
    folder = tmp_path / "run"

    def disturb() -> None:
        until(lambda: len(samples_so_far(folder)) >= 3 * 8, 120)
        server.end(signal.SIGKILL)
        server.start()

    more = [f"rollout.vllm.urls={server.url}", "run.steps=12", "run.save_every=4", "rollout.ahead=1"]
    with built(folder, *more, "algorithm.lr=0.0003") as run, ThreadPoolExecutor() as pool:
        disturbed = pool.submit(disturb)
        train_all(run)
        disturbed.result()
        assert apart(run) < 1e-4
    steps = serving.metrics(folder)
    assert [one["step"] for one in steps] == list(range(1, 13))
    assert {one["groups"] for one in steps} == {4.0}
    assert serving.largest(folder, "sampler_difference") < 0.1
    stale = [one["step"] - 1 - one["version"] for one in serving.samples(folder)][::8]
    assert stale == [0, 1, 1, 1] * 3, "of this policy where a checkpoint was before, else of the one before"


def test_a_run_ahead_goes_on_as_if_it_had_not_been_cut_off(server, tmp_path):
    """What was under way is sampled again, by the same policy."""
    more = [f"rollout.vllm.urls={server.url}", "run.save_every=3", "rollout.ahead=1", "run.steps=6"]
    more += ["algorithm.lr=1e-3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with built(whole, *more) as run:
        train_all(run)
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints/step_000006")
    (cut / "checkpoints/latest").unlink()
    with built(cut, *more) as run:
        assert run.log.first_step == 3
        train_all(run)
    after, undisturbed = ([(one["step"], one["completion"]) for one in serving.samples(run)] for run in (cut, whole))
    assert after == undisturbed
    assert serving.metrics(cut)[-1]["loss"] == pytest.approx(serving.metrics(whole)[-1]["loss"], abs=1e-4)


def test_two_ranks_share_a_server(server, tmp_path):
    folder = tmp_path / "run"
    serving.train(folder, f"rollout.vllm.urls={server.url}", *UPDATES, "run.steps=3", ranks=2)
    assert serving.largest(folder, "sampler_difference/max") < 1e-4
    assert [one["version"] for one in serving.samples(folder)][::8] == [0, 1, 2]
    assert server.loaded() == []
    assert not (folder / "published").exists()


def test_octet_eval_asks_the_server_for_base_and_adapter(server, tmp_path):
    """The greedy answers are those of the local sampler."""
    adapter = tmp_path / "adapter"
    serving.save_random_adapter(adapter)
    found = {}
    for name, more in (("server", [f"rollout.vllm.urls={server.url}"]), ("local", [])):
        settings = [f"--adapter={adapter}", "--model=nano", "--problems=16", f"--out={tmp_path / name}"]
        command = [sys.executable, "-m", "trainer.commands.main", "eval", *settings, *more]
        subprocess.run(command, check=True, env=serving.surroundings(), cwd=ROOT, stdout=subprocess.DEVNULL)
        answers = lines_of(tmp_path / name / "eval_answers.jsonl")
        found[name] = [(one["model"], one["problem"], one["completion"]) for one in answers]
    assert found["server"] == found["local"]
    assert server.loaded() == []


def test_the_run_starts_a_server_and_takes_it_with_it_when_it_is_killed(tmp_path):
    """The run trains a whole model, whose weights only such a server can take."""
    folder = tmp_path / "run"
    more = ["rollout.vllm.start=true", f"rollout.vllm.python={serving.PYTHON}", "lora.enabled=false"]
    more += ["rollout.vllm.arguments=--block-size,32", "algorithm.lr=0.0003", "run.steps=500", "run.save_every=500"]
    run = serving.start(folder, *more)
    try:
        until(lambda: len(samples_so_far(folder)) >= 4 * 8, 240)
        log = (folder / "vllm-0.log").read_text()
        servers = [int(number) for number in set(re.findall(r"pid=(\d+)", log))]
        assert servers
        assert all(map(is_running, servers))
        assert serving.largest(folder, "sampler_difference/max") < 1e-4
        assert [one["version"] for one in serving.samples(folder)][:32:8] == [0, 1, 2, 3]
        key = key_that_every_route_asks_for(folder, servers[0])
    finally:
        run.kill()  # SIGKILL: nothing of the trainer can clean up
        run.communicate()
    until(lambda: not any(map(is_running, servers)), 40)
    for file in (file for file in folder.rglob("*") if file.is_file()):
        assert key not in file.read_bytes(), file


def key_that_every_route_asks_for(folder: Path, server: int) -> bytes:
    """Return the key of the server, which no command line shows."""
    around = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    key = next(one.partition(b"=")[2] for one in around if one.startswith(b"VLLM_API_KEY="))
    (address,) = set(re.findall(r"http://127\.0\.0\.1:\d+", (folder / "vllm-0.log").read_text()))
    for path in ("/v1/models", "/server_info", "/collective_rpc", "/health"):
        with pytest.raises(NoReply) as refused:
            exchange(f"{address}{path}", None, 10, 1 << 20, direct=True)
        assert refused.value.status == 401
    assert not any(key in Path(f"/proc/{number}/cmdline").read_bytes() for number in (server, os.getpid()))
    return key


def samples_so_far(folder: Path) -> list[str]:
    path = folder / "samples.jsonl"
    return path.read_text().splitlines() if path.is_file() else []
