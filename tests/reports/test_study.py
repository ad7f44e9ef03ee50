"""What a study says of its runs, whose files are written here so that the truth is known."""

import copy
import csv
import io
import json
import random
import re
import shutil
import sys

import pytest

from tests.conftest import launch, lines_of, refuses, said_by, write_lines
from tests.reports.conftest import configure
from tests.reports.test_plot import elements
from trainer.commands import study as command
from trainer.config.study import read_study
from trainer.errors import DataError, OctetError
from trainer.reports.chart import COLOURS, GREY
from trainer.reports.csv_and_latex import as_latex
from trainer.reports.study import Collected, _at, collect, curve, ended, gaps, is_enough, shares, summary
from trainer.reports.study_page import drawings, sections, sentences, tables
from trainer.run_folder.reader import read_run
from trainer.watch.measure import LENIENT

TEXT = """
settings: {run.steps: 4, eval.problems: 200, warmup.problems: 8}
seeds: 4
arms: {grpo: , small: {lora.r: 4}}
controls: [format, random, supervised]
"""
# the share of problems that each solves: strict, and in any format
TRUTH = {"base": (0.3, 0.5), "grpo": (0.8, 0.85), "small": (0.8, 0.85), "format": (0.55, 0.6), "random": (0.3, 0.5)}
TRUTH["supervised"] = (0.9, 0.9)
# The same study with a reward of 2 for each right answer, and of -1 for each other one.
OWN = "task: {name: records, path: a, answer: none}, reward.weights: {length: 1}"
REWARDED = TEXT.replace("run.steps: 4", f"run.steps: 4, {OWN}").replace("format, ", "")
RANGE = {"eval/low": 0.1, "eval/high": 0.95, "eval/problems": 200}


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TEXT)
    return read_study(tmp_path / "mine.yaml")


def end(study, name: str, truth: dict[str, tuple[float, float]] = TRUTH) -> None:
    """Write what a run leaves that has ended."""
    (run,) = (one for one in study.runs() if one.name == name)
    folder = study.folder / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("# octet-grpo 0.1.0\n" + study.config(run).to_yaml())
    trained = answered("trained", random.Random(f"{run.seed} {run.arm}"), *truth[run.arm])
    write_lines(folder / "eval_answers.jsonl", [*answered("base", random.Random(0), *truth["base"]), *trained])
    spent = {"tokens": 800.0} if run.arm == "supervised" else {"groups": 4.0, "length": 25.0}
    lines = [{"step": 0}, *({"step": step, "time/step": 2.0, **spent} for step in range(1, 5))]
    for line, model in ((lines[0], "base"), (lines[-1], run.arm)):
        line |= {"eval/accuracy": truth[model][0], "eval/lenient": truth[model][1], **RANGE}
        line |= {"eval/reward": 3 * truth[model][0] - 1}
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "verdict.json").write_text("{}")


