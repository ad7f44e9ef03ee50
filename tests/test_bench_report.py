"""docs/performance.md says what was measured."""

import subprocess
import sys

from tests.conftest import ROOT


def test_the_page_is_made_from_the_results():
    page = subprocess.run([sys.executable, "bench/report.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (ROOT / "docs/performance.md").read_text() == page.stdout, "python bench/report.py > docs/performance.md"
