"""The exact text that a model sees, in each style, with a chat template and without."""

from dataclasses import replace
from datetime import datetime

import pytest
import yaml
from transformers.utils import chat_template_utils

from tests.conftest import refuses, templated
from tests.rewarding import MadeUp
from trainer.answers import compare, find
from trainer.config.resolve import resolve
from trainer.config.sections.task import PROMPT_STYLES, PromptSettings
from trainer.errors import DataError
from trainer.problem import prompts
from trainer.problem.prompts import MARKS, STYLES, Prompter, begun, solved
from trainer.records import Problem

PROBLEM = Problem("p/1", "What is {a} + 1?", "3", "2 + 1 = 3\n#### 3")


SOLVED = [Problem(f"p/{i}", f"What is {i} + 0?", str(i), f"{i} + 0 = {i}\n#### {i}") for i in range(9)]
MADE = MadeUp(prompt_style="gsm8k", train=lambda: SOLVED, test=lambda: [PROBLEM])


class WithoutTemplate:
    """A tokenizer of a base model: characters, with a token for the beginning."""

    chat_template = None

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [1] * add_special_tokens + [ord(character) for character in text]}


def prompter(tokenizer, task=None, **settings) -> Prompter:
    return Prompter(tokenizer, PromptSettings(**settings), task or MADE)


def text(tokenizer, problem=PROBLEM, **settings) -> str:
    return prompter(tokenizer, **settings).prompt(problem).text


def test_every_style_can_be_named():
    assert set(PROMPT_STYLES) == {"auto", *STYLES}


def test_chat_is_the_question_in_the_template_of_the_model_behind_a_system_message(tokenizer):
    asked = "<|im_start|>user\nWhat is {a} + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert text(tokenizer, style="chat") == asked
    system = text(tokenizer, style="chat", system="Be {brief}.")
    assert system == f"<|im_start|>system\nBe {{brief}}.<|im_end|>\n{asked}"
    prompt = prompter(tokenizer).prompt(PROBLEM)
    assert list(prompt.tokens) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("style", "asked", "answer_style"), [
    ("auto", "after four hash marks, like this:\n#### 42", "gsm8k"),
    ("gsm8k", "after four hash marks, like this:\n#### 42", "gsm8k"),
    ("boxed", "within \\boxed{}.", "boxed"),
    ("letter", "like this:\nAnswer: B", "letter"),
])  # fmt: skip
def test_a_style_asks_for_the_answer_where_it_is_looked_for(tokenizer, style, asked, answer_style):
    asks = prompter(tokenizer, style=style)
    assert "user\nWhat is {a} + 1?\n\n" in asks.prompt(PROBLEM).text
    assert f"{asked}<|im_end|>" in asks.prompt(PROBLEM).text
    assert asks.answer_style == answer_style


def test_r1_zero_is_a_raw_text_that_opens_the_thinking(tokenizer):
    asks = prompter(tokenizer, style="r1_zero")
    said = asks.prompt(PROBLEM).text
    assert said.startswith("A conversation between User and Assistant.")
    assert said.endswith("\nUser: What is {a} + 1?\nAssistant: <think>")
    assert "<|im_start|>" not in said
    assert asks.answer_style == "tags"
    assert find.strict("so 3 </think> <answer> 3 </answer>", asks.answer_style) == "3"


def test_a_base_model_gets_its_first_token_and_plain_text():
    prompt = prompter(WithoutTemplate(), style="chat", system="Be brief.").prompt(PROBLEM)
    assert prompt.text == "Be brief.\n\nQuestion: What is {a} + 1?\nAnswer:"
    assert prompt.tokens[:3] == (1, ord("B"), ord("e"))
    raw = prompter(WithoutTemplate(), style="r1_zero", system="Be brief.").prompt(PROBLEM)
    assert raw.tokens[0] == 1
    assert raw.text.startswith("Be brief.\n\nA conversation")


def test_a_prompt_goes_on_after_the_end_that_a_tokenizer_adds():
    class Ends(WithoutTemplate):
        def __call__(self, text, add_special_tokens):
            return {"input_ids": super().__call__(text, add_special_tokens)["input_ids"] + [2] * add_special_tokens}

    asks = prompter(Ends(), style="chat")
    prompt = asks.prompt(PROBLEM)
    assert prompt.tokens == prompter(WithoutTemplate(), style="chat").prompt(PROBLEM).tokens
    assert asks.answer_tokens(prompt, "7") == (ord(" "), ord("7"))
    assert begun(WithoutTemplate(), "") == (1,)


