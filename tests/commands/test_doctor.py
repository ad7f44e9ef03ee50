"""What is known to go wrong before a run begins, and whoever fills a disk."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from tests.commands.conftest import write
from tests.conftest import ROOT, refuses, said_by, write_lines
from tests.hub_server import use_hub
from tests.sandbox.lacking import python_without
from trainer.commands import doctor
from trainer.config.resolve import resolve
from trainer.config.settings import Code
from trainer.config.train_options import PRESETS, RECIPES, names_in
from trainer.errors import CheckpointError, ConfigError, DataError, Finding, ModelError
from trainer.machine import disk, hardware
from trainer.model import hub
from trainer.plan import downloads, preflight
from trainer.reward import programs

MEGABYTE = 1 << 20
NANO = resolve("nano")
NO_CARDS = hardware.Hardware(gpus=(), cores=2)
CARD = hardware.Gpu(0, "GPU-aa11", "NVIDIA GeForce RTX 2070", 8.6)
ONE_CARD = hardware.Hardware(gpus=(CARD,), cores=2)


def test_a_disk_that_is_too_small_is_answered_before_the_run(small_disk, capsys):
    folder = small_disk(MEGABYTE)
    status, _, told = said_by(capsys, "train", "--preset", "nano", f"run.dir={folder}/run")
    assert (status, f"octet: run.dir={folder}/run: " in told) == (2, True)
    assert list(folder.iterdir()) == []


def test_a_place_that_cannot_be_written_is_answered_before_a_model_loads(small_disk, monkeypatch):
    folder = small_disk(MEGABYTE)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with refuses("run.dir", names=f"b: {folder} "):
        preflight.must_be_usable(resolve("nano", None, [f"run.dir={folder}/a/b"]))
    monkeypatch.chdir(folder)
    with refuses("run.dir", names=f"runs: {folder} "):
        preflight.must_be_usable(NANO)
    link = folder.parent / "link"
    link.symlink_to("nowhere")
    with refuses("run.dir", names="link is a broken link"):
        preflight.must_be_usable(resolve("nano", None, [f"run.dir={link}/a"]))


def test_download_and_run_folder_share_the_room_of_one_disk(small_disk, monkeypatch):
    folder = small_disk(10 * MEGABYTE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache/hub"))
    each = preflight.Needs(download=6_000_000, run=6_000_000, ram=0)
    (finding,) = preflight.disk(each, folder / "runs/it")
    assert finding.severity == "end"
    assert f"run.dir={folder}/runs/it, HF_HUB_CACHE={folder}/cache/hub: " in finding.seen
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(small_disk(10 * MEGABYTE)))
    assert [finding.severity for finding in preflight.disk(each, folder / "runs/it")] == ["note", "note"]


def test_a_run_that_goes_on_has_its_room_already(small_disk):
    folder = small_disk(10 * MEGABYTE)
    (folder / "run").mkdir()
    (folder / "run/merged.bin").write_bytes(b"\0" * 8_000_000)
    needs = preflight.Needs(download=0, run=9_600_000, ram=0)
    assert [finding.severity for finding in preflight.disk(needs, folder / "run")] == ["note"]
    (folder / "run/config.yaml").touch()
    for place, elsewhere in (("run", False), ("new", True)):  # a run is resumed where it is
        (finding,) = preflight.disk(preflight.Needs(download=0, run=99_000_000, ram=0), folder / place)
        assert ("run.dir=FOLDER" in finding.remedy) == elsewhere


@pytest.mark.parametrize("write", [
    lambda file: file.write_bytes(bytes(2 * MEGABYTE)),
    lambda file: torch.save(torch.zeros(MEGABYTE), file),
    lambda file: save_file({"weights": torch.zeros(MEGABYTE)}, file),
])  # fmt: skip
def test_whoever_writes_a_full_disk_is_one_error(small_disk, write):
    folder = small_disk(MEGABYTE) / "new"
    folder.mkdir()
    writing = disk.writing(folder, "it", "Do that.", needed=4 * MEGABYTE)
    with pytest.raises(CheckpointError, match=r"4\.2 MB, and 1\.0 MB"), writing:
        write(folder / "file")
    assert not folder.exists()


def test_too_little_ram_is_an_error_that_says_how_much(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=600_000_000))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=116_800_000))
    free = hardware.free_ram(tmp_path)
    assert free == 716_800_000
    finding = preflight.ram(NANO, preflight.needs(NANO, hub.find_model(NANO.model), NO_CARDS), free)
    with refuses("model.name", names="716.8 MB"):
        preflight.complain([finding])


def test_the_limit_of_a_container_or_a_job_counts(tmp_path):
    """The process is in the root group of this tree, or in one below it that has no limit."""
    stat = "anon 500000\ninactive_file 150000\nactive_file 50000\n"
    write(tmp_path, {"memory.max": "1000000\n", "memory.current": "700000\n", "memory.stat": stat})
    assert hardware.free_ram(tmp_path) == 1_000_000 - 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert hardware.free_ram(tmp_path) > 1_000_000


def test_the_limit_of_a_job_counts_with_control_groups_of_version_1(tmp_path):
    stat = "inactive_file 0\ntotal_inactive_file 150000\ntotal_active_file 50000\n"
    of_job = {"limit_in_bytes": "1000000\n", "usage_in_bytes": "700000\n", "stat": stat}
    write(tmp_path / "memory/slurm/job_7", {f"memory.{name}": content for name, content in of_job.items()})
    write(tmp_path, {"own": "5:cpu,cpuacct:/\n4:memory:/slurm/job_7/step_0\n0::/system.slice\n"})
    assert hardware.free_ram(tmp_path, tmp_path / "own") == 1_000_000 - 500_000


def test_the_whole_model_with_its_optimizer_in_ram_needs_seven_times_the_weights():
    """bf16 weights of 2 bytes, and 12 for each number in CPU memory; an adapter has next to nothing there."""
    base = ["model.name=nano", "model.dtype=bf16"]
    whole, adapter = resolve("8gb", None, [*base, "lora.enabled=false"]), resolve("8gb", None, base)
    found = hub.find_model(whole.model)
    numbers = found.weights // 4  # stored in fp32
    wanted = preflight.needs(whole, found, ONE_CARD)
    assert wanted.ram - preflight.PROCESS_BYTES == pytest.approx(14 * numbers, rel=0.02)
    assert wanted.run == pytest.approx((3 * 14 + 2) * numbers, rel=0.02)
    eight = preflight.needs(whole.changed({"optim.name": "adamw_8bit"}), found, ONE_CARD)
    assert eight.run == pytest.approx((3 * (2 + 4 + 2.04) + 2) * numbers, rel=0.001)
    assert preflight.needs(adapter, found, ONE_CARD).ram < wanted.ram
    there = hub.Found(None, {"model.safetensors": 2 * 10**9})  # to be downloaded, so its type is not known
    assert preflight.needs(whole, there, ONE_CARD).run == pytest.approx((3 * 14 + 2) * 10**9, rel=0.02)


def test_every_rank_of_this_machine_needs_its_share(monkeypatch):
    """Cards are counted where nobody has said how many ranks there are."""
    found, two = hub.find_model(NANO.model), hardware.Hardware((CARD, CARD), 2)
    one = preflight.needs(NANO, found, ONE_CARD).ram
    assert preflight.needs(NANO, found, two).ram - one > preflight.PROCESS_BYTES
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert preflight.needs(NANO, found, NO_CARDS).ram > 4 * preflight.PROCESS_BYTES
    assert preflight.needs(NANO, found, two).ram > 4 * preflight.PROCESS_BYTES


def test_numbers_of_the_adapter_are_those_of_its_file():
    """Counted in adapter_model.safetensors of a run with the preset nano: r=16 on all linear layers."""
    found = hub.find_model(NANO.model)
    numbers = found.weights // 4
    targets = ("lora.targets=attention", "lora.targets=[q_proj, k_proj, v_proj, o_proj]")
    attention, named = (preflight.needs(resolve("nano", None, [one]), found, NO_CARDS) for one in targets)
    of_state = (preflight.needs(NANO, found, NO_CARDS).run - 4 * numbers) / (NANO.run.keep + 1)
    assert (of_state, attention) == (116_736 * (12 + 2 * 4), named)


@pytest.fixture
def one_card(nvidia_smi):
    """Puts one card with so much used, of this capability, into the machine."""

    def install(used: int, capability: str) -> None:
        free = 8192 - used if capability != "[N/A]" else "[N/A]"
        driver = "| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: 12.4  |"
        facts = f"8192, {used}, {free}, {capability}, 550.54, [N/A]"
        nvidia_smi(f"0, GPU-aa11, NVIDIA GeForce RTX 2070, {facts}", driver=driver)

    return install


NOTES = ["note"] * 3


@pytest.mark.parametrize(("used", "capability", "more", "severities"), [
    (400, "8.6", [], NOTES),  # a desktop
    (5000, "8.6", [], ["warn", "note", "note"]),
    (10, "7.5", [], NOTES),
    (10, "7.5", ["model.dtype=bf16"], ["end", *NOTES]),
    (10, "6.1", [], ["end", *NOTES]),  # torch has no kernels for it
    (0, "[N/A]", [], ["note"]),  # it is shared out in parts
])  # fmt: skip
def test_a_card_is_seen_with_what_others_use_and_what_it_cannot(one_card, capsys, used, capability, more, severities):
    one_card(used, capability)
    found = list(doctor.visible_cards(resolve("nano", None, more).model, hardware.detect()))
    assert [one.severity for one in found] == severities
    if "end" in severities:
        with pytest.raises(ConfigError):
            preflight.complain(found)
    else:
        preflight.complain(found)
        assert ("holds 5.2 GB" in capsys.readouterr().err) == (used == 5000)


@pytest.mark.parametrize(("facts", "severity", "text"), [
    ({}, "note", "computes on the card"),
    ({"cuda": "12.9"}, "note", "computes on the card"),  # a driver runs all programs of its major version
    ({"cuda": "13.0"}, "end", "built for CUDA 13.0, and the driver runs CUDA 12.4"),
    ({"cuda": None, "gpu": False}, "end", "is built without CUDA"),
    ({"trouble": "no kernel image"}, "end", "does not compute on the card: no kernel image"),
    ({"gpu": False}, "end", "it sees none"),
])  # fmt: skip
def test_torch_has_to_fit_the_driver_and_the_card(one_card, facts, severity, text):
    one_card(used=10, capability="8.6")
    usual = {"torch": "2.13.0", "cuda": "12.4", "gpu": True, "trouble": ""}
    finding = doctor.build(usual | facts, ONE_CARD, hardware.driver_cuda())
    assert (finding.severity, text in finding.seen) == (severity, True)


@pytest.mark.parametrize(("override", "package"), [
    ("optim.name=adamw_8bit", "bitsandbytes"), ("model.quantize=nf4", "bitsandbytes"),
    ("reward.symbolic=true", "math-verify"), ("rollout.engine=vllm_colocate", "it needs vllm"),
    ("model.attention=flash", "it needs flash-attn"),
    ("rollout.vllm.start=true", "it needs vllm"),
])  # fmt: skip
def test_a_package_is_missed_only_by_settings_that_need_it(monkeypatch, override, package):
    """Nothing is installed when the folder of the packages is not on the path."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bitsandbytes", "math_verify")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    assert list(preflight.packages(NANO)) == []
    config = resolve("nano", None, [override])
    with refuses(override.partition("=")[0], names=package):
        preflight.complain(list(preflight.packages(config)))
    if package == "bitsandbytes":
        assert [doctor.bitsandbytes("no kernel", one).severity for one in (NANO, config)] == ["note", "end"]


