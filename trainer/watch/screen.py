"""Show the progress of a run or a task: a live screen on a terminal, lines in a log file."""

import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from rich.console import RenderableType

from trainer.machine.console import Console
from trainer.machine.safe_text import print, visible
from trainer.ranks import distributed
from trainer.records import Score, ScoredGroup
from trainer.watch.footer import Footer, Progress, TimeLeft, clock
from trainer.watch.measure import LENIENT, STRICT, Measure

PERMANENT_LINES = 12  # lines of progress that a run prints
ABOVE = 5  # lines of a terminal that the view leaves free for printed text
COST = 0.005  # the largest share of the time that drawing may take
DEAD = "dead: share of groups whose answers all earn the same{}; GRPO learns nothing from them"
ALSO_DEAD = {"reward": "", "correct": ", or are all right or all wrong"}
WIDEST = 120  # columns of an answer that is shown
LEFT_OUT = ("grad", "loss", "entropy", "step", "dead", "rollout")  # parts of a line, omitted in this order if too long
EVALUATION_S = 30.0  # a longer evaluation prints lines about its progress

View = Callable[[Console, int], RenderableType]  # a panel with at most this number of lines


class Screen:
    """Prints on rank 0, and nothing on the other ranks. On a terminal, `view` stays below the printed text."""

    def __init__(
        self,
        total_steps: int = 0,
        measure: Measure = STRICT,
        console: Console | None = None,
        view: View | None = None,
        left: TimeLeft | None = None,
        dead_by: str = "reward",
    ) -> None:
        self.footer = Footer(console or Console(soft_wrap=True))
        self.total_steps = total_steps
        self._measure = measure
        self._every = max(1, total_steps // PERMANENT_LINES)
        self.left = left or TimeLeft(total_steps, None, 0)
        self._view = view
        self._next_drawing = 0.0
        self._dead = DEAD.format(ALSO_DEAD[dead_by])  # what the word means, until it has been said

    def start(self) -> None:
        """Start to measure time: the work before the first step does not predict the remaining time."""
        self.left.start()
        self._next_drawing = 0.0  # the first drawing is slower than later ones

    def say(self, content: RenderableType, is_command: bool = False) -> None:
        self.footer.print(content, is_command)

    def warn(self, text: str) -> None:
        """Print a warning, from any rank."""
        if self.footer.console.quiet:
            print(f"rank {distributed.rank()}: {text}", file=sys.stderr)
        else:
            self.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self.left.after(step)
        if step in (1, self.total_steps) or step % self._every == 0:
            line = progress_line(step, self.total_steps, metrics, left, self._measure, self.footer.console.width)
            self.say(line)
            if self._dead and "  dead " in line:
                self.say(self._dead)
                self._dead = ""
        self.draw()

    def answers(self, groups: Sequence[ScoredGroup], weights: Mapping[str, float]) -> None:
        """Print the best and the worst answer of the group whose rewards differ most, each in a line."""
        graded = [[pair for pair in zip(one.completions, one.scores) if pair[1].reward is not None] for one in groups]
        ranked = [sorted(pairs, key=lambda pair: pair[1].reward or 0.0) for pairs in graded if pairs]
        widest = max(ranked, key=lambda pairs: (pairs[-1][1].reward or 0.0) - (pairs[0][1].reward or 0.0), default=[])
        for name, (answer, score) in zip(("best", "worst"), (widest[-1:] + widest[:1])):
            self.say(answer_line(name, answer.text, score, weights, min(WIDEST, self.footer.console.width)))

    def draw(self) -> None:
        """Redraw the view, unless drawing would take more than `COST` of the time."""
        began = perf_counter()
        if self._view is None or not self.footer.is_shown or began < self._next_drawing:
            return
        console = self.footer.console
        try:
            self.footer.show("view", self._view(console, console.height - ABOVE))
        except Exception as error:  # noqa: BLE001  a run continues without its view
            self.close()
            self.warn(f"the screen is off, because it could not be drawn ({type(error).__name__}: {error})")
        ended = perf_counter()
        self._next_drawing = ended + (ended - began) / COST

    def progress(self, task: str, total: int) -> Progress:
        self.draw()
        return Progress(task, total, self.footer, EVALUATION_S, self.left.evaluated)

    def close(self) -> None:
        """Remove the view; the printed text stays."""
        self._view = None
        self.footer.hide()


def progress_line(
    step: int, total: int, metrics: Mapping[str, float], seconds_left: float, measure: Measure, width: int
) -> str:
    """Return the line of a step, in the order of the loop, without the parts that do not fit into the width."""
    parts = [f"{step:>{len(str(total))}}/{total}"]
    if "length" in metrics:  # a warm-up samples nothing
        parts += sampled_parts(metrics, measure)
    if "loss" in metrics:
        parts += [f"loss {metrics['loss']:+.3f}", f"entropy {metrics['entropy']:.2f}"]
        parts.append(f"step {metrics['time/step']:.1f}s")
    if "grad_norm" in metrics:
        parts.append(f"grad {metrics['grad_norm']:.2f}")
    parts.append(f"{clock(seconds_left)} left")
    for name in LEFT_OUT:
        if len("  ".join(parts)) > width:
            parts = [part for part in parts if not part.startswith(f"{name} ")]
    return "  ".join(parts)


def answer_line(name: str, text: str, score: Score, weights: Mapping[str, float], width: int) -> str:
    """Return an answer with what each part of its reward pays. Of a long one the end is shown, with its result."""
    paid = {part: weights.get(part, 0.0) * value for part, value in score.components.items() if value is not None}
    parts = " + ".join(f"{part} {value:.3g}" for part, value in paid.items() if weights.get(part))
    head, text = f"{name} answer, {parts}: ", visible(" ".join(text.split()))
    room = max(20, width - len(head))
    return head + (text if len(text) <= room else f"...{text[3 - room :]}")


def sampled_parts(metrics: Mapping[str, float], measure: Measure) -> list[str]:
    """Return the parts about the sampled answers. The accuracy that `reward.answer` rewards comes first."""
    strict = f"{metrics.get('accuracy/strict', 0.0):.0%}"
    correct = f"correct {strict}"
    if measure == LENIENT:
        correct = f"correct {metrics['accuracy/lenient']:.0%} (strict {strict})"
    return [
        f"rollout {metrics['time/rollout']:.1f}s {metrics['length']:.0f} tokens",
        f"reward {metrics['reward/mean']:.3f}" if "reward/mean" in metrics else "reward none",
        *([correct] if "accuracy/strict" in metrics or not measure.is_reward else []),
        f"dead {metrics['dead_groups']:.0%}",
    ]
