"""What stays at the foot of a terminal: it moves down below everything that is printed, and is gone at the end. And
how long a run still takes."""

import io
import random

import pytest
from rich.panel import Panel

from tests.terminal import Terminal
from trainer.machine.console import Console, spoken
from trainer.watch.footer import Footer, Progress, TimeLeft
from trainer.watch.screen import Screen


def footer_on(monkeypatch, term: str = "xterm", height: int = 10) -> Footer:
    monkeypatch.setenv("TERM", term)
    return Footer(Console(file=io.StringIO(), force_terminal=True, width=40, height=height, soft_wrap=True))


def seen(footer: Footer) -> list[str]:
    return Terminal(40).feed(footer.console.file.getvalue()).text.splitlines()


def test_a_width_of_nothing_is_not_taken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert Console(file=io.StringIO()).width == 80


def test_what_is_printed_stands_above(monkeypatch):
    footer = footer_on(monkeypatch)
    footer.print("before")
    footer.show("view", Panel("a"))
    footer.print("a long line " * 5)
    footer.print("a-command-" * 5, is_command=True)
    footer.show("view", Panel("b"))
    footer.show("progress", "50%")
    between_words = ["before", "a long line a long line a long line a", "long line a long line"]
    assert seen(footer)[:4] == [*between_words, "a-command-" * 4]
    assert [row.strip("│ ") for row in seen(footer)[5:] if row and row[0] not in "╭╰"] == ["b", "50%"]


def test_lines_of_others_are_kept(monkeypatch):
    """The line of another rank or of a library goes to the terminal without the footer."""
    footer = footer_on(monkeypatch)
    for number in range(3):
        footer.show("view", Panel("a"))
        footer.console.file.write(f"rank {number}: a warning\n")
    footer.print("ours")
    footer.hide()
    assert [row for row in seen(footer) if row] == [*(f"rank {number}: a warning" for number in range(3)), "ours"]


def test_it_is_cut_to_the_height_of_the_terminal(monkeypatch):
    footer = footer_on(monkeypatch, height=6)
    footer.show("view", "\n".join("abcdefgh"))
    assert seen(footer) == ["", *"abcd"]


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_only_a_terminal_that_can_move_its_cursor_has_it(monkeypatch, term):
    footer = footer_on(monkeypatch, term)
    footer.print("a line")
    footer.show("view", Panel("a"))
    footer.hide()
    assert footer.console.file.getvalue().startswith("a line\n")
    assert ("\x1b" in footer.console.file.getvalue()) == (term == "xterm")


def test_a_run_goes_on_without_its_picture(monkeypatch):
    screen = Screen(view=lambda console, height: 1 / 0)
    screen.footer = footer_on(monkeypatch)
    screen.draw()
    screen.draw()
    assert " ".join(seen(screen.footer)).count("be drawn (ZeroDivisionError:") == 1


def test_a_drawing_that_takes_long_is_seldom_repeated(monkeypatch):
    drawn = []
    screen = Screen(view=lambda console, height: drawn.append(height) or f"{len(drawn)}")
    screen.footer = footer_on(monkeypatch)
    monkeypatch.setattr("trainer.watch.screen.COST", 1e-9)
    for _ in range(3):
        screen.draw()
    assert drawn == [5]


@pytest.mark.parametrize(("patience", "lines"), [(0.0, ["0%", "25%", "50%", "75%", "100%"]), (60.0, [])])
def test_elsewhere_progress_is_a_line_each_quarter_once_it_takes_long(monkeypatch, patience, lines):
    footer = footer_on(monkeypatch, "dumb")
    with Progress("answers", 40, footer, patience) as progress:
        for _ in range(40):
            progress.advance()
    assert [row.removeprefix("octet: answers: ").partition(",")[0] for row in seen(footer)] == lines


def test_on_a_terminal_progress_is_a_bar_that_is_gone_at_the_end(monkeypatch):
    footer = footer_on(monkeypatch)
    with Progress("answers", 4, footer, 60.0) as progress:
        progress.advance(2)
        assert seen(footer)[1].startswith("██████████░░░░░░░░░░ answers: 50%, 0:0")
        progress.advance(2)
    assert "".join(seen(footer)) == ""


class Clock:
    """Stands in for `perf_counter`, so that hours pass at once."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr("trainer.watch.footer.perf_counter", made := Clock())
    return made


def ran(clock: Clock, screen: Screen, steps: int, every: int | None, seed: int, seconds: float = 60.0, samples=False):
    """Yield each step as a run makes it: the first takes four times as long, others a third more or less than the mean,
    an evaluation as long as three, and sampled answers as long as thirty."""
    draw = random.Random(seed)

    def evaluate(samples: bool = False) -> None:
        for times in (3, 30)[: 1 + samples]:
            with screen.progress("evaluation", 1):
                clock.now += times * seconds

    evaluate(samples)
    clock.now += 500.0  # a rehearsal, which says nothing about a step
    screen.start()
    for step in range(1, steps + 1):
        clock.now += seconds * (4 if step == 1 else draw.uniform(0.67, 1.33))
        yield step
        if step == steps or (every and step % every == 0):
            evaluate()
    if samples:
        evaluate(samples)
    evaluate()  # of the merged model


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize(("steps", "every"), [(100, 50), (100, None), (45, 4), (12, 100)])
def test_after_ten_steps_the_time_that_is_left_is_right_within_a_fifth(clock, steps, every, seed, samples):
    left = TimeLeft(steps, every, at_end=2)
    screen = Screen(steps, left=left)
    told = {step: (clock.now, left.after(step)) for step in ran(clock, screen, steps, every, seed, samples=samples)}
    for step in range(10, steps + 1):
        when, seconds = told[step]
        assert when + seconds == pytest.approx(clock.now, abs=max(0.2 * (clock.now - when), 45.0))


def test_steps_that_have_become_cheaper_are_soon_believed(clock):
    """And the first one, which includes warming up, is not believed at all."""
    left, told = TimeLeft(100, None, at_end=0), []
    for step in range(1, 26):
        clock.now += 400.0 if step == 1 else 90.0 if step <= 15 else 60.0
        told.append(left.after(step))
    assert (told[1], told[-1]) == pytest.approx((98 * 90.0, 75 * 60.0), rel=0.2)


def test_after_the_last_step_its_evaluations_are_left(clock, capsys):
    screen = Screen(100, left=TimeLeft(100, 50, at_end=2))
    for step in ran(clock, screen, 100, 50, seed=0):
        screen.step(step, {"dead_groups": 0.0})
    assert capsys.readouterr().out.endswith("  6:00 left\n")  # two of three minutes


TIMES = {0.02: "1.2 min", 0.7: "42 min", 1.84: "1.8 h", 4.0: "4 h", 31.2: "31 h", 60.0: "2.5 days"}


@pytest.mark.parametrize(("hours", "said"), TIMES.items())
def test_times_are_said_as_people_say_them(hours, said):
    assert spoken(hours) == [said]
    assert [one.split()[1] for one in spoken(0.5, hours, 1.9)] == [spoken(max(1.9, hours))[0].split()[1]] * 3
