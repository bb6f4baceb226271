"""Loaded by every worker of the tests (``--preload``): boards that are formulas, of which some die.

A worker with the environment variable FLEET_DIES_AT ends itself in the batch of that number, without cleaning up.
"""

from __future__ import annotations

import os
from typing import Any

from profilers.fleet import on_worker
from tests.fakes import fleet_board

__all__ = ["dask_setup", "fleet_board"]  # importing the boards registers them


def dask_setup(worker: Any) -> None:
    """Called by Dask in every worker."""
    if not (dies := int(os.environ.get("FLEET_DIES_AT", "0"))):
        return
    real, count = on_worker.measure_batch, 0

    def mortal(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count >= dies:
            os._exit(9)
        return real(*arguments)

    on_worker.measure_batch = mortal  # type: ignore[assignment]
