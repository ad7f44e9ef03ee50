"""Weights that ZeRO-3 splits: whole while they are gathered, exported, merged, resumed, and trained by two ranks."""

from functools import partial

import pytest
import torch

from tests.conftest import ROOT, WITH_ENGINE, refuses
from tests.e2e import short_job
from tests.e2e.updates import ROWS, in_one
from tests.model.test_variants import advance, assert_close, logits, make_policy, one_update, read
from tests.plan.test_levers import FULL
from tests.rollout.test_decoder import SOME, assert_greedy_is_generate, prompts, sample
from trainer.batch.pack import to_tensors
from trainer.config.settings import Lora
from trainer.errors import TrainingError
from trainer.loss.logprobs import LogProbs
from trainer.model import lora, merge
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.step.update import backward
from trainer.watch.tally import Tally

pytestmark = WITH_ENGINE
KINDS_OF_SPLIT = pytest.mark.parametrize("trained", ["", " ".join(FULL)], ids=["adapter", "whole"])


@pytest.fixture
def split_policy(tiny_model, split):
    def make(*more: str):
        policy = make_policy(tiny_model, f"engine.ds_config={split} {' '.join(more)}")
        assert not any(value.numel() for value in policy.model.parameters())
        return policy

    return make


def gathered_logits(policy) -> torch.Tensor:
    with policy.gathered():
        return logits(policy.model)


@KINDS_OF_SPLIT
def test_split_weights_are_all_there_while_gathered_and_nowhere_else(split_policy, tokenizer, trained):
    policy, asked = split_policy(trained), prompts(9, 3, 14)
    for _ in range(2):
        with policy.gathered(), policy.gathered():
            greedy = sample(DecodeSampler, policy.model, tokenizer, asked, stops=SOME, temperature=0.0)
            assert_greedy_is_generate(greedy, policy.model, asked, SOME)
            whole = LogProbs(policy.model, 0.7)(to_tensors(ROWS, 0)).logprobs_BT.detach()
            assert_close(policy.measure(to_tensors(ROWS, 0)).logprobs_BT, whole, 1e-5)
        assert not any(value.numel() for value in policy.model.parameters())
        before = policy.fingerprint()
        advance(policy, 0)
        assert policy.fingerprint() != before
        assert not any(value.numel() for value in policy.model.parameters())


@KINDS_OF_SPLIT
def test_the_base_and_the_reference_of_split_weights(tiny_model, split_policy, trained):
    policy = split_policy(trained, "algorithm.kl.coef=0.1")
    original, batch = logits(read(tiny_model)), to_tensors(ROWS, 0)
    at_first = policy.measure(batch).logprobs_BT
    moved = gathered_logits(advance(policy, 0))
    assert (moved - original).abs().max() > 0.01
    for base_of in (policy.as_base, policy.as_reference):
        with base_of():
            assert_close(logits(policy.model), original)
            assert_close(policy.measure(batch).logprobs_BT, at_first, 1e-5)
    assert torch.equal(gathered_logits(policy), moved)
    assert (policy.measure(batch).logprobs_BT - at_first).abs().max() > 0.01


def test_the_teacher_over_split_weights_is_the_one_loaded_apart(tiny_model, split_policy, tmp_path):
    apart = lora.add_adapter(read(tiny_model), Lora(r=2, targets="all"))
    for value in lora.trainable(apart).values():
        value.normal_(generator=torch.Generator().manual_seed(1))
    lora.save_adapter(apart, tmp_path)
    policy, batch = split_policy(f"teacher.adapter={tmp_path}"), to_tensors(ROWS, 0)
    trained = {name for name, value in policy.model.named_parameters() if value.requires_grad}
    for _ in range(2):
        with policy.as_teacher():
            assert_close(policy.measure(batch).logprobs_BT, LogProbs(apart, 0.7)(batch).logprobs_BT.detach(), 1e-5)
        assert trained == {name for name, value in policy.model.named_parameters() if value.requires_grad}
        assert all(".default." in name for name in trained)
        assert not any(value.numel() for value in policy.model.parameters())
        advance(policy, 0)


def test_a_split_model_is_exported_and_resumed(split_policy, tmp_path):
    resumed = resumed_exactly(split_policy, tmp_path / "checkpoint", *FULL)
    with resumed.gathered():
        resumed.write_model(tmp_path / "model")
    assert_close(logits(read(tmp_path / "model")), gathered_logits(resumed), 1e-6)
    resumed.release()


