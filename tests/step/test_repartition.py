"""A run that a number of ranks has saved goes on with another number."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import learned
from tests.run_on_ranks import on_ranks

pytestmark = pytest.mark.slow

# With LoRA+ there are two groups of parameters. In bf16 the master weights are more than the weights.
SETTINGS = ["run.merge=false", "eval.problems=0", "lora.r=3", "lora.plus_ratio=4", "optim.schedule=constant"]
SETTINGS += ["rollout.problems=6", "rollout.group_size=4", "optim.warmup=0", "rollout.max_new_tokens=24"]
PROGRAM = """
import json, sys
from pathlib import Path
from trainer import loop
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.machine import quiet
from trainer.run import assemble

loads, saves, *settings = sys.argv[1:]
quiet.quiet()
config = resolve("nano", None, settings)
with assemble.process_group(config):
    run = assemble.build(Request(config, "nano", ""))
    if loads:
        run.updater.policy.load(Path(loads))
        run.updater.policy.save(Path(saves))
    else:
        loop.train(config, *run)
"""


def train(count: int, folder: Path, *settings: str) -> None:
    on_ranks(count, PROGRAM, "", "", *SETTINGS, f"run.dir={folder}", *settings)


def parts(folder: Path) -> dict[str, torch.Tensor]:
    """Return the master weights and moments of a checkpoint that one rank has written, without padding."""
    (path,) = (folder / "engine").glob("*optim_states.pt")
    saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
    masters = saved["single_partition_of_fp32_groups"]
    moments = saved["base_optimizer_state"]["state"]
    found = {f"masters {group}": values for group, values in enumerate(masters)}
    for group, state in moments.items():
        found |= {f"{key} {group}": state[key][: len(masters[group])] for key in ("exp_avg", "exp_avg_sq")}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(1, folder, "run.steps=2", "model.dtype=bf16")
    return folder / "checkpoints/step_000002"


@pytest.mark.parametrize(
    "ways",
    [[(2, "bf16"), (3, "bf16"), (1, "bf16")], [(1, "fp32"), (1, "bf16")]],
    ids=["to two ranks, then three, and back", "in another precision, and back"],
)
def test_a_checkpoint_that_is_read_and_saved_again_loses_nothing(trained, tmp_path, ways):
    """Another precision is what `model.dtype=auto` is on another machine. DeepSpeed names the files of bf16
    differently."""
    before = trained
    for count, dtype in ways:
        after = tmp_path / f"{count}-{dtype}"
        after.mkdir()
        settings = (f"model.dtype={dtype}", f"run.dir={tmp_path}/run-{after.name}")
        on_ranks(count, PROGRAM, str(before), str(after), *SETTINGS, *settings)
        assert len(list(after.glob("engine/*optim_states.pt"))) == count
        before = after
    wanted, found = parts(trained), parts(before)
    assert all(values.any() for values in wanted.values())
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    adapter = "adapter/adapter_model.safetensors"
    torch.testing.assert_close(load_file(before / adapter), load_file(trained / adapter), atol=0, rtol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])  # muon keeps nothing
def test_a_run_that_goes_on_with_other_ranks_learns_the_same(tmp_path, optimizer):
    settings = ("algorithm.lr=1e-4", f"optim.name={optimizer}")
    train(1, tmp_path / "undisturbed", "run.steps=4", *settings)
    for steps, count in ((2, 2), (3, 1), (4, 3)):
        train(count, tmp_path / "other", f"run.steps={steps}", *settings)
    undisturbed, other = (learned(tmp_path / name) for name in ("undisturbed", "other"))
    for one, found in zip(undisturbed, other, strict=True):
        same = [name for name in one if not name.startswith("sampler_difference")]
        assert [found[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-4, abs=1e-5)
    adapter = "checkpoints/latest/adapter/adapter_model.safetensors"
    one, other = (load_file(tmp_path / name / adapter) for name in ("undisturbed", "other"))
    torch.testing.assert_close(other, one, atol=2e-5, rtol=0)  # Adam makes the rounding of small gradients larger
