"""Worked solutions as rows: what is taught, in which form, with which end, and which tokens are trained on."""

from types import MappingProxyType

import numpy
import pytest

from tests.conftest import refuses, write_lines
from tests.problem.test_prompts import WithoutTemplate
from trainer.batch.pack import to_tensors
from trainer.config.resolve import resolve
from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.problem.environment import environments_of
from trainer.problem.own_records import conversation
from trainer.problem.prompts import Prompter, must_have_solutions, taught
from trainer.problem.sources import Record
from trainer.problem.task import make_task
from trainer.records import Problem
from trainer.reward.make import make_verifier
from trainer.rollout.turns import Stops
from trainer.run.teaching import LessonWriter, rows_of

PROBLEM = Problem("p/1", "What is 2 + 1?", "3", "2 + 1 = 3\n#### 3")
IM_END = "<|im_end|>"


@pytest.mark.parametrize(("style", "solution", "text"), [
    ("gsm8k", "2 + 1 = 3\n#### 3", "2 + 1 = 3\n#### 3"),
    ("gsm8k", "2 + 1 = 3", "2 + 1 = 3\n#### 3"),
    ("gsm8k", "2 + 1 = 4\n#### 4", "2 + 1 = 4\n#### 4"),  # which the verifier refuses later
    ("boxed", "2 + 1 = 3\n#### 3", "2 + 1 = 3\n\\boxed{3}"),
    ("boxed", "So it is \\boxed{3}.", "So it is \\boxed{3}."),
    ("tags", "2 + 1 = 3\n#### 3", "2 + 1 = 3\n<answer>3</answer>"),
    ("letter", "It is the third.", "It is the third.\nAnswer: 3"),
    ("alone", "2 + 1 = 3\n#### 3", "3"),
])  # fmt: skip
def test_the_answer_stands_where_the_prompt_asks_for_it(style, solution, text):
    assert taught(Problem("p", "q", "3", solution), style) == text


def test_a_solution_closes_an_open_thought_and_one_without_a_gold_answer_is_taught_as_it_is():
    assert taught(PROBLEM, "tags", closing="</think>") == "2 + 1 = 3\n</think>\n<answer>3</answer>"
    assert taught(Problem("p", "q", "", "Good morning!"), "gsm8k") == "Good morning!"


def all_written(tokenizer, problems, *settings, stops=()):
    config = resolve("nano", None, settings)
    task = make_task(config.task)
    prompter = Prompter(tokenizer, config.prompt, task, environments_of(task, config.task))
    ends = Stops(tokenizer, stops, (*prompter.stop_strings, *config.rollout.stop))
    writer = LessonWriter(config.rollout.turns, prompter, ends)
    return prompter, rows_of(problems, writer, make_verifier(config, task).rules)


def written(tokenizer, problem=PROBLEM, *settings, stops=()):
    prompter, (row,) = all_written(tokenizer, [problem], *settings, stops=stops)
    return prompter.prompt(problem), row


def test_a_row_is_the_prompt_and_the_answer_up_to_the_token_that_ends_a_turn(tokenizer):
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(IM_END)]
    prompt, row = written(tokenizer, stops=stops)
    assert row.prompt == prompt.tokens
    assert tokenizer.decode(row.completion) == f"2 + 1 = 3\n#### 3{IM_END}"
    assert (row.advantage, row.weight, set(row.logprobs), len(row.logprobs)) == (1.0, 1.0, {0.0}, len(row.completion))
    batch = to_tensors([row], tokenizer.pad_token_id)
    assert batch.targets_BT[batch.mask_BT].tolist() == list(row.completion)
    assert int((~batch.mask_BT).sum()) == len(prompt.tokens) - 1


def test_the_tokens_are_those_that_a_model_would_write_after_the_prompt(tokenizer):
    """As one text, not as two: the answer may begin with a space that the prompt does not end with."""

    class Plain(WithoutTemplate):
        eos_token_id, added_tokens_decoder = 2, MappingProxyType({})

        def decode(self, tokens):
            return "".join(chr(token) for token in tokens if token > 2)

    prompt, row = written(Plain(), stops=[2])
    assert prompt.text.endswith("Answer:")
    assert row.completion == (*map(ord, " 2 + 1 = 3\n#### 3"), 2)


def test_an_answer_that_a_string_ends_has_no_stop_token(tokenizer):
    _, row = written(tokenizer, PROBLEM, "prompt.style=r1_zero", stops=[tokenizer.eos_token_id])
    assert tokenizer.decode(row.completion) == " 2 + 1 = 3\n</think>\n<answer>3</answer>"


def test_a_thought_that_a_chat_template_opens_ends_with_its_own_mark(tokenizer, monkeypatch):
    opens = "{% if add_generation_prompt %}<thinking>{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + opens)
    _, row = written(tokenizer, PROBLEM, "prompt.style=tags", stops=[tokenizer.eos_token_id])
    assert tokenizer.decode(row.completion).startswith("2 + 1 = 3\n</thinking>\n<answer>3</answer>")


INLINE = ["task.tools=calculator", "task.calls=inline"]


