"""How closely a pruned network follows the dense one where there are no data to measure an accuracy on."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import TrainingError
from dsa_hw.methods.synthetic import synthetic_inputs
from dsa_hw.utils.documents import Document
from dsa_hw.utils.modules import device_of, evaluating
from dsa_hw.utils.text import first_line

__all__ = ["AGREEMENT", "OUTPUT_ERROR", "UNKNOWN", "Quality", "QualityDocument", "quality_on_synthetic_inputs"]

AGREEMENT, OUTPUT_ERROR, UNKNOWN = "arg-max agreement", "relative output error", "unknown"
_INPUTS = 256  # an agreement then has a standard error of at most 3 percentage points
_BATCH = 8  # fits into memory for large images too; in evaluation mode the result does not depend on it
_ADVICE = "No data were given: the accuracy is unknown, and the network needs fine-tuning."


class QualityDocument(Document):
    """A quality in a certificate; `Quality` describes the fields."""

    measure: Literal["arg-max agreement", "relative output error", "unknown"]
    value: Annotated[float, Field(ge=0)] | None
    inputs: int = Field(ge=0)
    constant: Annotated[float, Field(ge=0, le=1)] | None
    reason: str = Field(max_length=1000)


@dataclass(frozen=True)
class Quality:
    """The pruned network, before any fine-tuning, beside the dense one on ``inputs`` synthetic inputs.

    ``measure`` says what ``value`` is:

    - ``AGREEMENT``: share of inputs with the same arg-max, for outputs of shape (N, C). ``constant`` is the share that
      a constant answer would reach, the dense network's most frequent class.
    - ``OUTPUT_ERROR``: L2 norm of the difference over the L2 norm of the dense output, averaged over the outputs.
    - ``UNKNOWN``: None, with the ``reason``.
    """

    measure: str
    value: float | None
    inputs: int
    constant: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that do not belong to the measure; certificates are read from files."""
        numbers = {AGREEMENT: [self.value, self.constant], OUTPUT_ERROR: [self.value], UNKNOWN: []}.get(self.measure)
        if numbers is None:
            raise ValueError(f"unknown measure of quality {self.measure!r}")
        highest = 1.0 if self.measure == AGREEMENT else math.inf
        if not all(isinstance(x, (int, float)) and 0 <= x <= highest and math.isfinite(x) for x in numbers):
            raise ValueError(f"{self.measure} must be in [0, {highest:g}]; got {numbers!r}")

    def __str__(self) -> str:
        if self.value is None:
            return f"Agreement with the dense network unknown: {self.reason}. {_ADVICE}"
        text = f"{100 * self.value:.1f}% on {self.inputs} synthetic inputs"
        if self.measure == OUTPUT_ERROR:
            return f"Relative output error against the dense network: {text}. {_ADVICE}"
        constant = "" if self.constant is None else f" (a constant answer: {100 * self.constant:.1f}%)"
        return f"Same class as the dense network: {text}{constant}. {_ADVICE}"


def quality_on_synthetic_inputs(dense: nn.Module, pruned: nn.Module, example_inputs: Any, seed: int) -> Quality:
    """Compare two networks in evaluation mode on synthetic inputs.

    Args:
        dense: The dense network.
        pruned: The pruned network.
        example_inputs: Inputs whose shapes the synthetic ones have.
        seed: Seed of the allocation; its inputs are not drawn again.

    Returns:
        Arg-max agreement for outputs (N, C), the relative error for other outputs, or unknown with the reason.
    """
    source = synthetic_inputs(example_inputs, _BATCH, seed + 1, device_of(dense))
    try:
        with torch.no_grad(), evaluating(dense), evaluating(pruned):
            batches = itertools.islice(source, _INPUTS // _BATCH)
            pairs = [_compared(dense(*made), pruned(*made)) for made in batches]
    except TrainingError:
        return _unknown("only floating-point inputs can be synthesised")
    except Exception as error:  # whatever the network raises where its batch size is fixed, for example
        return _unknown(f"the network does not run on {_BATCH} synthetic inputs at once ({first_line(error)})")
    squares = torch.stack([square for square, _ in pairs]).sum(0)  # (outputs, 2)
    if not len(squares) or not bool(torch.isfinite(squares).all()) or not bool((squares[:, 1] > 0).all()):
        return _unknown("the outputs on synthetic inputs are not finite, all zero or no floating-point numbers")
    if pairs[0][1] is None:
        return Quality(OUTPUT_ERROR, float((squares[:, 0] / squares[:, 1]).sqrt().mean()), _INPUTS)
    classes = torch.cat([both for _, both in pairs if both is not None])
    constant = float(classes[:, 0].bincount().max()) / len(classes)
    return Quality(AGREEMENT, float((classes[:, 0] == classes[:, 1]).double().mean()), len(classes), constant)


def _compared(wanted: Any, found: Any) -> tuple[Tensor, Tensor | None]:
    """Return squared differences and dense outputs (outputs, 2) of a batch, and arg-max pairs (N, 2) of classes."""
    both = [(a.double(), b.double()) for a, b in zip(tree_leaves(wanted), tree_leaves(found), strict=True) if _real(a)]
    squares = torch.tensor(
        [[float((a - b).square().sum()), float(a.square().sum())] for a, b in both], dtype=torch.float64
    )
    if not (_real(wanted) and wanted.ndim == 2 and wanted.shape[0] == _BATCH and wanted.shape[1] > 1):
        return squares, None
    return squares, torch.stack([wanted.argmax(1), found.argmax(1)], 1).cpu()


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _unknown(reason: str) -> Quality:
    return Quality(UNKNOWN, None, 0, reason=reason[:1000])
