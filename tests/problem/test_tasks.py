"""What is read is right, every record of it, and what cannot be right is answered with the place where it stands."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, ran, refuses
from trainer.answers import compare, find, number
from trainer.config.paths import placed, stored
from trainer.config.resolve import resolve
from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.plan import downloads
from trainer.problem.own_records import gold_of
from trainer.problem.published import shuffled
from trainer.problem.sources import HubSet
from trainer.problem.task import evaluation_problems, make_task, normalised, training_problems

GPQA = {"Question": "Which gas do plants take in?", "Subdomain": "Botany", "Correct Answer": "carbon dioxide"}
GPQA |= {f"Incorrect Answer {number}": gas for number, gas in enumerate(("helium", "neon", "argon"), start=1)}
GPQA |= {"Explanation": "Photosynthesis turns it into sugar."}


def write(path: Path, *records) -> Path:
    lines = [one if isinstance(one, (str, bytes)) else json.dumps(one) for one in records]
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def word_problem(question: str, answer: object = "It is 3 + 4 = <<3+4=7>>7.\n#### 7") -> dict:
    return {"question": question, "answer": answer}


def task_of(name: str, **settings):
    return make_task(TaskSettings(name=name, **settings))


def read(path: Path, name: str = "records", **settings):
    """All problems of one file: everything is held out, so nothing is drawn at random."""
    return task_of(name, path=str(path), holdout=1.0, **settings).test()


def test_all_of_gsm8k_loads_and_every_gold_answer_is_a_number(gsm8k_folder):
    task = task_of("gsm8k", data_dir=gsm8k_folder)
    train, test = task.train(), task.test()
    assert (len(train), len(test), task.notes()) == (7473, 1319, [])
    for problem in train + test:
        assert number.number(problem.gold) is not None
        assert compare.equal(find.strict(problem.solution, "gsm8k"), problem.gold)
        assert "<<" not in problem.solution
    assert len({problem.id for problem in train + test}) == 8792


RECORDS = yaml.safe_load((ROOT / "tests/data/records.yaml").read_text())


@pytest.mark.parametrize("case", RECORDS, ids=lambda case: case["task"])
def test_a_record_becomes_the_problem_that_the_table_says(tmp_path, case):
    (problem,) = read(write(tmp_path / "a.jsonl", case["record"]), case["task"])
    found = json.dumps({key: getattr(problem, key) for key in case["becomes"]})
    assert json.loads(found) == case["becomes"]


def test_math_asks_for_a_box_and_has_a_second_opinion():
    assert (task_of("math").prompt_style, task_of("math").symbolic) == ("boxed", True)


def test_multiple_choice_names_the_letter_of_the_right_choice(tmp_path):
    problem = read(write(tmp_path / "a.jsonl", GPQA), "multiple_choice")[0]
    listed = dict(line.split(") ") for line in problem.question.splitlines()[2:])
    assert (list(listed), sorted(listed.values())) == (list("ABCD"), ["argon", "carbon dioxide", "helium", "neon"])
    assert listed[problem.gold] == "carbon dioxide"
    assert (problem.solution, problem.extra["Subdomain"]) == (GPQA["Explanation"], "Botany")


def test_the_order_of_choices_follows_from_the_problem_alone_and_favours_no_letter():
    first = Counter(shuffled(f"question {i}", ["right", "wrong", "false", "not"]).index("right") for i in range(2000))
    assert all(420 < first[place] < 580 for place in range(4))
    assert shuffled("q", ["a", "b", "c", "d"]) == shuffled("q", ["d", "b", "a", "c"])
    code = "from trainer.problem.published import shuffled; print(*shuffled('q', ['a', 'b', 'c', 'd']))"
    there = ran(sys.executable, "-c", code, check=True)
    assert there.stdout.split() == shuffled("q", ["a", "b", "c", "d"])


def test_a_held_out_question_is_not_trained_on_with_other_choices(tmp_path):
    asked_again = GPQA | {"Question": GPQA["Question"].upper(), "Incorrect Answer 1": "xenon"}
    write(tmp_path / "train.jsonl", asked_again, GPQA | {"Question": "Which gas do they give off?"})
    write(tmp_path / "test.jsonl", GPQA)
    task = task_of("multiple_choice", data_dir=tmp_path)
    assert [problem.stem for problem in task.train()] == ["Which gas do they give off?"]
    assert task.notes() == ["training problems left out because the test set asks them too: 1"]


def test_columns_of_choices_can_be_named_and_may_hold_lists(tmp_path):
    path = write(tmp_path / "a.jsonl", {"q": "2 + 2?", "right": 4, "wrong": [3, "5"]})
    settings = {"question": "q", "answer": "right", "incorrect": "wrong"}
    problem = read(path, "multiple_choice", **settings)[0]
    assert problem.extra["choices"]["ABC".index(problem.gold)] == "4"
    assert sorted(problem.extra["choices"]) == ["3", "4", "5"]


LISTED = [
    (["1", 2, "3"], 1, "2"),
    (["1", 2, "3"], "B", "2"),
    (["1", 2, "4"], "4", "4"),
    (["0", "1", "2"], "2", "2"),  # its own index
    (["one", "two", "three"], "1", "two"),  # as in HellaSwag
    (["A", "C", "B"], "A", "A"),
    (["1", 2, "3"], 1.0, "2"),  # as pandas writes a column in which one is missing
    ({"text": ["1", "2", "3"], "label": ["3", "1", "2"]}, "1", "2"),
    ({"text": ["4", "2", "5"], "label": [1, 2, 3]}, 2, "2"),
    ({"text": ["4", "2", "5"], "label": [0, 1, 0]}, 1, "2"),  # marks
    ({"text": ["2", "4", "5"], "label": [1, 0, 0]}, 0, "2"),
    ({"text": ["1", "2", "3"], "label": 3}, "B", "2"),
]


@pytest.mark.parametrize(("choices", "answer", "right"), LISTED)
def test_a_column_may_hold_all_choices_and_the_answer_name_one(tmp_path, choices, answer, right):
    path = write(tmp_path / "a.jsonl", {"question": "1 + 1?", "choices": choices, "answer": answer})
    problem = read(path, "multiple_choice", choices="choices")[0]
    assert problem.extra["choices"]["ABC".index(problem.gold)] == right
    assert len(problem.extra["choices"]) == 3


SETS = [
    ([(["1", "2", "3"], "2"), (["2", "3", "1"], "3")], ["2", "3"]),  # there is no index 3
    ([(["3", "1", "2"], "1"), (["one", "two", "three"], "two")], ["1", "two"]),
    ([(["1", "2", "3"], "1"), (["1", "2", "3"], "0"), (["1", "2", "3"], 2)], ["2", "1", "3"]),
    ([(["A", "AB", "B"], "B"), (["red", "blue", "green"], "C")], ["AB", "green"]),
    ([(["A", "AB", "B"], "B"), (["AB", "B", "A"], "AB"), (["1", "2", "0"], "7")], ["B", "AB"]),  # 7 is left out
    ([(["1", "2", "3"], "2"), (["2", "3", "1"], "1")], []),  # both are possible for all
    ([(["1", "2", "3"], "2"), (["red", "blue", "green"], "1"), (["4", "5", "6"], "6")], ["blue", "6"]),  # neither is
]


@pytest.mark.parametrize(("records", "rights"), SETS)
def test_all_answers_together_say_whether_a_number_is_a_text_or_a_place(tmp_path, records, rights):
    rows = [{"question": f"{place}?", "c": choices, "answer": one} for place, (choices, one) in enumerate(records)]
    path = write(tmp_path / "a.jsonl", *rows, "3")  # which is no record
    if not rights:
        with refuses(f"{path}:1", DataError):
            read(path, "multiple_choice", choices="c")
    else:
        problems = read(path, "multiple_choice", choices="c", on_bad_record="skip")
        assert [one.extra["choices"]["ABC".index(one.gold)] for one in problems] == rights


def test_the_same_records_come_out_of_every_format(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "a?", "answer": 0.4}, {"question": "b?", "answer": None}]
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.float32())])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "short.parquet")
    assert [one.gold for one in read(tmp_path / "short.parquet", on_bad_record="skip")] == ["0.4"]  # not 0.4000000059
    rows = [{"vraag": "Één?", "antwoord": "1", "n": "x"}, {"vraag": 'two,\n"twee"?', "antwoord": "2", "n": ""}]
    write(tmp_path / "a.jsonl", *rows)
    quoted = '\ufeffvraag,antwoord,n\r\nÉén?,1,x\r\n"two,\n""twee""?",2,\r\n'
    (tmp_path / "a.csv").write_bytes(quoted.encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    named = {"question": "vraag", "answer": "antwoord"}
    jsonl, csv, parquet = (read(tmp_path / f"a.{ending}", **named) for ending in ("jsonl", "csv", "parquet"))
    assert jsonl == csv == parquet
    assert [(problem.question, problem.gold) for problem in jsonl] == [("Één?", "1"), ('two,\n"twee"?', "2")]
    assert jsonl[0].extra == {"antwoord": "1", "n": "x"}
    del rows[1]["n"]  # of JSON lines that omit a column, rewards get None, as of a `datasets.Dataset`
    omitted = read(write(tmp_path / "b.jsonl", *rows[::-1]), **named)
    assert [one.extra for one in omitted] == [{"antwoord": "2", "n": None}, {"antwoord": "1", "n": "x"}]


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    """A folder with ten records in each form in which `datasets` writes several files, with two records to test on."""
    import datasets

    folder = tmp_path_factory.mktemp("sets")
    train, test = datasets.Dataset.from_list(many(10)), datasets.Dataset.from_list([GOOD, word_problem("better?")])
    train.save_to_disk(str(folder / "saved"))
    both = datasets.DatasetDict({"train": train, "test": test})
    both.save_to_disk(str(folder / "splits"), num_shards={"train": 2, "test": 1})
    for part in ("shards", "shards/data"):
        (folder / part).mkdir()
    for index in range(2):
        train.shard(2, index).to_parquet(folder / f"shards/data/train-0000{index}-of-00002.parquet")
    test.to_parquet(folder / "shards/data/test-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize(("path", "settings", "held_out"), [
    ("saved", {}, 3), ("splits", {}, 3), ("shards", {}, 3), ("shards/data/train-*.parquet", {}, 3),
    ("splits", {"test_split": "test"}, 2), ("shards", {"test_split": "test"}, 2),
    ("saved", {"test_path": "shards/data/test-*.parquet"}, 2), ("splits", {"split": "test", "test_path": "saved"}, 10),
])  # fmt: skip
def test_a_set_in_several_files_is_one(in_parts, monkeypatch, path, settings, held_out):
    monkeypatch.chdir(in_parts)
    task = task_of("records", path=path, **settings)
    of_train = 2 if settings.get("split") else 10
    assert (len(task.train()), len(task.test())) == (of_train - held_out * (not settings), held_out)
    kept = placed(stored({"task": {"path": path}}, in_parts / "run"), in_parts / "run")["task"]["path"]
    assert Path(kept) == in_parts / path


@pytest.mark.parametrize(("path", "settings", "key"), [
    ("saved", {"test_split": "test"}, "task.test_split"), ("splits", {"split": "dev"}, "task.path"),
    ("shards", {"split": "dev"}, "task.path"), ("shards/dev-*.parquet", {}, "task.path"),
])  # fmt: skip
def test_a_split_that_is_missing_is_refused(in_parts, monkeypatch, path, settings, key):
    monkeypatch.chdir(in_parts)
    with refuses(key, DataError):
        task_of("records", path=path, **settings).test()


def test_sets_of_the_same_split_in_one_folder_are_not_mixed(tmp_path):
    import datasets

    for more, part in enumerate(("main/train", "socratic/train", "main/test_sft", "main/test_gen")):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        rows = [word_problem(f"{part}, {index}?") for index in range(4 + more)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{part}-00000-of-00001.parquet")
    with refuses("task.path", DataError, names="main/train, socratic/train"):
        task_of("records", path=str(tmp_path)).train()
    with refuses("task.path", DataError, names="test_gen, test_sft"):
        task_of("records", path=str(tmp_path), subset="main", test_split="test").test()
    task = task_of("records", path=str(tmp_path), subset="main", test_split="test_sft")
    assert (len(task.train()), len(task.test())) == (4, 6)


def test_a_list_beside_answers_of_0_and_1_need_not_have_the_choices(tmp_path):
    lines = [{**word_problem(f"Is {n} odd?", str(n % 2)), "tags": ["sums", "easy", "new"]} for n in (3, 4)]
    assert [one.gold for one in read(write(tmp_path / "a.jsonl", *lines))] == ["1", "0"]


def test_a_row_of_parquet_that_python_cannot_read_is_a_bad_record(tmp_path):
    import pyarrow.parquet

    places = b"".join(place.to_bytes(4, "little") for place in range(3))
    columns = {
        "text": pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, *map(pyarrow.py_buffer, (places, b"a\xff"))]),
        "date": pyarrow.array([0, 2**62], pyarrow.timestamp("us")),
    }
    for name, column in columns.items():
        table = pyarrow.table({"question": ["good?", "bad?"], "answer": ["1", "2"], name: column})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with refuses(tmp_path / "a.parquet", DataError, names=f"row 1: column {name}"):
            read(tmp_path / "a.parquet")
        assert [one.question for one in read(tmp_path / "a.parquet", on_bad_record="skip")] == ["good?"]
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:4] + b"\xff" * 20 + content[24:])
    with refuses(tmp_path / "a.parquet", DataError, names="thrift"):  # what pyarrow says of a damaged page
        read(tmp_path / "a.parquet")


def test_a_long_value_of_a_csv_file_is_one_value(tmp_path):
    """The csv module's own limit is 131,072 characters; behind it, what follows would be read as rows."""
    question = "x" * 200_000 + "\nq?,7\n"
    (tmp_path / "a.csv").write_text(f'question,answer\n"{question}",8\n')
    (problem,) = read(tmp_path / "a.csv", on_bad_record="skip")
    assert (problem.question, problem.gold) == (question.strip(), "8")


