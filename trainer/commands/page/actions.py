"""The actions of the page. Each yields its command, which is shown beside its button, then the result of running it."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.commands.page import views
from trainer.commands.page.runs import UPLOADS, Chat, Runs, held, shown
from trainer.config.resolve import flat, resolve
from trainer.config.settings import Config
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.machine.installed_files import in_a_process
from trainer.machine.safe_text import as_command
from trainer.plan.preflight import card
from trainer.plan.search import WITHOUT_A_CARD
from trainer.reports.command_of_run import changes
from trainer.reports.markup import Html, tag

NAME = r"\w[\w.-]{0,63}"
SETTING = r"[a-z]\w*\.[\w.]+"
PATIENCE_S = 300.0  # time limit of a command that a person waits for

Words = list[str]


@dataclass(frozen=True)
class Choices:
    """The choices on the page, under the names of the settings and options that they set."""

    runs: Runs
    given: Mapping[str, Any]

    def of(self, name: str) -> str:
        return str(self.given.get(name) or "").strip()

    def option(self, *names: str) -> Words:
        return [text for name in names if self.of(name) for text in (name, self.of(name))]

    def settings(self, *without: str) -> Words:
        """Return the settings, those typed as text last, which take precedence. Raise ConfigError for an option."""
        keys = (key for key in self.given if re.fullmatch(SETTING, key) and key not in without and self.of(key))
        try:
            words = [*(f"{key}={self.of(key)}" for key in keys), *shlex.split(self.of("more"))]
        except ValueError as error:
            raise ConfigError("More settings", f"a quote is open ({error})", "Close it") from None
        for word in words:
            if not re.match(f"{SETTING}=", word) or word.startswith("run.dir="):
                raise ConfigError(f"More settings: {word}", "it cannot stand here", "Write section.key=value")
        return words

    def config(self, *settings: str) -> Config:
        return resolve(self.of("--preset"), self.of("--recipe"), settings)

    @property
    def card(self) -> Words:
        """Return the option for the chosen card, which is a name or a number of GB."""
        if size := re.fullmatch(r"(?i)([0-9.]+)\s*(?:gb)?", self.of("--card")):
            return ["--vram", size[1]]
        return self.option("--card")

    def run(self) -> tuple[str, Path]:
        """Return the name and the folder of the button's run, or of the chosen run."""
        known = self.runs.named()  # a run that could not start may be chosen on the page, too, but is none
        chosen = [name for name in self.given.get("runs") or () if name in known]
        names = [self.given["run"]] if "run" in self.given else chosen
        if len(names) != 1:
            raise ConfigError("run", f"{len(names)} are chosen", "Choose one under Train")
        return str(names[0]), self.runs.place(names[0])


def output_of(words: Words, *more: str, typed: str = "", before: str = "") -> Generator[str, None, str]:
    """Yield a command, run it, and yield its error if it fails. Return its output."""
    yield f"{before}{shown(words)}"
    streams: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "input": typed}
    try:
        ended = subprocess.run(in_a_process([*words, *more]), timeout=PATIENCE_S, check=False, **streams)
    except subprocess.TimeoutExpired:
        yield views.error(f"It took more than {PATIENCE_S:g} s and was stopped. Run the command in a terminal.")
        return ""
    if ended.returncode and ended.stderr:
        yield views.error(ended.stderr.rpartition(": error: ")[2])  # without argparse's usage
    return str(ended.stdout)


def as_json(words: Words) -> Generator[str, None, Any]:
    """Run a command and return its JSON output, or None if it has failed."""
    return json.loads((yield from output_of(words, "--json")) or "null")


def look(chosen: Choices) -> Iterator[str]:
    usual = chosen.config()
    task, model = chosen.of("task.name") or usual.task.name, chosen.of("model.name") or usual.model.name
    words = ["task", "show", task, "--model", model, *chosen.option("--preset", "--recipe")]
    if facts := (yield from as_json([*words, *chosen.settings("task.name", "model.name")])):
        yield from views.sheet(facts)


def worth(chosen: Choices) -> Iterator[str]:
    record = json.dumps({name: chosen.of(name) for name in ("prompt", "completion", "answer")})
    settings = chosen.settings("model.name")
    words = ["score", "-", *chosen.option("--preset", "--recipe"), *settings]
    if scored := (yield from output_of(words, typed=record, before=f"{as_command(['printf', '%s', record])} | ")):
        yield views.worth(json.loads(scored), chosen.config(*settings).reward.weights)


def doctor(chosen: Choices) -> Iterator[str]:
    if found := (yield from as_json(["doctor", *chosen.option("--preset", "--recipe"), *chosen.settings()])):
        yield views.findings(found["findings"])


def plan(chosen: Choices, *search: str) -> Iterator[str]:
    words = ["plan", *chosen.option("--preset", "--recipe"), *chosen.card, *search, *chosen.settings()]
    if found := (yield from as_json(words)):
        if not chosen.card and not hardware.detect().gpus:
            assumed = f"{found['vram_bytes'] / views.GB:.3g} GB"
            yield tag("p", f"No GPU was found here, so a card of {assumed} is assumed. Name yours.", class_="soft")
        yield from views.plan(found)
        settings, preset = chosen.config(*chosen.settings()).model_dump(mode="json"), chosen.of("--preset")
        yield views.changed(preset, changes(flat(settings), preset))


