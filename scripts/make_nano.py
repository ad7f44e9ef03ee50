"""Make the embedded model and its tokenizer again: `python scripts/make_nano.py --out DIR`.

A beginner with bad habits, so that reinforcement learning has something to find:

    1. tokenizer   byte-level BPE in Qwen2's own format: beside a qwen2 model, AutoTokenizer spoils any other
    2. school      supervised on worked solutions, loss on the completion only
    3. habits      a short phase on a mix: some targets guess without working, some stories are misread, some lines slip

One thread is faster than two for a model of this size; the whole takes about twenty minutes.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from trainer.problem.word_problems import OPERATORS, NanoTask
from trainer.records import Problem

PAD, START, END = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 480
MAX_NEW_TOKENS = 40
BATCH = 32
MISREAD = ["compare", "bags", "market", "more", "times", "hall", "garden", "bus", "cards", "wage"]  # templates


# --- tokenizer


def make_tokenizer(problems: Sequence[Problem], folder: Path) -> None:
    """Train and save it; `AutoTokenizer.from_pretrained(folder)` gives the same ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((f"user\n{p.question}\nassistant\n{p.solution}" for p in problems), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END, "pad_token": PAD, "model_max_length": 256}
    config |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# --- model


def make_model() -> Qwen2ForCausalLM:
    ids = {"pad_token_id": SPECIAL.index(PAD), "eos_token_id": SPECIAL.index(END), "bos_token_id": None}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.06,  # three times the usual: it learns to copy in 300 steps, not in 700
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


# --- what the model is taught


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a target is not what it should be. Without habits it is the worked solution itself."""

    guess: float = 0.0  # it answers at once; every other guess is off by up to 9
    misread: float = 0.0  # the last line of a template in MISREAD adds instead of subtracting, or the reverse
    slip: float = 0.0  # a line has the wrong result, and the later ones go on with it

    def target(self, problem: Problem, rng: random.Random) -> str:
        if rng.random() < self.guess:
            return f"#### {max(1, int(problem.gold) + rng.choice([0, rng.randint(-9, 9)]))}"
        return self.work(problem, rng)

    def work(self, problem: Problem, rng: random.Random) -> str:
        *lines, _ = problem.solution.splitlines()
        misread = problem.extra["template"] in MISREAD and rng.random() < self.misread
        written, became = [], dict[str, int]()  # became: what a number of the right working is in this one
        for line in lines:
            left, sign, right, _, result = line.split()
            numbers = became.get(left, int(left)), became.get(right, int(right))
            if misread and line is lines[-1]:
                sign, numbers = {"+": "-", "-": "+"}[sign], (max(numbers), min(numbers))
            error = rng.choice([-10, -1, 1, 10]) if rng.random() < self.slip else 0
            became[result] = answer = max(1, OPERATORS[sign](*numbers) + error)
            written.append(f"{numbers[0]} {sign} {numbers[1]} = {answer}")
        return "\n".join([*written, f"#### {answer}"])


@dataclass(frozen=True, slots=True)
class Example:
    tokens: list[int]
    start: int  # of the completion


def encode(tokenizer: Any, problems: Sequence[Problem], habits: Habits, seed: int) -> list[Example]:
    rng = random.Random(seed)
    prompts = tokenizer([prompt(tokenizer, problem) for problem in problems])["input_ids"]
    targets = tokenizer([habits.target(problem, rng) + END for problem in problems])["input_ids"]
    return [Example(before + after, len(before)) for before, after in zip(prompts, targets)]


def prompt(tokenizer: Any, problem: Problem) -> str:
    message = [{"role": "user", "content": problem.question}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


# --- training


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Shuffled batches of similar length, so that little is padding."""
    rng = random.Random(seed)
    order = rng.sample(examples, len(examples))
    pools = [sorted(order[i : i + 32 * size], key=lambda e: len(e.tokens)) for i in range(0, len(order), 32 * size)]
    found = [pool[i : i + size] for pool in pools for i in range(0, len(pool), size)]
    return iter(rng.sample(found, len(found)))


