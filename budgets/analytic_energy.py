"""Estimated energy: joules from counted work and published energies per operation, for hardware that is not at hand.

    E(alpha) = e_mac * MACs(alpha) + e_weights * weight bytes(alpha) + e_activations * activation bytes(alpha)

e_weights is the energy of one byte on its way through the memories: weights come from DRAM, through a large buffer and
a small one, once per inference; activations live in the large buffer and pass the small one each time they are read or
written. An operation that maps one tensor to another of the same size without multiply-adds (normalisation, activation)
works on the way and moves nothing. MACs, bytes of weights and bytes of activations are polynomials in the keep ratios,
so E is one too, with an exact gradient.

This is an estimate: it leaves out leakage, control, and whatever a real chip does differently. It ranks networks and
shows where the energy goes; it does not say what a battery will see. Its name says so everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from budgets.analytic import AnalyticCost, Array, _quadratics
from budgets.features import Groups
from dsa_hw.channels.counts import Operation, Term
from dsa_hw.errors import BudgetError

__all__ = ["TECHNOLOGIES", "EstimatedEnergy", "Technology", "estimated_energy", "technology"]

_PATHS: Final = {"weights": ("dram", "large", "small"), "activations": ("large", "small")}
_PICO: Final = 1e-12


@dataclass(frozen=True)
class Technology:
    """What work costs: picojoules of one multiply-add, and of one byte at each level of memory.

    ``width`` is the bytes of one number. ``paths`` says through which levels weights and activations go.
    """

    name: str
    mac: float
    byte: Mapping[str, float] = field(hash=False)
    width: float = 4.0
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(_PATHS), hash=False)
    source: str = ""

    def __post_init__(self) -> None:
        """Check."""
        numbers = {"mac": self.mac, "width": self.width, **{f"byte {k}": v for k, v in self.byte.items()}}
        for what, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or math.isinf(value):
                raise BudgetError(f"technology {self.name}: {what} is {value!r}; give a number of picojoules from 0")
        if set(self.paths) != set(_PATHS) or not self.width > 0:
            raise BudgetError(f"technology {self.name}: paths must be given for weights and activations, width above 0")
        for what, levels in self.paths.items():
            for level in levels:
                if level not in self.byte:
                    raise BudgetError(
                        f"technology {self.name}: {what} go through {level!r}, but energies are given for "
                        f"{', '.join(self.byte)}"
                    )

    def along(self, what: str) -> float:
        """Joules of one number on the path of ``what``."""
        return _PICO * self.width * sum(self.byte[level] for level in self.paths[what])


def _published() -> dict[str, Technology]:
    # pJ of one multiplication and one addition; int8 is accumulated in 32 bits. A memory access is 64 bits wide.
    horowitz = "M. Horowitz, Computing's energy problem, ISSCC 2014, fig. 1.1.9 (45 nm, 0.9 V)"
    jouppi = "N. Jouppi et al., Ten lessons from three generations shaped Google's TPUv4i, ISCA 2021, table 2 (7 nm)"
    nodes: tuple[tuple[str, str, dict[str, float], dict[str, tuple[float, float]]], ...] = (
        (
            "45nm",
            horowitz,
            {"small": 10 / 8, "large": 100 / 8, "dram": 1300 / 8},  # 8 KiB, 1 MiB, the lower end of 1.3-2.6 nJ
            {"": (3.7, 0.9), "-fp16": (1.1, 0.4), "-int8": (0.2, 0.1)},
        ),
        (
            "7nm",
            jouppi,
            {"small": 7.5 / 8, "large": 14 / 8, "dram": 1300 / 8},  # 8 KiB, 1 MiB, DDR4
            {"": (1.31, 0.38), "-fp16": (0.34, 0.16), "-int8": (0.07, 0.03)},
        ),
    )
    widths = {"": 4.0, "-fp16": 2.0, "-int8": 1.0}
    return {
        node + kind: Technology(node + kind, multiply + add, memory, widths[kind], source=source)
        for node, source, memory, arithmetic in nodes
        for kind, (multiply, add) in arithmetic.items()
    }


TECHNOLOGIES: Final[dict[str, Technology]] = _published()
"""Published figures: 45 nm and 7 nm, fp32, fp16 and int8."""


def technology(given: str | Path | Mapping[str, Any] | Technology) -> Technology:
    """By name ("45nm", "7nm-int8"), or your own: a mapping or a JSON file with the fields of `Technology`."""
    if isinstance(given, Technology):
        return given
    if isinstance(given, str) and given in TECHNOLOGIES:
        return TECHNOLOGIES[given]
    what = "the given technology"
    if isinstance(given, (str, Path)):
        path, what = Path(given), str(given)
        if path.suffix != ".json":
            raise BudgetError(
                f"technology {what!r} is not known; choose one of {', '.join(TECHNOLOGIES)}, or give your own as a "
                "mapping or a JSON file"
            )
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BudgetError(f"technology {what} cannot be read ({error}); write a JSON object") from error
    if not isinstance(given, Mapping):
        raise BudgetError(f"{what} is a {type(given).__name__}; give a mapping with mac and byte, in picojoules")
    known = {"name", "mac", "byte", "width", "paths", "source"}
    unknown, missing = sorted(set(given) - known), sorted({"mac", "byte"} - set(given))
    if unknown or missing or not isinstance(given.get("byte"), Mapping):
        wrong = f"{unknown[0]!r} is not known" if unknown else f"{missing[0] if missing else 'byte'!r} is needed"
        raise BudgetError(
            f"{what}: {wrong}; write {{'mac': pJ, 'byte': {{'dram': pJ, 'large': pJ, 'small': pJ}}, 'width': bytes of "
            "a number, 'paths': {'weights': [...], 'activations': [...]}}, the last two if they differ from 4 and the "
            "usual ones"
        )
    paths = {k: tuple(v) for k, v in dict(given.get("paths") or _PATHS).items()}
    name, source = str(given.get("name") or Path(what).name), str(given.get("source", "the user's own table"))
    return Technology(name, given["mac"], dict(given["byte"]), given.get("width", 4.0), paths, source)


@dataclass(frozen=True, eq=False)
class EstimatedEnergy(AnalyticCost):
    """F(alpha) in joules, estimated; see the module."""

    technology: Technology = field(kw_only=True)

    @property
    def estimated(self) -> str:
        """Whose word it is."""
        return f"estimated by the analytic model with {self.technology.name} figures ({self.technology.source})"

    def _at_widths(self, widths: Array) -> Array:
        return np.asarray(self._per_width(widths), np.float64)  # joules are no whole numbers


def estimated_energy(groups: Groups, given: str | Path | Mapping[str, Any] | Technology = "45nm") -> EstimatedEnergy:
    """Estimated joules of one inference on the example input."""
    chosen = technology(given)
    sizes = np.asarray(groups.sizes, np.int64)
    terms = [term for operation in groups.operations for term in _terms(operation, chosen)]
    return EstimatedEnergy(
        "estimated energy", "J", tuple(groups.names), sizes, *_quadratics(terms, sizes), technology=chosen
    )


def _terms(operation: Operation, chosen: Technology) -> Iterator[Term]:
    """The energy of one operation: multiply-adds, weights read, activations read and written."""
    for term in operation.flops:
        yield Term(_PICO * chosen.mac / 2 * term.scale, term.factors)  # two FLOPs are one multiply-add
    for term in operation.weights:
        yield Term(chosen.along("weights") * term.scale, term.factors)
    if not operation.view and not _on_the_way(operation):
        for count in (*operation.inputs, operation.output):
            yield Term(chosen.along("activations"), (count,))


def _on_the_way(operation: Operation) -> bool:
    """Whether the operation maps one tensor to one of the same size without multiply-adds."""
    if operation.flops or len(operation.inputs) != 1:
        return False
    (source,), output = operation.inputs, operation.output
    return source.constant == output.constant and bool(np.array_equal(source.coefficients, output.coefficients))
