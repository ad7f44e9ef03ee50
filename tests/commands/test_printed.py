"""The command lines that README.md, docs/ and gallery/ print: each is read, its settings hold, each training starts."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.short_job import train
from trainer.commands.main import COMMANDS, parser_of
from trainer.config.command_line import parse_command_line, resolve
from trainer.errors import ConfigError

PAGES = [ROOT / "README.md", *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "gallery").glob("*.md")])]
INLINE = r"`((?:octet|python|bash|sbatch|deepspeed|\./run)[^`]+)`"
BLOCK = re.compile(r"^```\w*\n(.*?)^```$|((?:^ {4}.*\n)+)|" + INLINE, re.MULTILINE | re.DOTALL)
REFUSED = {"rollout.group_size=1": "it shows the message"}
NOT_HERE = {
    "make_table.py": "the page writes it",
    "ask.py": "the page writes it",
    "bench/arms.py": "an earlier program, which results were made with",
    "llama_cpp/server.py": "another project's",
    "vllm/entrypoints/openai/api_server.py": "another project's",
    "venv.py": "Python's",
}
SBATCH = {"eval.sbatch": "eval"}  # the others take what `octet train` takes
# What a start does without, and why. It is of the embedded model and task, which the test writes behind.
LEFT_OUT = {
    r"(model|task|prompt|lora\.start|warmup\.steps|run\.dir)[.\w]*=.*": "another model or task, files, sizes",
    r"(rollout\.vllm|rollout\.engine)[.\w]*=.*": "a server or a card",
    r"(reward\.judge|reward\.custom|run\.track|reward\.weights)[.\w]*=.*": "a server, files, an account",
    r"teacher\.(name|url|adapter)=.*": "another model, a server",
}
SMALL = ["model.name=nano", "task.name=nano", "prompt.style=auto", "model.quantize=none", "model.quantize_head=none"]
SMALL += ["model.embeddings=device", "rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16"]
SMALL += ["run.steps=2", "run.merge=false", "run.threads=1", "eval.problems=4", "algorithm.minibatches=1"]
SMALL += ["prompt.max_tokens=200", "warmup.problems=4", "warmup.asked=16", "run.dir=it"]


def printed() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of each command, without variables before it and what follows a pipe or `&&`."""
    for page in PAGES:
        for fenced, indented, inline in BLOCK.findall(page.read_text()):
            for line in re.sub(r"\\\n\s*", "", fenced or indented or inline).splitlines():
                bare = re.sub(r"^\s*(\$ )?(\w+=\S+ )*", "", line)
                for part in re.split(r" (?:&&|\|\||\||>>?|&)(?: |$)", bare):
                    words = _words(re.split(r"  +|,  |\s#", part.strip())[0])
                    if words and _is_command(words, bool(inline)):
                        yield page.name, words


def _words(text: str) -> list[str]:
    try:
        return [word for word in shlex.split(text, comments=True) if word != "..."]
    except ValueError:  # a quotation mark of a sentence
        return []


def _is_command(words: list[str], is_inline: bool) -> bool:
    program, *rest = words
    if is_inline and not any("--" in word or "=" in word for word in rest):
        return False  # the name of a command
    if program == "octet":
        return bool(rest) and rest[0] in COMMANDS
    if program == "sbatch":
        return any(word.endswith(".sbatch") for word in rest)  # else it is a sentence
    return program in ("./run_deepspeed.sh", "deepspeed", "torchrun", "bash") or (
        program == "python" and bool(rest) and not rest[0].startswith("-c")
    )


LINES = list({" ".join(words): (page, words) for page, words in printed()}.values())


def training(words: list[str]) -> list[str] | None:
    """Return the arguments of train.py, or None for another command."""
    program, *rest = words
    if program == "octet" and rest[0] in ("train", "warmup"):
        return [*rest[1:], *(["warmup.only=true"] if rest[0] == "warmup" else [])]
    if program == "./run_deepspeed.sh":
        return rest
    return rest[rest.index("train.py") + 1 :] if "train.py" in rest else None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the lines name: an earlier run, and settings for a batch."""
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/config.yaml").write_text(resolve("nano").to_yaml())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "words"), LINES, ids=[" ".join(words) for _, words in LINES])
def test_a_printed_line_is_one_that_is_taken(page, words, folder):
    arguments, (program, *rest) = training(words), words
    if program == "sbatch":
        script = next(word for word in rest if word.endswith(".sbatch"))
        if script.startswith("runs/"):
            return
        assert (ROOT / script).is_file()
        arguments = rest[rest.index(script) + 1 :]
        if name := SBATCH.get(Path(script).name):
            arguments, rest, program = None, [name, *arguments], "octet"
    if arguments is not None and any(word in REFUSED for word in arguments):
        with pytest.raises(ConfigError):
            parse_command_line(arguments)
    elif arguments is not None:
        assert parse_command_line(arguments).config
    elif program == "octet":
        options = parser_of(rest[0]).parse_intermixed_args(rest[1:])
        preset = getattr(options, "preset", None) or "nano"
        settings = [text for text in getattr(options, "overrides", None) or [] if "=" in text]
        settings = [f"task.name={options.task}", *settings] if getattr(options, "task", None) else settings
        assert resolve(preset, getattr(options, "recipe", None), settings)
    elif program in ("python", "bash"):
        file = f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0]
        if file in NOT_HERE:
            return
        source = (ROOT / file).read_text() + (ROOT / "bench/seeds.py").read_text() * file.startswith("bench/")
        assert not [word for word in rest[1:] if word.startswith("--") and f'"{word}"' not in source]


def test_there_are_such_lines():
    assert len(LINES) > 100
    assert sum(training(words) is not None for _, words in LINES) > 30


def started(arguments: list[str]) -> list[str]:
    """Return how a training is started here. Many of the lines are one and the same then."""
    kept = [word for word in arguments if not any(re.fullmatch(pattern, word) for pattern in LEFT_OUT)]
    more = [] if "--preset" in kept else ["--preset", "nano"]
    if any(word.startswith("teacher.") for word in arguments) or "distill" in arguments:
        kept += ["teacher.name=nano", "teacher.quantize=none"]
    if any(word.startswith("warmup.") for word in arguments) or {"star", "warm_grpo"} & {*arguments}:
        kept += ["warmup.steps=3"]
    return [*more, *kept]


STARTS = {
    " ".join(started(arguments)): started(arguments)
    for _, words in LINES
    if (arguments := training(words)) is not None
    and not any(word in REFUSED or word in ("--dry-run", "--resume") for word in arguments)
}
QUICK = ["--preset nano --recipe dapo", "--preset 8gb"]


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(one, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, one in STARTS.items()],
)
def test_a_printed_training_starts(arguments, folder):
    train(folder, *arguments, *SMALL)
    assert (folder / "it/verdict.json").is_file()
