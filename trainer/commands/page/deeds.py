"""The actions of the page. Each runs the `octet` command that it shows, and yields what the command has said."""

import json
import re
import shlex
import subprocess
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.commands.page import views
from trainer.commands.page.runs import Chat, Runs, command, shown
from trainer.config.command_line import flat, resolve
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.reports.markup import Html, tag
from trainer.reports.repeat import changes, joined

NAME = r"\w[\w.-]{0,63}"
SETTING = r"[a-z]\w*\.[\w.]+"
PATIENCE_S = 300.0  # for a command that a person waits for
SMALLEST_CARD = 8  # GB, where none is found and none is named

Words = list[str]


@dataclass(frozen=True)
class Choices:
    """What is chosen on the page. Fields have the names of the settings and options that they stand for."""

    given: Mapping[str, Any]

    def of(self, name: str) -> str:
        return str(self.given.get(name) or "").strip()

    def option(self, *names: str) -> Words:
        return [text for name in names if self.of(name) for text in (name, self.of(name))]

    def settings(self, *without: str) -> Words:
        """Return the settings. What is typed as such comes last, and counts. Raise ConfigError for an option there."""
        keys = (key for key in self.given if re.fullmatch(SETTING, key) and key not in without and self.of(key))
        try:
            words = [*(f"{key}={self.of(key)}" for key in keys), *shlex.split(self.of("more"))]
        except ValueError as error:
            raise ConfigError("More settings", f"a quote is open ({error})", "Close it") from None
        for word in words:
            if not re.match(f"{SETTING}=", word) or word.startswith("run.dir="):
                raise ConfigError(f"More settings: {word}", "it cannot stand here", "Write section.key=value")
        return words

    @property
    def card(self) -> Words:
        """The card that is named, or its GB."""
        named = self.of("--card")
        return [f"--{'vram' if re.fullmatch('[0-9.]+', named) else 'card'}={named}"] if named else []

    def run(self, runs: Runs) -> tuple[str, Path]:
        """Return the run of the button, or the one that is chosen."""
        names = [self.given["run"]] if "run" in self.given else list(self.given.get("runs") or [])
        if len(names) != 1:
            raise ConfigError("run", f"{len(names)} are chosen", "Choose one under Train")
        return str(names[0]), runs.place(names[0])


def told(words: Words, *more: str, typed: str = "", before: str = "") -> Generator[Html, None, str]:
    """Run a command, show it, and yield what it complains of. Return what it has printed."""
    yield views.command(f"{before}{shown(words)}")
    streams: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "input": typed}
    try:
        ended = subprocess.run(command([*words, *more]), timeout=PATIENCE_S, check=False, **streams)
    except subprocess.TimeoutExpired:
        yield views.error(f"It took more than {PATIENCE_S:g} s and was ended. Run the command in a terminal.")
        return ""
    if ended.returncode and ended.stderr:
        yield views.error(ended.stderr)
    return str(ended.stdout)


def as_json(words: Words) -> Generator[Html, None, Any]:
    """Run a command, and return what it has printed as JSON; None where it could not."""
    return json.loads((yield from told(words, "--json")) or "null")


def look(runs: Runs, chosen: Choices) -> Iterator[Html]:
    model = chosen.of("model.name") or resolve(chosen.of("--preset")).model.name
    words = ["task", "show", chosen.of("task.name"), "--model", model, *chosen.option("--preset")]
    if found := (yield from as_json([*words, *chosen.settings("task.name", "model.name")])):
        yield from views.sheet(found)


def worth(runs: Runs, chosen: Choices) -> Iterator[Html]:
    record = json.dumps({name: chosen.of(name) for name in ("prompt", "completion", "answer")})
    settings = chosen.settings("model.name")
    words = ["score", "-", *chosen.option("--preset"), *settings]
    if found := (yield from told(words, typed=record, before=f"{joined(['printf', '%s', record])} | ")):
        yield views.worth(json.loads(found), resolve(chosen.of("--preset"), None, settings).reward.weights)


def doctor(runs: Runs, chosen: Choices) -> Iterator[Html]:
    if found := (yield from as_json(["doctor", *chosen.option("--preset", "--recipe"), *chosen.settings()])):
        yield views.findings(found["findings"])


