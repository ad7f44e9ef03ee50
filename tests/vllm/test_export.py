"""The exported model in vLLM is the model that was trained: the embedded one in a server, asked as other
programs ask, and a tiny one of each family in the library.

Variants of a family with other rotary angles or with biases are left out, for the time that they take. With Ministral 3
beyond its original context, vLLM 0.32.0 computes something else than transformers, and it cannot read the
configurations of LFM2 and of the text part of Qwen3.5. It has no LFM3."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.conftest import octet, ran
from tests.llama.families import FAMILIES, make
from tests.vllm.serving import BASIC, PYTHON, RealServer, opened, surroundings, train_all
from trainer.answers.compare import equal
from trainer.answers.find import strict
from trainer.config.resolve import resolve
from trainer.evaluation.evaluate import Evaluation
from trainer.machine.http_client import exchange
from trainer.model import lora
from trainer.model.load import load_model
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
    assert octet("export", folder, "--to", "safetensors", "--no-check") == 0
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

    with server.running(), ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, (outcome.question for outcome in evaluation.outcomes)))


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


# ---------------------------------------------------------------- a tiny model of each family

NAMES = [name for name in FAMILIES if " " not in name and name not in ("lfm2", "lfm3", "qwen3.5")]
HEADS = {"hidden_size": 128, "head_dim": 32}  # vLLM has no smaller ones
PROMPTS = [[1, *range(60, 90), 2], [1, 200, 201, 2]]
IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda function: function()  # else each class is looked at in a process of its own
settings = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
for folder in sys.argv[1:]:
    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=8, block_size=32, enforce_eager=True)
    answers = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], settings, use_tqdm=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    steps = [zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs) for answer in answers]
    print("FOUND", json.dumps([tokens, [[step[token].logprob for token, step in of_one] for of_one in steps]]))
    llm.llm_engine.engine_core.shutdown()
"""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> dict[str, tuple[torch.nn.Module, Path]]:
    """Return a model of each family with an adapter, and what octet export makes of it."""
    made = {}
    for name in NAMES:
        base, run = make(name, tmp_path_factory.mktemp("base"), **HEADS), tmp_path_factory.mktemp("run")
        config = resolve("nano", None, [f"model.name={base}", "model.dtype=fp32"])
        model = lora.add_adapter(load_model(config.model, "fp32", torch.device("cpu")), config.lora)
        for part, value in lora.trainable(model).items():
            if "lora_B" in part:
                torch.nn.init.normal_(value, std=0.1)
        save_adapter(model, run / "adapter")
        (run / "config.yaml").write_text(config.to_yaml())
        assert octet("export", run, "--to", "safetensors", "--no-check") == 0
        made[name] = (model.eval(), run / "export-safetensors")
    return made


@pytest.fixture(scope="module")
def answered(adapted) -> dict[str, list]:
    """The greedy answers of vLLM and their log-probs. One process loads all models."""
    command = [PYTHON, "-c", f"PROMPTS = {PROMPTS}\n{IN_VLLM}", *(str(folder) for _, folder in adapted.values())]
    said = ran(*command, env=surroundings())
    found = [json.loads(line.removeprefix("FOUND")) for line in said.stdout.splitlines() if line.startswith("FOUND")]
    assert len(found) == len(adapted), said.stderr[-4000:]
    return dict(zip(adapted, found, strict=True))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tiny_models_of_the_families(name, adapted, answered):
    """Each token of an answer is the likeliest one of the adapted model, whose log-prob it has."""
    for prompt, tokens, logprobs in zip(PROMPTS, *answered[name], strict=True):
        found_TV = adapted[name][0](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert len(tokens) == 16
        assert found_TV.argmax(-1).tolist() == tokens
        assert found_TV.amax(-1).tolist() == pytest.approx(logprobs, abs=1e-4)
