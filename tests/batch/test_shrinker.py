"""What happens when memory runs out, and before it can: halves, room, the rehearsal, the creep."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import refuses, row
from tests.e2e.updates import limit
from trainer.batch.pack import Packer, halves, to_tensors
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.errors import TrainingError
from trainer.loss.logprobs import LogProbs
from trainer.machine.out_of_memory import explained, is_out_of_memory, until_it_fits
from trainer.run import assemble
from trainer.run.rehearsal import planned, rehearse, report
from trainer.run_folder import lock
from trainer.step.update import Updater
from trainer.watch.phases import Peak, forget_peak, peak

# DeepSpeed imports parts of torch that warn about themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROWS = [row(3 + i // 2, 2 + 3 * (i % 4), advantage=float(i), first=20 + 5 * (i // 2)) for i in range(7)]
ROWS[1] = replace(ROWS[1], written=[True, False, False, True, True])  # an environment has said the others
GB = 10**9
OTHERS = [torch.AcceleratorError("CUDA error: device-side assert triggered")]
OTHERS += [RuntimeError("CUDA error: an illegal memory access was encountered")]


def test_whoever_runs_out_of_memory_is_understood():
    with pytest.raises(RuntimeError) as of_a_cpu:
        torch.empty(1 << 50, dtype=torch.uint8)
    for error in (
        of_a_cpu.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ):
        assert is_out_of_memory(error), error
    assert not any(map(is_out_of_memory, OTHERS))


def test_another_error_is_not_tried_again():
    with pytest.raises(RuntimeError, match="size of tensor"):
        until_it_fits(lambda: torch.ones(2) + torch.ones(3), lambda: pytest.fail("there is no lack of room"))


@pytest.mark.parametrize("flat", [True, False])
def test_halves_have_the_rows_and_all_that_was_measured_of_them(tiny_model, flat):
    batch = to_tensors(ROWS, 0)
    score = LogProbs(AutoModelForCausalLM.from_pretrained(tiny_model), temperature=0.7, flat=flat)
    logprobs_BT = score(batch).logprobs_BT.detach()
    parts = halves(replace(batch, token_advantages_BT=2 * logprobs_BT).measured(logprobs_BT))
    assert [len(part.weights_B) for part in parts] == [3, 4]
    assert [one for part in parts for one in part.advantages_B.tolist()] == [one.advantage for one in ROWS]
    assert [one for part in parts for one in part.rows] == ROWS
    for part in parts:
        assert part.inputs_BT.shape[1] == max(one.length for one in part.rows) - 1
        assert part.mask_BT.sum() == sum(sum(one.mask) for one in part.rows)
        assert part.tree.edge_E.numel() <= part.mask_BT.sum()
        torch.testing.assert_close(score(part).logprobs_BT, part.old_logprobs_BT, atol=1e-5, rtol=0)
        assert part.advantages_BT.equal(2 * part.old_logprobs_BT)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("budget", [20, 45, 1000])
def test_what_a_batch_costs_is_what_the_packer_reckoned(flat, budget):
    packer = Packer(budget, 0, flat)
    for batch in packer.pack(ROWS):
        cost, rows = packer.cost_of(batch.rows), batch.rows
        assert cost <= budget
        assert len(Packer(cost, 0, flat).arrange(rows)) == 1
        assert len(rows) == 1 or len(Packer(cost - 1, 0, flat).arrange(rows)) > 1


class Kept:
    """A sampler that has something to give back, once."""

    def __init__(self):
        self.things = 1

    def give_back(self):
        had, self.things = bool(self.things), 0
        return had


def test_what_sampling_keeps_is_given_back_before_a_batch_is_halved():
    packer, said, forgotten = Packer(1000, 0), [], []
    policy = SimpleNamespace(start_over=lambda: forgotten.append(1))
    updater = Updater(policy, None, "cpu", packer, None, said.append, (Kept().give_back, Kept().give_back))
    batches = packer.pack(ROWS)
    cost = packer.cost_of(batches[0].rows)
    assert updater.shrink(batches) == batches
    assert packer.token_budget == 1000
    batches = updater.shrink(batches)
    assert len(batches) == 2
    assert packer.token_budget == cost // 2
    assert f"Write optim.tokens_per_micro_batch={cost // 2}" in said[1]
    while any(len(batch.weights_B) > 1 for batch in batches):
        batches = updater.shrink(batches)
    with refuses("optim.tokens_per_micro_batch", TrainingError, names="rollout.max_new_tokens"):
        updater.shrink(batches)
    assert len(forgotten) == len(said) + 1


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory, alone):
    """A run of a tiny model, before its first step."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    overrides = [f"model.name={tiny_model}", f"run.dir={folder}", "rollout.problems=2", "run.merge=false"]
    overrides += ["rollout.group_size=4", "rollout.max_new_tokens=12", "optim.warmup=0", "eval.problems=0"]
    config = resolve("nano", None, [*overrides, "rollout.temperature=0.5", "algorithm.entropy_bonus=0.1"])
    made = assemble.build(Request(config, "nano", ""))
    yield made
    made.log.close()
    lock._held.popitem()[1].close()


