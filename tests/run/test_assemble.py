"""The parts of a run fit together."""

import pytest
import torch

from tests.conftest import refuses, write_lines
from trainer.config.resolve import resolve
from trainer.model.load import load_model
from trainer.problem.task import make_task
from trainer.rollout.interface import StaticPolicy
from trainer.run.assemble import make_samplers, sampling_context
from trainer.run.data import prompter_of
from trainer.run.python_api import train


@pytest.fixture
def model(tiny_model):
    return load_model(resolve("nano", None, [f"model.name={tiny_model}"]).model, "fp32", torch.device("cpu"))


def context_of(config, model, tokenizer, folder):
    prompter = prompter_of(config, make_task(config.task), tokenizer)
    return sampling_context(config, StaticPolicy(), model, prompter, [], folder, print)


@pytest.mark.parametrize("engine", ["hf", "decode"])
def test_a_stop_string_that_is_a_special_token_ends_answers_at_that_token(tmp_path, tokenizer, model, engine):
    """Its text is never in an answer, which is decoded without special tokens."""
    config = resolve("nano", None, [f"rollout.engine={engine}", "rollout.stop=[<|im_start|>, so]"])
    context = context_of(config, model, tokenizer, tmp_path)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    for sampler in make_samplers(context, model, print, copies=True):
        completion = sampler.stops.completion([5, start, 6], [-1.0] * 3)
        assert completion.tokens == (5, start)
        assert not completion.truncated
        assert sampler.stops.strings == ("so",)
    assert start in context.stops.tokens  # of vLLM
    assert context.stops.strings == ("so",)
    assert context.vocabulary == len(model.get_input_embeddings().weight)
    config = resolve("nano", None, ["rollout.stop=<|im_end|> so"])
    with refuses("rollout.stop", names="im_end"):
        context_of(config, model, tokenizer, tmp_path)


def test_the_prompt_of_the_most_tokens_must_fit_although_other_questions_have_more_letters(tmp_path):
    asked = [*(f"How many cards does Cara have now, if she finds {n} more?" for n in range(100)), "7" * 40]
    write_lines(tmp_path / "sums.jsonl", [{"question": question, "answer": "1"} for question in asked])
    data = ["task.name=records", f"task.path={tmp_path}/sums.jsonl", "task.holdout=0.01", "prompt.style=chat"]
    config = resolve("nano", None, [*data, f"run.dir={tmp_path}/run", "rollout.max_new_tokens=218"])
    with refuses("rollout.max_new_tokens", names="sums.jsonl:101"):
        train(config)
    assert not (tmp_path / "run/metrics.jsonl").exists()  # no model has answered yet
