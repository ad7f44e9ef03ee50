"""Write tests/golden/one_step.json anew: `python -m tests.golden.remake`. Read test_engine.HOW_TO_DECIDE first."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.updates import Case
from tests.step.test_engine import GOLDEN, launch, summary


def test_remake(tiny_model):
    with tempfile.TemporaryDirectory() as folder:
        result = launch(tiny_model, Path(folder) / "out.json", 1, [Case("whole", [4])])
    GOLDEN.write_text(json.dumps(summary(result["whole"]), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
