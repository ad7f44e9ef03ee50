"""Octet as others install it: from a wheel, in an empty folder; and from a checkout that nobody has installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, program, ran, setup_cfg
from trainer import __version__
from trainer.commands.doctor import pinned

RUN = ["--preset", "nano", "eval.problems=8", "run.dir=it"]


def make_environment(folder: Path, *wheels: Path) -> Path:
    """Make an environment with all packages of this one except Octet, install the wheels, and return its `bin`."""
    venv = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(venv, check=True)
    packages = folder / "packages"
    packages.mkdir()
    for place in (Path(place) for place in sys.path if place.endswith(("site-packages", "dist-packages"))):
        for package in place.iterdir():
            if "octet_grpo" not in package.name and package.suffix != ".pth" and not (packages / package.name).exists():
                (packages / package.name).symlink_to(package)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{packages}\n")
    launcher = f"#!{folder}/bin/python\nfrom deepspeed.launcher.runner import main\nmain()\n"
    program(folder / "bin/deepspeed", launcher)  # pip would have written it beside the package
    if wheels:
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-index", *wheels], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files that git knows: a build leaves others in a checkout, which say that Octet is installed."""
    folder = tmp_path_factory.mktemp("source")
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, capture_output=True, text=True, check=False).stdout.split("\0")
    if not any(files):
        pytest.skip("this is no git checkout, so a build could not be told from its sources")
    for file in files:
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory) -> Path:
    """The `bin` of an environment with a wheel."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(source, folder / "source")  # a build leaves a mark in it that Octet is installed
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(source)], check=True)
    return make_environment(folder / "environment", *folder.glob("*.whl"))


@pytest.fixture(scope="module")
def uninstalled(tmp_path_factory) -> Path:
    """The `bin` of an environment that has what Octet needs, and not Octet."""
    return make_environment(tmp_path_factory.mktemp("uninstalled") / "environment")


def run(*command: str | Path, folder: Path, path: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a program of an environment, and fail with what it printed unless it ends with status 0."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "OCTET_PYTHON", "OCTET_SITE", "CONDA_PREFIX")
    clean = {name: value for name, value in os.environ.items() if name not in left_out}
    clean |= {"PATH": f"{path}:{os.defpath}", "VIRTUAL_ENV": str(path.parent)} | environment
    return ran(*command, cwd=folder, env=clean, check=True, timeout=580)


@pytest.fixture
def of_wheel(installed, tmp_path) -> Callable[..., str]:
    """Run a program of the environment with a wheel in an empty folder, and return what it prints."""

    def run_there(name: str, *words: str | Path, **environment: str) -> str:
        return run(installed / name, *words, folder=tmp_path, path=installed, **environment).stdout

    return run_there


def test_every_package_is_listed_for_the_wheel():
    setup = setup_cfg()
    folders = [ROOT / "octet", *(file.parent for file in (ROOT / "trainer").rglob("__init__.py"))]
    packages = [".".join(folder.relative_to(ROOT).parts) for folder in folders]
    assert sorted(setup["options"]["packages"].split()) == sorted([*packages, "trainer.shipped"])
    without = {file.parent for file in (ROOT / "trainer").rglob("*.py")} - set(folders)
    assert not without, "a folder with modules needs an __init__.py, or it is left out of the wheel"
    assert setup["options.extras_require"]["track"].split() == ["octet-grpo[wandb,trackio]"]


EXTRAS = {"math": "math_verify", "gym": "reasoning_gym", "wandb": "wandb", "trackio": "trackio"}


def required(names: list[str]) -> Iterator[tuple[str, Requirement]]:
    """Yield every requirement of some requirements, as the installed packages name them, with who has it."""
    waiting, seen = [("setup.cfg", Requirement(name)) for name in names], set()
    while waiting:
        by, wanted = waiting.pop()
        yield by, wanted
        if (wanted.name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((wanted.name, *sorted(wanted.extras)))
        for line in distribution(wanted.name).requires or []:
            other = Requirement(line)
            if other.marker is None or any(other.marker.evaluate({"extra": one}) for one in (*wanted.extras, "")):
                waiting.append((wanted.name, other))


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_fits_the_constraints_and_imports(extra):
    """All together: each package has one pin, and every requirement of every package allows it. tests/vllm resolves
    them with the extra vllm, which is not among the pins."""
    setup = setup_cfg()
    names = [*setup["options"]["install_requires"].split(), *setup["options.extras_require"][extra].split()]
    pins = pinned(ROOT / "constraints.txt")
    try:
        wanted = list(required(names))
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed")
    by_name = {canonicalize_name(name): version for name, version in pins.items()}
    versions = [(by, one, by_name.get(canonicalize_name(one.name))) for by, one in wanted]
    refused = [f"{by} wants {one}" for by, one, version in versions if version and version not in one.specifier]
    assert refused == []
    assert len(versions) > 100
    subprocess.run([sys.executable, "-c", f"import {EXTRAS[extra]}"], capture_output=True, check=True)


@pytest.mark.slow
def test_the_light_commands_of_a_wheel_need_no_checkout(of_wheel, installed, tmp_path):
    """And none prints a command that needs one: there is no run_deepspeed.sh in an empty folder."""
    assert Path(of_wheel("python", "-c", "import trainer; print(trainer.__file__)")).is_relative_to(installed.parent)
    assert of_wheel("octet", "--version") == f"octet {__version__}\n"
    plan = of_wheel("octet", "plan", "--card", "RTX 4060", "--preset", "8gb", "--search")
    assert (" rows, " in plan, "octet train --preset 8gb" in plan) == (True, True)
    fetched = "from trainer.commands.fetch import command; from pathlib import Path; "
    printed = of_wheel("python", "-c", fetched + "print(command(Path('it'), 'a=b', True))")
    assert ("octet train a=b" in printed, "run_deepspeed.sh" in printed) == (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_script_of_a_wheel_starts_the_installed_program(of_wheel, installed, tmp_path):
    """In a job whose srun is a stand-in, up to the first check of the run, which finds no such model."""
    job = ["--gpus=1", "--preset", "nano", "model.name=no/such-model", "run.dir=it"]
    program(tmp_path / "bin/sbatch", "#!/bin/sh\necho 5\n")
    of_wheel("octet", "slurm", *job, PATH=f"{tmp_path}/bin:{os.defpath}")
    assert f"export OCTET_ROOT={installed.parent}" in (tmp_path / "it/job.sbatch").read_text()
    program(tmp_path / "bin/srun", '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\n"$@"\nexit 0\n')
    inside = {"PATH": f"{tmp_path}/bin:{os.defpath}", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node1"}
    inside["HF_HUB_OFFLINE"] = "1"
    answer = run("bash", "it/job.sbatch", folder=tmp_path, path=installed, **inside)
    assert "model.name=no/such-model: it is neither a folder nor complete in the cache" in answer.stderr
    script = 'source "$root/slurm/common.sh"; model_of --preset nano'  # for the servers of vllm.sbatch
    (root,) = installed.parent.glob("lib/python*/site-packages/trainer/shipped")
    places = {"PATH": f"{tmp_path}/bin:{installed}:{os.defpath}", "root": str(root)}
    named = run("bash", "-c", script, folder=tmp_path, path=installed, **places).stdout.strip()
    assert (Path(named) / "model.safetensors").is_file()


@pytest.mark.slow
def test_octet_says_that_another_trainer_is_in_its_place(of_wheel, installed, tmp_path):
    """A distribution has overwritten the files of Octet. tests/reports/test_study.py has a file of the user."""
    packages = next(installed.parent.glob("lib/python*/site-packages"))
    kept = (packages / "trainer/__init__.py").read_text()
    record = packages / "trainer-0.0.36.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer\nVersion: 0.0.36\n")
    (record / "RECORD").write_text("trainer/__init__.py,,\n")
    try:
        (packages / "trainer/__init__.py").write_text("import coqpit\n")
        with pytest.raises(AssertionError, match=r"^octet: .*pip uninstall trainer.*pip install --force-rei"):
            run(installed / "octet", "--version", folder=tmp_path / "..", path=installed)
        (packages / "trainer/__init__.py").unlink()  # by pip uninstall trainer
        with pytest.raises(AssertionError, match=r"^octet: .*pip install --force-rei"):
            run(installed / "octet", "--version", folder=tmp_path / "..", path=installed)
    finally:
        (packages / "trainer/__init__.py").write_text(kept)
        shutil.rmtree(record)
    assert of_wheel("octet", "--version") == f"octet {__version__}\n"


@pytest.mark.slow
def test_a_wheel_trains(of_wheel, tmp_path):
    """In an empty folder; `octet doctor` says before that it will."""
    assert "No problem" in of_wheel("octet", "doctor", "--preset", "nano")
    printed = of_wheel("python", "-m", "trainer.commands.main", "train", *RUN, "run.steps=2")
    assert ("8 of 8 greedy answers identical" in printed, "run_deepspeed.sh" in printed) == (True, False)
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert (tmp_path / "it/merged/model.safetensors").is_file()


@pytest.mark.slow
def test_a_checkout_trains_without_an_installation_and_without_git(uninstalled, source, tmp_path):
    """A container may have only the dependencies: the checkout is on PYTHONPATH, and no git on the PATH."""
    surroundings = {"PATH": str(uninstalled), "PYTHONPATH": str(source)}
    installed = "from importlib.metadata import version; version('octet-grpo')"
    with pytest.raises(AssertionError, match="PackageNotFoundError"):
        run(uninstalled / "python", "-c", installed, folder=tmp_path, path=uninstalled, **surroundings)
    launch = [uninstalled / "python", "-m", "trainer.commands.main", "train", *RUN, "run.steps=1", "run.merge=false"]
    assert "  steps: 1\n" in run(*launch, "--dry-run", folder=tmp_path, path=uninstalled, **surroundings).stdout
    run(*launch, folder=tmp_path, path=uninstalled, **surroundings)
    (_, step) = map(json.loads, (tmp_path / "it/metrics.jsonl").read_text().splitlines())
    assert step["step"] == 1
    assert "no git revision" in (tmp_path / "it/config.yaml").read_text()


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel_over_a_wheel(of_wheel, tmp_path):
    """It learns, and the last cell asks the new model. What is shipped has been run, too."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    shipped = json.loads((ROOT / "examples/octet.ipynb").read_text())
    shutil.copy(ROOT / "examples/octet.ipynb", tmp_path)
    of_wheel("python", ROOT / "scripts/execute_notebook.py", "octet.ipynb")
    for notebook in (shipped, json.loads((tmp_path / "octet.ipynb").read_text())):
        outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
        texts = ["".join(one.get("text", "")) for cell in outputs for one in cell]
        assert any(text.startswith("learned: ") for text in texts)
        displays = ["".join(one["data"]["text/plain"]) for cell in outputs for one in cell if "data" in one]
        assert displays[0].startswith("model nano, task records")  # no empty display, with the text beside it
        assert texts[-1].splitlines()[-1].startswith("#### ")


