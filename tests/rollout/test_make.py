"""vLLM in the process of the policy needs its share of the card."""

import pytest

from trainer.commands import main as cli
from trainer.config.command_line import resolve
from trainer.model.shapes import shape_of
from trainer.plan import memory_check
from trainer.plan.planner import GB
from trainer.plan.search import Placement

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


def test_a_share_that_does_not_hold_the_base_is_refused_with_what_it_needs(capsys):
    colocated = "rollout.engine=vllm_colocate"
    config = resolve("8gb", None, [colocated, "rollout.vllm.memory=0.2"])
    assert memory_check.too_little_for_vllm(Placement(shape_of(MODEL), config, 1, 24 * GB)) is None
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--model", MODEL, "--vram", "24", colocated, "rollout.vllm.memory=0.1"])
    assert "rollout.vllm.memory=0.1: that is 2.4 GB of the card, and vLLM needs 3.2 GB" in capsys.readouterr().err