def answered(model: str, rng: random.Random, strict: float, lenient: float):
    for problem in range(200):
        luck = rng.random()
        right = {"correct_strict": luck < strict, "correct_lenient": luck < lenient}
        asked = {"problem": f"gsm8k/test/{problem}", "question": f"{problem}?", "gold": "1"}
        yield {"model": model, "temperature": 0.0, **asked, **right, "reward": 3.0 * right["correct_strict"] - 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study of which all runs have ended, and what is found."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "mine.yaml").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        study = read_study(folder / "mine.yaml")
        for run in study.runs():
            end(study, run.name)
        return folder, summary(collect(study))


@pytest.fixture
def found(study, whole):
    shutil.copytree(whole[0] / "runs", "runs")
    return copy.deepcopy(whole[1])


def comparison(found, arm: str, against: str):
    (one,) = (one for one in found["comparisons"] if (one["arm"], one["against"]) == (arm, against))
    return one


def test_arms_are_judged_against_the_base_and_the_first_arm(found):
    against_base = {arm: comparison(found, arm, "base")["verdict"] for arm in found["arms"] if arm != "base"}
    assert against_base.pop("random") == "cannot tell"
    assert against_base == dict.fromkeys(["grpo", "small", "format", "supervised"], "better")
    assert comparison(found, "small", "grpo")["verdict"] == "cannot tell"
    assert comparison(found, "random", "grpo")["verdict"] == "worse"
    one = comparison(found, "grpo", "base")
    assert one["low"] < 0.5 < one["high"]
    assert one["strict"] == pytest.approx(0.5, abs=0.1)
    assert one["lenient"] == pytest.approx(0.35, abs=0.1)
    assert all(one["p_holm"] >= one["p"] for one in found["comparisons"])


@pytest.fixture
def rewarded(study):
    study.path.write_text(REWARDED)
    study = read_study(study.path)
    for run in study.runs():
        end(study, run.name)
    return study


def test_rewards_are_compared_as_accuracies_are_in_their_own_unit(rewarded):
    found = summary(collect(rewarded))
    rewarded.path.write_text(TEXT.replace("format, ", ""))
    shutil.rmtree("runs")
    study = read_study(rewarded.path)
    for run in study.runs():
        end(study, run.name)
    of_right = summary(collect(study))
    assert (found["span"], of_right["span"]) == (3.0, 1.0)
    for one, other in zip(found["comparisons"], of_right["comparisons"], strict=True):
        scaled = {key: 3 * other[key] for key in ("difference", "low", "high", "detectable")}
        assert [one[key] for key in scaled] == pytest.approx([*scaled.values()])
        assert [one[key] for key in ("p", "p_holm")] == pytest.approx([other[key] for key in ("p", "p_holm")])
        assert (one["arm"], one["verdict"], one["reward"]) == (other["arm"], other["verdict"], one["difference"])
    assert found["equal"]["samples"]["reward"]["grpo"] == pytest.approx(3 * (0.3 + 0.25 * 0.5) - 1)
    shares = [[one[key] for one in of["shares"] for key in ("share", "low", "high")] for of in (found, of_right)]
    assert shares[0] == pytest.approx(shares[1], abs=2e-3)


def test_what_is_said_of_rewards_has_no_word_and_no_unit_of_accuracies(rewarded, capsys):
    assert said_by(capsys, "study", rewarded.path, "--collect")[0] == 0
    said = [said_by(capsys, "study", rewarded.path, f"--{kind}")[1] for kind in ("tex", "csv", "collect")]
    text = re.sub(r"95 \\?%|of about 70 %|[^.]* of this gain[^.]*\.|corrected for", "", "".join(said))
    assert re.findall(r"%(?! [A-Z])|points|accurac\w*|strict|lenient|any format|right|correct", text) == []
    assert "Mean reward on held-out problems" in said[0]
    assert "reward,low,high,p,p_holm" in said[1]
    assert "in reward (95 % interval +1." in said[2]
    found = json.loads((rewarded.folder / "study.json").read_text())
    page = "".join(sections(found, collect(rewarded)))
    assert ("Differences in reward" in page, "points " in page) == (True, False)
    (marks, *_, title), _ = drawings(found)
    assert title == "reward against the untrained base, 95 % intervals"
    assert "+1" in [one.text for one in elements(marks, "text")]


def test_a_problem_without_a_reward_in_one_run_is_left_out(rewarded):
    path = rewarded.folder / "small-1/eval_answers.jsonl"
    *others, last = lines_of(path)
    write_lines(path, [*others, last | {"reward": None}])
    assert summary(collect(rewarded))["problems"] == 199
    write_lines(path, [one | {"reward": None} for one in lines_of(path)])
    with refuses(rewarded.folder, DataError, names="reward"):
        summary(collect(rewarded))


def test_a_run_whose_reward_has_other_code_is_named(rewarded):
    folder = rewarded.folder / "small-1"
    (folder / "machine.json").write_text('{"checksum of given/code/mine.py": "1a2b"}')
    with refuses(folder, DataError, names="code"):
        collect(rewarded)


def test_answers_in_any_format_decide_where_they_are_paid(study, found, monkeypatch):
    monkeypatch.setattr(Collected, "measure", LENIENT)
    of_lenient = summary(collect(study))
    one = comparison(of_lenient, "grpo", "base")
    assert (of_lenient["paid"], one["difference"]) == ("lenient", one["lenient"])
    assert of_lenient["equal"]["tokens"]["accuracy"]["grpo"] == TRUTH["grpo"][1]


def test_the_share_of_the_gain_that_a_control_reaches_is_named(study, found):
    reached = {one["control"]: one for one in found["shares"]}
    assert [*reached] == ["format", "random", "supervised"]
    assert reached["format"]["low"] < 0.5 < reached["format"]["high"]
    assert reached["format"]["share"] == pytest.approx(0.5, abs=0.1)
    assert reached["random"]["low"] < 0.0
    doubted = [one | {"verdict": "cannot tell"} for one in found["comparisons"]]
    assert [*shares(collect(study), doubted)] == []  # of a gain that was not found
    found["arms"]["grpo"]["settings"] = {"model.name": "<script>alert(1)</script>"}
    page = "".join(sections(found, collect(study)))
    assert ("Against the untrained base" in page, "<script>" in page) == (True, False)
    said = "\n".join(sentences(found))
    assert "The control format reaches" in said
    assert "The control random was not found to reach any of this gain" in said
    assert sentences(found)[0].startswith("grpo is better than the untrained base: +")
    assert "Controls reach a share of this gain: format " in sentences(found)[0]
    assert sentences(found)[0].endswith("No difference from grpo was found for small.")
    assert '<div class="verdict better">' in page
    assert "Worse than grpo, in points: format (-" in said
    assert "small and grpo: no difference was found. This study finds one of" in said


def test_controls_that_were_not_run_have_not_failed_to_reach_the_gain(found):
    """The first sentence says nothing of a control that has too few runs."""
    unknown = [{"control": one["control"]} for one in found["shares"]]
    assert "control" not in sentences(found | {"shares": unknown})[0].lower()
    assert "No control was found" in sentences(found | {"shares": [one | {"low": -0.1} for one in found["shares"]]})[0]


def test_costs_are_counted_and_compared_where_they_are_equal(found):
    assert [found["arms"]["grpo"][name] for name in ("samples", "tokens", "seconds")] == [128, 3200, 8]
    assert [found["arms"]["supervised"][name] for name in ("samples", "tokens")] == [32, 3200]
    assert found["equal"]["tokens"]["is_equal"]
    assert not found["equal"]["samples"]["is_equal"]
    at = found["equal"]["samples"]["accuracy"]  # after a quarter of the samples of grpo
    assert at["grpo"] == pytest.approx(0.3 + 0.25 * 0.5)
    assert at["supervised"] == pytest.approx(0.9)
    assert [point["step"] for point in found["runs"][0]["curve"]] == [0, 4]
    points = [({"samples": 10.0}, 0.5), ({"samples": 20.0}, 0.9)]
    assert (_at(15.0, "samples", points), _at(5.0, "samples", points)) == (pytest.approx(0.7), None)
    for said in ("All arms have spent the same tokens and seconds.", "The arms differ in cost: samples."):
        assert said in "\n".join(sentences(found))
    found["arms"]["grpo"]["tokens"] += 30
    assert "the same tokens and seconds, to within 1 %." in "\n".join(sentences(found))


def test_a_warm_up_counts_among_the_costs_of_its_run_and_has_no_point_in_the_curve(study, found):
    folder = study.folder / "grpo-0"
    shutil.copytree(folder, folder / "warmup")
    configure(folder, warmup__steps=1)
    lines = [{"step": 0, "eval/accuracy": 0.3}, {"step": 1, "tokens": 50.0, "time/step": 1.0, "eval/accuracy": 0.4}]
    write_lines(folder / "warmup/metrics.jsonl", lines)
    costs = [(line["step"], *cost.values()) for cost, line in curve(read_run(folder))]
    assert costs == [(0, 8, 50, 1), (4, 136, 3250, 9)]


def test_a_study_that_goes_on_is_judged_by_the_runs_that_have_ended(study, capsys):
    end(study, "small-0")
    with refuses("runs/mine", OctetError, names="grpo"):
        command._judge(study)
    for seed in range(2):
        end(study, f"grpo-{seed}")
    found = summary(collect(study))
    assert all("verdict" not in one for one in found["comparisons"])
    assert found["shares"] == []
    (rows,) = (rows for title, _, rows in tables(found) if title == "Against the untrained base")
    assert {row[-1] for row in rows} == {"not judged: 2 of at least 3 seeds", "not judged: 1 of at least 3 seeds"}
    assert "too few runs or problems for a verdict" in sentences(found)[0]
    assert "Against grpo, in points, without a verdict: small (" in sentences(found)[0]
    assert "None." not in "".join(sections(found, collect(study))).partition("<h2>Curves")[0]
    end(study, "grpo-2")
    status, said, _ = said_by(capsys, "study", study.path, "--collect")
    assert (status, "Against the untrained base" in said) == (0, True)
    stored = json.loads((study.folder / "study.json").read_text())
    assert {*stored["arms"]} == {"base", "grpo", "small"}
    assert len(stored["runs"]) == 4
    assert stored["missing"][:4] == ["format-0", "random-0", "supervised-0", "small-1"]  # in the order of seeds
    assert "without a result are left out: format-0, random-0, supervised-0, small-1," in " ".join(said.split())


def test_a_run_with_other_settings_is_named(study):
    end(study, "grpo-0")
    path = study.folder / "grpo-0/config.yaml"
    path.write_text(path.read_text().replace("problems: 200", "problems: 300"))
    verdict = study.folder / "grpo-0/verdict.json"
    verdict.rename(verdict.with_name("kept"))  # it has saved nothing, so it starts again
    assert ended(study, next(study.runs())) is None
    verdict.with_name("kept").rename(verdict)
    with refuses(study.folder / "grpo-0", DataError, names="eval.problems=200"):
        collect(study)
    end(study, "grpo-1")
    (study.folder / "grpo-1/metrics.jsonl").write_text("")
    (run,) = (one for one in study.runs() if one.name == "grpo-1")
    with refuses(study.folder / "grpo-1/metrics.jsonl", DataError):
        ended(study, run)


def test_the_control_supervised_has_the_tokens_of_the_first_arm_without_solutions_that_are_too_long(study):
    study.path.write_text(TEXT.replace("run.steps: 4", "run.steps: 4, rollout.max_new_tokens: 24"))
    short = read_study(study.path)
    end(short, "grpo-0")  # it has sampled 3,200 tokens
    (run,) = (one for one in short.runs() if one.name == "supervised-0")
    assert short.config(command._with_steps(short, run)).warmup.steps * 8 * 24 >= 3200


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("?", "!"), lambda text: "".join(text.splitlines(keepends=True)[:-3])]
)
def test_runs_on_other_problems_are_named(study, damage):
    end(study, "grpo-0")
    end(study, "grpo-1")
    path = study.folder / "grpo-1/eval_answers.jsonl"
    path.write_text(damage(path.read_text()))
    with refuses(path, DataError):
        summary(collect(study))


