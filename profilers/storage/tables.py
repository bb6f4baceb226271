"""What a store knows, as tidy pandas tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dsa_hw.errors import StoreError
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.storage.store import Store

__all__ = ["Tables", "kind_of", "load_tables", "measurements", "profile_table"]


@dataclass(frozen=True, eq=False)
class Tables:
    """All tables of one store.

    ``profile`` is the one measured last: a row per configuration (a width per group, ``seconds`` or ``joules``,
    ``low``, ``high``, ``split``, ``runs``), with target, environment, grid and sizes in ``profile.attrs``. ``profiles``
    has all of them by (network, target, environment). ``samples`` are the raw runs.
    """

    profile: pd.DataFrame
    profiles: dict[tuple[str, str, str], pd.DataFrame]
    samples: pd.DataFrame
    configurations: pd.DataFrame
    environments: pd.DataFrame
    networks: pd.DataFrame
    sessions: pd.DataFrame
    grid: pd.DataFrame


def load_tables(path: str | Path, *, statistic: str = "quiet", rules: MeasuringRules | None = None) -> Tables:
    """Read the store at ``path``; ``statistic`` is quiet, median, p90, p95 or p99; ``rules`` replaces all rules."""
    rules = rules or MeasuringRules(statistic=statistic)
    if not Path(path).exists():
        raise StoreError(f"{path} does not exist; make it with python -m profilers.latency --out {path}")
    with Store(path) as store:
        found = {}
        for network, environment in store.profiles():
            table = profile_table(store, network, environment, rules)
            found[(store.network(network)[0], table.attrs["target"], environment)] = table
        if not found:
            raise StoreError(f"{path} has no profile yet; fill it with python -m profilers.latency --out {path}")
        last = next(reversed(found.values()))
        frames = {
            name: _frame(store, name) for name in ("samples", "configurations", "environments", "networks", "sessions")
        }
    return Tables(profile=last, profiles=found, grid=pd.DataFrame(last.attrs["grid_evidence"]), **frames)


def measurements(store: Store, network: str, environment: str, rules: MeasuringRules) -> dict[str, Measurement]:
    """Every configuration of a design as a `Measurement`, trusted or not, by identity.

    Each run is judged by the hidden inflation of its own session: sessions with more than ``rules`` allows are left
    out, unless there is no other.
    """
    description = store.environment(environment)
    reference = store.reference(environment)
    samples = store.samples(environment, network)
    kind = kind_of(description)
    found = {}
    for c in store.design(network, environment):
        if c.id in samples:
            used = [part for part in samples[c.id] if part[1] <= rules.worst] or samples[c.id]
            runs, hidden = Samples.joined([runs for runs, _ in used]), max(hidden for _, hidden in used)
            found[c.id] = kind(c.id[:12], description["target"], runs, reference, rules, description, hidden)
    return found


def kind_of(environment: Mapping[str, str]) -> type[Measurement]:
    """What the measurements of an environment are: of time, or of energy."""
    if environment.get("quantity") == "energy":
        from profilers.measuring.energy_bench import EnergyMeasurement

        return EnergyMeasurement
    return Measurement


def profile_table(store: Store, network: str, environment: str, rules: MeasuringRules) -> pd.DataFrame:
    """The profile table of a network in an environment: trusted configurations only; ``attrs`` says what and where."""
    name, about = store.network(network)
    description = store.environment(environment)
    kind = kind_of(description)
    quantity, column, unit = kind.quantity, kind.column, kind.unit
    found = measurements(store, network, environment, rules)
    rows: list[dict[str, Any]] = []
    for configuration in store.design(network, environment):
        measurement = found.get(configuration.id)
        if measurement is None or not measurement.trusted:
            continue
        rows.append(
            {
                **dict(zip(about["names"], configuration.widths, strict=True)),
                column: measurement.value,
                "low": measurement.low,
                "high": measurement.high,
                "split": configuration.split,
                "runs": measurement.runs,
                **measurement.further(),
            }
        )
    columns = [*about["names"], column, "low", "high", "split", "runs", *kind.further_columns]
    table = pd.DataFrame(rows, columns=columns)
    grid, evidence = store.grid(network, environment) or ({}, [])
    total = sum(len(m.samples) for m in found.values())
    table.attrs = {
        "target": description["target"],
        "fingerprint": about["fingerprint"],
        "sizes": about["sizes"],
        "names": about["names"],
        "environment": description,
        "grid": grid,
        "quantity": quantity,
        "unit": unit,
        "network": name,
        "inputs": about["inputs"],
        "statistic": rules.statistic,
        "grid_evidence": evidence,
        "noise": float(pd.Series([m.spread for m in found.values() if m.trusted], dtype=float).median()),
        "rejected": 1 - sum(m.runs for m in found.values()) / total if total else 0.0,
        "estimated": description.get("estimated"),
        "untrusted": sum(not m.trusted for m in found.values()),
    }
    return table


def _frame(store: Store, name: str) -> pd.DataFrame:
    columns, rows = store.table(name)
    return pd.DataFrame(rows, columns=columns)
