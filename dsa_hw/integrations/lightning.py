"""Learn keep ratios while Lightning trains: a callback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dsa_hw.zoo.torchvision_compat  # noqa: F401  (before Lightning, which imports torchvision)
from budgets.notation import BudgetLike
from dsa_hw.errors import MissingDependencyError, TrainingError
from dsa_hw.integrations.session import AllocationSession
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.problem import Proposal

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingDependencyError(
        "The callback needs Lightning, which is not installed. Run pip install 'dsa-hw[lightning]'."
    ) from error

__all__ = ["AllocationCallback"]


class AllocationCallback(Callback):
    """Learns keep ratios under budgets during ``Trainer.fit``, while the weights adapt to the channels that are left.

    The module is not shrunk: afterwards ``dsa_hw.allocate(dense, budget, method=callback.proposal)`` cuts, measures and
    certifies, and its ``result.model`` can be trained further as any network.
    """

    def __init__(
        self,
        budget: BudgetLike | Sequence[BudgetLike],
        example_inputs: Any,
        val: Iterable[Any],
        *,
        network: str = "model",
        steps: int = 60,
        **options: Any,
    ) -> None:
        """Keep the settings.

        Args:
            budget: One budget or several, such as "flops=50%"; a measured one needs its fitted cost model.
            example_inputs: Inputs of the network.
            val: Validation batches for the keep ratios.
            network: Attribute of the LightningModule that is pruned; "" is the module itself.
            steps: Steps of the keep ratios, spread over the training.
            **options: Further settings of `dsa_hw.Allocator`, such as ``loss`` or ``step``.
        """
        self._session = AllocationSession(budget, example_inputs, val, steps=steps, **options)
        self._network = network

    @property
    def allocator(self) -> Allocator | None:
        """The allocator; None before the training."""
        return self._session.allocator

    @property
    def proposal(self) -> Proposal:
        """Keep ratios and the trained weights, for ``dsa_hw.allocate(..., method=proposal)``."""
        return self._session.proposal()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the channel groups."""
        try:
            network = pl_module.get_submodule(self._network)
        except AttributeError as error:
            raise TrainingError(
                f"{type(pl_module).__name__} has no network {self._network!r}. Give the callback network=, the name of "
                "the attribute."
            ) from error
        batches = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        if batches == float("inf"):
            raise TrainingError("The training has no end. Give the Trainer max_epochs or max_steps.")
        self._session.begin(network, batches)

    def on_train_batch_start(self, *_: Any) -> None:
        """Mask the network."""
        self._session.mask()

    def on_train_batch_end(self, *_: Any) -> None:
        """Remove the masks, and make a step of the keep ratios when one is due."""
        self._session.unmask()
        self._session.advance()

    def on_exception(self, *_: Any) -> None:
        """Leave the network without masks."""
        self._session.unmask()

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning saves in its checkpoints."""
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._session.load_state_dict(state_dict)
