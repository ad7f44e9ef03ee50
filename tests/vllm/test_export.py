"""A server with the exported model, asked as people's programs ask it: it is the model that was trained."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.vllm.serving import BASIC, RealServer, opened, train_all
from trainer.answers.compare import equal
from trainer.answers.find import strict
from trainer.commands.main import main
from trainer.evaluation.evaluate import Evaluation
from trainer.machine.http_client import exchange
from trainer.model.lora import save_adapter

SHORT = ["run.steps=4", "rollout.problems=8", "algorithm.lr=0.002", "eval.problems=32"]


@pytest.fixture(scope="module")
def trained(alone, tmp_path_factory) -> tuple[Path, Evaluation, list[torch.Tensor]]:
    """Train a few steps and export. Return the folder of the run; and of the adapted model in transformers the greedy
    answers, and the log-probs of their tokens."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    with opened(f"run.dir={folder}", *SHORT) as run:
        train_all(run)
        model = run.updater.policy.model
        save_adapter(model, folder / "adapter")
        evaluation, logprobs = run.evaluator.evaluate("trained"), []
        for prompt, outcome in zip(run.evaluator.held_out, evaluation.outcomes, strict=True):
            tokens_T = torch.tensor([*prompt.tokens, *outcome.completion.tokens])
            logprobs_TV = model(tokens_T[None]).logits[0, len(prompt.tokens) - 1 : -1].log_softmax(-1)
            logprobs.append(logprobs_TV.detach().gather(1, tokens_T[len(prompt.tokens) :, None])[:, 0])
    with pytest.raises(SystemExit) as ended:
        main(["export", str(folder), "--to", "safetensors", "--no-check"])
    assert ended.value.code == 0
    return folder, evaluation, logprobs


@pytest.fixture(scope="module")
def replies(trained) -> list[dict]:
    """What the server says to each question. It writes the prompt with the chat template of the folder."""
    folder, evaluation, _ = trained
    server = RealServer(folder / "log", BASIC, {}, folder / "export-safetensors")

    def ask(question: str) -> dict:
        asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
        body = {"model": "base", "logprobs": True, **asked}
        reply = exchange(f"{server.url}/v1/chat/completions", body, 60, 1 << 20, direct=True)
        return json.loads(reply)["choices"][0]

    try:
        server.start().ready()
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, (outcome.question for outcome in evaluation.outcomes)))
    finally:
        server.end()


def test_the_answers_and_their_accuracy_are_those_of_the_trained_model(trained, replies):
    _, evaluation, _ = trained
    said = [reply["message"]["content"] for reply in replies]
    assert said == [outcome.completion.text for outcome in evaluation.outcomes]
    golds = [outcome.gold for outcome in evaluation.outcomes]
    read = [strict(text, "gsm8k", gold) for text, gold in zip(said, golds, strict=True)]
    right = [answer is not None and equal(answer, gold) for answer, gold in zip(read, golds, strict=True)]
    assert sum(right) / len(right) == evaluation.accuracy


def test_the_log_probs_are_those_of_the_trained_model(trained, replies):
    for reply, expected in zip(replies, trained[2], strict=True):
        served = [token["logprob"] for token in reply["logprobs"]["content"]]
        assert len(served) in (len(expected), len(expected) - 1), "with or without the stop token"
        assert served == pytest.approx(expected[: len(served)].tolist(), abs=1e-4)
