"""The stages of an allocation, and how long each is expected to take.

The expectations are rough: they are replaced by what is seen as soon as a stage has begun, and those of later stages of
passes are corrected by the same factor. They come from the time of a
forward pass and from how many passes a stage makes; the constants are from ``benchmarks/remaining_time.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from budgets import Budget
from budgets.budget import MeasuredBudget
from dsa_hw.methods.problem import Batches
from dsa_hw.methods.synthetic import synthetic_batch_size
from dsa_hw.pipeline.cost_models import Task
from dsa_hw.pipeline.recovering import distillation_passes
from dsa_hw.pipeline.unlabelled import synthesis_passes
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["GUIDE", "MEASURING_STAGES", "PASSING_STAGES", "STAGES", "expected_measurement", "expected_seconds"]

STAGES: Final = (
    "channels", "profile", "cost model", "inputs", "allocation", "measurement", "recovery", "distillation",
    "certificate",
)  # fmt: skip
MEASURING_STAGES: Final = ("profile", "measurement")
PASSING_STAGES: Final = ("inputs", "allocation", "recovery", "distillation", "certificate")
"""Stages that consist of passes through the network: where one takes longer than expected, the others do too."""

_COPIES = 8  # of the example input: a pass over a single one takes longer for each
_BACKWARD = 3.5  # time of a forward and a backward pass in forward passes
_PREPARING, _CONFIGURATION = 8.0, 0.3  # seconds: export and grid of a profile, and each of its configurations
_FITTING = 4.0  # seconds: choosing and calibrating a cost model
_MEASURING = 15.0  # seconds: measuring and correcting pruned networks, at least
_OF_PROFILE = 0.7  # the same, as a share of the time of the profile: both depend on how disturbed the machine is
GUIDE = 64  # inputs without labels in a step of the keep ratios, at most
_STEPS, _RANKING = 120, 16  # steps of the keep ratios without training, and batches that rank channels
_REFITTED = 512  # inputs of a recovery
_REFIT = 6.0  # time of a recovery for each input, in forward passes


def expected_seconds(
    task: Task,
    budgets: Sequence[Budget],
    *,
    train: Batches | None,
    val: Batches | None,
    images: Any,
    recovery: str,
    epochs: Any = None,
) -> dict[str, float]:
    """Return the seconds that the stages of an allocation are expected to take.

    Args:
        task: The network.
        budgets: Its budgets.
        train: Loader for the weights.
        val: Loader for the keep ratios.
        images: Inputs without labels.
        recovery: Level of the recovery.
        epochs: Of training while allocating, as the user gave them; None is one.
    """
    forward = _forward_seconds(task.model, task.inputs)
    step = _BACKWARD * forward
    kinds = {(b.key, str(b.target)) for b in budgets if isinstance(b, MeasuredBudget) and b.profile is None}
    profiles = len(kinds) if task.profiling.source is None else 0
    labelled = train is not None or val is not None
    found = {
        "profile": profiles * (_PREPARING + _CONFIGURATION * (task.profiling.samples + task.profiling.holdout)),
        "cost model": profiles * _FITTING,
        "measurement": _MEASURING * len(kinds),
        "certificate": 2 * forward * (_examples(val if val is not None else train) if labelled else 256),
    }
    if train is not None:
        many = float(epochs) if isinstance(epochs, (int, float)) else 1.0
        found["recovery"] = forward * _examples(train)  # batch-norm statistics
        seen = many * _examples(train)
        found["allocation"] = step * (seen + min(seen, _STEPS / 2 * GUIDE))
        return found
    batch = GUIDE if labelled else synthetic_batch_size(task.inputs, GUIDE)
    found["allocation"] = step * batch * (_STEPS + _RANKING)
    if not labelled and images is None and recovery != "none":
        found["inputs"] = step * synthesis_passes(task.model, task.inputs, task.seed)
    if recovery != "none":
        found["recovery"] = _REFIT * forward * _REFITTED
    if recovery == "distil" or (recovery == "auto" and not labelled):
        found["distillation"] = step * distillation_passes(task.model, task.inputs)
    return found


def expected_measurement(profile: float) -> dict[str, float]:
    """Return the expected seconds of the measurement after a profile that took ``profile`` seconds."""
    return {"measurement": max(_MEASURING, _OF_PROFILE * profile)}


def _forward_seconds(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    """Return the time of a forward pass for each input of a batch."""
    device = device_of(model)
    moved = [x.to(device) if isinstance(x, Tensor) else x for x in inputs]
    single = all(isinstance(x, Tensor) and x.ndim and len(x) == 1 for x in moved)
    batch = [x.repeat(_COPIES, *[1] * (x.ndim - 1)) for x in moved] if single else moved
    with torch.no_grad(), evaluating(model):
        try:
            model(*batch)
        except RuntimeError:  # a network for this one batch size
            batch, single = moved, False
        begin = time.perf_counter()
        model(*batch)
        seconds = time.perf_counter() - begin
    count = next((len(x) for x in batch if isinstance(x, Tensor) and x.ndim), 1)
    return seconds / max(count, 1)


def _examples(loader: Any) -> int:
    """Return about how many inputs a loader has."""
    if (dataset := getattr(loader, "dataset", None)) is not None and hasattr(dataset, "__len__"):
        return len(dataset)
    batch = getattr(loader, "batch_size", None) or getattr(loader, "batch", None) or GUIDE
    return int(batch) * (len(loader) if hasattr(loader, "__len__") else 1)
