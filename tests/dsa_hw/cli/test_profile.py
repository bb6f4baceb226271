"""``dsa-hw profile``, on a target whose times are a formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.fakes.digits  # noqa: F401  (registers the target)
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.digits import formula, net
from tests.fakes.outputs import printed_json

WORDS = ["profile", "--model", "tests.fakes.digits:net", "--input", "1x3x32x32", "--runtime", "formula"]
WORDS += ["--samples", "6", "--holdout", "2"]


def test_summary_and_json_have_the_latency_of_the_dense_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.sqlite"
    dense = formula(net(), (torch.zeros(1, 3, 32, 32),))
    assert main([*WORDS, "--out", str(out)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert rows["network"] == "tests.fakes.digits:net, 3 channel groups"
    assert rows["target"].startswith("formula/cpu")
    assert rows["estimated"].endswith("a formula")
    assert rows["dense"].startswith(f"{1e3 * dense:.4g} ms")
    assert rows["grid"] == "4 (3 groups)"
    assert rows["store"] == str(out)
    assert last == f"next: dsa-hw fit {out}"
    assert main([*WORDS, "--out", str(out), "--json"]) == 0
    content = printed_json(capsys, "profile")
    assert set(content) == documented_keys("profile")
    splits = [row["split"] for row in content["configurations"]]
    assert [splits.count(name) for name in ("dense", "holdout")] == [1, 2]
    assert content["configurations"][splits.index("dense")]["seconds"] == pytest.approx(dense)


def test_missing_device_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert main(["profile", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "cuda" in error.lower()
    assert error.count("\n") == 1
