"""When a run stops before its last step: the signal, the time limit, and what makes it go on all the same."""

import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trainer.errors import Interrupted
from trainer.ranks import signal_handlers, stopping


@pytest.fixture(autouse=True)
def quiet_before(monkeypatch):
    monkeypatch.setattr(signal_handlers, "received", signal_handlers.StopSignal())
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def signalled():
    before = signal.getsignal(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # as the launcher leaves it
    signal_handlers.listen()
    yield lambda: signal.raise_signal(signal.SIGUSR1)  # in this thread, and not in one of torch
    signal.signal(signal.SIGUSR1, before)


def ends_in(seconds: float, monkeypatch) -> stopping.Stopping:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + seconds)))
    return stopping.Stopping()


def test_the_first_ctrl_c_waits_for_the_step_and_the_second_does_not(capfd):
    run = stopping.Stopping()
    with signal_handlers.ctrl_c_waits_for_the_step():
        signal.raise_signal(signal.SIGINT)
        assert run.is_due()
        with pytest.raises(KeyboardInterrupt):
            run.stop(7)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == signal_handlers.AFTER_THIS_STEP  # once
    with signal_handlers.ctrl_c_waits_for_the_step():  # of another run in this process
        assert not run.is_due()
    with pytest.raises(KeyboardInterrupt):  # outside of a run
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_an_evaluation_at_once():
    run = stopping.Stopping()
    run.is_due()
    with signal_handlers.ctrl_c_waits_for_the_step(), pytest.raises(KeyboardInterrupt), run.evaluating(1):
        signal.raise_signal(signal.SIGINT)


def test_a_checkpoint_is_due_when_the_last_one_is_old(clock):
    run, due = stopping.Stopping(save_minutes=10), []
    for seconds in (590, 11, 5):
        clock.now += seconds
        run.is_due()
        due.append(run.saves)
    run.last_save = clock.now
    run.is_due()
    assert [*due, run.saves] == [False, True, True, False]


def test_the_time_limit_is_known_and_kept(monkeypatch):
    run = ends_in(3600, monkeypatch)
    assert run.limit == ", 60 minutes until its time limit"
    assert not run.is_due()
    assert ends_in(8 * 86_400, monkeypatch).limit == ""
    run = ends_in(stopping.SPARE_S - 1, monkeypatch)
    with run.merging():  # in a start without steps, or its job would be requeued forever
        pass
    assert run.is_due()
    with pytest.raises(Interrupted, match="time limit"):
        run.stop(1)


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that goes on when it is told to."""
    found = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(stopping, "monotonic", lambda: found.now)
    return found


@pytest.mark.parametrize(("left", "stops"), [(105, False), (95, False), (85, True)])
def test_there_has_to_be_time_for_an_evaluation_that_comes_next(monkeypatch, clock, left, stops):
    """Steps of 10 s, evaluations of up to 90 s, which are no part of a step: before the last one it takes 90 s, before
    a step more 110 s. The first step begins with the program, and says nothing about the others."""
    run = ends_in(stopping.SPARE_S + left + 200 + 140, monkeypatch)
    clock.now += 200
    run.is_due()
    for seconds in (90, 30):
        with run.evaluating(1):
            clock.now += seconds
    clock.now += 10
    assert not run.is_due()
    clock.now += 10
    assert run.is_due(is_last=True, evaluates=True) == stops
    assert run.is_due(is_last=False, evaluates=True)
    assert not run.is_due()  # without it there is time


@pytest.mark.parametrize(("left", "merges"), [(95, True), (85, False)])
def test_there_has_to_be_time_for_the_evaluation_of_the_merged_model(monkeypatch, clock, left, merges):
    run = ends_in(stopping.SPARE_S + left + 90, monkeypatch)
    with run.timing_an_evaluation():  # of the base model
        clock.now += 90
    run.is_due()
    with run.exporting():  # of a few seconds, so the time is not asked
        clock.now += 0.5
    with nullcontext() if merges else pytest.raises(Interrupted, match=r"merge .* time limit"), run.merging():
        pass


def test_a_signal_that_was_held_back_is_not_lost(signalled):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signalled()
    assert not signal_handlers.received.reason
    signal_handlers.listen()
    assert signal_handlers.received.reason


def test_an_evaluation_is_ended_in_the_middle_and_once(signalled):
    run = stopping.Stopping()
    run.is_due()
    reached = []

    def evaluate() -> None:
        try:
            signalled()
            reached.append("the end")
        finally:
            signalled()  # while it cleans up: not a second time
            reached.append("cleaned up")

    with pytest.raises(Interrupted, match=r"evaluation .*step 7\b"), run.evaluating(7):
        evaluate()
    assert reached == ["cleaned up"]


def test_a_signal_from_before_ends_it_before_it_begins(signalled):
    run = stopping.Stopping()
    run.is_due()
    signalled()
    with pytest.raises(Interrupted, match="export"), run.exporting():
        pytest.fail("it began")
    with stopping.Stopping().exporting():  # a start without steps would get no further
        pass
