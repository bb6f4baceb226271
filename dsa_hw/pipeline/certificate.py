"""The certificate: what was asked, what was predicted, what was measured, and whether the promise is kept.

One `Entry` for each budget. A verdict is about intervals, never about single numbers:

    MET          the whole 95 % interval is within the limit
    NOT MET      the whole interval is above it
    CANNOT TELL  the interval contains the limit, or the measurement cannot be trusted

Where the budget is a share of the dense network, the limit is that share of the dense network's cost in the *same*
interleaved run, and the uncertainty of both counts. What slows both alike cancels: see `Reading.doubt_beside`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dsa_hw.errors import PlanError
from dsa_hw.pipeline.quality import Quality
from dsa_hw.units import format_magnitude

if TYPE_CHECKING:
    from budgets import Budget

__all__ = [
    "CANNOT_TELL",
    "MET",
    "NOT_MET",
    "Certificate",
    "Entry",
    "Reading",
    "entry_of",
    "limit_of",
    "reference_of",
    "verdict_of",
]

MET, NOT_MET, CANNOT_TELL = "MET", "NOT MET", "CANNOT TELL"
_FORMAT = "dsa_hw certificate 1"


@dataclass(frozen=True)
class Reading:
    """One cost of one network: ``value`` with its 95 % interval ``[low, high]``, in base units.

    ``doubt`` says why it cannot be trusted, None where it can. ``estimated`` says whose word it is where nothing
    was run ("estimated by Vela 4.2"). ``runs`` is 0 where nothing had to be run.

    Where the doubt is nothing but a disturbance that every run of the session suffered, ``felt`` is the share by which
    it inflates this network, with a standard error, and ``allowed`` the share that the rules allow.
    """

    value: float
    low: float
    high: float
    runs: int = 0
    statistic: str = "count"
    doubt: str | None = None
    estimated: str | None = None
    felt: tuple[float, float] | None = None
    allowed: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether there is a number at all, trusted or not."""
        return math.isfinite(self.value) and self.value > 0

    def sides(self) -> tuple[float, float]:
        """Relative distance of ``low`` and of ``high`` from the value."""
        if not self.usable:
            return math.inf, math.inf
        return 1 - self.low / self.value, self.high / self.value - 1

    def doubt_beside(self, other: Reading | None) -> str | None:
        """Why the ratio to ``other`` from the same interleaved run cannot be trusted; without one, `doubt`.

        (1 + a) / (1 + b) is off by about a - b: of the inflations of the two only the difference counts, and two
        standard errors of it.
        """
        doubt = self.doubt or (other.doubt if other is not None else None)
        if doubt is None or other is None or self.felt is None or other.felt is None:
            return doubt
        (mine, error), (its, another) = self.felt, other.felt
        apart, allowed = abs(mine - its) + 2 * math.hypot(error, another), max(self.allowed, other.allowed)
        if apart <= allowed:
            return None
        return (
            f"short disturbances that the control cannot tell from quiet inflate the two networks unlike, by up to "
            f"{100 * apart:.1f} %, {100 * allowed:.1f} % is allowed"
        )


def verdict_of(reading: Reading, limit: float, reference: Reading | None = None) -> tuple[str, float, float, float]:
    """Verdict, utilisation and its 95 % interval. ``reference`` is what a relative limit was taken from, if any.

    The two readings are independent, so their relative uncertainties add up in squares.
    """
    if not reading.usable or not limit > 0:
        return CANNOT_TELL, math.nan, 0.0, math.inf
    below, above = reading.sides()
    if reference is not None:
        other = reference.sides()
        below, above = math.hypot(below, other[1]), math.hypot(above, other[0])
    used = reading.value / limit
    low, high = used * max(1 - below, 0.0), used * (1 + above)
    if reading.doubt_beside(reference) is not None or low <= 1 < high:
        return CANNOT_TELL, used, low, high
    return (MET if high <= 1 else NOT_MET), used, low, high


