"""What tests ask a store that another process writes, and how they change one."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from profilers.storage.store import row_checksum


def stored_runs(path: Path) -> int:
    """Return the number of runs in a store; 0 where there is none yet."""
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
    try:
        return int(connection.execute("SELECT count(*) FROM samples").fetchone()[0])
    except sqlite3.OperationalError:  # not created yet
        return 0
    finally:
        connection.close()


def sealed_again(path: Path) -> None:
    """Compute the checksums and numbers of rows of a store again, as somebody who forges one would."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name = 'totals'")
        for (name,) in names.fetchall():
            rows = connection.execute(f"SELECT rowid, * FROM {name}").fetchall()
            connection.executemany(
                f"UPDATE {name} SET checksum = ? WHERE rowid = ?",
                [(row_checksum(name, values), rowid) for rowid, *values, _ in rows],
            )
            connection.execute("UPDATE totals SET number = ? WHERE name = ?", (len(rows), name))
