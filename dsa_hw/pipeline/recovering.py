"""Recovery as a part of an allocation: on which inputs, how far, and only where it helps."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups
from dsa_hw.errors import DsaError
from dsa_hw.methods.problem import Problem, Realised
from dsa_hw.methods.synthetic import synthetic_batch_size, synthetic_inputs
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.distillation import distil, distillation_loss
from dsa_hw.training.recovery import equal_batches, refit, unlabelled
from dsa_hw.training.synthesis import can_match_statistics, match_statistics
from dsa_hw.utils.modules import device_of, evaluating
from dsa_hw.utils.text import unknown_name

__all__ = ["LEVELS", "check_level", "recover_network"]

_log = logging.getLogger(__name__)

LEVELS: Final = ("none", "refit", "distil")
"""Nothing; refit the weights that remain; refit and train them on the outputs of the dense network."""
_IMAGES = 512
_JUDGE = 0.125  # of the inputs, which the refit does not see: they decide whether it is kept
_MEMORY = 2**31  # bytes of activations that are kept at once
_LIVE = 10  # activations of the largest size that both networks keep at once, about
_SYNTHESIS = 60.0  # seconds
_STEPS = 40  # of the synthesis of one batch


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
    images: Iterable[Any] | None,
    level: str,
    listener: Callable[[str, float], None],
) -> str:
    """Refit the weights of a pruned network in place, where it brings its outputs closer to the dense network's.

    Without images, inputs are synthesised that match the network's own batch-norm statistics.

    Args:
        problem: The dense network and its channel groups.
        found: The pruned network.
        images: Inputs of the network, or (inputs, anything); None where there are none.
        level: One of `LEVELS`.
        listener: Called with a text and the share that is done.

    Returns:
        What was done, in a sentence; empty for "none".
    """
    dense, small = problem.model, found.model
    if level == "none":
        if images is not None:
            recalibrate(small, _pairs(images))
        return ""
    begin = time.monotonic()
    real = images is not None
    try:
        inputs = _inputs(problem, images, listener)
        if inputs is None:
            return "No recovery: without images it needs batch norms with the statistics of trained weights."
        kept = _refitted(dense, small, problem.groups, found, inputs, real, problem.seed, listener)
        steps = 0
        if level == "distil":
            steps = distil(
                small, dense, [inputs if len(inputs) > 1 else inputs[0]], limit=len(inputs[0]), seed=problem.seed,
                batch_statistics=real, listener=listener,
            )  # fmt: skip
    except DsaError as error:
        _log.warning("The network was not recovered: %s", error)
        if images is not None:
            recalibrate(small, _pairs(images))
        return f"No recovery: {error}"
    kind = "images" if real else "synthetic inputs that match the batch-norm statistics"
    done = " and ".join([*(["refitted"] if kept else []), *(["distilled"] if steps else [])])
    seconds = time.monotonic() - begin
    if not done:
        return f"Weights left as cut: refitting on {len(inputs[0])} {kind} did not help."
    return f"Weights {done} on {len(inputs[0])} {kind} in {seconds:.0f} s, without labels."


def _pairs(images: Iterable[Any]) -> Iterable[Any]:
    """Return batches as (inputs, targets), which `recalibrate` expects."""
    for batch in images:
        yield batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, torch.zeros(()))


def _inputs(
    problem: Problem, images: Iterable[Any] | None, listener: Callable[[str, float], None]
) -> tuple[Tensor, ...] | None:
    dense = problem.model
    limit = min(_IMAGES, max(_MEMORY // (4 * _LIVE * _largest(dense, problem.example_inputs)), 16))
    if images is not None:
        return unlabelled(images, limit, device_of(dense))
    if not can_match_statistics(dense) or len(problem.example_inputs) != 1:
        return None
    size = min(2 * synthetic_batch_size(problem.example_inputs), limit)
    batches: list[Tensor] = []
    begin = time.monotonic()
    source = synthetic_inputs(problem.example_inputs, size, problem.seed, device_of(dense))
    for (start,) in itertools.islice(source, limit // size):
        share = max(len(batches) * size / limit, (time.monotonic() - begin) / _SYNTHESIS)
        if share >= 1 and batches:
            break
        listener("synthesising inputs", min(share, 1.0))
        batches += match_statistics(dense, [start], steps=_STEPS, seed=problem.seed + len(batches))
    return (torch.cat(batches),)


@torch.no_grad()
def _largest(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Return the largest number of values in a module's output, for one example."""
    found = [1]

    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor):
            found.append(outputs.numel() // max(len(outputs) if outputs.ndim else 1, 1))

    handles = [m.register_forward_hook(hook) for m in model.modules()]
    try:
        with evaluating(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return max(found)


def _refitted(
    dense: nn.Module,
    small: nn.Module,
    groups: ChannelGroups,
    found: Realised,
    inputs: tuple[Tensor, ...],
    real: bool,
    seed: int,
    listener: Callable[[str, float], None],
) -> bool:
    """Refit a copy, and keep it if its outputs on other inputs are closer to the dense network's than without it."""
    apart = max(int(_JUDGE * len(inputs[0])), 1)
    used, others = tuple(x[:-apart] for x in inputs), tuple(x[-apart:] for x in inputs)
    if not len(used[0]):
        return False
    new = copy.deepcopy(small)
    refit(
        new, dense, groups, found.kept, equal_batches(used), seed=seed,
        listener=lambda layer, done: listener(f"refitting {layer}", done),
    )  # fmt: skip
    if real:
        recalibrate(small, [(x if len(x) > 1 else x[0], torch.zeros(())) for x in equal_batches(used)])
    with torch.no_grad(), evaluating(dense), evaluating(small), evaluating(new):
        wanted = dense(*others)
        before, after = (float(distillation_loss(network(*others), wanted)) for network in (small, new))
    if not after < before:
        return False
    small.load_state_dict(new.state_dict())
    return True
