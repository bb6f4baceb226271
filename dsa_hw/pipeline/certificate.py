"""The certificate: what was asked, predicted and measured for each budget, and the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, JsonValue

from budgets import Budget
from dsa_hw.errors import PlanError
from dsa_hw.pipeline.meters import Meter
from dsa_hw.pipeline.quality import Quality, QualityDocument
from dsa_hw.pipeline.quantised import Calibration, QuantisationDocument, Variant
from dsa_hw.pipeline.reading import CONFIDENCE, Reading, Verdict, judge, limit_of, worst_verdict
from dsa_hw.training.intervals import Interval
from dsa_hw.units import format_magnitude
from dsa_hw.utils.documents import Document, Line, read_document
from dsa_hw.utils.text import one_line, percent, printable

__all__ = ["Certificate", "CertificateDocument", "Entry", "entry_of"]

_FORMAT: Final = "dsa_hw certificate 4"

_Cost = Annotated[float, Field(ge=0)]
# What null stands for in a file, where numbers are finite.
_UNKNOWN: Final = {
    "limit": math.nan, "predicted": math.nan, "measured": math.nan, "low": math.nan, "high": math.inf,
    "dense": math.nan, "utilisation": math.nan, "least_used": 0.0, "most_used": math.inf,
}  # fmt: skip

_INT8: Final = re.compile(r" int8\S*( x\d+)?$", re.ASCII)  # the end of the title of a target that quantises
_INTERVALS: Final = ("value", "dense", "drop")  # of a quality


class EntryDocument(Document):
    """One budget in a certificate; `Entry` describes the fields. Null is a number that is not known or not bounded."""

    asked: Line
    budget: dict[str, JsonValue]
    dimension: Line
    limit: Annotated[float, Field(gt=0)] | None
    predicted: _Cost | None
    measured: _Cost | None
    low: _Cost | None
    high: _Cost | None
    dense: Annotated[float, Field(gt=0)] | None
    utilisation: _Cost | None
    least_used: _Cost | None
    most_used: _Cost | None
    statistic: Line
    runs: int = Field(ge=0)
    target: Line
    specification: Line
    environment: dict[Line, Line]
    verdict: Verdict
    doubt: Line | None
    estimated: Line | None
    confidence: float = Field(ge=0.5, lt=1)


class CertificateDocument(Document):
    """The certificate in a plan; `Certificate` describes the fields."""

    remedy: ClassVar[str] = "Make a certificate with dsa-hw allocate."

    format: Literal["dsa_hw certificate 4"]
    verdict: Verdict
    entries: tuple[EntryDocument, ...] = Field(min_length=1, max_length=100)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    measurements: int = Field(ge=0)
    versions: dict[Line, Line]
    quality: QualityDocument
    int8: tuple[QuantisationDocument, ...] = Field(default=(), max_length=100)


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
        specification: The target as the user would name it, with its options; "" where there is none.
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
    specification: str
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
        specification=meter.specification,
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
        quality: What is left of the metric, or of the agreement with the dense network. Where a budget is on a target
            in int8, it is that of the quantised network, run in the runtime of the first such target.
        int8: How the network is quantised, for each target in int8.
    """

    entries: tuple[Entry, ...]
    date: str
    measurements: int
    quality: Quality
    versions: Mapping[str, str] = field(default_factory=dict, repr=False)
    int8: tuple[Calibration, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the entries, and of the drop of the metric where it has a limit."""
        floor = self.quality.verdict
        return worst_verdict([*(entry.verdict for entry in self.entries), *([] if floor is None else [floor])])

    @property
    def utilisation(self) -> float:
        """The share that is used of the budget that is used most."""
        return max(entry.utilisation for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.entries, self.quality, *self.int8]))

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON, as a plan holds it."""
        content = {"format": _FORMAT, "verdict": str(self.verdict), **asdict(self)}
        content["entries"] = [_finite(entry) for entry in content["entries"]]
        variants = [variant for calibration in content["int8"] for variant in calibration["variants"]]
        for quality in (content["quality"], *(v["quality"] for v in variants if v["quality"] is not None)):
            for name in _INTERVALS:
                if (found := quality[name]) is not None:
                    quality[name] = {k: v if math.isfinite(v) else None for k, v in found.items()}
        return dict(_printable(content))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | None) -> Certificate:
        """Read what `to_dict` wrote.

        Raises:
            PlanError: The content is something else, is damaged or contradicts itself: no entry, an unknown verdict, a
                limit that does not follow from the budget, a verdict that does not follow from the interval.
        """
        if not isinstance(content, Mapping):
            raise PlanError("The plan has no certificate. Make one with dsa-hw allocate.")
        what = "the certificate of the plan"
        found = read_document(content, CertificateDocument, what, error=PlanError)
        try:
            entries = tuple(_entry(document) for document in found.entries)
            made = cls(
                entries, found.date, found.measurements, _quality(found.quality), found.versions,
                tuple(_calibration(document) for document in found.int8),
            )  # fmt: skip
            for entry in entries:
                _check(entry)
            _check_int8(made)
            if found.verdict != made.verdict:
                raise ValueError(f"its verdict is {found.verdict}, its entries and its quality say {made.verdict}")
        except (TypeError, ValueError, ArithmeticError) as error:  # a BudgetError is a ValueError
            raise PlanError(f"Cannot use {what}: {one_line(error).rstrip('.')}. {found.remedy}") from error
        return made