def test_a_base_that_knows_the_old_problems_is_named(study):
    """It solves 30 % of them, and 10 % with new numbers; training adds as much to both."""
    for seed in range(3):
        end(study, f"grpo-{seed}")
        (folder := study.folder / f"grpo-{seed}/renumbered").mkdir()
        models = (("base", "base", 0.1), ("adapter", "new", 0.6))
        answers = [one for name, key, share in models for one in answered(name, random.Random(key), share, share)]
        kept = (json.dumps(one) for one in answers if int(one["problem"].split("/")[-1]) >= 100)
        (folder / "eval_answers.jsonl").write_text("\n".join(kept))
    found = summary(collect(study))
    base, arm = found["gaps"]
    assert (base["arm"], base["problems"], arm["arm"]) == ("base", 100, "grpo")
    assert (base["old"], base["new"]) == (pytest.approx(0.3, abs=0.1), pytest.approx(0.1, abs=0.1))
    assert 0 < base["low"] < base["old"] - base["new"] < base["high"]
    gain = f"and {100 * (arm['new'] - base['new']):+.1f} with new numbers"
    for said in ("The base solves more of the old ones: it may have seen them", gain):
        assert said in "\n".join(sentences(found))
    (of_lenient,) = gaps({"base": collect(study).seeds("base").values()}, LENIENT)
    assert of_lenient["old"] == pytest.approx(0.5, abs=0.1)
    assert any("with new numbers" in title for title, _, _ in tables(found))


