"""Recovery as a part of an allocation: how far, and only where it helps."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from dsa_hw.errors import DsaError
from dsa_hw.methods.problem import Problem, Realised
from dsa_hw.pipeline.unlabelled import UnlabelledSet
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.distillation import distil, distillation_loss
from dsa_hw.training.loaders import equal_batches
from dsa_hw.training.recovery import refit
from dsa_hw.training.workload import measure_workload
from dsa_hw.utils.modules import evaluating
from dsa_hw.utils.text import unknown_name

__all__ = ["LEVELS", "check_level", "distillation_passes", "recover_network"]

_log = logging.getLogger(__name__)

LEVELS: Final = ("auto", "none", "refit", "distil")
"""Distil where there are no labels, else refit; leave the weights as cut; refit them; refit them and train them."""
_STEPS = 800  # of distillation
_FEWEST = 40  # below which it is not begun
_BATCH = 64
_COMPARED = 64  # held-out inputs that pass through the networks at once
_DISTILLATION = 6e12  # operations of all forward passes: three minutes of two cores


def check_level(level: Any) -> str:
    """Return how far to recover.

    Raises:
        DsaError: There is no such level.
    """
    if level not in LEVELS:
        raise DsaError(unknown_name("recovery", str(level), LEVELS, "levels of recovery"))
    return str(level)


def recover_network(
    problem: Problem,
    found: Realised,
    unlabelled: UnlabelledSet | None,
    level: str,
    listener: Callable[[str, float], None],
    *,
    labelled: bool = False,
) -> str:
    """Refit or train the weights of a pruned network in place, where it brings it closer to the dense network.

    Args:
        problem: The dense network and its channel groups.
        found: The pruned network.
        unlabelled: Inputs without labels; None where there are none.
        level: One of `LEVELS`.
        listener: Called with a text and the share that is done.
        labelled: Whether there are labels, to fine-tune with; "auto" is then "refit", else "distil".

    Returns:
        What was done, in a sentence; empty for "none".
    """
    if level == "auto":
        level = "refit" if labelled else "distil"
    if unlabelled is None:
        return "" if level == "none" else (
            "No recovery: without images it needs batch norms with the statistics of trained weights."
        )  # fmt: skip
    dense, small = problem.model, found.model
    as_cut = copy.deepcopy(small)  # the refit makes outputs fit the dense network's statistics, which this still has
    if unlabelled.is_real:
        recalibrate(small, _pairs(unlabelled.used))
    if level == "none":
        return ""
    begin = time.monotonic()
    done = []
    try:
        _refit(problem, found, as_cut, unlabelled, listener)
        if _replaced(dense, small, unlabelled, as_cut):
            done.append("refitted")
        steps = _distillation_steps(problem.model, problem.example_inputs) if level == "distil" else 0
        if steps:
            trained = copy.deepcopy(small)
            _distil(problem, trained, unlabelled, steps, listener)
            if _replaced(dense, small, unlabelled, trained):
                done.append("distilled")
    except DsaError as error:
        _log.warning("The network was not recovered: %s", error)
        return f"No recovery: {error}"
    count = len(unlabelled.used[0])
    kind = "images" if unlabelled.is_real else "synthetic inputs that match the batch-norm statistics"
    if not done:
        return f"Weights left as cut: refitting on {count} {kind} did not help."
    seconds = time.monotonic() - begin
    return f"Weights {' and '.join(done)} on {count} {kind} in {seconds:.0f} s, without labels."


def _pairs(inputs: tuple[Tensor, ...]) -> list[Any]:
    """Return batches as (inputs, targets), which `recalibrate` expects."""
    return [(x if len(x) > 1 else x[0], torch.zeros(())) for x in equal_batches(inputs)]


def _refit(
    problem: Problem,
    found: Realised,
    new: nn.Module,
    unlabelled: UnlabelledSet,
    listener: Callable[[str, float], None],
) -> None:
    refit(
        new, problem.model, problem.groups, found.kept, unlabelled.used, seed=problem.seed,
        listener=lambda layer, done: listener(f"refitting {layer}", done),
    )  # fmt: skip


def _distil(
    problem: Problem,
    new: nn.Module,
    unlabelled: UnlabelledSet,
    steps: int,
    listener: Callable[[str, float], None],
) -> None:
    used = unlabelled.used
    distil(
        new, problem.model, [used if len(used) > 1 else used[0]], steps=steps, limit=len(used[0]), batch_size=_BATCH,
        batch_statistics=False, seed=problem.seed, listener=listener,
    )  # fmt: skip


def distillation_passes(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Return how many inputs pass through the network during a distillation."""
    return _BATCH * _distillation_steps(model, inputs)


def _distillation_steps(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Return how many steps take some minutes; it depends on the network alone, so that a seed gives one result."""
    steps = int(_DISTILLATION / (_BATCH * measure_workload(model, inputs).operations))
    return 0 if steps < _FEWEST else min(steps, _STEPS)


def _replaced(dense: nn.Module, small: nn.Module, unlabelled: UnlabelledSet, new: nn.Module) -> bool:
    """Give ``small`` the weights of ``new`` if its outputs on held-out inputs are closer to the dense network's."""
    before = after = 0.0
    with torch.no_grad(), evaluating(dense), evaluating(small), evaluating(new):
        for batch in zip(*(x.split(_COMPARED) for x in unlabelled.held_out), strict=True):
            wanted = dense(*batch)
            before += float(distillation_loss(small(*batch), wanted))
            after += float(distillation_loss(new(*batch), wanted))
    if not after < before:
        return False
    small.load_state_dict(new.state_dict())
    return True
