"""The measurements in bench/: every script runs, none hides a package, and the pages of numbers are up to date."""

import importlib
import json
import re
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.commands.conftest import write
from tests.conftest import ROOT, launch, lines_of, setup_cfg, write_lines
from tests.ui.browser import found
from trainer.commands.main import parser_of
from trainer.config.request import parse_command_line

FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16"]
# What makes each script a matter of seconds. OUT stands for a file to write in place of the one in bench/results/.
OUT, ONCE, ONE_STEP = "--out=OUT", "--repetitions=1", ["--steps=1", "--out=OUT"]
SMOKE = {"answers": [ONCE], "first_page": [], "gpu_memory": ["--only=tiny bf16"], "plan": ["--only", "small"]}
SMOKE |= {name: ["--only", "tiny"] for name in ("counts_cuda_host", "memory_cuda_host")}
SMOKE |= {name: ["--rows=8", ONCE, OUT] for name in ("agents", "decode")}
SMOKE |= {"hours": [*ONE_STEP, "--rounds=1", "--only", "256 wide"], "scaling": [*ONE_STEP, "--rounds=1"]}
SMOKE |= {"step_cost": [*ONE_STEP, "--only", "usual"], "coverage": ["--studies=10", "--spread=0.5", OUT]}
SMOKE |= {"logprobs": ["--tokens=8", OUT], "page_cost": ["--minutes=0.05", OUT]}
SMOKE |= {"startup": ["--repeats=1", "--only=task show", OUT]}
SMOKE |= {"sandbox": ["--programs=4", ONCE, OUT], "soak": ["--steps=4", "--only=plain", OUT], "verdicts": [OUT]}
SMOKE |= {"serving": ["--engines=decode", "--steps=3", OUT], "versus": ["--steps=4", "--repeats=1", OUT, *FEW]}
SMOKE |= {"seeds": ["--seeds=1", OUT, "run.steps=1", "eval.problems=8", *FEW]}
WITH_TESTS = {"report", "short_gsm8k", "sometimes_right", "svamp"}  # of their own, below
MODULES = sorted(file.stem for file in (ROOT / "bench").glob("*.py"))
SCRIPTS = [name for name in MODULES if "__main__" in (ROOT / f"bench/{name}.py").read_text()]


def test_no_script_hides_a_package():
    """The folder of a script comes first on its path, so `bench/vllm.py` would be the `vllm` of every library."""
    setup = setup_cfg()
    requirements = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    named = {re.split(r"\W", line)[0] for lines in requirements for line in lines.split()}
    assert not set(MODULES) & {*sys.stdlib_module_names, *packages_distributions(), *named}
    assert sorted({*SMOKE, *WITH_TESTS}) == SCRIPTS


TIERS = {name: pytest.mark.cuda if name.endswith("cuda_host") else pytest.mark.slow for name in SMOKE}


