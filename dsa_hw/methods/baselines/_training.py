"""SGD for the rivals that train: plain, with a penalty on units, or on a masked network."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dsa_hw.channels import masked
from dsa_hw.errors import TrainingError
from dsa_hw.methods.baselines._evaluation import place, seeded
from dsa_hw.methods.baselines._options import Training
from dsa_hw.methods.problem import Batches, Problem
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.training.losses import autocast, checked_loss
from dsa_hw.utils.modules import device_of

__all__ = ["fine_tune", "needs_train", "steps_of", "strength", "train"]

_log = logging.getLogger(__name__)

Penalty = Callable[[], Tensor]


def needs_train(problem: Problem, method: str) -> Batches:
    """``problem.train``, or an error that says who asks for it."""
    if problem.train is None:
        raise TrainingError(
            f"method {method!r} trains the network with a penalty and needs train, a loader of (inputs, targets); "
            "found none. Give train=..., or choose a method that does without: uniform, global_gamma, netadapt, "
            "annealing, knapsack"
        )
    return problem.train


def steps_of(problem: Problem, method: str) -> int:
    """Weight steps in ``problem.epochs`` (1 if not given; may be a fraction) passes over ``problem.train``."""
    loader = needs_train(problem, method)
    epochs = 1.0 if problem.epochs is None else float(problem.epochs)
    if not (math.isfinite(epochs) and epochs > 0):
        raise TrainingError(f"method {method!r} needs a positive number of epochs; found {epochs}")
    length = len(loader) if isinstance(loader, Sized) else sum(1 for _ in loader)
    if length == 0:
        raise TrainingError(f"method {method!r} needs a train loader with at least one batch; found an empty one")
    return max(1, round(epochs * length))


def strength(scale: Tensor, pull: float, steps: int, options: Training) -> float:
    """The coefficient with which an L1 penalty alone takes away ``pull`` of a typical value during ``steps``.

    Its gradient is the coefficient itself. With momentum m step t moves by lr (1 - m^t) / (1 - m) times that, so n
    steps go lr / (1 - m) * (n - m (1 - m^n) / (1 - m)). ``scale``: the values before training, of any shape.
    """
    m = min(options.momentum, 0.999)
    way = options.lr / (1.0 - m) * (steps - m * (1.0 - m**steps) / (1.0 - m))
    return pull * float(scale.detach().double().mean()) / max(way, 1e-12)


def train(
    problem: Problem, model: nn.Module, options: Training, steps: int, penalty: Penalty | None = None, label: str = ""
) -> None:
    """``steps`` of SGD on ``problem.train`` in place; ``penalty()`` is added to the loss. Seeded by the problem."""
    optimiser = _optimiser(model, options)
    batches = RepeatingLoader(needs_train(problem, label))
    model.train()
    total, seen = 0.0, 0
    with seeded(problem, model), tqdm(total=steps, desc=label, disable=not problem.progress, leave=False) as bar:
        for _ in range(steps):
            total += _step(problem, model, optimiser, next(batches), options, penalty)
            seen += 1
            bar.update()
            bar.set_postfix(loss=f"{total / seen:.3f}", refresh=False)
    _log.info("%s: mean training loss %.4f over %d steps", label, total / max(seen, 1), seen)


def fine_tune(
    problem: Problem, model: nn.Module, options: Training, masks: Sequence[Tensor], batches: RepeatingLoader, steps: int
) -> None:
    """``steps`` of SGD in place on the masked network; removed units get no gradient of the loss."""
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
    free = [p for p in model.parameters() if p.requires_grad]
    if not free:
        raise TrainingError("no parameter of the model requires a gradient, so it cannot be trained: unfreeze it first")
    return torch.optim.SGD(free, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
