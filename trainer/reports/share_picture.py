"""A picture of the result of a run, for people who do not know Octet: numbers, verdict and curve."""

from dataclasses import replace
from textwrap import wrap

import trainer
from trainer.errors import counted
from trainer.machine.safe_text import visible
from trainer.reports.chart import GREY, INK, label, svg
from trainer.reports.curves import charts_of, groups_of
from trainer.reports.markup import Html, tag
from trainer.reports.report import ends_of
from trainer.run_folder.reader import RunFiles
from trainer.watch.verdict import CANNOT_TELL, LEARNED, NOT_LEARNED

WIDTH, HEIGHT, MARGIN = 1200.0, 630.0, 60.0  # the size of previews of links
COLOURS = {LEARNED: "#1a7f37", NOT_LEARNED: "#cf222e", CANNOT_TELL: "#9a6700"}
LETTERS = 84  # per line of the verdict; of DejaVu Sans, which is wide, 86 fit
SCALE = 2.0  # of the chart, whose text is sized for a page


def picture(run: RunFiles) -> Html:
    """Return the picture as SVG. Without evaluations, the verdict replaces the two results."""
    kind, evidence = run.verdict
    model, task = (visible(run.given[key]) for key in ("model.name", "task.name"))
    model = "Octet's embedded model" if model == "nano" else model.rpartition("/")[2]
    task = "word problems" if task == "nano" else task.rpartition("/")[2].partition(".py:")[0]
    verdict = wrap(f"{kind}: {evidence}", LETTERS, max_lines=3, placeholder=" ...")
    method = "supervised training" if run.settings["warmup.only"] else "GRPO"
    made = f"{counted(run.steps, 'step')} of {method} with octet {trainer.__version__}"
    lines = [
        label(MARGIN, 78, f"{model} on {task}"[:56], GREY, size=34),
        tag("g", label(MARGIN, 190, " → ".join(ends_of(run)) or kind, COLOURS[kind], size=104), font_weight="bold"),
        *(label(MARGIN, 246 + 32 * row, line, INK, size=24) for row, line in enumerate(verdict)),
        label(MARGIN, HEIGHT - 18, made, GREY, size=20),
    ]
    for chart in charts_of(groups_of([run]), "curves")[:1]:
        wide = replace(chart, width=(WIDTH - 2 * MARGIN + 28) / SCALE, height=130.0)
        lines.append(tag("g", *wide.marks(), transform=f"translate({MARGIN - 8:g} 330) scale({SCALE:g})"))
    return svg(lines, WIDTH, HEIGHT, f"{run.name}: {kind}", alone=True)