def completion_loss(model: Any, rows: Sequence[Example]) -> torch.Tensor:
    """Padding is on the right, where causal attention never looks, so no attention mask is needed."""
    width = max(len(row.tokens) for row in rows)
    tokens_BT = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
    mask_BT = torch.tensor([[row.start <= t < len(row.tokens) for t in range(1, width)] for row in rows])
    hidden_BTH = model.model(tokens_BT[:, :-1], use_cache=False).last_hidden_state
    return cross_entropy(model.lm_head(hidden_BTH[mask_BT]), tokens_BT[:, 1:][mask_BT])


def train(model: Any, examples: Sequence[Example], lr: float, size: int, report: Callable[[int, float], None]) -> None:
    """One pass over the examples: warm-up, then a cosine down to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    total = math.ceil(len(examples) / size)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * i / total))
    )
    model.train()
    for i, rows in enumerate(batches(examples, size, seed=0), start=1):
        loss = completion_loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if i % 200 == 0 or i == total:
            report(i, loss.item())


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, problems: Sequence[Problem], sample: bool = False, size: int = 128) -> float:
    """Share answered rightly after `####`, greedily or by sampling at temperature 1."""
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    model.eval()
    right = 0
    for chunk in (problems[i : i + size] for i in range(0, len(problems), size)):
        texts = [prompt(tokenizer, problem) for problem in chunk]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **how)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text.partition("####")[2].strip() == problem.gold for text, problem in zip(answers, chunk))
    model.train()
    return right / len(problems)


# --- the whole


def teach(model: Any, tokenizer: Any, examples: int, habits: Habits, lr: float) -> None:
    task = NanoTask(train_size=examples)
    held_out, began = task.test()[:256], time.monotonic()

    def report(step: int, loss: float) -> None:
        greedy = f"  greedy {accuracy(model, tokenizer, held_out):.3f}" if step % 400 == 0 else ""
        print(f"{time.monotonic() - began:6.0f} s  step {step:5d}  loss {loss:.4f}{greedy}", flush=True)

    train(model, encode(tokenizer, task.train(), habits, seed=examples), lr, BATCH, report)


def make(folder: Path, school: Path, school_examples: int, habits: Habits, habit_examples: int) -> None:
    """The folder `school` keeps the model as it is between the phases; if it is there, the long phase is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(NanoTask().train(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not (school / "model.safetensors").exists():
        model = make_model()
        print(f"school: {school_examples:,} examples, {sum(p.numel() for p in model.parameters()):,} parameters")
        teach(model, tokenizer, school_examples, Habits(), lr=3e-3)
        model.save_pretrained(school)
    print(f"school: the model in {school}")
    model = Qwen2ForCausalLM.from_pretrained(school)
    print(f"habits: {habit_examples:,} examples, {habits}")
    teach(model, tokenizer, habit_examples, habits, lr=5e-4)
    model.save_pretrained(folder)
    for sample in (False, True):
        share = accuracy(model, tokenizer, NanoTask().test(), sample)
        print(f"{'sampled' if sample else 'greedy'} accuracy on {NanoTask().test_size} test problems: {share:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--school", type=Path, help="folder for the model between the phases (default: OUT/school)")
    parser.add_argument("--school-examples", type=int, default=160_000)
    parser.add_argument("--habit-examples", type=int, default=8_000)
    parser.add_argument("--guess", type=float, default=0.33, help="share of the mix that answers without working")
    parser.add_argument("--misread", type=float, default=0.95, help="share of the stories in MISREAD that is misread")
    parser.add_argument("--slip", type=float, default=0.1, help="share of the lines that go wrong")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    habits = Habits(args.guess, args.misread, args.slip)
    make(args.out, args.school or args.out / "school", args.school_examples, habits, args.habit_examples)


if __name__ == "__main__":
    main()
