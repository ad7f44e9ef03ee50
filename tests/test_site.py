"""The site over docs/ is built strictly: no link leads nowhere, and no page is left out of the navigation."""

import re
import sys
from types import SimpleNamespace

import pytest

from scripts import site_links
from tests.conftest import ROOT, launch


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    address = {"OCTET_REPOSITORY": "https://example.org/octet", "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    launch(*build, check=True, **address)
    return folder


def test_every_page_is_on_the_site_and_has_its_docstrings(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {path.parent.name for path in site.rglob("index.html")} >= pages
    assert "Train a model in this process" in (site / "api/index.html").read_text()
    gallery = {path.stem for path in (ROOT / "gallery").glob("*.md")} - {"README"}
    assert {path.parent.name for path in (site / "gallery").rglob("index.html")} == {*gallery, "gallery"}
    assert "octet plan" in (site / "search/search_index.json").read_text()


def test_a_page_loads_nothing_from_elsewhere(site):
    for page in (site / "index.html", site / "evidence/index.html"):
        assert not re.findall(r"<(?:script|img)[^>]+src=.?https?:|<link[^>]+stylesheet[^>]+https?:", page.read_text())


def test_a_table_is_not_folded_and_a_command_is(site):
    page = (site / "memory/index.html").read_text()
    kinds = re.findall(r"<pre( class=.columns.)?>(.*?)</pre>", page, re.DOTALL)
    tables = [bool(kind) for kind, text in kinds if "octet plan --preset" in text or "KV cache" in text]
    assert tables[:2] == [False, True]


def test_links_out_of_docs_lead_to_the_repository(site):
    assert "https://example.org/octet/blob/main/bench/experiments.md" in (site / "evidence/index.html").read_text()
    config = {"repo_url": None}
    assert site_links.on_page_markdown("a [dated\nlog](../bench/a.md#b) c", config) == "a dated\nlog c"


LINKS = [("docs", "../gallery/sums.md", "[a](gallery/sums.md)"), ("docs", "../gallery/default/adapter", "a")]
LINKS += [("gallery/sums.md", "../docs/use.md#b", "[a](../use.md#b)"), ("gallery/sums.md", "../bench/a.py", "a")]
LINKS += [("gallery/sums.md", "speedrun.md", "[a](speedrun.md)")]


@pytest.mark.parametrize(("page", "link", "expected"), LINKS)
def test_links_between_docs_and_the_gallery_stay_on_the_site(page, link, expected):
    where = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert site_links.on_page_markdown(f"[a]({link})", {"repo_url": None}, where) == expected
