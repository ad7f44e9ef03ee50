"""What the page shows of commands and runs. Text of others becomes markup in `reports/markup.py` only, escaped."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.commands.page.runs import Chat, Runs, shown
from trainer.errors import DataError
from trainer.machine.console import spoken
from trainer.reports import report
from trainer.reports.curves import groups_of
from trainer.reports.markup import Html, joined, table, tag
from trainer.reports.repeat import Override
from trainer.reports.terminal import state, stopped
from trainer.run_folder.reader import RunFiles, read_run
from trainer.watch.alarms import alarms_of, lasting

GB = 10**9
VERDICTS = {"fits": "It fits", "tight": "It may not fit", "too large": "It does not fit"}
RIGHT = {True: "right", False: "wrong"}
WARNING, FAILED = r"(?m)^octet: (warning: .*)", r"\noctet: (?!stopped after)(.*)$"  # in what a run has printed
PROPOSED = r"task\.(?:question|answer|on_bad_record)=\w+"  # by an error, as its remedy

Record = Mapping[str, Any]


def target(name: str, *inside: object) -> Html:
    """Return what the place of this name on the page has inside from now on."""
    return tag("div", *inside, id=name)


def button(name: str, deed: str, into: str, text: str = "", **given: object) -> Html:
    """Return a button that sends what is chosen, and what is given, to an action, and the command that does the same.
    Its answer stands at a place."""
    own = {"data_do": deed, "data_into": into, "data_given": json.dumps(given)}
    copy = tag("button", "Copy", type="button", data_copy="", aria_label="Copy the command")
    return tag("div", tag("button", name, type="button", **own), tag("pre", text), copy, class_="row")


def take(name: str, words: Sequence[str]) -> Html:
    """Return a button that puts words of a command line into the fields."""
    return tag("button", name, type="button", data_take=json.dumps(list(words)))


def error(said: str) -> Html:
    """Return what a command has complained of, with its remedy as a button where that is a setting."""
    named = re.findall(PROPOSED, said.rpartition(". ")[2])
    return joined(
        tag("p", said.removeprefix("octet: ").strip(), class_="error"),
        take("Leave them out" if "bad_record" in said else "Take these columns", named) if named else "",
    )


# ---------------------------------------------------------------- my questions


def sheet(facts: Record) -> Iterator[Html]:
    """Yield what a table holds, and the exact texts that a model will see."""
    data, counts = facts["data"], {"training": facts.get("train"), "held-out": facts["test"]}
    yield tag("p", ", ".join(f"{count:,} {what} questions" for what, count in counts.items() if count is not None), ".")
    yield from (tag("p", f"{note[:1].upper()}{note[1:]}.", class_="soft") for note in facts["notes"])
    answers = [[kind, f"{one['count']:,}", "; ".join(one["such_as"])] for kind, one in data["answers"].items()]
    left_out = [[f"{one['count']:,}", one["first"]] for one in data["left_out"]]
    odd = [[one["where"].rpartition("/")[2], one["gold"], one["kind"]] for one in data["odd"][: report.MOST_WRONG]]
    yield table(["answers", "number", "such as"], answers) if answers else Html()
    yield table(["left out", "the first of them"], left_out) if left_out else Html()
    yield table(["unlike the others", "answer", "are they right?"], odd) if odd else Html()
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
    told = [joined(one["seen"], " ", tag("strong", one["remedy"])) for one in found]
    return table(["", "", ""], [[one["name"], words[one["severity"]], text] for one, text in zip(found, told)])


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
        yield tag("p", "Proposed: ", tag("code", " ".join(proposal)), " ", take("Take it", planned(found)))


def hours(time: Record | None) -> str:
    return spoken(time["about"])[0] if time and time["about"] else ""


def planned(found: Record) -> list[str]:
    """Return preset and settings of the command that a plan proposes, in place of the model and sizes of before."""
    empty = [f"{key}=" for key in ("model.name", "rollout.group_size", "rollout.max_new_tokens")]
    words = shlex.split(found["command"])
    return [*empty, *words[words.index("--preset") :]]


def memory(phases: Mapping[str, Mapping[str, int]], peaks: Mapping[str, int], card: int) -> Html:
    """Return what each phase takes, beside the whole card, and what that is."""
    most, rows = max(card, *peaks.values()), []
    for phase, terms in phases.items():
        meter = tag("meter", value=peaks[phase], high=card, max=most, optimum=0, aria_label=phase)
        holds = ", ".join(f"{name} {size / GB:.2f}" for name, size in terms.items())
        rows.append([phase, meter, f"{peaks[phase] / GB:.1f}", tag("span", holds, class_="soft")])
    return table(["", "of the card", "GB", "what it holds, in GB"], rows)


def changed(preset: str, found: Sequence[Override]) -> Html:
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
    """Yield the list of all runs, those that are chosen, and what a chosen one has come to."""
    listed = []
    for place, (name, *cells) in enumerate(reversed(rows)):
        checked = "" if name in selected else None
        box = tag("input", type="checkbox", data_pick=name, checked=checked, id=f"run-{place}")
        listed.append([tag("label", box, name), *cells])
    yield target("runs", table(["run", "state", "model", "task", "steps", "result"], listed) if listed else "")
    named, live, outcome = runs.named(), list[Html](), list[Html]()
    try:
        found = [read_run(named[name]) for name in selected if name in named]
        live += report.of_several(found) if len(found) > 1 else ()
        for run in found if len(found) == 1 else ():
            live += going(runs, run, next(name for name in selected if name in named))
            outcome += result(run) if run.has_ended else ()
    except DataError as failed:
        live.append(error(str(failed)))
    for name in selected:
        if name in runs.started and name not in named:
            live += waiting(name, runs.status(name), runs.said(name))
    yield target("live", *live)
    yield target("outcome", *outcome)
    yield target("chat", *(talk(runs.chats[name]) for name in selected[:1] if name in runs.chats))


def going(runs: Runs, run: RunFiles, name: str) -> Iterator[Html]:
    """Yield a run as it is: how far, what is wrong with it, its curves, and its last answers."""
    process, said, total = runs.process(name), runs.said(name), max(1, run.total_steps)
    yield tag("h3", name)
    yield tag("progress", value=min(run.steps, total), max=total, aria_label=f"Step {run.steps} of {total}")
    yield tag("p", f"Step {run.steps} of {total}, {state(run)}.")
    if process is not None and not run.has_ended:
        yield button("Save and stop", "stop", "said", f"kill -USR1 {process}", run=name)
    elif stopped(run):
        yield button("Resume", "resume", "said", shown(["train", "--resume", str(run.folder)]), run=name)
        yield from (error(last) for last in re.findall(FAILED, said.strip()))
    yield from (tag("p", warning, class_="soft") for warning in re.findall(WARNING, said))
    yield from (tag("div", tag("p", alarm), class_="alarm") for alarm in lasting(run.history))
    yield tag("div", *report.figures(groups_of([run]), ["curves"]), class_="charts")
    yield tag("div", *report.samples(run.last_samples(), run.measure), class_="pair")
    yield tag("details", tag("summary", "What it has printed"), tag("pre", said)) if said else Html()


def waiting(name: str, status: int | None, said: str) -> Iterator[Html]:
    """Yield a run that has not begun yet, or could not."""
    about = "It loads libraries, the model and the data." if status is None else f"It has ended with status {status}."
    yield joined(tag("h3", name), tag("p", about))
    yield tag("pre", said) if status is None else error(said.partition("\n")[2])


def result(run: RunFiles) -> Iterator[Html]:
    """Yield what a run has come to, in parts of its report."""
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
    wait = "" if failure or len(answers) == chat.asked else "They are writing. Before the first answer the model loads."
    state = error(failure) if failure else joined(end, tag("p", wait, class_="soft"))
    return joined(state, *(error(one["error"]) if "error" in one else _said(one) for one in reversed(answers)))


def _said(one: Record) -> Html:
    sides = []
    for of in one["answers"]:
        read = of["strict"] if of["strict"] is not None else of["lenient"]
        told = tag("p", RIGHT[of["right"]]) if one["gold"] else ""
        sides.append(tag("div", tag("p", of["model"], class_="soft"), report.answer(of["answer"], read), told))
    known = tag("p", "The answer is ", tag("code", one["gold"])) if one["gold"] else ""
    return tag("div", tag("h3", one["question"]), known, tag("div", *sides, class_="pair"))