@pytest.mark.slow
def test_a_release_is_built_and_tried(source, tmp_path):
    """In a repository of its own. It refuses a change that is not committed, and the tag of another version."""
    pytest.importorskip("build")
    pytest.importorskip("twine")
    checkout = shutil.copytree(source, tmp_path / "checkout")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message=a"]):
        subprocess.run([*git, *command], check=True)
    surroundings = {"OCTET_PYTHON": sys.executable, "PATH": os.environ["PATH"]}
    surroundings["OCTET_REPOSITORY"] = address = "https://example.org/octet"
    release = [str(checkout / "scripts/release"), "--quick"]

    def refused(reason: str) -> None:
        answer = ran(*release, env=os.environ | surroundings)
        assert (answer.returncode, reason in answer.stderr) == (2, True), answer.stderr

    (checkout / "README.md").write_text("changed")
    refused("not committed")
    subprocess.run([*git, "checkout", "--quiet", "README.md"], check=True)
    subprocess.run([*git, "tag", "v9.9.9"], check=True)
    refused("is tagged v9.9.9")
    subprocess.run([*git, "tag", "--delete", "v9.9.9"], check=True, capture_output=True)
    printed = run(*release, folder=tmp_path, path=Path(sys.executable).parent, **surroundings).stdout
    assert "PASSED" in printed
    assert "verdict: " in printed
    assert {path.name for path in (checkout / "dist").iterdir()} == {
        f"octet_grpo-{__version__}-py3-none-any.whl",
        f"octet_grpo-{__version__}.tar.gz",
    }
    with zipfile.ZipFile(next((checkout / "dist").glob("*.whl"))) as wheel:
        page = wheel.read(f"octet_grpo-{__version__}.dist-info/METADATA").decode()
    assert f"git clone {address}" in page
    assert f"Project-URL: Source, {address}\n" in page
    assert f"Project-URL: Changes, {address}/blob/v{__version__}/CHANGELOG.md\n" in page
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", page)
    assert links
    assert all("".join(link).startswith(address) for link in links)
    assert json.loads((checkout / "build/sbom.json").read_text())["metadata"]["component"]["version"] == __version__


@pytest.mark.slow
def test_an_image_has_what_its_steps_need(tmp_path):
    """The Dockerfile and Apptainer.def copy the same and run the same. The steps run in a folder that has only what is
    copied, up to the packages."""
    docker = (ROOT / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY (.*) /octet\S*$", docker, flags=re.MULTILINE)).split()
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", (ROOT / "Apptainer.def").read_text(), flags=re.MULTILINE))
    assert sorted(copied) == sorted(line.split()[0] for line in sections.pop("files").splitlines())
    (command,) = re.findall(r"^RUN (.*)$", docker, flags=re.MULTILINE)
    assert sections["post"].strip() == command
    for script in (*sections.values(), command):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for name in copied:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    here = {"OCTET_PYTHON": sys.executable, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = run("sh", "-c", command.replace("/octet", str(tmp_path)), folder=tmp_path, path=tmp_path, **here).stdout
    assert "with adapter/, merged/" in shown
    assert not (tmp_path / "run").exists()
    shipped = setup_cfg()["options.package_data"]["trainer.shipped"].split()
    assert all(any(tmp_path.glob(pattern)) for pattern in shipped)
