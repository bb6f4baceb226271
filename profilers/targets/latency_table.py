"""Tables of operation latencies, such as HALP's, NetAdapt's or a measured board's: from CSV to seconds.

A row is one operation: spatial input size, kernel, stride, groups, channels in and out, and what it takes. Columns are
found by their usual names (see ``_COLUMNS``); the unit of time stands in the column's name. Rows belong to *kinds*: by
the column ``kind`` (or ``table``), else by their geometry. Some tables name kinds instead of describing them (NetAdapt:
one table per layer); then a mapping of kinds to layer names says which is which.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dsa_hw.errors import ProfileError
from profilers.networks.chains import Layer

__all__ = ["LatencyTable", "OperationKind"]

_COLUMNS = {
    "kind": ("kind", "table", "layer"),
    "size": ("hw_in", "size", "input_size", "feature_size"),
    "kernel": ("k", "kernel", "kernel_size"),
    "stride": ("stride",),
    "groups": ("groups",),
    "c_in": ("c_in", "in_channels", "cin"),
    "c_out": ("c_out", "out_channels", "cout"),
}
_TIMES = {"latency_s": 1.0, "seconds": 1.0, "latency_ms": 1e-3, "ms": 1e-3, "latency_us": 1e-6, "us": 1e-6}
_LINEAR = ("fc", "linear")


@dataclass(frozen=True, eq=False)
class OperationKind:
    """The rows of one kind of operation: seconds by (channels in, channels out); ``geometry`` is None where the table
    does not say it, ("linear",) or (size, kernel, stride, groups) otherwise."""

    name: str
    geometry: tuple[Any, ...] | None
    seconds: Mapping[tuple[int, int], float] = field(repr=False)

    @cached_property
    def ins(self) -> list[int]:
        """Channels in that occur, ascending."""
        return sorted({i for i, _ in self.seconds})

    @cached_property
    def outs(self) -> list[int]:
        """Channels out that occur, ascending."""
        return sorted({o for _, o in self.seconds})

    @property
    def any_outputs(self) -> bool:
        """Whether the channels out stand for nothing: a linear layer with 1 written for all of them."""
        return self.geometry == ("linear",) and self.outs == [1]

    def within(self, layer: Layer) -> bool:
        """Whether the channels lie between the smallest and the largest of the table."""
        outputs = 1 if self.any_outputs else layer.outputs
        return self.ins[0] <= layer.inputs <= self.ins[-1] and self.outs[0] <= outputs <= self.outs[-1]

    def at(self, layer: Layer, interpolate: bool) -> float | None:
        """Seconds of ``layer``; None where the table does not say."""
        key = (layer.inputs, 1 if self.any_outputs else layer.outputs)
        if key in self.seconds:
            return self.seconds[key]
        return self._between(*key) if interpolate and self.within(layer) else None

    def _between(self, x: int, y: int) -> float | None:
        """Linear between the four (or two) entries around; a table with holes there does not say."""
        x0, x1 = _around(self.ins, x)
        y0, y1 = _around(self.outs, y)
        corners = [self.seconds.get((i, o)) for i in (x0, x1) for o in (y0, y1)]
        if any(c is None for c in corners):
            return None
        a, b, c, d = (float(v) for v in corners if v is not None)
        s = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
        t = (y - y0) / (y1 - y0) if y1 > y0 else 0.0
        return (1 - s) * ((1 - t) * a + t * b) + s * ((1 - t) * c + t * d)


def _around(values: Sequence[int], x: int) -> tuple[int, int]:
    """The entries of ``values`` next to ``x`` from below and from above."""
    i = int(np.searchsorted(values, x))
    return (x, x) if values[i] == x else (values[i - 1], values[i])


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """All kinds of one file. ``layers`` maps kinds to patterns of layer names (as in ``fnmatch``), where given."""

    path: Path
    kinds: Mapping[str, OperationKind]
    digest: str
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path, layers: Mapping[str, str | Sequence[str]] | None = None) -> LatencyTable:
        """The table in a CSV file, compressed or not."""
        try:
            content = path.read_bytes()
            frame = pd.read_csv(path)
        except (OSError, ValueError, EOFError) as error:
            raise ProfileError(f"the table {path} cannot be read ({error}); give a file .csv or .csv.gz") from error
        kinds = _kinds(path, _standard(path, frame))
        patterns = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in (layers or {}).items()}
        unknown = [k for k in patterns if k not in kinds]
        if unknown:
            raise ProfileError(f"layers are given for {unknown[0]!r}, but {path.name} has {', '.join(kinds)}")
        if not patterns and any(k.geometry is None for k in kinds.values()):
            # Kinds without geometry are the layers themselves, by name.
            patterns = {name: (name,) for name in kinds}
        return LatencyTable(path, kinds, hashlib.sha256(content).hexdigest()[:16], patterns)

    @property
    def step(self) -> int:
        """The channel counts that the table has are multiples of this, apart from single ones (the dense width)."""
        steps = [int(d) for k in self.kinds.values() for d in np.diff(k.outs)]
        return Tally(steps).most_common(1)[0][0] if steps else 1

    def seconds(self, name: str, layer: Layer, interpolate: bool) -> float:
        """What the table says about ``layer``, the layer ``name`` of a network; `ProfileError` where it says nothing.

        Where kinds are not mapped to layers and several hold the operation, the one with the fewest channels is taken.
        """
        kinds = self._candidates(name, layer)
        if not kinds:
            raise ProfileError(f"{_described(name, layer)} is of no kind that {self.path.name} has; {self._remedy()}")
        fitting = sorted((k for k in kinds if k.within(layer)), key=lambda k: k.ins[-1] * k.outs[-1])
        for kind in fitting:
            found = kind.at(layer, interpolate)
            if found is not None:
                return found
        nearest = (fitting or kinds)[0]
        where = f"{nearest.name} has {_span(nearest.ins)} channels in and {_span(nearest.outs)} out"
        if not fitting:
            advice = "beyond its ends a table says nothing: measure these, or keep more channels"
        elif interpolate:
            advice = "it has holes around that one: measure them"
        else:
            advice = "choose widths that it has (--grid), or ask for ?outside=interpolate"
        raise ProfileError(f"{_described(name, layer)} is outside the table {self.path.name}: {where}; {advice}")

    def _candidates(self, name: str, layer: Layer) -> list[OperationKind]:
        if self.layers:
            mine = [k for k, patterns in self.layers.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
            return [self.kinds[k] for k in mine if self.kinds[k].geometry in (None, _geometry(layer))]
        return [k for k in self.kinds.values() if k.geometry == _geometry(layer)]

    def _remedy(self) -> str:
        return "use a table of this network, or say which kind it is with ?layers=FILE.json: {kind: pattern of names}"


def _geometry(layer: Layer) -> tuple[Any, ...]:
    if not layer.side:
        return ("linear",)
    square = {layer.side, layer.kernel, layer.stride}
    if any(len(set(lengths)) > 1 for lengths in square) or any(d != 1 for d in layer.dilation):
        return ("not square", layer.side, layer.kernel, layer.stride, layer.dilation)
    groups = "depthwise" if layer.groups == layer.inputs > 1 else layer.groups
    return (layer.side[0], layer.kernel[0], layer.stride[0], groups)


def _described(name: str, layer: Layer) -> str:
    channels = f"{layer.inputs} -> {layer.outputs} channels"
    if not layer.side:
        return f"{name} (linear, {channels})"
    kernel, side = "x".join(map(str, layer.kernel)), "x".join(map(str, layer.side))
    groups = f", {layer.groups} groups" if layer.groups > 1 else ""
    return f"{name} ({kernel} convolution, stride {layer.stride[0]}, on {side}, {channels}{groups})"


def _span(values: Sequence[int]) -> str:
    return f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0])


def _standard(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns under our names; what is missing and cannot be done without is an error."""
    found = pd.DataFrame(index=frame.index)
    for ours, names in _COLUMNS.items():
        column = next((n for n in names if n in frame.columns), None)
        if column is not None:
            found[ours] = frame[column]
    time = next((n for n in _TIMES if n in frame.columns), None)
    missing = [n for n in ("c_in", "c_out") if n not in found.columns]
    if time is None or missing:
        wanted = missing[0] if missing else f"a time ({', '.join(_TIMES)})"
        raise ProfileError(f"{path} has no column for {wanted}; it has {', '.join(map(str, frame.columns))}")
    found["seconds"] = pd.to_numeric(frame[time], errors="coerce") * _TIMES[time]
    bad = ~np.isfinite(found["seconds"].to_numpy(np.float64)) | (found["seconds"] <= 0).to_numpy()
    if bad.any():
        raise ProfileError(f"row {int(np.argmax(bad)) + 2} of {path} has no positive time in {time!r}; correct it")
    if "kernel" not in found.columns and "kind" not in found.columns:
        raise ProfileError(f"{path} has neither kernels nor names of kinds or layers; it needs one of them")
    return found