@dataclass(frozen=True)
class Entry:
    """One budget and its proof. Costs in base units (s, J, B, FLOPs, parameters); see `Reading` for the rest.

    ``utilisation`` is measured / limit, ``[least_used, most_used]`` its 95 % interval. ``dense`` is the dense network
    in the same run.
    """

    asked: str
    budget: Mapping[str, Any]
    dimension: str
    limit: float
    predicted: float
    measured: float
    low: float
    high: float
    dense: float
    utilisation: float
    least_used: float
    most_used: float
    statistic: str
    runs: int
    target: str
    environment: Mapping[str, str] = field(repr=False)
    verdict: str
    doubt: str | None = None
    estimated: str | None = None

    def __str__(self) -> str:
        """``latency <= 5 ms: predicted 4.91 ms, measured 4.93 ms [4.9, 4.96], 400 runs on onnxruntime/cpu: MET``."""

        def say(value: float) -> str:
            return format_magnitude(value, self.dimension)

        text = f"{self.asked}: predicted {say(self.predicted)}, "
        if self.estimated:
            text += f"{self.estimated}: {say(self.measured)} on {self.target}"
        elif math.isfinite(self.measured) and self.runs:
            factor = self.measured / float(say(self.measured).split()[0])
            interval = f"[{self.low / factor:.4g}, {self.high / factor:.4g}]"
            text += f"measured {say(self.measured)} {interval} ({self.statistic}), {self.runs} runs on {self.target}"
        elif self.doubt:
            text += f"not measured on {self.target}"
        else:
            text += f"counted {say(self.measured)}"
        used = f"{100 * self.utilisation:.1f} % of " if math.isfinite(self.utilisation) else ""
        text += f", {used}{say(self.limit)}: {self.verdict}"
        return f"{text} ({self.doubt})" if self.doubt else text


def reference_of(budget: Budget, dense: Reading, exact: bool) -> Reading | None:
    """What the limit is a share of: the dense network in the same run, where the budget is relative and measured."""
    return dense if budget.relative and not exact else None


def limit_of(budget: Budget, dense: float) -> float:
    """The limit in force, from the budget alone; a share is taken of ``dense``, read in the same run."""
    return budget.quantity.magnitude * (dense if budget.relative else 1.0)


def entry_of(budget: Budget, gauge: Any, predicted: float, reading: Reading, dense: Reading) -> Entry:
    """The entry for a budget, read with ``gauge`` (its title, environment and whether it is exact)."""
    reference = reference_of(budget, dense, gauge.exact)
    limit = limit_of(budget, dense.value)
    verdict, used, low, high = verdict_of(reading, limit, reference)
    doubt = reading.doubt_beside(reference)
    return Entry(
        asked=str(budget),
        budget=budget.to_dict(),
        dimension=budget.dimension,
        limit=limit,
        predicted=predicted,
        measured=reading.value,
        low=reading.low,
        high=reading.high,
        dense=dense.value,
        utilisation=used,
        least_used=low,
        most_used=high,
        statistic=reading.statistic,
        runs=reading.runs,
        target=gauge.title,
        environment=dict(gauge.environment),
        verdict=verdict,
        doubt=doubt,
        estimated=reading.estimated,
    )


