"""The store: SIGKILL, two writers, a full disk, damaged and foreign files, several environments."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from dsa_hw.errors import StoreError
from profilers import load_profile, load_tables
from profilers.measuring.measurement import Samples
from profilers.measuring.rules import MeasuringRules
from profilers.storage.store import Store, identity

ABOUT = {"names": ["a", "b"], "sizes": [8, 16], "fingerprint": "f", "inputs": []}


def filled(path: Path, environment: str = "e", visits: int = 20, hidden: float = 0.0) -> Store:
    store = Store(path)
    store.add_environment(environment, {"target": "t", "version": environment})
    store.add_network("n", "net", ABOUT)
    (dense,) = store.add_design("n", environment, [[8, 16]], "dense")
    store.add_design("n", environment, [[4, 8]], "holdout")
    session = store.add_session(environment, "test", {"load1": 0.5}, reference=5e-4)
    rng = np.random.default_rng(0)
    runs = [
        (dense.id, Samples.of_visit(1e-2 * (1 + 0.003 * rng.random(2)), v, 5e-4, 5e-4, 0.0 if v % 2 else float("nan")))
        for v in range(visits)
    ]
    store.add_samples(session, runs, reference=5e-4, hidden={dense.id: hidden})
    return store


def test_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    assert [p.name for p in tmp_path.glob("p.sqlite*")] == ["p.sqlite"], "closing leaves one file"
    tables = load_tables(path)
    profile, table = tables.profile, tables.profile.table
    assert table[["a", "b"]].to_numpy().tolist() == [[8, 16]]
    assert table.loc[0, "split"] == "dense"
    assert table.loc[0, "runs"] == 40
    assert table.loc[0, "low"] <= table.loc[0, "seconds"] <= table.loc[0, "high"]
    assert (profile.target, profile.names, profile.sizes) == ("t", ("a", "b"), (8, 16))
    assert (profile.network, profile.fingerprint, profile.quantity, profile.unit) == ("net", "f", "latency", "s")
    assert profile.environment == {"target": "t", "version": "e"}
    assert len(tables.samples) == 40
    assert tables.samples["wait"].isna().sum() == 20
    assert load_profile(path, statistic="p90").table.loc[0, "seconds"] > table.loc[0, "seconds"]


def test_equal_content_is_stored_once(tmp_path: Path) -> None:
    filled(tmp_path / "p.sqlite").close()
    with filled(tmp_path / "p.sqlite") as store:
        assert len(store.design("n", "e")) == 2
        again = store.add_design("n", "e", [[4, 8]], "train")
        assert [c.split for c in again] == ["holdout"], "a hold-out configuration never becomes a training one"


def test_lower_reference_applies_to_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with filled(path) as store:
        assert len(load_profile(path)) == 1
        store.add_session("e", "faster", {}, reference=4e-4)
        assert store.reference("e") == 4e-4
        store.add_session("e", "slower", {}, reference=6e-4)
        assert store.reference("e") == 4e-4
    assert len(load_profile(path)) == 0


@pytest.mark.parametrize("table", ["reference", "inflation"])
def test_runs_without_reference_or_inflation_are_not_trusted(tmp_path: Path, table: str) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    assert len(load_profile(path)) == 1
    with sqlite3.connect(path) as connection:
        connection.execute(f"DELETE FROM {table}")
    for lenient in (MeasuringRules(), MeasuringRules(tolerance=1e6, worst=1e6, waiting=1e6)):
        tables = load_tables(path, rules=lenient)
        assert len(tables.samples) == 40
        assert len(tables.profile) == 0
        assert tables.profile.untrusted == 1


def test_runs_are_judged_by_the_hidden_inflation_of_their_session(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with filled(path, hidden=0.08) as store:
        (other,) = (c for c in store.design("n", "e") if c.split == "holdout")
        dense = identity("n", [8, 16])
        assert len(load_profile(path)) == 0, "session 1 was inflated by 8%"
        session = store.add_session("e", "quiet", {}, reference=5e-4)
        quiet = [Samples.of_visit(np.asarray([5e-3, 5.001e-3]), v, 5e-4, 5e-4, 0.0) for v in range(20)]
        store.add_samples(session, [(other.id, s) for s in quiet], reference=5e-4, hidden={other.id: 0.0})
        assert load_profile(path).table["split"].tolist() == ["holdout"], (
            "a quiet session does not clear an earlier one"
        )
        again = [Samples.of_visit(np.asarray([9e-3, 9.001e-3]), v, 5e-4, 5e-4, 0.0) for v in range(20)]
        store.add_samples(session, [(dense, s) for s in again], reference=5e-4, hidden={dense: 0.001})
        row = load_profile(path).table.iloc[0]
        assert (row["split"], row["runs"]) == ("dense", 40), "of the dense network, only the quiet session counts"
        assert row["seconds"] == pytest.approx(9e-3, rel=1e-3)
        assert load_profile(path, rules=MeasuringRules.allowing(0.1)).table.iloc[0]["runs"] == 80, (
            "with 8% allowed, all runs count"
        )


def test_environments_are_kept_separately(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, "e1").close()
    filled(path, "e2").close()
    tables = load_tables(path)
    assert [key[2] for key in tables.profiles] == ["e1", "e2"]
    assert all(len(p) == 1 and p.table.loc[0, "runs"] == 40 for p in tables.profiles.values())


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


def test_other_store_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="version 99"):
        Store(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, visits=200).close()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(StoreError, match=r"truncated|damaged"):
        Store(path)


def test_overwritten_pages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    filled(path, visits=400).close()
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
        session = store.add_session("e", "test", {}, reference=5e-4)
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then says what a full disk says
        id = identity("n", [8, 16])
        much = [(id, Samples.of_visit(np.full(50, 1e-2), v, 5e-4, 5e-4, 0.0)) for v in range(500)]
        with pytest.raises(StoreError, match=r"disk is full.*same command"):
            store.add_samples(session, much, reference=5e-4, hidden={id: 0.0})
    tables = load_tables(path)
    assert len(tables.samples) == 40
    with Store(path) as store:
        store.add_session("e", "after", {}, reference=5e-4)


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
        session = store.add_session("e", "writer", {}, reference=5e-4)
        visit = 0
        while True:
            runs = Samples.of_visit(np.full(10, 1e-2), visit, 5e-4, 5e-4, 0.0)
            store.add_samples(session, [(ID, runs)], reference=5e-4, hidden={ID: 0.0})
            os.write(pipe, b".")  # committed
            visit += 1
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
            "SELECT count(*) FROM (SELECT 1 FROM samples GROUP BY session, visit HAVING count(*) != 10)"
        ).fetchone()
        (unjudged,) = store._connection.execute(
            "SELECT count(*) FROM samples s LEFT JOIN inflation i ON i.session = s.session "
            "AND i.configuration = s.configuration WHERE i.hidden IS NULL"
        ).fetchone()
        assert store.reference("e") == 5e-4
    assert unjudged == 0
    assert torn == 0, "a visit is there whole or not at all"
    assert 10 * committed <= runs <= 10 * (committed + 40)


def test_two_processes_write_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    processes = [_writer(path, 8, seed) for seed in (2, 3)]
    committed = sum(int(p.communicate(timeout=120)[0]) for p in processes)
    assert all(p.returncode == 0 for p in processes)
    with Store(path) as store:
        (runs,) = store._connection.execute("SELECT count(*) FROM samples").fetchone()
        (torn,) = store._connection.execute(
            "SELECT count(*) FROM (SELECT 1 FROM samples GROUP BY session, visit HAVING count(*) != 10)"
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
