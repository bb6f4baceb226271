"""The store: one SQLite file with every run of every profile.

Rows are identified by the hash of their content (target, environment, network, configuration), so that equal content
is stored once and an interrupted profile can be continued. Runs are raw and never changed. Each has the dense
network's runs before and after it in its own row, so that whatever part of a profile is there can be evaluated. A
session is one sitting. In an environment whose quantity is energy, the columns seconds, dense_before and dense_after
contain joules.

With write-ahead logging, a process that is killed loses at most its current transaction, and readers and a second
writer do not block each other for long.

A store may come from a stranger. Nothing in it is unpickled or executed: a file whose tables are not exactly ours
(views, triggers, virtual tables) is refused, queries have a time limit, and values are checked when they are read.
Opened read-only, a store is not changed, and the file system may be read-only.

Damage is noticed when a store is opened. Every row has a checksum of its table's name and of all its values, keys
included, so that neither a value nor a place can change; the table ``totals`` has the number of rows of each table, so
that no row can be missing; SQLite compares its indexes with the tables. A checksum is not a signature.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, Self
from urllib.parse import quote

import numpy as np
from pydantic import Field, model_validator

from dsa_hw.errors import StoreError
from dsa_hw.utils.documents import Document, parse_json, read_document
from dsa_hw.utils.text import first_line, one_line, unknown_name
from profilers.measuring.measurement import Samples

__all__ = ["Store", "StoredConfiguration", "identity", "row_checksum"]

_APPLICATION = 0x44534148  # "DSAH", in the header of every store
_VERSION = 4
_MAGIC = b"SQLite format 3\x00"
_PATIENCE = 60.0  # seconds that a writer waits for another one
_QUERY_LIMIT = 300.0  # seconds of one query; a million runs are read in about five
_LARGEST = 16 * 2**30  # bytes; a million runs have about 200 MB
_ABSURD = 1e6  # seconds or joules of one inference: more than eleven days
_TINY = 1e-12  # seconds or joules of one inference: less than a clock tick of any device

_SCHEMA = """
CREATE TABLE environments (
  id TEXT PRIMARY KEY, target TEXT NOT NULL, description TEXT NOT NULL, created REAL NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE networks (
  id TEXT PRIMARY KEY, name TEXT NOT NULL, description TEXT NOT NULL, created REAL NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE configurations (
  id TEXT PRIMARY KEY, network TEXT NOT NULL REFERENCES networks, widths TEXT NOT NULL, created REAL NOT NULL,
  checksum BLOB NOT NULL);
CREATE TABLE designs (
  network TEXT NOT NULL REFERENCES networks, environment TEXT NOT NULL REFERENCES environments,
  configuration TEXT NOT NULL REFERENCES configurations, split TEXT NOT NULL, position INTEGER NOT NULL,
  checksum BLOB NOT NULL, PRIMARY KEY (network, environment, configuration));
CREATE TABLE sessions (
  id INTEGER PRIMARY KEY, environment TEXT NOT NULL REFERENCES environments, command TEXT NOT NULL,
  load TEXT NOT NULL, started REAL NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE samples (
  id INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions,
  configuration TEXT NOT NULL REFERENCES configurations,
  block INTEGER NOT NULL, seconds REAL NOT NULL, dense_before REAL NOT NULL, dense_after REAL NOT NULL, extra TEXT,
  checksum BLOB NOT NULL);
CREATE INDEX samples_by_configuration ON samples (configuration, session);
CREATE TABLE grids (
  network TEXT NOT NULL REFERENCES networks, environment TEXT NOT NULL REFERENCES environments,
  grid TEXT NOT NULL, evidence TEXT NOT NULL, created REAL NOT NULL, checksum BLOB NOT NULL,
  PRIMARY KEY (network, environment));
CREATE TABLE totals (name TEXT PRIMARY KEY, number INTEGER NOT NULL, checksum BLOB NOT NULL);
"""
_TABLES = [name for name in re.findall(r"CREATE TABLE (\w+)", _SCHEMA) if name != "totals"]
_SPLITS = ("dense", "anchor", "train", "holdout")


class _NetworkDocument(Document):
    """The description of a network in a store."""

    names: tuple[str, ...] = Field(min_length=1)
    sizes: tuple[Annotated[int, Field(ge=1, le=2**31)], ...] = Field(min_length=1)
    fingerprint: str
    inputs: tuple[tuple[tuple[Annotated[int, Field(ge=1, le=2**31)], ...], str], ...]
    operations: tuple[tuple[str | float, ...], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ValueError("names must be different and have a size each")
        return self


def identity(*content: Any) -> str:
    """Return the content hash of anything that JSON can represent."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def row_checksum(table: str, values: Sequence[Any]) -> bytes:
    """Return the checksum of a row: 8 bytes of BLAKE2b over the table's name and the other values, in their order.

    ``ascii`` writes each value with its type, and floats with all their digits.
    """
    return hashlib.blake2b(ascii((table, *values)).encode(), digest_size=8).digest()


@dataclass(frozen=True)
class StoredConfiguration:
    """A configuration of a design: its identity, its widths (K integers) and its split (dense, train or holdout)."""

    id: str
    widths: tuple[int, ...]
    split: str


class Store:
    """A store of profiles; a context manager that closes the file.

    Args:
        path: The file; created if it does not exist, unless it is opened read-only.
        read_only: Whether to open the file without changing it.

    Raises:
        StoreError: The file is not a store, is damaged, or cannot be opened.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        _refuse_foreign(self.path)
        # Without a log nobody writes: SQLite then needs neither locks nor files beside the store.
        self._immutable = read_only and not _has_log(self.path)
        self._before = _state(self.path)
        with self._explained("open"):
            self._connection = sqlite3.connect(self._address(), timeout=_PATIENCE, isolation_level=None, uri=read_only)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _address(self) -> str:
        if not self.read_only:
            return str(self.path)
        return f"file:{quote(str(self.path.absolute()))}?mode=ro" + "&immutable=1" * self._immutable

    def _prepare(self) -> None:
        connection = self._connection
        _limit(connection)
        self._started = time.monotonic()
        connection.set_progress_handler(self._is_overdue, 10_000)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")  # functions of a foreign schema are never called
        if self.read_only:
            connection.execute("BEGIN")  # every query sees the same runs
            self._check_format()
            self._check_content()
        else:
            with self._transaction():  # one transaction, so that a file is complete or empty
                self._check_format()
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN")  # another process may write meanwhile
            self._check_content()
            connection.execute("COMMIT")

    def _check_format(self) -> None:
        """Refuse what is not a store of this version; write the tables into an empty file."""
        connection = self._connection
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables and not application:
            if self.read_only:
                raise StoreError(f"{self.path} has no profile yet. Fill it with dsa-hw profile --out {self.path}.")
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            for name in _TABLES:
                self._count(name, 0)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        elif application != _APPLICATION:
            raise StoreError(f"{self.path} is an SQLite file of another program. Choose another file.")
        elif version != _VERSION:
            raise StoreError(
                f"{self.path} has version {version} of the store format; this program reads version {_VERSION}. "
                "Measure again into a new file: dsa-hw profile --model NAME --out new.sqlite."
            )
        elif unknown := _entries(connection) ^ _own_entries():
            kind, name, _ = min(unknown, key=str)
            raise StoreError(
                f"{self.path} is not a profile store: its {one_line(kind, 20)} {one_line(name, 60)!r} is missing, "
                "foreign or changed. Measure again into a new file with dsa-hw profile."
            )

    def _check_content(self) -> None:
        """Refuse a file in which a row is damaged or missing. A million runs take about eight seconds."""

        def refuse(reason: str) -> NoReturn:
            raise StoreError(
                f"{self.path} is damaged: {reason}. Restore it from a copy, or measure again into a new file: "
                "dsa-hw profile --model NAME --out new.sqlite."
            )

        connection = self._connection
        self._started = time.monotonic()
        (problem,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if problem != "ok":
            refuse(one_line(problem, 100))
        numbers: dict[str, int] = {}
        for table in (*_TABLES, "totals"):
            self._started = time.monotonic()
            numbers[table] = 0
            for *values, checksum in connection.execute(f"SELECT * FROM {table}"):
                if checksum != row_checksum(table, values):
                    refuse(f"the checksum of a row of {table} does not match")
                numbers[table] += 1
        totals = dict(connection.execute("SELECT name, number FROM totals"))
        for table in _TABLES:
            if numbers[table] != totals.get(table):
                refuse(f"{table} has {numbers[table]} rows; {one_line(totals.get(table), 20)} were written")

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._started > _QUERY_LIMIT

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None and self._immutable and self._before != _state(self.path):
            raise StoreError(f"{self.path} was written while it was read. Run the command again.")

    def close(self) -> None:
        """Merge the write-ahead log into the file and close it; a store that is only read stays as it is."""
        if self.read_only:
            self._connection.close()
            return
        with contextlib.suppress(sqlite3.Error):  # another process uses the file and will merge the log
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except (UnicodeDecodeError, OverflowError) as error:  # from values that are not what their column says
            raise StoreError(f"Cannot {action} {self.path}: it is damaged ({first_line(error)}).") from error
        except sqlite3.Error as error:
            text = str(error)
            code = getattr(error, "sqlite_errorname", "") or ""
            if "full" in text or code.startswith("SQLITE_FULL") or code == "SQLITE_IOERR_WRITE":
                reason = "the disk is full. Stored runs are intact. Free some space and run the same command again"
            elif "locked" in text or "busy" in text:
                reason = f"another process locked it for {_PATIENCE:.0f} s. Wait for it, or choose another --out"
            elif "malformed" in text or "not a database" in text or code.startswith("SQLITE_CORRUPT"):
                reason = "it is damaged or truncated. Restore it from a copy, or choose another --out"
            elif code == "SQLITE_INTERRUPT":
                reason = f"a query took more than {_QUERY_LIMIT:g} s. Measure again into a new file"
            elif self.read_only and ("readonly" in text or "unable to open" in text):
                reason = "it has a write-ahead log. Copy the store and its -wal file to a folder that can be written"
            elif "readonly" in text or "unable to open" in text:
                reason = "it cannot be written. Check the folder and its permissions"
            else:
                reason = "SQLite failed. Check the disk"
            raise StoreError(f"Cannot {action} {self.path}: {reason} ({one_line(text)}).") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        self._started = time.monotonic()
        with self._explained("write to"):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]], otherwise: str = "ABORT") -> None:
        """Write rows with their checksums; in a transaction. ``otherwise`` is what happens if a key is present."""
        if not rows:
            return
        marks = ", ".join("?" * (len(rows[0]) + 1))
        cursor = self._connection.executemany(
            f"INSERT OR {otherwise} INTO {table} VALUES ({marks})", [(*row, row_checksum(table, row)) for row in rows]
        )
        self._count(table, cursor.rowcount)

    def _count(self, table: str, more: int) -> None:
        """Change the number of rows of a table; in a transaction."""
        connection = self._connection
        (number,) = connection.execute("SELECT total(number) FROM totals WHERE name = ?", (table,)).fetchone()
        row = (table, int(number) + more)
        connection.execute("INSERT OR REPLACE INTO totals VALUES (?, ?, ?)", (*row, row_checksum("totals", row)))

    def _next(self, table: str) -> int:
        """Return the number of the next row of a table; in a transaction."""
        (last,) = self._connection.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()
        return int(last) + 1

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        self._started = time.monotonic()
        with self._explained("read"):
            return self._connection.execute(query, values).fetchall()

    def _json(self, text: Any, what: str) -> Any:
        """Return JSON of the file, within limits."""
        if not isinstance(text, str):
            self._refuse(what, text)
        return parse_json(text.encode(), f"{what} in {self.path}", error=StoreError)

    def _refuse(self, what: str, value: Any) -> NoReturn:
        raise StoreError(
            f"{self.path} has a wrong value: {what} {one_line(repr(value), 60)}. Restore it from a copy, or measure "
            "again."
        )

    # What is measured, and where -------------------------------------------------------------------------------------

    def add_environment(self, id: str, description: Mapping[str, str]) -> None:
        """Add an environment under its digest, unless it is present."""
        text = json.dumps(dict(description), sort_keys=True)
        with self._transaction():
            self._insert("environments", [(id, description.get("target", ""), text, time.time())], "IGNORE")

    def add_network(self, id: str, name: str, description: Mapping[str, Any]) -> None:
        """Add a network under its content hash, unless it is present.

        Args:
            id: The content hash.
            name: Name of the network.
            description: Names, sizes, fingerprint and input shapes.
        """
        text = json.dumps(dict(description), sort_keys=True)
        with self._transaction():
            self._insert("networks", [(id, name, text, time.time())], "IGNORE")

    def add_session(self, environment: str, command: str, load: Mapping[str, float]) -> int:
        """Begin a session of measuring.

        Args:
            environment: Digest of the environment.
            command: What is measured.
            load: The load of the machine.

        Returns:
            The number of the session.
        """
        with self._transaction():
            number = self._next("sessions")
            self._insert("sessions", [(number, environment, command, json.dumps(dict(load)), time.time())])
        return number

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
        integers = [[int(w) for w in row] for row in widths]
        wanted = [identity(network, values) for values in integers]
        with self._transaction() as connection:
            (position,) = connection.execute("SELECT count(*) FROM designs").fetchone()
            new = [(id, network, json.dumps(values), time.time()) for id, values in zip(wanted, integers, strict=True)]
            self._insert("configurations", new, "IGNORE")
            self._insert(
                "designs", [(network, environment, id, split, position + i) for i, id in enumerate(wanted)], "IGNORE"
            )
        return [c for c in self.design(network, environment) if c.id in wanted]

    def design(self, network: str, environment: str) -> list[StoredConfiguration]:
        """Return all configurations of a design, in the order in which they were drawn."""
        rows = self._rows(
            "SELECT c.id, c.widths, d.split FROM designs d JOIN configurations c ON c.id = d.configuration "
            "WHERE d.network = ? AND d.environment = ? ORDER BY d.position",
            (network, environment),
        )
        return [StoredConfiguration(str(id), self._widths(widths), self._split(split)) for id, widths, split in rows]

    def _widths(self, text: Any) -> tuple[int, ...]:
        found = self._json(text, "widths")
        if not isinstance(found, list) or not all(type(w) is int and 1 <= w <= 2**31 for w in found):
            self._refuse("widths", text)
        return tuple(found)

    def _split(self, split: Any) -> str:
        if split not in _SPLITS:
            self._refuse("split", split)
        return str(split)

    def environments_of(self, network: str, target: str) -> dict[str, dict[str, str]]:
        """Return the environments in which a network was measured on a target, oldest first."""
        rows = self._rows(
            "SELECT DISTINCT e.id, e.description FROM environments e JOIN designs d ON d.environment = e.id "
            "WHERE d.network = ? AND e.target = ? ORDER BY e.created",
            (network, target),
        )
        return {str(id): self._environment(description) for id, description in rows}

    def _environment(self, text: Any) -> dict[str, str]:
        found = self._json(text, "the description of an environment")
        if not isinstance(found, dict) or "target" not in found or not all(map(_is_line, found.values())):
            self._refuse("the description of an environment", text)
        return found

    # What was found --------------------------------------------------------------------------------------------------

    def add_samples(self, session: int, samples: Sequence[tuple[str, Samples]]) -> None:
        """Append raw runs of a session in one transaction.

        Args:
            session: Number of the session, from `add_session`.
            samples: Pairs of configuration and runs.
        """
        rows = [
            (int(session), configuration, int(k), float(s), float(b), float(a), extra)
            for configuration, part in samples
            for s, k, b, a, extra in zip(part.values, part.block, part.before, part.after, _extras(part), strict=True)
        ]
        with self._transaction():
            first = self._next("samples")
            self._insert("samples", [(first + i, *row) for i, row in enumerate(rows)])

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
        return {str(configuration): self._samples(runs) for configuration, runs in parts.items()}

    def _samples(self, runs: Sequence[tuple[Any, ...]]) -> Samples:
        session, block, *times, texts = zip(*runs, strict=True)
        numbers = []
        for what, column, absent in zip(
            ("the time", "the dense network's time before", "the dense network's time after"),
            times,
            (None, math.inf, math.inf),  # infinity: the dense network did not run before or after
            strict=True,
        ):
            if wrong := [v for v in column if type(v) is not float or not (_TINY <= v <= _ABSURD or v == absent)]:
                self._refuse(what, wrong[0])
            numbers.append(np.asarray(column, np.float64))
        for what, column in (("session", session), ("block", block)):
            if wrong := [v for v in column if type(v) is not int or not 0 <= v < 2**62]:
                self._refuse(what, wrong[0])
        notes = [self._note(text) if text is not None else {} for text in texts]
        extra = {
            name: np.asarray([note.get(name, np.nan) for note in notes], np.float64)
            for name in dict.fromkeys(key for note in notes for key in note)
        }
        middle, first, last = numbers
        return Samples(middle, first, last, np.asarray(block, np.int64), np.asarray(session, np.int64), extra)

    def _note(self, text: Any) -> dict[str, float]:
        found = self._json(text, "further values of a run")
        if not isinstance(found, dict) or not all(type(v) in (int, float) for v in found.values()):
            self._refuse("further values of a run", text)
        return found

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
        texts = json.dumps(dict(grid)), json.dumps([dict(e) for e in evidence])
        with self._transaction() as connection:
            key = (network, environment)
            before = connection.execute("DELETE FROM grids WHERE network = ? AND environment = ?", key).rowcount
            self._count("grids", -before)
            self._insert("grids", [(*key, *texts, time.time())])

    def grid(self, network: str, environment: str) -> tuple[dict[str, int], list[dict[str, Any]]] | None:
        """Return the grid and its evidence, or None."""
        rows = self._rows(
            "SELECT grid, evidence FROM grids WHERE network = ? AND environment = ?", (network, environment)
        )
        if not rows:
            return None
        steps, evidence = (self._json(text, "a grid") for text in rows[0])
        if not isinstance(steps, dict) or not all(type(v) is int and 1 <= v <= 2**20 for v in steps.values()):
            self._refuse("a grid", rows[0][0])
        if not isinstance(evidence, list) or not all(isinstance(e, dict) for e in evidence):
            self._refuse("the evidence of a grid", rows[0][1])
        return steps, evidence

    def profiles(self) -> list[tuple[str, str]]:
        """Return (network, environment) of every design in the file, the one that was measured last at the end.

        The last one is that of the session with the highest number. Clocks may have been set back.
        """
        rows = self._rows(
            "SELECT d.network, d.environment, coalesce(max(e.id), 0) AS last FROM designs d "
            "LEFT JOIN samples s ON s.configuration = d.configuration "
            "LEFT JOIN sessions e ON e.id = s.session AND e.environment = d.environment "
            "GROUP BY d.network, d.environment ORDER BY last, min(d.rowid)"
        )
        return [(str(network), str(environment)) for network, environment, _ in rows]

    def network(self, id: str) -> tuple[str, dict[str, Any]]:
        """Return name and description of a network."""
        rows = self._rows("SELECT name, description FROM networks WHERE id = ?", (id,))
        if not rows:
            raise StoreError(f"{self.path} has no network {id}.")
        name, text = rows[0]
        if not isinstance(text, str):
            self._refuse("the description of a network", text)
        if not _is_line(name):
            self._refuse("the name of a network", name)
        what = f"the description of network {one_line(id, 12)} in {self.path}"
        found = read_document(text.encode(), _NetworkDocument, what, error=StoreError)
        return str(name), json.loads(found.model_dump_json())

    def environment(self, id: str) -> dict[str, str]:
        """Return the description of an environment."""
        rows = self._rows("SELECT description FROM environments WHERE id = ?", (id,))
        if not rows:
            raise StoreError(f"{self.path} has no environment {id}.")
        return self._environment(rows[0][0])

    def table(self, name: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return columns and rows of one of the tables, without the checksums."""
        if name not in _TABLES:
            raise StoreError(unknown_name("table", name, _TABLES))
        self._started = time.monotonic()
        with self._explained("read"):
            cursor = self._connection.execute(f"SELECT * FROM {name}")
            return [c[0] for c in cursor.description[:-1]], [row[:-1] for row in cursor]


def _is_line(value: Any) -> bool:
    """Return whether a value is text that can be printed."""
    return isinstance(value, str) and value.isprintable()


def _extras(part: Samples) -> list[str | None]:
    """Return the extra values of each run as JSON; None where there are none."""
    if not part.extra:
        return [None] * len(part)
    rows = [{name: float(v[i]) for name, v in part.extra.items() if np.isfinite(v[i])} for i in range(len(part))]
    return [json.dumps(row) for row in rows]


def _limit(connection: sqlite3.Connection) -> None:
    """Set the limits that SQLite recommends for files from elsewhere (sqlite.org/security.html)."""
    for category, limit in (
        (sqlite3.SQLITE_LIMIT_LENGTH, 64 * 2**20),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 100_000),
        (sqlite3.SQLITE_LIMIT_COLUMN, 100),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 50),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 5),
        (sqlite3.SQLITE_LIMIT_VDBE_OP, 25_000),
        (sqlite3.SQLITE_LIMIT_FUNCTION_ARG, 8),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 10),
    ):
        connection.setlimit(category, limit)