def test_octet_doctor_knows_that_a_card_does_not_take_what_makes_cpus_faster(one_card):
    config = resolve("nano", None, ["model.quantize=bf16"])
    assert {finding.severity for finding in preflight.bf16_products(config, hardware.detect())} <= {"warn"}
    one_card(used=10, capability="8.6")
    found = {one.name: one for one in doctor.settings(config, hardware.detect())}
    assert (found["CPU"].severity, found["CPU"].remedy) == ("end", "Write model.dtype=bf16.")


OF_A_WARM_UP = "lora.enabled=false warmup.only=true warmup.steps=5 warmup.lr=0.01 algorithm.lr=1e-6"


@pytest.mark.parametrize(("settings", "seen", "remedy"), [
    ("lora.init=pissa", "lora.init=pissa", "algorithm.lr=0.003"),
    ("lora.enabled=false", "lora.enabled=false", "full_finetune"), (OF_A_WARM_UP, "warmup.lr=0.01 ", ""),
])  # fmt: skip
def test_what_learned_less_in_a_study_is_warned_of_and_nothing_usual_is(settings, seen, remedy):
    (found,) = preflight.adapter(resolve("nano", overrides=settings.split()))
    assert (found.severity, seen in found.seen, remedy in found.remedy) == ("warn", True, True)
    assert [*preflight.adapter(NANO), *preflight.adapter(resolve("nano", "full_finetune"))] == []


