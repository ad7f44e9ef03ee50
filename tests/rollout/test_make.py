"""rollout.engine=auto with vLLM installed: whether it comes into the process of the policy is the plan's to say."""

import re
from math import inf

import pytest

from trainer.commands import main as cli
from trainer.config.command_line import resolve
from trainer.model.shapes import shape_of
from trainer.plan import memory_check, search
from trainer.plan.planner import ASLEEP, GB
from trainer.plan.search import Placement
from trainer.rollout import make
from trainer.rollout.vllm import check

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture(params=[True])
def installed(request, monkeypatch):
    monkeypatch.setattr(search, "find_spec", lambda name: name if request.param else None)


def placed(vram: int, *overrides: str, ram: float = inf) -> Placement:
    return Placement(shape_of(MODEL), resolve("8gb", None, overrides), 1, vram * GB, ram)


def test_auto_takes_vllm_where_the_plan_has_room_for_both(installed):
    chosen = placed(24).with_chosen_engine()
    assert chosen.config.rollout.engine == "vllm_colocate"
    assert chosen.plan.fits
    assert chosen.plan.phases["rollout"]["vLLM"] > 2 * chosen.shape.parameters
    assert chosen.plan.phases["backward"]["sleeping vLLM"] == ASLEEP


LEFT = [  # GB, settings, and why, if that is to be said
    (8, [], r"with it \d+\.\d GB are planned \(rollout\), of 8\.0 GB"),
    (24, ["model.quantize=nf4"], "the base is quantised"),
    (24, ["lora.dora=true"], "plain LoRA adapters only"),
    (80, ["lora.enabled=false", "algorithm.lr=1e-6"], "plain LoRA adapters only"),
    (80, ["model.quantize=none", "lora.targets=[q_proj,lm_head]"], "^it serves no adapter of lm_head$"),
    (24, ["rollout.engine=decode"], ""),  # what was said is not changed
    (24, ["rollout.vllm.urls=http://here:8000"], ""),
]


@pytest.mark.parametrize(("vram", "overrides", "reason"), LEFT)
def test_auto_leaves_it_where_it_does_not_fit(installed, vram, overrides, reason):
    placement = placed(vram, *overrides)
    assert placement.with_chosen_engine() is placement
    assert re.search(reason, placement.why_no_vllm or "")


def test_sleeping_weights_need_ram(installed):
    assert "of RAM are planned, of 2.0 GB free" in placed(24, ram=2 * GB).why_no_vllm


def test_other_programs_on_the_card_and_in_ram_count_when_the_run_begins():
    planned = placed(24).with_vllm.plan
    assert make.why_no_room(planned, 24 * GB, 16 * GB) is None
    assert "others leave 6.0 GB of the card" in (make.why_no_room(planned, 6 * GB, 16 * GB) or "")
    assert "takes 3.1 GB of RAM, and 1.0 GB are free" in (make.why_no_room(planned, 24 * GB, GB) or "")


@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.32.0", None), ("0.32.0+cu130", None), ("0.11.0", "has not been tried"), (None, "not installed as vllm")],
)
def test_auto_takes_versions_that_were_tried_in_the_process(monkeypatch, version, reason):
    monkeypatch.setattr(check, "installed", lambda: version)
    found = check.why_not_automatic()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("installed", [False], indirect=True)
def test_without_vllm_auto_is_octet_itself(installed):
    placement = placed(24)
    assert placement.with_chosen_engine() is placement


def test_a_plan_counts_the_vllm_that_auto_will_take(installed, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["plan", "--preset", "8gb", "--vram", "24"])
    shown = capsys.readouterr().out
    assert "16 sampled by vLLM in this process" in shown
    assert "sleeping vLLM" in shown


def test_a_share_that_does_not_hold_the_base_is_refused_with_what_it_needs(capsys):
    colocated = "rollout.engine=vllm_colocate"
    assert memory_check.too_little_for_vllm(placed(24, colocated, "rollout.vllm.memory=0.2")) is None
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--model", MODEL, "--vram", "24", colocated, "rollout.vllm.memory=0.1"])
    assert "rollout.vllm.memory=0.1: that is 2.4 GB of the card, and vLLM needs 3.2 GB" in capsys.readouterr().err
