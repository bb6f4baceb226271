"""Fuzz every file format that this project reads, and the frames of a board.

Question: does a damaged or hostile file ever give a raw traceback, a hang, or a changed number that nobody notices?
Each case is one mutation of a small valid file, read as the project reads it. Cases are numbered: ``--seed`` and
``--first`` repeat and continue a run. Outcomes:

    refused   a typed error (`DsaError`), or "start again" for what is only a saved piece of work
    same      loaded, and equal to the original
    changed   loaded with other content, where the format promises nothing: text that a user writes (a table, a
              technology), or a checksum that was computed again (anybody can do that)
    silent    loaded with other content although a checksum should have told: a fault
    raw       any other exception: a fault
    hang      more than 10 seconds: a fault

Examples::

    python benchmarks/fuzz.py --cases 200
    python benchmarks/fuzz.py --cases 10000 --formats plan certificate --seed 0 --out results.json
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import gzip
import io
import json
import logging
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from dsa_hw.errors import DsaError
from dsa_hw.training.fingerprints import fingerprint
from dsa_hw.utils.documents import sealed
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import one_line

__all__ = ["FORMATS", "OUTCOMES", "Outcome", "fuzz", "main"]

OUTCOMES = ("refused", "same", "changed", "silent", "raw", "hang")
FAULTS = ("silent", "raw", "hang")
_PATIENCE = 10.0

Json = Any
Random = random.Random


class _HangError(BaseException):
    """A case took too long."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case; ``where`` locates the fault."""

    kind: str
    where: str = ""


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: Name on the command line.
        make: Writes a valid file.
        read: Reads a file as the project does, uses what it read, and returns something that can be fingerprinted.
        sealed: Whether a checksum protects the file as a whole: damage that changes what is read is a fault.
        edit: Changes the content and computes checksums again; None for formats without structure.
        share: Share of the cases that are edited; the others are damaged.
        file: Name of the file.
        tamper: Changes the content and leaves the checksums, for formats in which damaged bytes seldom do; half of the
            damaged cases.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    sealed: bool
    edit: Callable[[bytes, Random, Path], bytes] | None = None
    share: float = 0.5
    file: str = "file"
    tamper: Callable[[bytes, Random, Path], bytes] | None = None


FORMATS: dict[str, Format] = {}


def _add(form: Format) -> None:
    FORMATS[form.name] = form


# Mutations of bytes ---------------------------------------------------------------------------------------------------

_SPECIAL = (
    b"",
    b"\0" * 100,
    b"\xef\xbb\xbf{}",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"[" + b"1" * 5000 + b"]",
    b'{"a": NaN}',
    "{é}".encode("latin-1"),
    b"\x80\x04.",
    b"PK\x03\x04",
    b"PK\x05\x06" + b"\0" * 18,
    b"SQLite format 3\0",
    b"\x1f\x8b\x08\0",
)


def damaged(data: bytes, rng: Random) -> bytes:
    """Return ``data`` with one kind of damage."""
    kind = rng.randrange(11)
    if kind == 10 or not data:
        return rng.choice(_SPECIAL)
    out = bytearray(data)
    at = rng.randrange(len(data))
    size = min(rng.choice((1, 2, 8, 64, 512, 4096)), len(data))
    start = rng.randrange(len(data) - size + 1)
    if kind in (0, 1):
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        out[start : start + size] = rng.randbytes(size)
    elif kind == 3:
        del out[at:]
    elif kind == 4:
        del out[start : start + size]
    elif kind == 5:
        out[at:at] = out[start : start + size]
    elif kind == 6:
        other = rng.randrange(len(data) - size + 1)
        out[start : start + size], out[other : other + size] = data[other : other + size], data[start : start + size]
    elif kind == 7:
        out[start : start + size] = bytes(size)
    elif kind == 8:
        out += rng.randbytes(rng.choice((1, 16, 1000)))
    else:  # a digit becomes another one: what a checksum is for
        digits = [i for i in range(start, min(start + 2000, len(out))) if 48 <= out[i] <= 57]
        out[rng.choice(digits) if digits else at] = 48 + rng.randrange(10)
    return bytes(out)


