"""octet task show: what a person reads is what a model sees."""

import json

import pytest

from tests.conftest import refuses
from trainer.commands import main as cli
from trainer.config.settings import PromptSettings, TaskSettings
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task

SOLUTION = "3 + 4 = <<3+4=7>>7\n#### 7"


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 6), ("test", 3)):
        rows = [{"question": f"{'Well, ' * i}what is {split} {i}?", "answer": SOLUTION} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def octet(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["task", "show", *arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_json_is_what_the_prompter_makes(capsys, folder, tokenizer):
    arguments = ("gsm8k", "-n", "2", "--data-dir", str(folder), "--style", "boxed", "--json", "prompt.max_tokens=78")
    code, out, _ = octet(capsys, *arguments)
    facts = json.loads(out)
    task = make_task(TaskSettings(name="gsm8k", data_dir=folder))
    prompter = Prompter(tokenizer, PromptSettings(style="boxed"), task)
    prompts = {problem.id: prompter.prompt(problem) for problem in task.train()}
    lengths = sorted(len(prompt.tokens) for prompt in prompts.values())
    assert code == 0
    assert (facts["train"], facts["test"], facts["notes"]) == (6, 3, [])
    assert (facts["prompt_style"], facts["answer_style"], facts["model"]) == ("boxed", "boxed", "nano")
    assert facts["prompt_tokens"] == {
        "min": lengths[0],
        "median": (lengths[2] + lengths[3]) / 2,
        "max": lengths[-1],
        "measured": 6,
        "limit": 78,
        "too_long": sum(length > 78 for length in lengths),
    }
    assert 0 < facts["prompt_tokens"]["too_long"] < 6
    assert len(facts["problems"]) == 2
    for shown in facts["problems"]:
        prompt = prompts[shown["id"]]
        assert shown == {"id": shown["id"], "gold": "7", "tokens": len(prompt.tokens), "text": prompt.text}


def test_a_person_reads_the_exact_text(capsys, folder):
    code, out, err = octet(capsys, "gsm8k", "--data-dir", str(folder), "--split", "test", "-n", "9")
    assert (code, err) == (0, "octet: loading the tokenizer of nano\n")
    assert out.startswith("gsm8k: 3 held-out problems\nprompt style gsm8k; a strict answer is what stands after ####\n")
    assert "tokens of 3 test prompts for nano: min " in out
    assert "tokens, gold 7\n<|im_start|>user\nwhat is test 0?\n\nWork it out step by step." in out
    assert out.count("\n--- gsm8k/test/") == 3


def test_left_out_records_are_told(capsys, folder):
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"question": "what is test 0?", "answer": "#### 7"}\nbroken\n')
    code, out, _ = octet(capsys, "gsm8k", "--data-dir", str(folder), "task.on_bad_record=skip")
    assert code == 0
    assert out.startswith("gsm8k: 6 training problems, 3 held-out problems\n")
    assert "data: training problems left out because the test set asks them too: 1\n" in out
    assert f"data: bad records left out: 1; the first: {folder}/train.jsonl:8: not JSON" in out


def test_bad_data_is_answered_before_a_tokenizer_is_looked_for(capsys, folder):
    (folder / "train.jsonl").write_text("broken\n")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")  # it looks like a model, and has no tokenizer
    (model / "model.safetensors").touch()
    code, out, err = octet(capsys, "gsm8k", "--data-dir", str(folder), "--model", str(model))
    assert (code, out) == (2, "")
    assert err.startswith(f"octet: {folder}/train.jsonl:1: not JSON: ")
    assert "Traceback" not in err


def test_a_run_tells_and_keeps_what_was_left_out(capsys, folder, tmp_path):
    from trainer.plan.data import Data
    from trainer.run.data import report
    from trainer.watch.screen import Screen

    with (folder / "train.jsonl").open("a") as file:
        file.write("broken\n")
    task = make_task(TaskSettings(name="gsm8k", data_dir=folder, on_bad_record="skip"))
    problems = list(task.train())
    report(tmp_path, Screen(), Data(task, [*problems, *problems[:2]], [*problems, problems[0]]), problems, asked=3)
    told = f"bad records left out: 1; the first: {folder}/train.jsonl:7: not JSON"
    out = capsys.readouterr().out
    assert out.startswith(f"data: {told}")
    assert "\ndata: training problems left out because they are longer than prompt.max_tokens: 2\n" in out
    assert "data: held-out problems left out because they exceed the context with an answer: 4\n" in out
    facts = json.loads((tmp_path / "data.json").read_text())
    assert facts.pop("notes")[0].startswith(told)
    assert len(facts.pop("sha256")) == 64
    assert len(facts.pop("checksums")) == 6 * 8
    assert facts == {"task": "gsm8k", "training_problems": 6, "held_out": 3, "test_problems": 3}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gsm9k"], "task.name=gsm9k: there is no task gsm9k. Did you mean gsm8k?"),
        (["records"], "Write task.path=FILE or task.data_dir=FOLDER"),
        (["nano", "--style", "chatty"], "Did you mean chat?"),
        (["records", "task.path=owner/name"], "owner/name train is not in the cache"),
    ],
)
def test_mistakes_are_answered(capsys, arguments, told):
    code, _, err = octet(capsys, *arguments)
    assert code == 2
    assert told in err


def test_bad_data_ends_a_run_before_its_folder_is_made(monkeypatch, tmp_path):
    from trainer.config.command_line import Request, resolve
    from trainer.errors import DataError
    from trainer.run import assemble

    (tmp_path / "a.jsonl").write_text('{"vraag": "2 + 2?", "answer": 4}\n')
    settings = ["task.name=records", f"task.path={tmp_path}/a.jsonl", f"run.dir={tmp_path}/run"]
    monkeypatch.setattr(assemble, "load_tokenizer", pytest.fail)
    monkeypatch.setattr(assemble, "load_model", pytest.fail)
    with pytest.raises(DataError, match=r"a\.jsonl:1: there is no column `question`"):
        assemble.build(Request(resolve("nano", None, settings), "nano", ""))
    lines = [json.dumps({"question": f"question {index}", "answer": "two\nlines"}) for index in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with refuses("task.name", DataError, names="answers"):
        assemble.build(Request(resolve("nano", None, settings), "nano", ""))
    assert not (tmp_path / "run").exists()
