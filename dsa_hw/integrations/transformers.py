"""Learn keep ratios while the Trainer of Hugging Face transformers trains: a callback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dsa_hw.zoo.torchvision_compat  # noqa: F401  (before transformers, which imports torchvision)
from budgets.notation import BudgetLike
from dsa_hw.errors import MissingDependencyError
from dsa_hw.integrations.session import AllocationSession
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.problem import Proposal

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependencyError(
        "The callback needs transformers, which is not installed. Run pip install 'dsa-hw[transformers]'."
    ) from error

__all__ = ["AllocationCallback"]


class AllocationCallback(TrainerCallback):
    """Learns keep ratios under budgets during ``Trainer.train``, while the weights adapt to the channels that are left.

    The model is not shrunk: afterwards ``dsa_hw.allocate(dense, budget, method=callback.proposal)`` cuts, measures and
    certifies. Batches are dicts of arguments; the loss is the one that the model returns, unless ``step`` is given.
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
            budget: One budget or several, such as "flops=50%"; a measured one needs its fitted cost model.
            example_inputs: Inputs of the network: tensors by position.
            val: Validation batches for the keep ratios, with labels.
            steps: Steps of the keep ratios, spread over the training.
            **options: Further settings of `dsa_hw.Allocator`, such as ``step``.
        """
        self._session = AllocationSession(budget, example_inputs, val, steps=steps, **options)

    @property
    def allocator(self) -> Allocator | None:
        """The allocator; None before the training."""
        return self._session.allocator

    @property
    def proposal(self) -> Proposal:
        """Keep ratios and the trained weights, for ``dsa_hw.allocate(..., method=proposal)``."""
        return self._session.proposal()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Find the channel groups."""
        self._session.begin(given["model"], state.max_steps)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Mask the network."""
        self._session.mask()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Mask it again, where gradients are accumulated: a backward pass frees the graph of the masks."""
        self._session.mask()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Remove the masks, and make a step of the keep ratios when one is due."""
        self._session.unmask()
        self._session.advance()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the network without masks."""
        self._session.unmask()
