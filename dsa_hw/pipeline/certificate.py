"""The certificate: what was asked, predicted and measured for each budget, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from budgets import Budget
from dsa_hw.errors import PlanError
from dsa_hw.pipeline.meters import Meter
from dsa_hw.pipeline.quality import Quality
from dsa_hw.pipeline.reading import CONFIDENCE, Reading, Verdict, judge, limit_of, worst_verdict
from dsa_hw.units import format_magnitude
from dsa_hw.utils.text import percent

__all__ = ["Certificate", "Entry", "entry_of"]

_FORMAT = "dsa_hw certificate 2"


@dataclass(frozen=True)
class Entry:
    """One budget of a certificate; costs in base units (s, J, B, FLOPs, parameters).

    Attributes:
        asked: The budget in words.
        budget: The budget as `Budget.to_dict` writes it.
        dimension: Dimension of the cost in ``dsa_hw.units``.
        limit: The limit in force.
        predicted: The cost that the model predicted.
        measured: The cost that was measured or counted, with its 95% interval from ``low`` to ``high``.
        low: Lower end of the interval of ``measured``.
        high: Upper end of the interval of ``measured``.
        dense: The cost of the dense network in the same run.
        utilisation: Share of the budget that is used, with its interval from ``least_used`` to ``most_used``. For a
            budget in percent it follows from the measured ratio to the dense network, else from ``measured``.
        least_used: Lower end of the interval of ``utilisation``.
        most_used: Upper end of the interval of ``utilisation``.
        statistic: What ``measured`` is of the runs.
        runs: Number of runs; 0 where the cost was counted.
        target: Title of the target; "counted" where there is none.
        environment: Versions and settings of the measurement.
        verdict: Whether the budget is met.
        doubt: Why the measurement cannot be used; None where it can.
        estimated: What estimated the cost where nothing was run.
        confidence: Of the interval of ``utilisation``, which decides the verdict.
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
    verdict: Verdict
    doubt: str | None = None
    estimated: str | None = None
    confidence: float = CONFIDENCE

    def __str__(self) -> str:
        """Return, for example, ``latency <= 5 ms: predicted 4.91 ms, measured 4.93 ms [4.9, 4.96] ...: MET``."""

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
        used = f"{percent(self.utilisation)} of " if math.isfinite(self.utilisation) else ""
        text += f", {used}{say(self.limit)}"
        if used and self.runs and not self.estimated:
            interval = f"{percent(self.least_used)} to {percent(self.most_used)}"
            text += f" ({interval} with {percent(self.confidence, 0)} confidence)"
        text += f": {self.verdict}"
        return f"{text} ({self.doubt})" if self.doubt else text


def entry_of(
    budget: Budget,
    meter: Meter,
    predicted: float,
    reading: Reading,
    dense: Reading,
    confidence: float = CONFIDENCE,
) -> Entry:
    """Judge a reading and write it down.

    Args:
        budget: The budget.
        meter: What read the cost.
        predicted: The cost that the model predicted.
        reading: The cost of the pruned network.
        dense: The cost of the dense network in the same run.
        confidence: Of the interval that decides.

    Returns:
        The entry of the certificate.
    """
    found = judge(budget, reading, dense, exact=meter.exact, confidence=confidence)
    return Entry(
        asked=str(budget),
        budget=budget.to_dict(),
        dimension=budget.dimension,
        limit=found.limit,
        predicted=predicted,
        measured=reading.value,
        low=reading.low,
        high=reading.high,
        dense=dense.value,
        utilisation=found.used,
        least_used=found.low,
        most_used=found.high,
        statistic=reading.statistic,
        runs=reading.runs,
        target=meter.title,
        environment=dict(meter.environment),
        verdict=found.verdict,
        doubt=found.doubt,
        estimated=reading.estimated,
        confidence=confidence,
    )