@pytest.mark.parametrize("digits", [15, 309, 399])
def test_an_answer_may_be_a_whole_number_of_any_size(tmp_path, digits):
    line = f'{{"question": "How large?", "answer": {"7" * digits}, "level": 1{"0" * 400}}}'
    (problem,) = read(write(tmp_path / "a.jsonl", line))
    assert (problem.gold, problem.solution, problem.extra["level"]) == ("7" * digits, "", 10**400)


@pytest.mark.parametrize("answer, gold", [
    ("#### 3\n#### 4", "4"), ("#### 3 #### 4", "4"), ("\\boxed{6}\n#### 7", "7"), ("#### Step 1\n\\boxed{7}", "7"),
    ("#### \\boxed{7}", "7"), ("#### 7\nThanks!", "7"), ("\\boxed{3} or \\boxed{4}", "3, 4"), ("x + 1", "x + 1"),
    ("9 * 2 = 18\n#### 18", "18"), ("It is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), (" 1,000 ", "1,000"),
])  # fmt: skip
def test_the_last_mark_of_a_solution_has_its_gold_answer(tmp_path, answer, gold):
    """A data set and `octet score` agree."""
    (problem,) = read(write(tmp_path / "a.jsonl", word_problem("a?", answer)))
    assert problem.gold == gold_of(answer) == gold
    assert problem.solution == (answer if "#" in answer or "boxed" in answer else "")


def test_a_column_of_messages_that_holds_the_solution_is_said(tmp_path):
    """The prompt would hold the solution."""
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    path = write(tmp_path / "sft.jsonl", {"messages": talk, "answer": "4"})
    for settings, notes in ({}, 1), ({"solution": "messages"}, 0):
        task = task_of("records", path=str(path), question="messages", holdout=1.0, **settings)
        task.test()
        assert sum("write task.solution=messages" in note for note in task.notes()) == notes


def many(count: int) -> list[dict]:
    return [word_problem(f"What is {i} + 0?", f"#### {i}") for i in range(count)]


def test_a_held_out_share_never_meets_the_training_set(tmp_path):
    path = write(tmp_path / "a.jsonl", *many(200))
    task = task_of("records", path=str(path), holdout=0.25)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (150, 50)
    assert not {problem.id for problem in train} & {problem.id for problem in test}
    assert task_of("records", path=str(path), holdout=0.25).test() == test


def test_training_leaves_out_what_the_test_set_asks(tmp_path):
    write(tmp_path / "train.jsonl", *many(4), word_problem("  Cafe\u0301  oder TEE? "), word_problem("3 - 4?"))
    write(tmp_path / "test.jsonl", word_problem("CAF\u00c9 Oder\ttee?"), word_problem("3 + 4?"))
    task = task_of("gsm8k", data_dir=tmp_path)
    asked = {normalised(problem.question) for problem in training_problems(task, task.settings, seed=0)}
    assert asked == {*(normalised(one["question"]) for one in many(4)), "3 - 4?"}
    assert task.notes() == ["training problems left out because the test set asks them too: 1"]


def test_a_folder_with_a_test_set_alone_can_be_evaluated(tmp_path):
    write(tmp_path / "test.jsonl", *many(3))
    assert len(task_of("gsm8k", data_dir=tmp_path).test()) == 3


def test_the_seed_orders_and_the_limit_cuts(tmp_path):
    path = str(write(tmp_path / "a.jsonl", *many(100)))
    task = task_of("records", path=path)
    whole = training_problems(task, task.settings, seed=1)
    assert training_problems(task, TaskSettings(name="records", path=path, limit=7), seed=1) == whole[:7]
    assert sorted(problem.id for problem in whole) == sorted(problem.id for problem in task.train())
    assert training_problems(task, task.settings, seed=2) != whole
    assert evaluation_problems(task, 5) == evaluation_problems(task, 10)[:5]


GOOD = word_problem("good?")


@pytest.mark.parametrize(
    "bad", [{"question": "a?"}, "[" * 100_000, b'{"question": "caf\xe9?"}', word_problem("GOOD?  ", "#### 8")]
)
def test_a_bad_record_is_an_error_or_is_left_out_and_counted(tmp_path, bad):
    path = write(tmp_path / "a.jsonl", GOOD, "", bad)
    task = task_of("gsm8k", path=str(path), holdout=1.0, on_bad_record="skip")
    assert [problem.id for problem in task.test()] == ["gsm8k/held-out/0"]
    assert len(task.test()) == len(task.skipped) == 1
    assert task.notes()[-1].startswith(f"records left out: 1; the first: {path}:3: ")


def test_an_equal_record_is_only_left_out_and_counted(tmp_path):
    task = task_of("gsm8k", path=str(write(tmp_path / "a.jsonl", GOOD, word_problem("GOOD?  "))), holdout=1.0)
    assert (len(task.test()), len(task.skipped), task.bad) == (1, 1, 0)


def test_a_data_set_is_read_through_the_hub_library(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    talk = [{"role": "user", "content": "2 + 2?"}]
    write(folder / "train.jsonl", {"prompt": talk, "answer": "4"}, {"prompt": talk, "answer": "4"}, {"prompt": talk})
    task = task_of("records", path="owner/name", holdout=1.0, on_bad_record="skip")
    task.sources["train"] = HubSet(str(folder), None, "train")
    assert [list(problem.messages) for problem in task.test()] == [talk]
    (skipped, _) = task.skipped
    assert "train[1]: the question of" in skipped


def test_a_question_under_another_system_message_is_another(tmp_path):
    asked, told = {"role": "user", "content": "Hello?"}, ["Be kind.", "Be rude."]
    records = [{"prompt": [{"role": "system", "content": who}, asked], "answer": who} for who in told]
    assert [one.gold for one in read(write(tmp_path / "data.jsonl", *records))] == told


def test_a_published_set_may_ask_twice(monkeypatch):
    """Nobody here can mend it, so the repetition is counted even where bad records are errors."""
    import datasets

    rows = [word_problem("a?"), word_problem("A?", "#### 8"), word_problem("b?")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *named, **split: rows)
    task = task_of("gsm8k", path="owner/name", holdout=1.0)
    assert len(task.test()) == 2
    assert task.notes()[0].startswith("records left out: 1; the first: owner/name train[1]: ")


def test_a_short_decimal_of_the_hub_is_that_decimal(monkeypatch):
    import datasets

    grid = datasets.Array2D((1, 2), "float32")
    kinds = datasets.Features({"question": datasets.Value("string"), "answer": datasets.Value("float32"), "grid": grid})
    rows = datasets.Dataset.from_dict({"question": ["a?"], "answer": [0.4], "grid": [[[1.0, 2.0]]]}, kinds)
    monkeypatch.setattr(datasets, "load_dataset", lambda *named, **split: rows)
    assert [one.gold for one in task_of("records", path="owner/name", holdout=1.0).test()] == ["0.4"]


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError])
def test_a_hub_that_cannot_be_reached_is_answered(tmp_path, monkeypatch, kind):
    import datasets

    def unreachable(*named, **split):
        assert (named, split) == (("owner/name", "main"), {"split": "train"})
        raise kind("Couldn't reach 'owner/name' on the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    task = task_of("records", path="owner/name", subset="main", test_split="test")
    with refuses("owner/name train", DataError, names=f"{kind.__name__}: Couldn't reach 'owner/name' on the Hub)"):
        task.train()


@pytest.mark.parametrize(("name", "settings", "sets"), [
    ("nano", {}, []),
    ("gsm8k", {}, ["openai/gsm8k", "openai/gsm8k"]),
    ("math", {}, ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]),
    ("multiple_choice", {}, ["Idavidrein/gpqa", "Idavidrein/gpqa"]),
    ("records", {"path": "owner/name"}, ["owner/name"]),
    ("records", {"path": "owner/name", "test_split": "test"}, ["owner/name", "owner/name"]),
])  # fmt: skip
def test_what_a_task_reads_from_the_hub_is_known_beforehand(name, settings, sets):
    assert [one.name for one in task_of(name, **settings).hub_sets()] == sets


def test_a_missing_data_set_is_answered_before_anything_heavy(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with refuses("task.name", DataError, names="DigitalLearningGmbH/MATH-lighteval"):
        downloads.check(resolve("nano", None, ["task.name=math"]))
    for name in ("DigitalLearningGmbH___math-lighteval/default/0.0.0/0a", "HuggingFaceH4___math-500/default/0.0.0/0b"):
        (tmp_path / name).mkdir(parents=True)
        for split in ("train", "test"):
            (tmp_path / name / f"math-{split}.arrow").touch()
    downloads.check(resolve("nano", None, ["task.name=math"]))


def test_a_tenth_of_the_sums_is_held_out_and_all_are_right():
    task = task_of("addition")
    train, test = ({problem.question: problem for problem in part} for part in (task.train(), task.test()))
    assert (len({*train, *test}), 700 < len(test) < 900) == (8100, True)
    assert train["What is 22 + 40? Reply with the number only."].gold == "62"
    for name, problem in [*train.items(), *test.items()]:
        left, right = map(int, name.removeprefix("What is ").partition("?")[0].split(" + "))
        assert problem.gold == problem.solution == str(left + right)
