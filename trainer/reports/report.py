"""A page about a run, or about several: one HTML file that loads nothing and runs no script."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trainer.machine.safe_text import around, as_command, shortened
from trainer.reports import command_of_run
from trainer.reports.chart import HEIGHT, WIDTH, colour_of, line, svg
from trainer.reports.curves import CHARTS, Group, charts_of, groups_of
from trainer.reports.forecast import outlook
from trainer.reports.markup import Html, joined, page, table, tag
from trainer.reports.terminal import earlier_turns, earned, read_from
from trainer.run_folder.changed_settings import Change
from trainer.run_folder.reader import RunFiles, as_written, differing, facts_of, names_of, phases, table_rows
from trainer.run_folder.stopped import stopped
from trainer.stats import Share, corrected
from trainer.watch.alarms import Alarm, alarms_of, interval
from trainer.watch.measure import LENIENT, STRICT, Measure
from trainer.watch.verdict import CANNOT_TELL, LEARNED, NOT_LEARNED

SHORTER = {  # how to shorten the longest phase
    "rollout": "More answers at once (rollout.rows), a smaller rollout.max_new_tokens, or vLLM may shorten it. "
    "If a judge is slow (time/reward/judge in metrics.jsonl), raise reward.judge.concurrency.",
    "score": "Without algorithm.kl.coef, and with one update a step, there is nothing to compute before the update.",
    "step": "Larger optim.tokens_per_micro_batch, or no model.gradient_checkpointing, take more memory and less time.",
}
OF_TRAINING = {"task.limit", "task.curriculum", "reward.control"}  # settings that do not affect held-out problems
MOST_FLIPS = 20  # shown in each direction; all of them are in eval_flips.jsonl
EXAMPLES = 3  # answers before and after training, at the top
MOST_WRONG = 10
KWH = 3.6e6  # joules
CLASSES = {LEARNED: "verdict better", NOT_LEARNED: "verdict worse", CANNOT_TELL: "verdict"}


def report(runs: Sequence[RunFiles], reloads: bool = False) -> str:
    """Return a page about one run in full, or about the differences and curves of several."""
    title, sections = (runs[0].name, of_one(runs[0])) if len(runs) == 1 else (f"{len(runs)} runs", of_several(runs))
    with as_written(*(run.folder for run in runs)):
        return page(f"{title}: Octet", *sections, reloads=reloads)


def of_one(run: RunFiles) -> Iterator[Html]:
    alarms = alarms_of(run.history)
    yield tag("h1", run.name)
    ended = "ended" if run.has_ended else stopped(run) or "not ended"
    model, task = run.given["model.name"], run.settings["task.name"].rpartition("/")[2]
    trained = f"{model} on {task}, {run.steps} of {run.total_steps} steps"
    yield tag("p", f"{trained}, {ended}{', in its warm-up' if run.current is not run else ''}", class_="soft")
    yield from warmup(run)
    first, *others = figures(groups_of([run])) or [Html()]
    yield tag("div", verdict(run, alarms), first, class_="charts")
    flipped, titles = run.flips(), [one.capitalize() for one in run.measure.flipped]
    gained = [one for one in flipped if one.get("direction") == "gained"]
    if examples := [flip(one, is_open=True) for one in gained[:EXAMPLES]]:
        yield from section(f"{titles[0]}: {len(gained)}, {len(examples)} of them here", *examples)
    yield from still_wrong(run)
    yield from section("Curves", tag("div", *others, class_="charts") if others else Html())
    yield from section("Evaluation", evaluation(run))
    every = interval(len(run.history.steps))
    looks = tag("p", f"The rules looked at every {every}th step.", class_="soft") if every > 1 else Html()
    yield from section("Alarms", *map(alarm, alarms), looks)
    yield from section("Problems gained and lost", *flips(flipped, titles))
    yield from section("First and last answers", *samples(run.samples(), run.measure))
    yield from section("Data", *data(run))
    yield from section("Settings", settings(run))
    yield from section("Time and memory", time_and_memory(run))
    yield from section("How it was made", *how_it_was_made(run))


def of_several(runs: Sequence[RunFiles]) -> Iterator[Html]:
    names = names_of(runs)
    yield tag("h1", f"{len(runs)} runs")
    yield from section("Results", *results(runs, names))
    keys = differing([run.given for run in runs])
    rows = [[tag("code", key), *(shown(run.given[key]) for run in runs)] for key in keys]
    head = ["setting", *(names[run.folder] for run in runs)]
    yield from section("Different settings", table(head, rows) if rows else Html())
    yield from section("Curves", charts(groups_of(runs)))
    for run in runs:
        alarms = alarms_of(run.history)
        yield from section(names[run.folder], verdict(run, alarms), *map(alarm, alarms))


def warmup(run: RunFiles) -> Iterator[Html]:
    """Yield what the page leaves out about a warm-up."""
    if (first := run.before_training) is not run:
        names = [alarm.finding.name for alarm in alarms_of(first.history)]
        begun = f"Its warm-up has made {first.steps} of {first.total_steps} steps; `base` is the model after it."
        alarmed = f"Alarms of the warm-up: {', '.join(names) or 'none'}."
        command = tag("code", as_command(["octet", "report", str(first.folder)]))
        yield tag("p", f"{begun} {alarmed} Its page: ", command, class_="soft")


def section(title: str, *parts: Html) -> Iterator[Html]:
    """Yield a section. If it is empty, its text is "None.", because that is an answer, too."""
    yield tag("h2", title)
    yield joined(*parts) if any(parts) else tag("p", "None.", class_="soft")


def verdict(run: RunFiles, alarms: Sequence[Alarm]) -> Html:
    """Return the result of the run, whether it has learned, and the number of alarms."""
    kind, evidence = run.verdict
    lasting = sum(alarm.lasts for alarm in alarms)
    health = f"Alarms at the end: {lasting}. Earlier ones: {len(alarms) - lasting}." if alarms else "No alarms."
    ends = ends_of(run)
    headline = tag("p", " → ".join(ends), class_="headline") if ends else Html()
    conclusion = tag("p", tag("strong", kind), f": {evidence}")
    coming = tag("p", text, class_="soft") if (text := outlook(run)) else Html()
    return tag("div", headline, conclusion, tag("p", health, class_="soft"), coming, class_=CLASSES[kind])


def ends_of(run: RunFiles) -> list[str]:
    """Return the results of the base and of the trained model, or an empty list if one is missing."""
    ends = [run.measure.text(one[run.measure.of_model]) for one in run.evaluation.get("evaluations", [])[:2]]
    return ends if len(ends) == 2 else []


def still_wrong(run: RunFiles) -> Iterator[Html]:
    """Yield the wrong answers, with what was read and the gold answer, or those with the lowest rewards."""
    measure, answers = run.measure, [*run.trained.values()]
    if measure.is_reward:
        found = sorted((one for one in answers if one.get("reward") is not None), key=lambda one: one["reward"])
        title, head = "Lowest rewards", ["question", "reward"]
    else:
        found = [one for one in answers if not one[measure.of_answer]]
        title, head = f"Still wrong: {len(found)}", ["question", "read", "gold"]
    rows = []
    for one in found[:MOST_WRONG]:
        asked = tag("details", tag("summary", one["question"]), tag("pre", shortened(one["completion"])))
        rows.append([asked, *([f"{one['reward']:.3g}"] if measure.is_reward else [_read(one, run), one["gold"]])])
    if answers:
        more = f"{MOST_WRONG} of them; all are in eval_answers.jsonl." if len(found) > MOST_WRONG else ""
        yield from section(title, *([table(head, rows, "answers"), tag("p", more, class_="soft")] if rows else []))


def _read(one: Mapping[str, Any], run: RunFiles) -> str:
    if (read := one["lenient" if run.measure == LENIENT else "strict"]) is not None:
        return str(read)
    return "nothing" if one["lenient"] is None else f"{one['lenient']}, in another format"


def figures(groups: Sequence[Group], files: Iterable[str] = CHARTS) -> list[Html]:
    """Return all charts, the most important first, or those of some files."""
    drawn = [chart for file in files for chart in charts_of(groups, file)]
    return [tag("figure", svg(chart.marks(), WIDTH, HEIGHT, chart.title)) for chart in drawn]


def charts(groups: Sequence[Group]) -> Html:
    """Return all charts, under the names of the runs if there are several."""
    if not (drawn := figures(groups)):
        return Html()
    marks = [line([(0, 5), (14, 5)], colour_of(number), width=4) for number in range(len(groups))]
    named = [tag("li", svg([mark], 14, 10, "colour"), group.name) for mark, group in zip(marks, groups, strict=True)]
    key = tag("ul", *named, class_="key") if len(groups) > 1 else Html()
    return joined(key, tag("div", *drawn, class_="charts"))


def evaluation(run: RunFiles) -> Html:
    """Return the tables of eval.json: each model, and each pair of models in the format that is paid."""
    models, pairs = run.evaluation.get("evaluations", []), run.evaluation.get("comparisons", [])
    if not models:
        return Html()
    asked = f"{models[0]['problems']} held-out problems, greedy answers; 95 % intervals in brackets."
    first = table(["", *(model["name"] for model in models)], table_rows(models, pairs), "numbers")
    rows = []
    for pair in pairs:
        paid, difference = run.measure.pair(pair, models[0]["problems"])
        counts = [paid["gained"], paid["lost"], run.measure.change(difference), f"{paid['p']:.2g}"]
        rows.append([f"{pair['before']} → {pair['after']}", *counts])
    head = ["", *run.measure.flips.split("/"), "difference", f"p, {run.measure.test}"]
    return joined(tag("p", asked, class_="soft"), first, table(head, rows) if rows else "")


def alarm(one: Alarm) -> Html:
    found = one.finding
    title = tag("p", tag("strong", found.name), f", {one.when}")
    seen = tag("p", f"{found.seen[:1].upper()}{found.seen[1:]}.")
    remedy = tag("p", f"{found.why} {found.remedy}")
    return tag("div", title, seen, remedy, class_="alarm" if one.lasts else "alarm over")


def flips(found: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> Iterator[Html]:
    """Yield the problems that only one of two models solved, or whose rewards differ, in both directions."""
    for direction, title in zip(("gained", "lost"), titles, strict=True):
        changed = [flip for flip in found if flip.get("direction") == direction]
        more = f", {MOST_FLIPS} of them here, all in eval_flips.jsonl" if len(changed) > MOST_FLIPS else ""
        if changed:
            yield tag("h3", f"{title}: {len(changed)}{more}")
        yield from map(flip, changed[:MOST_FLIPS])


def flip(one: Mapping[str, Any], is_open: bool = False) -> Html:
    """Return a question with the answers before and after training."""
    sides = []
    for side in ("before", "after"):
        of_side = [one.get(f"{side}_{name}") for name in ("answer", "reward")]
        sides.append(tag("div", tag("p", side, class_="soft"), answer(one[f"{side}_completion"], *of_side)))
    asked = tag("summary", f"{one['question']} ", tag("strong", one["gold"]))
    return tag("details", asked, tag("div", *sides, class_="pair"), open="" if is_open else None)


def samples(found: Mapping[str, Mapping[str, Any]], measure: Measure) -> Iterator[Html]:
    """Yield answers that were sampled in training, each under its name."""
    for name, sample in found.items():
        known = "" if measure.is_reward else "; the answer is "
        facts = f", step {sample['step']}, {earned(sample)}{known}"
        title = joined(tag("strong", name, class_=name.split()[-1]), facts)
        asked = tag("details", tag("summary", "prompt"), tag("pre", shortened(sample["prompt"])))
        cut = tag("p", "cut off", class_="soft") if sample["truncated"] else ""
        gold = "" if measure.is_reward else tag("code", sample["gold"])
        written = answer(sample["completion"], read_from(sample), sample["reward"] if measure.is_reward else None)
        yield tag("div", tag("h3", title, gold), asked, before_last_turn(sample), written, cut)


def before_last_turn(sample: Mapping[str, Any]) -> Html:
    earlier = [joined(tag("p", one["role"], class_="soft"), tag("pre", one["text"])) for one in earlier_turns(sample)]
    return joined(*earlier, tag("p", "model", class_="soft") if earlier else "")


def answer(text: str, read: str | None, reward: float | None = None) -> Html:
    """Return an answer with its reward, if rewards are measured, or with what was read from it, of which the last
    occurrence is marked."""
    if reward is not None:
        return joined(tag("pre", shortened(text)), tag("p", f"reward {reward:.3g}", class_="soft"))
    before, found, after = around(shortened(text), read)
    marked = tag("pre", before, tag("mark", found) if found else "", after)
    result = joined("read: ", tag("code", read)) if read is not None else "no answer was read from it"
    return joined(marked, tag("p", result, class_="soft"))


def settings(run: RunFiles) -> Html:
    """Return the settings that differ from those of the nearest preset."""
    preset, changes = command_of_run.nearest_preset(run.given)
    note = f"Compared with preset {preset}, the nearest one. All other settings are those of the preset."
    rows = of_changes(changes)
    return joined(tag("p", note, class_="soft"), table(["setting", "preset", "this run"], rows) if rows else "")


def of_changes(changes: Sequence[Change]) -> list[list[object]]:
    return [[tag("code", one.key), shown(one.before), shown(one.now)] for one in changes]


def shown(value: object) -> str:
    return "not set" if value is None else value if isinstance(value, str) else command_of_run.yaml_of(value)


def time_and_memory(run: RunFiles) -> Html:
    """Return the seconds of each phase, its peak and planned memory, and the energy if the card counts it."""
    logged, plan = run.history.of, run.memory_plan
    seconds = {name: logged(f"time/{name}") for name in phases(run.history.steps)}
    if not seconds:
        return Html()
    whole = sum(map(sum, seconds.values()))
    peaks = [max(logged(f"memory/{name}"), default=None) for name in seconds]
    joules = [sum(logged(f"energy/{name}")) for name in seconds]
    columns = {
        "phase": [*seconds],
        "all steps": [f"{sum(values):.1f} s" for values in seconds.values()],
        "share": [f"{sum(values) / (whole or 1):.0%}" for values in seconds.values()],
        "a step": [f"{fmean(values):.2f} s" for values in seconds.values()],
        "memory at its peak": ["" if peak is None else f"{peak:.2f} GB" for peak in peaks],
    }
    if plan:
        columns["planned at most"] = [f"{plan[name] / 1e9:.2f} GB" if name in plan else "" for name in seconds]
    if any(joules):
        columns["energy of a card"] = [f"{used / KWH:.3g} kWh" for used in joules]
    longest = max(seconds, key=lambda name: sum(seconds[name]))
    most = f"Most of the time goes to {longest}. {SHORTER.get(longest, '')}"
    rows = [*zip(*columns.values(), strict=True)]
    return joined(tag("p", most, class_="soft"), table([*columns], rows, "numbers"))


def data(run: RunFiles) -> Iterator[Html]:
    """Yield which data were read, and which were left out."""
    if "sha256" in run.data:
        count, digest = run.data["training_problems"], run.data["sha256"][:16]
        yield tag("p", f"{count} training problems, whose SHA-256 begins with ", tag("code", digest))
    for note in run.data.get("notes", ()):
        is_file = "." in note.partition(" ")[0]
        yield tag("p", f"{note[:1] if is_file else note[:1].upper()}{note[1:].rstrip('.')}.")


def how_it_was_made(run: RunFiles) -> Iterator[Html]:
    """Yield the versions and the machine, and the command that repeats the run."""
    yield from (tag("p", line) for line in run.made_with)
    yield tag("p", "With the same packages, data and ranks, this repeats it if no resume has changed settings:")
    yield tag("pre", "\n".join(command_of_run.commands(run.given, run.made_with)))


def results(runs: Sequence[RunFiles], names: Mapping[Path, str]) -> Iterator[Html]:
    """Yield a table for each task: the result of each run, and its difference from the best on the same problems."""
    tasks = ranked(runs)
    for ranking in tasks:
        first, _ = ranking[0]
        if len(tasks) > 1:
            yield tag("h3", f"Task {first.settings['task.name']}")
        against = ["" if run is first else pair or "no common problems" for run, pair in ranking]
        rows = [[names[run.folder], *_result(run), cell] for (run, _), cell in zip(ranking, against, strict=True)]
        unit = "reward" if first.measure.is_reward else "points"
        head = ["run", "base", "trained", *first.measure.flips.split("/"), "steps", "training"]
        yield table([*head, f"against {names[first.folder]}, {unit}"], rows, "numbers")
    if len(tasks) > 1:
        yield tag("p", "Runs with different tasks or rewards are not compared with each other.", class_="soft")


def _result(run: RunFiles) -> list[object]:
    models, facts = run.evaluation.get("evaluations", []), facts_of(run)
    pairs, measure = run.evaluation.get("comparisons"), run.measure
    paid: Mapping[str, Any] = measure.pair(pairs[0], models[0]["problems"])[0] if pairs else {}
    shares = [measure.text(model[measure.of_model], model[f"{measure.prefix}interval"]) for model in models[:2]]
    shares += ["none yet" if run.settings["eval.problems"] else "-"] * (2 - len(shares))
    return [*shares, paid.get("gained", ""), paid.get("lost", ""), run.steps, f"{facts['training_s']:.0f} s"]


# ---------------------------------------------------------------- each run tested against the best, problem by problem


class Pair(NamedTuple):
    """The gains and losses of a run's trained model against that of another run. `p` is corrected for several runs."""

    problems: int
    gained: int
    lost: int
    p: float
    difference: Share
    change: str  # the difference with its interval

    def __str__(self) -> str:
        return f"{self.change}, p = {self.p:.2g}"


