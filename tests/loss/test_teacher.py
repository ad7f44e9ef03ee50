"""On-policy distillation: both forms against autograd, and in expectation against the reverse KL and TRL's GKD."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import gradients, row
from tests.loss.test_warmup import add_gradients, assert_same, padded
from trainer.batch.pack import Packer, to_tensors
from trainer.config.resolve import resolve
from trainer.loss.before_update import with_teacher
from trainer.loss.logprobs import LogProbs
from trainer.loss.objectives import LOSSES, objective, total
from trainer.records import Scores, TrainingRow

# TRL itself sets it by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

DISTILL = ["teacher.name=nano", "algorithm.correction.level=none", "algorithm.loss=reinforce_baseline"]
LOSS = ["teacher.form=loss", "algorithm.kl.coef=1", "algorithm.kl.estimator=k2"]
VOCABULARY = 7


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)


TEACHER = torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log_softmax(0)


def gradient(policy, settings, weights) -> torch.Tensor:
    """Return the gradient of the loss where each token of the vocabulary is answered with such a weight, behind a
    prompt of one token."""
    config, now_V = resolve("nano", None, [*DISTILL, *settings]), policy.log_softmax(0)
    sampled = enumerate(now_V.tolist())
    rows = [replace(row(1, 1, 0.5, reward=2.0), completion=[token], logprobs=[logprob]) for token, logprob in sampled]
    batch = replace(to_tensors(rows, pad_token=0), weights_B=weights)
    batch = with_teacher(batch, TEACHER[batch.targets_BT], config.teacher)
    batch = batch.measured(now_V.detach()[batch.targets_BT])
    scores = Scores(now_V[batch.targets_BT], torch.zeros(batch.mask_BT.shape))
    loss = total(objective(scores, batch, config.algorithm, config.algorithm.kl.coef), batch, 1.0)
    return torch.autograd.grad(loss, policy)[0]


FORMS = [[f"algorithm.loss={name}"] for name in ("reinforce_baseline", "grpo_clip", "cispo")]
FORMS += [[*LOSS, f"algorithm.loss={name}"] for name in LOSSES]


@pytest.mark.parametrize("settings", FORMS)
def test_in_expectation_it_is_the_gradient_of_the_exact_reverse_kl(policy, settings):
    """Each token answered as often as the policy does: the sum over the vocabulary is the expectation."""
    now_V = policy.log_softmax(0)
    exact = torch.autograd.grad((now_V.exp() * (now_V - TEACHER)).sum(), policy)[0]
    found = gradient(policy, settings, policy.softmax(0).detach())
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)  # log-probs travel as 32-bit numbers


WORTH = [(["teacher.weight=0.5"], 0.5), (LOSS, 0.5), ([*LOSS, "algorithm.loss=gspo"], 0.5)]


@pytest.mark.parametrize(("settings", "worth"), [*WORTH, ([*LOSS, "algorithm.loss=reinforce"], 2.0)])
def test_the_verifier_is_mixed_in_by_its_weight(policy, settings, worth):
    """The advantage of every answer is 0.5, and its reward 2."""
    weights = torch.rand(VOCABULARY, dtype=torch.float64)
    alone, mixed = (gradient(policy, [*settings, f"teacher.reward={share}"], weights) for share in (0, 2))
    verified = torch.autograd.grad(-(weights * worth * policy.log_softmax(0)).sum(), policy)[0]
    torch.testing.assert_close(mixed, alone + 2 * verified, atol=1e-6, rtol=1e-5)


SHARING = [["teacher.name=null"], [], ["model.quantize=nf4", "teacher.quantize=nf4"]]
APART = [["model.quantize=nf4"], ["teacher.name=other"], ["teacher.revision=old"], ["lora.enabled=false"]]
APART += [["lora.init=pissa"]]


@pytest.mark.parametrize(("settings", "shares"), [*((one, True) for one in SHARING), *((one, False) for one in APART)])
def test_an_adapter_shares_the_base_that_it_is_of(settings, shares):
    config = resolve("nano", None, [*DISTILL, "teacher.adapter=x", *settings])
    assert config.shares_base is shares
    assert (config.teacher_model is None) is shares
    assert not config.drops_dead_groups  # no group is dead to a teacher


def test_after_a_warm_up_that_is_merged_the_teacher_keeps_its_base(tmp_path):
    """The base of the run that follows is another model."""
    settings = ["teacher.name=null", "teacher.adapter=x", "warmup.steps=3"]
    merged = resolve("nano", None, [*DISTILL, *settings, "warmup.then=merged"]).after_warmup(tmp_path)
    assert (merged.model.name, merged.teacher.name, merged.shares_base) == (str(tmp_path / "merged"), "nano", False)
    assert resolve("nano", None, [*DISTILL, *settings]).after_warmup(tmp_path).shares_base


ANSWERED = [row(3, 3, advantage=0.0), row(5, 2, advantage=0.0, first=40)]
PLACES = sum(len(one.completion) for one in ANSWERED)


@pytest.fixture(scope="module")
def student_and_teacher(tiny_model):
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)
    teacher = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False).requires_grad_(False)
    for value in teacher.parameters():
        value.add_(torch.randn(value.shape) / 20)
    return student, teacher


@pytest.fixture(scope="module")
def every_token(student_and_teacher) -> list[TrainingRow]:
    """In each place of the answers, each token of the vocabulary, with the student's probability as its weight."""
    rows = []
    for one in ANSWERED:
        tokens = [*one.prompt, *one.completion]
        with torch.no_grad():
            logprobs_TV = student_and_teacher[0](torch.tensor([tokens])).logits[0].log_softmax(-1)
        for place in range(len(one.prompt), len(tokens)):
            of_place = enumerate(logprobs_TV[place - 1].tolist())
            rows += [TrainingRow(tokens[:place], [v], [p], 0.0, weight=math.exp(p)) for v, p in of_place]
    return rows


