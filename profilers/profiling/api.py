"""Measuring one network, profiling a network, and checking that measurements repeat."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import ProfileError
from dsa_hw.profiles import Profile
from dsa_hw.utils.inputs import as_tensors
from profilers.measuring.bench import DENSE
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import SittingFile
from profilers.networks.builder import ConfigurationBuilder, loadable_module
from profilers.profiling import grid as grids
from profilers.profiling.design import Space, corners, spread
from profilers.profiling.events import Event, Listener
from profilers.profiling.job import ProfileJob, bench_for, described
from profilers.profiling.schemes import resolve_for
from profilers.storage.store import Store
from profilers.targets import Target

__all__ = ["SelfCheck", "measure", "profile", "self_check"]


def measure(
    model: nn.Module,
    example_inputs: Any,
    target: str | Target = "auto/cpu",
    *,
    name: str | None = None,
    precision: str = "fp32",
    threads: int = 1,
    time_limit: float = 60.0,
    statistic: str = "quiet",
    rules: MeasuringRules | None = None,
    sittings: SittingFile | None = None,
    seed: int = 0,
    quantity: str = "latency",
    counter: Any = None,
) -> Measurement:
    """Measure the latency or the energy of one network.

    ``measure(network, inputs, "onnxruntime/cpu")`` measures on this computer. Here, a formula computes the time:

    >>> from torch import zeros
    >>> from profilers.targets import Loaded, Target
    >>> class Formula(Target):
    ...     runtime, estimated = "formula", "estimated by a formula"
    ...
    ...     def load(self, artefact, inputs):
    ...         return Loaded.exact(1e-6 * sum(p.numel() for p in artefact.parameters()))
    >>> measure(nn.Conv2d(3, 8, 3), zeros(1, 3, 16, 16), Formula())
    Conv2d on formula/cpu fp32 x1: 0.224 ms (estimated by a formula)

    Args:
        model: The network; it is measured in evaluation mode.
        example_inputs: A tensor or a tuple of tensors.
        target: Where to measure: "runtime/device", for example "onnxruntime/cpu", or a `Target`.
        name: Name of the network in reports; the name of its class if None.
        precision: "fp32", "fp16" or "int8".
        threads: CPU threads of one run.
        time_limit: Seconds after which to stop.
        statistic: "quiet", "median", "p90", "p95" or "p99", see `MeasuringRules`.
        rules: All rules of measuring; replaces ``statistic``.
        sittings: Where the scatter of sittings is kept; the user's cache folder if None.
        seed: Seed of the order of visits.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.

    Returns:
        The measurement; its repr is a report.

    Raises:
        MeasurementError: The interval is wider than ``rules.require``.
        MissingDependencyError: The runtime, the device or the energy counter is not available.
    """
    inputs = as_tensors(example_inputs)
    found = resolve_for(model, inputs, target, precision=precision, threads=threads)
    rules = rules or MeasuringRules(statistic=statistic)
    network = loadable_module(model, inputs, found)
    bench = bench_for(quantity, found, counter=counter, rules=rules, sittings=sittings, seed=seed)
    result = replace(bench.measure({}, network, limit=time_limit)[DENSE], what=name or type(model).__name__)
    if not result.trusted:
        raise bench.refuse({result.what: result}, time_limit)
    return result


def profile(
    model: nn.Module,
    example_inputs: Any,
    target: str | Target = "auto/cpu",
    *,
    samples: int = 40,
    holdout: int = 10,
    grid: str | int = "auto",
    out: str | Path | None = None,
    time_limit: float = 600.0,
    precision: str = "fp32",
    threads: int = 1,
    statistic: str = "quiet",
    rules: MeasuringRules | None = None,
    sittings: SittingFile | None = None,
    seed: int = 0,
    name: str | None = None,
    groups: ChannelGroups | None = None,
    listener: Listener | None = None,
    quantity: str = "latency",
    counter: Any = None,
    builder: ConfigurationBuilder | None = None,
) -> Profile:
    """Measure sampled channel configurations of a network on a target.

    Every configuration is measured as a ratio to the dense network, in runs next to each other, so that a busy machine
    gives wider intervals and not wrong values. All runs are stored as they are measured.

    ``profile(network, inputs, "onnxruntime/cpu")`` measures on this computer. Here, a formula computes the times:

    >>> from torch import zeros
    >>> from profilers.targets import Loaded, Target
    >>> class Formula(Target):
    ...     runtime, estimated = "formula", "estimated by a formula"
    ...
    ...     def load(self, artefact, inputs):
    ...         return Loaded.exact(1e-6 * sum(p.numel() for p in artefact.parameters()))
    >>> network = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    >>> found = profile(network, zeros(1, 3, 16, 16), Formula(), samples=3, holdout=1, grid=4)
    >>> found.names, found.sizes, found.target
    (('0',), (16,), 'formula/cpu fp32 x1')
    >>> sorted(found.table["0"])
    [4, 8, 12, 16]

    Args:
        model: The network; it is measured in evaluation mode.
        example_inputs: A tensor or a tuple of tensors.
        target: Where to measure: "runtime/device", for example "onnxruntime/cpu", or a `Target`.
        samples: Configurations to fit a cost model to, including the dense network and corners.
        holdout: Configurations to test a cost model with.
        grid: "auto" to find the channel counts that the target runs efficiently, or their common divisor.
        out: The store; it is continued if it exists. A temporary file if None.
        time_limit: Seconds after which to stop.
        precision: "fp32", "fp16" or "int8".
        threads: CPU threads of one run.
        statistic: "quiet", "median", "p90", "p95" or "p99", see `MeasuringRules`.
        rules: All rules of measuring; replaces ``statistic``.
        sittings: Where the scatter of sittings is kept; the user's cache folder if None.
        seed: Seed of the sampling and of the order of visits.
        name: Name of the network; the name of its class if None.
        groups: Its channel groups; found if None.
        listener: Called with the progress.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.
        builder: Builds configurations of this network for this target; made if None.

    Returns:
        The profile; its table has a row per configuration.

    Raises:
        ProfileError: An argument is invalid.
        MeasurementError: The time was used up before 12 configurations were measured, the dense network's interval is
            wider than 10%, or an interval is wider than ``rules.require``. What was measured is in the store.
        MissingDependencyError: The runtime, the device or the energy counter is not available.
    """
    if samples < 2 or holdout < 0:
        raise ProfileError(
            f"`samples` must be at least 2 and `holdout` at least 0; got samples={samples}, holdout={holdout}."
        )
    if time_limit <= 0:
        raise ProfileError(f"`time_limit` must be a positive number of seconds; got {time_limit}.")
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "profile.sqlite"
        store = stack.enter_context(Store(out))  # a file that cannot be used is refused before any work
        inputs = as_tensors(example_inputs)
        job = ProfileJob(
            model,
            inputs,
            resolve_for(model, inputs, target, precision=precision, threads=threads),
            store,
            rules=rules or MeasuringRules(statistic=statistic),
            sittings=sittings,
            seed=seed,
            name=name or type(model).__name__,
            groups=groups,
            deadline=time.monotonic() + time_limit,
            limit=time_limit,
            listener=listener or (lambda event: None),
            quantity=quantity,
            counter=counter,
            builder=builder,
        )
        return job.run(samples, holdout, grid)


@dataclass(frozen=True, eq=False)
class SelfCheck:
    """Two independent measurements of the same configurations.

    Attributes:
        table: A row per configuration: widths, ``first`` and ``second`` (seconds or joules), ``difference`` (second
            over first, minus 1), and ``ratio_difference`` (the same of the ratios to the dense network).
        target: Title of the target.
    """

    table: pd.DataFrame
    target: str

    @property
    def median(self) -> float:
        """Median absolute difference of the ratios to the dense network."""
        return float(self.table["ratio_difference"].iloc[1:].abs().median())

    @property
    def largest(self) -> float:
        """Largest absolute difference of the ratios to the dense network."""
        return float(self.table["ratio_difference"].abs().max())


def self_check(
    model: nn.Module,
    example_inputs: Any,
    target: str | Target = "auto/cpu",
    *,
    configurations: int = 6,
    precision: str = "fp32",
    threads: int = 1,
    time_limit: float = 120.0,
    statistic: str = "quiet",
    rules: MeasuringRules | None = None,
    sittings: SittingFile | None = None,
    seed: int = 0,
    groups: ChannelGroups | None = None,
    listener: Listener | None = None,
    quantity: str = "latency",
    counter: Any = None,
) -> SelfCheck:
    """Measure the same configurations twice, independently.

    Args:
        model: The network; it is measured in evaluation mode.
        example_inputs: A tensor or a tuple of tensors.
        target: Where to measure: "runtime/device", for example "onnxruntime/cpu", or a `Target`.
        configurations: Number of configurations.
        precision: "fp32", "fp16" or "int8".
        threads: CPU threads of one run.
        time_limit: Seconds for both sessions.
        statistic: "quiet", "median", "p90", "p95" or "p99", see `MeasuringRules`.
        rules: All rules of measuring; replaces ``statistic``.
        sittings: Where the scatter of sittings is kept; the user's cache folder if None.
        seed: Seed of the sampling and of the order of visits.
        groups: The channel groups of the network; found if None.
        listener: Called with the progress.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.

    Returns:
        Both values of each configuration and their differences.

    Raises:
        MeasurementError: An interval is wider than ``rules.require``.
    """
    inputs = as_tensors(example_inputs)
    found = resolve_for(model, inputs, target, precision=precision, threads=threads)
    groups = groups or find_groups(model, inputs)
    space = Space.of(groups.names, groups.sizes, grids.fixed_grid(groups, 8))
    rows = np.vstack([corners(space), spread(space, configurations, seed)])
    rows = rows[: max(configurations, 2)]
    builder = ConfigurationBuilder(model, groups, inputs, found)
    notify = listener or (lambda event: None)
    results: list[list[Measurement]] = []
    rules = rules or MeasuringRules(statistic=statistic)
    key = (groups.fingerprint, described(inputs))
    for turn in range(2):
        bench = bench_for(
            quantity, found, counter=counter, network=key, rules=rules, sittings=sittings, seed=seed + turn
        )
        networks = {f"configuration {i}": builder.loadable(row.tolist()) for i, row in enumerate(rows[1:], 1)}

        def show(_: Mapping[str, Samples], turn: int = turn) -> None:
            notify(Event(f"self-check {turn + 1} of 2"))

        measured = bench.measure(networks, builder.loadable(rows[0].tolist()), limit=time_limit / 2, on_round=show)
        doubtful = {what: m for what, m in measured.items() if not m.trusted}
        if doubtful:
            raise bench.refuse(doubtful, time_limit / 2)
        results.append([measured[DENSE], *(measured[name] for name in networks)])
    table = pd.DataFrame(rows, columns=list(groups.names))
    table["first"] = [m.value for m in results[0]]
    table["second"] = [m.value for m in results[1]]
    table["difference"] = table["second"] / table["first"] - 1
    ratios = np.asarray([[m.ratio.value for m in turn] for turn in results])
    table["ratio_difference"] = ratios[1] / ratios[0] - 1
    return SelfCheck(table, found.title)
