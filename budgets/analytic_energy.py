"""Estimated energy: counted work times published energies per operation.

    E(alpha) = e_mac * MACs(alpha) + e_weights * weight bytes(alpha) + e_activations * activation bytes(alpha)

Weights are read once per inference from DRAM, through a large and a small buffer; activations stay in the large buffer
and pass the small one each time they are read or written. An operation that maps one tensor to another of the same size
without multiply-adds (normalisation, activation) is taken as fused and moves nothing. MACs and bytes are polynomials in
the keep ratios, so E is one too, with an exact gradient.

The estimate leaves out leakage, control and whatever a real chip does differently. It ranks networks and shows where
the energy goes; it does not predict what a battery delivers. Budgets and costs are called "estimated energy".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from budgets.analytic import AnalyticCost, quadratics
from budgets.technologies import Technology, technology
from budgets.work_classes import Groups
from dsa_hw.channels.counts import Operation, Term
from dsa_hw.utils.arrays import Floats

__all__ = ["EstimatedEnergy", "estimated_energy"]


@dataclass(frozen=True, eq=False)
class EstimatedEnergy(AnalyticCost):
    """Estimated energy of one inference in joules; see the module."""

    technology: Technology = field(kw_only=True)

    @property
    def estimated(self) -> str:
        """What the values are estimated by."""
        return f"estimated by the analytic model with {self.technology.name} figures ({self.technology.source})"

    def _at_widths(self, widths: Floats) -> Floats:
        return np.asarray(self._per_width(widths), np.float64)


def estimated_energy(groups: Groups, given: str | Path | Mapping[str, Any] | Technology = "45nm") -> EstimatedEnergy:
    """Return the estimated energy of one inference on the example input.

    Args:
        groups: Channel groups of the network.
        given: A name such as ``"45nm"`` or ``"7nm-int8"``, or your own; see ``budgets.technologies.technology``.
    """
    chosen = technology(given)
    sizes = np.asarray(groups.sizes, np.int64)
    terms = [term for operation in groups.operations for term in _terms(operation, chosen)]
    return EstimatedEnergy(
        "estimated energy", "J", tuple(groups.names), sizes, *quadratics(terms, sizes), technology=chosen
    )


def _terms(operation: Operation, chosen: Technology) -> Iterator[Term]:
    """Yield the terms of the energy of one operation."""
    for term in operation.flops:
        yield Term(chosen.joules_per_mac / 2 * term.scale, term.factors)  # two FLOPs are one multiply-add
    for term in operation.weights:
        yield Term(chosen.joules_per_number("weights") * term.scale, term.factors)
    if not operation.view and not _is_fused(operation):
        for count in (*operation.inputs, operation.output):
            yield Term(chosen.joules_per_number("activations"), (count,))


def _is_fused(operation: Operation) -> bool:
    """Whether the operation is fused with the one before.

    It maps one tensor to one of the same size without multiply-adds.
    """
    if operation.flops or len(operation.inputs) != 1:
        return False
    (source,), output = operation.inputs, operation.output
    return source.constant == output.constant and bool(np.array_equal(source.coefficients, output.coefficients))
