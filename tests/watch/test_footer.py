"""What stays at the foot of a terminal: it moves down below everything that is printed, and is gone at the end."""

import io

import pytest
from rich.panel import Panel

from tests.terminal import Terminal
from trainer.machine.console import Console
from trainer.watch.progress import Footer, Progress
from trainer.watch.screen import Screen


def footer_on(monkeypatch, term: str = "xterm", height: int = 10) -> Footer:
    monkeypatch.setenv("TERM", term)
    return Footer(Console(file=io.StringIO(), force_terminal=True, width=40, height=height, soft_wrap=True))


def seen(footer: Footer) -> list[str]:
    return Terminal(40).feed(footer.console.file.getvalue()).text.splitlines()


def test_what_is_printed_stands_above(monkeypatch):
    footer = footer_on(monkeypatch)
    footer.print("before")
    footer.show("view", Panel("a"))
    footer.print("a long line " * 5)
    footer.show("view", Panel("b"))
    footer.show("progress", "50%")
    assert seen(footer)[:3] == ["before", ("a long line " * 5)[:40], ("a long line " * 5)[40:].strip()]
    assert [row.strip("│ ") for row in seen(footer)[3:] if row and row[0] not in "╭╰"] == ["b", "50%"]


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
