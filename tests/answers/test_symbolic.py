"""Symbolic equality in a child that can be killed: real mathematics, and real hangs and kills of a smaller child."""

import importlib.util
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, is_running, until
from trainer.answers.child_process import Child, Died
from trainer.answers.symbolic import Symbolic, is_worth_asking

HANGS = None  # a request to `doubling` that is never answered

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the extra `math`")


@pytest.fixture(scope="module")
def shared() -> Symbolic:
    return Symbolic(deadline_s=20.0)


def process_of(symbolic: Symbolic) -> int:
    assert symbolic.equal("x+1", "1+x")
    assert symbolic.child._process is not None
    return symbolic.child._process.pid


@pytest.mark.parametrize("answer, gold", [
    ("x+1", "1+x"), ("\\frac{1}{2}", "0.5"), ("(x+1)^2", "x^2+2x+1"), ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"), ("x/2", "\\frac{x}{2}"), ("2^{10}", "1024"),
    ("\\sin^2 x + \\cos^2 x", "1"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\\\frac{4}{2}\\end{pmatrix}"),
    ("[1, 2^2)", "[1, 4)"), ("x > 5", "(5, \\infty)"), ("x+1\n", "1\n+x"), ("2A+a", "a+2A"), ("\\log_2 8", "3"),
    ("x=2,y=3", "(2,3)"), ("\\{x+1,2\\}", "\\{2,1+x\\}"), ("i^2", "-1"), ("2+i", "i+2"), ("2(2+i)", "4+2i"),
    ("12\\pi\\text{ square units}", "12\\pi"),
    ("0.\\overline{3}", "1/3"), ("xy", "yx"), ("x=2\\sqrt2=\\sqrt8", "\\sqrt8"), ("y=1+x", "x+1"),
    ("x+y", "z=y+x"), ("f'(x)=2x+1", "f'(x)=1+2x"), ("\\Delta + \\delta", "\\delta + \\Delta"),
    ("\\frac\\pi2", "\\frac{\\pi}{2}"), ("\\large x+1", "1+x"), ("5m+x", "x+5m"),
    ("\\sqrt{2}\\text{ m}", "\\sqrt2"), ("\\sqrt8 cm", "2\\sqrt2\\text{ centimeters}"), ("3+2i", "2i+3"),
    ("\\angle CBA", "\\angle ABC"), ("5x-6=x^2", "x^2-5x+6=0"), ("y-2x=3", "y=2x+3"),
    ("\\theta=\\frac{2\\pi}{8}", "\\frac{\\pi}{4}"), ("\\sqrt8 \\approx 2.83", "2\\sqrt2"),
    ("x=\\frac{\\sqrt2}{2}\\approx 0.707", "\\frac{1}{\\sqrt2}"), ("sqrt(2)/2", "\\frac{1}{\\sqrt2}"),
])  # fmt: skip
def test_equal_mathematics(shared: Symbolic, answer: str, gold: str) -> None:
    assert shared.equal(answer, gold)


@pytest.mark.parametrize("answer, gold", [
    ("x+1", "x+2"), ("x", "y"), ("\\sqrt{2}", "2"), ("1.414214", "\\sqrt{2}"), ("[1, 4]", "[1, 4)"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}"), ("101_3", "101_2"),
    ("101_2", "101"), ("\\{1,2\\}", "(1,2)"), ("1,2", "(1,2)"), ("18 \\quad 20", "38"), ("18 20", "38"),
    ("2A", "2a"), ("2A+a", "A+2a"), ("18{20}", "38"), ("{18}{20}", "38"), ("\\Delta", "\\delta"),
    ("2\\Delta x", "2\\delta x"), ("f'(x)", "f(x)"), ("f''(x)", "f'(x)"), ("\\sqrt2=\\sqrt3", "\\sqrt3"),
    ("x+1=x+2", "x+2"), ("x+2", "x+1=x+2"), ("x^2+y^2=2\\pi", "2\\pi"), ("x=y", "x"), ("2x=18", "18"),
    *((f"5{letter}", "5") for letter in "mgshltdc"), ("5ab", "5"), ("x=5m", "5"), ("x+5m", "x+5"),
    ("\\sqrt{2}g", "\\sqrt2"), ("\\sqrt{2}\\quad\\sqrt3", "\\sqrt6"), ("\\angle ABC", "\\angle ACB"),
    ("\\triangle ABC", "\\triangle BAC"), ("A^TB", "B^TA"), ("A^{-1}B", "BA^{-1}"), ("0", "x^2-5x+6=0"),
    ("2x=4", "x=4"), ("a^2=4", "a=4"), ("x=\\sqrt2", "y=\\sqrt2"), ("x^2=2\\pi", "2\\pi"), ("3:2", "1.5"),
    ("4:6", "2:3"), ("3:30", "1:10"), ("6\\colon 4", "3\\colon 2"), ("x:y", "\\frac{x}{y}"),
    ("2\\sqrt3\\text{ m}", "\\sqrt{12}\\text{ cm}"), ("9\\pi\\text{ cm}^3", "9\\pi\\text{ cm}^2"),
    ("9\\pi\\text{ square feet}", "9\\pi\\text{ feet}"),
    ("\\frac{7}{2}\\text{ p.m.}", "3.5\\text{ a.m.}"), ("7 a.m.", "7 p.m."), ("on", "no"), ("n", "N"),
    ("\\boxed{x} is wrong", "x"), ("not \\boxed{18}", "18"), ("\\text{not } 0", "0"), ("x+1 \\text{ maybe}", "x+1"),
    ("\\sqrt2 \\text{ million}", "\\sqrt2"), ("y\\in[1,4/2]", "x\\in[1,2]"), ("\\sqrt8 \\approx 2.9", "2\\sqrt2"),
    ("\\frac{1}{2} \\cup 1", "\\frac{1}{2}"), ("\\frac{1}{2} \\to \\frac{1}{3}", "\\frac{1}{3}"), ("7 \\cup $5$", "5"),
    ("\\frac{1}{0}", "0"), ("\\frac{", "\\frac{1}{2}x"), ("\\ud800^2", "x^2"), ("", "x^2"),
])  # fmt: skip
def test_different_mathematics(shared: Symbolic, answer: str, gold: str) -> None:
    assert not shared.equal(answer, gold)


def test_nothing_above_was_a_hang_or_a_failure(shared: Symbolic) -> None:
    assert (shared.child.hangs, shared.child.failures) == (0, 0)


def test_text_is_data_and_never_code(shared: Symbolic, tmp_path: Path) -> None:
    target = tmp_path / "owned"
    for text in (f"__import__('os').system('touch {target}')", f"open('{target}', 'w')+1", f'"]\n["{target}", "1'):
        assert not shared.child.ask((text, "x+1"))
    assert not target.exists()
    assert shared.equal("x+1", "1+x")


@pytest.mark.parametrize("answer, gold", [
    ("18", "19"), ("0.333333", "\\frac{1}{3}"), ("C", "D"), ("yes", "no"), ("5 apples and 3 left", "5"),
    ("x" * 500, "x+1"),
])  # fmt: skip
def test_what_is_no_mathematics_or_already_decided_is_not_asked(answer: str, gold: str) -> None:
    assert not is_worth_asking(answer, gold)


def test_no_child_is_started_before_one_is_needed_and_the_running_one_is_used_again(shared) -> None:
    lone = Symbolic()
    assert lone.equal("0.5", "\\frac{1}{2}")
    assert not lone.equal("18", "19")
    assert lone.child._process is None
    assert process_of(shared) == process_of(shared)


def test_a_child_has_neither_torch_nor_a_gpu(shared) -> None:
    child = process_of(shared)
    libraries = Path(f"/proc/{child}/maps").read_text()
    assert "math" in libraries  # the file was readable
    assert not any(name in libraries for name in ("libtorch", "libcuda", "libc10"))
    assert b"CUDA_VISIBLE_DEVICES=\0" in Path(f"/proc/{child}/environ").read_bytes()


def test_what_a_comparison_came_to_is_remembered_but_not_that_a_child_died(shared) -> None:
    """`tests/reward/test_rewards.py` has one that hangs."""
    child = process_of(shared)
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_running(child))
    assert shared.equal("x+1", "1+x")
    assert shared.child.failures == 0
    assert [shared.equal("x+3", "3+x"), shared.equal("x+3", "3+x")] == [False, True]  # another child


