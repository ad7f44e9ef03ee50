"""bench/results/learning.md: what was learned, and how certain that is where a study says it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from trainer.config.read_yaml import read_yaml
from trainer.reports.study import BETTER, CANNOT_TELL, WORSE
from trainer.reports.study_page import drawings, sentences, tables
from trainer.stats import FOUND, mcnemar

LEAST, MOST = 0.93, 0.97  # shares of studies near the 95 % that are claimed
POINTS = 17  # of accuracy for a logit, at 50 % and with the spread of difficulties in bench/coverage.py
VERDICTS = (BETTER, WORSE, CANNOT_TELL)
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
STUDY_FILES = Path(__file__).parent / "studies"
DOCS = "../../docs"
HEAD = f"""# What was learned: all tables

The sections that `octet study` made have intervals and tests; the others list their seeds, and one of them has a single
seed. [The evidence]({DOCS}/evidence.md) says what follows. `python bench/report.py` makes this page from the files
beside it. Each experiment is a file in `bench/studies/`, and [studies]({DOCS}/studies.md) says how a study judges.

"""
STUDIES = {
    "controls": ("The right reward and its controls", "The embedded model, 15 steps of 128 answers."),
    "ablations": (
        "What changes the result",
        "The embedded model, one setting changed at a time; `plain` makes one update of each batch. Gradient"
        f" regularisation is described in [objectives]({DOCS}/objectives.md#gradient-regularisation).",
    ),
    "losses": (
        "Losses",
        "The embedded model, four updates of each batch. With one, the ratio to the sampler is 1, and REINFORCE with a"
        " baseline, GSPO and CISPO are the same loss as GRPO's.",
    ),
    "adapters": (
        "Adapters",
        "The embedded model, at the learning rate of its preset, 3e-3; `full_slow` trains the whole model with a tenth"
        " of it.",
    ),
    "samples": (
        "Answers to 90 percent",
        "The embedded model. The learning rate rises over one step with `short_rise`, and over four with the default."
        f" `half_as_long` has 20 steps, as has `muon`, with [orthogonal updates]({DOCS}/training.md#the-optimizer),"
        " whose learning rate was chosen with seeds 0 to 2.",
    ),
    "shaping": (
        "Rewards beside right answers",
        "The embedded model, which skips its working where answers of at most 8 characters are paid. Numbers are"
        f" weights in hundredths; `divided` has `reward.gate=false`. See [rewards]({DOCS}/rewards.md).",
    ),
    "shaping_terms": (
        "Rewards beside right answers, the terms of the presets",
        "The embedded model; `preset` has the weights of the presets for cards: the format, and 50 to 500 characters.",
    ),
    "shaping_smollm2": (
        "Rewards beside right answers, SmolLM2",
        "SmolLM2-135M on sums, where a bare number is as right as an equation and shorter; 20 steps of 64 answers.",
    ),
    "addition_cpu": (
        "SmolLM2-135M on sums, with controls",
        "20 steps of 8 sums with 8 answers each, on one core of a CPU; `model.name` is the folder that"
        " `scripts/smollm2.py` makes.",
    ),
    "samples_smollm2": (
        "SmolLM2-135M on sums, each batch used twice",
        "As above, with five seeds. A second epoch takes more time, and no more answers.",
    ),
    "adapters_smollm2": (
        "SmolLM2-135M on sums, adapters",
        "As above; alpha is twice the rank, and the learning rate that of the preset, 3e-4, but for `whole` (3e-5).",
    ),
    "bf16_base": (
        "A base in bf16",
        "SmolLM2-135M on sums as above; `bf16` has `model.quantize=bf16`, on an AMD EPYC with AVX512-BF16.",
    ),
    "int8_sampler": (
        "Answers from weights in 8 bits",
        "SmolLM2-135M on sums as above; with `rollout.weights` decode steps read the base in 8 bits, on a CPU.",
    ),
    "gym_products": (
        "SmolLM2-135M with a calculator",
        "`products` of reasoning-gym; the calculator goes on after each `=`. 12 steps of 8 x 8 answers. The controls"
        " ran at revision df0b12ec; one seed of `right` was stopped and resumed.",
    ),
    "gym_word_order": (
        "SmolLM2-135M on the order of words",
        "`word_sequence_reversal` of reasoning-gym, two or three words; 12 steps of 8 x 8 answers. The"
        " controls ran at revision df0b12ec, where partly right answers were paid and `right` ended at 39 %.",
    ),
    "gym_number_filter": (
        "SmolLM2-135M on numbers above and below a bound",
        "`number_filtering` of reasoning-gym, three numbers below 100; 16 steps of 8 x 8 answers.",
    ),
    "gym_word_order_gemma": (
        "Gemma 3 270M on the order of words",
        "As above, with the weights of the package that `scripts/gemma3.py` reads, a smaller rate and 20 steps.",
    ),
    "svamp": (
        "SmolLM2-135M on SVAMP, with a calculator",
        "Trained on MAWPS and ASDiv-A, asked all 1,000 problems of SVAMP; 30 steps of 16 x 8 answers. The controls had"
        " `model.dtype=fp32`, on CPUs that do not multiply bf16 faster.",
    ),
    "svamp_format": (
        "SmolLM2-135M on SVAMP, and the format alone",
        "The rewarded runs again, beside runs that are paid for the form of an answer, on one AMD EPYC. With"
        " three seeds p was 0.077, so there are six. The first seed of both was stopped and resumed.",
    ),
    "gsm8k_cpu": (
        "SmolLM2-135M on GSM8K, equations and a calculator",
        "From one warm-up, whose accuracy is that of `base`; 12 steps of 80 x 16 answers. One seed ran with two ranks."
        " The third seed with random rewards and `supervised` had `model.quantize=none`, on a CPU that multiplies bf16"
        " no faster.",
    ),
    "gsm8k_longer": (
        "SmolLM2-135M on GSM8K, after a longer warm-up",
        "As above, from the first seed of `supervised`, whose accuracy is that of `base`.",
    ),
    "calculator": (
        "A model that learns to call a calculator",
        "The embedded model, 80 steps on problems whose results are above 99, which it cannot compute by itself; `base`"
        " is the untrained model with the calculator.",
    ),
    "maze": ("A maze", "The embedded model in `examples/maze.py`, where each new room is worth a tenth."),
    "parallel_agent": (
        "An agent that asks twice in parallel",
        f"The embedded model, once in the process and once through [an agent]({DOCS}/agents.md).",
    ),
}
SHARED = {*STUDIES} - {"controls"}  # other programs ran beside them


EMBEDDED, SMOL, GEMMA = "embedded, 0.65 M", "SmolLM2-135M", "Gemma 3 270M"
RESULTS_HEAD = """# Results

