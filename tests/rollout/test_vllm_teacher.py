"""A vLLM server as teacher, against a server that speaks as much of the protocol; the real one is in tests/vllm/."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import refuses, row
from tests.e2e.vllm_double import VllmDouble
from trainer.batch.pack import Packer
from trainer.config.resolve import resolve
from trainer.config.settings import Model
from trainer.errors import ConfigError, ModelError, TrainingError
from trainer.loss.logprobs import LogProbs
from trainer.model.load import load_model
from trainer.rollout.vllm.teacher import ServedTeacher

QUICK = ["algorithm.loss=reinforce_baseline", "rollout.vllm.wait_s=1", "rollout.vllm.timeout_s=5"]


@pytest.fixture
def double():
    with VllmDouble().serving() as double:
        yield double


@pytest.fixture
def connect(double, tokenizer):
    """Return a function that connects to the server, with more settings."""

    def connected(*settings: str, longest: int = 8, tokenizer=tokenizer) -> ServedTeacher:
        named = [f"teacher.url=http://127.0.0.1:{double.server_port}/v1/", *QUICK, *settings]
        return ServedTeacher(resolve("nano", None, named), tokenizer, longest, print)

    return connected


def test_the_logprobs_are_those_of_the_model_beside_the_policy(connect):
    """Rows of several lengths with one prompt, in two micro-batches, one of them with a token that it did not write."""
    rows = [row(4, length, 1.0, first=20) for length in (3, 7, 5)]
    rows.append(row(9, 4, 1.0, first=60))
    rows[1] = SimpleNamespace(**{name: getattr(rows[1], name) for name in rows[1].__slots__}, length=11, mask=[])
    rows[1].mask = rows[1].written = [True, True, False, False, True, True, True]
    packer = Packer(24, 0, flat=False)
    batches = packer.pack(rows)
    assert len(batches) > 1
    score = LogProbs(load_model(Model(name="nano"), "fp32", torch.device("cpu")).requires_grad_(False), 1.0)
    for batch, found_BT in zip(batches, connect()(batches), strict=True):
        torch.testing.assert_close(found_BT, score(batch).logprobs_BT, atol=1e-5, rtol=0)
        assert (found_BT[~batch.mask_BT] == 0).all()


def test_another_model_is_refused(connect):
    with refuses("teacher.url", names="larger"):
        connect("teacher.name=larger")
    assert connect("teacher.name=nano").model == "nano"


def test_a_server_without_room_for_the_longest_answer_is_refused(connect):
    connect("rollout.max_new_tokens=1000", longest=23)
    with refuses("rollout.max_new_tokens", names="1025"):
        connect("rollout.max_new_tokens=1000", longest=24)
    with refuses("rollout.max_new_tokens", names="513"):
        connect("rollout.max_new_tokens=513", "task.agent=agent.py:run", longest=24)  # the conversation grows to 512


def test_a_teacher_that_counts_in_other_tokens_is_refused_by_name(connect, tokenizer):
    """Two tokens of the tokenizer are in each other's place."""
    swap = {40: 41, 41: 40}

    def decode(tokens):
        return tokenizer.decode([swap.get(token, token) for token in tokens])

    with refuses("teacher.url", ModelError, names="model"):
        connect(tokenizer=SimpleNamespace(get_vocab=tokenizer.get_vocab, decode=decode))


TOO_LARGE = [None, {"27": {"logprob": 3.0}}, {"34": {"logprob": 3.0}}]


@pytest.mark.parametrize(("reply", "kind", "message"), [
    ({"model": "other"}, TrainingError, "other"),
    ({"choices": []}, TrainingError, "3 invalid"),
    ({"choices": [{"prompt_logprobs": None}]}, TrainingError, "vLLM"),
    ({"choices": [{"prompt_logprobs": [None, {"20": {"logprob": -1.0}}]}]}, TrainingError, "vLLM"),
    ({"choices": [{"prompt_logprobs": TOO_LARGE}]}, ConfigError, "log-prob"),
])  # fmt: skip
def test_a_reply_that_makes_no_sense_ends_the_run(double, connect, reply, kind, message):
    teacher = connect()
    double.look_back = lambda **body: (200, {"model": "nano", **reply})
    with refuses("teacher.url", kind, names=message):
        teacher(Packer(24, 0, flat=False).pack([row(1, 2, 1.0)]))
