"""A few hundred mutations of every file format: no raw traceback, no hang, no change that nobody notices."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _script() -> ModuleType:
    name = "benchmark_fuzz"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / "fuzz.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("name", list(_script().FORMATS))
def test_damaged_file_is_refused_or_read_as_it_was(name: str) -> None:
    cases = 300
    counts, faults = _script().fuzz(name, cases, seed=1)
    assert faults == {}
    assert sum(counts.values()) == cases
    assert counts["refused"] + counts["same"] > 0.1 * cases, "the fuzzer reaches the reader"


def test_fuzzer_notices_silent_changes_raw_errors_and_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz = _script()
    monkeypatch.setattr(fuzz, "_PATIENCE", 0.05)

    def read(path: Path) -> str:
        text = path.read_bytes()
        if sum(text) % 3 == 0:
            return text.decode("latin-1")
        if sum(text) % 3 == 1:
            raise KeyError("id")
        while True:
            pass

    form = fuzz.Format("bad", lambda path: path.write_text("abc" * 40), read, sealed=True)
    monkeypatch.setitem(fuzz.FORMATS, "bad", form)
    counts, faults = fuzz.fuzz("bad", 60)
    assert counts["silent"] > 0
    assert counts["raw"] > 0
    assert counts["hang"] > 0
    assert any(place.startswith("benchmarks/test_fuzz.py") and "KeyError" in place for place in faults)


def test_edited_store_is_refused_unless_its_checksums_are_computed_again(tmp_path: Path) -> None:
    fuzz = _script()
    form = fuzz.FORMATS["store"]
    path = tmp_path / form.file
    form.make(path)
    original, expected = path.read_bytes(), fuzz.fingerprint(form.read(path))
    kinds: dict[str, set[str]] = {"edit": set(), "tamper": set()}
    for number in range(50):
        for how, found in kinds.items():
            path.write_bytes(getattr(form, how)(original, fuzz.Random(number), tmp_path))
            found.add(fuzz._judge(form, path, expected, how == "edit").kind)
    assert kinds["tamper"] <= {"refused", "same"}
    assert kinds["edit"] == {"refused", "same", "changed"}, "with new checksums the values are reached"


def test_cases_can_be_repeated_and_continued() -> None:
    fuzz = _script()
    whole, _ = fuzz.fuzz("technology", 60, seed=3)
    parts = [fuzz.fuzz("technology", 30, seed=3, first=first)[0] for first in (0, 30)]
    assert dict(whole) == dict(parts[0] + parts[1]) | {kind: 0 for kind in whole if not whole[kind]}
