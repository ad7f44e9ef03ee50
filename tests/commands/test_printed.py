"""The command lines that README.md, docs/ and gallery/ print: each is read, its settings hold, trainings start, and
the others are run over the embedded model. test_pages.py runs the blocks of the pages for new users."""

import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.commands.conftest import config_of, write
from tests.conftest import ROOT, ran
from tests.e2e.short_job import train
from tests.forks import forked
from tests.run.test_study import sums
from trainer.commands.main import COMMANDS, parser_of
from trainer.config.request import parse_command_line
from trainer.config.resolve import resolve
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
SMALL += ["prompt.max_tokens=200", "warmup.problems=4", "run.dir=it"]


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
    runs = program == "python" and bool(rest) and not rest[0].startswith("-c")
    return runs or program in ("./run_deepspeed.sh", "deepspeed", "torchrun", "bash")


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
    """A folder with what the lines name: an earlier run, and the text of a prompt."""
    style = "bench/studies/two_lines.txt"
    write(tmp_path, {"runs/demo/config.yaml": config_of(), style: (ROOT / style).read_text()})
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
    left_out = [*LEFT_OUT, *(f"{re.escape(word.partition('=')[0])}=.*" for word in SMALL)]
    kept = [word for word in arguments if not any(re.fullmatch(pattern, word) for pattern in left_out)]
    more = [] if "--preset" in kept else ["--preset", "nano"]
    if any(word.startswith("teacher.") for word in arguments) or "distill" in arguments:
        kept += ["teacher.name=nano", "teacher.quantize=none"]
    if any(word.startswith("warmup.") for word in arguments) or {"star", "warm_grpo"} & {*arguments}:
        kept += ["warmup.steps=3"]
    if "warmup.from=samples" in arguments or "star" in arguments:
        kept += ["warmup.asked=16"]
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


# What cannot be run here, and why.
NOT_RUN = {
    r"octet fetch .*|python scripts/smollm2.*|python -m scripts\.gemma3 .*|octet push .* --yes": "the network",
    r"python bench/svamp\.py .*": "a clone from the network, which tests/test_bench.py writes instead",
    r"(sbatch|deepspeed|torchrun) .*": "Slurm, or several machines",
    r"octet eval .*rollout\.vllm\.urls=.*|python -m (llama_cpp|venv).*": "a server, or another program",
    r"octet plan --model NAME .*": "the end of an answer",
    r"python (make_table|ask)\.py": "test_pages.py runs them where the page has written them",
    r"octet ui.*": "a server, which tests/ui starts",
    r"bash tests/.*|python bench/(soak|scaling).*|python -m tests.*": "tests, which are run by themselves",
}
# How a command runs here: what names a card or a model that is not here, and what would take long.
INSTEAD = {
    r"(octet (?:doctor|eval)\b.*)--preset 8gb(?: model\.quantize=nf4)?": r"\1--preset nano",
    r"--model Qwen/\S+(?= --task)": "--model nano",
    r"(octet eval.* (?:--task gsm8k|task\.name=gsm8k-renumbered)\b.*)": r"\1 task.data_dir=gsm8k",
    r"(task\.mix=.*) -n 0": r"\1 task.data_dir=gsm8k -n 0",
    r"--card NAME": "--card H100",
    r"(run\.steps=(?:100|200)\b)": r"\1 run.steps=3",
    r"(octet slurm .*run\.dir=runs/)first": r"\1new",  # a run with other settings is in `first`
    r"(octet speedrun.*)": r"\1 run.steps=2",  # below the goal; test_speedrun.py has a whole race
}
MORE = {"repro": ["--steps", "1"], **{name: ["--problems", "2"] for name in ("eval", "merge")}}
MORE |= {name: ["--dry-run"] for name in ("slurm", "study bench", "study my_study.yaml --slurm")}
# What ends with another status than 0, as its page says.
STATUS = {
    "octet reward test": 1,
    "octet speedrun": 1,
    "octet task show records task.path=shop.csv -n 1": 2,
    "octet task show records task.path=messy.csv": 2,
    "octet train task.name=gsm8k task.path=bad.jsonl": 2,
}
FEW = ["--preset", "nano", "rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=40", "run.steps=2"]
FEW += ["eval.problems=4", "eval.every=1", "run.dir=runs/demo", "run.threads=1"]
RUNS = {name: {} for name in ("first", "shop", "sweep/00", "sweep/01", "rates/00", "rates/01", "seed0")}
RUNS |= {"seed1": {"run": {"seed": 1}}, "large-rate": {"algorithm": {"lr": 0.01}}}
WRITTEN = re.search(r"    # mytools\.py\n(?:(?:    .*)?\n)+", (ROOT / "docs/environments.md").read_text())
assert WRITTEN, "the page has a tool"
CODE = {"completion": "def largest(numbers):\n    return max(numbers)", "tests": "assert largest([1, 3, 2]) == 3"}
FILES = {
    "shop.csv": "Question;Answer\n" + "".join(f"What is {n} + 2?;{n + 2}\n" for n in range(80)),
    "my.csv": "vraag,antwoord\nWat is 3 + 4?,7\nWat is 4 + 5?,9\nWat is 5 + 3?,8\n",
    "messy.csv": "question,answer\n1 + 1?,2\n2 + 2?,\n3 + 3?,n/a\n4 + 4?,8\n",
    "bad.jsonl": '{"question": "a?", "answer": "1 = 1\\n#### 1"}\n{"question": "b?", "answer": "#### five"}\n',
    "mine.py": "def score(completions, gold, **columns):\n"
    "    return [float(answer in text) for text, answer in zip(completions, gold)]\n",
    "my_rewards.py": "def brevity(completions, **columns):\n    return [1.0 for _ in completions]\n",
    "mytools.py": textwrap.dedent(WRITTEN[0]),
    "my_study.yaml": "preset: nano\nseeds: 1\narms: {grpo: {}, small: {lora.r: 4}}\nsettings: {run.steps: 1, "
    "rollout.problems: 4, rollout.group_size: 4, rollout.max_new_tokens: 8, eval.problems: 4}\n",
    "gsm8k/train.jsonl": sums(10),
    "gsm8k/test.jsonl": sums(50),
    "labelled.jsonl": {"completion": "#### 18", "answer": "18", "question": "9 * 2?"},
    "answers.jsonl": CODE,
}


