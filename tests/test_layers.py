"""Which package may import which: each has a floor and imports only from floors below it, or from itself. And the page
that says so."""

import ast
import re
import sys

from scripts.count import arrows, imported_by
from tests.conftest import ROOT, launch

FLOORS = [["errors", "records"], ["machine", "answers", "policy", "stats", "sandbox"], ["config", "ranks"]]
FLOORS += [["model", "problem", "watch", "advantage"], ["reward", "batch", "run_folder"], ["plan", "loss", "reports"]]
FLOORS += [["rollout"], ["step", "evaluation"], ["loop", "export"], ["run"], ["commands"]]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in (ROOT / "trainer").rglob("*.py") if path.name != "__init__.py")
IMPORTS = {".".join(path.relative_to(ROOT).with_suffix("").parts): {*imported_by(path)} for path in MODULES}
HEAVY = ("torch", "numpy", "transformers", "deepspeed", "peft", "bitsandbytes", "datasets", "sympy", "math_verify")
HEAVY += ("tensorboard",)
LIGHT = ["errors", "records", "machine", "answers", "sandbox", "config", "ranks", "problem", "reward", "plan"]
LIGHT += ["advantage", "policy", "commands", "reports", "stats", "model.hub", "model.shapes", "model.families"]
NEEDS_TORCH = ["machine.out_of_memory", "plan.torch_probe", "ranks.distributed", "ranks.stopping"]
NEEDS_TORCH += ["ranks.stores", "ranks.watchdog"]
ONLY_IN = {"deepspeed": ("trainer.step", "trainer.plan.torch_probe"), "peft": ("trainer.model",)}
ONLY_IN |= {"vllm": ("trainer.rollout.vllm",), "gguf": ("trainer.export",), "llama_cpp": ("trainer.export",)}


def is_light(module: str) -> bool:
    inside = module.removeprefix("trainer.")
    return inside not in NEEDS_TORCH and any(inside == room or inside.startswith(f"{room}.") for room in LIGHT)


def test_every_room_has_a_floor():
    rooms = {path.relative_to(ROOT / "trainer").parts[0].removesuffix(".py") for path in MODULES}
    assert rooms == set(FLOOR_OF)


def test_nothing_imports_from_its_own_floor_or_above():
    pairs = [(name, module) for name, found in IMPORTS.items() for module in found if module.startswith("trainer.")]
    rooms = {pair: [module.split(".")[1] for module in pair] for pair in pairs}
    wrong = {pair for pair, (own, other) in rooms.items() if own != other and FLOOR_OF[other] >= FLOOR_OF[own]}
    assert wrong == set()


def test_the_modules_of_a_room_import_each_other_without_a_cycle():
    graph = {
        name: {other for other in IMPORTS if other != name and any(f"{one}.".startswith(f"{other}.") for one in found)}
        for name, found in IMPORTS.items()
    }
    while leaves := [name for name, below in graph.items() if not below]:
        graph = {name: below - set(leaves) for name, below in graph.items() if name not in leaves}
    assert graph == {}


def test_the_light_modules_import_nothing_heavy():
    modules = ", ".join(filter(is_light, IMPORTS))
    code = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert launch(sys.executable, "-c", code).stdout.strip() == "[]"


PROTOCOLS = ("answers.child_process", "plan.torch_probe")  # lines that another process of Octet reads
PLAIN = ("machine.", "ranks.", "model.", "rollout.", "run_folder.", "sandbox.")  # what they print is no text of others


def test_what_is_printed_is_made_visible_first():
    """A module prints through machine/safe_text.py and machine/console.py, so no text acts on a terminal."""
    wrong = []
    for path, (module, imports) in zip(MODULES, IMPORTS.items()):
        if module.removeprefix("trainer.").startswith((*PROTOCOLS, *PLAIN)):
            continue
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        for name in ("safe_text.print", "console.Console"):
            if name.partition(".")[2] in names and f"trainer.machine.{name}" not in imports:
                wrong.append((module, name))
    assert wrong == []


def test_an_engine_is_imported_in_its_own_room_only():
    pairs = [(name, module) for name, imports in IMPORTS.items() for module in imports]
    assert [pair for pair in pairs if not pair[0].startswith(ONLY_IN.get(pair[1].split(".")[0], "trainer"))] == []


def test_no_file_or_folder_has_the_name_of_a_standard_library_module():
    parts = {path.stem for path in (ROOT / "trainer").rglob("*") if path.suffix == ".py" or path.is_dir()}
    assert parts & sys.stdlib_module_names == set()


def test_packages_export_nothing():
    """What a person imports from Python is loaded when it is used."""
    packages = [path for path in sorted((ROOT / "trainer").rglob("__init__.py")) if "import" in path.read_text()]
    wrong = [name for path in packages for name in imported_by(path) if name.startswith("trainer")]
    assert wrong == []


ROW = re.compile(r"^\| [^|]+ \| `([^`|]+)` \| `([^`|]+)` \|$", flags=re.MULTILINE)


def names_in(source: str) -> set[str]:
    """Return what a file defines: functions, classes, `Class.method`s and assigned names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_what_the_table_names_is_there():
    rows = ROW.findall((ROOT / "docs/architecture.md").read_text())
    assert len(rows) >= 30
    assert [file for file, _ in rows if not (ROOT / "trainer" / file).is_file()] == []
    assert [row for row in rows if row[1] not in names_in((ROOT / "trainer" / row[0]).read_text())] == []


def test_arrows_are_counted_from_the_importing_room():
    found = arrows()
    assert (("loop", "step") in found, ("step", "loop") in found) == (True, False)
    assert not [pair for pair in found if pair[0] == pair[1]]
