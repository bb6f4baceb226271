"""How good is a configuration? The loss of the masked network on a few fixed batches."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsa_hw.channels import masked
from dsa_hw.channels.importance import scores
from dsa_hw.errors import TrainingError
from dsa_hw.methods.baselines._options import Compute, Evaluation
from dsa_hw.methods.problem import Problem
from dsa_hw.methods.synthetic import output_distance, synthetic_batches
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import autocast, checked_loss
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.inputs import as_inputs
from dsa_hw.utils.modules import device_of

__all__ = ["Evaluator", "place", "prepared", "ranks", "seeded", "unit_scores"]

# Made-up inputs of one batch.
_SYNTHETIC = 32


class Evaluator:
    """Mean loss of the masked network, on the same batches for every configuration.

    Batches come from ``problem.val``, else ``problem.train``. With neither, inputs are made up as they are for DSA
    (``guidance.made_up_batches``) and the loss is the distance of the outputs from the dense network's. Units go in the
    order of ``importance``, K arrays (C_k,). ``model`` is copied.
    """

    def __init__(self, problem: Problem, model: nn.Module, importance: list[Floats], options: Evaluation) -> None:
        self._problem, self._options = problem, options
        self._ranks = ranks(importance)
        data = problem.val if problem.val is not None else problem.train
        self.synthetic = data is None
        self.load(model)
        self.batches: list[tuple[Any, Any]]
        if data is not None:
            with seeded(problem, self.model):  # a loader that shuffles
                pairs = list(itertools.islice(iter(data), options.batches))
            self.batches = [place(pair, self.model, options) for pair in pairs]
        else:
            self.batches = self._made_up()
        if not self.batches:
            raise TrainingError("the loader that guides the choice gave no batch: give one with at least one")
        if not self.synthetic:  # labels that are no class and the like, before they are taken for a bad configuration
            try:
                with torch.no_grad(), autocast(options.precision, device_of(self.model)):
                    checked_loss(self.model, self.batches[0], problem.loss)
            except ValueError as error:  # torch's, of a batch norm that sees a single value per channel
                raise TrainingError(
                    f"the network cannot be evaluated on the first batch ({error}): give larger batches, or "
                    "options={'statistics': 'stored'}"
                ) from error
        self.dense = self(problem.groups.sizes)
        if not math.isfinite(self.dense):
            raise TrainingError(f"the loss of the dense network is {self.dense}: check the weights and the data")

    def load(self, model: nn.Module) -> None:
        """Evaluate these weights from now on."""
        self.model = prepared(model, self._options).eval()
        if self._options.statistics == "batch":
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()

    def __call__(self, widths: Ints) -> float:
        """Loss with the ``widths`` (K,) most important units of each group; infinite where it is not a number."""
        masks = [torch.from_numpy((rank < width).astype(np.float32)) for rank, width in self._zip(widths)]
        with torch.no_grad(), self.running(masks):
            found = [float(self.loss(inputs, target)) for inputs, target in self.batches]
        mean = float(np.mean(found))
        return mean if not math.isnan(mean) else math.inf

    def loss(self, inputs: Any, target: Any) -> Tensor:
        """Loss of the model as it is now on one batch, a scalar."""
        args, kwargs = as_inputs(inputs)
        outputs = self.model(*args, **kwargs)
        return output_distance(outputs, target) if self.synthetic else self._problem.loss(outputs, target)

    @contextlib.contextmanager
    def running(self, masks: list[Tensor]) -> Iterator[None]:
        """The masked model, in the precision that was asked for."""
        with autocast(self._options.precision, device_of(self.model)), masked(self.model, self._problem.groups, masks):
            yield

    def _zip(self, widths: Ints) -> Iterator[tuple[Ints, int]]:
        return zip(self._ranks, widths.tolist(), strict=True)

    def _made_up(self) -> list[tuple[Any, Any]]:
        if not self._problem.example_inputs:
            raise TrainingError("there is nothing to evaluate on: give val, train or example_inputs")
        problem, options = self._problem, self._options
        source = synthetic_batches(self.model, problem.example_inputs, _SYNTHETIC, problem.seed)
        result = []
        for batch in itertools.islice(source, options.batches):
            inputs, _ = place(batch, self.model, options)
            args, kwargs = as_inputs(inputs)
            # The target as this evaluator runs the dense network: its precision, its statistics.
            with torch.no_grad(), autocast(options.precision, device_of(self.model)):
                result.append((inputs, self.model(*args, **kwargs)))
        return result


def ranks(importance: list[Floats]) -> list[Ints]:
    """Place of each unit in its group's order, 0 the most important; ties as in ``select_channels``."""
    return [np.argsort(np.argsort(-s, kind="stable"), kind="stable") for s in importance]


def unit_scores(problem: Problem) -> list[Floats]:
    """``problem.importance`` of the units: K arrays (C_k,)."""
    return scores(problem.model, problem.groups, problem.importance)


def prepared(model: nn.Module, options: Compute) -> nn.Module:
    """A copy in the memory format that was asked for."""
    twin = copy.deepcopy(model)
    return twin.to(memory_format=torch.channels_last) if options.channels_last else twin  # type: ignore[call-overload]


def place(batch: Any, model: nn.Module, options: Compute) -> tuple[Any, Any]:
    """(inputs, targets) on the model's device, images in the memory format that was asked for."""
    inputs, targets = on_device(batch, device_of(model))

    def last(leaf: Any) -> Any:
        images = isinstance(leaf, Tensor) and leaf.ndim == 4
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    return pytree.tree_map(last, inputs) if options.channels_last else inputs, targets


@contextlib.contextmanager
def seeded(problem: Problem, model: nn.Module) -> Iterator[None]:
    """torch's and NumPy's global random numbers as ``problem.seed`` says inside, untouched outside."""
    device = device_of(model)
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(problem.seed)
        np.random.seed(problem.seed % 2**32)
        try:
            yield
        finally:
            np.random.set_state(state)
