"""Settings of vLLM, the servers that a run starts, and the process that keeps them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.commands.conftest import config_of, write
from tests.conftest import is_running, program, refuses, until
from tests.rollout.test_decoder import prompts, sampling
from trainer.commands import eval as eval_command
from trainer.commands.main import parser_of
from trainer.config.resolve import resolve
from trainer.errors import TrainingError
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware
from trainer.machine.installed_files import pip_install
from trainer.model.load import load_tokenizer
from trainer.model.shapes import shape_of
from trainer.plan import memory_check, planner
from trainer.plan.planner import GB
from trainer.plan.preflight import must_leave_our_cards, training_cards
from trainer.plan.search import Placement
from trainer.rollout import make
from trainer.rollout.draw_tokens import group_seed
from trainer.rollout.interface import SamplingContext, StaticPolicy
from trainer.rollout.turns import Stops
from trainer.rollout.vllm import colocate, process, server
from trainer.rollout.vllm.colocate import VllmColocateSampler
from trainer.rollout.vllm.server_modules.vllm_key_check import KeyCheck


def vllm_of(*overrides: str):
    return resolve("nano", None, overrides).rollout.vllm


def test_several_addresses_and_devices_are_lists():
    assert vllm_of("rollout.vllm.urls=http://a:1/v1,http://b:2/").urls == ("http://a:1", "http://b:2")
    assert vllm_of("rollout.vllm.devices=3").devices == (3,)
    assert vllm_of("rollout.vllm.devices=0,1").devices == (0, 1)


START = "rollout.vllm.start=true"


def cards(count: int) -> Hardware:
    return Hardware(tuple(Gpu(index, f"GPU-{index}", "card", 24.0) for index in range(count)), 8)


def test_the_policy_is_trained_on_the_cards_that_the_servers_leave(monkeypatch):
    """What is refused is in tests/data/refusals.yaml."""
    left = training_cards(cards(4), vllm_of(START, "rollout.vllm.devices=0,1"))
    assert [gpu.index for gpu in left.gpus] == [2, 3]
    assert training_cards(cards(0), vllm_of(START)).gpus == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the servers may have cards that are hidden here
    assert len(training_cards(cards(2), vllm_of(START, "rollout.vllm.devices=2")).gpus) == 2


def test_a_rank_started_by_hand_does_not_share_its_card_with_a_server(monkeypatch):
    def look(devices: str, ranks: int = 1, there: int = 2) -> None:
        must_leave_our_cards(cards(there), vllm_of(START, f"rollout.vllm.devices={devices}"), ranks)

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    look("1")
    for devices, ranks, trained in (("0", 1, "[0], so [0]"), ("1", 2, "[0, 1], so [1]")):
        with refuses("rollout.vllm.devices", names=trained):
            look(devices, ranks)
    with refuses("rollout.vllm.start", names="rollout.vllm.devices=0"):
        look("[]")
    look("[]", there=0)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    look("0")


def of_server(*overrides: str) -> str:
    context = replace(outside(Path(), START, *overrides), location="some/model", dtype="bf16", context_length=512)
    return " ".join(process.arguments(context))


def test_a_server_is_started_with_what_a_run_needs():
    words = of_server("lora.r=24", "rollout.vllm.arguments=--quantization,fp8")
    for wanted in (
        *("--model some/model", "--served-model-name base", "--dtype bfloat16", "--max-model-len 512"),
        *("--logprobs-mode processed_logprobs", "--generation-config vllm", "--enforce-eager --"),
        *("--max-lora-rank 32", "--max-loras 2", "--enable-lora --", "--max-num-batched-tokens 65536 "),
    ):
        assert wanted in words
    assert "--revision" not in words
    assert words.endswith("--quantization fp8")
    assert "--max-lora-rank 64" in of_server("lora.r=24", "lora.init=pissa")
    on_cards = of_server("rollout.vllm.devices=0,1", "rollout.vllm.tensor_parallel=2")
    assert "--tensor-parallel-size 2" in on_cards
    assert "--gpu-memory-utilization 0.9" in on_cards
    assert "--enforce-eager" not in on_cards


def test_a_server_is_not_told_of_our_ranks_nor_of_how_we_allocate(monkeypatch):
    ours = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in ours:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    hardware.prepare_cuda()
    around = process._environment([2, 3])
    assert not {*ours, "PYTORCH_ALLOC_CONF"} & set(around)
    assert (around["CUDA_VISIBLE_DEVICES"], around["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]) == ("2,3", "1")


@pytest.fixture
def stand_in(tmp_path) -> Callable[[str], str]:
    """Return a function that makes a stand-in for vLLM of a shell script, and returns the setting that names it."""

    def make(script: str) -> str:
        python = program(tmp_path / "python", f"#!/bin/sh\n{script}\n")
        return f"rollout.vllm.python={python}"

    return make


@pytest.mark.parametrize("whole", [False, True])
def test_a_server_imports_the_packages_of_its_own_environment(tmp_path, monkeypatch, stand_in, whole):
    """A stand-in for vLLM says where it looks first. Octet may be among other packages."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = stand_in('echo "$PYTHONPATH" "$@"')
    (server,) = process.start(outside(tmp_path, START, python, f"lora.enabled={not whole}", "algorithm.lr=0.0001"))
    server.supervisor.wait(timeout=300)
    first, *words = server.log.read_text().rstrip("\n").split(" ")
    (modules,) = [Path(folder) for folder in first.split(os.pathsep) if folder]
    assert sorted(file.name for file in modules.glob("*.py")) == ["__init__.py", "vllm_key_check.py", "vllm_worker.py"]
    assert ("vllm_worker.WholeModel" in words) == whole


