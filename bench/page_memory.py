"""bench/results/memory.md: what `octet plan` says, beside what was allocated and how long it took."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from page_results import markdown, on, read

HEAD = """# The plan and what was measured: all tables

[The evidence](../../docs/evidence_memory.md) says what follows. `python bench/report.py` makes this page from the files
beside it.

"""
CARD = "cards/NVIDIA-H100-80GB-HBM3"


def page() -> str:
    return "\n".join([HEAD, *_allocated(), *_on_a_card(), *_live(), *_hours()])


def _allocated() -> Iterator[str]:
    found = read("memory_cuda_host")
    yield "## Planned and allocated, on a simulated card\n"
    yield "GB that the largest step allocates, with torch's real allocator ([how](../../tests/cuda/README.md)). The"
    yield "plan, without the CUDA context, is in brackets. Cases that are not named after a preset are `8gb` with"
    yield "another model or other lengths.\n"
    yield from _cases(found["cases"])
    machine = found["machine"]
    command = machine["command"].replace("python ", "tests/cuda/python.sh ")
    yield on({**machine, "command": command})


def _on_a_card() -> Iterator[str]:
    card = read(CARD)
    rehearsals = card["parts"]["rehearsals"]
    yield "## Planned and allocated, on an H100\n"
    yield "The same steps, with the allocator limited to the size in the table.\n"
    yield from _cases(rehearsals["result"])
    yield on({**card["machine"], "card": "NVIDIA H100 80GB HBM3", "command": rehearsals["command"]})


def _cases(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for one in cases:
        pairs = [(one["allocated"][phase], one["planned"][phase]) for phase in ("rollout", "backward")]
        cells = [f"{found:.2f} ({plan:.2f})" for found, plan in [*pairs, (one["reserved"], one["planned_reserved"])]]
        rows.append([one["case"], f"{one['card_gib']:g} GiB", *cells])
    yield from markdown(["case", "card", "rollout", "backward", "reserved at most"], rows)


def _live() -> Iterator[str]:
    found = read("plan")
    phases = ("load", "rollout", "score", "backward", "step")
    yield "## Planned and alive, on a CPU\n"
    yield "How far the plan is above (+) or below (-) the tensors that the real engine, decoder and training pass"
    yield "keep at the peak of each phase.\n"
    rows = [
        [case["case"], *(_off(case["bytes"][phase]) if phase in case["bytes"] else "" for phase in phases)]
        for case in found["cases"]
    ]
    yield from markdown(["case", *phases], rows)
    yield on(found["machine"])


def _off(one: Mapping[str, int]) -> str:
    return f"{one['plan'] / one['live'] - 1:+.1%}"


def _hours() -> Iterator[str]:
    found = read("hours")
    yield "## Planned and measured seconds of a step, on a CPU\n"
    yield f"All rows are planned from a calibration on `{found['calibration']}`, which has 4 layers and random weights."
    yield f"Seconds are CPU seconds, of {found['steps']} steps. The plan was given the length of the answers.\n"
    rows = []
    for name, one in found["cases"].items():
        measured, foretold = (" + ".join(f"{part:.2f}" for part in one[kind]) for kind in ("measured", "foretold"))
        ratios = [f"{one['foretold/measured'][part]:.2f}" for part in ("rollout", "update", "step")]
        rows.append([name, measured, foretold, *ratios])
    yield from markdown(["case", "measured rollout + update, s", "planned", "rollout", "update", "step"], rows)
    yield "The last three columns are the planned time divided by the measured time.\n"
    yield on(found["machine"])
