"""The functions that Dask calls.

Dask's scheduler imports this module too, so that it must not import torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["describe", "measure_batch"]


def describe(*arguments: Any) -> dict[str, Any]:
    """Call `profilers.fleet.on_worker.describe` on the board."""
    from profilers.fleet import on_worker

    return on_worker.describe(*arguments)


def measure_batch(*arguments: Any) -> dict[str, Any]:
    """Call `profilers.fleet.on_worker.measure_batch` on the board."""
    from profilers.fleet import on_worker

    return on_worker.measure_batch(*arguments)
