"""Proposals on disk, so that the same call continues after an interruption and does not train again.

The file holds tensors and text with a checksum. A file of another problem is not used, and a warning says how the
problems differ.
"""

from __future__ import annotations

import io
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dsa_hw.errors import TrainingError
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import solve
from dsa_hw.training.fingerprints import UnstableError, fingerprint_loader
from dsa_hw.training.origins import Origin, read_state, write_state
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.modules import copy_module
from dsa_hw.utils.text import one_line

__all__ = ["probed_costs", "solve_or_resume"]

_log = logging.getLogger(__name__)

_PROBES = 16  # configurations at which costs are compared; a changed profile changes a cost at nearly all of them


def solve_or_resume(problem: Problem, method: str, folder: Path | None) -> Proposal:
    """Return the proposal of a method, or the one that an earlier call with the same problem left in a folder.

    Args:
        problem: What to solve. Its costs must have their budgets.
        method: Name of the method.
        folder: Where proposals are kept; None keeps nothing.
    """
    if folder is None:
        return solve(problem, method)
    try:
        origin = _origin(problem, method)
    except UnstableError as error:
        _log.warning("This allocation cannot be continued after an interruption: it depends on %s.", error)
        return solve(problem, method)
    path, unfinished = folder / "proposal.pt", folder / "allocating"
    if _is_of_same(path, origin) and (found := _kept(path, problem)) is not None:
        _log.warning("Continuing an earlier allocation: keep ratios and weights come from %s.", path)
        return found
    if unfinished.exists():
        if _is_of_same(unfinished / "origin.pt", origin):
            _log.warning("Continuing an earlier allocation that was interrupted, from %s.", unfinished)
        else:
            shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True, exist_ok=True)
    write_state(unfinished / "origin.pt", origin, {})
    made = solve(replace(problem, folder=unfinished), method)
    scores = None if made.importance is None else [torch.as_tensor(np.asarray(s, np.float64)) for s in made.importance]
    content = {
        "alpha": torch.from_numpy(made.alpha),
        "weights": made.model.state_dict(),
        "importance": scores,
        "history": made.history.to_json(orient="split", double_precision=15),
    }
    write_state(path, origin, content)
    shutil.rmtree(unfinished, ignore_errors=True)
    return made


def _is_of_same(path: Path, origin: Origin) -> bool:
    """Return whether a file is there and of the same problem; otherwise warn how they differ."""
    if not path.exists():
        return False
    try:
        known, _ = read_state(path)
    except TrainingError as error:
        _log.warning("%s The allocation starts again.", one_line(error))
        return False
    if different := known.differences(origin):
        _log.warning(
            "%s is of an allocation with different settings (%s). The allocation starts again and replaces it; choose "
            "another out to keep both.",
            path,
            different,
        )
    return not different


def _kept(path: Path, problem: Problem) -> Proposal | None:
    """Return a proposal of the same problem; None if the file does not fit it."""
    try:
        _, content = read_state(path)
        model = copy_module(problem.model)
        model.load_state_dict(content["weights"])
        scores, alpha = content["importance"], content["alpha"].numpy()
        if alpha.shape != (len(problem.groups),) or not np.isfinite(alpha).all():
            raise ValueError(f"it has {alpha.size} keep ratios for {len(problem.groups)} groups")
        history = pd.read_json(io.StringIO(content["history"]), orient="split")
        return Proposal(alpha, model, None if scores is None else [s.numpy() for s in scores], history)
    except (TrainingError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be used (%s). The allocation starts again.", path, one_line(error))
        return None


def _origin(problem: Problem, method: str) -> Origin:
    """Return all that a proposal depends on; of data not in memory, the first batch and the sizes."""
    ingredients = {
        "method": method,
        "budgets": [budget.to_dict() for budget in problem.costs.budgets],
        "network": problem.groups.fingerprint,
        "inputs": [[str(x.dtype), *x.shape] for x in problem.example_inputs if isinstance(x, torch.Tensor)],
        "grid": None if problem.grid is None else [int(step) for step in problem.grid],
        "minimum": problem.minimum,
        "importance": problem.importance,
        "epochs": problem.epochs,
        "seed": problem.seed,
        **{f"options.{name}": value for name, value in problem.options.items()},
        "train": fingerprint_loader(problem.train),
        "val": fingerprint_loader(problem.val),
        "loss": problem.loss,
        "weights": dict(problem.model.state_dict()),
    }
    return Origin.of(ingredients, probed_costs(problem.costs, problem.least))


def probed_costs(costs: CostSet[Cost], least: Floats | None = None) -> list[float]:
    """Return what tells cost functions apart: limits, and costs of the dense network and at random keep ratios.

    Args:
        costs: The costs, with their limits.
        least: Smallest keep ratios (K,); None for 0.05.
    """
    low = np.full(len(costs.sizes), 0.05) if least is None else least
    points = np.random.default_rng(0).uniform(low, 1.0, (_PROBES, len(costs.sizes)))
    values = [costs.dense, *(costs.at_ratios(point) for point in points)]
    return [*costs.limits[np.isfinite(costs.limits)].tolist(), *np.concatenate(values).tolist()]
