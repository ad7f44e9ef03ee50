"""teacher.url against the real vLLM."""

import pytest
import torch

from tests.vllm.serving import ALLOWED, BASIC, RealServer, built, metrics, save_random_adapter, train_all
from trainer.batch.pack import to_tensors
from trainer.config.settings import Model
from trainer.loss.logprobs import LogProbs
from trainer.model.load import load_model
from trainer.records import TrainingRow

pytestmark = pytest.mark.usefixtures("alone")
DISTILL = ["algorithm.loss=reinforce_baseline", "algorithm.lr=0.01", "rollout.dead_groups=keep", "run.steps=3"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    return folder, LogProbs(save_random_adapter(folder).requires_grad_(False), 1.0, flat=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory, adapter):
    """A teacher as somebody would start it, with a generation config that bends samples."""
    served = ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"taught={adapter[0]}"]
    bending = ["--override-generation-config", '{"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.5}']
    log = tmp_path_factory.mktemp("server") / "log"
    with RealServer(log, [*BASIC, *served, *bending], ALLOWED).running() as server:
        yield server


def test_the_logprobs_are_those_of_the_same_model_beside_the_policy(server, adapter, tmp_path):
    """The prompts are longer than two blocks of the prefix cache, and equal: the second request finds them there."""
    prompt = [20 + 7 * place % 300 for place in range(90)]
    rows = [TrainingRow(prompt, [30 + index] * (5 + index), [0.0] * (5 + index), 1.0) for index in range(8)]
    batches = [to_tensors(rows[:5], 0), to_tensors(rows[5:], 0)]
    base = LogProbs(load_model(Model(name="nano"), "fp32", torch.device("cpu")).requires_grad_(False), 1.0, flat=False)
    for name, score in (("base", base), ("taught", adapter[1])):
        with built(tmp_path / name, *DISTILL, f"teacher.url={server.url}", f"teacher.name={name}") as run:
            for _ in range(2):
                for batch, found_BT in zip(batches, run.updater.teacher(batches), strict=True):
                    torch.testing.assert_close(found_BT, score(batch).logprobs_BT, atol=1e-4, rtol=0)


def test_the_policy_comes_nearer_to_the_teacher_at_the_server(server, tmp_path):
    settings = [f"teacher.url={server.url}", "teacher.name=taught", "rollout.problems=8", "run.steps=6"]
    with built(tmp_path / "run", *DISTILL, *settings) as run:
        train_all(run)
    first, *_, last = [one["advantage/token"] for one in metrics(tmp_path / "run")]
    assert first < last < 0