def test_the_rehearsal_is_of_the_worst_step_and_changes_nothing(run):
    passes = []
    run.updater.policy.engine.module.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0]))
    before, moments = run.updater.policy.fingerprint(), len(run.updater.policy.engine.optimizer.state)
    state = torch.random.get_rng_state()
    found = rehearse(run.rollouts, run.updater)
    (batch,) = passes
    assert batch.mask_BT.sum(dim=1).tolist() == [run.rollouts.config.rollout.max_new_tokens] * 8
    assert batch.rows[0].prompt == run.rollouts.longest.tokens
    own_tokens = len(batch.tree.line_N) - len(batch.rows[0].prompt)
    assert own_tokens > 0.95 * batch.mask_BT[:, :-1].sum(), "the answers have little in common"
    assert set(found) == {"rollout", "score", "step"}
    assert all(one.allocated > 0 for one in found.values())
    assert run.updater.policy.fingerprint() == before
    assert len(run.updater.policy.engine.optimizer.state) == moments
    assert all(value.grad is None for value in run.updater.policy.trainable)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_step_that_will_not_fit_shows_before_the_first(run, capsys):
    longest = len(run.rollouts.longest.tokens) + run.rollouts.config.rollout.max_new_tokens
    limit(run.updater.policy.model, longest + 20, "backward")
    rehearse(run.rollouts, run.updater)
    said = capsys.readouterr().out
    assert "out of memory in training: sampling now frees" in said
    assert "optim.tokens_per_micro_batch=16384: out of memory with" in said
    assert run.updater.packer.token_budget < 3 * longest


def test_what_was_measured_stands_beside_the_plan():
    peaks = {name: Peak(GB // 2, 6 * GB // 10) for name in ("rollout", "score", "step")}
    text = report(planned(resolve("8gb"), 300, 8 * GB, outside=False), peaks, 8 * GB)
    for number in (r"rollout 0\.50 \(5\.\d\d\)", r"backward 0\.50 \(4\.\d\d\)", r"0\.60 reserved of 8\.0"):
        assert re.search(number, text)
    assert set(planned(resolve("8gb"), 300, 8 * GB, outside=True)) == {"step"}
    with_kl = planned(resolve("8gb", None, ["algorithm.kl.coef=0.1"]), 300, 8 * GB, outside=False)
    assert set(with_kl) == {"rollout", "score", "step"}


def test_peaks_are_of_their_time():
    forget_peak()
    before = peak().allocated
    assert torch.ones(GB // 8).sum() > 0  # half a GB for a moment
    assert peak().allocated - before > 0.4 * GB
    forget_peak()
    assert peak().allocated - before < 0.2 * GB


def test_out_of_memory_elsewhere_is_a_message():
    with pytest.raises(TrainingError, match=r"3 GiB.*octet plan"), explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nand much more")
