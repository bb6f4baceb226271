"""One progress display on standard error for a whole job: its stage, the time spent and the time left.

A job that runs inside another one draws nothing of its own; it is shown as a part of the outer job's stage. Nothing is
drawn where standard error is not a terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, TypeVar

from dsa_hw.utils.records import Log
from dsa_hw.utils.text import percent

__all__ = ["Bar", "counted_steps", "format_seconds", "tracked"]

_ENOUGH = 0.04  # of a stage is done before its duration is extrapolated
_TICK = 1.0  # seconds between drawings without an event
_BAR = 24  # characters

Item = TypeVar("Item")

_innermost: ContextVar[Bar | None] = ContextVar("innermost", default=None)


class Bar:
    """The progress of a job; call it with an event of `profilers.profile`, or use `say`.

    The time left is that of the present stage, extrapolated from the share of it that is done, and the expected
    seconds of the stages after it. Stages that are ``alike`` are expected to be as much slower than expected as those
    of them that were seen.

    Args:
        shown: Whether to draw the bar; it is never drawn where standard error is not a terminal.
        stages: Names of the stages in their order; stages may be left out. Without them every text of `say` is one.
        still: Stages in which nothing is drawn between two events, because a thread that draws could disturb what is
            being measured.
        log: Called with a record when a stage begins.
    """

    def __init__(
        self, shown: bool = True, stages: Sequence[str] = (), still: Collection[str] = (), log: Log | None = None
    ) -> None:
        self.shown = shown and (_innermost.get() is not None or sys.stderr.isatty())  # older rich hides the terminal
        self._stages, self._still = list(stages), still
        self._log, self._begun_stages = log, 0
        self._expected: dict[str, float] = {}
        self._alike: frozenset[str] = frozenset()
        self._took: dict[str, float] = {}  # seconds of stages that have ended
        self._stage = self._text = self._note = ""
        self._first = self._done = 0.0  # share of the stage that was done when its text began, and now
        self._begin = self._begun = self._entered = time.monotonic()  # the job, its stage, what is extrapolated
        self._inner: Bar | None = None
        self._outer: Bar | None = None
        self._token: Token[Bar | None] | None = None
        self._display: Any = None
        self._ended = threading.Event()

    def __call__(self, event: Any) -> None:
        """Show an event."""
        notes = [event.what] if event.what else []
        if event.interval is not None:
            notes.append(f"intervals +/-{percent(event.interval)}")
        self.say(event.stage, event.done, ", ".join(notes))

    def expect(self, seconds: Mapping[str, float], alike: Collection[str] = ()) -> None:
        """Set how long stages are expected to take, and which of them are limited by the same."""
        self._expected |= seconds
        self._alike |= frozenset(alike)

    def enter(self, stage: str) -> float:
        """Begin a stage; return the seconds that the one before took."""
        took = time.monotonic() - self._begun
        if stage != self._stage:
            self._took[self._stage] = self._took.get(self._stage, 0.0) + took
            self._stage, self._text, self._note = stage, "", ""
            self._begun_stages += 1
            if self._log is not None:
                self._log({"stage": "stages", "step": self._begun_stages, "begins": stage})
            self._first = self._done = 0.0
            self._begun = self._entered = time.monotonic()
            self._draw()
        return took

    def say(self, text: str, done: float | None = None, note: str = "") -> None:
        """Show what is being done, the share of it that is done, and a note."""
        if not self._stages:
            self.enter(text)
        if text != self._text:
            self._first = self._done = done or 0.0
            if done is not None:  # its duration is extrapolated from here on
                self._entered = time.monotonic()
        self._text, self._note = text, note
        if done is not None:
            self._done = max(done, self._first)
        self._draw()

    @property
    def elapsed(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._begin

    def left(self) -> float | None:
        """Return the seconds that the job is expected to take from now on; None where that is not known."""
        at = self._stages.index(self._stage) if self._stage in self._stages else len(self._stages)
        now = self._left_of_stage()
        if now is None:
            return None
        pace = self._pace(now)
        return now + sum(
            self._expected.get(name, 0.0) * (pace if name in self._alike else 1.0) for name in self._stages[at + 1 :]
        )

    def _pace(self, left: float | None = None) -> float:
        """Return how much longer than expected the stages that are alike take, from those that were seen.

        Args:
            left: Seconds that are left of the present stage; it counts if they are extrapolated from what was seen.
        """
        took = {name: seconds for name, seconds in self._took.items() if name in self._alike}
        seen = self._done - self._first >= _ENOUGH or (self._inner is not None and self._inner.left() is not None)
        if left is not None and seen and self._stage in self._alike:
            took[self._stage] = time.monotonic() - self._begun + left
        expected = sum(self._expected.get(name, 0.0) for name in took)
        return sum(took.values()) / expected if expected > 0 else 1.0

    def _left_of_stage(self) -> float | None:
        spent, expected = time.monotonic() - self._entered, self._expected.get(self._stage, 0.0)
        made = self._done - self._first
        if self._inner is not None and (inner := self._inner.left()) is not None:
            return inner
        if made >= _ENOUGH:
            return spent * (1 - self._done) / made
        if not self._expected:
            return None
        if self._stage in self._alike:
            expected *= self._pace()
        return max(expected * (1 - self._done) - spent, spent / 4)

    # Drawing ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Bar:
        self._begin = self._begun = self._entered = time.monotonic()
        if not self.shown:
            return self
        self._outer = _innermost.get()
        self._token = _innermost.set(self)
        if self._outer is not None:
            self._outer._inner = self
            return self
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(_BAR), TextColumn("{task.fields[times]}"))
        self._display = Progress(
            *columns, TextColumn("{task.fields[note]}", style="dim"), console=Console(stderr=True), transient=True,
            auto_refresh=False, redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip
        self._display.add_task("", total=1.0, times="", note="")
        self._display.start()
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if isinstance(error, KeyboardInterrupt) and self._stages:
            error.add_note(self._stage)  # what the message about an interruption names
        if self._token is not None:
            _innermost.reset(self._token)
        if self._outer is not None:
            self._outer._inner = None
        if self._display is not None:
            self._display.stop()

    def _draw(self) -> None:
        if self._outer is not None:
            self._outer._draw()
        elif self._display is not None:
            deepest = self
            while deepest._inner is not None:
                deepest = deepest._inner
            left, spent = self.left(), self.elapsed
            times = format_seconds(spent) + ("" if left is None else f" of about {format_seconds(spent + left)}")
            share = (self._done if left is None else spent / (spent + left)) if spent else 0.0
            texts = [t for t in (deepest._text if deepest._text != self._stage else "", deepest._note) if t]
            room = self._display.console.width - _BAR - len(self._stage) - len(times) - 4
            self._display.update(
                self._display.task_ids[0], description=self._stage, completed=min(share, 1.0), times=times,
                note=", ".join(texts)[: max(room, 0)], refresh=True,
            )  # fmt: skip

    def _tick(self) -> None:
        while not self._ended.wait(_TICK):
            if self._stage not in self._still:
                self._draw()


@contextmanager
def counted_steps(total: int, title: str, *, shown: bool = True, first: int = 0) -> Iterator[Callable[[str], None]]:
    """Show the progress of a loop; call what this yields, with a note or an empty text, after every step.

    Args:
        total: Number of steps.
        title: What the loop does.
        shown: Whether to show it.
        first: Steps that were done before.
    """
    with Bar(shown) as bar:
        count = first
        bar.say(title, count / max(total, 1))

        def step(note: str = "") -> None:
            nonlocal count
            count += 1
            bar.say(title, count / max(total, 1), note)

        yield step


def tracked(items: Sequence[Item], title: str, *, shown: bool = True) -> Iterator[Item]:
    """Yield items, and show how many are done; arguments as for `counted_steps`."""
    with counted_steps(len(items), title, shown=shown) as count:
        for item in items:
            yield item
            count("")


def format_seconds(seconds: float) -> str:
    """Return a duration as minutes and seconds.

    >>> format_seconds(95), format_seconds(3725)
    ('1:35', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
