"""The store: SIGKILL, two writers, a full disk, damaged and foreign files, several environments."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from dsa_hw.errors import StoreError
from profilers import load_profile, load_tables
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Sitting, SittingFile, sitting_key
from profilers.measuring.statistics import Estimate
from profilers.storage import store as module
from profilers.storage.store import Store, identity
from tests.fakes.stores import sealed_again

ABOUT = {"names": ["a", "b"], "sizes": [8, 16], "fingerprint": "f", "inputs": []}
DENSE = identity("n", [8, 16])
HALF = identity("n", [4, 8])


def some_runs(seconds: float, blocks: int, rng: np.random.Generator, dense: float = 1e-2) -> list[Samples]:
    """Runs in blocks of four, each beside two of the dense network."""
    values, before, after = (s * (1 + 0.003 * rng.random((blocks, 4))) for s in (seconds, dense, dense))
    return [Samples.of(values[b], before[b], after[b], b) for b in range(blocks)]


def filled(path: Path, environment: str = "e", blocks: int = 10) -> Store:
    """A store with a session in which the dense network was measured, beside its anchor and another network."""
    store = Store(path)
    store.add_environment(environment, {"target": "t", "version": environment})
    store.add_network("n", "net", ABOUT)
    store.add_design("n", environment, [[8, 16]], "dense")
    store.add_design("n", environment, [[4, 8]], "holdout")
    store.add_design("n", environment, [[2, 2]], "anchor")
    session = store.add_session(environment, "test", {"load1": 0.5})
    rng = np.random.default_rng(0)
    wanted = ((DENSE, 1e-2), (HALF, 4e-3), (identity("n", [2, 2]), 2e-3))
    store.add_samples(session, [(id, part) for id, seconds in wanted for part in some_runs(seconds, blocks, rng)])
    return store


def test_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    assert [p.name for p in tmp_path.glob("p.sqlite*")] == ["p.sqlite"], "closing leaves one file"
    tables = load_tables(path)
    profile, table = tables.profile, tables.profile.table
    assert list(table.columns) == ["a", "b", "seconds", "low", "high", "error", "split", "runs"]
    assert table[["a", "b"]].to_numpy().tolist() == [[8, 16], [4, 8]], "the anchor is not part of the profile"
    assert table["split"].tolist() == ["dense", "holdout"]
    assert table["runs"].tolist() == [40, 40]
    assert table["seconds"].tolist() == pytest.approx([1e-2, 4e-3], rel=0.005)
    assert (table["low"] < table["seconds"]).all()
    assert (table["seconds"] < table["high"]).all()
    assert table["error"].iloc[0] == 0.0, "the dense network is the unit of the ratios"
    assert 0 < table["error"].iloc[1] < (table["high"] / table["seconds"] - 1).iloc[1]
    assert (profile.target, profile.names, profile.sizes) == ("t", ("a", "b"), (8, 16))
    assert (profile.network, profile.fingerprint, profile.quantity, profile.unit) == ("net", "f", "latency", "s")
    assert profile.environment == {"target": "t", "version": "e"}
    assert len(tables.samples) == 120
    tail = load_profile(path, statistic="p90").table["seconds"]
    assert (tail > table["seconds"]).all()


def test_raw_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    with filled(tmp_path / "p.sqlite") as store:
        session = store.add_session("e", "again", {})
        before, after = np.asarray([math.inf, 1.0]), np.asarray([2.0, math.inf])
        edge = Samples.of(np.asarray([1.0, 2.0]), before, after, 7, session)
        noted = Samples.of(np.asarray([3.0]), 1.0, 2.0, 8, session, {"watts": np.asarray([9.0])})
        store.add_samples(session, [(DENSE, edge), (DENSE, noted)])
        found = store.samples("e", "n")[DENSE].of_sitting(session)
    expected = Samples.joined([edge, noted])
    for name in ("values", "before", "after", "block", "sitting"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    assert np.isnan(found.extra["watts"][:2]).all()
    assert found.extra["watts"][2] == 9.0


def test_sittings_of_the_user_determine_the_intervals(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    before = load_profile(path)
    for i in range(8):  # ratios scatter by about 15% between sittings of this network here
        sitting = Sitting(Estimate(-1.0 + 0.15 * (-1) ** i, 1e-6), Estimate(-4.6, 1e-6), 3600.0 * i)
        SittingFile().add(sitting_key("e", "f", [], "quiet"), sitting)
    after = load_profile(path)
    assert after.interval > 3 * before.interval
    assert after.table["seconds"].tolist() == before.table["seconds"].tolist()
    assert load_profile(path, statistic="median").interval < 2 * before.interval, "of that statistic only"


def test_required_precision_leaves_out_what_is_less_precise(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    found = load_profile(path, rules=MeasuringRules(require=1e-4))
    assert len(found) == 0
    assert found.untrusted == 3


def test_runs_without_those_of_the_dense_network_give_no_value(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM samples WHERE configuration = ?", (DENSE,))
    sealed_again(path)
    assert len(load_profile(path)) == 0


def test_second_session_is_a_second_sitting(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    first = load_profile(path)
    filled(path).close()
    second = load_profile(path)
    assert (second.table["runs"] == 2 * first.table["runs"]).all()
    widths = [(p.table["high"] - p.table["low"]).to_numpy() for p in (first, second)]
    assert (widths[1] < 0.8 * widths[0]).all(), "the mean of two sittings is known better"


def test_equal_content_is_stored_once(tmp_path: Path) -> None:
    filled(tmp_path / "p.sqlite").close()
    with filled(tmp_path / "p.sqlite") as store:
        assert len(store.design("n", "e")) == 3
        again = store.add_design("n", "e", [[4, 8]], "train")
        assert [c.split for c in again] == ["holdout"], "a hold-out configuration never becomes a training one"


def test_environments_are_kept_separately(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, "e1").close()
    filled(path, "e2").close()
    tables = load_tables(path)
    assert [key[2] for key in tables.profiles] == ["e1", "e2"]
    assert all(p.table["runs"].tolist() == [40, 40] for p in tables.profiles.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello, I am a text file, and quite a long one at that" * 10, "not a profile store"),
        (b"SQLite format 3\x00", "truncated"),
        (b"\x80\x04\x95pickle", "not a profile store"),
    ],
)
def test_foreign_files_are_refused_and_not_changed(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=message):
        Store(path)
    assert path.read_bytes() == content


def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [3, 99])
def test_other_store_version_is_refused_with_the_command_for_a_new_one(tmp_path: Path, version: int) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (4,)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(StoreError, match=rf"version {version} .*version 4.*dsa-hw profile --model NAME --out new"):
        Store(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, blocks=100).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(StoreError, match=r"truncated|damaged"):
        Store(path)


def test_overwritten_pages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, blocks=200).close()
    content = bytearray(path.read_bytes())
    content[8192:20480] = b"\xff" * 12288
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged|truncated"):
        Store(path)


def test_missing_folders_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        Store(tmp_path / "no" / "p.sqlite")
    with pytest.raises(StoreError, match="is a folder"):
        Store(tmp_path)
    with pytest.raises(StoreError, match=r"profilers\.latency"):
        load_tables(tmp_path / "p.sqlite")
    Store(tmp_path / "p.sqlite").close()
    with pytest.raises(StoreError, match="no profile yet"):
        load_tables(tmp_path / "p.sqlite")


def test_full_disk_is_reported_and_the_file_stays_intact(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with filled(path) as store:
        session = store.add_session("e", "test", {})
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then says what a full disk says
        much = [(DENSE, Samples.of(np.full(50, 1e-2), 1e-2, 1e-2, block)) for block in range(500)]
        with pytest.raises(StoreError, match=r"disk is full.*same command"):
            store.add_samples(session, much)
    tables = load_tables(path)
    assert len(tables.samples) == 120
    with Store(path) as store:
        store.add_session("e", "after", {})


_WRITER = """
    import os, random, signal, sys, time
    import numpy as np
    from profilers.measuring.measurement import Samples
    from profilers.storage.store import Store, identity
    path, children, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    ID = identity("n", [8, 16])
    def write(pipe):
        store = Store(path)
        store.add_environment("e", {"target": "t"})
        store.add_network("n", "net", {"names": ["a", "b"], "sizes": [8, 16], "fingerprint": "f", "inputs": []})
        store.add_design("n", "e", [[8, 16]], "dense")
        session = store.add_session("e", "writer", {})
        block = 0
        while True:
            store.add_samples(session, [(ID, Samples.of(np.full(10, 1e-2), 1e-2, 1e-2, block))])
            os.write(pipe, b".")  # committed
            block += 1
    rng = random.Random(seed)
    committed = 0
    for _ in range(children):
        read, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            write(end)
        os.close(end)
        time.sleep(rng.uniform(0.001, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while chunk := os.read(read, 65536):
            committed += len(chunk)
        os.close(read)
        if os.path.exists(path):
            Store(path).close()  # must open, whatever moment the child died at
    print(committed)
"""


def _writer(path: Path, children: int, seed: int) -> subprocess.Popen[str]:
    code = textwrap.dedent(_WRITER)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(children), str(seed)], stdout=subprocess.PIPE, text=True
    )


def test_sigkill_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    process = _writer(path, 40, 1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    committed = int(output)
    assert committed > 0
    with Store(path) as store:
        (problem,) = store._connection.execute("PRAGMA integrity_check").fetchone()
        assert problem == "ok"
        (runs,) = store._connection.execute("SELECT count(*) FROM samples").fetchone()
        (torn,) = store._connection.execute(
            "SELECT count(*) FROM (SELECT 1 FROM samples GROUP BY session, block HAVING count(*) != 10)"
        ).fetchone()
    assert torn == 0, "a round is there whole or not at all"
    assert 10 * committed <= runs <= 10 * (committed + 40)
    found = load_profile(path).table
    assert found["runs"].tolist() == [runs]
    assert found["seconds"].tolist() == pytest.approx([1e-2])


def test_two_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    processes = [_writer(path, 8, seed) for seed in (2, 3)]
    committed = sum(int(p.communicate(timeout=120)[0]) for p in processes)
    assert all(p.returncode == 0 for p in processes)
    with Store(path) as store:
        (runs,) = store._connection.execute("SELECT count(*) FROM samples").fetchone()
        (torn,) = store._connection.execute(
            "SELECT count(*) FROM (SELECT 1 FROM samples GROUP BY session, block HAVING count(*) != 10)"
        ).fetchone()
    assert torn == 0
    assert 10 * committed <= runs <= 10 * (committed + 16)


def test_copy_without_the_log_opens(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    assert load_profile(copy).table.equals(load_profile(path).table)


def test_store_contains_no_code(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    connection = sqlite3.connect(path)
    kinds = {kind for (kind,) in connection.execute("SELECT DISTINCT type FROM sqlite_master")}
    texts = [row[0] for row in connection.execute("SELECT description FROM networks")]
    connection.close()
    assert kinds <= {"table", "index"}
    assert [json.loads(t) for t in texts] == [ABOUT]


def _hash(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_reading_changes_no_byte_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    before = _hash(tmp_path)
    load_tables(path)
    load_profile(path)
    assert _hash(tmp_path) == before
    with Store(path, read_only=True) as store, pytest.raises(StoreError, match="Cannot write to"):
        store.add_session("e", "not allowed", {})
    assert _hash(tmp_path) == before


def test_store_on_a_read_only_folder_is_read(tmp_path: Path) -> None:
    """In a process without the rights of root, which read-only permissions do not stop."""
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "folder"
        folder.mkdir()
        filled(folder / "p.sqlite").close()
        os.chmod(outer, 0o755)
        (folder / "p.sqlite").chmod(0o444)
        folder.chmod(0o555)
        code = (
            "import os, sys\nfrom profilers.storage.store import Store\n"
            "from profilers.storage.tables import network_names\n"
            "os.getuid() or (os.setgid(65534), os.setuid(65534))\n"
            "with Store(sys.argv[1], read_only=True) as store: print(store.profiles())\n"
            "print(len(network_names(sys.argv[1])))  # as dsa-hw fit reads it\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(folder / "p.sqlite")], capture_output=True, text=True)
        folder.chmod(0o755)
        assert done.stdout == "[('n', 'e')]\n1\n", done.stderr


def test_a_store_that_is_being_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    writer = filled(path)  # not closed: the runs are in the log
    assert load_profile(path).table["runs"].tolist() == [40, 40]
    writer.add_session("e", "more", {})
    writer.close()
    assert load_profile(path).table["runs"].tolist() == [40, 40]


def test_a_store_that_was_written_meanwhile_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()

    def read() -> None:
        with Store(path, read_only=True) as reader:
            reader.profiles()
            with Store(path) as writer:
                writer.add_session("e", "meanwhile", {})

    with pytest.raises(StoreError, match="written while it was read"):
        read()


_ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


@pytest.mark.parametrize(
    "statements",
    [
        [
            "DROP TABLE grids",
            f"CREATE VIEW grids AS {_ENDLESS} SELECT x network, x environment, x grid, x evidence, x created FROM c",
        ],
        ["CREATE VIEW more AS SELECT 1"],
        ["CREATE TRIGGER t AFTER INSERT ON sessions BEGIN DELETE FROM samples; END"],
        ["CREATE TABLE more (x)"],
        ["CREATE INDEX more ON samples (seconds)"],
        ["ALTER TABLE samples ADD COLUMN more"],
        ["DROP INDEX samples_by_configuration"],
        ["DROP TABLE grids"],
        ["CREATE VIRTUAL TABLE more USING rtree(id, a, b)"],
    ],
    ids=lambda s: s[-1][:24],
)  # fmt: skip
@pytest.mark.parametrize("read_only", [True, False])
def test_foreign_schema_is_refused_at_once(tmp_path: Path, statements: list[str], read_only: bool) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with pytest.raises(StoreError, match="missing, foreign or changed") as caught:
        Store(path, read_only=read_only)
    assert "\n" not in str(caught.value)


def test_a_query_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    with Store(path, read_only=True) as store:
        monkeypatch.setattr(module, "_QUERY_LIMIT", 0.05)
        with pytest.raises(StoreError, match=r"more than 0\.05 s"):
            store._rows(f"{_ENDLESS} SELECT count(*) FROM c")


def test_an_oversized_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    monkeypatch.setattr(module, "_LARGEST", 1000)
    with pytest.raises(StoreError, match="more than 1000 bytes"):
        load_profile(path)


@pytest.mark.parametrize(
    ("table", "column", "values"),
    [
        ("samples", "seconds", [-1.0, 0.0, 1e-320, 1e300, math.inf, "abc", b"\x00", b"\xff\xfe"]),
        ("samples", "dense_before", [-1.0, 1e-320, 1e300, "abc", b"x"]),
        ("samples", "dense_after", [0.0, 1e-320, 1e300, "abc"]),
        ("samples", "block", ["q", -1, 1.5, b"x"]),
        ("samples", "extra", ["{", "[1]", '{"a": "b"}', '{"a": NaN}', "[" * 10_000, 5, b"{}"]),
        ("configurations", "widths", ["x", "[0]", "{}", "[1.5, 2]", "[1]", "[9, 16]", "[8, 16, 1]", "[true, 1]", b""]),
        ("designs", "split", ["other", 5]),
        ("networks", "description", ["{", "[]", "{}", "null", '{"names": 5}', b"{}"]),
        ("networks", "description", [json.dumps({**ABOUT, "sizes": [8]}), json.dumps({**ABOUT, "sizes": [8, "16"]})]),
        ("networks", "description", [json.dumps({**ABOUT, "inputs": [5]}), json.dumps({**ABOUT, "sizes": [8, 0]})]),
        ("environments", "description", ["{", "[]", "{}", "null", '{"target": 5}', b"{}"]),
        ("grids", "grid", ["x", "[]", '{"a": 0}', '{"a": "8"}', '{"a": 1.5}', '{"a": true}']),
        ("grids", "evidence", ["x", "{}", "[5]"]),
    ],
)  # fmt: skip
def test_wrong_values_are_one_typed_line(tmp_path: Path, table: str, column: str, values: list[object]) -> None:
    path = tmp_path / "p.sqlite"
    with filled(path) as store:
        store.set_grid("n", "e", {"a": 8}, [])
    assert len(load_profile(path)) == 2
    whole = path.read_bytes()
    for value in values:
        path.write_bytes(whole)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
            connection.commit()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with pytest.raises(StoreError, match="is damaged: "):
            load_profile(path)
        sealed_again(path)
        with pytest.raises(StoreError) as caught:
            load_profile(path)
        assert "\n" not in str(caught.value)
        assert "checksum" not in str(caught.value), "what a stranger sealed is checked value by value"
        assert len(str(caught.value)) < 600


def _all_columns() -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(module._SCHEMA)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [(t, row[1]) for t in tables for row in connection.execute(f"PRAGMA table_info({t})")]


@pytest.mark.parametrize(("table", "column"), _all_columns())
def test_every_value_is_under_a_checksum(tmp_path: Path, table: str, column: str) -> None:
    path = tmp_path / "p.sqlite"
    with filled(path, blocks=2) as store:
        store.set_grid("n", "e", {"a": 8}, [])
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        (kind,) = connection.execute(f"SELECT typeof({column}) FROM {table}").fetchone()
        other = {"text": "other", "null": "{}", "blob": b"12345678"}.get(kind, 12345)
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT max(rowid) FROM {table})", (other,))
    for read_only in (True, False):
        with pytest.raises(
            StoreError, match=rf"is damaged: the checksum of a row of {table} .*measure again"
        ) as caught:
            Store(path, read_only=read_only)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("table", ["environments", "networks", "configurations", "designs", "sessions", "samples"])
def test_rows_cannot_be_missing_or_exchanged(tmp_path: Path, table: str) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, "e1").close()
    with filled(path, "e2") as store:
        store.add_network("other", "another", ABOUT)
    whole = path.read_bytes()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    with pytest.raises(StoreError, match=rf"is damaged: {table} has \d+ rows; \d+ were written"):
        load_profile(path)
    path.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        key = "configuration" if table == "designs" else "id"
        first, second = (
            connection.execute(f"SELECT rowid, {key} FROM {table} ORDER BY rowid LIMIT 1 OFFSET {n}").fetchone()
            for n in (0, 1)
        )
        free = -1 if isinstance(first[1], int) else "free"
        for old, new in ((first, free), (second, first[1]), ((-1 if free == -1 else first[0], 0), second[1])):
            connection.execute(f"UPDATE {table} SET {key} = ? WHERE rowid = ?", (new, old[0]))
    with pytest.raises(StoreError, match=rf"is damaged: the checksum of a row of {table} "):
        load_profile(path)


def test_damaged_index_is_noticed(tmp_path: Path) -> None:
    """A query by the index would miss runs, although every row is intact."""
    path = tmp_path / "p.sqlite"
    filled(path).close()
    content = bytearray(path.read_bytes())
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'samples_by_configuration'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    pages = [i for i in range(0, len(content), size) if content[i] in (2, 10) or i == (page - 1) * size]
    changed = 0
    for start in pages:
        place = content.find(HALF.encode(), start, start + size)
        if place >= 0:
            content[place : place + 4] = b"zzzz"
            path.write_bytes(content)
            with pytest.raises(StoreError, match="is damaged"):
                load_profile(path)
            changed += 1
            content[place : place + 4] = HALF[:4].encode()
    assert changed


def test_path_that_is_none_is_refused_in_one_line() -> None:
    for wrong in (5, None, b"p.sqlite", ["p.sqlite"]):
        with pytest.raises(StoreError, match=r"`path` must be the path of a store.*; got"):
            load_profile(wrong)  # type: ignore[arg-type]


def test_last_profile_is_that_of_the_last_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network A, then B, then A again, in one environment; and then with the clock set back."""
    path = tmp_path / "p.sqlite"
    rng = np.random.default_rng(0)

    def measure(store: Store, network: str, environment: str = "e") -> None:
        store.add_environment(environment, {"target": f"runtime/cpu {environment}"})
        store.add_network(network, f"net {network}", {**ABOUT, "fingerprint": network})
        store.add_design(network, environment, [[8, 16]], "dense")
        session = store.add_session(environment, "test", {})
        store.add_samples(session, [(identity(network, [8, 16]), part) for part in some_runs(1e-2, 3, rng)])

    with Store(path) as store:
        for network in ("a", "b", "a"):
            measure(store, network)
        assert store.profiles()[-1] == ("a", "e")
        monkeypatch.setattr(module.time, "time", lambda: 0.0)
        measure(store, "b", "f")
        measure(store, "b")
        assert store.profiles() == [("a", "e"), ("b", "f"), ("b", "e")]
    assert load_profile(path).network == "net b"
    assert load_profile(path, network="net a").network == "net a"
    assert load_profile(path, target="runtime/cpu f").target == "runtime/cpu f"
    assert load_profile(path, target="runtime/cpu").target == "runtime/cpu e"
    with pytest.raises(StoreError, match=r"no profile of net a on runtime/cpu f\. It has: net a on runtime/cpu e"):
        load_profile(path, network="net a", target="runtime/cpu f")