def test_a_run_that_has_warmed_up_has_the_base_of_its_warm_up(study):
    study.path.write_text("settings: {run.steps: 4, eval.problems: 200}\nseeds: 1\narms: {warm: {warmup.steps: 3}}")
    warm = read_study(study.path)
    end(warm, "warm-0", TRUTH | {"warm": (0.9, 0.9)})
    (run,) = warm.runs()
    folder = warm.folder / "warm-0"
    (folder / "warmup").mkdir()
    for name in ("metrics.jsonl", "verdict.json", "eval_answers.jsonl"):
        shutil.copy(folder / name, folder / "warmup")
    config, warmup = warm.config(run), folder / "warmup"
    (warmup / "config.yaml").write_text(config.warmed_up_in(warmup).to_yaml())
    (folder / "config.yaml").write_text(config.after_warmup(warmup).to_yaml())
    answers = [*answered("base", random.Random(1), 0.8, 0.8), *answered("trained", random.Random(2), 0.9, 0.9)]
    write_lines(folder / "eval_answers.jsonl", answers)
    assert summary(collect(warm))["arms"]["base"]["strict"][0] == pytest.approx(0.3, abs=0.1)  # and not 0.8
    (warmup / "config.yaml").write_text(config.warmed_up_in(warmup).to_yaml().replace("steps: 3", "steps: 5"))
    with refuses(folder, DataError, names="warmup.steps"):
        collect(warm)


