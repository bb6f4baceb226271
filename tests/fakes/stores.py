"""What tests ask a store that another process writes."""

from __future__ import annotations

import sqlite3
from pathlib import Path


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