IDLE = {"teacher.weight=2.0": "teacher.name", "rollout.vllm.memory=0.5": "rollout.engine"}
IDLE |= {"reward.judge.model=a": "reward.weights.judge", "reward.code.seconds=2.0": "reward.weights.code"}
IDLE |= {"reward.repetition_words=9": "reward.weights.repetition", "rollout.refills=5": "rollout.dead_groups=refill"}
IDLE |= {"reward.length_band=[1,9]": "reward.weights.length", "reward.overlong_buffer=9": "reward.weights.overlong"}
IDLE |= {"algorithm.correction.mode=mask algorithm.correction.level=none": "algorithm.correction.level=token"}
IDLE |= {"prompt.shots=2": "few_shot", "task.seed=3": "run.seed", "task.holdout=0.2": "test set"}
IDLE |= {f"task.subset=a task.name=records task.path={ROOT}/bench/results/seeds.json": "on the hub"}
IDLE |= {"task.holdout=0.2 task.name=gsm8k": "test set", "eval.samples=4 eval.problems=0": "Leave it out"}
IDLE |= {"algorithm.correction.cap=5.0 algorithm.correction.level=none": "algorithm.correction.level=token"}
IDLE |= {"algorithm.advantage=rloo algorithm.loss=reinforce": "algorithm.loss=reinforce_baseline"}
IDLE |= {
    "task.choices=c task.name=records task.path=a/b": "multiple_choice",
    "run.track_answers=true": "run.track=wandb",
}
IDLE |= {"task.incorrect=[c] task.name=math": "multiple_choice"}
IDLE |= {"task.incorrect=[c] task.choices=d task.name=multiple_choice task.path=a/b": "task.choices"}
IDLE |= {"rollout.turns.most=3": "task.tools=calculator", "warmup.then=merged": "warmup.steps=200"}
IDLE |= {"warmup.keep=2 warmup.steps=3": "warmup.from=samples", "algorithm.kl.where=reward": "algorithm.kl.coef=0.04"}
IDLE |= {"optim.max_grad_norm=2.0 optim.name=muon": "muon has none"}
IDLE |= {"algorithm.gradreg.eps=0.1": "algorithm.gradreg.strength=0.003", "reward.timeout=5.0": "reward.custom"}
OF_A_WARM_UP_WITH_VLLM = "rollout.engine=vllm_colocate rollout.vllm.memory=0.5 warmup.steps=3 warmup.only=true"
NOT_IDLE = [OF_A_WARM_UP_WITH_VLLM, "task.name=gsm8k-renumbered task.seed=3", "eval.samples=4"]
NOT_IDLE += ["task.name=records task.path=a/b task.holdout=0.2", "prompt.style=few_shot prompt.shots=2"]
NOT_IDLE += ["task.subset=main task.name=records task.path=a/b", "rollout.dead_groups=refill rollout.refills=5"]
NOT_IDLE += [f"task.name={ROOT}/examples/maze.py:build task.seed=3 task.subset=a task.path=b"]  # it may read them
NOT_IDLE += ["rollout.turns.most=3 task.tools=calculator", "warmup.then=merged warmup.steps=3"]
NOT_IDLE += [f"rollout.turns.most=3 task.name={ROOT}/examples/maze.py:build"]
NOT_IDLE += ["task.mix.nano=1 task.mix.multiple_choice=1 task.path=a/b task.choices=c"]
NOT_IDLE += ["task.mix.nano=1 task.mix.math=1 task.path=a/b task.holdout=0.2"]


