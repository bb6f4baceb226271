"""``dsa-hw verify``; forged and damaged plans are tested with `dsa_hw.verify`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsa_hw import find_groups
from dsa_hw.channels.plan import Plan
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_allocate import HALF, MODEL, allocate, make
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """An allocation at half of the FLOPs."""
    assert allocate(tmp_path, *HALF) == 0
    capsys.readouterr()
    return tmp_path


def test_text_says_that_the_certificate_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(folder / "model.safetensors")
    assert main(["verify", str(folder / "plan.json"), "--model", MODEL, "--weights", weights]) == 0
    first, then, now, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("still holds.")
    assert then.startswith("  then: ")
    assert now.removeprefix("  now:  ") == then.removeprefix("  then: "), "FLOPs are counted, so nothing changes"


def test_json_has_both_certificates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder / "plan.json"), "--model", MODEL, "--json"]) == 0
    content = printed_json(capsys, "verify")
    assert set(content) == documented_keys("verify")
    assert (content["verdict"], content["same_device"]) == ("MET", True)
    assert content["then"]["entries"][0]["measured"] == content["now"]["entries"][0]["measured"]


def test_weights_of_the_dense_network_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = folder / "dense.pt"
    torch.save(make()[0].state_dict(), dense)
    assert main(["verify", str(folder / "plan.json"), "--model", MODEL, "--weights", str(dense)]) == 2
    assert "The weights do not fit the pruned network" in capsys.readouterr().err


def test_plan_without_a_certificate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, image = make()
    groups = find_groups(model, (image,))
    Plan.of(groups, [list(range(int(n))) for n in groups.sizes]).save(tmp_path / "plan.json")
    assert main(["verify", str(tmp_path / "plan.json"), "--model", MODEL]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsa-hw verify: ")
    assert "no certificate" in error