@dataclass(frozen=True)
class Certificate:
    """The certificate of a pruned network.

    Attributes:
        entries: One for each budget.
        date: The day, as YYYY-MM-DD.
        measurements: How many networks were measured.
        versions: Versions of the packages that matter.
        quality: How closely the network follows the dense one, without fine-tuning; None where data were given.
    """

    entries: tuple[Entry, ...]
    date: str
    measurements: int
    versions: Mapping[str, str] = field(default_factory=dict, repr=False)
    quality: Quality | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the entries; INCONCLUSIVE where there is none."""
        return worst_verdict(entry.verdict for entry in self.entries)

    @property
    def utilisation(self) -> float:
        """The share that is used of the budget that is used most."""
        return max(entry.utilisation for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.entries, *([self.quality] if self.quality else [])]))

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON, as a plan holds it."""
        return {"format": _FORMAT, "verdict": str(self.verdict), **_plain(asdict(self))}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | None) -> Certificate:
        """Read what `to_dict` wrote.

        Raises:
            PlanError: The content is something else, is damaged or contradicts itself: an unknown verdict, a limit
                that does not follow from the budget, a verdict that does not follow from the interval.
        """
        if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
            written = repr(content.get("format")) if isinstance(content, Mapping) else "none"
            raise PlanError(
                f"The plan has no certificate of this version (format: {written}, expected {_FORMAT!r}). Make one with "
                "dsa-hw allocate."
            )
        try:
            entries = tuple(Entry(**{**entry, **_converted(entry)}) for entry in content["entries"])
            quality = Quality.from_dict(content["quality"])
            versions = dict(content["versions"])
            found = cls(entries, str(content["date"]), int(content["measurements"]), versions, quality)
            for entry in entries:
                _check(entry)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # a BudgetError is a ValueError
            raise PlanError(f"The plan's certificate is damaged ({type(error).__name__}: {error}).") from error
        if not entries or content.get("verdict") != found.verdict:
            what = (
                f"its verdict is {content.get('verdict')!r}, its entries say {found.verdict}"
                if entries
                else "no budget"
            )
            raise PlanError(f"The plan's certificate is damaged: {what}. Run dsa-hw allocate again.")
        return found


def _check(entry: Entry) -> None:
    """Raise ValueError where an entry from a file contradicts itself or has values of a wrong type.

    Only the amount of the budget is read here. `dsa_hw.pipeline.verification` checks its other options.
    """
    for name in ("asked", "dimension", "statistic", "target"):
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
    budget = Budget.from_dict({key: entry.budget.get(key) for key in ("kind", "amount")})
    if entry.dimension != budget.dimension:
        raise ValueError(f"a {type(budget).__name__} has the dimension {budget.dimension!r}; got {entry.dimension!r}")
    if not _close(entry.limit, limit := limit_of(budget, entry.dense)):
        raise ValueError(f"the budget {entry.budget['amount']} gives a limit of {limit!r}; got {entry.limit!r}")
    if math.isfinite(entry.utilisation) and not _close(entry.utilisation, entry.measured / entry.limit):
        raise ValueError(f"measured / limit is {entry.measured / entry.limit!r}; got {entry.utilisation!r}")
    if not 0.5 <= entry.confidence < 1:
        raise ValueError(f"the confidence must be from 0.5 to 1; got {entry.confidence!r}")
    if math.isfinite(entry.utilisation) and not entry.least_used <= entry.utilisation <= entry.most_used:
        raise ValueError(f"utilisation {entry.utilisation!r} is outside {entry.least_used!r} to {entry.most_used!r}")
    if entry.verdict == Verdict.MET and not (entry.doubt is None and entry.most_used <= 1):
        raise ValueError(f"the verdict is MET with a utilisation of up to {entry.most_used!r} ({entry.doubt})")


def _close(a: float, b: float) -> bool:
    """Compare up to what JSON and a conversion of units change; NaN equals NaN."""
    return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))


_NUMBERS = (
    "limit", "predicted", "measured", "low", "high", "dense", "utilisation", "least_used", "most_used", "confidence",
)  # fmt: skip


def _plain(value: Any) -> Any:
    """Return JSON without NaN and infinity, which are written as text."""
    if isinstance(value, Verdict):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _converted(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"verdict": Verdict(entry["verdict"]), **{name: float(entry[name]) for name in _NUMBERS}}
