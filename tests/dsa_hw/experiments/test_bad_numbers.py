"""A comparison or a sweep of a network with NaN or infinite weights ends before anything is trained or measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import budgets
from dsa_hw.errors import ModelError
from dsa_hw.experiments.compare import compare
from dsa_hw.experiments.sweep import sweep
from tests.fakes.formula import Formula, Net


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("run", "method"), [(compare, {"methods": "uniform"}), (sweep, {"method": "uniform"})], ids=["compare", "sweep"]
)
def test_bad_weights_are_refused(
    run: Any, method: dict[str, str], bad: float, net: Net, formula: Formula, tmp_path: Path
) -> None:
    net.three.weight.data[0, 0, 0, 0] = bad
    with pytest.raises(ModelError, match=r"three\.weight of the dense network has"):
        run(net, budgets=[budgets.FlopsBudget("50%")], data="digits", target=formula, out=tmp_path / "out", **method)
    assert not (tmp_path / "out" / "rows.jsonl").exists()
