"""The measurements in bench/: every script runs, none hides a package, and the pages of numbers are up to date."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.conftest import ROOT

FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16"]
# What makes each script a matter of seconds. OUT stands for a file to write in place of the one in bench/results/,
# FOLDER for that of the test.
SMOKE = {
    "answers": ["--repetitions=1"],
    "coverage": ["--studies=10", "--spread=0.5", "--out=OUT"],
    "counts_cuda_host": ["--only", "tiny"],
    "decode": ["--rows=8", "--repetitions=1", "--out=OUT"],
    "gpu_memory": ["--only=tiny bf16"],
    "hours": ["--steps=1", "--rounds=1", "--only", "256 wide", "--out=OUT"],
    "logprobs": ["--tokens=8", "--out=OUT"],
    "memory_cuda_host": ["--only", "tiny"],
    "plan": ["--only", "small"],
    "report": ["--out=FOLDER"],
    "sandbox": ["--programs=4", "--repetitions=1", "--out=OUT"],
    "scaling": ["--steps=1", "--rounds=1", "--out=OUT"],
    "seeds": ["--seeds=1", "--out=OUT", "run.steps=1", "eval.problems=8", *FEW],
    "soak": ["--steps=4", "--only=plain", "--out=OUT"],
    "serving": ["--engines=decode", "--steps=3", "--out=OUT"],
    "step_cost": ["--steps=1", "--only", "usual", "--out=OUT"],
    "verdicts": ["--out=OUT"],
    "vs_trl": ["--steps=4", "--repeats=1", "--out=OUT", *FEW],
}
MODULES = sorted(file.stem for file in (ROOT / "bench").glob("*.py"))
SCRIPTS = [name for name in MODULES if "__main__" in (ROOT / f"bench/{name}.py").read_text()]


def test_no_script_hides_a_package():
    """The folder of a script comes first on its path, so `bench/vllm.py` would be the `vllm` of every library."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    requirements = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    named = {re.split(r"\W", line)[0] for lines in requirements for line in lines.split()}
    assert not set(MODULES) & {*sys.stdlib_module_names, *packages_distributions(), *named}


def test_every_script_has_its_short_form():
    assert sorted(SMOKE) == SCRIPTS


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=pytest.mark.cuda if name.endswith("cuda_host") else pytest.mark.slow)
        for name in SCRIPTS
    ],
)
def test_a_script_runs(script, tmp_path):
    record = json.dumps({"question": "What is 6 * 7?", "answer": "6 * 7 = 42\n#### 42"})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{record}\n")
    names = {"OUT": str(tmp_path / "out.json"), "FOLDER": str(tmp_path)}
    arguments = [re.sub("OUT|FOLDER", lambda found: names[found[0]], argument) for argument in SMOKE[script]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OCTET_GSM8K": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    results = {file: file.stat().st_mtime_ns for file in (ROOT / "bench/results").iterdir()}
    command = [sys.executable, f"bench/{script}.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    assert results == {file: file.stat().st_mtime_ns for file in (ROOT / "bench/results").iterdir()}
    if "--out=OUT" in SMOKE[script]:
        assert json.loads(Path(tmp_path / "out.json").read_text())


def test_the_pages_and_figures_are_made_from_the_results(tmp_path):
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "bench/report.py", "--out", str(tmp_path)], cwd=ROOT, env=path, check=True)
    made = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*.*")}
    tables = {f"bench/results/{name}.md" for name in ("learning", "memory", "scaling", "speed")}
    assert {*tables, "docs/teaching.svg"} <= made.keys()
    assert made == {name: (ROOT / name).read_text() for name in made}, "python bench/report.py"


def printed(code: str) -> str:
    """Return what a line of Python prints that can import the scripts."""
    code = f"import sys; sys.path.insert(0, 'bench'); import page_results, page_scaling, report; {code}"
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=path, capture_output=True, text=True, check=True
    ).stdout


def test_the_numbers_of_the_pages_are_those_of_the_results():
    claims = json.loads(printed("print(report.json.dumps(report.claims()))"))
    assert len(claims) == 7
    for page, numbers in claims.items():
        text = " ".join((ROOT / page).read_text().split())
        assert numbers
        assert [number for number in numbers if number not in text] == [], page


def test_a_section_is_left_out_where_nothing_was_measured(tmp_path):
    results = shutil.copytree(ROOT / "bench/results", tmp_path / "results")
    for name in ("step_cost.json", "coverage.json", "verdicts.json", "studies/ablations.json"):
        (results / name).unlink(missing_ok=True)
    elsewhere = f"page_results.RESULTS = page_scaling.RESULTS = page_results.Path({str(results)!r}); "
    made = printed(f"{elsewhere} print(page_results.page(), page_scaling.page())")
    sections = [line for line in made.splitlines() if line.startswith("## ")]
    assert {"## The right reward and its controls", "## A second rank, measured"} < {*sections}
    assert not {"## What a step costs, measured", "## What changes the result"} & {*sections}


def test_the_page_says_how_often_intervals_contain_the_truth_and_how_much_real_seeds_differ():
    made = " ".join(printed("print('\\n'.join(page_results._coverage()))").split())
    designs = json.loads((ROOT / "bench/results/coverage.json").read_text())["coverage"]
    shares = [one["coverage"] for one in designs]
    assert f"They do in {min(shares):.1%} to {max(shares):.1%}. Of {len(shares)} designs, 0 lie below 93%" in made
    assert min(shares) >= 0.93
    assert f"{sum(share > 0.97 for share in shares)} above 97%" in made
    assert {one["of_seed"] for one in designs} == {0.0, 0.1, 0.2, 0.5}
    assert "A spread of 0.5, in 1 of the designs, is about 8 points at 50 %." in made
    assert re.search(r"real seeds, .*: right [\d.]+, .*shuffled_gold [\d.]+, .* points\.", made)


def test_the_page_of_scaling_says_what_is_left_out():
    made = " ".join(printed("print(page_scaling.page())").split())
    assert "| efficiency, at most |" in made
    scaling = json.loads((ROOT / "bench/results/scaling.json").read_text())
    assert f"Medians of {scaling['rounds']} rounds of {scaling['steps']} steps" in made
    assert ("It cannot be less than 0" in made) == (scaling["lost_s"]["waiting and sending"] < 0)
    assert "follows from the 32 answers that the H100 was measured with" in made


def test_the_pages_name_the_card_and_repetitions_and_the_studies():
    made = printed("print(report.page(), page_results.page())")
    h100 = "on one NVIDIA H100 80GB HBM3 and 16 cores"
    assert f"bf16 256 --json` {h100}" in made
    for name in ("addition", "gsm8k", "teaching", "calculator"):
        assert f"Made by an earlier program; `octet study bench/studies/{name}.yaml` repeats the experiment." in made
        assert (ROOT / f"bench/studies/{name}.yaml").is_file()
    assert "| without | 0 |" in made
    assert "Medians of 7 repetitions. `python bench/answers.py" in made
    assert re.search(r"mean over \d+ seeds", made)