@pytest.fixture(scope="module")
def of_gkd(student_and_teacher, tokenizer, tmp_path_factory):
    """The gradient of TRL's GKDTrainer for the same answers, with beta=1: the reverse KL, over the vocabulary."""
    gkd, datasets = pytest.importorskip("trl.experimental.gkd"), pytest.importorskip("datasets")
    student, teacher = student_and_teacher
    options = {"use_cpu": True, "bf16": False, "report_to": [], "beta": 1.0, "lmbda": 1.0, "temperature": 1.0}
    settings = gkd.GKDConfig(output_dir=str(tmp_path_factory.mktemp("gkd")), **options)
    sets = datasets.Dataset.from_dict({"messages": [[{"role": "user", "content": "1"}]]})
    trainer = gkd.GKDTrainer(student, teacher, settings, processing_class=tokenizer, train_dataset=sets)
    inputs, labels = padded(ANSWERED)
    present = torch.arange(inputs.shape[1]) < torch.tensor([[one.length] for one in ANSWERED])
    asked = {"input_ids": inputs, "labels": labels, "attention_mask": present.long()}
    trainer.compute_loss(trainer.model, asked).backward()
    found = gradients(student)
    student.zero_grad()
    return found


@pytest.mark.parametrize("settings", [[], LOSS], ids=["advantage", "loss"])
def test_in_expectation_the_gradient_is_that_of_trls_gkd_trainer(student_and_teacher, every_token, of_gkd, settings):
    """Over the sampled token, in each place of the same answers. Sampling has no gradient in GKD, either."""
    config, (student, teacher) = resolve("nano", None, [*DISTILL, *settings]), student_and_teacher
    told = LogProbs(teacher, 1.0, flat=False)
    packed = Packer(4000, 0, flat=False).pack(every_token)
    student.zero_grad()
    batches = (with_teacher(batch, told(batch).logprobs_BT, config.teacher) for batch in packed)
    add_gradients(student, batches, config, PLACES)
    assert_same(gradients(student), of_gkd)
