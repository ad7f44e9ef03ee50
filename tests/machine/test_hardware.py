"""What is found on a machine, with an nvidia-smi that answers what a real one would."""

import base64
import json
import os
import platform
import shutil
import subprocess
import sys

import psutil
import pytest

from tests.commands.conftest import config_of, write
from tests.conftest import ROOT, program, ran, refuses
from trainer.commands import train
from trainer.config.request import parse_command_line
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware
from trainer.plan import preflight
from trainer.ranks import launch

TWO_CARDS = "0, GPU-aa11, NVIDIA GeForce RTX 3070, 8192\n1, GPU-bb22, NVIDIA GeForce RTX 3090, 24576"


CARDS = tuple(Gpu(index, f"GPU-{index}", "a card", 8.6) for index in range(3))


def test_a_driver_that_does_not_answer_is_no_gpu(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed", status=9)
    assert hardware.detect().gpus == ()


def test_a_driver_that_hangs_is_named(tmp_path, monkeypatch):
    program(tmp_path / "nvidia-smi", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(hardware, "PATIENCE_S", 0.1)
    with refuses(f"{tmp_path}/nvidia-smi -L", names="0.1 seconds"):
        hardware.nvidia_smi("-L")


VISIBLE = {"1": ["3090"], "": [], "-1": [], "1,0": ["3090", "3070"], "0,7,1": ["3070"], "GPU-bb": ["3090"]}


@pytest.mark.parametrize(("visible", "names"), VISIBLE.items())
def test_only_visible_cards_count(nvidia_smi, monkeypatch, visible, names):
    nvidia_smi(f"WARNING: infoROM is corrupted at gpu 0000:01:00.0, see the log\n{TWO_CARDS}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in hardware.detect().gpus] == [f"NVIDIA GeForce RTX {name}" for name in names]


@pytest.mark.parametrize("visible", ["7", "GPU-cc", "MIG-cba663e8", "7,0"])
def test_a_card_that_is_not_there_is_an_error_and_not_no_gpu(nvidia_smi, monkeypatch, visible):
    nvidia_smi(TWO_CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with refuses("CUDA_VISIBLE_DEVICES", names="0 (GPU-aa"):
        hardware.detect()


IN_PARTS = "0, GPU-aa11, NVIDIA A100-SXM4-40GB, 40960, [N/A], [N/A], 8.0, 550.54, Enabled"
ALONE = "1, GPU-bb22, NVIDIA A100-SXM4-40GB, 40960, 10, 40950, 8.0, 550.54, Disabled"
PARTS = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa11)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb22)"""


SMALL_PART = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5.0, "MIG-cba663e8")
LARGE_PART = ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20.0, "MIG-c6d4f1ef")
CHOSEN = {"MIG-cba663e8": SMALL_PART, "0": LARGE_PART, "1,MIG-cba663e8,MIG-c6d4f1ef": SMALL_PART, None: LARGE_PART}
CHOSEN |= {"1": ("NVIDIA A100-SXM4-40GB", pytest.approx(42.9, abs=0.1), "GPU-bb22")}


@pytest.mark.parametrize(("visible", "found"), CHOSEN.items())
def test_a_part_of_a_card_is_a_card_and_cuda_uses_one_which_is_named_to_the_rank(
    nvidia_smi, monkeypatch, visible, found
):
    nvidia_smi(f"{IN_PARTS}\n{ALONE}", listed=PARTS)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = hardware.detect()
    assert [(gpu.name, gpu.memory_gb, gpu.uuid) for gpu in machine.gpus] == [found]
    assert launch.alone(machine)["CUDA_VISIBLE_DEVICES"] == ("1" if visible == "1" else found[2])


def test_a_card_without_memory_of_its_own_has_that_of_the_machine(nvidia_smi):
    nvidia_smi("0, GPU-aa11, NVIDIA GB10, [N/A], [N/A], [N/A], 12.1, 580.95, [N/A]")
    machine = hardware.detect()
    assert machine.memory_gb == pytest.approx(psutil.virtual_memory().total / 1e9)
    assert str(machine) == f"1 x NVIDIA GB10, {machine.memory_gb * 1e9 / 2**30:.0f} GB of RAM, shared with the CPU"
    (finding,) = preflight.card("auto", machine.gpus[0])
    assert "shared with the CPU" in str(finding)


def test_nvidia_smi_is_asked_once_and_the_ranks_take_its_answers_from_the_launcher(nvidia_smi, tmp_path):
    """A detection in another process asks again, unless it has been given the answers."""
    nvidia_smi(ALONE)
    for _ in range(3):
        assert list(preflight.card("auto", hardware.detect().gpus[0]))
    code = "from trainer.machine import hardware; print(len(hardware.detect().gpus))"
    handed = os.environ | {hardware.ANSWERS: json.dumps(hardware.answers)}
    for environment, calls in ((handed, 1), (os.environ, 2)):
        assert ran(sys.executable, "-c", code, env=environment).stdout == "1\n"
        assert len((tmp_path / "calls").read_text().splitlines()) == calls


def test_the_launcher_starts_one_process_for_each_visible_card():
    command = launch.command(Hardware(CARDS[1:], cores=4), ["run.steps=3"])
    (world,) = (part.partition("=")[2] for part in command if part.startswith("--world_info"))
    assert json.loads(base64.urlsafe_b64decode(world)) == {"localhost": [1, 2]}
    assert command[-1] == "run.steps=3"
    assert command[0] == sys.executable  # the program `deepspeed` names a Python that a moved checkout no longer has


def test_one_card_or_none_needs_no_launcher():
    found = launch.alone(Hardware(CARDS[1:2], cores=4))
    assert (found["CUDA_VISIBLE_DEVICES"], found["RANK"], found["WORLD_SIZE"]) == ("1", "0", "1")
    assert launch.alone(Hardware(gpus=(), cores=4))["DS_ACCELERATOR"] == "cpu"


def test_what_the_launcher_has_chosen_is_what_train_py_reads(tmp_path, monkeypatch):
    """The arguments that are passed on give the same request, without choosing again."""
    monkeypatch.chdir(write(tmp_path, {"runs/old/config.yaml": config_of("run.steps=7")}))
    starts = ([], ["run.seed=3"], ["--preset", "8gb", "algorithm.lr=2e-5"])
    starts += (["--resume", "run.steps=9"], ["--resume", "runs/old"])
    for start in starts:
        chosen = parse_command_line(start)
        again = parse_command_line(train.with_choices(chosen, start))
        assert (again.config, again.resumes) == (chosen.config, chosen.resumes)
    assert parse_command_line(["--resume", "run.steps=9"]).config.run.steps == 9


FIXED = ("CUDA_DEVICE_ORDER", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "TORCH_CUDNN_SDPA_DEPRIORITIZED")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LINUX, MAY_GROW, OWN = "6.8.0-generic", "expandable_segments:True", "max_split_size_mb:64"
GROWTH = [("auto", LINUX, "", [MAY_GROW]), *(("auto", LINUX, name, [OWN]) for name in ALLOCATOR)]
GROWTH += [("auto", "5.15.167.4-microsoft-standard-WSL2", "", []), ("vllm_colocate", LINUX, "", [])]


@pytest.mark.parametrize(("engine", "release", "own", "settings"), GROWTH)
def test_memory_may_grow_but_not_under_wsl_nor_beside_vllm(monkeypatch, engine, release, own, settings):
    for name in (*ALLOCATOR, *FIXED):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    if own:
        monkeypatch.setenv(own, OWN)
    monkeypatch.setattr("platform.release", lambda: release)
    hardware.prepare_cuda(engine)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC"] == "0"
    assert [os.environ[name] for name in ALLOCATOR if name in os.environ] == settings


def test_a_card_is_found_without_nvidia_smi(monkeypatch, tmp_path):
    """A driver that has one card, in a container without tools."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler that makes a library to ask")
    library = ["-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", ROOT / "tests/data/driver.c"]
    subprocess.run([compiler, *library], check=True)
    monkeypatch.setattr(hardware, "answers", {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert hardware.detect().gpus == ()
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "CARD_FILES", [str(tmp_path / "nvidia0")])
    machine = hardware.detect()
    assert [(gpu.index, gpu.uuid) for gpu in machine.gpus] == [(0, "GPU-abababab-abab-abab-abab-abababababab")]
    assert str(machine) == "1 x NVIDIA GeForce RTX 4060, 8 GB"


def test_a_card_that_torch_cannot_use_is_not_passed_over(nvidia_smi, monkeypatch):
    from trainer.ranks import distributed

    nvidia_smi(TWO_CARDS)
    distributed.refuse_an_idle_card()  # the tests say that they mean the CPU
    monkeypatch.delenv("DS_ACCELERATOR")
    with refuses("NVIDIA GeForce RTX 3070"):
        distributed.refuse_an_idle_card()


@pytest.mark.parametrize("facts", [None, "processor\t: 0\nBogoMIPS\t: 50.00\n", "model name\t: AMD EPYC\n"])
def test_a_processor_without_a_name_is_named_after_its_kind(tmp_path, monkeypatch, facts):
    if facts:
        (tmp_path / "cpuinfo").write_text(facts)
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "cpuinfo")
    assert hardware.processor() == ("AMD EPYC" if "model name" in (facts or "") else platform.machine())
