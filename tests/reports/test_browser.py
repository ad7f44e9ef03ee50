"""The page in a real browser: it renders, it complains of nothing, and nothing a model wrote runs."""

import os
import re
import shutil
import subprocess

import pytest

from tests.conftest import ran
from trainer.reports.report import report
from trainer.run_folder.reader import read_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]


@pytest.fixture(scope="module")
def browser():
    named = os.environ.get("OCTET_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    return named or pytest.skip("no Chromium on this machine: install one, or set OCTET_BROWSER to its path")


def opened(browser: str, path, *options: str) -> subprocess.CompletedProcess:
    command = [browser, *OPTIONS, f"--user-data-dir={path.parent / 'profile'}", *options, path.as_uri()]
    return ran(*command, timeout=580, check=True)


@pytest.mark.parametrize("which", ["finished", "hostile"])
def test_a_browser_shows_the_page_and_runs_nothing(browser, which, request, tmp_path):
    path = tmp_path / "page.html"
    run = read_run(request.getfixturevalue(which))
    path.write_text(report([run]), encoding="utf-8")
    answer = opened(browser, path, "--dump-dom")
    assert f"<title>{run.name}: Octet</title>" in answer.stdout  # a script would have changed it
    assert answer.stdout.count("<svg") >= 8
    assert answer.stdout.count("<h2>") == 11
    assert not re.findall("CONSOLE.*", answer.stderr)


def test_a_browser_paints_the_curves_and_takes_the_style(browser, finished, tmp_path):
    from PIL import Image

    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(report([read_run(finished)]), encoding="utf-8")
    opened(browser, path, f"--screenshot={picture}", "--window-size=500,1200")
    with Image.open(picture) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**20)}
    assert {(0x3B, 0x82, 0xC4), (0xE0, 0x7B, 0x39)} <= colours  # the curves, and the style of the page
    assert (0xF6, 0xF7, 0xF9) in colours
