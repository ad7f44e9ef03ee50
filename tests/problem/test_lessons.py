"""Worked solutions as rows: what is taught, in which form, with which end, and which tokens are trained on."""

import json

import pytest

from tests.problem.test_prompts import WithoutTemplate
from trainer.batch.pack import to_tensors
from trainer.config.settings import PromptSettings, TaskSettings
from trainer.errors import DataError
from trainer.problem import lessons
from trainer.problem.lessons import LessonWriter, taught
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.records import Problem

PROBLEM = Problem("p/1", "What is 2 + 1?", "3", "2 + 1 = 3\n#### 3")
IM_END = "<|im_end|>"


@pytest.mark.parametrize(
    ("style", "solution", "text"),
    [
        ("gsm8k", "2 + 1 = 3\n#### 3", "2 + 1 = 3\n#### 3"),
        ("gsm8k", "2 + 1 = 3", "2 + 1 = 3\n#### 3"),
        ("gsm8k", "2 + 1 = 4\n#### 4", "2 + 1 = 4\n#### 4"),  # which the verifier refuses later
        ("boxed", "2 + 1 = 3\n#### 3", "2 + 1 = 3\n\\boxed{3}"),
        ("boxed", "So it is \\boxed{3}.", "So it is \\boxed{3}."),
        ("tags", "2 + 1 = 3\n#### 3", "2 + 1 = 3\n<answer>3</answer>"),
        ("letter", "It is the third.", "It is the third.\nAnswer: 3"),
    ],
)
def test_the_answer_stands_where_the_prompt_asks_for_it(style, solution, text):
    assert taught(Problem("p", "q", "3", solution), style) == text


def test_a_solution_closes_the_thought_that_the_prompt_has_opened():
    assert taught(PROBLEM, "tags", in_thought=True) == "2 + 1 = 3\n</think>\n<answer>3</answer>"


def test_what_has_no_gold_answer_is_taught_as_it_is():
    assert taught(Problem("p", "q", "", "Good morning!"), "gsm8k") == "Good morning!"


def written(tokenizer, problem=PROBLEM, stops=(), **settings):
    task = make_task(TaskSettings(name="nano"))
    prompter = Prompter(tokenizer, PromptSettings(**settings), task)
    prompt = prompter.prompt(problem)
    return prompt, LessonWriter(prompter, stops, prompter.stop_strings).row(prompt)


def test_a_row_is_the_prompt_and_the_answer_up_to_the_token_that_ends_a_turn(tokenizer):
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(IM_END)]
    prompt, row = written(tokenizer, stops=stops)
    assert row.prompt == prompt.tokens
    assert tokenizer.decode(row.completion) == f"2 + 1 = 3\n#### 3{IM_END}"
    assert (row.advantage, row.weight, set(row.logprobs), len(row.logprobs)) == (1.0, 1.0, {0.0}, len(row.completion))


def test_only_the_tokens_of_the_answer_are_trained_on(tokenizer):
    prompt, row = written(tokenizer)
    batch = to_tensors([row], tokenizer.pad_token_id)
    assert batch.targets_BT[batch.mask_BT].tolist() == list(row.completion)
    assert int((~batch.mask_BT).sum()) == len(prompt.tokens) - 1


def test_the_tokens_are_those_that_a_model_would_write_after_the_prompt(tokenizer):
    """As one text, not as two: the answer may begin with a space that the prompt does not end with."""

    class Plain(WithoutTemplate):
        eos_token_id = 2

    prompt, row = written(Plain(), stops=[2])
    assert prompt.text.endswith("Answer:")
    assert row.completion == (*map(ord, " 2 + 1 = 3\n#### 3"), 2)


def test_an_answer_that_a_string_ends_has_no_stop_token(tokenizer):
    _, row = written(tokenizer, stops=[tokenizer.eos_token_id], style="r1_zero")
    assert tokenizer.decode(row.completion) == " 2 + 1 = 3\n</think>\n<answer>3</answer>"


def test_no_solution_at_all_is_an_error_that_names_the_setting():
    task = make_task(TaskSettings(name="nano"))
    lessons.check(task, [Problem("p", "q", "3"), PROBLEM])
    with pytest.raises(
        DataError, match=r"none of its 1 training problems has a worked solution.*task\.solution=COLUMN"
    ):
        lessons.check(task, [Problem("p", "q", "3")])


def records(tmp_path, *rows, **settings):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task(TaskSettings(name="records", path=str(path), test_path=str(path), **settings))
    return task.test()


ASKS, SAYS = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": " Good morning! "}


def test_the_last_message_of_a_conversation_can_be_the_solution(tmp_path):
    (problem,) = records(tmp_path, {"messages": [ASKS, SAYS]}, question="messages", solution="messages", answer="none")
    assert (problem.messages, problem.solution, problem.gold) == ((ASKS,), "Good morning!", "")


def test_a_column_of_messages_can_be_the_solution(tmp_path):
    (problem,) = records(tmp_path, {"prompt": [ASKS], "completion": [SAYS], "answer": "7"}, solution="completion")
    assert (problem.messages, problem.solution, problem.gold) == ((ASKS,), "Good morning!", "7")


def test_a_conversation_in_which_nobody_answers_teaches_nothing(tmp_path):
    with pytest.raises(DataError, match="no conversation that ends with a message of the role `assistant`"):
        records(tmp_path, {"messages": [ASKS]}, question="messages", solution="messages", answer="none")
