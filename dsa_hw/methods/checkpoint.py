"""Proposals on disk, so that the same call continues after an interruption and does not train again.

The file holds tensors and text and is read with ``weights_only``. A file of another problem is not used.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import solve
from dsa_hw.training.fingerprints import UnstableError, fingerprint, fingerprint_loader
from dsa_hw.utils.files import whole_file
from dsa_hw.utils.text import one_line

__all__ = ["solve_or_resume"]

_log = logging.getLogger(__name__)


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
        path, key = folder / "proposal.pt", _key(problem, method)
    except UnstableError as error:
        _log.warning("This allocation cannot be continued after an interruption: it depends on %s.", error)
        return solve(problem, method)
    if path.exists() and (found := _kept(path, key, problem)) is not None:
        _log.warning("Continuing an earlier allocation: keep ratios and weights come from %s.", path)
        return found
    unfinished = folder / f"allocating-{key[:12]}"
    if unfinished.exists():
        _log.warning("Continuing an earlier allocation that was interrupted, from %s.", unfinished)
    made = solve(replace(problem, folder=unfinished), method)
    scores = None if made.importance is None else [torch.as_tensor(np.asarray(s, np.float64)) for s in made.importance]
    content = {
        "key": key,
        "alpha": torch.from_numpy(made.alpha),
        "weights": made.model.state_dict(),
        "importance": scores,
        "history": made.history.to_json(orient="split"),
    }
    with whole_file(path) as temporary:
        torch.save(content, temporary)
    shutil.rmtree(unfinished, ignore_errors=True)
    return made


def _kept(path: Path, key: str, problem: Problem) -> Proposal | None:
    """Return a proposal of the same problem; None if the file is damaged or of another problem."""
    try:
        content = torch.load(path, weights_only=True)
        if content["key"] != key:
            return None
        model = copy.deepcopy(problem.model)
        model.load_state_dict(content["weights"])
        scores = content["importance"]
        history = pd.read_json(io.StringIO(content["history"]), orient="split")
        return Proposal(
            content["alpha"].numpy(), model, None if scores is None else [s.numpy() for s in scores], history
        )
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        _log.warning("%s cannot be used (%s). The allocation starts again.", path, one_line(error))
        return None


def _key(problem: Problem, method: str) -> str:
    """Return a hash of all that a proposal depends on; of data not in memory, the first batch and the length."""
    about = {
        "method": method,
        "budgets": [b.to_dict() for b in problem.costs.budgets],
        "limits": [f"{limit:.6g}" for limit in problem.costs.limits],
        "least": [f"{ratio:.6g}" for ratio in problem.least],
        "fingerprint": problem.groups.fingerprint,
        "settings": [problem.importance, problem.minimum, problem.epochs, problem.seed, problem.options],
        "data": [fingerprint_loader(problem.train), fingerprint_loader(problem.val)],
        "loss": problem.loss,
        "weights": dict(problem.model.state_dict()),
    }
    return fingerprint(about)
