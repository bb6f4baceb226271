"""The whole job: groups, export, grid, design, measuring in rounds, store, table."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import nn

from dsa_hw.errors import ProfileError
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

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["measure", "profile", "self_check"]


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
    """Measure one network; raises `MeasurementError` where it cannot be trusted within ``time_limit`` seconds.

    ``quantity`` is "latency" or "energy" (joules, an `EnergyMeasurement`); ``counter`` is the energy meter, see
    `profilers.measuring.counters.Counter.of`; None finds the device's own.
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
) -> pd.DataFrame:
    """What sampled configurations of ``model`` really take on ``target``: the profile table.

    A row per configuration: a width per channel group, ``seconds`` with its 95 % interval ``[low, high]``, ``split``
    ("dense", "train", "holdout") and ``runs``; ``attrs`` has target, environment, grid with evidence, noise and
    where the time went. ``samples`` counts the dense network and the corners. ``out`` is a store that is continued
    if it exists. Measuring goes on for ``time_limit`` seconds while a configuration is doubtful; those that stay
    doubtful are left out with a warning. Raises `MeasurementError` where fewer than 12 are usable, hold-out apart (of
    fewer than 14 ``samples``: fewer than nine in ten); what was measured stays in the store. With
    ``quantity="energy"`` the column is ``joules`` of one inference, read from ``counter`` (see
    `profilers.measuring.counters.Counter.of`; None finds the device's own).
    """
    if samples < 2 or holdout < 0:
        raise ProfileError(f"{samples} samples and {holdout} hold-out asked for; use at least 2 and 0")
    if time_limit <= 0:
        raise ProfileError(f"a time limit of {time_limit} s was asked for; give a positive number of seconds")
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "profile.sqlite"
        store = stack.enter_context(Store(out))  # first: a file that cannot be used is refused before any work
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
) -> pd.DataFrame:
    """Measure the same configurations twice, independently: new sessions, new order, nothing shared but the reference.

    A row per configuration: widths, ``first`` and ``second`` (seconds, or joules where ``quantity`` is "energy"),
    ``difference`` (second over first, minus 1).
    ``attrs`` has the median and the largest absolute difference. Raises `MeasurementError` where either time cannot
    be trusted.
    """
    from dsa_hw.channels import find_groups

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
    sizes = table["difference"].abs()
    table.attrs = {"target": found.title, "median": float(sizes.median()), "largest": float(sizes.max())}
    return table
