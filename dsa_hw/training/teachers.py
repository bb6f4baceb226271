"""The dense network as a teacher of a pruned one, beside the targets of the data (Hinton et al. 2015).

The loss of a step is (1 - weight) times the loss of the targets plus weight times the distance between the outputs of
the two networks, `dsa_hw.training.distillation.distillation_loss` or a function of the user.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.distillation import TEMPERATURE, distillation_loss
from dsa_hw.training.fingerprints import first_batch
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import Loss, OwnLoss, checked_loss, checked_value, outputs_of
from dsa_hw.utils.modules import copy_module, device_of, evaluating
from dsa_hw.utils.numbers import check_positive, check_share

__all__ = ["Teacher", "as_teacher", "taught_loss", "useful_teacher"]

_log = logging.getLogger(__name__)

_BETTER = 0.05
"""How far below the network's loss the teacher's must be.

Two networks of random weights differ by less; a trained one and one that was pruned and not trained further, by more.
"""


@dataclass(frozen=True)
class Teacher:
    """A trained network whose outputs another one learns, beside the targets.

    >>> dense = nn.Linear(3, 2)
    >>> Teacher(dense).weight
    0.9

    Attributes:
        model: The network; it is not changed.
        weight: Share of the loss that compares the outputs. ResNet-20 at 33% of its FLOPs, two epochs of CIFAR-10: 0.9
            is better than no teacher, with any peak learning rate from 0.01 to 0.05.
        temperature: Of the softmax, for outputs (N, classes).
        loss: ``loss(outputs, wanted)``, a scalar, with the outputs of the trained network in training mode and those of
            the teacher in evaluation mode. None is `distillation_loss`. Detectors and others whose outputs differ
            between the modes need it.
    """

    model: nn.Module
    weight: float = 0.9
    temperature: float = TEMPERATURE
    loss: Loss | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            TrainingError: ``model`` is not a module, ``weight`` not in [0, 1], or ``temperature`` not positive.
        """
        if not isinstance(self.model, nn.Module):
            raise TrainingError(f"A teacher must be a network (nn.Module); got {self.model!r}.")
        check_share(self.weight, "weight", TrainingError)
        check_positive(self.temperature, "temperature", TrainingError)

    def distance(self, outputs: Any, inputs: Any) -> Tensor:
        """Return how far outputs are from those of the teacher for the same inputs.

        Raises:
            TrainingError: They cannot be compared.
        """
        with torch.no_grad():
            wanted = outputs_of(self.model, inputs)
        if self.loss is not None:
            return checked_value(outputs, wanted, self.loss)
        try:
            return distillation_loss(outputs, wanted, self.temperature)
        except (ValueError, RuntimeError) as error:
            raise TrainingError(
                "The outputs of the network in training mode and of the teacher in evaluation mode have different "
                "forms. Give Teacher(model, loss=...) a function loss(outputs, wanted) that compares them."
            ) from error

    def ingredients(self) -> dict[str, Any]:
        """Return what a training with this teacher depends on."""
        return {"weights": dict(self.model.state_dict()), "with": (self.weight, self.temperature), "loss": self.loss}


def as_teacher(teacher: nn.Module | Teacher | None) -> Teacher | None:
    """Return a teacher with a copy of its network in evaluation mode, which later training cannot change.

    Args:
        teacher: The network, or the network with settings; None is accepted.
    """
    if teacher is None:
        return None
    found = teacher if isinstance(teacher, Teacher) else Teacher(teacher)
    model = copy_module(found.model).eval()
    return replace(found, model=model.requires_grad_(False))


def taught_loss(model: nn.Module, batch: tuple[Any, Any], loss: Loss, teacher: Teacher | None) -> Tensor:
    """Compute the loss of one batch, beside the distance to the teacher's outputs where there is a teacher.

    Args:
        model: The network.
        batch: (inputs, targets) on its device.
        loss: ``loss(outputs, targets)``, a scalar.
        teacher: What `as_teacher` returned.

    Raises:
        TrainingError: A loss cannot be computed, is not a scalar or is not finite.
    """
    if teacher is None or isinstance(loss, OwnLoss):
        return checked_loss(model, batch, loss)
    inputs, targets = batch
    outputs = outputs_of(model, inputs)
    distance = teacher.distance(outputs, inputs)
    if teacher.weight == 1.0:  # labels are not needed
        return distance
    return (1.0 - teacher.weight) * checked_value(outputs, targets, loss) + teacher.weight * distance


def useful_teacher(teacher: Teacher | None, model: nn.Module, loader: Any, loss: Loss) -> Teacher | None:
    """Return the teacher where its loss on the first batch is at least 5% below the network's, else None.

    A dense network of random weights, or one that its pruned copy has outgrown, teaches nothing.

    Args:
        teacher: What `as_teacher` returned.
        model: The network that is to be trained; not changed.
        loader: Loader of (inputs, targets); one that can be read only once is not read, and the teacher is used.
        loss: ``loss(outputs, targets)``, a scalar.
    """
    if teacher is not None and isinstance(loss, OwnLoss):
        _log.warning("The dense network is not used as a teacher: `step` does not return outputs to compare.")
        return None
    batch = None if teacher is None or teacher.weight == 1.0 else first_batch(loader)
    if teacher is None or batch is None:
        return teacher
    moved = on_device(batch, device_of(model))
    with torch.no_grad(), evaluating(model):
        try:
            theirs, ours = (float(checked_loss(network, moved, loss)) for network in (teacher.model, model))
        except TrainingError:  # a loss for outputs in training mode only
            return teacher
    if ours - theirs >= _BETTER * abs(ours):
        return teacher
    _log.warning(
        "The dense network is not used as a teacher: its loss on the first batch, %.4g, is not 5%% below that of the "
        "network to be trained, %.4g.", theirs, ours,
    )  # fmt: skip
    return None