def _kinds(path: Path, rows: pd.DataFrame) -> dict[str, OperationKind]:
    described = "kernel" in rows.columns and "size" in rows.columns
    geometry = [_row_geometry(r) for r in rows.to_dict("records")] if described else [None] * len(rows)
    keys = list(zip(rows["kind"].astype(str) if "kind" in rows.columns else [""] * len(rows), geometry, strict=True))
    found: dict[tuple[str, Any], dict[tuple[int, int], float]] = {}
    for key, i, o, seconds in zip(keys, rows["c_in"], rows["c_out"], rows["seconds"], strict=True):
        entries = found.setdefault(key, {})
        if entries.setdefault((int(i), int(o)), float(seconds)) != float(seconds):
            what = f"{int(i)} -> {int(o)} channels of {_kind_name(*key)}"
            raise ProfileError(f"{path} has two times for {what}; keep one")
    named = Tally(name for name, _ in found)
    kinds = [
        OperationKind(name if name and named[name] == 1 else _kind_name(name, where), where, entries)
        for (name, where), entries in found.items()
    ]
    return {kind.name: kind for kind in kinds}


def _kind_name(name: str, geometry: tuple[Any, ...] | None) -> str:
    return " ".join(part for part in (name, "" if geometry is None else "/".join(map(str, geometry))) if part)


def _row_geometry(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    kernel = row["kernel"]
    if isinstance(kernel, str) and any(word in kernel.lower() for word in _LINEAR):
        return ("linear",)
    stride = row.get("stride", 1)
    groups = row.get("groups", 1)
    if isinstance(groups, float) and math.isnan(groups):
        groups = 1
    depthwise = groups == "depthwise" or (int(groups) > 1 and int(groups) == int(row["c_in"]))
    return (int(row["size"]), int(kernel), int(stride), "depthwise" if depthwise else int(groups))