What models have learned with Octet. Each row comes from a file with all seeds that were run. Accuracy is that of greedy
answers to held-out problems, in the requested format. [Evidence](evidence.md) has the questions behind it, and [all
tables](../bench/results/learning.md) the intervals and tests. `octet repro gallery/default`
repeats the first steps of a run with an adapter.

"""
RESULTS_TAIL = """
[What a 135 M model learns here](small_model_learns.md) also lists what was not learned.
"""
# results with a page in gallery/, and the link's text
SHOWN = {
    "seeds": ("default", "run"),
    "studies/calculator": ("calculator", "run"),
    "studies/maze": ("maze", "run"),
    "studies/addition_cpu": ("sums", "run with rank 4"),
    "studies/gym_products": ("products", "run with rank 8"),
    "studies/gym_word_order": ("words", "run with rank 8"),
    "studies/gym_word_order_gemma": ("gemma", "run with rank 8"),
    "studies/svamp_format": ("svamp", "run with rank 8"),
    "studies/gsm8k_cpu": ("gsm8k", "run"),
}
# model, task, file, the arm that learns, what is beside it, and the command that repeats it
SUMMARY: tuple[tuple[str, str, str, str, tuple[str, ...], str], ...] = (
    (EMBEDDED, "word problems", "seeds", "", (), "octet train --preset nano"),
    (EMBEDDED, "word problems, 15 steps", "studies/controls", "right", ("format", "random", "shuffled_gold",
     "shuffled_advantages", "supervised"), "octet study bench/studies/controls.yaml"),
    (EMBEDDED, "a maze of several turns", "studies/maze", "maze", ("random",), "octet study bench/studies/maze.yaml"),
    (SMOL, "sums, 20 steps", "studies/addition_cpu", "right", ("random", "shuffled_gold", "shuffled_advantages",
     "format", "supervised"), "octet study bench/studies/addition_cpu.yaml"),
    (SMOL, "sums, 60 steps", "addition", "right", ("random",), "octet study bench/studies/addition.yaml"),
    (SMOL, "products, with a calculator", "studies/gym_products", "right", ("random", "format"),
     "octet study bench/studies/gym_products.yaml"),
    (SMOL, "words in the opposite order", "studies/gym_word_order", "right", ("random", "format"),
     "octet study bench/studies/gym_word_order.yaml"),
    (GEMMA, "words in the opposite order", "studies/gym_word_order_gemma", "right", ("random", "format"),
     "octet study bench/studies/gym_word_order_gemma.yaml"),
    (SMOL, "numbers and a bound, perhaps the format alone", "studies/gym_number_filter", "right",
     ("random", "format"), "octet study bench/studies/gym_number_filter.yaml"),
    (SMOL, "SVAMP, with a calculator", "studies/svamp", "right", ("random", "supervised"),
     "octet study bench/studies/svamp.yaml"),
    (SMOL, "SVAMP again", "studies/svamp_format", "right", ("format",),
     "octet study bench/studies/svamp_format.yaml"),
    (SMOL, "GSM8K, equations and a calculator", "studies/gsm8k_cpu", "right", ("random", "supervised"),
     "octet study bench/studies/gsm8k_cpu.yaml"),
    (SMOL, "GSM8K, after a longer warm-up", "studies/gsm8k_longer", "right", (),
     "octet study bench/studies/gsm8k_longer.yaml"),
    (SMOL, "GSM8K, by worked solutions", "gsm8k", "warm_grpo", (), "octet warmup --preset smollm2-gsm8k"),
    (EMBEDDED, "word problems, with a teacher", "teaching", "teacher", ("grpo",),
     "octet study bench/studies/teaching.yaml"),
    (EMBEDDED, "results above 99, with a calculator", "studies/calculator", "calculator", ("without",),
     "octet study bench/studies/calculator.yaml"),
)  # fmt: skip


def results_page() -> str:
    head = ["model", "task", "before", "after, each seed", "beside it, means", "hardware", "repeats it", "files"]
    return RESULTS_HEAD + "\n".join(markdown(head, map(_summary_row, SUMMARY))).rstrip() + "\n" + RESULTS_TAIL


def _summary_row(row: tuple[str, str, str, str, tuple[str, ...], str]) -> list[str]:
    model, task, name, arm, others, command = row
    before, after = _before_and_after(name, arm)
    beside = ", ".join(f"{other.replace('_', ' ')} {fmean(_before_and_after(name, other)[1]):.1%}" for other in others)
    seeds = ", ".join(f"{one:.1%}" for one in after)
    found = read(name)
    machine = found.get("machine") or {"card": found["made_with"][1].partition("; ")[2].removeprefix("no GPU found, ")}
    hardware = re.sub(r"\b1 CPU cores", "1 CPU core", machine.get("card") or f"{machine['cores']} CPU cores")
    said = [model, task, f"{before:.1%}", seeds, beside, hardware, f"`{command}`"]
    return [*said, ", ".join(f"[{what}](../{file})" for what, file in _files(name, command))]


def _files(name: str, command: str) -> Iterator[tuple[str, str]]:
    """Yield the files behind a row: its numbers, its settings, and the page and adapter of a run that is shown."""
    yield "numbers", f"bench/results/{name}.json"
    last = command.rsplit(maxsplit=1)[-1]
    yield "settings", last if last.endswith(".yaml") else f"trainer/config/presets/{last}.yaml"
    if name in SHOWN:
        run, text = SHOWN[name]
        yield text, f"gallery/{run}.md"
        if (ROOT / (adapter := f"gallery/{run}/adapter")).is_dir():
            yield "adapter", adapter


def _before_and_after(name: str, arm: str) -> tuple[float, list[float]]:
    """Return the accuracy before training, and that of each seed after it."""
    found = read(name)
    if "arms" in found:
        return found["arms"]["base"]["strict"][0], found["arms"][arm]["strict"]
    ends = [one for run in found["runs"] if run.get("arm", "") == arm for one in [_ends(run)]]
    return fmean(before for before, _ in ends), [after for _, after in ends]


def _ends(run: Mapping[str, Any]) -> tuple[float, float]:
    if "trained" in run:
        return run["base"], run["trained"]
    first, *_, last = run.get("warmup", run)["curve"]
    return first["strict"], last["strict"]


def page() -> str:
    studies = [line for name, text in STUDIES.items() for line in _study(name, *text)]
    return "\n".join([HEAD, *studies, *_addition(), *_gsm8k(), *_renumbered(), *_teaching(), *_coverage()])


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def on(machine: Mapping[str, Any]) -> str:
    """Return the machine, versions and command of a measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    card = f"one {machine['card']} and " if "card" in machine else ""
    return f"`{machine['command']}` on {card}{machine['cores']} cores of {machine['processor']}; {versions}.\n"


