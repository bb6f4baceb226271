"""The store: one SQLite file with every run of every profile.

Rows are identified by the hash of their content (target, environment, network, configuration), so that equal content
is stored once and an interrupted profile can be continued. Runs are raw and never changed. Each has the dense
network's runs before and after it in its own row, so that whatever part of a profile is there can be evaluated. A
session is one sitting. In an environment whose quantity is energy, the columns seconds, dense_before and dense_after
contain joules.

With write-ahead logging, a process that is killed loses at most its current transaction, and readers and a second
writer do not block each other for long. Nothing in the file is unpickled or executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dsa_hw.errors import StoreError
from dsa_hw.utils.text import one_line, unknown_name
from profilers.measuring.measurement import Samples

__all__ = ["Store", "StoredConfiguration", "identity"]

_APPLICATION = 0x44534148  # "DSAH", in the header of every store
_VERSION = 3
_MAGIC = b"SQLite format 3\x00"
_PATIENCE = 60.0  # seconds that a writer waits for another one

_SCHEMA = """
CREATE TABLE environments (id TEXT PRIMARY KEY, target TEXT NOT NULL, description TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE networks (id TEXT PRIMARY KEY, name TEXT NOT NULL, description TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE configurations (
  id TEXT PRIMARY KEY, network TEXT NOT NULL REFERENCES networks, widths TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE designs (
  network TEXT NOT NULL REFERENCES networks, environment TEXT NOT NULL REFERENCES environments,
  configuration TEXT NOT NULL REFERENCES configurations, split TEXT NOT NULL, position INTEGER NOT NULL,
  PRIMARY KEY (network, environment, configuration));
CREATE TABLE sessions (
  id INTEGER PRIMARY KEY, environment TEXT NOT NULL REFERENCES environments, command TEXT NOT NULL,
  load TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE samples (
  id INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions,
  configuration TEXT NOT NULL REFERENCES configurations,
  block INTEGER NOT NULL, seconds REAL NOT NULL, dense_before REAL NOT NULL, dense_after REAL NOT NULL, extra TEXT);
CREATE INDEX samples_by_configuration ON samples (configuration, session);
CREATE TABLE grids (
  network TEXT NOT NULL REFERENCES networks, environment TEXT NOT NULL REFERENCES environments,
  grid TEXT NOT NULL, evidence TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (network, environment));
"""
_TABLES = re.findall(r"CREATE TABLE (\w+)", _SCHEMA)


def identity(*content: Any) -> str:
    """Return the content hash of anything that JSON can represent."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class StoredConfiguration:
    """A configuration of a design: its identity, its widths (K integers) and its split (dense, train or holdout)."""

    id: str
    widths: tuple[int, ...]
    split: str


class Store:
    """A store of profiles; a context manager that closes the file.

    Args:
        path: The file; created if it does not exist.

    Raises:
        StoreError: The file is not a store, is damaged, or cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _refuse_foreign(self.path)
        with self._explained("open"):
            self._connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")  # functions of a foreign schema are never called
        with self._transaction():  # one transaction, so that a file is complete or empty
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables and not application:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {_VERSION}")
            elif application != _APPLICATION:
                raise StoreError(f"{self.path} is an SQLite file of another program. Choose another --out.")
            elif version != _VERSION:
                raise StoreError(
                    f"{self.path} has version {version} of the store format; this program reads version {_VERSION}. "
                    "Measure again into a new file: dsa-hw profile --model NAME --out new.sqlite."
                )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise StoreError(f"{self.path} is damaged ({problem}). Restore it from a copy, or choose another --out.")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Merge the write-ahead log into the file and close it."""
        with contextlib.suppress(sqlite3.Error):  # another process uses the file and will merge the log
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            code = getattr(error, "sqlite_errorname", "") or ""
            if "full" in text or code.startswith("SQLITE_FULL") or code == "SQLITE_IOERR_WRITE":
                reason = "the disk is full. Stored runs are intact. Free some space and run the same command again"
            elif "locked" in text or "busy" in text:
                reason = f"another process locked it for {_PATIENCE:.0f} s. Wait for it, or choose another --out"
            elif "malformed" in text or "not a database" in text or code.startswith("SQLITE_CORRUPT"):
                reason = "it is damaged or truncated. Restore it from a copy, or choose another --out"
            elif "readonly" in text or "unable to open" in text:
                reason = "it cannot be written. Check the folder and its permissions"
            else:
                reason = "SQLite failed. Check the disk"
            raise StoreError(f"Cannot {action} {self.path}: {reason} ({one_line(text)}).") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        with self._explained("write to"):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._explained("read"):
            return self._connection.execute(query, values).fetchall()

    # What is measured, and where -------------------------------------------------------------------------------------

    def add_environment(self, id: str, description: Mapping[str, str]) -> None:
        """Add an environment under its digest, unless it is present."""
        text = json.dumps(dict(description), sort_keys=True)
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO environments VALUES (?, ?, ?, ?)",
                (id, description.get("target", ""), text, time.time()),
            )

    def add_network(self, id: str, name: str, description: Mapping[str, Any]) -> None:
        """Add a network under its content hash, unless it is present.

        Args:
            id: The content hash.
            name: Name of the network.
            description: Names, sizes, fingerprint and input shapes.
        """
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO networks VALUES (?, ?, ?, ?)",
                (id, name, json.dumps(dict(description), sort_keys=True), time.time()),
            )

    def add_session(self, environment: str, command: str, load: Mapping[str, float]) -> int:
        """Begin a session of measuring.

        Args:
            environment: Digest of the environment.
            command: What is measured.
            load: The load of the machine.

        Returns:
            The number of the session.
        """
        with self._transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO sessions (environment, command, load, started) VALUES (?, ?, ?, ?)",
                (environment, command, json.dumps(dict(load)), time.time()),
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def add_design(
        self, network: str, environment: str, widths: Sequence[Sequence[int]], split: str
    ) -> list[StoredConfiguration]:
        """Add configurations to a design; those that are present keep their split.

        Args:
            network: Identity of the network.
            environment: Digest of the environment.
            widths: Widths of each configuration.
            split: "dense", "train" or "holdout".

        Returns:
            The configurations with these widths.
        """
        with self._transaction() as connection:
            (position,) = connection.execute("SELECT count(*) FROM designs").fetchone()
            for i, row in enumerate(widths):
                values = [int(w) for w in row]
                id = identity(network, values)
                connection.execute(
                    "INSERT OR IGNORE INTO configurations VALUES (?, ?, ?, ?)",
                    (id, network, json.dumps(values), time.time()),
                )
                connection.execute(
                    "INSERT OR IGNORE INTO designs VALUES (?, ?, ?, ?, ?)",
                    (network, environment, id, split, position + i),
                )
        wanted = {identity(network, [int(w) for w in row]) for row in widths}
        return [c for c in self.design(network, environment) if c.id in wanted]

    def design(self, network: str, environment: str) -> list[StoredConfiguration]:
        """Return all configurations of a design, in the order in which they were drawn."""
        rows = self._rows(
            "SELECT c.id, c.widths, d.split FROM designs d JOIN configurations c ON c.id = d.configuration "
            "WHERE d.network = ? AND d.environment = ? ORDER BY d.position",
            (network, environment),
        )
        return [StoredConfiguration(id, tuple(json.loads(widths)), split) for id, widths, split in rows]

    def environments_of(self, network: str, target: str) -> dict[str, dict[str, str]]:
        """Return the environments in which a network was measured on a target, oldest first."""
        rows = self._rows(
            "SELECT DISTINCT e.id, e.description FROM environments e JOIN designs d ON d.environment = e.id "
            "WHERE d.network = ? AND e.target = ? ORDER BY e.created",
            (network, target),
        )
        return {id: json.loads(description) for id, description in rows}

    # What was found --------------------------------------------------------------------------------------------------

    def add_samples(self, session: int, samples: Sequence[tuple[str, Samples]]) -> None:
        """Append raw runs of a session in one transaction.

        Args:
            session: Number of the session, from `add_session`.
            samples: Pairs of configuration and runs.
        """
        rows = [
            (session, configuration, int(k), float(s), float(b), float(a), extra)
            for configuration, part in samples
            for s, k, b, a, extra in zip(part.values, part.block, part.before, part.after, _extras(part), strict=True)
        ]
        with self._transaction() as connection:
            connection.executemany(
                "INSERT INTO samples (session, configuration, block, seconds, dense_before, dense_after, extra) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def samples(self, environment: str, network: str) -> dict[str, Samples]:
        """Return all raw runs of a network in an environment, by configuration; a session is a sitting."""
        rows = self._rows(
            "SELECT s.configuration, s.session, s.block, s.seconds, s.dense_before, s.dense_after, s.extra "
            "FROM samples s JOIN sessions e ON e.id = s.session JOIN configurations c ON c.id = s.configuration "
            "WHERE e.environment = ? AND c.network = ? ORDER BY s.id",
            (environment, network),
        )
        parts: dict[str, list[tuple[Any, ...]]] = {}
        for configuration, *run in rows:
            parts.setdefault(configuration, []).append(tuple(run))
        return {configuration: _samples(runs) for configuration, runs in parts.items()}

    def set_grid(
        self, network: str, environment: str, grid: Mapping[str, int], evidence: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store the grid of a network in an environment.

        Args:
            network: Identity of the network.
            environment: Digest of the environment.
            grid: Step of the widths by group.
            evidence: The measured points behind it.
        """
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO grids VALUES (?, ?, ?, ?, ?)",
                (network, environment, json.dumps(dict(grid)), json.dumps([dict(e) for e in evidence]), time.time()),
            )

    def grid(self, network: str, environment: str) -> tuple[dict[str, int], list[dict[str, Any]]] | None:
        """Return the grid and its evidence, or None."""
        rows = self._rows(
            "SELECT grid, evidence FROM grids WHERE network = ? AND environment = ?", (network, environment)
        )
        return (json.loads(rows[0][0]), json.loads(rows[0][1])) if rows else None

    def profiles(self) -> list[tuple[str, str]]:
        """Return (network, environment) of every design in the file, the one that was measured last at the end."""
        rows = self._rows(
            "SELECT d.network, d.environment, coalesce(max(s.started), 0) AS last FROM designs d "
            "LEFT JOIN sessions s ON s.environment = d.environment "
            "GROUP BY d.network, d.environment ORDER BY last, d.rowid"
        )
        return [(network, environment) for network, environment, _ in rows]

    def network(self, id: str) -> tuple[str, dict[str, Any]]:
        """Return name and description of a network."""
        rows = self._rows("SELECT name, description FROM networks WHERE id = ?", (id,))
        if not rows:
            raise StoreError(f"{self.path} has no network {id}.")
        return str(rows[0][0]), json.loads(rows[0][1])

    def environment(self, id: str) -> dict[str, str]:
        """Return the description of an environment."""
        rows = self._rows("SELECT description FROM environments WHERE id = ?", (id,))
        if not rows:
            raise StoreError(f"{self.path} has no environment {id}.")
        description: dict[str, str] = json.loads(rows[0][0])
        return description

    def table(self, name: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return columns and rows of one of the tables."""
        if name not in _TABLES:
            raise StoreError(unknown_name("table", name, _TABLES))
        with self._explained("read"):
            cursor = self._connection.execute(f"SELECT * FROM {name}")
            return [c[0] for c in cursor.description], cursor.fetchall()


def _samples(runs: Sequence[tuple[Any, ...]]) -> Samples:
    session, block, seconds, before, after, texts = zip(*runs, strict=True)
    notes = [json.loads(text) if text else {} for text in texts]
    extra = {
        name: np.asarray([note.get(name, np.nan) for note in notes], np.float64)
        for name in dict.fromkeys(key for note in notes for key in note)
    }
    first, middle, last = (np.asarray(column, np.float64) for column in (before, seconds, after))
    return Samples(middle, first, last, np.asarray(block, np.int64), np.asarray(session, np.int64), extra)


def _extras(part: Samples) -> list[str | None]:
    """Return the extra values of each run as JSON; None where there are none."""
    if not part.extra:
        return [None] * len(part)
    rows = [{name: float(v[i]) for name, v in part.extra.items() if np.isfinite(v[i])} for i in range(len(part))]
    return [json.dumps(row) for row in rows]


def _refuse_foreign(path: Path) -> None:
    """Refuse files that SQLite would report as damaged (a text file) or empty (a truncated store)."""
    try:
        if path.is_dir():
            raise StoreError(f"{path} is a folder. Give a file, for example {path / 'profile.sqlite'}.")
        if not path.parent.is_dir():
            raise StoreError(f"The folder {path.parent} does not exist. Create it, or choose another --out.")
        if not path.exists() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StoreError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from error
    if not header.startswith(_MAGIC[: len(header)]) or not header:
        raise StoreError(
            f"{path} is not a profile store, because it is not an SQLite file. Use a store made by dsa-hw profile, or "
            "a new file name."
        )
    if len(header) < 100:
        raise StoreError(f"{path} is truncated. Restore it from a copy, or choose another --out.")
    page = int.from_bytes(header[16:18], "big")
    page = 65536 if page == 1 else page
    size, pages = path.stat().st_size, int.from_bytes(header[28:32], "big")
    if not path.with_name(path.name + "-wal").exists() and (size % page or size < pages * page):
        raise StoreError(
            f"{path} is truncated ({size} of {pages * page} bytes). Restore it from a copy, or choose another --out."
        )
