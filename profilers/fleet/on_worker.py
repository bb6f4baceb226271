"""What a board does for a fleet: describe itself, and measure a batch of networks.

Both functions run in the Dask worker on the board. Arguments and results are plain data (text, numbers, lists, bytes of
ONNX files). An error that the user can act on is returned as text. Nothing is stored on the board.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dsa_hw.errors import DsaError, ProfileError
from profilers import machine
from profilers.measuring import environment as environments
from profilers.measuring.bench import Bench
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules
from profilers.networks.loaded import Loadable
from profilers.targets import Target, resolve

__all__ = ["describe", "measure_batch", "pack_inputs", "pack_samples", "unpack_samples"]

_ARRAYS = {"values": np.float64, "before": np.float64, "after": np.float64, "block": np.int64, "sitting": np.int64}

Content = tuple[bytes, Sequence[Any]]
"""A network as it is sent: the bytes of an ONNX file, and packed inputs."""


def describe(target: str, precision: str, threads: int) -> dict[str, Any]:
    """Describe this board: the environment of its measurements, title and properties of its target.

    Args:
        target: The target, as `profilers.targets.resolve` takes it.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
    """
    import dask

    try:
        found = resolve(target, precision=precision, threads=threads)
        if found.artefact != "onnx":
            raise ProfileError(
                f"Only ONNX files are sent to boards, but {found.title} needs Python modules. Use onnxruntime, "
                "openvino or tensorrt."
            )
        environment = environments.environment(found)
    except DsaError as error:
        return {"error": str(error)}
    return {
        "environment": environment,
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
    networks: Mapping[str, Content],
    dense: Content,
    rules: Mapping[str, Any],
    limit: float,
    sitting: int,
    seed: int,
) -> dict[str, Any]:
    """Measure a batch of networks, with the dense network between their runs.

    Args:
        target: The target, as `profilers.targets.resolve` takes it.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        networks: The networks, by name.
        dense: The dense network.
        rules: The fields of `MeasuringRules`.
        limit: Seconds to measure at most.
        sitting: Number of the sitting that this batch is.
        seed: Seed of the order of visits.

    Returns:
        The runs of every network and of the dense one, packed, and the busiest process if they are too imprecise.
    """
    try:
        found = resolve(target, precision=precision, threads=threads)
        bench = Bench(found, rules=MeasuringRules(**rules), seed=seed)
        loadable = {name: _loadable(found, content) for name, content in networks.items()}
        measured = bench.measure(loadable, _loadable(found, dense), limit=limit, sitting=sitting)
    except DsaError as error:
        return {"error": str(error)}
    return {
        "samples": {name: pack_samples(m.samples) for name, m in measured.items()},
        "busiest": machine.busiest_process() if any(not m.trusted for m in measured.values()) else None,
    }


def _loadable(target: Target, content: Content) -> Loadable:
    artefact, inputs = content[0], _inputs(content[1])
    return Loadable(lambda: target.load(artefact, inputs), len(artefact))


def pack_samples(samples: Samples) -> dict[str, Any]:
    """Return runs as lists of numbers."""
    lists: dict[str, Any] = {name: getattr(samples, name).tolist() for name in _ARRAYS}
    return {**lists, "extra": {name: values.tolist() for name, values in samples.extra.items()}}


def unpack_samples(lists: Mapping[str, Any]) -> Samples:
    """Return runs from lists of numbers."""
    arrays: dict[str, Any] = {name: np.asarray(lists[name], dtype) for name, dtype in _ARRAYS.items()}
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
