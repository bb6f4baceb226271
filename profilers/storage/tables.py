"""The content of a store as profiles and pandas tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dsa_hw.errors import StoreError
from dsa_hw.profiles import QUANTITIES, Profile
from dsa_hw.utils.text import one_line
from profilers.measuring.energy_bench import EnergyMeasurement
from profilers.measuring.measurement import Measurement, Samples, pooled
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Scatter, SittingFile, sitting_key
from profilers.storage.store import Store

__all__ = ["Tables", "load_profile", "load_tables", "measurements", "network_names", "read_profile"]


@dataclass(frozen=True, eq=False)
class Tables:
    """Everything in one store.

    Attributes:
        profile: The profile that was measured last.
        profiles: All profiles by (network, target, environment).
        samples: The raw runs.
        configurations: The configurations.
        environments: The environments in which was measured.
        networks: The networks.
        sessions: The sessions of measuring.
        grid: The measured points behind the grid of ``profile``.
    """

    profile: Profile
    profiles: dict[tuple[str, str, str], Profile]
    samples: pd.DataFrame
    configurations: pd.DataFrame
    environments: pd.DataFrame
    networks: pd.DataFrame
    sessions: pd.DataFrame
    grid: pd.DataFrame


def load_profile(
    path: str | Path,
    *,
    network: str | None = None,
    target: str | None = None,
    statistic: str = "quiet",
    rules: MeasuringRules | None = None,
) -> Profile:
    """Read the profile that was measured last from a store, which is not changed.

    Its values are determined from the stored runs, so that another statistic needs no new measurement.

    >>> load_profile("no.sqlite")
    Traceback (most recent call last):
    dsa_hw.errors.StoreError: no.sqlite does not exist. Make it with python -m profilers.latency --out no.sqlite.

    Args:
        path: The store, as ``profilers.profile(..., out=path)`` or ``dsa-hw profile --out`` writes it.
        network: Only profiles of the network with this name; any if None.
        target: Only profiles of this target, a title or its beginning such as ``"onnxruntime/cpu"``; any if None.
        statistic: "quiet", "median", "p90", "p95" or "p99".
        rules: All rules by which runs are judged; replaces ``statistic``.

    Returns:
        The profile.

    Raises:
        StoreError: The file does not exist, is not a store, or has no such profile.
    """
    rules = rules or MeasuringRules(statistic=statistic)
    with _opened(path) as store:
        known = [(store.network(n)[0], store.environment(e)["target"], n, e) for n, e in store.profiles()]
        wanted = [
            (n, e)
            for name, title, n, e in known
            if network in (None, name) and (target in (None, title) or title.startswith(f"{target} "))
        ]
        if not known:
            raise StoreError(f"{path} has no profile yet. Fill it with python -m profilers.latency --out {path}.")
        if not wanted:
            there = ", ".join(dict.fromkeys(f"{name} on {title}" for name, title, *_ in known))
            asked = " on ".join(filter(None, (network or "any network", target)))
            raise StoreError(f"{path} has no profile of {asked}. It has: {one_line(there)}.")
        return read_profile(store, *wanted[-1], rules)


def load_tables(path: str | Path, *, statistic: str = "quiet", rules: MeasuringRules | None = None) -> Tables:
    """Read everything from a store: all profiles and the raw runs. Arguments and errors as for `load_profile`."""
    rules = rules or MeasuringRules(statistic=statistic)
    with _opened(path) as store:
        found = {}
        for network, environment in store.profiles():
            profile = read_profile(store, network, environment, rules)
            found[(profile.network, profile.target, environment)] = profile
        if not found:
            raise StoreError(f"{path} has no profile yet. Fill it with python -m profilers.latency --out {path}.")
        last = next(reversed(found.values()))
        frames = {
            name: _frame(store, name) for name in ("samples", "configurations", "environments", "networks", "sessions")
        }
    return Tables(profile=last, profiles=found, grid=pd.DataFrame(last.grid_evidence), **frames)


def network_names(path: str | Path) -> list[str]:
    """Return the names of the networks that have a profile in a store."""
    with _opened(path) as store:
        return list(dict.fromkeys(store.network(network)[0] for network, _ in store.profiles()))


def _opened(path: str | Path) -> Store:
    try:
        exists = Path(path).exists()
    except TypeError as error:
        given = one_line(repr(path), 60)
        raise StoreError(f"`path` must be the path of a store, e.g. 'profile.sqlite'; got {given}.") from error
    if not exists:
        raise StoreError(f"{path} does not exist. Make it with python -m profilers.latency --out {path}.")
    return Store(path, read_only=True)


def measurements(
    store: Store, network: str, environment: str, rules: MeasuringRules, scatter: Scatter | None = None
) -> dict[str, Measurement]:
    """Return every measured configuration of a design.

    Args:
        store: The store.
        network: Identity of the network.
        environment: Digest of the environment.
        rules: The rules by which runs are judged.
        scatter: How much sittings differ; the prior if None.

    Returns:
        Measurements by identity of the configuration. Runs without the dense network's are left out.
    """
    description = store.environment(environment)
    samples = store.samples(environment, network)
    kind = _measurement_class(description)
    design = store.design(network, environment)
    dense = next((samples[c.id] for c in design if c.split == "dense" and c.id in samples), Samples.empty())
    others = {c.id: samples[c.id] for c in design if c.id in samples}
    variance = pooled([part for part in others.values() if part is not dense], dense)
    scatter = scatter or Scatter()
    return {
        id: kind(id[:12], description["target"], part, dense, rules, description, scatter, variance)
        for id, part in others.items()
        if len(dense)
    }


def _measurement_class(environment: Mapping[str, str]) -> type[Measurement]:
    return EnergyMeasurement if environment.get("quantity") == EnergyMeasurement.quantity else Measurement


def read_profile(
    store: Store,
    network: str,
    environment: str,
    rules: MeasuringRules,
    scatter: Scatter | None = None,
    **about_job: Any,
) -> Profile:
    """Return the profile of a network in an environment.

    Args:
        store: The store.
        network: Identity of the network.
        environment: Digest of the environment.
        rules: The rules by which runs are judged.
        scatter: How much sittings differ; what this user's sittings show if None.
        **about_job: Fields of the profile that the store does not contain.
    """
    name, about = store.network(network)
    description = store.environment(environment)
    kind = _measurement_class(description)
    if scatter is None:
        key = sitting_key(environment, about["fingerprint"], about["inputs"], rules.statistic)
        scatter = SittingFile().scatter(key)
    found = measurements(store, network, environment, rules, scatter)
    column = QUANTITIES[kind.quantity].column
    rows: list[dict[str, Any]] = []
    for configuration in store.design(network, environment):
        if len(configuration.widths) != len(about["sizes"]) or any(
            width > size for width, size in zip(configuration.widths, about["sizes"], strict=True)
        ):
            raise StoreError(f"{store.path} has widths that are not those of its network: {configuration.widths}.")
        measurement = found.get(configuration.id)
        if measurement is None or not measurement.trusted or configuration.split == "anchor":
            continue  # the anchor tells sittings apart; it may be off the grid
        rows.append(
            {
                **dict(zip(about["names"], configuration.widths, strict=True)),
                column: measurement.value,
                "low": measurement.low,
                "high": measurement.high,
                "error": math.sqrt(measurement.within.variance if rules.paired else measurement.absolute.variance),
                "split": configuration.split,
                "runs": measurement.runs,
                **measurement.further(),
            }
        )
    columns = [*about["names"], column, "low", "high", "error", "split", "runs", *kind.further_columns]
    grid, evidence = store.grid(network, environment) or ({}, [])
    return Profile(
        table=pd.DataFrame(rows, columns=columns),
        names=about["names"],
        sizes=about["sizes"],
        target=description["target"],
        quantity=kind.quantity,
        fingerprint=about["fingerprint"],
        network=name,
        inputs=about["inputs"],
        environment=description,
        grid=grid,
        grid_evidence=tuple(evidence),
        statistic=rules.statistic,
        noise=_typical([m.spread for m in found.values() if m.trusted]),
        interval=_typical([m.ratio.halfwidth() for m in found.values() if m.ratio.variance > 0]),
        untrusted=sum(not m.trusted for m in found.values()),
        estimated=description.get("estimated"),
        **about_job,
    )


def _typical(values: list[float]) -> float:
    return float(pd.Series(values, dtype=float).median())


def _frame(store: Store, name: str) -> pd.DataFrame:
    columns, rows = store.table(name)
    return pd.DataFrame(rows, columns=columns)
