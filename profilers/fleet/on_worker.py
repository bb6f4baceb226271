"""What a board does for a fleet: introduce itself, and measure a wave of networks.

Both functions run in the Dask worker on the board. What goes in and what comes out is plain data (text, numbers, lists,
bytes of ONNX files); an error that the user can act on comes back as a text too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dsa_hw.errors import DsaError, ProfileError
from profilers import machine
from profilers.measuring.bench import Bench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import Reference, ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.targets import resolve

__all__ = ["Memory", "introduce", "packed", "packed_inputs", "unpacked", "wave"]

_ARRAYS = ("values", "visit", "before", "after", "wait")


class Memory(ReferenceFile):
    """References that hold for this job only: a board must not keep what other boards of its kind have shown."""

    def __init__(self, references: Mapping[str, float] | None = None) -> None:
        day = time.strftime("%Y-%m-%d")
        known = {key: Reference(seconds, day) for key, seconds in (references or {}).items()}
        self._memory = {key: found for key, found in known.items() if math.isfinite(found.seconds)}

    def _read(self) -> dict[str, Reference]:
        return dict(self._memory)

    def _write(self, references: dict[str, Reference]) -> None:
        self._memory = references


def introduce(target: str, precision: str, threads: int, seconds: float, reset: bool) -> dict[str, Any]:
    """Run the control for ``seconds`` and say what this board is: environment, control (s), title, what it likes."""
    import dask

    try:
        found = resolve(target, precision=precision, threads=threads)
        if found.artefact != "onnx":
            raise ProfileError(
                f"{found.title} takes Python modules, and only ONNX files are sent to boards; use onnxruntime, "
                "openvino or tensorrt"
            )
        references = ReferenceFile()
        bench = Bench(found, references=references)
        if reset:
            references.reset(bench.key)
        control = bench.calibrate(seconds).seconds
    except DsaError as error:
        return {"error": str(error)}
    return {
        "environment": bench.environment,
        "control": control,
        "title": found.title,
        "estimated": found.estimated,
        "slow_to_load": found.slow_to_load,
        "grid": found.known_grid(),
        "watched": bool(dask.config.get("distributed.worker.profile.enabled", True)),
    }


def wave(
    target: str,
    precision: str,
    threads: int,
    networks: Mapping[str, tuple[bytes, Sequence[Any]]],
    rules: Mapping[str, Any],
    limit: float,
    reference: float,
    earlier: Mapping[str, Mapping[str, Any]],
    seed: int,
) -> dict[str, Any]:
    """Measure ``networks`` (ONNX bytes and packed inputs each) by ``rules``, for ``limit`` seconds at most.

    ``reference`` (s) is the control of this kind of board, ``earlier`` are packed runs that count in. Returns the new
    runs, packed, with the inflation that the control cannot see, and the lowest control.
    """
    try:
        found = resolve(target, precision=precision, threads=threads)
        known = Memory()
        bench = Bench(found, rules=MeasuringRules(**rules), references=known, seed=seed)
        if math.isfinite(reference) and reference > 0:
            known.lower(bench.key, reference)
        bench.calibrate(0.25)
        loaded = {name: found.load(artefact, _inputs(inputs)) for name, (artefact, inputs) in networks.items()}
        for network in loaded.values():
            bench.warm_up(network)
        new: dict[str, list[Samples]] = {name: [] for name in networks}

        def keep(name: str, samples: Samples, _: Measurement) -> None:
            new[name].append(samples)

        before = {name: unpacked(samples) for name, samples in earlier.items()}
        measured = bench.measure_once(loaded, limit=limit, earlier=before, on_visit=keep)
    except DsaError as error:
        return {"error": str(error)}
    return {
        "samples": {name: packed(Samples.joined(parts)) for name, parts in new.items()},
        "hidden": {name: float(m.hidden) for name, m in measured.items()},
        "reference": bench.reference.seconds,
        "busiest": machine.busiest_process() if any(not m.trusted for m in measured.values()) else None,
    }


def packed(samples: Samples) -> dict[str, Any]:
    """Runs as lists of numbers."""
    lists: dict[str, Any] = {name: getattr(samples, name).tolist() for name in _ARRAYS}
    return {**lists, "extra": {name: values.tolist() for name, values in samples.extra.items()}}


def unpacked(lists: Mapping[str, Any]) -> Samples:
    """Runs from lists of numbers."""
    arrays: dict[str, Any] = {
        name: np.asarray(lists[name], np.int64 if name == "visit" else np.float64) for name in _ARRAYS
    }
    return Samples(**arrays, extra={name: np.asarray(values, np.float64) for name, values in lists["extra"].items()})


def packed_inputs(inputs: Sequence[torch.Tensor]) -> list[tuple[str, list[int], bytes]]:
    """Tensors as (dtype, shape, bytes)."""
    arrays = [x.detach().cpu().contiguous() for x in inputs]
    return [(str(x.dtype).removeprefix("torch."), list(x.shape), x.numpy().tobytes()) for x in arrays]


def _inputs(content: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.from_numpy(np.frombuffer(values, np.dtype(dtype)).reshape(shape).copy())
        for dtype, shape, values in content
    )
