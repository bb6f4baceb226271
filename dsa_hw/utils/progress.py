"""A progress bar on standard error for jobs of several stages; hidden where that is not a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from dsa_hw.utils.records import Log
from dsa_hw.utils.text import percent

__all__ = ["Bar"]


class Bar:
    """A progress bar; call it with an event of `profilers.profile`, or use `say`.

    Args:
        shown: Whether to draw the bar; it is never drawn where standard error is not a terminal.
        log: Called with a record when a stage begins.
    """

    def __init__(self, shown: bool = True, log: Log | None = None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=100.0,
            disable=None if shown else True,  # None: only on a terminal
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining} {postfix}",
            file=sys.stderr,
            leave=False,
        )
        self._stage = ""
        self._log, self._stages = log, 0

    def __call__(self, event: Any) -> None:
        """Show an event."""
        notes = [event.what] if event.what else []
        if event.interval is not None:
            notes.append(f"intervals +/-{percent(event.interval)}")
        self.say(event.stage, event.done, ", ".join(notes))

    def say(self, stage: str, done: float | None = None, note: str = "") -> None:
        """Show the stage, the share of it that is done, and a note."""
        if stage != self._stage:
            self._stage = stage
            self._bar.reset()
            self._bar.initial = self._bar.n = 100 * (done or 0.0)  # the time left is estimated from here on
            self._bar.set_description_str(stage)
            self._stages += 1
            if self._log is not None:
                self._log({"stage": "stages", "step": self._stages, "begins": stage})
        self._bar.set_postfix_str(note, refresh=done is None)
        if done is not None:
            self._bar.update(max(100 * done - self._bar.n, 0))

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()
