"""What a board does for a fleet: describe itself, and measure a batch of networks.

Both functions run in the Dask worker on the board. Arguments and results are plain data (text, numbers, lists, bytes of
ONNX files). An error that the user can act on is returned as text.
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

__all__ = ["InMemoryReferences", "describe", "measure_batch", "pack_inputs", "pack_samples", "unpack_samples"]

_ARRAYS = ("values", "visit", "before", "after", "wait")


class InMemoryReferences(ReferenceFile):
    """References of this job only.

    A board must not store references of other boards of its type.
    """

    def __init__(self, references: Mapping[str, float] | None = None) -> None:
        day = time.strftime("%Y-%m-%d")
        known = {key: Reference(seconds, day) for key, seconds in (references or {}).items()}
        self._memory = {key: found for key, found in known.items() if math.isfinite(found.seconds)}

    def _read(self) -> dict[str, Reference]:
        return dict(self._memory)

    def _write(self, references: dict[str, Reference]) -> None:
        self._memory = references


def describe(target: str, precision: str, threads: int, seconds: float, reset: bool) -> dict[str, Any]:
    """Run the control and describe this board.

    Returns environment, control (s), title and properties of its target.

    Args:
        target: The target, as `profilers.targets.resolve` takes it.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        seconds: How long to run the control.
        reset: Whether to forget the stored reference of the control first.
    """
    import dask

    try:
        found = resolve(target, precision=precision, threads=threads)
        if found.artefact != "onnx":
            raise ProfileError(
                f"Only ONNX files are sent to boards, but {found.title} needs Python modules. Use onnxruntime, "
                "openvino or tensorrt."
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


def measure_batch(
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
    """Measure a batch of networks.

    Args:
        target: The target, as `profilers.targets.resolve` takes it.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        networks: The bytes of an ONNX file and packed inputs, by name.
        rules: The fields of `MeasuringRules`.
        limit: Seconds to measure at most.
        reference: The control of this type of board, in seconds.
        earlier: Packed runs of earlier batches, by name.
        seed: Seed of the order of visits.

    Returns:
        The new runs, packed, the inflation that the control cannot detect, and the lowest control.
    """
    try:
        found = resolve(target, precision=precision, threads=threads)
        known = InMemoryReferences()
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

        before = {name: unpack_samples(samples) for name, samples in earlier.items()}
        measured = bench.measure_once(loaded, limit=limit, earlier=before, on_visit=keep)
    except DsaError as error:
        return {"error": str(error)}
    return {
        "samples": {name: pack_samples(Samples.joined(parts)) for name, parts in new.items()},
        "hidden": {name: float(m.hidden) for name, m in measured.items()},
        "reference": bench.reference.seconds,
        "busiest": machine.busiest_process() if any(not m.trusted for m in measured.values()) else None,
    }


def pack_samples(samples: Samples) -> dict[str, Any]:
    """Return runs as lists of numbers."""
    lists: dict[str, Any] = {name: getattr(samples, name).tolist() for name in _ARRAYS}
    return {**lists, "extra": {name: values.tolist() for name, values in samples.extra.items()}}


def unpack_samples(lists: Mapping[str, Any]) -> Samples:
    """Return runs from lists of numbers."""
    arrays: dict[str, Any] = {
        name: np.asarray(lists[name], np.int64 if name == "visit" else np.float64) for name in _ARRAYS
    }
    return Samples(**arrays, extra={name: np.asarray(values, np.float64) for name, values in lists["extra"].items()})


def pack_inputs(inputs: Sequence[torch.Tensor]) -> list[tuple[str, list[int], bytes]]:
    """Return tensors as (dtype, shape, bytes)."""
    arrays = [x.detach().cpu().contiguous() for x in inputs]
    return [(str(x.dtype).removeprefix("torch."), list(x.shape), x.numpy().tobytes()) for x in arrays]


def _inputs(content: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.from_numpy(np.frombuffer(values, np.dtype(dtype)).reshape(shape).copy())
        for dtype, shape, values in content
    )
