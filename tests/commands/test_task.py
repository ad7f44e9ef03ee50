"""octet task: what a person reads is what a model sees, and what they answer is rewarded as a model's answer is."""

import io
import json
import re

import pytest

from tests.conftest import said_by, write_lines
from tests.problem.test_environment import TRL
from trainer.config.settings import PromptSettings, TaskSettings
from trainer.plan.read_data import Data
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.run.data import report
from trainer.watch.screen import Screen

SOLUTION = "3 + 4 = <<3+4=7>>7\n#### 7"


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 6), ("test", 3)):
        rows = [{"question": f"{'Well, ' * i}what is {split} {i}?", "answer": SOLUTION} for i in range(count)]
        write_lines(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def test_json_is_what_the_prompter_makes(capsys, folder, tokenizer):
    (recipe := folder / "recipe.yaml").write_text("prompt: {max_tokens: 78}")
    arguments = ("gsm8k", "-n", "2", "--data-dir", str(folder), "--style", "boxed", "--json", "--recipe", str(recipe))
    code, out, _ = said_by(capsys, "task", "show", *arguments)
    facts = json.loads(out)
    task = make_task(TaskSettings(name="gsm8k", data_dir=folder))
    prompter = Prompter(tokenizer, PromptSettings(style="boxed"), task)
    prompts = {problem.id: prompter.prompt(problem) for problem in task.train()}
    lengths = sorted(len(prompt.tokens) for prompt in prompts.values())
    assert code == 0
    assert (facts["train"], facts["test"], facts["notes"]) == (6, 3, [])
    assert (facts["prompt_style"], facts["answer_style"], facts["model"]) == ("boxed", "boxed", "nano")
    shares = facts.pop("prompt_tokens")
    assert (shares["min"], shares["max"], shares["median"]) == (lengths[0], lengths[-1], (lengths[2] + lengths[3]) / 2)
    assert (shares["measured"], shares["limit"]) == (6, 78)
    assert 0 < shares["too_long"] == sum(length > 78 for length in lengths) < 6
    assert len(facts["problems"]) == 2
    for shown in facts["problems"]:
        prompt = prompts[shown["id"]]
        assert shown == {"id": shown["id"], "gold": "7", "tokens": len(prompt.tokens), "text": prompt.text}


@pytest.mark.parametrize("name", ["gsm8k", "task.name=gsm8k"])
def test_a_person_reads_the_exact_text(capsys, folder, name):
    code, out, err = said_by(capsys, "task", "show", name, "--data-dir", str(folder), "--split", "test", "-n", "9")
    assert (code, err) == (0, "octet: loading the tokenizer of nano\n")
    assert out.startswith("gsm8k: 3 held-out problems\nheld out: 3 problems, too few to show any gain\nanswers:\n")
    assert "\n        3  whole numbers       7\nprompt style gsm8k; a strict answer is the text after ####\n" in out
    assert "tokens of 3 test prompts for nano: min " in out
    assert "tokens, gold 7\n<|im_start|>user\nwhat is test 0?\n\nWork it out step by step." in out
    assert out.count("\n--- gsm8k/test/") == 3


def test_left_out_records_are_told(capsys, folder):
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"question": "what is test 0?", "answer": "#### 7"}\nbroken\n')
    code, out, _ = said_by(capsys, "task", "show", "gsm8k", "--data-dir", str(folder), "task.on_bad_record=skip")
    assert code == 0
    assert out.startswith("gsm8k: 6 training problems, 3 held-out problems\n")
    assert "training problems left out because the test set asks them too: 1\n" in " ".join(out.split("\n  "))
    assert "\nrecords left out: 1; the first of each kind:\n        1  train.jsonl:8: not JSON" in out


def test_a_run_tells_and_keeps_what_was_left_out(capsys, folder, tmp_path):
    with (folder / "train.jsonl").open("a") as file:
        file.write("broken\n")
    task = make_task(TaskSettings(name="gsm8k", data_dir=folder, on_bad_record="skip"))
    problems = list(task.train())
    data = Data(task, [*problems, *problems[:2]], [*problems, problems[0]])
    report(tmp_path, Screen(), data, problems, "1a2b3c4d" * 6, held_out=3)
    told = f"records left out: 1; the first: {folder}/train.jsonl:7: not JSON"
    out = capsys.readouterr().out
    assert out.startswith(f"data: {told}")
    assert "\ndata: training problems left out because they are longer than prompt.max_tokens: 2\n" in out
    assert "data: held-out problems left out because they exceed the context with an answer: 4\n" in out
    facts = json.loads((tmp_path / "data.json").read_text())
    assert facts.pop("notes")[0].startswith(told)
    assert (len(facts.pop("sha256")), len(facts.pop("checksums"))) == (64, 6 * 8)
    sizes = {"training_problems": 6, "held_out": 3, "test_problems": 3}
    assert facts == {"task": "gsm8k", **sizes, "in_words": False}