# Mutations of JSON ----------------------------------------------------------------------------------------------------

_VALUES: tuple[Json, ...] = (
    None, True, False, 0, 1, -1, 2, 10**9, 2**31, 2**53, 2**63 - 1, 10**19, -(10**30), 0.0, -0.0, 1e-320, 1e308, -1e308,
    0.5, float("nan"), float("inf"), "", "x", "0", "1e5", "a" * 5000, "\0", "é\u202e", "../../etc/passwd", "os:abort",
    "ssh://host?config=x", "latency", [], {}, [[]], [None], [1, 2, 3], {"a": 1}, ["x"] * 1000, [[[[[[[[[[1]]]]]]]]]],
)  # fmt: skip


def edited_json(document: Json, rng: Random) -> Json:
    """Return JSON data in which one value has another type or size, is missing, repeated or exchanged."""
    document = copy.deepcopy(document)
    places = list(_places(document))
    if not places:
        return rng.choice(_VALUES)
    for _ in range(rng.choice((1, 1, 1, 2))):
        holder, key = rng.choice(places)
        value = holder[key] if (key in holder if isinstance(holder, dict) else key < len(holder)) else None
        kind = rng.randrange(8)
        if kind == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("extra", "format", "sha256", ""))] = rng.choice(_VALUES)
        elif kind == 2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        elif kind == 3 and isinstance(value, (int, float)) and not isinstance(value, bool):
            holder[key] = rng.choice((-value, 2 * value, value + 1, value * 1e6, float(value), str(value)))
        elif kind == 4 and isinstance(value, (list, dict)):
            holder[key] = type(value)()
        elif kind == 5:
            other, name = rng.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                holder[key] = copy.deepcopy(other[name])
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return document


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield value, key
        yield from _places(item)


def _dumped(value: Json) -> bytes:
    return json.dumps(value).encode()


def _edit_plain(data: bytes, rng: Random, _: Path) -> bytes:
    return _dumped(edited_json(json.loads(data), rng))


def _edit_sealed(data: bytes, rng: Random, _: Path) -> bytes:
    found = edited_json(json.loads(data), rng)
    with contextlib.suppress(ValueError, TypeError):
        found = sealed(found)
    return _dumped(found)


def _edit_certificate(data: bytes, rng: Random, _: Path) -> bytes:
    found = json.loads(data)
    found["certificate"] = edited_json(found["certificate"], rng)
    with contextlib.suppress(ValueError, TypeError):
        found = sealed(found)
    return _dumped(found)


def _edit_lines(data: bytes, rng: Random, _: Path) -> bytes:
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    row = edited_json(json.loads(lines[at]), rng)
    if isinstance(row, dict) and "sha256" in json.loads(lines[at]):
        with contextlib.suppress(ValueError, TypeError):
            row = sealed(row)
    lines[at] = _dumped(row)
    return b"\n".join(lines) + b"\n"


# Seeds ----------------------------------------------------------------------------------------------------------------


@dataclass
class _World:
    """Objects that several formats need, made once."""

    net: nn.Module
    inputs: tuple[torch.Tensor, ...]
    groups: Any
    result: Any
    cache: dict[str, Any] = field(default_factory=dict)


_WORLD: list[_World] = []


def _world() -> _World:
    if not _WORLD:
        import dsa_hw

        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)).eval()
        inputs = (torch.randn(1, 3, 8, 8),)
        asked = [dsa_hw.FlopsBudget("50%"), dsa_hw.ParamsBudget("60%")]
        result = dsa_hw.allocate(net, asked, example_inputs=inputs, method="uniform", progress=False)
        _WORLD.append(_World(net, inputs, dsa_hw.find_groups(net, inputs), result))
    return _WORLD[0]


def _make_plan(path: Path) -> None:
    folder = path.parent / "saved"
    _world().result.save(folder)
    shutil.copy(folder / "plan.json", path)


