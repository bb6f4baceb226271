"""A progress bar on standard error for jobs of several stages; silent where that is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

__all__ = ["Bar"]


class Bar:
    """A listener for events of `profilers.profile` (stage, what, done, accepted), and `say` for everything else."""

    def __init__(self, shown: bool = True) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=100.0,
            disable=None if shown else True,  # None: only on a terminal
            bar_format="{desc} {percentage:3.0f} %|{bar}| {elapsed} {postfix}",
            file=sys.stderr,
            leave=False,
        )
        self._stage = ""

    def __call__(self, event: Any) -> None:
        """Show an event."""
        notes = [event.what] if event.what else []
        if event.accepted is not None:
            notes.append(f"{100 * event.accepted:.0f} % of runs trusted")
        self.say(event.stage, event.done, ", ".join(notes))

    def say(self, stage: str, done: float | None = None, note: str = "") -> None:
        """The stage, the share of it that is done, and a note."""
        if stage != self._stage:
            self._stage = stage
            self._bar.reset()
            self._bar.set_description_str(stage)
        self._bar.set_postfix_str(note, refresh=done is None)
        if done is not None:
            self._bar.update(max(100 * done - self._bar.n, 0))

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()