@pytest.mark.parametrize(("solution", "settings", "written_by_model", "told"), [
    ("2 + 1 = 3\n#### 3", INLINE, ["2 + 1 =", "\n#### 3" + IM_END], [" 3"]),
    ("2 + 1=$3.00 each.\n1,000 * 2 = 2,000, so", INLINE,
     ["2 + 1=", " each.\n1,000 * 2 =", ", so\n#### 3" + IM_END], [" 3", " 2000"]),
    ("6 / 4 = 1.5 * 2 =3", INLINE, ["6 / 4 =", " * 2 =", "\n#### 3" + IM_END], [" 1.5", " 3"]),
    ("It is x = 3.", INLINE, ["It is x = 3.\n#### 3" + IM_END], []),
    ("2 + 1 = 3", [*INLINE, "prompt.style=boxed"], ["2 + 1 =", "\n\\boxed{3}" + IM_END], [" 3"]),
    ("It is \\boxed{2 + 1 = 3}", [*INLINE, "prompt.style=boxed"], ["It is \\boxed{2 + 1 =", "}" + IM_END], [" 3"]),
    ("So \\boxed{3}\nas 2 + 1 = 3.", ["prompt.style=boxed", 'rollout.stop=["\\n"]'], ["So \\boxed{3}\n"], []),
])  # fmt: skip
def test_an_inline_calculator_replies_in_a_lesson(monkeypatch, tokenizer, solution, settings, written_by_model, told):
    monkeypatch.setattr("trainer.machine.threads.begin", None)  # a thread would take longer than the reply
    problem = Problem("p/1", "What is 2 + 1?", "3", solution)
    _, row = written(tokenizer, problem, *settings, stops=[tokenizer.convert_tokens_to_ids(IM_END)])
    parts = {True: "", False: ""}
    for token, is_own in zip(row.completion, row.mask, strict=True):
        parts[is_own] += tokenizer.decode([token])
    assert (parts[True], parts[False]) == ("".join(written_by_model), "".join(told))
    batch = to_tensors([row], tokenizer.pad_token_id)
    own = [token for token, is_own in zip(row.completion, row.mask, strict=True) if is_own]
    assert batch.targets_BT[batch.mask_BT].tolist() == own


@pytest.mark.parametrize(("solution", "gold", "settings"), [
    ("2 + 1 = 3\n#### 3", "3", ['rollout.stop=["\\n"]']),
    ("2 + 1 = 3\n#### 3", "3", ['rollout.stop=["="]']),
    ("Hello.\nWho is there?", "", ['rollout.stop=["\\n"]']),
    ("1 / 3 = 0.33\n#### 3", "3", INLINE),
    ("2 + 1 = three\n#### 3", "3", INLINE),
    ("2 + 1 = 4\n#### 4", "3", INLINE),
    ("1 + 1 = 2\n2 + 1 = 3\n#### 3", "3", [*INLINE, "rollout.turns.most=2"]),
])  # fmt: skip
def test_what_would_be_taught_without_its_answer_is_left_out(tokenizer, solution, gold, settings):
    assert all_written(tokenizer, [Problem("p/1", "What is 2 + 1?", gold, solution)], *settings)[1] == []


def test_no_solution_at_all_is_an_error_that_names_the_setting():
    task = make_task(TaskSettings(name="nano"))
    must_have_solutions(task, [Problem("p", "q", "3"), PROBLEM])
    with refuses("task.name", DataError, names="task.solution=COLUMN"):
        must_have_solutions(task, [Problem("p", "q", "3")])


def records(tmp_path, *rows, **settings):
    path = tmp_path / "data.jsonl"
    write_lines(path, rows)
    task = make_task(TaskSettings(name="records", path=str(path), test_path=str(path), **settings))
    return task.test()


def test_a_record_without_a_solution_is_read(tmp_path):
    rows = [{"question": f"{text}?", "answer": "7", "sol": text} for text in ("", "It is 7.")]
    rows.insert(0, {"question": "none?", "answer": "7"})  # JSON lines may omit a column
    assert [one.solution for one in records(tmp_path, *rows, solution="sol")] == ["", "", "It is 7."]


def test_held_out_problems_need_no_column_of_solutions_and_training_problems_do(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_lines(train, [{"question": "a?", "answer": "7"}, {"question": "b?", "answer": "7", "sol": "It is 7."}])
    write_lines(test, [{"question": "c?", "answer": "7"}])
    own = TaskSettings(name="records", path=str(train), test_path=str(test), solution="sol")
    for order in (["train", "test"], ["test", "train"]):
        task = make_task(own)
        read = {split: [one.solution for one in getattr(task, split)()] for split in order}
        assert read == {"train": ["", "It is 7."], "test": [""]}


ASKS, SAYS = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": " Good morning! "}


def test_the_last_message_of_a_conversation_or_a_column_of_messages_can_be_the_solution(tmp_path):
    in_one = {"question": "messages", "solution": "messages", "answer": "none"}
    (problem,) = records(tmp_path, {"messages": [ASKS, SAYS]}, **in_one)
    assert (problem.messages, problem.solution, problem.gold) == ((ASKS,), "Good morning!", "")
    for prompt in ([ASKS], (ASKS,)):
        assert conversation(Record("", {"prompt": numpy.array(prompt)}), "prompt") == (ASKS,)  # as pandas makes it
    (problem,) = records(tmp_path, {"prompt": [ASKS], "completion": [SAYS], "answer": "7"}, solution="completion")
    assert (problem.messages, problem.solution, problem.gold) == ((ASKS,), "Good morning!", "7")