def search(chosen: Choices) -> Iterator[str]:
    yield from plan(chosen, "--search")


def models(chosen: Choices) -> Iterator[str]:
    here = ["--vram", f"{hardware.detect().memory_gb or WITHOUT_A_CARD:.3g}"]
    if (found := (yield from as_json(["plan", *(chosen.card or here)]))) is not None:
        yield views.models(found)


def train(chosen: Choices) -> Iterator[str]:
    """Start a new run. Raise ConfigError if its name is invalid or taken."""
    name, runs = chosen.of("name"), chosen.runs
    if name == UPLOADS or not re.fullmatch(NAME, name) or (runs.folder / name).is_symlink():
        form = f"it consists of at most 64 letters, digits, dots and dashes, no dot or dash first, and is not {UPLOADS}"
        raise ConfigError("Name of the run", form, "Write run-1")
    words = ["train", *chosen.option("--preset", "--recipe"), *chosen.settings(), f"run.dir={runs.folder / name}"]
    yield shown(words)
    if name in runs.named():
        raise ConfigError(f"run {name}", "there is a run of this name", "Resume it below, or write another name")
    yield from start(chosen, "train", name, words)


def resume(chosen: Choices) -> Iterator[str]:
    name, place = chosen.run()
    words = ["train", "--resume", str(place)]
    yield shown(words)
    yield from start(chosen, "resume", name, words)


def start(chosen: Choices, action: str, name: str, words: Words) -> Iterator[Html]:
    """Start a run, or ask for confirmation if it would share this machine."""
    for other in list(chosen.runs.chats):  # a conversation holds memory of the card
        chosen.runs.hang_up(other)
    with chosen.runs.starting:  # another page may start it, too
        if chosen.runs.process(name):
            raise ConfigError(f"run {name}", "it has been started already", "Stop it below, or write another name")
        if (others := [*in_progress(chosen.runs)]) and not chosen.of("beside"):
            yield from (tag("p", f"{other[:1].upper()}{other[1:]}.") for other in others)
            yield tag("p", "A run beside it is slower, and may run out of memory.")
            yield views.button("Start it anyway", action, "said", shown(words), run=name, beside="yes")
        else:
            chosen.runs.start(name, words)
            where = "its state is below. It continues if this page or its server is closed."
            yield tag("p", f"{name}: {where}", data_run=name)


def in_progress(runs: Runs) -> Iterator[str]:
    """Yield what a run would share this machine with: runs of this user, and other programs on its cards."""
    started = {(runs.folder / name).resolve() for name in runs.started if runs.status(name) is None}
    yield from (f"the run {folder} is in progress" for folder in {*held(), *started})
    hardware.answers.clear()  # asks nvidia-smi again
    for gpu in hardware.detect().gpus:
        yield from (finding.seen for finding in card("auto", gpu) if finding.severity == "warn")


def stop(chosen: Choices) -> Iterator[str]:
    name = chosen.of("run")
    if name not in chosen.runs.started:
        name, _ = chosen.run()
    yield f"kill -USR1 {chosen.runs.process(name)}"
    chosen.runs.stop(name)
    yield tag("p", f"{name} saves after its step, and stops.")


def export(chosen: Choices) -> Iterator[str]:
    _, place = chosen.run()
    yield tag("pre", (yield from output_of(["export", str(place), *chosen.option("--to", "--format")])))


def share(chosen: Choices) -> Iterator[str]:
    name, place = chosen.run()
    if (yield from output_of(["report", str(place), "--share"])):
        kind = "png" if (place / "share.png").is_file() else "svg"
        picture = {"src": f"made/share.{kind}?run={quote(name)}", "alt": f"The result of {name}", "class_": "picture"}
        yield tag("a", tag("img", **picture), href=picture["src"], download=f"{place.name}.{kind}")


def report(chosen: Choices) -> Iterator[str]:
    name, place = chosen.run()
    if (yield from output_of(["report", str(place)])):
        where = f"made/report.html?run={quote(name)}"
        yield tag("p", tag("a", "Open the report", href=where, target="_blank", rel="noopener"))


def ask(chosen: Choices) -> Iterator[str]:
    (name, place), chats, question = chosen.run(), chosen.runs.chats, " ".join(chosen.of("asked").split())
    yield shown(["chat", str(place), *([question] if question else [])])
    if name not in chats or chats[name].failure():
        chats[name] = Chat(place)
    chats[name].ask(question)
    yield views.talk(chats[name])


def hang_up(chosen: Choices) -> Iterator[str]:
    yield f"kill {chosen.of('process')}"
    chosen.runs.hang_up(chosen.run()[0])


ACTIONS: dict[str, Callable[[Choices], Iterator[str]]] = {
    action.__name__: action
    for action in (look, worth, doctor, plan, search, models, train, resume, stop, export, share, report, ask, hang_up)
}