@pytest.mark.parametrize(("settings", "switch"), IDLE.items())
def test_a_setting_of_what_is_switched_off_is_warned_of(settings, switch):
    (found,) = preflight.idle(resolve("nano", None, settings.split()))
    assert (found.severity, found.seen.replace(", ", ",")) == ("warn", f"without effect: {settings.split()[0]}")
    assert switch in found.remedy


@pytest.mark.parametrize("settings", NOT_IDLE)
def test_a_setting_of_what_is_switched_on_is_not_warned_of(settings):
    assert [*preflight.idle(resolve("nano", None, settings.split()))] == []


@pytest.mark.parametrize("preset", names_in(PRESETS))
@pytest.mark.parametrize("recipe", [None, *names_in(RECIPES)])
def test_no_preset_has_a_setting_without_effect(preset, recipe):
    assert [*preflight.idle(resolve(preset, recipe, ["model.quantize=none"]))] == []


OTHERS = ["prompt.style=auto", "prompt.answer=alone", "reward.answer=lenient", "warmup.steps=2", "task.name=nano"]
OF_GSM8K = [("", 1), *((one, 0) for one in (*OTHERS, "model.name=nano", "prompt.system=x", "lora.start=x"))]


@pytest.mark.parametrize(("other", "warnings"), OF_GSM8K)
def test_a_task_that_pays_a_form_nothing_asks_for_is_warned_of(other, warnings):
    config = resolve("8gb", None, ["prompt.style=chat", *filter(None, [other])])
    assert len([*preflight.answers(config)]) == warnings
    assert [*preflight.answers(config.changed({"task.name": "gone.py:task"}))] == []  # the data report it