def test_the_differences_are_drawn_with_their_intervals(found):
    of_base, of_first = drawings(found)
    marks, _, _, title = of_first
    assert title == "points against grpo, 95 % intervals"
    arms = [one.text for one in elements(marks, "text") if one.get("text-anchor") == "end"]
    assert arms == ["small", "format", "random", "supervised"]
    better, worse = COLOURS[:2]
    colours = [{one.get("fill") for one in elements(drawn[0], "circle")} for drawn in (of_base, of_first)]
    assert colours == [{GREY, better}, {GREY, worse}]
    zero = next(one for one in elements(marks, "polyline") if one.get("stroke-opacity") == "0.5")
    assert float(elements(marks, "circle")[1].get("cx")) < float(zero.get("points").partition(",")[0])  # format
    assert len(of_base[0]) > len(marks)


def test_the_results_are_printed_for_papers_and_for_other_programs(study, found, capsys):
    _, said, _ = said_by(capsys, "study", study.path, "--csv")
    lines = [*csv.DictReader(io.StringIO(said))]
    assert [float(one["p_holm"]) for one in lines] == [one["p_holm"] for one in found["comparisons"]]
    assert [(one["arm"], one["against"]) for one in lines][:2] == [("grpo", "base"), ("small", "base")]
    _, said, _ = said_by(capsys, "study", study.path, "--collect", "--tex")
    assert said.count("\\begin{tabular}") == said.count("\\end{tabular}") == len([*tables(found)])
    rows = [r"a\_b & 50 \% \\ \hline", r"x\&y & \{1\} \\"]
    assert as_latex("", ["a_b", "50 %"], [["x&y", "{1}"]]).splitlines()[2:4] == rows


def test_runs_of_a_study_import_no_module_of_the_working_folder(study):
    (study.path.parent / "trainer.py").write_text("")
    assert not command.Runner(study).train(next(iter(study.runs())))
    named = launch(sys.executable, "-c", "from octet import train", folder=study.path.parent)
    assert "trainer.py is called trainer" in named.stderr


@pytest.mark.parametrize(("status", "said"), [(129, "was stopped"), (143, "was stopped"), (2, "failed with status 2")])
def test_a_run_that_somebody_has_stopped_has_not_failed(status, said, study, monkeypatch, capsys):
    monkeypatch.setattr(command, "in_a_process", lambda words: ["bash", "-c", f"exit {status}"])
    assert command.Runner(study).train(next(iter(study.runs())))
    assert said in capsys.readouterr().out


def test_few_seeds_and_a_single_problem_are_not_enough():
    tables = [[[1.0, 0.0]] * 3, [[1.0, 0.0]] * 2, [[1.0]] * 5]
    assert [is_enough(table) for table in tables] == [True, False, False]
