"""The files that a project is known by: those of GitHub, the citation, and pages that name versions and files."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from bench import first_page
from scripts import make_sbom
from tests.conftest import ROOT, launch, setup_cfg
from trainer import __version__

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PAGES = ("README.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "CHANGELOG.md")
GALLERY = sorted((ROOT / "gallery").glob("*.md"))
MARKDOWN = [*(ROOT / name for name in PAGES), *(ROOT / "docs").glob("*.md"), *GALLERY, *GITHUB.rglob("*.md")]
OF_A_RUNNER = {"git", "pip", "python"}


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert str(citation["version"]) == __version__
    assert citation["license"] == setup_cfg()["metadata"]["license"]


def test_the_changelog_begins_with_this_version():
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert re.fullmatch(rf"## {re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", first)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_is_there(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    commands = [line for run in runs for line in run.splitlines() if line.strip()]
    assert commands
    for first in (line.split()[0] for line in commands):
        assert first in OF_A_RUNNER or shutil.which(first) or (ROOT / first).stat().st_mode & 0o100, first


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_only_unless_a_job_says_so(workflow):
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    for job in document["jobs"].values():
        assert "timeout-minutes" in job
        assert all(re.fullmatch(r"\S+@\S+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_every_supported_python_is_tried():
    jobs = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]
    versions = jobs["quick"]["strategy"]["matrix"]["python"]
    assert versions == re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])
    assert setup_cfg()["options"]["python_requires"] == f">={versions[0]}"
    assert f"| Python | {versions[0]} to {versions[-1]} " in (ROOT / "docs/supported.md").read_text()
    assert f"Python {versions[0]} to {versions[-1]};" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_what_is_supported_has_the_versions_of_the_lock():
    page = (ROOT / "docs/supported.md").read_text()
    lock = (ROOT / "constraints.txt").read_text()
    for name, label in (("torch", "torch"), ("deepspeed", "DeepSpeed"), ("transformers", "transformers")):
        pins = re.findall(rf"^{name}==(\d+\.\d+)", lock, flags=re.MULTILINE)
        assert f"{label} {pins[-1]}" in page
        assert all(pin in page for pin in pins)


def test_hooks_run_what_the_development_environment_has():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    programs = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert programs == {"ruff", "mypy"}
    assert programs <= set(setup_cfg()["options.extras_require"]["dev"].split())
    assert all((Path(sys.executable).parent / program).exists() for program in programs)


@pytest.mark.parametrize("template", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.md")), ids=lambda path: path.name)
def test_a_template_has_a_head_that_github_reads(template):
    head, _, body = template.read_text().removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(head).keys() == {"name", "about", "title", "labels"}
    assert body.strip()


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [link for link in links if not re.match(r"\w+:", link) and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", ["first_issues.md", "decisions.md"])
def test_files_that_a_page_names_are_there(page):
    named = re.findall(r"`((?:trainer|tests|bench|examples|docs)/[\w./]+)`", (ROOT / "docs" / page).read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_first_page_is_short_and_its_numbers_have_a_file():
    page = (ROOT / "README.md").read_text()
    assert page.count("\n") <= 110
    seeds = json.loads((ROOT / "bench/results/seeds.json").read_text())
    assert f"at least +{100 * seeds['least_gain']:.1f} points" in page
    assert f"{seeds['runs'][0]['base']:.1%} -> {seeds['runs'][0]['trained']:.1%} of 512 held-out problems" in page
    evidence = (ROOT / "docs/evidence_memory.md").read_text().replace("\n", " ")
    assert "On an H100 the plan lies between 1 % below and 7 % above" in evidence
    assert "| 5 to 8 times |" in (ROOT / "docs/evidence.md").read_text()
    card = json.loads((ROOT / "bench/results/cards/NVIDIA-H100-80GB-HBM3.json").read_text())
    cases = card["parts"]["rehearsals"]["result"]
    off = [one["planned"][phase] / one["allocated"][phase] for one in cases for phase in one["allocated"]]
    off += [one["planned_reserved"] / one["reserved"] for one in cases]
    assert f"{100 - 100 * min(off):.0f} % below to {100 * max(off) - 100:.0f} % above" in page
    assert "5 to 8 times as fast" in page


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_pictures_of_the_first_page_load_nothing_and_are_as_drawn(name):
    page = (ROOT / "README.md").read_text()
    for picture in ("first_run", "first_curve"):
        drawn = (ROOT / f"docs/{picture}_{name}.svg").read_text()
        assert f"docs/{picture}_{name}.svg" in page
        named = set(re.findall(r"https?://[^\s\"')]+", drawn))
        assert named <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert (ROOT / f"docs/first_curve_{name}.svg").read_text() == first_page.of_curve(name)


@pytest.mark.parametrize("page", [page for page in GALLERY if page.name != "README.md"], ids=lambda page: page.name)
def test_a_page_of_the_gallery_is_on_its_first_page_and_has_what_a_reader_looks_for(page):
    text = page.read_text()
    assert f"]({page.name})" in (ROOT / "gallery/README.md").read_text()
    assert f"gallery/{page.name}" in (ROOT / "mkdocs.yml").read_text()
    if page.name != "speedrun.md":
        rows = re.findall(r"^\| (\w+) \| \S", text, re.MULTILINE)
        assert [row for row in ("model", "settings", "time", "adapter", "files") if row not in rows] == []
        assert len(re.findall(r"^    octet ", text, re.MULTILINE)) == 1  # tests/commands/test_printed.py reads it
        assert re.search(r"^!\[[^]]+\]\(\S+\.svg\)$", text, re.MULTILINE)
        assert "**Learned**: " in text


def test_the_page_of_all_pages_has_them():
    """Pages of evidence are on the page of that name, which links to them."""
    index = (ROOT / "docs/index.md").read_text() + (ROOT / "docs/evidence.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([\w.]+\.md)", index)) == set()


def test_the_bill_lists_every_package_of_the_lock():
    document = json.loads(launch(sys.executable, "-m", "scripts.make_sbom").stdout)
    assert (document["bomFormat"], document["specVersion"], document["version"]) == ("CycloneDX", "1.6", 1)
    listed = {f"{one['name']}=={one['version']}" for one in document["components"]}
    assert listed == set(re.findall(r"^[\w.-]+==[^\s;#]+", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    references = [one["bom-ref"] for one in document["components"]]
    assert len(references) == len(set(references)) > 80
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", one["purl"]) for one in document["components"])


def test_a_condition_of_a_version_is_kept():
    (found,) = make_sbom.components('Py.YAML_x==6.0 ; python_version < "3.11"  # why\n')
    assert (found["purl"], found["version"]) == ("pkg:pypi/py-yaml-x@6.0", "6.0")
    assert found["properties"][0]["value"] == 'python_version < "3.11"'
