"""``dsa-hw fit``, on a profile of a small network."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sqlite3
import sys

import pytest
import torch
from torch import nn

import budgets
import profilers
import tests.fakes.digits  # noqa: F401  (registers the target)
from dsa_hw import LatencyBudget, find_groups
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json
from tests.fakes.stores import sealed_again


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 48, 3), nn.ReLU(), nn.Conv2d(48, 8, 3)]
    return nn.Sequential(*layers), torch.randn(1, 3, 24, 24)


NAME = "tests.dsa_hw.cli.test_fit:network"


@pytest.fixture
def store(tmp_path: pathlib.Path) -> pathlib.Path:
    """A profile on a target whose times are a formula."""
    path = tmp_path / "profile.sqlite"
    model, inputs = network()
    profilers.profile(model, (inputs,), "formula/cpu", samples=12, holdout=4, out=path, name=NAME)
    return path


def test_report_names_the_candidates_and_the_bound(store: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = store.with_name("fit.png")
    assert main(["fit", str(store), "--model", NAME, "--plot", str(picture), "--confidence", "0.8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"upper bound at 80%: \d+\.\d% above the prediction \(median\)", out)
    assert re.search(r"dense network measured: [\d.]+ (ms|us|µs)", out)
    assert re.search(r"^physics +\d+\.\d\d%", out, re.MULTILINE)
    assert out.endswith(f"saved: {store.with_suffix('.json')}, {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    model, inputs = network()
    groups = find_groups(model, inputs)
    latency = budgets.load_cost_model(store.with_suffix(".json"), groups)
    dense = latency.value(torch.ones(len(groups), dtype=torch.float64))
    assert 0 < LatencyBudget("50%").limit(float(dense)) < float(dense)


def test_json_has_every_candidate_and_one_is_chosen(store: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(store), "--model", NAME, "--json"]) == 0
    content = printed_json(capsys, "fit")
    assert content["out"].endswith("profile.json")
    assert set(content) == documented_keys("fit")
    assert sum(row["chosen"] for row in content["candidates"]) == 1
    assert any(row["candidate"] == "physics" for row in content["candidates"])


def test_network_and_target_select_the_profile(store: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)), torch.randn(1, 3, 24, 24)
    profilers.profile(model, (inputs,), "formula/cpu", samples=12, holdout=4, out=store, name="other")
    assert main(["fit", str(store), "--model", NAME, "--target", "formula/cpu"]) == 0, "not the last one"
    assert len(budgets.load_cost_model(store.with_suffix(".json")).names) == 2
    for arguments in (["--model", NAME, "--target", "torch/cpu"], ["--model", "resnet20"]):
        assert main(["fit", str(store), *arguments]) == 2
        error = capsys.readouterr().err
        assert f"It has: {NAME} on formula/cpu" in error
        assert "other on formula/cpu" in error


def test_a_confidence_out_of_reach_writes_nothing(store: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(store), "--model", NAME, "--confidence", "0.999"]) == 2
    assert "confidence" in capsys.readouterr().err
    assert not store.with_suffix(".json").exists()


def test_missing_profile_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(tmp_path / "absent.sqlite")]) == 2
    assert "does not exist" in capsys.readouterr().err


def payload(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A module in the current folder that leaves a mark when it is imported; where the mark will be."""
    mark = folder / "ran"
    (folder / "payload.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nfrom tests.dsa_hw.cli.test_fit import network as make\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    return mark


@pytest.mark.parametrize("name", ["payload:make", "payload:absent", "timm/hf-hub:payload", "local-dir:payload"])
def test_store_does_not_choose_code(
    name: str, store: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = payload(store.parent, monkeypatch)
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        assert connection.execute("update networks set name = ?", (name,)).rowcount == 1
    sealed_again(store)
    assert main(["fit", str(store)]) == 2
    error = capsys.readouterr().err
    assert "--model" in error
    assert name in error
    assert not mark.exists()
    assert "payload" not in sys.modules
    assert main(["fit", str(store), "--model", "payload:make"]) == 0, "typed by the user it is"
    assert mark.exists(), "the payload works"


def test_store_is_not_overwritten(
    store: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, other = tmp_path / "link.json", tmp_path / "store.json"
    link.symlink_to(store)
    rows = profilers.load_tables(store).samples.shape
    for out in (store, store.parent / "." / store.name, link):
        assert main(["fit", str(store), "--model", NAME, "--out", str(out)]) == 2
        assert "overwrite" in capsys.readouterr().err
    assert main(["fit", str(store), "--model", NAME, "--plot", str(store)]) == 2
    assert profilers.load_tables(store).samples.shape == rows
    store.rename(other)
    assert main(["fit", str(other), "--model", NAME]) == 2, "the default is the store's name with .json"
    assert profilers.load_tables(other).samples.shape == rows