def earlier(machine: Mapping[str, Any], study: str) -> str:
    """Return the machine and command of an experiment that a program made before there were studies."""
    return f"Made by an earlier program; `octet study bench/studies/{study}.yaml` repeats the experiment. {on(machine)}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join(['---', *['---:'] * (len(head) - 1)])} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _study(name: str, title: str, what: str) -> Iterator[str]:
    if not (RESULTS / f"studies/{name}.json").is_file():
        return
    found, study = read(f"studies/{name}"), read_yaml((STUDY_FILES / f"{name}.yaml").read_bytes())
    settings = " ".join(f"{key}={value}" for key, value in study.get("settings", {}).items())
    yield f"## {title}\n"
    yield f"{what} Every run: `--preset {study['preset']} {settings}`.\n"
    yield from (f"- {sentence}" for sentence in sentences(found))
    yield f"\n![Differences with their intervals]({DOCS}/study_{name}.svg)\n" if [*drawings(found)] else ""
    for heading, head, rows in tables(found):
        has_seconds = name in SHARED and heading.startswith("Accuracy")  # in the last column, and they compare nothing
        yield f"\n{heading}:\n"
        yield from markdown(head[:-1], [row[:-1] for row in rows]) if has_seconds else markdown(head, rows)
    if name == "samples":
        yield from _answers_to(0.9, found["runs"])
    if (RESULTS / "verdicts.json").is_file() and name == read("verdicts")["study"]:
        yield from _verdicts()
    yield f"`octet study bench/studies/{name}.yaml`; {'; '.join(found['made_with'])}.\n"


