"""Look-up tables of operation latencies.

Examples are those of HALP and NetAdapt, or of a measured board. A row is one operation: spatial input size, kernel,
stride, groups, input and output channels, and its latency. Columns are found by their usual names (``_COLUMNS``); the
name of the latency column gives its unit. Rows are grouped into *kinds* by the column ``kind`` (or ``table``),
otherwise by their geometry. Some tables only name their kinds (NetAdapt: one table per layer); then a mapping of kinds
to layer names is needed.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import math
import zlib
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dsa_hw.errors import ProfileError
from dsa_hw.utils.documents import MAX_BYTES, read_bytes
from dsa_hw.utils.text import first_line
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
_LONGEST = 1e5  # seconds: no operation takes a day
_LARGEST = 10**7  # channels, pixels


@dataclass(frozen=True, eq=False)
class OperationKind:
    """The rows of one kind of operation.

    Attributes:
        name: Name of the kind.
        geometry: ("linear",) or (size, kernel, stride, groups); None where the table has no geometry.
        seconds: Latency by (input channels, output channels).
    """

    name: str
    geometry: tuple[Any, ...] | None
    seconds: Mapping[tuple[int, int], float] = field(repr=False)

    @cached_property
    def ins(self) -> list[int]:
        """Input channels of the entries, ascending."""
        return sorted({i for i, _ in self.seconds})

    @cached_property
    def outs(self) -> list[int]:
        """Output channels of the entries, ascending."""
        return sorted({o for _, o in self.seconds})

    @property
    def any_outputs(self) -> bool:
        """Whether output channels are not given: a linear layer whose entries all have 1."""
        return self.geometry == ("linear",) and self.outs == [1]

    def within(self, layer: Layer) -> bool:
        """Return whether the channels are within the range of the table."""
        outputs = 1 if self.any_outputs else layer.outputs
        return self.ins[0] <= layer.inputs <= self.ins[-1] and self.outs[0] <= outputs <= self.outs[-1]

    def at(self, layer: Layer, interpolate: bool) -> float | None:
        """Return the seconds of ``layer``; None where the table has no entry."""
        key = (layer.inputs, 1 if self.any_outputs else layer.outputs)
        if key in self.seconds:
            return self.seconds[key]
        return self._between(*key) if interpolate and self.within(layer) else None

    def _between(self, x: int, y: int) -> float | None:
        """Interpolate between the four (or two) entries around; None if one of them is missing."""
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
    """Return the entries of ``values`` next to ``x`` from below and from above."""
    i = int(np.searchsorted(values, x))
    return (x, x) if values[i] == x else (values[i - 1], values[i])


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """All kinds of one file.

    ``layers`` maps kinds to patterns of layer names (as in ``fnmatch``), if given.
    """

    path: Path
    kinds: Mapping[str, OperationKind]
    digest: str
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path, layers: Mapping[str, str | Sequence[str]] | None = None) -> LatencyTable:
        """Read a CSV file, compressed or not.

        Raises:
            ProfileError: The file cannot be read, is damaged, or has a wrong column or number.
        """
        content = read_bytes(path, f"the table {path}", error=ProfileError)
        try:
            text = _decompressed(content) if path.suffix == ".gz" else content
            frame = pd.read_csv(io.BytesIO(text))
        except (ValueError, EOFError, OSError, OverflowError, zlib.error) as error:
            raise ProfileError(
                f"Cannot read the table {path} ({first_line(error)}). Give a .csv or .csv.gz file."
            ) from error
        kinds = _kinds(path, _standard(path, frame))
        patterns = {k: (v,) if isinstance(v, str) else tuple(v) for k, v in (layers or {}).items()}
        unknown = [k for k in patterns if k not in kinds]
        if unknown:
            raise ProfileError(f"`layers` must map kinds of {path.name} ({', '.join(kinds)}); got {unknown[0]!r}.")
        if not patterns and any(k.geometry is None for k in kinds.values()):
            # Kinds without geometry are names of layers.
            patterns = {name: (name,) for name in kinds}
        return LatencyTable(path, kinds, hashlib.sha256(content).hexdigest()[:16], patterns)

    @property
    def step(self) -> int:
        """The most frequent difference between output channels."""
        steps = [int(d) for k in self.kinds.values() for d in np.diff(k.outs)]
        return Tally(steps).most_common(1)[0][0] if steps else 1

    def seconds(self, name: str, layer: Layer, interpolate: bool) -> float:
        """Return the latency of a layer.

        If kinds are not mapped to layers and several contain the operation, the one with the fewest channels is used.

        Args:
            name: The layer's name in its network.
            layer: The layer.
            interpolate: Whether to interpolate between entries.

        Raises:
            ProfileError: The table does not contain the layer.
        """
        kinds = self._candidates(name, layer)
        if not kinds:
            raise ProfileError(f"{self.path.name} has no kind for {_described(name, layer)}. {self._remedy()}")
        fitting = sorted((k for k in kinds if k.within(layer)), key=lambda k: k.ins[-1] * k.outs[-1])
        for kind in fitting:
            found = kind.at(layer, interpolate)
            if found is not None:
                return found
        nearest = (fitting or kinds)[0]
        where = f"{nearest.name} has {_span(nearest.ins)} input and {_span(nearest.outs)} output channels"
        if not fitting:
            advice = "A table is not extrapolated: measure these channel counts, or keep more channels."
        elif interpolate:
            advice = "Entries around it are missing: measure them."
        else:
            advice = "Choose widths of the table (--grid), or use ?outside=interpolate."
        raise ProfileError(f"{_described(name, layer)} is outside the table {self.path.name}: {where}. {advice}")

    def _candidates(self, name: str, layer: Layer) -> list[OperationKind]:
        if self.layers:
            mine = [k for k, patterns in self.layers.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
            return [self.kinds[k] for k in mine if self.kinds[k].geometry in (None, _geometry(layer))]
        return [k for k in self.kinds.values() if k.geometry == _geometry(layer)]

    def _remedy(self) -> str:
        return "Use a table of this network, or map its kinds with ?layers=FILE.json: {kind: pattern of layer names}."


def _decompressed(content: bytes) -> bytes:
    """Return the content of a .gz file, whose checksum is compared and whose size is limited."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return text


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
    """Return the columns under our names; a missing required column is an error."""
    found = pd.DataFrame(index=frame.index)
    for ours, names in _COLUMNS.items():
        column = next((n for n in names if n in frame.columns), None)
        if column is not None:
            found[ours] = frame[column]
    time = next((n for n in _TIMES if n in frame.columns), None)
    missing = [n for n in ("c_in", "c_out") if n not in found.columns]
    if time is None or missing:
        wanted = missing[0] if missing else f"a time ({', '.join(_TIMES)})"
        raise ProfileError(f"{path} must have a column for {wanted}; got {', '.join(map(str, frame.columns))}.")
    if frame.empty:
        raise ProfileError(f"{path} has no rows.")
    for ours in ("c_in", "c_out", "size", "stride"):
        if ours in found.columns:
            found[ours] = _whole(path, ours, found[ours])
    found["seconds"] = pd.to_numeric(frame[time], errors="coerce") * _TIMES[time]
    seconds = found["seconds"].to_numpy(np.float64)
    bad = ~((seconds > 0) & (seconds < _LONGEST))  # also where it is not a number
    if bad.any():
        raise ProfileError(
            f"Column {time!r} of {path} must have times above 0 and below {_LONGEST:g} s; correct row "
            f"{int(np.argmax(bad)) + 2}."
        )
    if "kernel" not in found.columns and "kind" not in found.columns:
        raise ProfileError(f"{path} must have a column for kernels, or for names of kinds or layers; it has neither.")
    return found