def plan(runs: Runs, chosen: Choices, *search: str) -> Iterator[Html]:
    words = ["plan", *chosen.option("--preset", "--recipe"), *chosen.card, *search, *chosen.settings()]
    if found := (yield from as_json(words)):
        yield from views.plan(found)
        preset = chosen.of("--preset")
        config = resolve(preset, chosen.of("--recipe") or None, chosen.settings())
        yield views.changed(preset, changes(flat(config.model_dump(mode="json")), preset))


def search(runs: Runs, chosen: Choices) -> Iterator[Html]:
    yield from plan(runs, chosen, "--search")


def models(runs: Runs, chosen: Choices) -> Iterator[Html]:
    here = f"--vram={hardware.detect().memory_gb or SMALLEST_CARD:.3g}"
    yield views.models((yield from as_json(["plan", *(chosen.card or [here])])) or [])


def start(runs: Runs, chosen: Choices) -> Iterator[Html]:
    """Show the command that trains."""
    yield views.command(shown(training(runs, chosen)))


def training(runs: Runs, chosen: Choices) -> Words:
    """Return the words of the command that trains. Raise ConfigError if its folder is not one below the others."""
    place = runs.folder / chosen.of("name")
    if not re.fullmatch(NAME, place.name) or place.name != chosen.of("name") or place.is_symlink():
        raise ConfigError("Name of the run", "it is made of letters, digits, dots and dashes", "Write run-1")
    return ["train", *chosen.option("--preset", "--recipe"), *chosen.settings(), f"run.dir={place}"]


def train(runs: Runs, chosen: Choices) -> Iterator[Html]:
    words, name = training(runs, chosen), chosen.of("name")
    if name in runs.named():
        raise ConfigError(f"run {name}", "there is one of this name", "Resume it below, or write another name")
    runs.start(name, words)
    yield tag("p", f"{name} is started. It goes on when this page, or its server, is closed.", data_run=name)


def resume(runs: Runs, chosen: Choices) -> Iterator[Html]:
    name, place = chosen.run(runs)
    runs.start(name, ["train", "--resume", str(place)])
    yield tag("p", f"{name} goes on from its last checkpoint.")


def stop(runs: Runs, chosen: Choices) -> Iterator[Html]:
    name, _ = chosen.run(runs)
    runs.stop(name)
    yield tag("p", f"{name} saves after its step, and stops.")


def export(runs: Runs, chosen: Choices) -> Iterator[Html]:
    _, place = chosen.run(runs)
    yield tag("pre", (yield from told(["export", str(place), *chosen.option("--to", "--format")])))


def share(runs: Runs, chosen: Choices) -> Iterator[Html]:
    name, place = chosen.run(runs)
    yield from told(["report", str(place), "--share"])
    kind = "png" if (place / "share.png").is_file() else "svg"
    picture = {"src": f"made/share.{kind}?run={quote(name)}", "alt": f"What {name} has come to", "class_": "picture"}
    yield tag("a", tag("img", **picture), href=picture["src"], download=f"{place.name}.{kind}")


def report(runs: Runs, chosen: Choices) -> Iterator[Html]:
    name, place = chosen.run(runs)
    yield from told(["report", str(place)])
    where = f"made/report.html?run={quote(name)}"
    yield tag("p", tag("a", "Open the report", href=where, target="_blank", rel="noopener"))


def ask(runs: Runs, chosen: Choices) -> Iterator[Html]:
    name, place = chosen.run(runs)
    if name not in runs.chats or runs.chats[name].failure():
        runs.chats[name] = Chat(place)
    runs.chats[name].ask(chosen.of("asked"))
    yield views.talk(runs.chats[name])


def hang_up(runs: Runs, chosen: Choices) -> Iterator[Html]:
    runs.hang_up(chosen.run(runs)[0])
    yield tag("p", "The conversation has ended, and its memory is free.")


OF_QUESTIONS, OF_A_CARD, OF_A_RUN = (look, worth, doctor), (plan, search, models), (start, train, resume, stop)
OF_A_RESULT = (export, share, report, ask, hang_up)
DEEDS = {deed.__name__: deed for deed in (*OF_QUESTIONS, *OF_A_CARD, *OF_A_RUN, *OF_A_RESULT)}