def _answers_to(goal: float, runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how many answers each arm had sampled when it reached an accuracy, between two evaluations in a line."""
    reached: dict[str, list[float]] = {}  # infinite if it never did
    for run in runs:
        reached.setdefault(run["arm"], []).append(inf)
        for before, after in pairwise(run["curve"]):
            if before["strict"] < goal <= after["strict"]:
                share = (goal - before["strict"]) / (after["strict"] - before["strict"])
                samples = before["samples"] + share * (after["samples"] - before["samples"])
                reached[run["arm"]][-1] = samples
                break
    yield f"\nAnswers sampled until {goal:.0%} of the held-out problems were right:\n"
    written = {
        arm: [f"{one:,.0f}".replace("inf", "never") for one in [median(each), *each]] for arm, each in reached.items()
    }
    yield from markdown(
        ["arm", "median", "each seed"], [[arm, middle, ", ".join(each)] for arm, (middle, *each) in written.items()]
    )


def _verdicts() -> Iterator[str]:
    found = read("verdicts")
    yield f"Every choice of {found['seeds']} of these seeds, judged as a study of its own ({found['studies']} studies,"
    yield "which overlap), says of each arm against the untrained base:\n"
    alone = found["with_random_alone"]
    rows = [[arm, *(str(count.get(one, 0)) for one in VERDICTS)] for arm, count in found["verdicts"].items()]
    rows += [[f"{arm}, of these two arms", *(str(alone[arm].get(one, 0)) for one in VERDICTS)] for arm in alone]
    yield from markdown(["arm", *VERDICTS], rows)
    yield "Holm's correction is over eleven comparisons with all arms, and over three with two. Three seeds are few.\n"


def _addition() -> Iterator[str]:
    yield "## SmolLM2-135M on sums\n"
    yield f"Strict accuracy on held-out sums, 60 steps of GRPO ([the evidence]({DOCS}/evidence_small_model.md)).\n"
    yield f"![Accuracy on held-out sums]({DOCS}/addition.svg)\n"
    yield from _by_arm("addition")
    before, shown = read("addition")["untrained"]
    yield f"Before training, `{before['command']}` on {before['machine']}, {before['problems']} of these sums:"
    yield f"{before['greedy']:.1%} greedily; sampled, avg@8 {before['avg@8']:.1%}, pass@2 {before['pass@2']:.1%},"
    yield f"pass@4 {before['pass@4']:.1%}, pass@8 {before['pass@8']:.1%}. With eight solved sums in the prompt"
    yield f"(`{shown['command']}`): {shown['greedy']:.1%}.\n"


def _gsm8k() -> Iterator[str]:
    (run,) = read("gsm8k")["runs"]
    yield "## SmolLM2-135M on GSM8K\n"
    yield "Steps of worked solutions, greedy answers to all 1,319 test problems, one seed; the loss is that of a token"
    yield "of the solutions.\n"
    rows = [
        [str(one["step"]), f"{one['strict']:.1%}", f"{one['lenient']:.1%}", f"{one['loss']:.3f}"]
        for one in run["warmup"]["curve"]
    ]
    yield from markdown(["step", "strict", "any format", "loss"], rows)
    yield f"![Accuracy on GSM8K in the warm-up]({DOCS}/warmup_gsm8k.svg)\n"
    sampled = run["accuracy/strict"]
    middle = len(sampled) // 2
    yield f"GRPO after it was not run to its end, nor were its controls. In its {len(sampled)} steps of 256 answers"
    yield f"{fmean(sampled[:middle]):.1%} of the sampled answers were right in the first half, and"
    yield f"{fmean(sampled[middle:]):.1%} in the second. The held-out problems were not asked again."
    yield earlier(read("gsm8k")["machine"], "gsm8k")


def _renumbered() -> Iterator[str]:
    found = read("gsm8k_renumbered")
    solved = {
        kind: {model: [one == "1" for one in bits] for model, bits in of_kind.items()}
        for kind, of_kind in found["solved"].items()
    }
    gained, lost, p = mcnemar(*solved["new"].values())
    yield "## GSM8K with new numbers\n"
    yield f"The warm-up of the study above and its first seed of GRPO, on the {len(solved['new']['warm'])} test"
    yield f"problems that [can have other numbers]({DOCS}/evaluation.md#contamination); with their own numbers they"
    yield "are from the study.\n"
    rows = [[f"{kind} numbers", *(f"{fmean(one):.1%}" for one in of_kind.values())] for kind, of_kind in solved.items()]
    yield from markdown(["", "warm-up", "GRPO"], rows)
    yield f"With new numbers {gained} problems were gained and {lost} lost (p = {p:.2g}). `{found['command']}`,"
    yield "and the same with `gallery/gsm8k/warm`.\n"
    sampled = found["sampled"]
    before, after = (sampled["models"][name] for name in ("warm", "grpo"))
    yield f"Eight answers to each of {sampled['problems']} test problems at temperature {sampled['temperature']}:"
    yield ", ".join(f"{name} {before[name]:.1%} before GRPO and {after[name]:.1%} after it" for name in before)
    yield f"(`{sampled['command']}`).\n"
    yield f"{found['made_with']}; one core of an {found['machine']['cpu']}.\n"


def _teaching() -> Iterator[str]:
    yield "## A teacher against GRPO\n"
    yield f"The embedded model, 512 held-out problems, 40 steps; [warm start]({DOCS}/warmup.md) has the curves.\n"
    yield from _by_arm("teaching")


def _by_arm(name: str) -> Iterator[str]:
    found = read(name)
    arms = dict.fromkeys(run["arm"] for run in found["runs"])
    rows = []
    for arm in arms:
        curves = [run["curve"] for run in found["runs"] if run["arm"] == arm]
        before, after = ([one[place]["strict"] for one in curves] for place in (0, -1))
        rows.append([arm, str(len(curves)), f"{fmean(before):.1%}", ", ".join(f"{one:.1%}" for one in after)])
    yield from markdown(["arm", "seeds", "before", "after, each seed"], rows)
    yield earlier(found["machine"], name)


def _coverage() -> Iterator[str]:
    if not (RESULTS / "coverage.json").is_file():
        return
    found = read("coverage")
    yield "## How far the intervals of a study can be trusted\n"
    yield f"{found['studies']:,} simulated studies of each design; the spread of seeds is a standard deviation in"
    yield "logits.\n"
    rows = []
    for one in found["coverage"]:
        design = [f"{one['seeds']}", f"{one['problems']:,}", f"{one['before']:.0%}, {one['after']:.0%}"]
        rows.append([*design, f"{one['of_seed']}", f"{one['coverage']:.1%}", f"± {100 * one['half_width']:.1f}"])
    yield from markdown(["seeds", "problems", "accuracies", "spread of seeds", "contains the truth", "points"], rows)
    yield from _how_often(found["coverage"])
    alarms = [one["false_alarms"] for one in found["false_alarms"]]
    yield f"Studies of {found['false_alarms'][0]['arms']} arms and a base without any effect raise an alarm, after"
    yield f"Holm's correction, in {min(alarms):.1%} to {max(alarms):.1%} of cases, {fmean(alarms):.1%} on average. A"
    powers = [one["found"] for one in found["power"]]
    yield f"difference that a study says it finds in about {FOUND:.0%} of cases is found in"
    added = f"`{found['added']}` afterwards; " if "added" in found else ""
    yield f"{min(powers):.0%} to {max(powers):.0%}, {fmean(powers):.0%} on average. {added}{on(found['machine'])}"


def _how_often(designs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In words, how often the intervals contain the truth, and whether the spread of seeds is that of real ones."""
    shares = [one["coverage"] for one in designs]
    below = sum(one < LEAST for one in shares)
    above = [one["of_seed"] for one in designs if one["coverage"] > MOST]
    yield "The intervals should contain the truth in 95 % of studies. They do in"
    yield f"{min(shares):.1%} to {max(shares):.1%}. Of {len(shares)} designs, {below} lie below {LEAST:.0%}, and"
    yield f"{len(above)} above {MOST:.0%}, whose intervals are wider than they need be; in {above.count(0.0)} of these,"
    yield "seeds do not differ at all."
    for spread in sorted({one["of_seed"] for one in designs} - {0.0}):
        count = sum(one["of_seed"] == spread for one in designs)
        yield f"A spread of {spread}, in {count} of the designs, is about {POINTS * spread:.0f} points at 50 %."
    if (RESULTS / "studies/controls.json").is_file():
        arms = read("studies/controls")["arms"].items()
        spreads = {name: 100 * stdev(one["strict"]) for name, one in arms if len({*one["strict"]}) > 1}
        yield "The standard deviations of real seeds, those of the study with controls above, are:"
        yield f"{', '.join(f'{name} {points:.1f}' for name, points in spreads.items())} points."
    yield ""
