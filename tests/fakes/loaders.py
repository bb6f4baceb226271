"""Loaders that interrupt a training or count what was read."""

from __future__ import annotations

import signal
from typing import Any

from tests.fakes.processes import send


class Interrupting(list):  # type: ignore[type-arg]
    """Batches; SIGINT is sent while batch number ``at``, counted over all passes, is read."""

    def __init__(self, items: Any, at: int) -> None:
        super().__init__(items)
        self.at, self.fetched = at, 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.fetched += 1
            if self.fetched == self.at:
                send(signal.SIGINT)
            yield item


class Counting(list):  # type: ignore[type-arg]
    """Batches that count how many of them were read."""

    fetched = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.fetched += 1
            yield item