def _read_plan(path: Path) -> Any:
    from dsa_hw.channels.plan import Plan

    plan = Plan.load(path)
    if plan.names == _world().groups.names and plan.sizes == tuple(_world().groups.sizes.tolist()):
        _world().groups.check_kept([np.asarray(units) for units in plan.kept])
    return _document(path), plan.widths


def _document(path: Path) -> Any:
    """Return what a JSON file says, without its checksum: everything in it counts."""
    found = json.loads(path.read_bytes())
    return {key: value for key, value in found.items() if key != "sha256"}


def _read_certificate(path: Path) -> Any:
    from budgets import Budget
    from dsa_hw.channels.plan import Plan
    from dsa_hw.pipeline.certificate import Certificate

    found = Certificate.from_dict(Plan.load(path).certificate)
    for entry in found.entries:
        Budget.from_dict(entry.budget)
    return str(found), str(found.verdict), found.utilisation, _document(path)


def _make_cost_model(path: Path) -> None:
    import pandas as pd

    import budgets
    from dsa_hw.profiles import Profile

    groups = _world().groups
    rng = np.random.default_rng(0)
    widths = np.vstack([groups.sizes, rng.integers(1, groups.sizes + 1, (24, len(groups)))])
    seconds = 1e-4 + 1e-6 * widths.prod(1) * (1 + 0.01 * rng.normal(size=len(widths)))
    table = pd.DataFrame(widths, columns=list(groups.names)).assign(
        seconds=seconds, split=["dense", *["train"] * 18, *["holdout"] * 6]
    )
    profile = Profile(
        table, names=groups.names, sizes=groups.sizes, target="onnxruntime/cpu fp32 x1", fingerprint=groups.fingerprint
    )
    budgets.fit(profile, groups).save(path)


def _read_cost_model(path: Path) -> Any:
    import budgets

    model = budgets.load_cost_model(path)
    size = len(model.names)
    alpha = np.linspace(0.3, 1.0, 3)[:, None] * np.ones(size)
    values = [model.value(torch.from_numpy(alpha)).numpy(), model.gradient(alpha), model.upper(alpha, 0.9), repr(model)]
    used = [np.nan_to_num(np.asarray(v, np.float64)).tolist() if not isinstance(v, str) else v for v in values]
    return used, _document(path)


_SETTINGS = {"what": "sweep", "seed": 0, "lr": 0.05, "options": {"a": [1, 2]}, "weights": "0123abcd", "data": None}


def _make_settings(path: Path) -> None:
    from dsa_hw.experiments.run_folder import RunFolder

    folder = path.parent / "run"
    RunFolder(folder, _SETTINGS)
    shutil.copy(folder / "settings.json", path)


def _read_settings(path: Path) -> Any:
    from dsa_hw.experiments.run_folder import RunFolder

    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / "settings.json")
    RunFolder(folder, _SETTINGS)  # continues only where all settings are the same
    return "the same"


def _make_rows(path: Path) -> None:
    from dsa_hw.experiments.compare import ComparisonRowDocument
    from dsa_hw.experiments.run_folder import RunFolder

    folder = path.parent / "run"
    shutil.rmtree(folder, ignore_errors=True)
    run = RunFolder(folder, _SETTINGS, ComparisonRowDocument)
    for i in range(1, 4):
        row = {
            "id": f"flops-{i}0%",
            "kind": "flops",
            "asked": f"{i}0%",
            "method": "dsa",
            "matches": "",
            "limit": 0.5 * i,
        }
        row |= {"verdict": "MET", "accuracy_before": 0.5, "accuracy": 0.9, "epochs": 2.5, "weights": f"{i}" * 64}
        run.add({**row, "alpha": [0.5, 0.25], "widths": {"a": 3 + i, "b": 2}, "history": "a" * 64})
    shutil.copy(folder / "rows.jsonl", path)


