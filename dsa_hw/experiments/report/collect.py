"""Collect the findings of a comparison: rows and readings, and how they were made, in words."""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

import budgets
import dsa_hw
from dsa_hw.errors import DsaError, FileError
from dsa_hw.experiments.report.findings import COLUMNS, Findings
from dsa_hw.experiments.run_folder import RunFolder, slug
from dsa_hw.methods.costs import CostSet
from dsa_hw.pipeline.reading import Reading, judge
from dsa_hw.profiles import Profile
from dsa_hw.utils.documents import read_bytes
from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from budgets import Budget, CostModel
    from dsa_hw.channels import ChannelGroups

__all__ = ["ReportInputs", "collect"]

_log = logging.getLogger(__name__)

_STATISTICS = {
    "quiet": "the lower quartile of the dense network, times the ratio to it",
    "median": "the median of the dense network, times the ratio to it",
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
class ReportInputs:
    """What a comparison has at its end.

    Attributes:
        folder: Rows, weights and histories.
        ids: The networks, the dense one first.
        session: The interleaved measurement of these networks.
        groups: The channel groups.
        cost: The cost model of latency.
        profile: The profile that it was fitted to.
        budgets: The budget of each pruned network, by id.
        model: Name of the network.
        data: Name of the data.
        training: How networks were trained, in words.
        command: The command line.
    """

    folder: RunFolder
    ids: Sequence[str]
    session: Mapping[str, Any]
    groups: ChannelGroups
    cost: CostModel
    profile: Profile
    budgets: Mapping[str, Budget]
    model: str
    data: str
    training: str
    command: str


def collect(source: ReportInputs) -> Findings:
    """Return everything that the page shows."""
    groups, sizes = source.groups, source.groups.sizes
    counts = {"flops": budgets.flops(groups), "params": budgets.params(groups)}
    readings = {id: Reading.from_dict(source.session["readings"][id]) for id in source.ids}
    known, dense = source.folder.rows(), source.ids[0]
    rows, widths, correct, histories = [], {}, {}, {}
    for id in source.ids:
        kept = source.folder.weights(id)
        if kept is not None:
            correct[id] = kept["correct"].numpy().astype(bool)
        at = sizes
        row: dict[str, Any] = {"kind": "dense", "asked": "", "method": "", "matches": "", "limit": math.nan}
        row |= {"accuracy_before": math.nan, "accuracy": float(correct[dense].mean())}
        if id != dense:
            row = dict(known[id])
            at = np.array([row["widths"][name] for name in groups.names], np.int64)
            widths[id] = at
            if id in correct and float(correct[id].mean()) != row["accuracy"]:
                raise DsaError(f"{source.folder.path} has predictions of {id!r} that are not those of its accuracy.")
            if (history := _history(source.folder, id, row["history"])) is not None:
                histories[id] = history
        reading = readings[id]
        row |= {name: float(cost(at / sizes)) for name, cost in counts.items()}
        row |= {"id": id, "predicted": float(CostSet([source.cost], sizes).at_widths(at)[0]), "seconds": reading.value}
        row |= {"low": reading.low, "high": reading.high, "runs": reading.runs, "trusted": reading.doubt is None}
        row.setdefault("verdict", "")
        if row["kind"] == "latency":  # judged again in the common session
            judgement = judge(source.budgets[id], reading, readings[dense], exact=False)
            row["limit"], row["verdict"] = judgement.limit, str(judgement.verdict)
        rows.append(row)
    frame = pd.DataFrame(rows, columns=[*COLUMNS, "verdict"])
    table = pd.DataFrame(widths, index=list(groups.names)).T
    return Findings(frame, table, sizes, histories, correct, source.profile, source.cost, _about(source, readings))


def _history(folder: RunFolder, id: str, digest: str | None) -> pd.DataFrame | None:
    """Return the steps of an allocation; None where there are none, or the file is not the one that was written."""
    if digest is None:
        return None
    path = folder.path / "histories" / f"{slug(id)}.csv"
    try:
        content = read_bytes(path)
    except FileError as error:
        _log.warning("%s The report is made without it.", error)
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        _log.warning("%s is not the file that was written with its row. The report is made without it.", path)
        return None
    return pd.read_csv(io.BytesIO(content))


def _errors(cost: CostModel) -> str:
    names = {"cv_mape": "cross-validated", "holdout_mape": "on held-out configurations"}
    errors = cost.provenance.errors
    found = [f"{percent(errors[key])} {name}" for key, name in names.items() if key in errors]
    return f"{cost.name}; mean error {', '.join(found)}"


def _about(source: ReportInputs, readings: Mapping[str, Reading]) -> dict[str, str]:
    rules, environment, profile = source.session["rules"], source.session["environment"], source.profile
    images = len(source.folder.weights(source.ids[0])["correct"])  # type: ignore[index]
    halves = [max(r.sides()) for r in readings.values() if r.usable]
    grid = sorted({int(g) for g in profile.grid.values()})
    about = {
        "model": source.model,
        "data": source.data,
        "target": profile.target,
        "date": str(source.session["date"]),
        "version": dsa_hw.__version__,
        "latency is": _STATISTICS.get(rules["statistic"], f"{rules['statistic']} of the runs"),
        "how": f"all {len(readings)} networks in one session, in random rounds, each run between two runs of the dense "
        "network",
        "precision": f"intervals reach {percent(max(halves))} to one side at most; "
        f"{sum(r.runs for r in readings.values())} runs",
        "profile": f"{len(profile)} configurations, intervals of the ratio to the dense network "
        f"+/-{percent(profile.interval)} in the median",
        "cost model": _errors(source.cost),
        "grid": f"multiples of {', '.join(map(str, grid))} channels, for every budget alike; where nothing on it "
        "takes the same time, networks at equal latency may leave it",
        "training": source.training,
        "test images": str(images),
        **{key: str(environment[key]) for key in _SHOWN if environment.get(key)},
        "command": source.command,
    }
    about["limits"] = "\n".join(
        [
            f"One training seed. Accuracy is over {images} test images; the ± covers the choice of these images, not "
            "of the seed.",
            "Latencies were measured on this target with batch size 1. Other devices may prefer other channel counts.",
            "The FLOPs budget uses the target's grid too, so that it is not at a disadvantage because of its widths.",
        ]
    )
    return about