@dataclass(frozen=True)
class Certificate:
    """One entry for each budget, the day, and how many networks were measured to get there.

    ``quality`` is that of the network without fine-tuning; None where data were given.
    """

    entries: tuple[Entry, ...]
    date: str
    measurements: int
    versions: Mapping[str, str] = field(default_factory=dict, repr=False)
    quality: Quality | None = None

    @property
    def verdict(self) -> str:
        """MET where there are budgets and every one is met; NOT MET where one is not; else CANNOT TELL."""
        found = {entry.verdict for entry in self.entries}
        if NOT_MET in found:
            return NOT_MET
        return MET if found == {MET} else CANNOT_TELL

    @property
    def utilisation(self) -> float:
        """Of the budget that is used most."""
        return max(entry.utilisation for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.entries, *([self.quality] if self.quality else [])]))

    def to_dict(self) -> dict[str, Any]:
        """JSON: what a plan holds."""
        return {"format": _FORMAT, "verdict": self.verdict, **_plain(asdict(self))}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | None) -> Certificate:
        """Read what `to_dict` wrote; anything else is refused, and so is a limit that its budget does not give."""
        if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
            written = repr(content.get("format")) if isinstance(content, Mapping) else "none"
            raise PlanError(
                f"the plan has no certificate of this version (format: {written}, expected {_FORMAT!r}); plans with "
                "one are written by dsa-hw allocate"
            )
        try:
            entries = tuple(Entry(**{**entry, **_numbers(entry)}) for entry in content["entries"])
            quality = Quality.from_dict(content["quality"])
            versions = dict(content["versions"])
            found = cls(entries, str(content["date"]), int(content["measurements"]), versions, quality)
            for entry in entries:
                _check(entry)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # a BudgetError is a ValueError
            raise PlanError(f"the plan's certificate is damaged ({type(error).__name__}: {error})") from error
        if not entries or content.get("verdict") != found.verdict:
            what = (
                f"its verdict is {content.get('verdict')!r}, its entries say {found.verdict}"
                if entries
                else "no budget"
            )
            raise PlanError(f"The plan's certificate is damaged: {what}. Run dsa-hw allocate again.")
        return found


def _check(entry: Entry) -> None:
    """Raise ValueError where an entry that was read from a file contradicts itself or has values of a wrong type.

    Only the amount of the budget is read here. `dsa_hw.pipeline.verification` checks its other options.
    """
    from budgets import Budget

    for name in ("asked", "dimension", "statistic", "target", "verdict"):
        if not isinstance(getattr(entry, name), str):
            raise ValueError(f"{name} must be text; got {getattr(entry, name)!r}")
    for name in ("doubt", "estimated"):
        if not isinstance(getattr(entry, name), (str, type(None))):
            raise ValueError(f"{name} must be text or null; got {getattr(entry, name)!r}")
    if isinstance(entry.runs, bool) or not isinstance(entry.runs, int):
        raise ValueError(f"runs must be a whole number; got {entry.runs!r}")
    if not all(isinstance(v, Mapping) for v in (entry.environment, entry.budget)):
        raise ValueError("environment and budget must be objects")
    if not all(isinstance(v, str) for v in entry.environment.values()):
        raise ValueError("the environment must be text")
    if entry.verdict not in (MET, NOT_MET, CANNOT_TELL):
        raise ValueError(f"unknown verdict {entry.verdict!r}")
    budget = Budget.from_dict({key: entry.budget.get(key) for key in ("kind", "amount")})
    if entry.dimension != budget.dimension:
        raise ValueError(f"a {type(budget).__name__} has the dimension {budget.dimension!r}; got {entry.dimension!r}")
    if not _close(entry.limit, limit := limit_of(budget, entry.dense)):
        raise ValueError(f"the budget {entry.budget['amount']} gives a limit of {limit!r}; got {entry.limit!r}")
    if math.isfinite(entry.utilisation) and not _close(entry.utilisation, entry.measured / entry.limit):
        raise ValueError(f"measured / limit is {entry.measured / entry.limit!r}; got {entry.utilisation!r}")
    if entry.verdict == MET and not (entry.doubt is None and entry.most_used <= 1):
        raise ValueError(f"the verdict is MET with a utilisation of up to {entry.most_used!r} ({entry.doubt})")


def _close(a: float, b: float) -> bool:
    """Equal to what survives JSON and a conversion of units; NaN equals NaN."""
    return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))


_NUMBERS = ("limit", "predicted", "measured", "low", "high", "dense", "utilisation", "least_used", "most_used")


def _plain(value: Any) -> Any:
    """Strict JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(entry[name]) for name in _NUMBERS}
