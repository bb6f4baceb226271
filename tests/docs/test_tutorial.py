"""docs/guide/tutorial.md is executed, block by block, in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import profilers

TUTORIAL = Path(__file__).parents[2] / "docs" / "guide" / "tutorial.md"


@pytest.mark.slow
@pytest.mark.timeout(900)  # 76 s alone, near 300 s beside two trainings
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rules that pass on any machine: this is about whether the lines work, not about how fast the machine is.
    rules = profilers.MeasuringRules(precision=0.05, worst=1e6, tolerance=1e6, waiting=1e6, visit=1e-3, warm_in=1e-4)
    monkeypatch.setattr(profilers.MeasuringRules, "allowing", classmethod(lambda cls, share: rules))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"tutorial.md, block {number}", "exec"), names)
    assert float(names["dense_accuracy"]) > 0.5  # type: ignore[arg-type]
    assert (tmp_path / "small.onnx").stat().st_size > 10_000
    assert (tmp_path / "latency" / "profile.sqlite").exists()