def _read_rows(path: Path) -> Any:
    from dsa_hw.experiments.compare import ComparisonRowDocument
    from dsa_hw.experiments.run_folder import RunFolder

    folder = path.parent / "run"
    run = RunFolder(folder, _SETTINGS, ComparisonRowDocument)
    shutil.copy(path, folder / "rows.jsonl")
    found = sorted(json.dumps(row, sort_keys=True) for row in run.rows().values())
    return _all_or_again(found, "rows")


def _all_or_again(found: list[str], name: str) -> Any:
    """Return what was found; a line that was left out with a warning is made again, which is a refusal."""
    known = _world().cache.setdefault(name, found)
    if set(found) < set(known):
        raise _StartedAgainError("A line is left out.")
    return found


def _make_store(path: Path) -> None:
    from profilers.measuring.measurement import Samples
    from profilers.storage.store import Store, identity

    path.unlink(missing_ok=True)
    about = {"names": ["a", "b"], "sizes": [8, 16], "fingerprint": "f", "inputs": [[[1, 3, 8, 8], "float32"]]}
    with Store(path) as store:
        store.add_environment("e", {"target": "onnxruntime/cpu fp32 x1", "version": "1"})
        store.add_network("n", "net", about)
        rng = np.random.default_rng(0)
        design = {"dense": [[8, 16]], "train": [[6, 8], [8, 4], [2, 16]], "holdout": [[4, 8]], "anchor": [[4, 8]]}
        for split, widths in design.items():
            store.add_design("n", "e", widths, split)
        store.set_grid("n", "e", {"a": 8, "b": 8}, [{"group": "a", "channels": 8, "seconds": 1e-3}])
        session = store.add_session("e", "test", {"load1": 0.5})
        runs = []
        for row in (row for rows in design.values() for row in rows):
            time_ = 1e-4 * row[0] * row[1]
            values, before, after = (s * (1 + 0.003 * rng.random((6, 2))) for s in (time_, 1.28e-2, 1.28e-2))
            runs += [(identity("n", row), Samples.of(values[b], before[b], after[b], b)) for b in range(6)]
        store.add_samples(session, runs)


def _read_store(path: Path) -> Any:
    import profilers

    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    tables = profilers.load_tables(path)
    profile = tables.profile
    frames = (profile.table, tables.samples, tables.configurations, tables.environments, tables.networks)
    content = [repr(frame.to_numpy().tolist()) for frame in (*frames, tables.sessions, tables.grid)]
    return content, dict(profile.grid), profile.target, profile.network


def _edit_store(data: bytes, rng: Random, folder: Path) -> bytes:
    from profilers.storage.store import row_checksum

    path = folder / "edited.sqlite"
    path.write_bytes(_tamper_store(data, rng, folder))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        names = connection.execute("SELECT name FROM sqlite_master WHERE type='table' ORDER BY name = 'totals'")
        for (name,) in names.fetchall():
            with contextlib.suppress(sqlite3.Error):  # a table that was changed beyond that is refused in any case
                rows = connection.execute(f"SELECT rowid, * FROM {name}").fetchall()
                for rowid, *values, _ in rows:
                    connection.execute(
                        f"UPDATE {name} SET checksum = ? WHERE rowid = ?", (row_checksum(name, values), rowid)
                    )
                if rng.random() < 0.9:
                    connection.execute("UPDATE totals SET number = ? WHERE name = ?", (len(rows), name))
    return path.read_bytes()


