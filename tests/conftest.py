"""What tests share: a tiny random model, the shipped tokenizer, a process group of one, real GSM8K if it is here."""

import configparser
import copy
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from trainer.errors import ConfigError, OctetError
from trainer.machine import quiet
from trainer.records import Completion, Problem, Prompt, Score, ScoredGroup, TrainingRow

ROOT = Path(__file__).parent.parent
NANO = ROOT / "trainer" / "model" / "nano"

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# Of tests with an engine in this process. DeepSpeed imports parts of torch that warn about themselves, and its ZeRO-3
# calls torch by old names.
IGNORED = ("ignore::DeprecationWarning", "ignore:`torch.distributed.*is deprecated:FutureWarning")
WITH_ENGINE = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings(*IGNORED)]


def pytest_configure(config: pytest.Config) -> None:
    """Silence the messages that a run silences by name, and let examples take their time on a busy machine."""
    quiet.quiet()
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("octet", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("octet")
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


LONGEST = ["test_chaos", "test_damaged", "test_bench", "test_printed", "test_pairs", "test_faulty_runs"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files first that take minutes, and then those that start processes: they take longer than the quick ones,
    which then fill up all workers."""
    starts = {"forked", "launch", "ran", "short_job", "subprocess"}
    longest = {name: place - len(LONGEST) for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: longest.get(item.path.stem, not starts & set(vars(item.module))))  # type: ignore[attr-defined]


def octet(*arguments: object) -> int:
    """Run the command in this process, and return its exit status."""
    from trainer.commands.main import main

    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return int(ended.value.code or 0)


def ran(*command: object, cwd: Path = ROOT, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, which has to end well if that is checked, and return its status and what it has printed."""
    words = [str(one) for one in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def said_by(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process, and return its exit status, its output and its complaints."""
    status = octet(*arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


def launch(
    *command: object, folder: Path = ROOT, check: bool = False, timeout: float = 999, **own: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with the checkout on its path, one thread and these variables, and return how it ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | own
    return ran(*command, cwd=folder, check=check, env=environment, timeout=timeout)


def program(path: Path, script: str) -> Path:
    """Write a program, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
    return path


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def learned(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without those of its machine."""
    steps = lines_of(folder / "metrics.jsonl")
    return [{key: value for key, value in one.items() if not key.startswith(("time/", "memory/"))} for one in steps]


def until(is_so: Callable[[], object], seconds: float = 240, say: Callable[[], str] = str) -> None:
    """Wait for something that happens in another process."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{say()}"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Return False for a process that has ended, also for one that nobody has asked after."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@contextmanager
def refuses(
    key: object, kind: type[OctetError] = ConfigError, *, names: object = ""
) -> Iterator[pytest.ExceptionInfo[OctetError]]:
    """Expect an error of this kind about a setting, an option or a path, with a reason. `names` stands in its text: a
    number or a name that the user needs, or one word that tells this reason from others, and no wording."""
    with pytest.raises(kind) as refused:
        yield refused
    error = refused.value  # one that a check of the machine has found is one text
    named, *_ = (error.key,) if error.reason else re.split("=|: ", str(error))
    assert named == str(key), error
    assert str(names) in str(refused.value).replace(str(key), "")  # a folder of the test may have the word in its name


class Opens:
    """What a pickle may do: call a function as soon as it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def tiers(request: pytest.FixtureRequest) -> set[str]:
    """Whether `slow` tests of this file are selected, and others (`quick`): what they share is made for these alone."""
    here = [item for item in request.session.items if item.path == request.path]
    return {"slow" if item.get_closest_marker("slow") else "quick" for item in here}


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    folder = Path(os.environ.get("OCTET_GSM8K", ROOT.parent / "shared" / "gsm8k"))
    if not (folder / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not in {folder}: set OCTET_GSM8K to a folder with train.jsonl and test.jsonl")
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(NANO)


def templated(tokenizer: Any, template: str | None) -> Any:
    """The tokenizer with another chat template."""
    other = copy.copy(tokenizer)
    other.chat_template = template
    return other


def random_model(folder: Path, tokenizer: Any, size: int, **changed: int) -> Path:
    """Save a random Qwen2 of two layers with the shipped tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = json.loads((NANO / "config.json").read_text())
    shape |= {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2, "initializer_range": 0.2}
    Qwen2ForCausalLM(Qwen2Config(**shape | changed)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    return random_model(tmp_path_factory.mktemp("tiny"), tokenizer, 32, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one, as a lone run has it."""
    from trainer.ranks import distributed

    before = dict(os.environ)
    distributed.connect(timeout_s=580)
    yield
    distributed.disconnect()
    os.environ.clear()
    os.environ.update(before)  # an address here would be taken for that of a group to join


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name on the PATH, which prints what it is given, `listed` for -L, and `driver` for no
    question. It notes each call in a file."""
    from trainer.machine import hardware

    def install(output: str, status: int = 0, listed: str = "", driver: str = "") -> None:
        hardware.answers.clear()
        says = {"-L": listed, "": driver, "*": output}
        cases = "".join(f"{asked or chr(39) * 2}) cat <<'END'\n{said}\nEND\n;;\n" for asked, said in says.items())
        script = f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$1" in\n{cases}esac\nexit {status}\n'
        program(tmp_path / "nvidia-smi", script)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield install
    hardware.answers.clear()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory) -> Path:
    """A certificate of this machine that signs itself, with its key in the same file."""
    file = tmp_path_factory.mktemp("certificate") / "127.0.0.1.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "-", "-out", "-", "-days", "2"]
    named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate")
    file.write_bytes(subprocess.run([*command, *named], check=True, capture_output=True).stdout)
    return file


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of so many bytes."""
    mounted = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {answer.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def group(
    rewards: list[float | None], lengths: list[int] | None = None, prompt: tuple[int, ...] = (5, 6, 7)
) -> ScoredGroup:
    """A scored group with made-up tokens: completion i is `lengths[i]` tokens long."""
    lengths = lengths or [3] * len(rewards)
    completions = tuple(
        Completion(tuple(range(10, 10 + length)), tuple([-0.5] * length), f"#### {index}", truncated=False)
        for index, length in enumerate(lengths)
    )
    scores = tuple(Score(reward, {"correct": reward}, "1", "1", bool(reward), bool(reward)) for reward in rewards)
    return ScoredGroup(Prompt(Problem("p", "q", "1"), "q", prompt), completions, scores)


def gradients(model: Any) -> dict[str, Any]:
    """The gradients of a model by name, where there are some."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def logprobs_of(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Any:
    """The log-probs of an answer, by the plainest way: one forward pass over it, without padding or chunks."""
    import torch

    logits_TV = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return (logits_TV / temperature).log_softmax(dim=-1).gather(1, torch.tensor([*answer])[:, None])[:, 0]


def row(
    prompt: int, completion: int, advantage: float, first: int = 20, reward: float = 0.0, weight: float = 1.0
) -> TrainingRow:
    """A training row of so many prompt and completion tokens."""
    tokens = [first + (index * 7) % 90 for index in range(prompt + completion)]
    return TrainingRow(tokens[:prompt], tokens[prompt:], [-1.0] * completion, advantage, reward, weight)
