"""What callbacks of training loops share: masks around each batch, and a step of the keep ratios now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from budgets.notation import BudgetLike
from dsa_hw.channels import find_groups
from dsa_hw.errors import TrainingError
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.problem import Proposal
from dsa_hw.training.loaders import RepeatingLoader

__all__ = ["AllocationSession"]

_FEWEST = 3  # steps of an allocator


class AllocationSession:
    """An `Allocator` for a training of a known number of batches.

    Attributes:
        allocator: The allocator; None before `begin`.
    """

    def __init__(
        self,
        budget: BudgetLike | Sequence[BudgetLike],
        example_inputs: Any,
        val: Iterable[Any],
        *,
        steps: int = 60,
        **options: Any,
    ) -> None:
        """Keep the settings.

        Args:
            budget: One budget or several.
            example_inputs: Inputs of the network.
            val: Validation batches as the network's loss needs them, read again and again.
            steps: Steps of the keep ratios, spread over the training; at most one for each batch.
            **options: Further settings of `Allocator`, such as ``step`` or ``loss``.
        """
        self.allocator: Allocator | None = None
        self._budget, self._example, self._steps, self._options = budget, example_inputs, steps, options
        self._val = RepeatingLoader(val, "val")
        self._every, self._batches = 1, 0
        self._masks = contextlib.ExitStack()
        self._saved: dict[str, Any] | None = None

    def begin(self, network: nn.Module, batches: float) -> None:
        """Find the channel groups, and spread the steps over this many training batches.

        Raises:
            TrainingError: There are too few batches.
        """
        if batches < _FEWEST:
            raise TrainingError(
                f"An allocation needs at least {_FEWEST} training batches; got {batches:g}. Train longer."
            )
        steps = int(min(self._steps, batches))
        self._every = int(batches // steps)
        groups = find_groups(network, self._example)
        self.allocator = Allocator(network, groups, self._budget, steps=steps, **self._options)
        if self._saved is not None:
            self._batches = self._saved["batches"]
            self._val.load_state_dict(self._saved["val"])
            self.allocator.load_state_dict(self._saved["allocator"])

    def mask(self) -> None:
        """Mask the network until `unmask`: the weights adapt to the channels that are left."""
        self.unmask()
        if self.allocator is not None:
            self._masks.enter_context(self.allocator.masks())

    def unmask(self) -> None:
        """End the masks; a backward pass before or after it has the same gradients."""
        self._masks.close()

    def advance(self) -> None:
        """Count one training batch, and make a step of the keep ratios when one is due."""
        self._batches += 1
        if self.allocator is not None and self._batches % self._every == 0 and not self.allocator.finished:
            self.allocator.step(next(self._val))

    def proposal(self) -> Proposal:
        """Return the result for ``dsa_hw.allocate(..., method=proposal)``.

        Raises:
            TrainingError: There was no training.
        """
        if self.allocator is None:
            raise TrainingError("There is no proposal before a training. Train with this callback first.")
        return self.allocator.proposal()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs."""
        if self.allocator is None:
            return {}
        return {"batches": self._batches, "val": self._val.state_dict(), "allocator": self.allocator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until `begin`."""
        self._saved = dict(state) if state else None
