"""The page in a real browser: it renders, it complains of nothing, and nothing a model wrote runs."""

import io

import pytest

from tests.ui.browser import browsing
from trainer.reports.report import report
from trainer.run_folder.reader import read_run

COLOURS = {(0x3B, 0x82, 0xC4), (0xE0, 0x7B, 0x39), (0xF6, 0xF7, 0xF9)}  # of two curves, and of the style of the page


@pytest.mark.parametrize("which", ["finished", "hostile"])
def test_a_browser_shows_the_page_and_runs_nothing(which, request, tmp_path):
    from PIL import Image

    path, run = tmp_path / "page.html", read_run(request.getfixturevalue(which))
    path.write_text(report([run]), encoding="utf-8")
    with browsing(tmp_path) as browser:
        page = browser.open(path.as_uri(), 500, 1200)
        assert page.js("document.title") == f"{run.name}: Octet"  # a script would have changed it
        assert page.js("document.querySelectorAll('svg').length") >= 8
        assert page.js("document.querySelectorAll('h2').length") == 11
        with Image.open(io.BytesIO(page.picture())) as image:
            assert {colour for _, colour in image.convert("RGB").getcolors(2**20)} >= COLOURS
        assert page.complaints() == []
