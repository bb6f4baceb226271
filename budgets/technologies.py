"""Technologies: published energies of one multiply-add and of one byte at each level of memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dsa_hw.errors import BudgetError

__all__ = ["TECHNOLOGIES", "Technology", "technology"]

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

    @property
    def joules_per_mac(self) -> float:
        """Joules of one multiply-add."""
        return _PICO * self.mac

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