def _quality(document: QualityDocument) -> Quality:
    content = document.model_dump()
    for name in _INTERVALS:
        if (found := content[name]) is not None:
            ends = {"low": -math.inf, "high": math.inf}
            content[name] = Interval(**{k: ends[k] if v is None else float(v) for k, v in found.items()})
    return Quality(**content)


def _calibration(document: QuantisationDocument) -> Calibration:
    variants = tuple(
        Variant(**{**v.model_dump(exclude={"quality"}), "quality": None if v.quality is None else _quality(v.quality)})
        for v in document.variants
    )
    return Calibration(**{**document.model_dump(), "variants": variants})


def _check_int8(certificate: Certificate) -> None:
    """Raise ValueError where targets in int8 and calibrations do not belong together."""
    wanted = {entry.target for entry in certificate.entries if _INT8.search(entry.target)}
    found = [calibration.target for calibration in certificate.int8]
    if sorted(found) != sorted(wanted):
        raise ValueError(f"targets in int8 are {sorted(wanted)}, and there are calibrations for {sorted(found)}")


def _check(entry: Entry) -> None:
    """Raise ValueError where an entry from a file contradicts itself.

    Only the amount of the budget is read here. `dsa_hw.pipeline.verification` checks its other options.
    """
    budget = Budget.from_dict({key: entry.budget.get(key) for key in ("kind", "amount")})
    if entry.dimension != budget.dimension:
        raise ValueError(f"a {type(budget).__name__} has the dimension {budget.dimension!r}; got {entry.dimension!r}")
    if not _close(entry.limit, limit := limit_of(budget, entry.dense)):
        raise ValueError(f"the budget {entry.budget['amount']} gives a limit of {limit!r}; got {entry.limit!r}")
    if math.isfinite(entry.measured) and not entry.low <= entry.measured <= entry.high:
        raise ValueError(f"measured {entry.measured!r} is outside {entry.low!r} to {entry.high!r}")
    if math.isfinite(entry.utilisation):
        if not _close(entry.utilisation, entry.measured / entry.limit):
            raise ValueError(f"measured / limit is {entry.measured / entry.limit!r}; got {entry.utilisation!r}")
        if not entry.least_used <= entry.utilisation <= entry.most_used:
            raise ValueError(
                f"utilisation {entry.utilisation!r} is outside {entry.least_used!r} to {entry.most_used!r}"
            )
    inside = entry.least_used <= 1 < entry.most_used
    if entry.doubt is not None or inside or not math.isfinite(entry.utilisation):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.MET if entry.most_used <= 1 else Verdict.NOT_MET
    if entry.verdict != verdict:
        raise ValueError(
            f"the verdict is {entry.verdict} with a utilisation of {entry.least_used!r} to {entry.most_used!r}"
        )


def _close(a: float, b: float) -> bool:
    """Compare up to what JSON and a conversion of units change; NaN equals NaN."""
    return math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as JSON data, with null for NaN and infinity."""
    numbers = {name: entry[name] if math.isfinite(entry[name]) else None for name in _UNKNOWN}
    return {**entry, **numbers, "verdict": str(entry["verdict"])}


def _printable(value: Any) -> Any:
    """Return JSON data in which every text is a `Line`."""
    if isinstance(value, Mapping):
        return {printable(str(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _entry(document: EntryDocument) -> Entry:
    content = document.model_dump()
    numbers = {name: unknown if content[name] is None else float(content[name]) for name, unknown in _UNKNOWN.items()}
    return Entry(**{**content, **numbers})
