"""From the folder of a comparison to its findings: rows and readings joined, and said in words how they were made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from dsa_hw.experiments.report.findings import COLUMNS, Findings
from dsa_hw.experiments.run_folder import Workshop, slug
from dsa_hw.methods.costs import CostSet
from dsa_hw.pipeline.certificate import Reading, verdict_of

if TYPE_CHECKING:
    from budgets import Budget, CostModel
    from dsa_hw.channels import ChannelGroups

__all__ = ["Source", "gather"]

_QUIET = 0.02  # what the rules of measuring allow where nobody asked for more
_STATISTICS = {
    "quiet": "a low quantile of the undisturbed runs",
    "median": "the median of the undisturbed runs",
}
_SHOWN = (
    "cpu",
    "os",
    "kernel",
    "governor",
    "python",
    "torch",
    "onnxruntime",
    "openvino",
    "tensorrt",
    "session",
    "estimated",
)


@dataclass(frozen=True, eq=False)
class Source:
    """What a comparison has at its end; ``session`` is the interleaved measurement of the networks ``ids``."""

    shop: Workshop
    ids: Sequence[str]
    session: Mapping[str, Any]
    groups: ChannelGroups
    cost: CostModel
    profile: pd.DataFrame
    budgets: Sequence[Budget]
    model: str
    data: str
    training: str
    command: str


def gather(source: Source) -> Findings:
    """Everything that the page shows."""
    import budgets

    groups, sizes = source.groups, source.groups.sizes
    counts = {"flops": budgets.flops(groups), "params": budgets.params(groups)}
    readings = {id: Reading(**source.session["readings"][id]) for id in source.ids}
    known, dense = source.shop.rows(), source.ids[0]
    rows, widths, correct, histories = [], {}, {}, {}
    for id in source.ids:
        kept = source.shop.weights(id)
        if kept is not None:
            correct[id] = kept["correct"].numpy().astype(bool)
        at = sizes
        row: dict[str, Any] = {"kind": "dense", "asked": "", "method": "", "matches": "", "limit": math.nan}
        row |= {"accuracy_before": math.nan, "accuracy": float(correct[dense].mean())}
        if id != dense:
            row = dict(known[id])
            at = np.array([row["widths"][name] for name in groups.names], np.int64)
            widths[id] = at
            path = source.shop.path / "histories" / f"{slug(id)}.csv"
            if path.exists():
                histories[id] = pd.read_csv(path)
        reading = readings[id]
        row |= {name: float(cost(at / sizes)) for name, cost in counts.items()}
        row |= {"id": id, "predicted": float(CostSet([source.cost], sizes).at_widths(at)[0]), "seconds": reading.value}
        row |= {"low": reading.low, "high": reading.high, "runs": reading.runs, "trusted": reading.doubt is None}
        row["verdict"] = ""
        if row["kind"] == "latency":
            budget = source.budgets[int(row["budget"])]
            reference = readings[dense] if budget.relative else None
            if reference is not None:  # the share is of the dense network in the same session
                row["limit"] = budget.quantity.magnitude * reference.value
            row["verdict"] = verdict_of(reading, row["limit"], reference)[0]
        rows.append(row)
    frame = pd.DataFrame(rows, columns=[*COLUMNS, "verdict"])
    table = pd.DataFrame(widths, index=list(groups.names)).T
    return Findings(frame, table, sizes, histories, correct, source.profile, source.cost, _about(source, readings))


def _allowed(rules: Mapping[str, Any]) -> str:
    if rules["worst"] >= 1:
        return "every run accepted, however disturbed"
    usual = "" if rules["worst"] <= _QUIET else f" (the default is {100 * _QUIET:g} %)"
    return f"disturbances of up to {100 * rules['worst']:g} % allowed{usual}"


def _errors(cost: CostModel) -> str:
    names = {"cv_mape": "cross-validated", "holdout_mape": "on held-out configurations"}
    errors = cost.provenance.errors
    found = [f"{100 * errors[key]:.1f} % {name}" for key, name in names.items() if key in errors]
    return f"{cost.name}; mean error {', '.join(found)}"


def _about(source: Source, readings: Mapping[str, Reading]) -> dict[str, str]:
    from dsa_hw import __version__

    rules, environment, attrs = source.session["rules"], source.session["environment"], source.profile.attrs
    images = len(source.shop.weights(source.ids[0])["correct"])  # type: ignore[index]
    halves = [max(r.sides()) for r in readings.values() if r.usable]
    grid = sorted({int(g) for g in attrs["grid"].values()})
    about = {
        "model": source.model,
        "data": source.data,
        "target": str(attrs["target"]),
        "date": str(source.session["date"]),
        "version": __version__,
        "latency is": _STATISTICS.get(rules["statistic"], f"{rules['statistic']} of the undisturbed runs"),
        "how": f"all {len(readings)} networks in one session, in random rounds, with a control workload in between; "
        "runs count only where the control before and after was undisturbed",
        "trust": f"{_allowed(rules)}; intervals reach "
        f"{100 * max(halves):.1f} % to one side at most; {sum(r.runs for r in readings.values())} runs counted",
        "profile": f"{len(source.profile)} configurations, {100 * float(attrs['rejected']):.0f} % of the runs "
        f"rejected, spread {100 * float(attrs['noise']):.1f} %",
        "cost model": _errors(source.cost),
        "grid": f"multiples of {', '.join(map(str, grid))} channels, for every budget alike; where nothing on it "
        "takes the same time, networks at equal latency may leave it",
        "training": source.training,
        "test images": str(images),
        **{key: str(environment[key]) for key in _SHOWN if environment.get(key)},
        "command": source.command,
    }
    if rules["worst"] > _QUIET:
        about["note"] = (
            f"Measured with {_allowed(rules)}, "
            "so that a busy machine gives an answer at all. Repeat it on a quiet one before quoting a latency."
        )
    about["limits"] = "\n".join(
        [
            f"One training seed. Accuracy is over {images} test images; the ± says what these can tell, not what "
            "another seed would give.",
            "Latency is that of this target on this machine, for one input at a time; another device has other teeth.",
            "The FLOPs budget gets the target's grid too, so it is not punished for widths that the device dislikes.",
        ]
    )
    return about
