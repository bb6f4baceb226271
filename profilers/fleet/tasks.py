"""What Dask is asked to call. Dask's scheduler looks at tasks too, so importing this must cost nothing there."""

from __future__ import annotations

from typing import Any

__all__ = ["introduce", "wave"]


def introduce(*arguments: Any) -> dict[str, Any]:
    """`profilers.fleet.on_worker.introduce`, on the board."""
    from profilers.fleet import on_worker as board

    return board.introduce(*arguments)


def wave(*arguments: Any) -> dict[str, Any]:
    """`profilers.fleet.on_worker.wave`, on the board."""
    from profilers.fleet import on_worker as board

    return board.wave(*arguments)
