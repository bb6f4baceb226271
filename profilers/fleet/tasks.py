"""What Dask is asked to call. Dask's scheduler looks at tasks too, so importing this must cost nothing there."""

from __future__ import annotations

from typing import Any

__all__ = ["introduce", "wave"]


def introduce(*arguments: Any) -> dict[str, Any]:
    """`profilers.fleet.board.introduce`, on the board."""
    from . import board

    return board.introduce(*arguments)


def wave(*arguments: Any) -> dict[str, Any]:
    """`profilers.fleet.board.wave`, on the board."""
    from . import board

    return board.wave(*arguments)