def ranked(runs: Sequence[RunFiles]) -> list[list[tuple[RunFiles, Pair | None]]]:
    """Return the runs of each task, the best first, with their differences from it on shared problems (Holm's p)."""
    tasks: dict[str, list[RunFiles]] = {}
    for run in runs:
        parts = ("task.", "reward.") if run.measure.is_reward else ("task.",)
        keys = (key for key in run.settings if key.startswith(parts) and key not in OF_TRAINING)
        code = run.code if run.measure.is_reward else []
        tasks.setdefault(str([*(run.settings[key] for key in keys), code]), []).append(run)
    rankings = []
    for of_task in tasks.values():
        values = {run.folder: facts_of(run)[run.measure.name] for run in of_task}
        first, *others = sorted(of_task, key=lambda run: (values[run.folder] is None, -(values[run.folder] or 0.0)))
        pairs = [_paired(first, run) for run in others]
        ps = iter(corrected([pair.p for pair in pairs if pair]))
        pairs = [pair and pair._replace(p=next(ps)) for pair in pairs]
        rankings.append([(first, None), *zip(others, pairs, strict=True)])
    return rankings


def _paired(before: RunFiles, after: RunFiles) -> Pair | None:
    # of runs that are paid in different formats, the answers in the one asked for are compared
    measure = before.measure if before.measure == after.measure else STRICT
    one, other = before.worth(measure), after.worth(measure)
    both = [problem for problem in one if problem in other]
    if not both:
        return None
    found = measure.compared([one[problem] for problem in both], [other[problem] for problem in both])
    return Pair(len(both), *found, measure.change(found[3], "", ""))
