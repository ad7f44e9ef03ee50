"""Who may import whom: the light half starts in milliseconds, and heavy libraries stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

LIGHT = [
    "aggregation",
    "kl",
    "errors",
    "config",
    "settings",
    "types",
    "answers",
    "advantages",
    "rollouts",
    "hardware",
    "hub",
    "disk",
    "needs",
    "preflight",
    "doctor",
    "fetch",
    "launch",
    "cluster",
    "submit",
    "compare_runs",
    "cli",
    "quiet",
    "shapes",
    "activations",
    "memory",
    "levers",
    "plan_command",
]
LIGHT += [f"tasks.{path.stem}" for path in (ROOT / "trainer/tasks").glob("*.py")]
LIGHT += [f"rewards.{path.stem}" for path in (ROOT / "trainer/rewards").glob("*.py")]
HEAVY = ("torch", "numpy", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "sympy", "tensorboard")

ONLY_IN = {"deepspeed": "policy", "peft": "policy", "bitsandbytes": "policy", "vllm": "samplers"}


def test_the_light_half_imports_nothing_heavy():
    modules = ", ".join(f"trainer.{name}" for name in LIGHT)
    code = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.strip() == "[]"


def imported_names(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("library", ONLY_IN)
def test_engines_are_imported_in_their_own_folder_only(library):
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "trainer").rglob("*.py")
        if path.parent.name != ONLY_IN[library] and any(name.split(".")[0] == library for name in imported_names(path))
    ]
    assert elsewhere == []


def test_the_loop_names_no_engine_and_no_sampler():
    names = imported_names(ROOT / "trainer/loop.py")
    assert not [name for name in names if name.startswith(("trainer.policy", "trainer.samplers"))]


@pytest.mark.parametrize("path", sorted((ROOT / "trainer").rglob("__init__.py")), ids=str)
def test_packages_export_nothing(path):
    assert imported_names(path) == set()