def _whole(path: Path, name: str, column: pd.Series[Any]) -> pd.Series[int]:
    """Return a column of whole numbers from 1; an empty field of a linear layer's size or stride becomes 1."""
    numbers = pd.to_numeric(column, errors="coerce")
    if name in ("size", "stride"):
        numbers = numbers.where(column.notna(), 1)
    values = numbers.to_numpy(np.float64)
    bad = ~((values >= 1) & (values <= _LARGEST) & (values == np.floor(values)))
    if bad.any():
        row = int(np.argmax(bad))
        raise ProfileError(
            f"Column {name!r} of {path} must have whole numbers from 1 to {_LARGEST}; got {column.iloc[row]!r} in row "
            f"{row + 2}."
        )
    return numbers.astype(np.int64)


def _kinds(path: Path, rows: pd.DataFrame) -> dict[str, OperationKind]:
    described = "kernel" in rows.columns and "size" in rows.columns
    geometry: list[tuple[Any, ...] | None] = [None] * len(rows)
    if described:
        geometry = [_row_geometry(path, number, row) for number, row in enumerate(rows.to_dict("records"), 2)]
    names = rows["kind"] if "kind" in rows.columns else [""] * len(rows)
    keys = list(zip(["" if pd.isna(name) else str(name) for name in names], geometry, strict=True))
    found: dict[tuple[str, Any], dict[tuple[int, int], float]] = {}
    for key, i, o, seconds in zip(keys, rows["c_in"], rows["c_out"], rows["seconds"], strict=True):
        entries = found.setdefault(key, {})
        if entries.setdefault((int(i), int(o)), float(seconds)) != float(seconds):
            what = f"{int(i)} -> {int(o)} channels of {_kind_name(*key)}"
            raise ProfileError(f"{path} has two times for {what}. Keep one.")
    named = Tally(name for name, _ in found)
    kinds = [
        OperationKind(name if name and named[name] == 1 else _kind_name(name, where), where, entries)
        for (name, where), entries in found.items()
    ]
    return {kind.name: kind for kind in kinds}


def _kind_name(name: str, geometry: tuple[Any, ...] | None) -> str:
    return " ".join(part for part in (name, "" if geometry is None else "/".join(map(str, geometry))) if part)


def _row_geometry(path: Path, number: int, row: Mapping[Any, Any]) -> tuple[Any, ...]:
    kernel = row["kernel"]
    if isinstance(kernel, str) and any(word in kernel.lower() for word in _LINEAR):
        return ("linear",)
    stride = row.get("stride", 1)
    groups = row.get("groups", 1)
    if isinstance(groups, float) and math.isnan(groups):
        groups = 1
    try:
        depthwise = groups == "depthwise" or (int(groups) > 1 and int(groups) == int(row["c_in"]))
        return (int(row["size"]), int(kernel), int(stride), "depthwise" if depthwise else int(groups))
    except (ValueError, OverflowError) as error:
        raise ProfileError(
            f"Kernel and groups of {path} must be whole numbers; got {kernel!r} and {groups!r} in row {number}."
        ) from error
