"""GRPO in plain PyTorch, to read before the real loop: `python examples/minimal.py`.

The embedded model of 0.65 M parameters learns to solve word problems from nothing but right or wrong, in about two
minutes on a CPU. Only the problems and the model come from Octet. Each function is one step of `trainer/loop.py`; what
the real program adds is LoRA, DeepSpeed, several ranks, memory, speed and everything that goes wrong.

    problem -> rollout -> reward -> advantage -> batch -> loss -> step
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainer
from trainer.problem.word_problems import NanoTask
from trainer.records import Problem

MODEL = Path(trainer.__file__).parent / "model" / "nano"
STEPS, PROBLEMS, GROUP, NEW_TOKENS = 40, 16, 8, 40
TEMPERATURE, LEARNING_RATE, CLIP = 1.0, 1e-4, 0.2


@dataclass(frozen=True)
class Answer:
    """One sampled answer, with the reward that it earned and what that means within its group."""

    prompt: list[int]
    tokens: list[int]  # up to the stop token
    reward: float
    advantage: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. The mask is 1 where the target is a token of the answer."""

    inputs_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor
    advantages_B: Tensor


def rollout(model: Any, tokenizer: Any, problem: Problem) -> list[list[int]]:
    """Sample a group of answers to one problem."""
    asked = tokenizer(chat(tokenizer, problem), return_tensors="pt")
    sampled = model.generate(
        **asked, do_sample=True, temperature=TEMPERATURE, top_k=0, num_return_sequences=GROUP, max_new_tokens=NEW_TOKENS
    )
    return [until_stop(row, tokenizer.eos_token_id) for row in sampled[:, asked["input_ids"].shape[1] :].tolist()]


def chat(tokenizer: Any, problem: Problem) -> str:
    message = {"role": "user", "content": problem.question}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def until_stop(tokens: list[int], stop: int) -> list[int]:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def reward(text: str, gold: str) -> float:
    """Return 1 for an answer that ends in `#### ` and the right number, else 0."""
    return float(text.rpartition("#### ")[2].strip() == gold)


def advantages(rewards_G: Sequence[float]) -> list[float]:
    """Return how much better each answer is than the mean of its group, in standard deviations."""
    mean, spread = fmean(rewards_G), pstdev(rewards_G) + 1e-6
    return [(one - mean) / spread for one in rewards_G]


def group_of(model: Any, tokenizer: Any, problem: Problem) -> list[Answer]:
    prompt = tokenizer(chat(tokenizer, problem))["input_ids"]
    sampled = rollout(model, tokenizer, problem)
    rewards = [reward(tokenizer.decode(tokens, skip_special_tokens=True), problem.gold) for tokens in sampled]
    return [Answer(prompt, *one) for one in zip(sampled, rewards, advantages(rewards), strict=True)]


def pack(answers: Sequence[Answer]) -> Batch:
    """Put answers into rows and shift them: position t of the inputs predicts position t of the targets."""
    rows = [[*answer.prompt, *answer.tokens] for answer in answers]
    width = max(map(len, rows))
    tokens_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    places = torch.arange(1, width)
    first = torch.tensor([[len(answer.prompt)] for answer in answers])
    last = torch.tensor([[len(row)] for row in rows])
    mask_BT = (places >= first) & (places < last)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BT, torch.tensor([one.advantage for one in answers]))


def logprobs(model: Any, batch: Batch) -> Tensor:
    """Return the log-prob of each target. The temperature divides the logits here as it does in sampling."""
    logits_BTV = model(batch.inputs_BT).logits.float() / TEMPERATURE
    return logits_BTV.log_softmax(-1).gather(-1, batch.targets_BT[..., None])[..., 0]


def loss(logprobs_BT: Tensor, old_logprobs_BT: Tensor, batch: Batch) -> Tensor:
    """Return the clipped objective of GRPO, a mean over all tokens of the answers."""
    ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
    advantages_B1 = batch.advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - CLIP, 1 + CLIP)
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    return (loss_BT * batch.mask_BT).sum() / batch.mask_BT.sum()


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Update the model once. It is still the model that answered, so its own log-probs are the old ones."""
    logprobs_BT = logprobs(model, batch)
    value = loss(logprobs_BT, logprobs_BT.detach(), batch)
    optimizer.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return value.item()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # faster than two for a model of this size
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    problems = NanoTask().train()
    random.Random(0).shuffle(problems)
    for number in range(STEPS):
        drawn = problems[number * PROBLEMS : (number + 1) * PROBLEMS]
        groups = [group_of(model, tokenizer, problem) for problem in drawn]
        live = [group for group in groups if any(answer.advantage for answer in group)]  # others teach nothing
        right = fmean(answer.reward for group in groups for answer in group)
        value = step(model, optimizer, pack([answer for group in live for answer in group])) if live else 0.0
        print(f"step {number + 1:2}: {right:4.0%} right, {len(live):2} of {PROBLEMS} groups live, loss {value:+.3f}")


if __name__ == "__main__":
    main()
