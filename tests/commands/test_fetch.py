"""octet fetch, from a hub on this machine, with the real client; then the run without any hub."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.commands.conftest import write
from tests.commands.test_doctor import NO_CARDS
from tests.conftest import NANO, ROOT, launch, refuses, said_by
from tests.hub_server import Hub, serving, use_hub
from trainer.commands import fetch
from trainer.config.resolve import resolve
from trainer.config.settings import Model
from trainer.errors import DataError, ModelError
from trainer.model import hub
from trainer.plan import downloads, preflight
from trainer.problem.sources import HubSet

NANO_HERE = hub.find_model(Model(name="nano"))
TOKEN = "hf_a_token_that_stays_here"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=8", "eval.problems=4"]
ARGUMENTS = ["--preset", "8gb", "model.name=octet/nano", *FEW, "run.steps=2", "run.merge=false"]
FILES = "[{split: train, path: main/train-*}, {split: test, path: main/test-*}]"


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory) -> Path:
    """A repository in the form of openai/gsm8k."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "README.md").write_text(f"---\nconfigs: [{{config_name: main, data_files: {FILES}}}]\n---\n")
    (folder / "main").mkdir()
    for split, first, count in (("train", 0, 40), ("test", 100, 12)):
        asked = "Anna has {} apples and buys 2. How many has she?"
        rows = [{"question": asked.format(n), "answer": f"{n} + 2\n#### {n + 2}"} for n in range(first, first + count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"main/{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The embedded model as a repository, with much beside it that no run reads."""
    folder = tmp_path_factory.mktemp("model") / "nano"
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    others = ("pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors", "modeling_it.py")
    return write(folder, dict.fromkeys(others, "not wanted"))


def octet(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return launch(sys.executable, "-m", "trainer.commands.main", *arguments, folder=folder, **options)


@pytest.fixture(scope="module")
def fetched(tmp_path_factory, model, gsm8k) -> tuple[Path, list[subprocess.CompletedProcess], list[list[str]]]:
    """Fetched in two attempts: a connection breaks off and the data are missing, then all is there. And what was
    downloaded in each."""
    folder = tmp_path_factory.mktemp("connected")
    answers, downloads = [], []
    with serving({"models/octet/nano": model}, token=TOKEN) as hub_of_model:
        environment = {"HF_ENDPOINT": hub_of_model.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        for attempt in range(2):
            hub_of_model.cut_after = 500_000 if attempt == 0 else None
            if attempt == 1:
                hub_of_model.repositories["datasets/openai/gsm8k"] = gsm8k
            command = ["fetch", *ARGUMENTS, "--to", "it", "--no-wheels"]
            answers.append(octet(*command, folder=folder, **environment))
            downloads.append([name for name, _ in hub_of_model.downloads])
            hub_of_model.downloads.clear()
    return folder / "it", answers, downloads


def test_it_goes_on_where_it_stopped_and_fetches_nothing_twice(fetched):
    _, (first, second), downloads = fetched
    assert first.returncode == 2
    assert "octet: openai/gsm8k train: " in first.stderr
    assert "Traceback" not in first.stderr
    assert second.returncode == 0, second.stderr
    assert downloads[0].count("model.safetensors") == 2  # it broke off once
    assert set(downloads[1]) == {"README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"}
    said = ["model   octet/nano: 2.6 MB in 5 files", "data    openai/gsm8k: train 40, test 12 problems"]
    assert second.stdout.splitlines()[:2] == said


def test_only_what_a_run_reads_is_fetched_and_no_login(fetched):
    files = {file.name for file in (fetched[0] / "hub/models--octet--nano/snapshots").rglob("*") if file.is_file()}
    usual = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files == usual | {"model.safetensors"}
    for file in fetched[0].rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_the_printed_command_runs_without_a_hub_from_wherever_the_folder_is(fetched, tmp_path):
    """Run the command of README.txt with the new folder, and with train.py in place of the script."""
    here = tmp_path / "carried over"
    shutil.copytree(fetched[0], here, symlinks=True)
    octet("fetch", "--verify", str(here), folder=tmp_path, check=True)
    command = (here / "README.txt").read_text().splitlines()[-1].strip()
    assert command in fetched[1][1].stdout
    words = [word.replace(str(fetched[0]), str(here)) for word in shlex.split(command)]
    environment = dict(word.split("=", 1) for word in words[: words.index("./run_deepspeed.sh")])
    assert environment == {"HF_HOME": str(here), "HF_HUB_OFFLINE": "1"}
    arguments = [*words[words.index("./run_deepspeed.sh") + 1 :], "run.dir=it"]
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens there
    answer = launch(sys.executable, ROOT / "train.py", *arguments, folder=tmp_path, check=True, **environment)
    assert "model octet/nano, task gsm8k, 40 problems: 2 steps" in answer.stdout
    assert answer.stderr == ""  # the libraries have nothing to say about it
    named = json.loads((tmp_path / "it/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "octet/nano"  # and no path of this machine


def test_a_hub_that_is_away_is_said_once_and_the_cache_is_used(fetched, tmp_path, monkeypatch, capsys):
    use_hub(monkeypatch, "http://127.0.0.1:9", fetched[0])
    found = downloads.check(resolve("8gb", None, ["model.name=octet/nano"]))
    assert found.folder is not None
    assert found.weights == (NANO / "model.safetensors").stat().st_size
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    said = "octet: the hub cannot be reached (Connection refused): continuing with the files in the cache\n"
    assert capsys.readouterr().err == said


def test_a_run_tells_the_size_of_its_download_before_it_starts(model, tmp_path, monkeypatch, capsys):
    with serving({"models/octet/nano": model}) as there:
        use_hub(monkeypatch, there.url, tmp_path)
        preflight.check(resolve("nano", None, ["model.name=octet/nano"]), NO_CARDS)
    assert "octet: octet/nano: 2.6 MB to download\n" in capsys.readouterr().err


def test_another_configuration_of_a_data_set_is_not_the_one_that_is_asked_for(fetched, monkeypatch):
    """The cache of `datasets` holds gsm8k as `main`. No configuration means the only one that there is."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(fetched[0] / "datasets"))
    names = ["main", None, "socratic", "ma", "*n"]
    prepared = [downloads.is_prepared(HubSet("openai/gsm8k", name, "train")) for name in names]
    assert prepared == [True, True, False, False, False]


def test_a_mirror_with_a_certificate_of_its_own_is_trusted_when_it_is_named(model, certificate, tmp_path, monkeypatch):
    for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    asked = ["fetch", "--preset", "nano", "model.name=octet/nano", "--to", "it", "--no-wheels"]
    with serving({"models/octet/nano": model}, certificate=certificate) as mirror:
        environment = {"HF_ENDPOINT": mirror.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        refused = octet(*asked, folder=tmp_path, **environment)
        trusted = octet(*asked, folder=tmp_path, **environment, REQUESTS_CA_BUNDLE=str(certificate))
    assert "the hub cannot be reached ([SSL: CERTIFICATE_VERIFY_FAILED]" in refused.stderr
    assert "`octet fetch`" not in refused.stderr  # which is this command
    assert trusted.returncode == 0, trusted.stderr


@pytest.mark.slow
def test_records_of_the_hub_are_read_under_any_name(gsm8k, model, tmp_path):
    """Neither the model nor the data set is one that Octet knows."""
    asked = ["task.path=octet/sums", "task.subset=main", "task.test_split=test", "-n", "1", "--split", "test", "--json"]
    with serving({"datasets/octet/sums": gsm8k, "models/octet/nano": model}) as it:
        environment = {"HF_ENDPOINT": it.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = ["task", "show", "records", "--model", "octet/nano", *asked]
        answer = octet(*command, folder=tmp_path, check=True, **environment)
    assert "apples and buys 2. How many has she?" in answer.stdout


@pytest.fixture
def strict_hub(model, monkeypatch, tmp_path) -> Iterator[Hub]:
    with serving({"models/octet/nano": model}, token=TOKEN) as it:
        use_hub(monkeypatch, it.url, tmp_path)
        yield it


def test_a_copy_that_is_not_whole_is_found_out(fetched, tmp_path, capsys):
    here = shutil.copytree(fetched[0], tmp_path / "copy", symlinks=False)  # a stick without links
    assert said_by(capsys, "fetch", "--verify", here)[0] == 0
    (file,) = (here / "hub/models--octet--nano/snapshots").rglob("model.safetensors")
    file.write_bytes(b"x" + file.read_bytes()[1:])
    status, _, error = said_by(capsys, "fetch", "--verify", here)
    assert (status, f"--verify {here}: " in error) == (2, True)


def test_the_teacher_is_fetched_and_looked_for_as_the_model_is(strict_hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    distill = ["algorithm.loss=reinforce_baseline", "teacher.name=octet/nano"]
    config = resolve("nano", None, distill)
    found = downloads.find_teacher(config.teacher_model)
    assert preflight.needs(config, NANO_HERE, NO_CARDS, found).download == found.download > 2_000_000
    environment = {"HF_ENDPOINT": strict_hub.url, "HF_HUB_OFFLINE": "0"}
    further = [*distill, "lora.start=runs/first/adapter"]
    answer = octet("fetch", "--preset", "nano", *further, "--to", "it", "--no-wheels", folder=tmp_path, **environment)
    said = ["model   nano: it comes with Octet", "teacher octet/nano: 2.6 MB in 5 files"]
    said += ["adapter runs/first/adapter: an adapter on this machine; copy it yourself"]
    assert answer.stdout.splitlines()[:3] == said, answer.stderr
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "it")
    teacher = downloads.find_teacher(config.teacher_model)
    without, with_it = (preflight.needs(config, NANO_HERE, NO_CARDS, one).ram for one in (hub.NOTHING, teacher))
    assert teacher.download == 0
    assert with_it - without == pytest.approx(teacher.weights, rel=0.01)  # fp32 in the file as well as here


def test_a_model_of_which_a_part_is_missing_or_elsewhere_is_not_taken_for_cached(fetched, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(fetched[0] / "hub", tmp_path / "hub", symlinks=True)
    folder = hub.snapshot(Model(name="octet/nano"))
    (folder / "model.safetensors").rename(folder / SHARDS[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS))}))
    assert hub.snapshot(Model(name="octet/nano")) is None
    (folder / SHARDS[1]).touch()
    assert hub.snapshot(Model(name="octet/nano")) == folder
    assert hub.snapshot(Model(name="octet/nano", revision="other")) is None
    shutil.copytree(folder, tmp_path / "elsewhere")
    (folder.parents[1] / "refs/main").write_text("../../../elsewhere")
    assert (folder / "../../../../elsewhere/config.json").is_file()
    assert hub.snapshot(Model(name="octet/nano")) is None


def test_a_stored_login_is_used_and_without_one_the_answer_is_clear(strict_hub, tmp_path):
    with refuses("model.name", ModelError, names="octet/nano"):
        hub.find_model(Model(name="octet/nano"))
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    found = hub.find_model(Model(name="octet/nano"))
    assert (found.folder, "model.safetensors" in found.sizes) == (None, True)
    assert found.download == sum((NANO / name).stat().st_size for name in found.sizes)
    with refuses("model.name", ModelError, names="404"):
        hub.find_model(Model(name="octet/nano", revision="typo"))
    with refuses("task.name", DataError, names="task.data_dir"):
        downloads.find_data(HubSet("no/body", None, "train"), resolve("nano").task)
    config = resolve("nano", None, ["algorithm.loss=reinforce_baseline", "teacher.name=octet/none"])
    with refuses("teacher.name", ModelError, names="hub"):
        downloads.find_teacher(config.teacher_model)


def test_a_folder_that_is_too_small_is_refused_before_the_download(strict_hub, small_disk, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with refuses("--to", names="octet/nano"):
        fetch.fetch_model(Model(name="octet/nano"), small_disk(1 << 20))
    assert strict_hub.downloads == []


@pytest.mark.parametrize(("weights", "others", "kept"), [
    (["model.safetensors"], ["pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"], []),
    (SHARDS, ["consolidated.safetensors"], ["model.safetensors.index.json"]),
    (SHARDS, ["pytorch_model-1.bin"], ["model.safetensors.index.json", "pytorch_model.bin.index.json"]),
    (["pytorch_model.bin"], ["flax_model.msgpack", "rust_model.ot"], []),
    (["model.safetensors"], ["original/params.json", "README.md", "modeling.py"], ["tokenizer.model", "vocab.txt"]),
])  # fmt: skip
def test_of_a_model_the_weights_come_once(weights, others, kept):
    names = {"config.json", "tokenizer.json", *weights, *kept}
    assert set(hub.wanted([*names, *others])) == names
    of_code = {"modeling.py"} & {*others} | {"qwen.tiktoken"}
    assert set(hub.wanted([*names, *others, "qwen.tiktoken"], code=True)) - names == of_code
    elsewhere = ["../x.json", "a/../../x.json", "/etc/x.json", "sub/config.json"]
    assert set(hub.wanted([*names, *elsewhere])) == names


@pytest.mark.slow
def test_the_packages_are_those_of_the_constraints_and_make_the_environment_without_an_index(tmp_path, monkeypatch):
    wanted = fetch.requirements()
    assert {"torch", "deepspeed", "transformers", "math-verify", "setuptools"} <= set(wanted)
    assert "pytest" not in wanted
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path / "probe", "idna"]
    if launch(*probe).returncode != 0:
        pytest.skip("no package index can be reached from here")
    assert re.fullmatch(r"wheels  2 packages, \d\d\.\d kB", fetch.fetch_wheels(["idna", "mdurl"], tmp_path / "it"))
    assert {file.name.rsplit("-", 3)[0] for file in (tmp_path / "it").glob("*.whl")} == {"idna-3.20", "mdurl-0.1.2"}
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "0"}
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    assert fetch.fetch_wheels(["idna", "mdurl"], tmp_path / "it").startswith("wheels  2")  # which are there already
    with refuses("--to", names="packages"):
        fetch.fetch_wheels(["idna", "sniffio"], tmp_path / "it")
    script = f'source "{ROOT}/scripts/environment.sh"; _pip --target "{tmp_path}/made" "$@"'
    environment = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "OCTET_WHEELS": str(tmp_path / "it")}
    command = ["bash", "-c", script, "bash", "-c", fetch.CONSTRAINTS]
    done = launch(*command, "idna", "mdurl", **environment)
    assert (done.returncode, done.stderr, done.stdout.split()[0]) == (0, "", "Installing")
    assert (tmp_path / "made/idna/__init__.py").is_file()
    done = launch(*command, "sniffio", **environment)
    assert done.returncode == 2
    assert "octet: pip could not install the dependencies; its message is above." in done.stderr