def test_examples_are_solved_turns_before_the_question(tokenizer):
    said = text(tokenizer, style="few_shot", shots=2)
    turns = said.split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    number = turns[0].split()[3]
    assert turns[1] == f"assistant\n{number} + 0 = {number}\n#### {number}<|im_end|>\n"
    assert "What is {a} + 1?" in turns[4]


def test_examples_are_the_same_for_every_problem_and_never_the_problem_itself(tokenizer):
    asks = prompter(tokenizer, style="few_shot", shots=3)
    assert asks.prompt(PROBLEM) == prompter(tokenizer, style="few_shot", shots=3).prompt(PROBLEM)
    for problem in SOLVED:
        said = asks.prompt(problem).text
        assert (said.count(problem.question), said.count("<|im_start|>user")) == (1, 4)


def test_a_problem_that_its_environment_puts_in_other_words_is_not_its_own_example(tokenizer):
    asks = prompter(tokenizer, style="few_shot", shots=8)
    for problem in SOLVED:
        assert problem.solution not in asks.prompt(replace(problem, question="Begin.")).text


@pytest.mark.parametrize("style", MARKS)
def test_an_example_ends_with_a_strict_answer(style):
    for solution in ("", "It is\nso #### 7", "\\boxed{C}"):
        shown = solved(Problem("p", "q", "C", solution), style)
        assert compare.equal(find.strict(shown, style), "C")
        assert "7" not in shown  # another mark in the same example
    already = MARKS[style].format("C")
    assert solved(Problem("p", "q", "C", already), style) == already
    assert solved(Problem("p", "q", "", "It is so."), style) == "It is so."


def test_a_template_file_keeps_its_braces(tokenizer, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text('Réponds en JSON {"answer": {}} à {question}! {0} %s\n', encoding="utf-8-sig")  # as by Notepad
    asks = prompter(tokenizer, style=str(path), answer="tags")
    asked = 'Réponds en JSON {"answer": {}} à What is {a} + 1?! {0} %s'
    assert asks.prompt(PROBLEM).text == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert asks.answer_style == "tags"
    assert prompter(tokenizer, style=str(path)).answer_style == "gsm8k"  # the task's
    assert "user\nWhat is {question}?\n" in text(tokenizer, Problem("p", "What is {question}?", "1"))


@pytest.mark.parametrize(("asked", "style"), [
    ("End with \\boxed{}.", "boxed"), ("Write <answer>42</answer>.", "tags"), ("Answer: <answer>", "alone"),
    ("Write \\boxed{}, not <answer></answer>.", "alone"),  # the task's, because it names two
    ("End with #### 42, and not with \\boxed{}.", "alone"),
])  # fmt: skip
def test_a_template_file_says_where_the_answer_stands(tokenizer, tmp_path, asked, style):
    (tmp_path / "mine.txt").write_text(f"{{question}} {asked}")
    task = MadeUp(answer_style="alone")
    assert prompter(tokenizer, task, style=str(tmp_path / "mine.txt")).answer_style == style


def talk(*turns: tuple[str, str]) -> Problem:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Problem("p", "What?", "3", messages=messages)


@pytest.mark.parametrize("style", ["auto", "boxed", "r1_zero", "few_shot"])
def test_a_conversation_passes_untouched(tokenizer, style):
    problem = talk(("system", "Be kind."), ("user", " 1 + 2? "))
    said = text(tokenizer, problem, style=style, system="Be brief.")
    turns = ["", "system\nBe kind.<|im_end|>\n", "user\n 1 + 2? <|im_end|>\n", "assistant\n"]
    assert said.split("<|im_start|>") == turns
    plain = text(tokenizer, talk(("user", " 1 + 2? ")), style=style, system="Be brief.")  # without one of its own
    assert plain.split("<|im_start|>") == ["", "system\nBe brief.<|im_end|>\n", *turns[2:]]


def test_the_model_goes_on_with_a_turn_that_the_data_begins(tokenizer):
    said = text(tokenizer, talk(("user", "1 + 2?"), ("assistant", "Let me see:")))
    assert said.endswith("<|im_start|>assistant\nLet me see:")
    plain = text(WithoutTemplate(), talk(("user", "1 + 2?"), ("assistant", "Let me see:")))
    assert plain == "Question: 1 + 2?\nAnswer: Let me see:"


@pytest.mark.parametrize(("template", "told"), [
    ("{{ raise_exception('System role not supported') }}", "System role not supported"),
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "it did not end within 0.2 s"),
    ("{{ 1 // 0 }}", "integer division or modulo by zero"),
    ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ("{{ messages.x.y }}", "has no attribute"),
])  # fmt: skip
def test_a_template_that_does_not_end_or_refuses_the_messages_is_answered(tokenizer, monkeypatch, template, told):
    monkeypatch.setattr(prompts, "TEMPLATE_S", 0.2)
    with refuses("mine.csv:3", DataError, names=told):
        text(templated(tokenizer, template), replace(PROBLEM, where="mine.csv:3"), system="Be brief.")


