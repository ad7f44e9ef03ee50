"""The embedded task, tokenizer and model: what a first run on any machine stands on."""

import hashlib
import json
import random
import re
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, tokenization_utils_base

from scripts.make_nano import MISREAD, Habits
from tests.conftest import NANO
from trainer.config.settings import Model
from trainer.model.load import load_tokenizer
from trainer.problem.word_problems import TEMPLATES, NanoTask
from trainer.records import Problem

PARAMETERS = 652_928
MAX_NEW_TOKENS = 40  # what the nano preset samples
TEXTS = [
    "Amy buys 3 bags of 4 apples and gives 5 away. How many apples are left?",
    "3 * 4 = 12\n12 - 5 = 7\n#### 7",
    "1234567890 007  two spaces,\ttab\n\nand a café with 木 and 🐙",
]


train, held_out = NanoTask().train, NanoTask().test
tokenizer = cache(lambda: AutoTokenizer.from_pretrained(NANO))
model = cache(lambda: AutoModelForCausalLM.from_pretrained(NANO).eval())


def chat(question):
    message = [{"role": "user", "content": question}]
    return tokenizer().apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def test_problems_are_the_same_on_every_machine():
    """If this fails because the templates were changed on purpose, the model has to be made again too."""
    for task in (NanoTask(), NanoTask()):
        text = "\n".join(f"{p.id} {p.question} {p.solution}" for p in task.train() + task.test())
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == "a9e4c2be57e503f8"


def test_no_question_twice_and_none_in_both_splits_whatever_the_seed():
    questions = [p.question for p in train() + held_out()]
    assert len(held_out()) >= 1024
    assert len(set(questions)) == len(questions)
    other = NanoTask(seed=1)
    assert other.train()[0].question != train()[0].question
    assert not {p.question for p in other.train()} & {p.question for p in held_out()}


@pytest.mark.parametrize("split", [train, held_out])
def test_every_template_is_in_each_split(split):
    counts = Counter(p.extra["template"] for p in split()[:512])
    assert len(TEMPLATES) >= 14
    assert (set(counts), {p.extra["steps"] for p in split()}) == (set(TEMPLATES), {1, 2, 3})


def test_every_gold_is_the_result_of_its_own_working():
    for problem in train() + held_out():
        *lines, last = problem.solution.split("\n")
        known = {int(number) for number in re.findall(r"\d+", problem.question)} | {2}  # 2: "halve the rest"
        for line in lines:
            left, sign, right, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", line).groups()
            left, right, result = int(left), int(right), int(result)
            assert {left, right} <= known, problem
            values = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}
            assert result == values[sign] > 0, problem
            known.add(result)
        assert (last, problem.gold) == (f"#### {problem.gold}", str(result))
        assert problem.extra["steps"] == len(lines)


def test_tokenizer_gives_the_text_back_and_agrees_with_its_own_file():
    assert [tokenizer().decode(tokenizer()(text)["input_ids"]) for text in TEXTS] == TEXTS
    raw = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    texts = TEXTS + [p.question + "\n" + p.solution for p in held_out()] + [chat(TEXTS[0])]
    assert tokenizer()(texts)["input_ids"] == [encoding.ids for encoding in raw.encode_batch(texts)]


def test_special_tokens():
    config = json.loads((NANO / "config.json").read_text())
    assert tokenizer().convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for holder in (tokenizer(), model().generation_config, SimpleNamespace(**config)):
        assert (holder.pad_token_id, holder.eos_token_id) == (0, 2)
    assert len(tokenizer()) == config["vocab_size"]
    assert tokenizer().tokenize("2026 + 7") == ["2", "0", "2", "6", "Ġ+", "Ġ", "7"], "every digit is one token"


def test_chat_template_is_chatml_and_every_worked_solution_fits_into_the_new_tokens():
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "#### 4"}]
    closed = tokenizer().apply_chat_template(messages, tokenize=False)
    assert closed == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n#### 4<|im_end|>\n"
    assert chat("2 + 2?") == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    texts = [p.solution + "<|im_end|>" for p in train()]
    assert max(len(ids) for ids in tokenizer()(texts)["input_ids"]) <= MAX_NEW_TOKENS


BAGS = Problem("nano/train/0", TEXTS[0], "7", "3 * 4 = 12\n12 - 5 = 7\n#### 7", {"steps": 2, "template": "bags"})


def test_without_habits_the_target_is_the_worked_solution_and_a_misread_story_turns_the_sign_of_the_last_line():
    assert all(Habits().target(problem, random.Random(0)) == problem.solution for problem in train())
    assert Habits(misread=1).target(BAGS, random.Random(0)) == "3 * 4 = 12\n12 + 5 = 17\n#### 17"
    assert {TEMPLATES[name][1].split(";")[-1].split()[1] for name in MISREAD} == {"+", "-"}


def test_a_slip_is_carried_on():
    lines = Habits(slip=1).target(BAGS, random.Random(0)).split("\n")
    first, second = int(lines[0].split()[-1]), int(lines[1].split()[-1])
    assert abs(first - 12) in (1, 10)
    assert lines[1].startswith(f"{first} - 5 = ")
    assert second != first - 5
    assert lines[2] == f"#### {second}"


def test_half_of_the_guesses_are_right():
    rng = random.Random(0)
    guesses = [Habits(guess=1).target(BAGS, rng) for _ in range(1000)]
    assert all(re.fullmatch(r"#### \d+", guess) for guess in guesses)
    assert 0.45 < guesses.count("#### 7") / 1000 < 0.6


def test_model_has_the_documented_size_answers_better_than_chance_and_leaves_room():
    assert sum(p.numel() for p in model().parameters()) == PARAMETERS
    assert f"{PARAMETERS:,}" in (NANO / "README.md").read_text()
    problems = held_out()[:96]
    inputs = tokenizer()([chat(p.question) for p in problems], return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        output = model().generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    texts = tokenizer().batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(text.partition("####")[2].strip() == p.gold for text, p in zip(texts, problems))
    assert 0.3 < right / len(problems) < 0.65


def test_transformers_does_not_warn_of_texts_that_octet_measures_itself(monkeypatch):
    warned: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", warned.append)
    assert len(load_tokenizer(Model(name="nano"))("1 " * 300)["input_ids"]) > 256
    assert not warned