GIVEN = {"right": b"Bearer the-key", "another": b"Bearer another", "bare": b"the-key", "none": None}
ROUTES = ["/v1/completions", "/collective_rpc", "/server_info", "/health"]


@pytest.mark.parametrize(("kind", "path", "given", "told"), [
    *[("http", path, "right", 200) for path in ROUTES],
    *[("http", path, given, 401) for path in ROUTES for given in ("another", "bare", "none")],
    ("websocket", "/", "right", 200),
    ("websocket", "/", "another", "websocket.close"),
    ("websocket", "/", "none", "websocket.close"),
    ("webtransport", "/", "none", "webtransport.close"),
    ("lifespan", "/", "none", 200),
])  # fmt: skip
def test_every_connection_to_a_started_server_needs_the_key(monkeypatch, kind, path, given, told):
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    sent = []

    async def app(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message.get("status", message.get("type")))

    headers = [(b"host", b"x"), *([(b"authorization", GIVEN[given])] if GIVEN[given] else [])]
    asyncio.run(KeyCheck(app)({"type": kind, "path": path, "headers": headers}, None, send))
    assert sent[0] == told


def test_a_run_makes_a_key_for_its_servers_which_only_their_environment_has(tmp_path, monkeypatch, stand_in):
    unchecked = lambda _, servers: SimpleNamespace(servers=servers, check=lambda: None)  # noqa: E731
    monkeypatch.setattr(server, "VllmServerSampler", unchecked)
    named, keys = [START, stand_in('echo "$VLLM_API_KEY"; echo "$@"')], []
    for own in ("", "", "the key of the user"):
        monkeypatch.setenv("VLLM_API_KEY", own)
        (tmp_path / "vllm-0.log").unlink(missing_ok=True)
        (started,) = server.connect(outside(tmp_path, *named)).servers
        started.process.supervisor.wait(timeout=300)
        key, words = started.process.log.read_text().splitlines()
        assert os.environ["VLLM_API_KEY"] == key
        assert "--host 127.0.0.1" in words
        assert key not in words
        assert not [file for file in tmp_path.rglob("*.py*") if key in file.read_text(errors="replace")]
        keys.append(key)
    assert len(set(keys)) == 3
    assert len(keys[0]) >= 40
    assert keys[2] == "the key of the user"


def outside(folder: Path, *overrides: str) -> SamplingContext:
    config = resolve("nano", None, overrides)
    stops = Stops(load_tokenizer(config.model), [2])
    return SamplingContext(config, StaticPolicy(), "nano", "fp32", 64, stops, folder, lambda text: None)


def test_each_later_turn_of_each_answer_has_a_seed_of_its_own(tmp_path):
    context, (prompt,) = outside(tmp_path), prompts(5)

    def seed(number: int, *tokens: int) -> int:
        answer = SimpleNamespace(number=number, tokens=tokens, end=9, prompt=prompt)
        return process.turn_options(context, answer, sampling(), 1)["seed"]

    assert seed(0) == seed(1) == group_seed(sampling(), prompt, "")
    assert len({seed(0), seed(0, 5), seed(0, 5, 6), seed(1, 5)}) == 4


