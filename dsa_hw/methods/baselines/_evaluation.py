"""Quality of a configuration: the loss of the masked network on a few fixed batches."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsa_hw.channels import masked
from dsa_hw.channels.importance import scores
from dsa_hw.errors import TrainingError
from dsa_hw.methods.baselines._options import Compute, Evaluation
from dsa_hw.methods.baselines._units import masks_of, ranks
from dsa_hw.methods.problem import Problem
from dsa_hw.methods.synthetic import output_distance, synthetic_batches
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import autocast, batch_loss, checked_loss, outputs_of
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.modules import copy_module, device_of
from dsa_hw.utils.text import one_line

__all__ = ["Evaluator", "place", "prepared", "seeded", "unit_scores"]

# Synthetic inputs per batch.
_SYNTHETIC = 32


class Evaluator:
    """Mean loss of the masked network, on the same batches for every configuration.

    Batches come from ``problem.val``, else from ``problem.train``. With neither, inputs are synthetic as they are for
    DSA, and the loss is the distance of the outputs from those of the dense network.

    Attributes:
        model: The copy of the network that is evaluated.
        synthetic: Whether inputs are synthetic.
        batches: The batches (inputs, targets).
        dense: Loss of the dense network.
    """

    def __init__(self, problem: Problem, model: nn.Module, importance: Sequence[Floats], options: Evaluation) -> None:
        """Fetch the batches and evaluate the dense network.

        Args:
            problem: The data, the loss, the channel groups and the seed.
            model: The network; it is copied.
            importance: K arrays (C_k,); the least important units are removed first.
            options: How to evaluate.

        Raises:
            TrainingError: There is no data, or the network cannot be evaluated on it.
        """
        self._problem, self._options = problem, options
        self.order = ranks(importance)
        data = problem.val if problem.val is not None else problem.train
        self.synthetic = data is None
        self.load(model)
        self.batches: list[tuple[Any, Any]]
        if data is not None:
            with seeded(problem, self.model):  # the loader may shuffle
                pairs = list(itertools.islice(iter(data), options.batches))
            self.batches = [place(pair, self.model, options) for pair in pairs]
        else:
            self.batches = self._synthetic_batches()
        if not self.batches:
            raise TrainingError("The val or train loader gave no batch. Give one with at least one batch.")
        if not self.synthetic:  # unusable data must not be mistaken for a bad configuration
            try:
                with torch.no_grad(), autocast(options.precision, device_of(self.model)):
                    checked_loss(self.model, self.batches[0], problem.loss)
            except ValueError as error:  # torch's, of a batch norm with a single value per channel
                raise TrainingError(
                    f"The network cannot be evaluated on the first batch ({one_line(error)}). Give larger batches, or "
                    "options={'statistics': 'stored'}."
                ) from error
        self.dense = self(problem.groups.sizes)
        if not math.isfinite(self.dense):
            raise TrainingError(f"The loss of the dense network is {self.dense}. Check the weights and the data.")

    def load(self, model: nn.Module) -> None:
        """Evaluate the weights of ``model`` from now on."""
        self.model = prepared(model, self._options).eval()
        if self._options.statistics == "batch":
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()

    def __call__(self, widths: Ints) -> float:
        """Return the loss with the ``widths`` (K,) most important units of each group; infinite if it is NaN."""
        with torch.no_grad(), self.running(masks_of(self.order, widths)):
            found = [float(self.loss(inputs, target)) for inputs, target in self.batches]
        mean = float(np.mean(found))
        return mean if not math.isnan(mean) else math.inf

    def loss(self, inputs: Any, target: Any) -> Tensor:
        """Return the loss of the model as it is now on one batch, a scalar."""
        if self.synthetic:
            return output_distance(outputs_of(self.model, inputs), target)
        return batch_loss(self.model, (inputs, target), self._problem.loss)

    @contextlib.contextmanager
    def running(self, masks: list[Tensor]) -> Iterator[None]:
        """Mask the model and set the precision."""
        with autocast(self._options.precision, device_of(self.model)), masked(self.model, self._problem.groups, masks):
            yield

    def _synthetic_batches(self) -> list[tuple[Any, Any]]:
        if not self._problem.example_inputs:
            raise TrainingError("There is nothing to evaluate on. Give `val`, `train` or `example_inputs`.")
        problem, options = self._problem, self._options
        source = synthetic_batches(self.model, problem.example_inputs, _SYNTHETIC, problem.seed)
        result = []
        for batch in itertools.islice(source, options.batches):
            inputs, _ = place(batch, self.model, options)
            # The dense network as this evaluator runs it: in its precision, with its statistics.
            with torch.no_grad(), autocast(options.precision, device_of(self.model)):
                result.append((inputs, outputs_of(self.model, inputs)))
        return result


def unit_scores(problem: Problem) -> list[Floats]:
    """Return the importance of the units by ``problem.importance``, K arrays (C_k,)."""
    return scores(problem.model, problem.groups, problem.importance)


def prepared(model: nn.Module, options: Compute) -> nn.Module:
    """Return a copy of the network in the memory format of the options."""
    twin = copy_module(model)
    return twin.to(memory_format=torch.channels_last) if options.channels_last else twin  # type: ignore[call-overload]


def place(batch: Any, model: nn.Module, options: Compute) -> tuple[Any, Any]:
    """Return (inputs, targets) on the device of the network, images in the memory format of the options."""
    inputs, targets = on_device(batch, device_of(model))

    def channels_last(leaf: Any) -> Any:
        images = isinstance(leaf, Tensor) and leaf.ndim == 4
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    if not options.channels_last:
        return inputs, targets
    new = pytree.tree_map(channels_last, inputs)
    return new, (new if inputs is targets else targets)


@contextlib.contextmanager
def seeded(problem: Problem, model: nn.Module) -> Iterator[None]:
    """Seed the global random numbers of torch and NumPy by ``problem.seed``, and restore them afterwards."""
    device = device_of(model)
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(problem.seed)
        np.random.seed(problem.seed % 2**32)
        try:
            yield
        finally:
            np.random.set_state(state)