def _tamper_store(data: bytes, rng: Random, folder: Path) -> bytes:
    path = folder / "edited.sqlite"
    path.write_bytes(data)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        names = [n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table' ORDER BY name")]
        table = rng.choice([n for n in names if not n.startswith("sqlite_")])
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column = rng.choice(columns)
        value = rng.choice(
            (None, -1, 0, 1, 10**15, -1.0, 1e308, 1e-320, float("inf"), "", "abc", "{", "[]", "{}", "null", "[1]",
             '{"a": "b"}', '{"target": 5}', '{"names": ["a"], "sizes": []}', "[1e999]", "[-1, 2]", b"\x00\xff",
             "9" * 5000, "[" * 5000, "x" * 10_000)
        )  # fmt: skip
        statements = [
            (f"UPDATE {table} SET {column} = ?", (value,)),
            (f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", (value,)),
            (f"DELETE FROM {table}", ()),
            (f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})", ()),
            (f"ALTER TABLE {table} ADD COLUMN more", ()),
            (f"ALTER TABLE {table} RENAME COLUMN {column} TO other", ()),
            (f"ALTER TABLE {table} RENAME TO elsewhere", ()),
            (f"DROP TABLE {table}", ()),
            (f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN SELECT 1; END", ()),
            ("CREATE VIEW v AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c", ()),
            ("PRAGMA user_version = 99", ()),
            ("PRAGMA application_id = 1", ()),
        ]
        weights = [8, 8, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
        statement, values = rng.choices(statements, weights)[0]
        connection.execute("PRAGMA foreign_keys = OFF")
        with contextlib.suppress(sqlite3.Error):
            connection.execute(statement, values)
        if rng.random() < 0.05:  # a table that never ends
            with contextlib.suppress(sqlite3.Error):
                connection.execute(f"DROP TABLE {table}")
                connection.execute(
                    f"CREATE VIEW {table} AS WITH RECURSIVE c({columns[0]}) AS (SELECT 1 UNION ALL SELECT 1 FROM c) "
                    f"SELECT {', '.join(f'{columns[0]} AS {c}' for c in columns)} FROM c"
                )
    finally:
        connection.close()
    return path.read_bytes()


_TABLE = (
    "kind,in_channels,out_channels,seconds\nconv1,3,8,0.001\nconv1,3,16,0.002\nconv2,8,8,0.003\nconv2,16,16,0.004\n"
)


def _read_table(path: Path) -> Any:
    from profilers.targets.latency_table import LatencyTable

    found = LatencyTable.read(path)
    kinds = {name: [kind.ins, kind.outs, repr(kind)] for name, kind in found.kinds.items()}
    return json.dumps(kinds, default=str, sort_keys=True), found.step


_TECHNOLOGY = {"mac": 2.0, "byte": {"dram": 100.0, "large": 10.0, "small": 1.0}, "width": 1.0, "name": "mine"}


def _read_technology(path: Path) -> Any:
    from budgets.technologies import technology

    found = technology(path)
    return found.joules_per_mac, [found.joules_per_number(what) for what in found.paths], repr(found)


def _make_weights(path: Path) -> None:
    folder = path.parent / "saved"
    _world().result.save(folder)
    if path.suffix == ".pt":
        torch.save(_world().result.model.state_dict(), path)
    else:
        shutil.copy(folder / "model.safetensors", path)


def _read_weights(path: Path) -> Any:
    """Read weights and compare them with the hash in their plan, as ``dsa-hw verify`` and ``export`` do."""
    from dsa_hw.channels.plan import Plan
    from dsa_hw.utils.modules import load_weights
    from dsa_hw.utils.weights import read_weights

    cache = _world().cache
    if "plan" not in cache:
        cache["plan"] = Plan.load(path.parent / "saved" / "plan.json")
    small = copy.deepcopy(_world().result.model)
    load_weights(small, read_weights(path), "the network")
    cache["plan"].check_network(small, _world().inputs, str(path))
    return dict(small.state_dict())


def _read_foreign_weights(path: Path) -> Any:
    """Read weights of a user, for which there is no plan."""
    from dsa_hw.utils.modules import load_weights
    from dsa_hw.utils.weights import read_weights

    small = copy.deepcopy(_world().result.model)
    load_weights(small, read_weights(path), "the network")
    return dict(small.state_dict())


def _make_cifar(path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = (("train", 12), ("test", 4))
    arrays: dict[str, Any] = {f"x_{part}": rng.integers(0, 256, (n, 32, 32, 3), np.uint8) for part, n in parts}
    labels: dict[str, Any] = {f"y_{part}": rng.integers(0, 10, n) for part, n in parts}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays, **labels)


def _read_cifar(path: Path) -> Any:
    from dsa_hw.zoo.data import Batches, load_data

    data = load_data("cifar10", path)
    loaders = [loader for loader in (data.train, data.val, data.test) if isinstance(loader, Batches)]
    return [part for loader in loaders for part in (loader.images, loader.labels)]


def _make_sittings(path: Path) -> None:
    from profilers.measuring.sittings import Sitting, SittingFile
    from profilers.measuring.statistics import Estimate

    path.unlink(missing_ok=True)
    file = SittingFile(path)
    for i in range(4):
        ratio, scale = Estimate(-0.9 + 0.01 * i, 1e-5, 10.0), Estimate(-6.0 + 0.02 * i, 1e-5, 10.0)
        file.add("k", Sitting(ratio, scale, 3600.0 * i))


def _read_sittings(path: Path) -> Any:
    from profilers.measuring.sittings import SittingFile

    return _all_or_again(sorted(map(repr, SittingFile(path)._read())), "sittings")


def _problem() -> Any:
    from budgets import FlopsBudget
    from dsa_hw.methods.costs import CostSet
    from dsa_hw.methods.problem import Problem

    world = _world()
    costs = CostSet.of(FlopsBudget("50%"), world.groups)
    return Problem(world.net, world.groups, costs, example_inputs=world.inputs)


class _StartedAgainError(DsaError):
    """The saved work was not used."""


def _solve(problem: Any) -> Any:
    from dsa_hw.methods.problem import Proposal

    cache = _world().cache
    if cache.get("solved"):
        raise _StartedAgainError("The allocation starts again.")
    cache["solved"] = True
    import pandas as pd

    model = copy.deepcopy(problem.model)
    scores = [np.linspace(0, 1, size) for size in problem.groups.sizes]
    return Proposal(
        np.full(len(problem.groups), 0.5), model, scores, pd.DataFrame({"step": [0, 1], "loss": [0.5, 0.25]})
    )


def _make_proposal(path: Path) -> None:
    from dsa_hw.methods.checkpoint import solve_or_resume
    from dsa_hw.methods.registry import METHODS

    METHODS["fuzz"] = _solve
    _world().cache.pop("solved", None)
    solve_or_resume(_problem(), "fuzz", path.parent)
    assert path.name == "proposal.pt"


def _read_proposal(path: Path) -> Any:
    from dsa_hw.methods.checkpoint import solve_or_resume

    found = solve_or_resume(_problem(), "fuzz", path.parent)
    return [found.alpha, dict(found.model.state_dict()), found.importance, found.history.to_json()]


# Frames of a board ----------------------------------------------------------------------------------------------------


class _FakeProcess:
    """A process whose standard output is a file: the answers of an agent, as they were recorded and then damaged."""

    path: Path
    error_text = ""
    pid = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        from profilers.remote import agent

        self.stream = io.BytesIO(agent.BANNER + self.path.read_bytes())

    def write(self, data: bytes, deadline: float) -> None:
        """Accept a request."""

    def read(self, size: int, deadline: float) -> bytes:
        from dsa_hw.utils.processes import EndedError

        found = self.stream.read(size)
        if len(found) < size:
            raise EndedError("the process ended")
        return found

    def read_until(self, end: bytes, limit: int, deadline: float) -> bytes:
        return self.stream.read(len(end))

    def ended(self, *_: Any) -> int:
        return 1

    def close(self, *_: Any) -> None:
        """Nothing to end."""


def _board(path: Path) -> Any:
    from profilers.remote.device import AgentDevice
    from profilers.remote.failures import of_lost

    def explain(lost: Any) -> Any:
        return of_lost(lost, "a board", "login", "host", "python3")

    _FakeProcess.path = path
    folder = str(path.parent / "board")
    return AgentDevice("a board", ["true"], explain, login="login", python="python3", folder=folder)


def _make_frames(path: Path) -> None:
    """Record the answers of a real agent to the requests of `_read_frames`."""
    from profilers.remote import agent, channel

    recorded: list[bytes] = []

    class Recording(_FakeProcess):
        def __init__(self, *_: Any, **__: Any) -> None:
            self.agent = agent.Agent(io.BytesIO(), io.BytesIO())
            self.stream = io.BytesIO(agent.BANNER)

        def write(self, data: bytes, deadline: float) -> None:
            if data[:1].isdigit():  # the source of the agent
                return
            header, payload = agent.read_frame(io.BytesIO(data)) or ({}, b"")
            try:
                reply, extra = self.agent.answer(header, payload)
            except agent.RefusalError as refusal:
                reply, extra = {"refused": refusal.kind, "text": str(refusal)}, b""
            recorded.append(agent.frame({**reply, "id": header["id"]}, extra))
            self.stream = io.BytesIO(recorded[-1])

    with mock.patch.object(channel, "PipedProcess", Recording):
        _questions(_board(path))
    path.write_bytes(b"".join(recorded))


def _read_frames(path: Path) -> Any:
    from profilers.remote import channel

    with mock.patch.object(channel, "PipedProcess", _FakeProcess):
        return _questions(_board(path))


def _questions(board: Any) -> Any:
    return [sorted(board.environment.items()), board.providers, sorted(board.state()), board.busiest_process()]


def _edit_frames(data: bytes, rng: Random, _: Path) -> bytes:
    from profilers.remote import agent

    stream, frames = io.BytesIO(data), []
    while (found := agent.read_frame(stream)) is not None:
        frames.append(found)
    at = rng.randrange(len(frames))
    header = edited_json(frames[at][0], rng)
    if isinstance(header, dict):
        header.setdefault("id", frames[at][0]["id"])
    text = _dumped(header)
    out = b""
    for i, (other, payload) in enumerate(frames):
        body = text if i == at else _dumped(other)
        out += agent.LENGTHS.pack(len(body), len(payload)) + body + payload
    return out


# ----------------------------------------------------------------------------------------------------------------------


def _gz(path: Path) -> None:
    path.write_bytes(gzip.compress(_TABLE.encode(), mtime=0))


_add(Format("plan", _make_plan, _read_plan, True, _edit_sealed, file="plan.json"))
_add(Format("certificate", _make_plan, _read_certificate, True, _edit_certificate, 0.9, "plan.json"))
_add(Format("cost-model", _make_cost_model, _read_cost_model, True, _edit_sealed, file="latency.json"))
_add(Format("settings", _make_settings, _read_settings, True, _edit_sealed, file="settings-copy.json"))
_add(Format("rows", _make_rows, _read_rows, True, _edit_lines, file="rows-copy.jsonl"))
_add(Format("store", _make_store, _read_store, True, _edit_store, file="profile.sqlite", tamper=_tamper_store))
_add(Format("table", lambda path: write_text(path, _TABLE), _read_table, False, file="table.csv"))
_add(Format("table-gz", _gz, _read_table, True, file="table.csv.gz"))
_add(Format("technology", lambda path: write_text(path, json.dumps(_TECHNOLOGY)), _read_technology, False, _edit_plain,
            file="technology.json"))  # fmt: skip
_add(Format("safetensors", _make_weights, _read_weights, True, file="model.safetensors"))
_add(Format("torch-weights", _make_weights, _read_foreign_weights, True, file="model.pt"))
_add(Format("cifar", _make_cifar, _read_cifar, True, file="cifar10.npz"))
_add(Format("sittings", _make_sittings, _read_sittings, True, _edit_lines, file="sittings.jsonl"))
_add(Format("proposal", _make_proposal, _read_proposal, True, file="proposal.pt"))
_add(Format("frames", _make_frames, _read_frames, False, _edit_frames, 0.7, "frames.bin"))


def fuzz(
    name: str, cases: int, seed: int = 0, first: int = 0, on_case: Callable[[int], None] | None = None
) -> tuple[Counter[str], dict[str, str]]:
    """Run cases of one format.

    Args:
        name: Name in `FORMATS`.
        cases: How many cases.
        seed: Seed of all of them.
        first: Number of the first case.
        on_case: Called with the number of each case.

    Returns:
        The number of cases by outcome, and for each place of a fault the first case, with its number and message.
    """
    form = FORMATS[name]
    counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="dsa-hw-fuzz-") as folder, _quiet():
        path = Path(folder) / form.file
        form.make(path)
        original = path.read_bytes()
        expected = fingerprint(form.read(path))
        for number in range(first, first + cases):
            rng = random.Random(f"{name}/{seed}/{number}")
            edited = form.edit is not None and rng.random() < form.share
            mutate = form.edit if edited else form.tamper if form.tamper and rng.random() < 0.5 else None
            path.write_bytes(mutate(original, rng, Path(folder)) if mutate else damaged(original, rng))
            outcome = _judge(form, path, expected, edited or not form.sealed)
            counts[outcome.kind] += 1
            if outcome.kind in FAULTS:
                faults.setdefault(outcome.where, f"case {number}")
            if on_case is not None:
                on_case(number)
    return counts, faults


def _judge(form: Format, path: Path, expected: str, may_change: bool) -> Outcome:
    """Read one file."""
    faulthandler.dump_traceback_later(6 * _PATIENCE, exit=True)  # where C code hangs, no Python handler runs
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
    try:
        found = fingerprint(form.read(path))
    except DsaError as error:
        if "\n" in str(error):
            return Outcome("raw", f"{type(error).__name__} of several lines: {one_line(error, 80)}")
        return Outcome("refused")
    except _HangError:
        return Outcome("hang", f"more than {_PATIENCE:.0f} s")
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
        ours = [f for f in frames if "/benchmarks/" not in f.filename and "/lib/python" not in f.filename] or frames
        place = f"{Path(ours[-1].filename).parent.name}/{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return Outcome("raw", f"{place} {type(error).__name__}: {one_line(error, 80)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if found == expected:
        return Outcome("same")
    return Outcome("changed") if may_change else Outcome("silent", "another content with a valid checksum")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and the log, and let a hang raise."""

    def hang(number: int, frame: Any) -> None:
        raise _HangError

    before, level = signal.signal(signal.SIGALRM, hang), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        signal.signal(signal.SIGALRM, before)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the outcomes as a Markdown table."""
    lines = [f"| format | cases | {' | '.join(OUTCOMES)} |", f"|---{'|---:' * (1 + len(OUTCOMES))}|"]
    for name, result in results.items():
        counts = result["counts"]
        cells = [str(sum(counts.values())), *(str(counts.get(kind, 0)) for kind in OUTCOMES)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; the exit code is 1 if there was a fault."""
    parser = argparse.ArgumentParser(description="Fuzz the file formats of this project.")
    parser.add_argument("--cases", type=int, default=1000, help="cases of each format")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to continue a run")
    parser.add_argument("--time-limit", type=float, help="seconds; what is not done by then is left out")
    parser.add_argument("--out", type=Path, help="JSON file; counts of earlier runs in it are added")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    begin = time.monotonic()
    for name in options.formats:
        known = results.setdefault(name, {"counts": {}, "faults": {}, "next": options.first, "seed": options.seed})
        end = options.first + options.cases
        while known["next"] < end:
            if options.time_limit is not None and time.monotonic() - begin > options.time_limit:
                break
            piece = min(250, end - known["next"])
            counts, faults = fuzz(name, piece, options.seed, known["next"])
            known["counts"] = dict(Counter(known["counts"]) + counts)
            known["faults"] = {**faults, **known["faults"]}
            known["next"] += piece
            sys.stderr.write(f"\r{name}: {known['next']} of {end}   ")
            sys.stderr.flush()
            if options.out:
                write_text(options.out, json.dumps(results, indent=1))
        sys.stderr.write("\n")
    print(table(results))
    for name, result in results.items():
        for where, case in result["faults"].items():
            print(f"{name}: {where} ({case})")
    return int(any(result["faults"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
