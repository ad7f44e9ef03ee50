"""docs/metrics.md has every metric that a run writes, and the names that trackers get."""

import re

from tests.conftest import ROOT, lines_of
from trainer.watch.trackers import TRL, tracked_name


def rows() -> dict[str, str]:
    """Return the name of each metric of the page in trackers."""
    found = {}
    for row in re.findall(r"^\| (`.*)\| (.*) \| .* \|$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE):
        names, theirs = (re.findall("`(.*?)`", cell) for cell in row)
        found |= dict(zip(names, theirs or names, strict=True))
    return found


def test_every_metric_of_a_run_is_on_the_page(finished):
    patterns = [re.sub("NAME|PHASE", "[a-z_]+", name) for name in rows()]
    written = {name for line in lines_of(finished / "metrics.jsonl") for name in line} - {"step"}
    assert [name for name in written if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def test_trackers_get_the_names_of_the_page():
    assert {name: tracked_name(name) for name in rows()} == rows()
    assert set(TRL) <= set(rows())


def test_tensorboard_has_these_names_and_answers_as_text(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    written = {name for line in lines_of(finished / "metrics.jsonl") for name in line} - {"step"}
    assert set(events.Tags()["scalars"]) == set(map(tracked_name, written))
    texts = events.Tensors("answer 1/text_summary")
    assert [text.step for text in texts] == [1, 2, 3, 4, 5, 6]
    assert "    reward " in texts[0].tensor_proto.string_val[0].decode()