def test_an_environment_without_vllm_is_named(tmp_path, monkeypatch, stand_in):
    def refused(python: str, named: str) -> None:
        with refuses("rollout.vllm.python", names=named):
            process.start(outside(tmp_path, START, python))

    refused("rollout.vllm.python=/nowhere/python", "run")
    if colocate.installed() is None:
        refused(f"rollout.vllm.python={sys.executable}", "-m pip install vllm")
        with refuses("rollout.engine", names=pip_install("vllm")):
            make.make_vllm_sampler(outside(tmp_path, "rollout.engine=vllm_colocate"))
    monkeypatch.setattr(process, "PYTHON_S", 0.2)
    refused(stand_in("exec sleep 60"), "run")


def test_an_engine_in_this_process_sleeps_while_its_groups_are_scored(tmp_path, monkeypatch):
    """And if it fails."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **options: options))
    monkeypatch.setattr(colocate, "installed", lambda: colocate.TESTED[0])
    monkeypatch.setattr(colocate.distributed, "on_gpu", lambda: True)
    did = []

    def generate(inputs, settings, **_):
        did.append("generate")
        one = SimpleNamespace(token_ids=[2], logprobs=[{2: SimpleNamespace(logprob=-1.0)}])
        return [SimpleNamespace(outputs=[one] * options["n"]) for options in settings]

    calls = {"wake_up": lambda: did.append("wake"), "sleep": lambda level: did.append("sleep")}
    monkeypatch.setattr(colocate, "_engine", lambda context: SimpleNamespace(generate=generate, **calls))
    sampler = VllmColocateSampler(outside(tmp_path))
    groups = sampler.sample(prompts(3, 5), sampling(group=2))
    assert len(next(groups)[1]) == 2
    assert did == ["sleep", "wake", "generate", "sleep"]
    assert [index for index, _ in groups] == [1]
    sampler.llm.generate = lambda *_, **__: did.append(1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(sampler.sample(prompts(3), sampling(group=2)))
    assert did[4:] == ["wake", "sleep"]


@pytest.mark.parametrize("setting", ["python", "arguments"])
def test_no_server_is_started_as_only_the_folder_of_a_run_says(tmp_path, stand_in, setting):
    """vLLM imports what `--tool-parser-plugin` names."""
    made = {"python": stand_in(f"touch {tmp_path}/ran").partition("=")[2], "arguments": "--tool-parser-plugin,away.py"}
    (tmp_path / "config.yaml").write_text(f"rollout: {{vllm: {{start: true, {setting}: '{made[setting]}'}}}}")
    context = replace(outside(tmp_path / "new", START), config=resolve(str(tmp_path / "config.yaml")))
    with refuses(f"rollout.vllm.{setting}", names="somebody else"):
        process.start(context)
    assert not (tmp_path / "ran").exists()


LOG = """
WARNING [utils.py:2] an error like `OSError: [Errno 24] Too many open files`
\x1b[1;36m(EngineCore pid=7)\x1b[0;0m ERROR 11-21 19:11:04 [core.py:13] ValueError: no room for the cache
(EngineCore pid=7)     raise ValueError(
(EngineCore pid=7) ValueError: no room for the cache
(APIServer pid=5) RuntimeError: see above
"""
LOG += "  warnings.warn('leaked')\n" * 9
SHOWN = {"no room on this card": "no room on this card"}
SHOWN[LOG] = "ValueError: no room for the cache\nRuntimeError: see above"


@pytest.mark.parametrize("log", SHOWN, ids=["end", "errors"])
def test_a_server_that_ends_by_itself_is_an_error_with_those_of_its_log_or_the_end_of_it(tmp_path, log):
    started = process._start([sys.executable, "-c", f"raise SystemExit({log!r})"], [], tmp_path / "log")
    started.supervisor.wait(timeout=300)
    with refuses("rollout.vllm.start", TrainingError, names=f"/log:\n{SHOWN[log]}."):
        started.check()
    started.stop()


PARENT = """
import subprocess, sys, os, time
supervisor = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), sys.executable, "-c", sys.argv[2]])
time.sleep(600)
"""
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.environ["NOTE"], "w").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


@pytest.fixture
def note(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NOTE", str(tmp_path / "note"))
    return tmp_path / "note"


def test_a_killed_trainer_leaves_neither_a_server_nor_its_children_behind(note):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(process.SUPERVISOR), SERVER])
    until(lambda: note.is_file() and note.read_text().endswith("\n"))
    processes = [int(number) for number in note.read_text().split()]
    for number in processes:
        os.kill(number, signal.SIGUSR1)  # as Slurm does before the time is up; the run needs its server to the end
    time.sleep(0.2)
    assert all(map(is_running, processes))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not any(map(is_running, processes)))


STUBBORN = """
import os, signal, time
asked = []
def ask(*_):
    asked.append(1)
    open(os.environ["NOTE"], "w").write(f"asked {len(asked)} times")
    if len(asked) > 1:
        os._exit(0)
