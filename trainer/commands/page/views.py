"""The HTML of the page. Text from outside becomes markup in `reports/markup.py` only, which escapes it."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGUSR1
from typing import Any

from trainer.commands.page.runs import Chat, Runs, shown
from trainer.errors import DataError
from trainer.machine.console import spoken
from trainer.plan.planner import GB
from trainer.plan.search import LEVERS
from trainer.problem.task import LEFT_OUT
from trainer.reports import report
from trainer.reports.curves import groups_of
from trainer.reports.markup import Html, joined, table, tag
from trainer.reports.terminal import read_from, state
from trainer.run_folder.changed_settings import Change
from trainer.run_folder.reader import RunFiles, as_written, read_run
from trainer.run_folder.stopped import stopped
from trainer.watch.alarms import alarms_of, lasting

VERDICTS = {"fits": "It fits", "tight": "It may not fit", "too large": "It does not fit"}
NO_FOLDER = "no run folder"  # the state of a command that is loading, has failed, or whose run was deleted
RIGHT = {True: "right", False: "wrong"}
WARNING, FAILED = r"(?m)^octet: (warning: .*)", r"\noctet: (?!stopped after)(.*)$"  # in the output of a run
PROPOSED = r"task\.(?:question|answer|on_bad_record)=(?!COLUMN)\w+"  # settings that an error proposes as its remedy

Record = Mapping[str, Any]


def target(name: str, *inside: object) -> Html:
    return tag("div", *inside, id=name)


def button(name: str, action: str, into: str, text: str = "", **given: object) -> Html:
    """Return a button that sends the choices on the page, and `given`, to an action, beside the equivalent command. The
    result replaces the content of the element `into`."""
    own = {"data_do": action, "data_into": into, "data_given": json.dumps(given)}
    copy = tag("button", "Copy", type="button", data_copy="", aria_label="Copy the command")
    return tag("div", tag("button", name, type="button", **own), tag("pre", text), copy, class_="row")


def take(name: str, words: Sequence[str]) -> Html:
    """Return a button that enters options and settings of a command line into the form."""
    return tag("button", name, type="button", data_take=json.dumps(list(words)))


def error(text: str) -> Html:
    """Return the error of a command, with a button for its remedy if that is a setting."""
    settings = re.findall(PROPOSED, text.rpartition(". ")[2].partition(", or ")[0])
    name = "Leave them out" if "bad_record" in text else "Take these columns"
    message = tag("p", text.removeprefix("octet: ").strip(), class_="error")
    return joined(message, take(name, settings) if settings else "")


# ---------------------------------------------------------------- my questions


def sheet(facts: Record) -> Iterator[Html]:
    """Yield facts about a table, and the exact texts that a model will see."""
    data, counts = facts["data"], {"training": facts.get("train"), "held-out": facts["test"]}
    yield tag("p", ", ".join(f"{count:,} {what} questions" for what, count in counts.items() if count is not None), ".")
    notes = [note for note in facts["notes"] if not note.startswith(LEFT_OUT)]  # which have a table
    yield from (tag("p", f"Note: {note.rstrip('.')}.", class_="soft") for note in notes)  # which may begin with a path
    answers = [[kind, f"{one['count']:,}", "; ".join(one["such_as"])] for kind, one in data["answers"].items()]
    left_out = [[f"{one['count']:,}", one["first"]] for one in data["left_out"]]
    odd = [
        [one["where"].rpartition("/")[2], one["gold"], f"{one['count']:,}", one["kind"]]
        for one in data["odd"][: report.MOST_WRONG]
    ]
    yield table(["answers", "number", "such as"], answers, "texts") if answers else Html()
    yield table(["left out", "the first of them"], left_out) if left_out else Html()
    yield table(["unlike the others", "answer", "number", "are they right?"], odd, "texts") if odd else Html()
    if (more := len(data["odd"]) - len(odd)) > 0:
        yield tag("p", f"And {more:,} more; the command with --json has them all.", class_="soft")
    problems = facts.get("problems", [])
    yield tag("h3", "What the model will see") if problems else Html()
    for number, one in enumerate(problems):
        asked = tag("label", "Answer in its place", tag("textarea", rows="2"))
        given = {"prompt": one["text"], "answer": one["gold"]}
        place = f"tried-{number}"
        tried = (asked, button("What is it worth?", "worth", place, **given), tag("div", id=place, aria_live="polite"))
        known = f"{one['id']}, {one['tokens']} tokens; the answer is "
        yield tag("p", known, tag("code", one["gold"] or "not given"))
        yield joined(tag("pre", one["text"]), tag("details", tag("summary", f"Try {one['id']}"), *tried))


def worth(scored: Record, weights: Mapping[str, float]) -> Html:
    def number(name: str) -> str:
        return "none" if scored.get(name) is None else f"{scored[name]:.3g}"

    kinds = ("strict", "lenient")
    read = [[f"read, {kind}", scored[kind] or "nothing", RIGHT[scored[f"correct_{kind}"]]] for kind in kinds]
    parts = [[name, number(name), f"x {weight:g}"] for name, weight in weights.items()]
    return table(["", "", ""], [*read, *parts, ["reward", tag("strong", number("reward")), ""]])


def findings(found: Sequence[Record]) -> Html:
    words = {"note": "", "warn": "look", "end": "stops"}
    texts = [joined(one["seen"], " ", tag("strong", one["remedy"])) for one in found]
    return table(["", "", ""], [[one["name"], words[one["severity"]], text] for one, text in zip(found, texts)])


# ---------------------------------------------------------------- my card


def plan(found: Record) -> Iterator[Html]:
    fits = VERDICTS[found["verdict"]] if found["ram_fits"] else "Too little RAM is free on this machine"
    peak = f"{found['peak_bytes'] / GB:.1f} of {found['vram_bytes'] / GB:.1f} GB in {found['peak_phase']}"
    yield tag("p", tag("strong", fits), f": {peak}, most of it {found['dominant']}.")
    yield memory(found["phases"], found["peaks"], found["vram_bytes"])
    if about := hours(found["time"]):
        yield tag("p", f"About {about} for {found['time']['steps']} steps {found['time']['basis']}.")
    else:
        yield tag("p", "How long it takes is not known for this machine; name a card.")
    if proposal := found["proposal"]:
        yield tag("p", "Proposed: ", tag("code", " ".join(proposal)), " ", take("Take it", ["more=", *planned(found)]))


def hours(time: Record | None) -> str:
    return spoken(time["about"])[0] if time and time["about"] else ""


def planned(found: Record) -> list[str]:
    """Return the preset and settings of the command that a plan proposes, after clearing what it may change."""
    empty = [f"{key}=" for key in ("model.name", "rollout.group_size", "rollout.max_new_tokens", *LEVERS)]
    words = shlex.split(found["command"])
    return [*empty, *words[words.index("--preset") :]]


def memory(phases: Mapping[str, Mapping[str, int]], peaks: Mapping[str, int], card: int) -> Html:
    """Return a table of the memory of each phase, its share of the card, and its parts."""
    most, rows = max(card, *peaks.values()), []
    for phase, terms in phases.items():
        meter = tag("meter", value=peaks[phase], high=card, max=most, optimum=0, aria_label=phase)
        holds = ", ".join(f"{name} {size / GB:.2f}" for name, size in terms.items() if size >= GB / 200)
        rows.append([phase, meter, f"{peaks[phase] / GB:.1f}", tag("span", holds, class_="soft")])
    return table(["", "of the card", "GB", "what it holds, in GB"], rows)


def changed(preset: str, found: Sequence[Change]) -> Html:
    title = tag("summary", f"Changed against {preset}: {len(found) or 'nothing'}")
    return tag("details", title, table(["setting", preset, "now"], report.of_changes(found)))


def models(found: Sequence[Record]) -> Html:
    rows = [
        [one["model"], f"{one['peak_bytes'] / GB:.1f}", hours(one["time"]) or "?", take("Take", planned(one))]
        for one in found
    ]
    return table(["model", "GB", "about", ""], rows, "numbers") if rows else tag("p", "Nothing fits.")


# ---------------------------------------------------------------- train and result


def of_runs(runs: Runs, rows: Sequence[Sequence[str]], selected: Sequence[str]) -> Iterator[Html]:
    """Yield the list of all runs, the state of the chosen ones, and the result of a single one."""
    listed = []
    for place, (name, *cells) in enumerate(reversed(rows)):
        checked, unborn = ("" if is_so else None for is_so in (name in selected, cells[0] == NO_FOLDER))
        box = tag("input", type="checkbox", data_pick=name, checked=checked, data_unborn=unborn, id=f"run-{place}")
        listed.append([tag("label", box, name), *cells])
    yield target("runs", table(["run", "state", "model", "task", "steps", "result"], listed) if listed else "")
    named, live, outcome = runs.named(), list[Html](), list[Html]()
    try:
        chosen = {name: read_run(named[name]) for name in selected if name in named}
        with as_written(*map(Path, chosen)):
            if len(chosen) > 1:
                live += report.of_several([*chosen.values()])
            for name, run in chosen.items() if len(chosen) == 1 else ():
                live += progress(runs, run, name)
                outcome += result(run) if run.has_ended else ()
    except (DataError, OSError) as failed:
        live.append(error(str(failed)))
    for name in runs.without_folder():
        live += waiting(runs, name) if name in selected else ()
    yield target("live", *live)
    yield target("outcome", *outcome)
    yield target("chat", *(talk(runs.chats[name]) for name in selected[:1] if name in runs.chats))


def progress(runs: Runs, run: RunFiles, name: str) -> Iterator[Html]:
    """Yield the state of a run: its step, its alarms, its curves and its last answers."""
    process, output, now = runs.process(name), runs.output(name), run.current
    total = max(1, now.total_steps)
    yield tag("h3", name if now is run else f"{name}, warm-up")
    yield tag("progress", value=min(now.steps, total), max=total, aria_label=f"Step {now.steps} of {total}")
    yield tag("p", f"Step {now.steps} of {total}, {state(now)}.")
    if process is not None and not run.has_ended:
        yield button("Save and stop", "stop", "said", f"kill -USR1 {process}", run=name)
    elif stopped(run):
        yield button("Resume", "resume", "said", shown(["train", "--resume", str(run.folder)]), run=name)
        yield from (error(last) for last in re.findall(FAILED, output.strip()))
    yield from (tag("p", warning, class_="soft") for warning in re.findall(WARNING, output))
    yield from (tag("div", tag("p", alarm), class_="alarm") for alarm in lasting(now.history))
    yield tag("div", *report.figures(groups_of([now]), ["curves"]), class_="charts")
    yield tag("div", *report.samples(now.last_samples(), now.measure), class_="pair")
    yield tag("details", tag("summary", "What it has printed"), tag("pre", output)) if output else Html()


def waiting(runs: Runs, name: str) -> Iterator[Html]:
    """Yield a run that has not started yet, or has failed to start."""
    status, output = runs.status(name), runs.output(name)
    is_running = runs.process(name) is not None
    ended = "It has ended before its first step, or its folder was deleted."
    about = "It loads libraries, the model and the data." if is_running else ended
    about = "It was stopped before its first step." if status == -SIGUSR1 else about
    yield joined(tag("h3", name), tag("p", about))
    printed = output.partition("\n")[2].strip()
    if is_running:
        yield button("Stop", "stop", "said", f"kill -USR1 {runs.process(name)}", run=name)
        yield tag("pre", output)
    elif printed:
        yield error(printed)


def result(run: RunFiles) -> Iterator[Html]:
    yield report.verdict(run, alarms_of(run.history))
    yield report.evaluation(run)
    gained = [one for one in run.flips() if one.get("direction") == "gained"]
    for one in gained[: report.EXAMPLES]:
        yield report.flip(one, is_open=True)
    yield from report.still_wrong(run)


def talk(chat: Chat) -> Html:
    """Return the questions, the last at the top, with the answers of both models side by side."""
    answers, failure, process = chat.answers(), chat.failure(), chat.process.pid
    end = button("End the conversation", "hang_up", "chat", f"kill {process}", process=process)
    wait = "" if failure or len(answers) == chat.asked else "They are writing. The model loads before its first answer."
    state = error(failure) if failure else joined(end, tag("p", wait, class_="soft"))
    return joined(state, *(error(one["error"]) if "error" in one else _answers(one) for one in reversed(answers)))


def _answers(asked: Record) -> Html:
    sides, gold = [], asked["gold"]
    for one in asked["answers"]:
        name, verdict = tag("p", one["model"], class_="soft"), tag("p", RIGHT[one["right"]]) if gold else ""
        earlier = report.before_last_turn(one | {"completion": one["answer"]})
        sides.append(tag("div", name, earlier, report.answer(one["answer"], read_from(one)), verdict))
    known = tag("p", "The answer is ", tag("code", gold)) if gold else ""
    return tag("div", tag("h3", asked["question"]), known, tag("div", *sides, class_="pair"))