def _entries(connection: sqlite3.Connection) -> set[tuple[str, str, str | None]]:
    """Return everything that the schema of a file defines."""
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {(str(kind), str(name), None if sql is None else " ".join(str(sql).split())) for kind, name, sql in rows}


@functools.cache
def _own_entries() -> set[tuple[str, str, str | None]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_SCHEMA)
        return _entries(connection)


def _has_log(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def _state(path: Path) -> tuple[object, ...] | None:
    """Return what changes when a store is written; None where there is none."""
    try:
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns, _has_log(path)
    except OSError:
        return None


def _refuse_foreign(path: Path) -> None:
    """Refuse files that SQLite would report as damaged (a text file) or empty (a truncated store)."""
    try:
        if path.is_dir():
            raise StoreError(f"{path} is a folder. Give a file, for example {path / 'profile.sqlite'}.")
        if not path.parent.is_dir():
            raise StoreError(f"The folder {path.parent} does not exist. Create it, or choose another --out.")
        if not path.exists():
            return
        if not path.is_file():
            raise StoreError(f"{path} is not a regular file.")
        if not path.stat().st_size:
            return
        if path.stat().st_size > _LARGEST:
            raise StoreError(f"{path} has more than {_LARGEST} bytes. Measure again into a new file.")
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
