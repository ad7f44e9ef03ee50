"""What is found on a machine, with an nvidia-smi that answers what a real one would."""

import os

import pytest

from trainer.commands import launch
from trainer.config.command_line import parse_command_line, resolve
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware

TWO_CARDS = "0, GPU-aa11, NVIDIA GeForce RTX 3070, 8192\n1, GPU-bb22, NVIDIA GeForce RTX 3090, 24576"


def card(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}", "a card", 8.6)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name on the PATH, which prints what it is given."""

    def install(output: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_cards_are_read_with_their_memory(nvidia_smi):
    nvidia_smi(TWO_CARDS)
    machine = hardware.detect()
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA GeForce RTX 3070", "NVIDIA GeForce RTX 3090"]
    assert machine.memory_gb == pytest.approx(8.59, abs=0.01)  # 8192 MiB, the smaller one


def test_a_driver_that_does_not_answer_is_no_gpu(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed", status=9)
    assert hardware.detect().gpus == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA GeForce RTX 3090"]),
        ("", []),
        ("-1", []),
        ("1,0", ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3070"]),
        ("7", []),
        ("0,7,1", ["NVIDIA GeForce RTX 3070"]),
        ("GPU-bb", ["NVIDIA GeForce RTX 3090"]),
    ],
)
def test_only_visible_cards_count(nvidia_smi, monkeypatch, visible, names):
    nvidia_smi(TWO_CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in hardware.detect().gpus] == names


def test_the_launcher_starts_one_process_for_each_card(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = Hardware(gpus=(card(0), card(1)), cores=4)
    assert "--num_gpus=2" in launch.command("deepspeed", two, [])
    assert "--num_gpus=1" in launch.command("deepspeed", Hardware(gpus=(), cores=4), [])


def test_the_cards_that_a_user_has_chosen_are_kept(monkeypatch):
    """deepspeed ignores CUDA_VISIBLE_DEVICES beside --num_gpus, and would take the first card."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    command = launch.command("deepspeed", Hardware(gpus=(card(1),), cores=4), ["run.steps=3"])
    assert "--include=localhost:1" in command
    assert not [part for part in command if part.startswith("--num_gpus")]
    assert command[-1] == "run.steps=3"


def test_what_the_launcher_has_chosen_is_what_train_py_reads(tmp_path, monkeypatch):
    """For each kind of start: the arguments that go on give the same request, without choosing again."""
    (tmp_path / "runs/old").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/old/config.yaml").write_text(resolve("nano", None, ["run.steps=7"]).to_yaml())
    starts = (
        [],
        ["run.seed=3"],
        ["--preset", "8gb", "algorithm.lr=2e-5"],
        ["--resume", "run.steps=9"],
        ["--resume", "runs/old"],
    )
    for start in (list(start) for start in starts):
        chosen = parse_command_line(start)
        again = parse_command_line(launch.with_choices(chosen, start))
        assert (again.config, again.resumes) == (chosen.config, chosen.resumes)
    assert parse_command_line(["--resume", "run.steps=9"]).config.run.steps == 9


@pytest.mark.parametrize("own", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_may_grow_unless_the_user_has_a_setting(monkeypatch, own):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    hardware.let_memory_grow()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(own, "max_split_size_mb:64")
    hardware.let_memory_grow()
    assert [os.environ[name] for name in names if name in os.environ] == ["max_split_size_mb:64"]


def test_a_card_that_torch_cannot_use_is_not_passed_over(nvidia_smi, monkeypatch):
    from trainer.ranks import distributed

    nvidia_smi(TWO_CARDS)
    distributed.refuse_an_idle_card()  # the tests say that they mean the CPU
    monkeypatch.delenv("DS_ACCELERATOR")
    with pytest.raises(ConfigError, match=r"NVIDIA GeForce RTX 3070: torch .* cannot use this card"):
        distributed.refuse_an_idle_card()