def commands():
    """Yield what is run. A training is, if it names a run, or ends with a message."""
    for _, words in LINES:
        line = " ".join(words)
        begins_anew = training(words) is not None and "runs/demo/" not in line and "--resume runs/" not in line
        if not any(re.fullmatch(pattern, line) for pattern in NOT_RUN) and (not begins_anew or line in STATUS):
            yield pytest.param(words, id=line)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the files that the pages name: a run with copies of it under other names, tables, functions."""
    folder = write(tmp_path_factory.mktemp("printed") / "work", FILES)
    for name in ("examples", "slurm", "bench"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(folder / "gsm8k", folder.parent / "shared/gsm8k")
    train(folder, *FEW)
    for name, changes in RUNS.items():
        run = shutil.copytree(folder / "runs/demo", folder / "runs" / name)
        settings = yaml.safe_load((run / "config.yaml").read_text())
        for section, values in changes.items():
            settings[section] |= values
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("words", list(commands()))
def test_a_printed_command_runs(words, work):
    line = "\0".join(words)
    for pattern, other in INSTEAD.items():
        line = re.sub(pattern.replace(" ", "\0"), other.replace(" ", "\0"), line)
    program, *rest = line.split("\0")
    rest += next((more for name, more in MORE.items() if " ".join(rest).startswith(name)), [])
    rest = [path for word in rest for path in (sorted(map(str, work.glob(word))) if word[-1:] == "*" else [word])]
    for written in work.glob("runs/*/export-*"):  # of the line before, which this one must not find
        shutil.rmtree(written)
    command, where = (["-m", "trainer.commands.main", *rest], work) if program == "octet" else (rest, ROOT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = ran(*forked(), *command, cwd=where, env=environment, timeout=590, input="")
    status = next((status for name, status in STATUS.items() if " ".join(words).startswith(name)), 0)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
