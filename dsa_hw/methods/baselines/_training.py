"""SGD for the baselines that train: plain, with a penalty on units, or on a masked network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.channels import masked
from dsa_hw.errors import TrainingError
from dsa_hw.methods.baselines._evaluation import place, seeded
from dsa_hw.methods.baselines._options import Training
from dsa_hw.methods.problem import Batches, Problem
from dsa_hw.training.finetune import trainable_parameters
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.training.losses import autocast, checked_loss
from dsa_hw.utils.modules import device_of
from dsa_hw.utils.progress import counted_steps

__all__ = ["fine_tune", "needs_train", "steps_of", "strength", "train"]

_log = logging.getLogger(__name__)

Penalty = Callable[[], Tensor]


def needs_train(problem: Problem, method: str) -> Batches:
    """Return ``problem.train``.

    Raises:
        TrainingError: There is none.
    """
    if problem.train is None:
        raise TrainingError(
            f"Method {method!r} trains the network and needs a `train` loader of (inputs, targets). Give one, or "
            "choose a method that does not train: uniform, global_gamma, netadapt, annealing, cem, legr, knapsack."
        )
    return problem.train


def steps_of(problem: Problem, method: str) -> int:
    """Return the weight steps in ``problem.epochs`` (1 if not given) passes over ``problem.train``.

    Raises:
        TrainingError: There is no training data, or the number of epochs is not positive.
    """
    loader = needs_train(problem, method)
    epochs = 1.0 if problem.epochs is None else float(problem.epochs)
    if not (math.isfinite(epochs) and epochs > 0):
        raise TrainingError(f"`epochs` must be positive; got {epochs}.")
    length = len(loader) if isinstance(loader, Sized) else sum(1 for _ in loader)
    if length == 0:
        raise TrainingError("The train loader is empty. Give one with at least one batch.")
    return max(1, round(epochs * length))


def strength(scale: Tensor, pull: float, steps: int, options: Training) -> float:
    """Return the coefficient with which an L1 penalty alone removes the share ``pull`` of a typical value.

    The gradient of the penalty is the coefficient. With momentum m step t moves by lr (1 - m^t) / (1 - m) times the
    coefficient, so n steps move by lr / (1 - m) * (n - m (1 - m^n) / (1 - m)) times it.

    Args:
        scale: The values before training, of any shape.
        pull: Share of a typical value.
        steps: Number of steps.
        options: Learning rate and momentum.
    """
    m = min(options.momentum, 0.999)
    distance = options.lr / (1.0 - m) * (steps - m * (1.0 - m**steps) / (1.0 - m))
    return pull * float(scale.detach().double().mean()) / max(distance, 1e-12)


def train(problem: Problem, model: nn.Module, options: Training, steps: int, penalty: Penalty, label: str) -> None:
    """Train in place on ``problem.train``, seeded by the problem.

    Args:
        problem: The data, the loss and the seed.
        model: The network.
        options: Settings of SGD.
        steps: Number of steps.
        penalty: Added to the loss at every step.
        label: Name of the method, for messages.
    """
    optimiser = _optimiser(model, options)
    batches = RepeatingLoader(needs_train(problem, label))
    model.train()
    total, seen = 0.0, 0
    with seeded(problem, model), counted_steps(steps, label, shown=problem.progress) as count:
        for _ in range(steps):
            total += _step(problem, model, optimiser, next(batches), options, penalty)
            seen += 1
            count(f"loss {total / seen:.3f}")
    _log.info("%s: mean training loss %.4f over %d steps.", label, total / max(seen, 1), seen)


def fine_tune(
    problem: Problem, model: nn.Module, options: Training, masks: Sequence[Tensor], batches: RepeatingLoader, steps: int
) -> None:
    """Train the masked network in place; removed units get no gradient of the loss.

    Args:
        problem: The loss and the channel groups.
        model: The network.
        options: Settings of SGD.
        masks: A mask (C_k,) for each group.
        batches: Training data.
        steps: Number of steps.
    """
    optimiser = _optimiser(model, options)
    model.train()
    for _ in range(steps):
        # Masked weights are part of the graph, so each backward pass needs its own.
        with masked(model, problem.groups, masks):
            _step(problem, model, optimiser, next(batches), options, None)


def _step(
    problem: Problem,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    batch: Any,
    options: Training,
    penalty: Penalty | None,
) -> float:
    with autocast(options.precision, device_of(model)):
        loss = checked_loss(model, place(batch, model, options), problem.loss)
    optimiser.zero_grad(set_to_none=True)
    (loss if penalty is None else loss + penalty()).backward()
    optimiser.step()
    return float(loss.detach())


def _optimiser(model: nn.Module, options: Training) -> torch.optim.Optimizer:
    parameters = trainable_parameters(model)
    return torch.optim.SGD(parameters, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