@pytest.fixture
def child() -> Child:
    child = Child("tests.answers.doubling:answerer", deadline_s=8.0)
    assert child.ask(3) == 6
    return child


def is_computing(process: int) -> bool:
    return psutil.Process(process).status() == psutil.STATUS_RUNNING


def test_a_child_that_hangs_is_killed_and_replaced(child) -> None:
    first, child._deadline_s = child._process.pid, 0.2
    assert child.ask(HANGS) is None
    assert not is_running(first)
    child._deadline_s = 8.0
    assert (child.ask(4), child.hangs, child.failures) == (8, 1, 0)


def test_a_request_that_raises_is_a_failure_and_its_child_goes_on(child) -> None:
    first = child._process.pid
    assert child.ask([]) == []
    assert child.ask({}) is None
    assert child.ask("x") is None  # some errors of sympy derive from Exception itself
    assert (child.ask(4), child.failures, child._process.pid) == (8, 2, first)


def test_the_signal_of_a_cluster_is_not_for_children(child) -> None:
    """Slurm sends it to every process of a run. A child that died of it would call a right answer wrong."""
    first = child._process.pid
    os.kill(first, signal.SIGUSR1)
    assert (child.ask(4), child.failures, child._process.pid) == (8, 0, first)


def test_a_child_killed_in_the_middle_of_a_call_is_counted_and_replaced(child) -> None:
    first = child._process.pid
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(child.ask, HANGS)
        until(lambda: is_computing(first))
        os.kill(first, signal.SIGKILL)
        assert isinstance(asked.exception(), Died)
    assert (child.ask(4), child.hangs, child.failures) == (8, 0, 1)


def test_a_process_ends_with_its_child_object() -> None:
    child = Child("tests.answers.doubling:answerer", deadline_s=8.0)
    assert child.ask(3) == 6
    process = child._process.pid
    del child
    assert not is_running(process)


PARENT = """
import sys, threading, time
from trainer.answers.child_process import Child
child = Child("tests.answers.doubling:answerer", deadline_s=1.0)
child.ask(3)
print(child._process.pid, flush=True)
if sys.argv[1] == "spinning":
    threading.Thread(target=child.ask, args=(None,), daemon=True).start()
if sys.argv[1] == "leaves":
    sys.exit()
time.sleep(300)
"""


@pytest.mark.parametrize("way", ["idle", "spinning", "leaves"])
def test_no_child_outlives_its_parent(way: str) -> None:
    command = [sys.executable, "-c", PARENT, way]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if way == "spinning":
            until(lambda: is_computing(child))
        if way != "leaves":
            parent.kill()
    until(lambda: not is_running(child))
