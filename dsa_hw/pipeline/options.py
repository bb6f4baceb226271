"""Options of `dsa_hw.allocate`, `dsa_hw.compare` and `dsa_hw.sweep`: how to profile, and how to find the widths."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from dsa_hw.errors import BudgetError, ProfileError, WidthError
from dsa_hw.pipeline.reading import CONFIDENCE
from dsa_hw.utils.numbers import check_positive, check_share

if TYPE_CHECKING:
    from dsa_hw.channels.importance import Importance
    from profilers import MeasuringRules

__all__ = ["ProfileOptions", "RefinementOptions"]


@dataclass(frozen=True)
class ProfileOptions:
    """How the cost model of a measured budget is obtained.

    Attributes:
        source: Where the cost model comes from instead of new measurements: a store (``.sqlite``), a `Profile`, a
            fitted `CostModel` or its JSON file. A mapping gives one for each target.
        samples: Configurations to measure and fit.
        holdout: Configurations to measure and test the fit with.
        grid: Step of the sampled widths in channels. "auto" finds the widths that the target runs efficiently.
        time_limit: Seconds for the profile. A measurement of a candidate network gets a sixth of it, at most 60 s.
        rules: What is measured and when measuring stops. None uses the defaults.
        force: Whether to use a cost model file of another network, target or runtime version.
        name: The name of the network in the store. None uses the name of its class.

    Example:
        >>> ProfileOptions(samples=20, holdout=5).samples
        20
    """

    source: Any = None
    samples: int = 40
    holdout: int = 10
    grid: str | int = "auto"
    time_limit: float = 600.0
    rules: MeasuringRules | None = None
    force: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("samples", 1), ("holdout", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ProfileError(f"`{name}` must be a whole number from {least}; got {value!r}.")
        check_positive(self.time_limit, "time_limit", ProfileError)

    @property
    def reading_limit(self) -> float:
        """Seconds for the measurement of one candidate network."""
        return min(60.0, self.time_limit / 6)


@dataclass(frozen=True)
class RefinementOptions:
    """How keep ratios become a network: smallest widths, ranking of channels, and the measure-and-correct loop.

    Attributes:
        minimum: Smallest keep ratio of a group.
        importance: Which channels matter most: "gamma", "l1", "l2", "fpgm", a function, or "auto" for the choice of the
            method.
        most: Largest number of networks to measure.
        use: Share of the budget that is enough; below it another network is tried.
        confidence: Of the interval that must be within the limit. The network is chosen so that another measurement is
            likely to say so too. More confidence leaves more of the budget unused.
        first: Margin below the limit before any interval is known.
        extra: Margin added to that of the intervals.
        widest: Largest margin.
        constant: Prior standard deviation of an error common to all networks (see `CorrectedCost`).
        slope: Prior standard deviation of an error that grows with the logarithm of the cost.
        local: Prior standard deviation of an error that only similar networks share.
        length: Distance of keep ratios over which networks are similar.
        noise: Smallest standard deviation of a measurement.

    Example:
        >>> RefinementOptions(minimum=0.25).minimum
        0.25
    """

    minimum: float = 0.05
    importance: str | Importance = field(default="auto")
    most: int = 6
    use: float = 0.97
    confidence: float = CONFIDENCE
    first: float = 0.02
    extra: float = 0.002
    widest: float = 0.12
    constant: float = 0.1
    slope: float = 0.1
    local: float = 0.03
    length: float = 0.1
    noise: float = 0.002

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_share(self.minimum, "minimum", WidthError)
        check_share(self.use, "use", BudgetError)
        check_share(self.confidence, "confidence", BudgetError, strict=True)
        if self.confidence < 0.5:  # the interval would have almost no width, and a certificate is refused
            raise BudgetError(f"`confidence` must be at least 0.5; got {self.confidence!r}.")
        if isinstance(self.most, bool) or not isinstance(self.most, Integral) or self.most < 1:
            raise BudgetError(f"`most` must be a whole number from 1; got {self.most!r}.")
