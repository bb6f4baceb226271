"""Measuring one network, profiling a network, and checking that measurements repeat."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import ProfileError
from dsa_hw.profiles import Profile
from dsa_hw.utils.inputs import as_tensors
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder, load_module
from profilers.profiling import grid as grids
from profilers.profiling.design import Space, corners, spread
from profilers.profiling.events import Event, Listener
from profilers.profiling.job import ProfileJob, bench_for
from profilers.storage.store import Store
from profilers.targets import Target, resolve

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
    references: ReferenceFile | None = None,
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
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        time_limit: Seconds after which to stop.
        statistic: "quiet" (the lower quartile of the undisturbed runs), "median", "p90", "p95" or "p99".
        rules: All rules of measuring; replaces ``statistic``.
        references: Where references of the control workload are kept; the user's cache folder if None.
        seed: Seed of the order of visits.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.

    Returns:
        The measurement; its repr is a report.

    Raises:
        MeasurementError: The value cannot be trusted within the time limit.
        MissingDependencyError: The runtime, the device or the energy counter is not available.
    """
    found = resolve(target, precision=precision, threads=threads)
    rules = rules or MeasuringRules(statistic=statistic)
    loaded = load_module(model, as_tensors(example_inputs), found)
    bench = bench_for(quantity, found, counter=counter, rules=rules, references=references, seed=seed)
    what = name or type(model).__name__
    result = bench.measure({what: loaded}, limit=time_limit)[what]
    if not result.trusted:
        raise bench.explain({what: result}, time_limit)
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
    references: ReferenceFile | None = None,
    reset_reference: bool = False,
    seed: int = 0,
    name: str | None = None,
    groups: ChannelGroups | None = None,
    listener: Listener | None = None,
    quantity: str = "latency",
    counter: Any = None,
) -> Profile:
    """Measure sampled channel configurations of a network on a target.

    Measuring continues until every configuration can be trusted or the time is used. Configurations that cannot be
    trusted are left out, with a warning. All runs are stored as they are measured.

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
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        statistic: "quiet" (the lower quartile of the undisturbed runs), "median", "p90", "p95" or "p99".
        rules: All rules of measuring; replaces ``statistic``.
        references: Where references of the control workload are kept; the user's cache folder if None.
        reset_reference: Forget the reference of this environment, because the machine has changed.
        seed: Seed of the sampling and of the order of visits.
        name: Name of the network; the name of its class if None.
        groups: Its channel groups; found if None.
        listener: Called with the progress.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.

    Returns:
        The profile; its table has a row per configuration.

    Raises:
        ProfileError: An argument is invalid.
        MeasurementError: Fewer than 12 configurations besides the hold-out can be trusted (of fewer than 14
            ``samples``: fewer than nine in ten). What was measured is in the store.
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
        job = ProfileJob(
            model,
            as_tensors(example_inputs),
            resolve(target, precision=precision, threads=threads),
            store,
            rules=rules or MeasuringRules(statistic=statistic),
            references=references,
            reset_reference=reset_reference,
            seed=seed,
            name=name or type(model).__name__,
            groups=groups,
            deadline=time.monotonic() + time_limit,
            limit=time_limit,
            listener=listener or (lambda event: None),
            quantity=quantity,
            counter=counter,
        )
        return job.run(samples, holdout, grid)


@dataclass(frozen=True, eq=False)
class SelfCheck:
    """Two independent measurements of the same configurations.

    Attributes:
        table: A row per configuration: widths, ``first`` and ``second`` (seconds or joules), and ``difference``
            (second over first, minus 1).
        target: Title of the target.
    """

    table: pd.DataFrame
    target: str

    @property
    def median(self) -> float:
        """Median absolute difference."""
        return float(self.table["difference"].abs().median())

    @property
    def largest(self) -> float:
        """Largest absolute difference."""
        return float(self.table["difference"].abs().max())


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
    references: ReferenceFile | None = None,
    seed: int = 0,
    groups: ChannelGroups | None = None,
    listener: Listener | None = None,
    quantity: str = "latency",
    counter: Any = None,
) -> SelfCheck:
    """Measure the same configurations twice in independent sessions that share only the reference.

    Args:
        model: The network; it is measured in evaluation mode.
        example_inputs: A tensor or a tuple of tensors.
        target: Where to measure: "runtime/device", for example "onnxruntime/cpu", or a `Target`.
        configurations: Number of configurations.
        precision: "fp32" or "fp16".
        threads: CPU threads of one run.
        time_limit: Seconds for both sessions.
        statistic: "quiet" (the lower quartile of the undisturbed runs), "median", "p90", "p95" or "p99".
        rules: All rules of measuring; replaces ``statistic``.
        references: Where references of the control workload are kept; the user's cache folder if None.
        seed: Seed of the sampling and of the order of visits.
        groups: The channel groups of the network; found if None.
        listener: Called with the progress.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.

    Returns:
        Both values of each configuration and their differences.

    Raises:
        MeasurementError: A value cannot be trusted.
    """
    inputs = as_tensors(example_inputs)
    found = resolve(target, precision=precision, threads=threads)
    groups = groups or find_groups(model, inputs)
    space = Space.of(groups.names, groups.sizes, grids.fixed_grid(groups, 8))
    rows = np.vstack([corners(space), spread(space, configurations, seed)])
    rows = rows[: max(configurations, 1)]
    builder = ConfigurationBuilder(model, groups, inputs, found)
    notify = listener or (lambda event: None)
    results: list[dict[str, Measurement]] = []
    rules = rules or MeasuringRules(statistic=statistic)
    for turn in range(2):
        bench = bench_for(quantity, found, counter=counter, rules=rules, references=references, seed=seed + turn)
        networks = {f"configuration {i}": builder.load(row.tolist()) for i, row in enumerate(rows)}

        def show(what: str, _: Samples, so_far: Measurement, turn: int = turn) -> None:
            notify(Event(f"self-check {turn + 1} of 2", what, accepted=1 - so_far.rejected))

        measured = bench.measure(networks, limit=time_limit / 2, on_visit=show)
        doubtful = {what: m for what, m in measured.items() if not m.trusted}
        if doubtful:
            raise bench.explain(doubtful, time_limit / 2)
        results.append(measured)
    table = pd.DataFrame(rows, columns=list(groups.names))
    table["first"] = [m.value for m in results[0].values()]
    table["second"] = [m.value for m in results[1].values()]
    table["difference"] = table["second"] / table["first"] - 1
    return SelfCheck(table, found.title)