@pytest.mark.parametrize("problem", [PROBLEM, talk(("system", "Be kind."), ("user", "1 + 2?"))])
def test_a_template_that_leaves_the_system_message_out_is_refused(tokenizer, problem):
    like_phi3 = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    with refuses(problem.id, DataError, names="system"):
        text(templated(tokenizer, like_phi3), problem, system="Be brief.")
    capitals = like_phi3 + "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    assert "BE " in text(templated(tokenizer, capitals), problem, system="Be brief.")


def test_a_template_that_names_the_day_writes_the_same_tomorrow(tokenizer, monkeypatch):
    dated = templated(tokenizer, "{{ strftime_now('%d %B %Y') }}")
    first = text(dated)

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2029, 5, 6, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    assert text(dated) == first == "01 January 2026"


@pytest.mark.parametrize(("style", "most_words"), [("chat", 10), ("again.txt", 1)])
def test_prompts_that_are_too_long_are_left_out(tokenizer, tmp_path, monkeypatch, style, most_words):
    """A question that a style repeats counts each time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "again.txt").write_text("{question}\n" * 6)
    problems = [Problem("p", "word " * count, "1") for count in (1, 7, 10, 100, 90)]
    asks = prompter(tokenizer, style=style, max_tokens=60)
    kept = asks.fitting(problems)
    assert kept == [one for one in problems if len(asks.prompt(one).tokens) <= 60]
    assert kept == [one for one in problems if one.question.count("word") <= most_words]
    long_talk = talk(("user", "word " * 100))  # its `question` is short
    assert asks.fitting([problems[0], long_talk]) == problems[:1]
    shortest = min(len(asks.prompt(problem).tokens) for problem in problems[3:])
    with refuses("prompt.max_tokens", DataError, names=f"Write ={shortest} or more"):
        asks.fitting(problems[3:])
    assert asks.fitting(problems[3:], shortest)


@pytest.mark.parametrize(("style", "templated", "stops"), [
    ("gsm8k", True, ()),  # the chat template has a token for the end of a turn
    ("gsm8k", False, ("\nQuestion:",)),
    ("few_shot", False, ("\nQuestion:",)),
    ("r1_zero", True, ("</answer>", "\nUser:")),  # written without the template
    ("r1_zero", False, ("</answer>", "\nUser:")),
])  # fmt: skip
def test_an_answer_ends_where_a_base_model_would_ask_itself_the_next_question(tokenizer, style, templated, stops):
    one = tokenizer if templated else WithoutTemplate()
    assert Prompter(one, PromptSettings(style=style), MADE).stop_strings == stops
    begins = text(one, style=style).rpartition(PROBLEM.question)[0]
    assert all(begins.endswith(stop.removeprefix("\n") + " ") for stop in stops if stop.endswith(":"))


THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_variables_reach_the_chat_template_and_the_run_folder(tokenizer):
    thinking = templated(tokenizer, THINKING)
    assert text(thinking, style="chat").endswith("<assistant>")
    assert text(thinking, style="chat", template={"enable_thinking": False}).endswith("<assistant><think></think>")
    for written in ("prompt.template={enable_thinking: false}", "prompt.template.enable_thinking=false"):
        config = resolve("nano", None, [written])
        assert yaml.safe_load(config.to_yaml())["prompt"]["template"] == {"enable_thinking": False}


@pytest.mark.parametrize("name", ["enable_thinkin", "role", "for", "shown", "raise_exception"])
def test_a_variable_that_the_chat_template_does_not_read_is_an_error(tokenizer, name):
    own = "{% set shown = 1 %}{% generation %}" + THINKING + "{% endgeneration %}"
    own += "{% for m in messages %}{% continue %}{{ raise_exception(reasoning_effort) }}{% endfor %}"
    with refuses("prompt.template", names="enable_thinking, reasoning_effort"):
        prompter(templated(tokenizer, own), template={name: False})
    with refuses("prompt.template"):
        prompter(WithoutTemplate(), template={name: False})
