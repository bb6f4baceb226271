"""Where a cost model comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from dsa_hw.utils.documents import Line

__all__ = ["Provenance"]


@dataclass(frozen=True)
class Provenance:
    """Where a cost model comes from, and how good it was there.

    Attributes:
        quantity: "latency" or "energy".
        unit: Of every cost: "s" or "J".
        target: Title of the target.
        fingerprint: Of the network's channel groups; None where it is not known.
        grid: Group -> step of the widths that the target runs efficiently.
        environment: Versions, device and settings of the measurement.
        versions: Of the packages that fitted the model.
        configurations: Number of configurations that were fitted.
        holdout: Number of configurations that were held out.
        dense: Measured cost of the dense network; None where it was not measured.
        errors: Cross-validated and held-out relative errors, by name.
        notes: What a user should know: rows left out, differences accepted with ``force``.
        statistic: What a cost is of its runs: "quiet", "median", "p95", ...; None where the profile does not say.
    """

    # Files are checked against these types (budgets.model_document).
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    quantity: Annotated[str, Field(pattern="^(latency|energy)$")]
    unit: Annotated[str, Field(pattern="^(s|J)$")]
    target: Line
    fingerprint: str | None
    grid: Mapping[str, Annotated[int, Field(ge=1, le=2**20)]]
    environment: Mapping[str, Any]
    versions: Mapping[str, str]
    configurations: Annotated[int, Field(ge=0)]
    holdout: Annotated[int, Field(ge=0)]
    dense: Annotated[float, Field(gt=0, le=1e6)] | None
    errors: Mapping[str, float]
    notes: tuple[Line, ...] = ()
    statistic: str | None = None