@pytest.mark.parametrize(("other", "warnings"), [("", 1), *((one, 0) for one in OTHERS)])
def test_a_mixture_that_pays_a_form_of_answers_nothing_asks_for_is_warned_of(other, warnings):
    given = ["task.mix={nano: 1, addition: 1}", "prompt.style=chat", *filter(None, [other])]
    config = resolve("nano", None, given)
    found = preflight.findings(config, hub.find_model(config.model), NO_CARDS, hub.NOTHING)
    assert sum(one.severity == "warn" for one in found) == warnings


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """A machine that has downloaded nothing, and a port at which nobody ever answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        use_hub(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        yield


@pytest.mark.usefixtures("nobody")
def test_a_hub_that_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(hub, "DEADLINE_S", 0.2)
    with refuses("model.name", ModelError, names="reached"):
        downloads.check(resolve("8gb"))
    with refuses("task.name", DataError, names="cache"):
        downloads.check(resolve("nano", None, ["task.name=gsm8k"]))


def test_a_run_of_the_embedded_model_hears_nothing_and_nothing_is_asked_twice(capsys, monkeypatch, nobody):
    preflight.check(NANO, NO_CARDS)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(preflight.CHECKED, "1")  # as the launcher sets it
    preflight.check(resolve("8gb"), ONE_CARD)


def test_octet_doctor_finds_nothing_wrong_with_the_embedded_model(capsys):
    status, said, complained = said_by(capsys, "doctor", "--preset", "nano", "--json")
    assert status == 0, complained
    told = json.loads(said)
    assert (told["for"], told["end"]) == ("preset nano", 0)
    names = [finding["name"] for finding in told["findings"]]
    assert {"packages", "card", "model", "data", "disk", "RAM", "vLLM", "Slurm", "torch"} < set(names)
    assert names[-1] == "bitsandbytes"
    assert [finding["remedy"] for finding in told["findings"] if finding["severity"] == "note"] == [""] * told["note"]


def test_octet_doctor_says_what_to_do_about_each_problem(tmp_path, monkeypatch, capsys):
    """Nobody listens at port 9, and the process that tests torch finds one here that cannot be imported."""
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError('no kernel')")
    status, said, _ = said_by(capsys, "doctor", "--preset", "8gb", "optim.name=adamw_8bit")
    assert status == 1
    assert said.startswith("octet doctor: preset 8gb optim.name=adamw_8bit\n\n")
    assert max(map(len, said.replace(str(tmp_path), "here").splitlines())) <= 100
    problems = re.findall(r"^✗ (\w+) .*\n(?: .*\n)*?\s+> ", said, re.MULTILINE)
    assert problems == ["model", "data", "settings", "torch"]
    assert "ImportError: no kernel" in said
    assert said.splitlines()[-1].startswith("4 problems, ")


OF_A_LARGE_WARM_UP = ["warmup.steps=5", "warmup.problems=512", "optim.tokens_per_micro_batch=30000"]
OF_A_LARGE_WARM_UP += ["rollout.problems=1", "rollout.group_size=2", "rollout.rows=2"]
OF_PYTHON = ["task.name=records", "task.path=tests.jsonl", "task.answer=none", "reward.weights={code: 1}"]
OF_PYTHON += ["reward.code.command=python program", "task.holdout=0.5"]
OF_TWO_LINES = ["task.name=records", "task.path=train.jsonl", "task.test_path=test.jsonl"]


@pytest.mark.parametrize(("overrides", "name", "severity", "text", "remedy"), [
    (["model.name=Qwen/Qwen2.5-14B"], "plan", "end", "model.name=Qwen/Qwen2.5-14B: even one", "What fits: model.name="),
    (["rollout.rows=64", "rollout.max_new_tokens=1024"], "plan", "warn", "memory will be short", "If it runs out"),
    (OF_A_LARGE_WARM_UP, "warm-up", "warn", "memory will be short", "If it runs out"),
    (OF_A_LARGE_WARM_UP, "plan", "note", "it fits", ""),
    ([], "plan", "note", "it fits", ""),
    (OF_PYTHON, "data", "end", "tests.jsonl:5: `tests` holds tests in Python, and reward.code.command", ""),
    (OF_TWO_LINES, "data", "end", "task.name=records: 1 of 18 gold answers cannot be earned", "Written as"),
    ([f"run.dir={__file__}/run"], "settings", "end", f"run.dir={__file__}/run: {__file__} is a file", ""),
])  # fmt: skip
def test_octet_doctor_knows_what_a_run_would_be_told(
    one_card, tmp_path, monkeypatch, overrides, name, severity, text, remedy
):
    one_card(used=10, capability="8.6")
    monkeypatch.setattr(hardware, "free_ram", lambda: 64 * 10**9)
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "tests.jsonl", ({"prompt": f"{n}?", "tests": [f"assert f() == {n}"]} for n in range(9)))
    for name_of, answer in (("train", "a\nb"), ("test", "c")):
        rows = ({"question": f"{name_of} {n}?", "answer": answer if n == 7 else f"{n}"} for n in range(9))
        write_lines(tmp_path / f"{name_of}.jsonl", rows)
    found = doctor.settings(resolve("8gb", None, overrides), hardware.detect())
    (finding,) = [one for one in found if one.name == name]
    assert (finding.severity, finding.seen[: len(text)], finding.remedy[: len(remedy)]) == (severity, text, remedy)


def test_octet_doctor_says_what_programs_are_held_in_with(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python_without("LANDLOCK_CREATE_RULESET", tmp_path))
    confined = "programs that a model writes cannot be confined: .*without Landlock"
    assert re.match(confined, doctor.sandbox(None).seen)
    refused = doctor.sandbox(Code())  # as a run with the reward `code` would be
    assert (refused.severity, refused.seen.partition(":")[0]) == ("end", "reward.weights.code")


@pytest.mark.parametrize(("code", "most"), [(Code(processes=3), "[13]"), (Code(command="sh", processes=3), "3")])
def test_octet_doctor_says_how_many_programs_and_threads_there_may_be(monkeypatch, code, most):
    """A Python program has one thread where there are no user namespaces, and for root."""
    monkeypatch.setattr(programs, "cores_of_rank", lambda: 4)
    found = doctor.sandbox(code)
    assert found.severity == "end" or re.search(f"; 5 run at once, each with at most {most} threads?$", found.seen)


def test_octet_doctor_counts_the_cards_that_are_left_to_train_on(monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 64 * 10**9)
    cards = hardware.Hardware(tuple(hardware.Gpu(index, f"GPU-{index}", "A card", 24.0) for index in range(4)), 8)

    def found(*overrides: str) -> dict[str, Finding]:
        served = ["rollout.engine=vllm_server", "rollout.vllm.start=true"] if overrides else []
        return {one.name: one for one in doctor.settings(resolve("nano", None, [*served, *overrides]), cards)}

    fewer = found("rollout.vllm.devices=[2,3]")["RAM"].seen
    assert fewer == found()["RAM"].seen.replace("4.0 GB or more", "2.0 GB or more")
    assert found("rollout.vllm.devices=[0,1,2,3]")["settings"].severity == "end"


def test_other_versions_than_those_that_were_tried_and_missing_packages_are_named(tmp_path, monkeypatch):
    def installed(versions: dict[str, str]) -> None:
        found = {name: [SimpleNamespace(version=version)] for name, version in versions.items()}
        monkeypatch.setattr(doctor, "distributions", lambda name: found.get(name, []))

    file = tmp_path / "constraints.txt"
    file.write_text("# why\ntorch==2.13.0\nrich==1.0; python_version < '3'\nrich==15.0.0; python_version >= '3'\n")
    assert doctor.pinned(file) == {"torch": "2.13.0", "rich": "15.0.0"}
    tried = doctor.pinned(doctor.CONSTRAINTS)
    installed({name: f"{version}+cpu" for name, version in tried.items()})
    assert doctor.python_and_packages().severity == "note"
    installed(tried | {"pydantic": "1.0"})
    assert f"pydantic 1.0 (tried: {tried['pydantic']})" in doctor.python_and_packages().seen
    installed({name: "1.0" for name in tried if name not in ("peft", "pydantic")})
    monkeypatch.chdir(tmp_path)
    found = doctor.python_and_packages()
    assert (found.severity, found.seen) == ("end", "not installed: peft, pydantic")
    named = shlex.split(found.remedy)
    assert Path(named[named.index("-c") + 1]).samefile(ROOT / "constraints.txt")
    assert Path(named[-1]).samefile(ROOT)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_layers_that_are_quantised_on_a_card_need_no_ram(quantize):
    """A machine of 8 GB, such as half of 16 under WSL, starts what `octet plan` proposes for a card of 8 GB."""
    config = resolve("8gb", None, ["model.name=Qwen/Qwen3-8B", f"model.quantize={quantize}"])
    there = hub.Found(None, {"model.safetensors": 16_400_000_000})
    assert preflight.needs(config, there, ONE_CARD).ram < 2 * 10**9
    assert preflight.needs(config, there, NO_CARDS).ram > 4 * 10**9


def test_the_precision_of_a_model_that_reads_images_may_stand_in_its_text_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    there = hub.Found(tmp_path, {"model.safetensors": 8 * 10**9})
    write(tmp_path, {"config.json": '{"dtype": "bfloat16"}'})
    wanted = preflight.needs(resolve("8gb"), there, ONE_CARD)
    write(tmp_path, {"config.json": '{"text_config": {"dtype": "bfloat16"}}'})
    assert preflight.needs(resolve("8gb"), there, ONE_CARD) == wanted


def test_each_machine_holds_the_optimizer_state_of_its_ranks(monkeypatch):
    config, there = resolve("8gb", None, ["lora.enabled=false"]), hub.Found(None, {"model.safetensors": 2 * 10**9})
    alone = preflight.needs(config, there, ONE_CARD).ram
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert alone - preflight.needs(config, there, ONE_CARD).ram == 3 / 4 * 12 * 10**9


def test_a_torch_that_hangs_in_the_driver_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "PATIENCE_S", 0.1)
    with subprocess.Popen(["sleep", "600"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as probe:
        (finding,) = doctor.of_torch(NANO, probe, NO_CARDS)
    assert (finding.name, finding.severity) == ("torch", "end")
