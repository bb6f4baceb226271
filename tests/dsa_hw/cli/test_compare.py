"""The commands as typed, on the target that is a formula."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest
import torch

import tests.fakes.digits  # noqa: F401  (registers the target)
from dsa_hw.cli import allocate, compare, sweep
from dsa_hw.zoo import models

QUICK = [
    "--train-epochs",
    "0.3",
    "--epochs",
    "0.2",
    "--finetune-epochs",
    "0.2",
    "--samples",
    "14",
    "--target",
    "formula/cpu",
]
NET = ["--model", "tests.fakes.digits:net", "--data", "digits"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    allocate.add(subparsers)
    compare.add(subparsers)
    sweep.add(subparsers)
    args = parser.parse_args(arguments)
    return int(args.run(args))


class ReachedError(Exception):
    """The command has done everything before its work."""


@pytest.mark.parametrize(
    ("words", "random"),
    [
        (["allocate", "--model", "resnet20", "--budget", "flops=50%"], True),
        (["allocate", "--model", "resnet20", "--budget", "flops=50%", "--weights", "{weights}"], False),
        (["allocate", "--model", "tests.fakes.digits:net", "--budget", "flops=50%"], False),
        (["compare", "--model", "resnet20", "--data", "digits", "--budgets", "flops=50%"], False),
        (["compare", "--model", "resnet20", "--data", "digits", "--budgets", "flops=50%", "--train-epochs", "0"], True),
        (["sweep", "--model", "resnet20", "--budgets", "flops=50%"], True),
        (["sweep", "--model", "resnet20", "--budgets", "flops=50%", "--train-epochs", "5"], True),
        (["sweep", "--model", "resnet20", "--data", "digits", "--budgets", "flops=50%"], False),
        (["sweep", "--model", "resnet20", "--budgets", "flops=50%", "--weights", "{weights}"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_first_line_says_that_the_weights_are_random(
    words: list[str],
    random: bool,
    as_json: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reach(*_: object, **__: object) -> None:
        raise ReachedError

    # Imported before any of them is replaced: the sweep's module keeps the function allocate that it finds.
    places = {
        name: importlib.import_module(f"dsa_hw.{folder}.{name}")
        for name, folder in (("allocate", "pipeline"), ("compare", "experiments"), ("sweep", "experiments"))
    }
    monkeypatch.setattr(places[words[0]], words[0], reach)
    weights = tmp_path / "weights.pt"
    torch.save(models.load_model("resnet20")[0].state_dict(), weights)
    with pytest.raises(ReachedError):
        run(*(word.format(weights=weights) for word in words), *(["--json"] if as_json else []))
    captured = capsys.readouterr()
    found = captured.err if as_json else captured.out
    assert found.startswith("The weights are random (no --weights)") == random
    assert (captured.out if as_json else captured.err) == "", "JSON stays alone on the standard output"


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budgets", "flops=50%", "latency=50%", "--methods", "uniform"]
    assert run("compare", *NET, *asked, *QUICK, "--out", str(tmp_path), "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert [n["kind"] for n in content["networks"]] == ["dense", "flops", "latency", "flops"]
    assert run("compare", *NET, *asked, *QUICK, "--out", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert content["headline"] in captured.out
    assert str(tmp_path / "index.html") in captured.out
    page = (tmp_path / "index.html").read_text()
    assert "--budgets flops=50% latency=50%" in page
    assert "--train-epochs 0.3" in page


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--budgets", "latency=50%..80%:2", "--method", "uniform"]
    assert run("sweep", *NET, *asked, *QUICK, "--out", str(tmp_path), "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [p["asked"] for p in points] == ["80%", "50%"]
    assert all(p["verdict"] == "MET" for p in points)
    assert run("sweep", *NET, *asked, *QUICK, "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out.count("MET") == 2
    asked[1:2] = ["latency=80%", "latency=0.1%"]
    assert run("sweep", *NET, *asked, *QUICK, "--out", str(tmp_path)) == 3
    assert "cannot be met" in capsys.readouterr().out
