"""References of the control workload on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from profilers.measuring.reference import ReferenceFile


def test_damaged_reference_file_is_reported_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "references.json"
    path.write_text('{"a": {"seconds"')
    references = ReferenceFile(path)
    assert references.get("a") is None
    assert "Cannot read" in caplog.text
    references.lower("a", 0.5)
    assert ReferenceFile(path).get("a") == references.get("a")
    found = references.get("a")
    assert found is not None
    assert found.seconds == 0.5


def test_reference_that_cannot_be_kept_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    references = ReferenceFile(tmp_path / "file" / "references.json")
    references.lower("a", 0.5)
    assert "DSA_HW_CACHE" in caplog.text
    assert references.lower("a", 0.7).seconds == 0.5
