"""The loss of a warm-up is the cross-entropy of the answers: against torch's, and TRL's SFT trainer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.conftest import gradients, row
from trainer.batch.pack import Packer
from trainer.config.resolve import resolve
from trainer.loss.logprobs import LogProbs
from trainer.loss.objectives import objective, total
from trainer.step.update import Updater

# TRL itself sets it by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

SETTINGS = resolve("nano", None, ["warmup.only=true", "warmup.steps=1", "rollout.temperature=0.7"])
ROWS = [row(3 + i % 3, 2 + 3 * (i % 4), advantage=1.0, first=20 + 5 * i) for i in range(6)]
# in two of them an environment has said some tokens
ROWS[1] = replace(ROWS[1], written=[True, False, False, True, True])
ROWS[3] = replace(ROWS[3], written=[True] * 4 + [False] * 6 + [True])
TOKENS = sum(sum(one.mask) for one in ROWS)


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)


def add_gradients(model, batches, config, tokens: int) -> float:
    """Add up the gradient of all micro-batches, and return the loss."""
    measure, algorithm, loss = LogProbs(model, config.rollout.temperature, flat=False), config.algorithm, 0.0
    for batch in batches:
        scores = measure(batch)
        known = batch.measured(scores.logprobs_BT.detach())
        share = total(objective(scores, known, algorithm, algorithm.kl.coef), known, tokens)
        share.backward()
        loss += share.item()
    return loss


def padded(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels as everybody else writes them: -100 where nothing is trained on."""
    width = max(one.length for one in rows)
    inputs, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for index, one in enumerate(rows):
        inputs[index, : one.length] = torch.tensor([*one.prompt, *one.completion])
        labels[index, len(one.prompt) : one.length] = torch.tensor(one.completion).where(torch.tensor(one.mask), -100)
    return inputs, labels


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5, msg=name)


def of_torch(model) -> torch.Tensor:
    inputs, labels = padded(ROWS)
    return cross_entropy(model(inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def assert_learned_from(model, loss: torch.Tensor) -> None:
    """Compare our loss and its gradient with another loss of the model."""
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    batches = Packer(30, 0, flat=False).pack(ROWS)
    assert add_gradients(model, batches, SETTINGS, TOKENS) == pytest.approx(loss.item(), rel=1e-6)
    assert_same(gradients(model), expected)


def test_loss_and_gradient_are_those_of_torchs_cross_entropy(model):
    assert_learned_from(model, of_torch(model))


def test_the_loss_of_held_out_solutions_is_that_of_the_tokens_that_the_model_writes(model):
    measured = SimpleNamespace(measure=LogProbs(model, 1.0, flat=False))
    updater = Updater(measured, SETTINGS, "cpu", Packer(30, 0, flat=False), kl=None, warn=print)
    assert updater.held_out_loss(ROWS) == pytest.approx(of_torch(model).item(), rel=1e-6)
    assert updater.held_out_loss([]) is None


def test_trls_sft_trainer_has_the_same_loss_and_gradient(model, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    inputs, labels = ([row[: one.length].tolist() for row, one in zip(rows, ROWS)] for rows in padded(ROWS))
    machine = {"use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": len(ROWS)}
    whole = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    settings = trl.SFTConfig(output_dir=str(tmp_path), **machine, **whole)
    sets = datasets.Dataset.from_dict({"input_ids": inputs, "labels": labels})
    trainer = trl.SFTTrainer(model, settings, train_dataset=sets)
    assert_learned_from(model, trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))))