signal.signal(signal.SIGINT, ask)
open(os.environ["NOTE"], "w").write("ready")
while True:
    time.sleep(0.1)
"""


def test_a_server_that_waits_for_its_clients_is_asked_twice(tmp_path, note):
    started = process._start([sys.executable, "-c", STUBBORN], [], tmp_path / "log")
    until(note.is_file)
    started.stop()
    assert note.read_text() == "asked 2 times", "one that is ended with SIGKILL says nothing"


MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


def test_the_plan_gives_vllm_its_share_of_the_card():
    shape, vram = shape_of(MODEL), 24 * GB

    def planned(*overrides: str) -> planner.Plan:
        return planner.Planner(shape, resolve("8gb", None, overrides), 1, vram).plan

    asleep = planned("rollout.engine=vllm_colocate", "rollout.vllm.memory=0.4")
    assert asleep.phases["rollout"]["vLLM"] == round(0.4 * vram)
    assert "KV cache" not in asleep.phases["rollout"]
    assert asleep.phases["backward"]["sleeping vLLM"] == planner.ASLEEP
    assert "vLLM" not in asleep.phases["backward"]
    assert asleep.ram["run"]["sleeping weights of vLLM"] == 2 * shape.parameters
    awake = planned("rollout.engine=vllm_colocate", "rollout.vllm.sleep=0")
    adapters, cache = planner.ADAPTERS * awake.phases["rollout"]["adapter"], planned().phases["rollout"]["KV cache"]
    assert awake.phases["backward"]["vLLM"] == pytest.approx(2 * shape.parameters + adapters + cache + planner.AT_WORK)
    assert "sleeping vLLM" not in awake.phases["backward"]
    served = planned("rollout.vllm.urls=http://127.0.0.1:8000")
    assert not {"KV cache", "vLLM"} & {*served.phases["rollout"], *served.phases["backward"]}
    assert "KV cache" in planned().phases["rollout"]


ASKED = [([], "auto", ()), (["rollout.engine=decode"], "decode", ())]
ASKED += [(["rollout.vllm.urls=http://new:8000"], "auto", ("http://new:8000",))]


@pytest.mark.parametrize(("given", "engine", "urls"), ASKED)
def test_whoever_asks_about_a_served_adapter_does_not_need_its_server(tmp_path, given, engine, urls):
    served = ["rollout.engine=vllm_server", "rollout.vllm.urls=http://gone:8000", "rollout.ahead=1"]
    write(tmp_path, {"adapter/adapter_config.json": "{}", "config.yaml": config_of(*served)})
    options = parser_of("eval").parse_intermixed_args([f"--adapter={tmp_path / 'adapter'}", *given])
    rollout = eval_command.settings_for(options, eval_command.adapter_of(options)).rollout
    assert (rollout.engine, rollout.vllm.urls, rollout.ahead) == (engine, urls, 0)


def test_a_share_that_holds_the_base_is_enough():
    """A smaller one is refused in tests/data/refusals.yaml."""
    config = resolve("8gb", None, ["rollout.engine=vllm_colocate", "rollout.vllm.memory=0.2"])
    assert memory_check.too_little_for_vllm(Placement(shape_of(MODEL), config, 1, 24 * GB)) is None


def test_an_engine_beside_the_policy_is_awake_when_it_takes_the_policy_before_anyone_samples():
    """A rank whose agents never call the model would not take part in publishing it."""
    seen = []
    sampler = object.__new__(VllmColocateSampler)
    sampler.sleeps, sampler.sync = True, lambda: seen.append("takes")
    sampler.llm = SimpleNamespace(wake_up=lambda: seen.append("wakes"), sleep=lambda level: seen.append("sleeps"))
    assert sampler.frozen() is sampler
    assert seen == ["wakes", "takes", "sleeps"]
