"""The page about a run: what is on it, and that nothing a model wrote is more than text there."""

import io
import json
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest
import yaml

from tests.conftest import ROOT, lines_of, said_by, write_lines
from tests.reports.conftest import change, configure, going_on
from tests.ui.browser import browsing
from trainer.config.resolve import flat, resolve
from trainer.machine.safe_text import visible
from trainer.reports import command_of_run
from trainer.reports.curves import charts_of, groups_of
from trainer.reports.report import MOST_WRONG, ranked, report
from trainer.run_folder.reader import facts_of, read_run
from trainer.watch.measure import STRICT

SECTIONS = ["Curves", "Evaluation", "Alarms", "Problems gained and lost", "First and last answers", "Settings"]
SECTIONS[-1:] = ["Data", "Settings", "Time and memory", "How it was made"]


class Seen(HTMLParser):
    """Collects the elements of a page, their attributes, and the text of each element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def within(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def page_of(*folders) -> Seen:
    return Seen(report([read_run(folder) for folder in folders]))


def test_a_page_has_every_section_and_loads_nothing(finished):
    seen = page_of(finished)
    assert seen.within("h2")[2:] == SECTIONS
    assert seen.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.tags)
    assert not {"src", "href", "style", "onload"} & seen.attributes
    assert "base" in seen.within("th")
    assert seen.within("mark")
    assert any(text.startswith("step 6\nreward: ") for text in seen.within("title"))
    for beginning in ("octet-grpo ", "1 rank; ", "Most of the time goes to "):
        assert any(text.startswith(beginning) for text in seen.within("p"))


def test_a_page_opens_with_the_result_and_what_is_still_wrong(copied):
    folder = copied("result")
    change(folder / "data.json", notes=["records left out: 33."])
    run, text = read_run(folder), report([read_run(folder)])
    base, trained = (one["accuracy"] for one in run.evaluation["evaluations"][:2])
    gained = [flip for flip in run.flips() if flip["direction"] == "gained"]
    wrong = [one for one in run.greedy["trained"].values() if not one["correct_strict"]]
    seen = Seen(text)
    assert f"{base:.1%} → {trained:.1%}" in seen.within("p")
    assert seen.within("h2")[:2] == [f"Now right: {len(gained)}, 3 of them here", f"Still wrong: {len(wrong)}"]
    assert text.count("<details open") == 3
    assert "Records left out: 33." in seen.within("p")
    shown = (">accuracy<", "Now right", "Still wrong", ">mean reward<", ">loss<", ">norm of the gradient<")
    assert [*shown] == sorted(shown, key=text.index)
    cells = "</summary>.*?<td>(.*?)</td><td>(.*?)</td></tr>"
    shown = re.findall(cells, text[text.index("Still wrong") : text.index("<h2>Curves")], re.DOTALL)
    assert shown == [(one["strict"], one["gold"]) for one in wrong[:MOST_WRONG]]


READ = [("strict", None, "7", "7, in another format"), ("strict", None, None, "nothing")]
READ += [("lenient", None, "7", "7"), ("strict", "8", "7", "8")]


@pytest.mark.parametrize(("paid", "strict", "lenient", "said"), READ)
def test_a_wrong_answer_is_shown_as_it_was_read(copied, paid, strict, lenient, said):
    folder = copied("read")
    configure(folder, reward__answer=paid)
    wrong = {"correct_strict": False, "correct_lenient": False, "gold": "9"}
    change(folder / "eval_answers.jsonl", strict=strict, lenient=lenient, **wrong)
    cells = page_of(folder).within("td")
    assert cells[cells.index("9") - 1] == said


def test_what_a_model_wrote_is_text_on_the_page(finished, hostile):
    text = report([read_run(hostile)])
    seen = Seen(text)
    assert not set(seen.tags) - set(page_of(finished).tags)
    assert "onerror" not in seen.attributes
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2066\u200b\ud800]", text)
    for shown in ("<script>document.title='taken'</script>", "␛[31mred", "<U+202E>txet"):
        assert shown in "".join(seen.within("pre"))


COLOURS = {(0x3B, 0x82, 0xC4), (0xE0, 0x7B, 0x39), (0xF6, 0xF7, 0xF9)}  # of two curves, and of the style of the page


@pytest.mark.parametrize("which", ["finished", "hostile"])
def test_a_browser_shows_the_page_and_runs_nothing(which, request, tmp_path):
    from PIL import Image

    path, run = tmp_path / "page.html", read_run(request.getfixturevalue(which))
    path.write_text(text := report([run]), encoding="utf-8")
    with browsing(tmp_path) as browser:
        page = browser.open(path.as_uri(), 500, 1200)
        assert page.js("document.title") == f"{visible(run.name)}: Octet"  # a script would have changed it
        shown = [page.js(f"document.querySelectorAll('{tag}').length") for tag in ("svg", "h2")]
        assert shown == [Seen(text).tags.count(tag) for tag in ("svg", "h2")]
        with Image.open(io.BytesIO(page.picture())) as image:
            assert {colour for _, colour in image.convert("RGB").getcolors(2**20)} >= COLOURS
        assert page.complaints() == []


@pytest.mark.parametrize("name", ["eval.json", "eval_flips.jsonl", "samples.jsonl", "metrics.jsonl", "data.json"])
def test_a_page_without_one_of_the_files_or_with_a_part_of_it(copied, only_settings, name):
    path = copied("half") / name
    if path.suffix == ".jsonl":
        path.write_bytes(path.read_bytes()[:-9])  # as a crash leaves it
        assert page_of(path.parent).within("h2")[-len(SECTIONS) :] == SECTIONS
    path.unlink()
    assert page_of(path.parent).within("h2")[-len(SECTIONS) :] == SECTIONS
    seen = page_of(only_settings)
    assert (seen.within("h2"), seen.tags.count("svg")) == (SECTIONS, 0)
    assert "cannot tell" in seen.within("strong")
    assert page_of(only_settings, only_settings).within("td").count("none yet") == 4
    config = only_settings / "config.yaml"
    config.write_text(re.sub(r"(?<=eval:\n  problems: )\d+", "0", config.read_text()))
    assert page_of(only_settings, only_settings).within("td").count("-") == 4


def test_alarms_plans_and_values_that_are_not_numbers(copied):
    folder = copied("broken")
    base, *records = lines_of(folder / "metrics.jsonl")
    records[2] |= {"loss": float("nan"), "grad_norm": float("inf")}
    write_lines(folder / "metrics.jsonl", [base, *(record | {"empty": 0.9} for record in records)])
    (folder / "memory_plan.json").write_text('{"rollout": 5890000000}')
    text = report([read_run(folder)])
    assert not re.search("nan,|,inf", text)  # they are left out of the curves
    seen = Seen(text)
    assert ("planned at most" in seen.within("th"), "5.89 GB" in seen.within("td")) == (True, True)
    assert "energy of a card" not in seen.within("th")  # which nobody counted
    assert ("empty answers" in seen.within("strong"), ", since step 5" in seen.within("p")) == (True, True)


def test_several_runs_are_told_apart(finished, copied):
    other = copied("other")
    configure(other, algorithm__lr=0.002)
    seen = page_of(finished, other)
    assert seen.within("h2") == ["Results", "Different settings", "Curves", "demo", "other"]
    assert seen.within("code") == ["algorithm.lr"]
    assert {"0.003", "0.002"} <= set(seen.within("td"))
    assert "demo, algorithm.lr=0.003" in seen.within("li")
    configure(other, task__holdout=0.2)
    seen = page_of(finished, other)
    assert seen.within("h3") == ["Task nano", "Task nano"]
    assert "Runs with different tasks or rewards are not compared with each other." in seen.within("p")
    again = copied("demo")
    assert {str(finished), str(again)} <= set(page_of(finished, again).within("th"))


def test_runs_are_tested_on_the_problems_that_both_were_asked(finished, copied):
    other = copied("other")
    change(other / "eval_answers.jsonl", correct_strict=False)
    solved = sum(read_run(finished).worth(STRICT).values())
    seen = page_of(finished, other)
    assert "against demo, points" in seen.within("th")
    assert any(text.startswith(f"{-100 * solved / 32:+.1f} (") for text in seen.within("td"))


def test_a_page_opens_with_the_task_and_not_with_its_folder(copied):
    folder = copied("own")
    configure(folder, task__name="/home/me/dice.py:build")
    assert "nano on dice.py:build, " in report([read_run(folder)])


def test_problems_that_ask_the_same_are_all_compared(copied):
    """An environment that hides a number may ask every time: Guess it."""
    folder, other = copied("alike"), copied("other")
    for one in (folder, other):
        change(one / "eval_answers.jsonl", question="Guess it.", gold="")
    run = read_run(folder)
    assert len(run.worth(STRICT)) == len({one["problem"] for one in run.greedy["trained"].values()}) == 32
    assert run.worth(STRICT).keys() == read_run(other).worth(STRICT).keys()


def test_the_answers_that_are_paid_decide(copied):
    folder = copied("lenient")
    records = lines_of(folder / "metrics.jsonl")
    change(folder / "eval_answers.jsonl", correct_lenient=True)
    paid_more = [one | {"eval/lenient": 1.0} if "eval/accuracy" in one else one for one in records]
    write_lines(folder / "metrics.jsonl", paid_more)
    strict = read_run(folder)
    assert not all(strict.worth(strict.measure).values())
    assert facts_of(strict)["accuracy"] == records[-1]["eval/accuracy"]
    configure(folder, reward__answer="lenient")
    paid = read_run(folder)
    assert (all(paid.worth(paid.measure).values()), facts_of(paid)["accuracy"]) == (True, 1.0)
    paid_in_the_format = copied("in the format")
    change(paid_in_the_format / "eval_answers.jsonl", correct_lenient=True)
    ((_, (_, pair)),) = ranked([paid, read_run(paid_in_the_format)])
    assert (pair.gained, pair.lost) == (0, 0)  # the same answers, of which one format is compared
    assert facts_of(paid)["interval"] == pytest.approx([0.893, 1.0], abs=1e-3)
    assert charts_of(groups_of([paid]), "curves")[0].curves[1].values[-1].middle == 1.0


def test_a_resumed_run_shows_nothing_of_its_earlier_end(copied):
    folder = copied("resumed")
    (folder / "verdict.json").unlink()
    run = read_run(folder)
    assert (run.evaluation, run.worth(run.measure), run.flips()) == ({}, {}, [])


def test_a_page_does_not_forget_the_warm_up(copied, finished):
    folder = copied("taught")
    alone = facts_of(read_run(folder))["training_s"]
    shutil.copytree(finished, folder / "warmup", ignore=shutil.ignore_patterns("verdict.json"))
    configure(folder, warmup__steps=6)
    change(folder / "warmup/metrics.jsonl", empty=0.9)
    seen = "".join(page_of(folder).within("p"))
    assert "Its warm-up has made 6 of 6 steps; `base` is the model after it." in seen
    assert "Alarms of the warm-up: empty answers" in seen
    assert f"octet report {folder}/warmup" in page_of(folder).within("code")
    assert facts_of(read_run(folder))["training_s"] == pytest.approx(2 * alone)
    for name in ("metrics.jsonl", "verdict.json"):
        (folder / name).unlink()
    assert "0 of 6 steps, stopped after step 6, in its warm-up" in "".join(page_of(folder).within("p"))


def test_a_setting_that_is_newer_than_a_run_has_its_default(copied):
    folder = copied("older")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["rollout"]["weights"]
    config["reward"]["judge"]["cache"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = read_run(folder)
    assert (run.settings["rollout.weights"], run.settings["reward.judge.cache"]) == ("same", None)
    assert "rollout.weights" not in command_of_run.commands(run.given, [])[0]


def test_what_an_inline_calculator_writes_is_shown_once():
    text = report([read_run(ROOT / "gallery/calculator")])
    assert "<pre>8 * 6 =</pre>" not in text
    assert "8 * 6 = 48\n#### <mark>48</mark>" in text


def test_results_on_other_problems_are_no_part_of_a_curve_or_of_the_best(copied):
    """The run was resumed with another `eval.problems`."""
    folder = copied("resumed")
    base, *others = lines_of(folder / "metrics.jsonl")
    write_lines(folder / "metrics.jsonl", [base | {"eval/problems": 9, "eval/accuracy": 1.0}, *others])
    run = read_run(folder)
    assert [line["step"] for _, line in run.evaluated] == [3, 6]
    dots = [curve.values for curve in charts_of(groups_of([run]), "curves")[0].curves if curve.dots]
    assert [[value.step for value in values] for values in dots] == [[3, 6]]


def test_a_finished_run_that_was_asked_other_problems_since_shows_their_result(copied):
    """Its metrics stay as they were. Beside other runs, the earlier result would be that of other problems."""
    folder = copied("asked")
    before, after = json.loads((folder / "eval.json").read_text())["evaluations"]
    others = [before | {"problems": 64}, after | {"problems": 64, "accuracy": 0.25, "interval": [0.2, 0.3]}]
    change(folder / "eval.json", evaluations=others)
    run = read_run(folder)
    found = [facts_of(run)[name] for name in ("accuracy", "interval", "best", "problems")]
    assert (found, run.evaluated[1][0]) == ([0.25, [0.2, 0.3], 0.25, 64], (0.25, 0.2, 0.3))
    assert "held-out" not in str(charts_of(groups_of([run]), "curves")[0])


@pytest.mark.parametrize("is_deleted", [True, False])
def test_watching_ends_with_the_run_or_when_it_is_deleted(copied, tmp_path, capsys, monkeypatch, is_deleted):
    folder, page = copied("live"), tmp_path / "page.html"
    (folder / "verdict.json").rename(tmp_path / "verdict.json")

    def end(_: float) -> None:
        assert 'http-equiv="refresh"' in page.read_text(), "it reloads itself"
        shutil.rmtree(folder) if is_deleted else (tmp_path / "verdict.json").rename(folder / "verdict.json")

    monkeypatch.setattr("trainer.commands.report.time.sleep", end)
    with going_on(folder):
        status, _, err = said_by(capsys, "report", folder, "--watch", "--out", page)
    assert (status, str(folder) in err) == ((2, True) if is_deleted else (0, False))
    assert ('http-equiv="refresh"' in page.read_text()) is is_deleted


def test_a_page_has_one_verdict(copied):
    folder = copied("paid")
    flips = {"gained": 9, "lost": 1, "lenient": {"gained": 4, "lost": 3, "p": 0.5}}
    change(folder / "eval.json", comparisons=[read_run(folder).evaluation["comparisons"][0] | flips])
    assert report([read_run(folder)]).count("+25.0 points") == 2
    configure(folder, reward__answer="lenient")
    text = report([read_run(folder)])
    assert (text.count("+3.1 points"), "better:" in text) == (2, False)  # in the verdict and in the table


def repeated(settings) -> tuple[str, dict]:
    """Return the preset and the settings of the command that repeats a run."""
    (command,) = command_of_run.commands(settings, [])
    _, _, _, preset, *overrides = shlex.split(command)
    return preset, flat(resolve(preset, None, [*overrides, f"run.dir={settings['run.dir']}"]).model_dump(mode="json"))


def test_what_repeats_a_run_is_complete_and_makes_the_same_settings(finished):
    seen, settings = page_of(finished), read_run(finished).settings
    assert repeated(settings) == ("nano", settings)
    assert any("training problems, whose SHA-256 begins with" in text for text in seen.within("p"))
    without = flat(resolve("8gb", None, ["reward.weights.format=null", "run.dir=r"]).model_dump(mode="json"))
    assert repeated(without)[1] == without
    lines = command_of_run.commands(settings, ["octet-grpo 0.1.0, torch 2.13.0, git revision 163e3f3-dirty"])
    assert lines[0] == "git checkout 163e3f3   # in a clone of Octet, and changes that were not committed"
    assert command_of_run.commands(settings, ["peft 0.21.2, no git revision"]) == lines[1:]
    for evil in ("abc;touch${IFS}x", "`id`", "$(id)", "a|b", "--orphan", "a\tb", "a'b", "<b>", "a&b", ""):
        assert command_of_run.commands(settings, [f"octet 0, git revision {evil}"]) == lines[1:]


def test_the_command_names_the_page_and_what_is_no_run(finished, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert said_by(capsys, "report", finished, "--out", out) == (0, f"{out}\n", "")
    assert out.read_text().startswith("<!doctype html>")
    status, said, err = said_by(capsys, "report", tmp_path, out, finished, "--out", out)
    # a folder is left out, and a file passed over
    assert (status, said, err.count(str(tmp_path))) == (0, f"{out}\n", 1)
    assert said_by(capsys, "watch", tmp_path, out, finished)[2] == err


LARGE = "1" + "0" * 400


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "verdict.json", "machine.json"])
@pytest.mark.parametrize("command", ["report", "share", "plot", "compare", "watch"])
def test_whole_numbers_that_no_float_can_hold_are_infinite(copied, capsys, monkeypatch, name, command):
    monkeypatch.setenv("PATH", "")  # so that no browser makes a PNG
    folder = copied("large")
    text = re.sub(r"(?<=: )-?\d+(\.\d+)?(e-?\d+)?(?=[,}\n])", LARGE, (folder / name).read_text())
    (folder / name).write_text(re.sub(rf'"step": {LARGE}', '"step": 1', text))
    words = {"compare": ["compare", copied("another")], "watch": ["watch", "--once"], "share": ["report", "--share"]}
    status, _, err = said_by(capsys, *words.get(command, [command]), folder)
    assert status in (0, 2), err
    (folder / name).write_text('{"step": 1, "reward/mean": "a", "length": [], "completion": 7, "reward": "b"}\n')
    status, _, err = said_by(capsys, *words.get(command, [command]), folder)
    assert status == 0 or (status == 2 and f"{folder}" in err), err
