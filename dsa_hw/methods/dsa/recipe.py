"""Recipes: how long each stage of a training with DSA takes, and how weights and keep ratios are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsa_hw.errors import TrainingError
from dsa_hw.utils.numbers import check_number
from dsa_hw.utils.text import unknown_name

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Settings of `dsa_hw.Trainer`; all lengths in epochs.

    >>> recipe = Recipe.short(epochs=10)
    >>> recipe.warm_up, recipe.allocation, recipe.finetune
    (1.0, 2.0, 7.0)

    Attributes:
        warm_up: Training before the allocation.
        allocation: Training together with the allocation.
        finetune: Training of the pruned network. With 0 the network is not pruned.
        lr: Peak learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        nesterov: Whether the momentum is Nesterov's.
        milestones: Epochs after which the learning rate is divided by 10, as in the paper. Without them it goes
            through one cycle.
        rise: Share of the cycle during which the learning rate rises.
        weight_steps: Weight steps per step of the keep ratios.
        val_batches: Validation batches per step of the keep ratios.
        beta2: Sharpness of the masks at the first and at the last step.
        precision: "fp32", "bf16" or "fp16".
        allocator: Further settings of `dsa_hw.Allocator`.
    """

    warm_up: float
    allocation: float
    finetune: float
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 4e-5
    nesterov: bool = True
    milestones: tuple[float, ...] = ()
    rise: float = 0.2
    weight_steps: int = 20
    val_batches: int = 1
    beta2: tuple[float, float] = (10.0, 100.0)
    precision: str = "fp32"
    allocator: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the lengths and the learning rate."""
        for name in ("warm_up", "allocation", "finetune", "lr"):
            check_number(getattr(self, name), name, TrainingError)

    @property
    def epochs(self) -> float:
        """Length of all stages together."""
        return self.warm_up + self.allocation + self.finetune

    @classmethod
    def paper(cls, data: str = "cifar10", **changes: Any) -> Recipe:
        """Return the recipe of the paper: 300 epochs on CIFAR-10, 120 on ImageNet, beta2 0.05 times 1.1 per epoch.

        Masks are sampled for weights and keep ratios, one per batch (Eqs. 3 and 4). Soft masks cannot replace them: at
        a beta2 of 0.05 they are nearly equal within a group, the next batch norm removes the common factor, and
        dL/dalpha vanishes (docs/development/mathematics.md, section 2).

        The paper allocates until the end. Once beta2 is in the tens of thousands (150 epochs) the keep ratios do not
        change any more. The network is pruned there, which makes the rest of the training cheaper.

        The paper also projects the gradients of theta to be nonnegative "to reach the budget faster", and stops at the
        budget (Alg. 1). This recipe does not (``project_gradient`` of `Admm`): it reaches the budget on a schedule and
        makes further steps there, in which a theta that cannot grow falls below the budget with the gradients' noise.

        Args:
            data: "cifar10" or "imagenet".
            **changes: Other values of the attributes.

        Raises:
            TrainingError: The paper has no recipe for these data.
        """
        plans: dict[str, dict[str, Any]] = {
            "cifar10": {"warm_up": 20, "allocation": 150, "finetune": 130, "lr": 0.05, "milestones": (120, 180, 240)},
            "imagenet": {"warm_up": 15, "allocation": 75, "finetune": 30, "lr": 0.1, "milestones": (50, 80, 110)},
        }
        if data not in plans:
            raise TrainingError(unknown_name("recipe of the paper", data, plans))
        plan = plans[data]
        growth = (0.05, 0.05 * 1.1 ** plan["allocation"])
        allocator = {
            "softness": "importance",
            "masks": "straight_through",
            "samples": 1,
            "weight_masks": "sampled",
        }
        return cls(**{"beta2": growth, "allocator": allocator, "nesterov": False, **plan, **changes})

    @classmethod
    def short(cls, epochs: float = 15.0, **changes: Any) -> Recipe:
        """Return a recipe for small machines, with one cycle of the learning rate.

        A tenth of the epochs is warm-up and a fifth is allocation. Most of the cycle is left for the pruned network,
        because weights need time to recover from pruning.

        Args:
            epochs: Length of all stages together.
            **changes: Other values of the attributes.
        """
        plan = {"warm_up": 0.1 * epochs, "allocation": 0.2 * epochs, "finetune": 0.7 * epochs, "lr": 0.2}
        return cls(**{"weight_decay": 5e-4, "weight_steps": 10, **plan, **changes})
