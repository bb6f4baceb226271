"""The progress display: one for nested jobs, silent without a terminal, with the time that is left."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from dsa_hw.utils import progress
from dsa_hw.utils.progress import Bar, counted_steps, tracked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stand in for a terminal; called in a test, because pytest sets standard error again after fixtures."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    return found


def test_nothing_is_written_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(stages=("one",)) as bar:
        bar.enter("one")
        assert list(tracked([1, 2], "loop")) == [1, 2]
    assert capsys.readouterr() == ("", "")


def test_nothing_is_written_if_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Bar(shown=False, stages=("one",)) as bar:
        bar.enter("one")
    assert screen.getvalue() == ""


def test_jobs_inside_a_job_are_shown_by_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Bar(stages=("one", "two")) as bar:
        bar.enter("one")
        with Bar() as inner, counted_steps(2, "loop") as count:
            assert inner._display is None
            count("loss 0.5")
            assert bar._inner is inner
        assert bar._inner is None
    assert "loop, loss 0.5" in screen.getvalue()


def test_left_is_extrapolated_and_later_stages_are_added(clock: Clock) -> None:
    bar = Bar(stages=("one", "two", "three"))
    bar.enter("one")
    assert bar.left() is None, "nothing is known"
    bar.expect({"one": 10.0, "two": 40.0, "three": 2.0})
    clock.now = 4.0
    assert bar.left() == 6 + 42
    bar.say("loop", 0.0)
    clock.now = 9.0
    bar.say("loop", 0.25)  # 5 s for a quarter
    assert bar.left() == pytest.approx(15 + 42)
    bar.enter("three")  # a stage may be left out
    clock.now = 10.0
    assert bar.left() == pytest.approx(1.0)
    clock.now = 19.0
    assert bar.left() == pytest.approx(2.5), "longer than expected: some more is left"


def test_stages_that_are_alike_are_corrected_by_what_was_seen(clock: Clock) -> None:
    bar = Bar(stages=("one", "two", "three", "four"))
    bar.expect({"one": 10.0, "two": 20.0, "three": 5.0, "four": 30.0}, alike=("one", "two", "four"))
    bar.enter("one")
    assert bar.left() == pytest.approx(65)
    bar.say("loop", 0.0)
    clock.now = 10.0
    bar.say("loop", 0.5)  # 20 s instead of 10 s: the second and the fourth take twice as long too, the third does not
    assert bar.left() == pytest.approx(10 + 40 + 5 + 60)
    clock.now = 20.0
    bar.enter("two")
    assert bar.left() == pytest.approx(40 + 5 + 60)
    clock.now = 30.0
    bar.enter("three")  # the first two took as long together as expected
    assert bar.left() == pytest.approx(5 + 30)


def test_continued_loop_is_extrapolated_from_where_it_began(clock: Clock) -> None:
    bar = Bar()
    bar.say("loop", 0.5)
    clock.now = 10.0
    bar.say("loop", 0.75)
    assert bar.left() == pytest.approx(10.0)


def test_left_of_a_stage_is_that_of_the_job_in_it(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    terminal(monkeypatch)
    with Bar(stages=("one", "two")) as bar:
        bar.expect({"one": 1000.0, "two": 30.0})
        bar.enter("one")
        with counted_steps(4, "loop") as count:
            clock.now = 10.0
            count("")
            assert bar.left() == pytest.approx(30 + 30)


def test_interrupt_says_in_which_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt) as found, Bar(stages=("one", "two")) as bar:  # noqa: PT012
        bar.enter("two")
        with counted_steps(4, "loop"):
            raise KeyboardInterrupt
    assert found.value.__notes__ == ["two"]


def test_event_of_a_profile_is_shown_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Bar() as bar:
        bar(SimpleNamespace(stage="measuring", what="", done=0.5, interval=0.012))
    assert "intervals +/-1.2%" in screen.getvalue()