@pytest.mark.parametrize("script", [pytest.param(name, marks=tier) for name, tier in TIERS.items()])
def test_a_script_runs(script, tmp_path):
    if script == "page_cost":
        found()  # skips without a browser
    for split in ("train", "test"):
        record = {"question": "What is 6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
        write_lines(tmp_path / f"{split}.jsonl", [record])
    arguments = [argument.replace("OUT", str(tmp_path / "out.json")) for argument in SMOKE[script]]
    results = {file: file.stat().st_mtime_ns for file in (ROOT / "bench/results").iterdir()}
    environment = {"OCTET_GSM8K": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    launch(sys.executable, f"bench/{script}.py", *arguments, check=True, **environment)
    assert results == {file: file.stat().st_mtime_ns for file in (ROOT / "bench/results").iterdir()}
    assert OUT not in SMOKE[script] or json.loads((tmp_path / "out.json").read_text())


def test_the_commands_whose_start_is_measured_are_taken(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    for words in importlib.import_module("startup").COMMANDS.values():
        command, *arguments = (word.format(run="run", out="out") for word in words)
        if command == "train":
            assert parse_command_line(arguments).config
        else:
            assert parser_of(command).parse_intermixed_args(arguments)


def test_the_problems_of_svamp_become_records(tmp_path):
    head = "Question,Numbers,Equation,Answer\n"
    row = '"He has $ number0 , they cost number1 .",9.0 2.5,/ - number0 4 number1,2\n'
    asked = [{"Body": "Dan had $ 3.", "Question": "How much? ", "Answer": 3.0}]
    write(tmp_path, {"data/mawps-asdiv-a_svamp/train.csv": head + row, "SVAMP.json": asked})
    launch(sys.executable, "bench/svamp.py", tmp_path, tmp_path, check=True)
    made = [json.loads((tmp_path / f"{split}.jsonl").read_text()) for split in ("train", "test")]
    assert made == [
        {"question": "He has $9, they cost 2.5.", "answer": "(9 - 4) / 2.5 = 2\n#### 2"},
        {"question": "Dan had $3. How much?", "answer": "3"},
    ]


def test_short_problems_of_gsm8k_have_equations_alone(tmp_path):
    solution = "He has 6 * 7 = $<<6*7=42>>42.\n2 of them are gone: 42 - 2 = <<42-2=40>>40.\n#### 40"
    records = [{"question": f"{n}?", "answer": solution} for n in range(257)]
    long = {"question": "long?", "answer": "\n".join(["<<1+1=2>>2"] * 4) + "\n#### 2"}
    for split, lines in (("train", [*records, long]), ("test", [long])):
        write_lines(tmp_path / f"{split}.jsonl", lines)
    made = tmp_path / "made"
    launch(sys.executable, "bench/short_gsm8k.py", tmp_path, made, "3", "equations", check=True)
    read = {split: lines_of(made / f"{split}.jsonl") for split in ("train", "valid", "test")}
    assert read["train"] == [{"question": "0?", "answer": "6*7=42\n42-2=40\n#### 40"}]
    assert [record["question"] for record in read["valid"]] == [f"{n}?" for n in range(1, 257)]
    assert read["test"] == [{"question": "long?", "answer": "1+1=2\n" * 4 + "#### 2"}], "all are held out"


def test_problems_that_are_solved_sometimes_are_kept(tmp_path):
    greedy = {"temperature": 0.0, "correct_strict": True}
    samples = {"always": [True, True], "never": [False, False], "sometimes": [True, False]}
    answers = [{"question": question, **greedy} for question in samples]
    for question, outcomes in samples.items():
        answers += [{"question": question, "temperature": 0.8, "correct_strict": right} for right in outcomes]
    write_lines(tmp_path / "eval_answers.jsonl", answers)
    problems = [{"question": question, "answer": "1"} for question in [*samples, "not asked"]]
    asked, kept = write_lines(tmp_path / "all.jsonl", problems), tmp_path / "kept.jsonl"
    launch(sys.executable, "bench/sometimes_right.py", asked, tmp_path, kept, check=True)
    assert lines_of(kept) == [{"question": "sometimes", "answer": "1"}]


def test_the_pages_and_figures_are_made_from_the_results(tmp_path):
    launch(sys.executable, "bench/report.py", "--out", tmp_path, check=True)
    made = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*.*")}
    tables = {f"bench/results/{name}.md" for name in ("learning", "memory", "scaling", "speed")}
    assert {*tables, "docs/teaching.svg"} <= made.keys()
    assert made == {name: (ROOT / name).read_text() for name in made}, "python bench/report.py"


def test_the_hardware_of_a_study_is_that_of_its_file():
    rows = [line.split(" | ") for line in (ROOT / "docs/results.md").read_text().splitlines() if "/studies/" in line]
    files = [ROOT / "docs" / row[-1].partition("(")[2].partition(")")[0] for row in rows]
    studies = [(row, json.loads(file.read_text())) for row, file in zip(rows, files) if file.parent.name == "studies"]
    assert len(studies) > 8
    assert [row[1] for row, found in studies if row[5].removesuffix("s") not in found["made_with"][1]] == []


def test_the_numbers_of_the_pages_are_those_of_the_results():
    code = "import sys; sys.path.insert(0, 'bench'); import json, report; print(json.dumps(report.claims()))"
    claims = json.loads(launch(sys.executable, "-c", code).stdout)
    assert len(claims) == 8
    for page, numbers in claims.items():
        text = " ".join((ROOT / page).read_text().split())
        assert numbers
        assert [number for number in numbers if number not in text] == [], page


def test_intervals_contain_the_truth_as_often_as_they_say():
    designs = json.loads((ROOT / "bench/results/coverage.json").read_text())["coverage"]
    assert min(one["coverage"] for one in designs) >= 0.93
    assert {one["of_seed"] for one in designs} == {0.0, 0.1, 0.2, 0.5}


def test_the_seconds_of_a_comparison_leave_out_the_first_two_steps(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    clock = importlib.import_module("versus").Clock()
    clock.ticks = [(0.0, float(end)) for end in (10, 16, 20, 23, 25)]
    assert clock.seconds(1) == [4, 3, 2]