def test_text_answers_are_asked_for_with_a_text(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("question,answer\nCapital of Peru?,Lima\nCapital of Cuba?,Havana\nCapital of Iraq?,Bagdad\n")
    status, out, _ = said_by(capsys, "task", "show", "records", f"task.path={path}", "-n", "1")
    assert status == 0
    assert "like this:\n#### Paris<" in out
    path.write_text("question,answer\n1 + 1?,2\n2 + 2?,4\n")
    words, advice = (
        ["task", "show", "records", f"task.path={path}", "-n", "1"],
        "embedded model write prompt.style=chat",
    )
    out = said_by(capsys, *words)[1]
    assert ("like this:\n#### 42<" in out, advice in out) == (True, True)
    assert advice not in said_by(capsys, *words, "--style", "chat")[1]
    rows = ({"prompt": [{"role": "user", "content": f"{one} + 1?"}], "answer": one + 1} for one in range(9))
    talks = write_lines(tmp_path / "talks.jsonl", rows)
    out = said_by(capsys, *words, f"task.path={talks}")[1]  # which no style changes
    assert (advice in out, "note: conversations are asked as they are" in out) == (False, True)


def test_a_table_is_shown_where_the_model_is_not_on_this_machine(capsys, tmp_path):
    path = tmp_path / "table.json"
    path.write_text('[{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "n/a"}]')
    words = ["task", "show", "records", f"task.path={path}", "--model", str(tmp_path / "nowhere")]
    status, out, err = said_by(capsys, *words, "--json")
    assert (status, json.loads(out)["data"]["answers"]["no answer"]["count"]) == (2, 1)
    assert "model.name=" in err
    assert "no answer" in said_by(capsys, *words)[1]


def test_without_answers_no_mark_is_asked_for(capsys, tmp_path):
    path = tmp_path / "table.json"
    path.write_text('[{"question": "Hello?"}, {"question": "Why?"}, 3]')
    words = ["task", "show", "records", "--preset=8gb", "--model=nano", f"task.path={path}", "task.answer=none"]
    _, out, _ = said_by(capsys, *words, "task.on_bad_record=skip")
    assert "1  table.json[2]: it is a int: 3" in out
    assert "####" not in out
    assert "prompt style chat\n" in out


def play(monkeypatch, capsys, text: str, *options: str, task: str = "nano") -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return said_by(capsys, "task", "play", task, *options)


def test_a_right_and_a_wrong_answer(monkeypatch, capsys):
    """Each ends with a line of spaces at most, or with the input."""
    status, shown, said = play(monkeypatch, capsys, "\nLet me think.\n #### 0\n \nThe answer is 0")
    golds = re.findall(r"gold +'(\d+)'", shown)
    assert (status, said, len(golds)) == (0, "", 2)
    assert "  strict       '0' is wrong\n  lenient      '0' is wrong\n  correct         0.000  x 1" in shown
    assert "  strict       nothing found\n  lenient      '0' is wrong\n" in shown
    _, shown, _ = play(monkeypatch, capsys, f"So:\n#### {golds[0]}\n\nMore", "task.limit=1")  # as a run has it
    assert shown.count("gold ") == 1
    assert f"  strict       '{golds[0]}' is right" in shown
    assert "  reward          1.000" in shown
    assert "  overlong         none  x 0" in shown


def test_environments_are_closed_after_each_answer(monkeypatch, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Game:\n"
        "    def reset(self, problem): return None\n"
        "    def step(self, text): return 'on', text == 'end', 0.0\n"
        "    def close(self): print('closed')\n"
        "class Mine:\n"
        "    def train(self): return [{'question': f'Q{n}', 'answer': '1'} for n in range(9)]\n"
        "    def environment(self, problem): return Game()\n"
        "def build(settings): return Mine()\n"
    )
    status, shown, said = play(monkeypatch, capsys, "go\n\nend\n\ngo", task=f"{tmp_path / 'mine.py'}:build")
    assert (status, said.count("closed")) == (0, 2), shown


def test_functions_of_trl_are_called_by_a_person(monkeypatch, capsys, tmp_path):
    text = '<tool_call>{"name": "add", "arguments": {"amount": 3}}</tool_call>\n\nDone.'
    options = ("task.answer=none", "reward.weights={correct: 0, environment: 1}")
    (tmp_path / "mine.py").write_text(TRL)
    _, shown, said = play(monkeypatch, capsys, text, *options, task=f"{tmp_path / 'mine.py'}:build")
    start = int(re.search(r"Start: (\d+)", shown)[1])
    assert said == ""
    assert "add(amount): Add to the counter." in shown
    assert f"\n> {start + 3}\n" in shown
    assert f"  environment     {start + 3}.000  x 1" in shown


@pytest.mark.parametrize(("how", "told"), [("template", "<tool_call>{"), ("fenced", "```calculator\n")])
def test_a_person_calls_the_tools_of_the_settings(monkeypatch, capsys, how, told):
    text = {"template": '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'}
    text = text.get(how, "```calculator\n6*7\n```")
    _, shown, said = play(monkeypatch, capsys, f"{text}\n\nSo 42.", "task.tools=calculator", f"task.calls={how}")
    assert (said, told in shown, "\n> 42\n" in shown) == ("", True, True)