@pytest.mark.parametrize("kind", [(), ("lora.init=pissa",), ("optim.name=muon",)], ids=["lora", "pissa", "muon"])
def test_an_adapter_over_a_split_base_is_exported_merged_and_resumed(tiny_model, split_policy, tmp_path, kind):
    checkpoint = tmp_path / "checkpoint"
    resumed = resumed_exactly(split_policy, checkpoint, *kind)
    with resumed.gathered():
        resumed.write_model(tmp_path / "adapter")
    for name, step in (("adapter", (2,)), ("checkpoint/adapter", ())):
        policy = advance(resumed_from(split_policy, checkpoint, *kind), *step)
        assert_close(logits(lora.load_adapter(read(tiny_model), tmp_path / name)), gathered_logits(policy), 1e-5)
    merge.write_merged(resumed.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    assert_close(logits(read(tmp_path / "merged")), gathered_logits(resumed), 1e-5)


def resumed_exactly(split_policy, checkpoint, *settings: str):
    """A run that is cut off after two of three steps, held against the undisturbed one."""
    undisturbed = advance(split_policy(*settings), 0, 1, 2)
    advance(split_policy(*settings), 0, 1).save(checkpoint)
    resumed = advance(resumed_from(split_policy, checkpoint, *settings), 2)
    assert torch.equal(gathered_logits(resumed), gathered_logits(undisturbed))
    return resumed


def resumed_from(split_policy, checkpoint, *settings: str):
    policy = split_policy(*settings)
    policy.load(checkpoint)
    return policy


def test_a_checkpoint_holds_nothing_of_a_split_frozen_base(tiny_model, split_policy, tmp_path):
    advance(split_policy(), 0).save(tmp_path)
    trained = sum(value.numel() for value in lora.trainable(lora.add_adapter(read(tiny_model), Lora(r=4))).values())
    size = sum(path.stat().st_size for path in (tmp_path / "engine").iterdir())
    assert size < 4 * 4 * trained + 60_000  # values and two of Adam; what pickle takes for names
    (states,) = (tmp_path / "engine").glob("*model_states.pt")
    assert all("lora_" in name for name in torch.load(states, weights_only=False)["module"])


def test_pissa_over_a_split_base_starts_as_the_run_did_that_it_goes_on_with(tiny_model, split_policy, tmp_path):
    """Factors of another machine: what is left of the base is made to fit them, in all of its parts."""
    advance(split_policy("lora.init=pissa"), 0).save(tmp_path)
    (states,) = (tmp_path / "engine").glob("*model_states.pt")
    saved = torch.load(states, weights_only=False)
    saved["start"] = {name: -value if "lora_" in name else value for name, value in saved["start"].items()}
    saved["start"][next(name for name in saved["start"] if "lora_B" in name)] *= 2.0
    torch.save(saved, states)
    policy = resumed_from(split_policy, tmp_path, "lora.init=pissa")
    with policy.as_base():
        assert_close(logits(policy.model), logits(read(tiny_model)))


@KINDS_OF_SPLIT
@pytest.mark.parametrize("how", ["optim.name=muon", "algorithm.gradreg.strength=0.1", "optim.name=adamw"])
def test_a_rehearsal_with_split_weights_leaves_nothing_behind(split_policy, trained, how):
    plain, rehearsed = split_policy(trained, how), split_policy(trained, how)
    rehearsed.rehearse(lambda: backward(rehearsed, in_one(plain), plain.config.algorithm, 0.0, Tally()))
    for policy in (plain, rehearsed):
        advance(policy, 0, 1)
    assert torch.equal(gathered_logits(rehearsed), gathered_logits(plain))


def test_a_pass_over_split_weights_that_breaks_off_ends_the_run_unless_they_are_gathered(split_policy):
    policy = split_policy()
    with refuses("optim.tokens_per_micro_batch", TrainingError, names="5000"):
        policy.start_over()
    with policy.gathered():
        policy.start_over()


def test_an_adapter_over_a_split_base_is_trained_in_bf16(tiny_model, split):
    shared, plain = (make_policy(tiny_model, f"engine.ds_config={zero}", dtype="bf16") for zero in (split, "zero2"))
    assert {value.dtype for value in shared.model.parameters()} == {torch.bfloat16}
    for _ in range(2):
        assert one_update(shared).grad_norm == pytest.approx(one_update(plain).grad_norm, rel=1e-2)
    assert shared.fingerprint() == pytest.approx(plain.fingerprint(), rel=1e-3)


@pytest.fixture(scope="module")
def split_jobs(splits, tmp_path_factory, tiers):
    """Every phase with two ranks, of which each does other work: base, rollout, reference, evaluation, export."""
    found = {}
    chosen_for = {"adapter": ("eval.every=1",)} | ({"whole": FULL} if "slow" in tiers else {})
    for name, chosen in chosen_for.items():
        folder = tmp_path_factory.mktemp("split")
        engine = splits["zero3" if name == "adapter" else "zero3_offload"]
        more = [*chosen, f"engine.ds_config={engine}", "algorithm.kl.coef=0.1", "eval.problems=7"]
        said = short_job.train(folder, "--preset", "nano", *short_job.FEW, *more, "run.dir=it", ranks=2)
        found[name] = (folder / "it", said)
        assert ("answers on 2 x cpu, engine" in said, "warn" in said.lower()) == (True, False)
    return found


@pytest.mark.slow
def test_a_whole_model_is_trained_and_exported_by_two_ranks_that_share_it(split_jobs):
    folder, _ = split_jobs["whole"]
    original = read(ROOT / "trainer/model/nano").state_dict()
    trained = read(folder / "model").state_dict()
    assert [value.shape for value in trained.values()] == [value.shape for value in original.values()]
    assert any(not torch.equal(value, original[name]) for name, value in trained.items())


def test_an_adapter_is_trained_exported_and_merged_by_two_ranks_that_share_its_base(split_jobs):
    folder, said = split_jobs["adapter"]
    original = logits(read(ROOT / "trainer/model/nano"))
    last = logits(lora.load_adapter(read(ROOT / "trainer/model/nano"), folder / "adapter"))
    assert (last - original).abs().max() > 1e-3
    assert_close(logits(read(folder / "merged")), last, 1e-5)
    saved = folder / "checkpoints/step_000002/adapter/adapter_model.safetensors"
    assert saved.read_bytes() == (folder / "adapter/adapter_model.safetensors").read_bytes()
    assert (logits(lora.load_adapter(read(ROOT / "trainer/model/nano"), folder / "best")) - original).abs().max() > 1e-4
    assert "merged against trained: 7 of 7 greedy answers identical" in said


@pytest.mark.slow
@pytest.mark.parametrize("what", ["adapter", "whole"])
def test_two_ranks_that_share_a_model_resume_byte_for_byte(split_jobs, what):
    short_job.resumes_to_the_bit(split_jobs[what][0], partial(short_job.train, ranks=2))
