"""Cost models on disk: readable, identical, refused where they do not belong. And the picture, and the command."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import budgets
from budgets.cli import add_fit_command, add_force_option, report, run
from budgets.selection import candidates
from dsa_hw.errors import ProfileError

Factory = Callable[..., Any]
NAMES = [
    "physics",
    "physics, coarse",
    "flops",
    "physics, blocks of 16",
    "per operation",
    "topology quadratic",
    "bilinear ridge",
    "physics + gp",
    "monotone boosting",
]


@pytest.fixture
def groups(network: Factory) -> Any:
    return network(size=6, operations=25, seed=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("calibration", [None, "split"])
def test_round_trip_is_identical(
    groups: Any, profile: Factory, tmp_path: Path, name: str, calibration: str | None
) -> None:
    model = budgets.fit(
        profile(groups, train=24), groups, candidates={name: candidates(groups)[name]}, calibration=calibration
    )
    model = model.anchored(np.ones(6), 0.011)
    path = model.save(tmp_path / "latency.json")
    again = budgets.load(path, groups, target="synthetic/cpu", environment={"runtime": "synthetic 1.0"})
    alpha = np.random.default_rng(0).uniform(0.1, 1, (20, 6))
    np.testing.assert_array_equal(again.estimator.predict(alpha), model.estimator.predict(alpha))
    np.testing.assert_array_equal(again.gradient(alpha), model.gradient(alpha))
    np.testing.assert_array_equal(again.upper(alpha, 0.9), model.upper(alpha, 0.9))
    np.testing.assert_array_equal(again.value(torch.tensor(alpha)).numpy(), model.value(torch.tensor(alpha)).numpy())
    assert again.provenance == model.provenance
    assert again.report.equals(model.report) or np.allclose(again.report["mape"], model.report["mape"])
    assert repr(again) == repr(model)
    assert not list(tmp_path.glob("*.partial"))


def test_file_is_readable_and_holds_nothing_private(groups: Any, profile: Factory, tmp_path: Path) -> None:
    path = budgets.fit(profile(groups), groups).save(tmp_path / "latency.json")
    text = path.read_text()
    state = json.loads(text)
    assert state["provenance"]["target"] == "synthetic/cpu"
    assert state["provenance"]["configurations"] == 41
    assert state["provenance"]["environment"] == {"runtime": "synthetic 1.0"}
    assert set(state["groups"]) == set(groups.names)
    assert state["coefficients"].keys() == set(state["features"][0]["names"])
    assert "holdout_mape" in state["provenance"]["errors"]
    assert not re.search(r"sklearn|pickle|__|NaN|Infinity", text)


def test_refused_elsewhere_with_the_difference_named(
    groups: Any, profile: Factory, network: Factory, tmp_path: Path
) -> None:
    path = budgets.fit(profile(groups), groups).save(tmp_path / "latency.json")
    other = network(size=6, operations=26, seed=1)
    for arguments, difference in (
        ({"groups": other}, "network: fingerprint"),
        ({"groups": network(size=7)}, "6 channel groups, this network 7"),
        ({"groups": network(size=6, seed=5)}, "channel group 'group0' has"),
        ({"target": "torch/cpu"}, "target: 'synthetic/cpu' in the file, 'torch/cpu' here"),
        ({"environment": {"runtime": "synthetic 2.0"}}, "runtime: 'synthetic 1.0' in the file, 'synthetic 2.0' here"),
        ({"environment": {"threads": 4}}, "threads: None in the file, 4 here"),
    ):
        with pytest.raises(ProfileError, match=re.escape(difference)) as caught:
            budgets.load(path, **arguments)
        assert "force=True" in str(caught.value)
        forced = budgets.load(path, **arguments, force=True)
        assert any(difference in note for note in forced.provenance.notes)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is not a cost model"),
        ("{", "is not a cost model"),
        ("[]", "format 'list'"),
        ('{"format": "x"}', "format 'x'"),
    ],
)
def test_foreign_files(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=found):
        budgets.load(path)


def test_missing_and_damaged_files(groups: Any, profile: Factory, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="make it with dsa-hw fit"):
        budgets.load(tmp_path / "nothing.json")
    model = budgets.fit(profile(groups), groups)
    path = model.save(tmp_path / "latency.json")
    state = json.loads(path.read_text())
    del state["estimator"]["learnt"]["coef_"]
    path.write_text(json.dumps(state))
    with pytest.raises(ProfileError, match="damaged"):
        budgets.load(path)
    state["estimator"]["estimator"] = "os.system"
    path.write_text(json.dumps(state))
    with pytest.raises(ProfileError, match="does not have"):
        budgets.load(path)
    with pytest.raises(ProfileError, match="cannot write"):
        model.save(tmp_path / "no" / "such" / "place.json")


def test_command_fits_saves_and_draws(groups: Any, profile: Factory, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_fit_command(parser.add_subparsers(dest="command"))
    args = parser.parse_args(
        ["fit", "profile.sqlite", "--out", str(tmp_path / "m.json"), "--plot", str(tmp_path / "fit.png")]
    )
    seen: list[Any] = []

    def read(path: Path) -> Any:
        seen.append(path)
        return profile(groups)

    model = run(args, load_profile=read, load_groups=lambda table, name: groups)
    assert seen == [Path("profile.sqlite")]
    assert budgets.load(tmp_path / "m.json", groups).name == model.name
    image = (tmp_path / "fit.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 20_000
    text = report(model)
    assert "upper bound at 90 %" in text
    assert all(name in text for name in candidates(groups))


def test_force_on_a_command_line(groups: Any, profile: Factory, network: Factory, tmp_path: Path) -> None:
    path = budgets.fit(profile(groups), groups).save(tmp_path / "latency.json")
    parser = argparse.ArgumentParser()
    add_force_option(parser)
    with pytest.raises(ProfileError, match="--force"):
        budgets.load(path, groups, target="torch/cpu", force=parser.parse_args([]).force)
    forced = budgets.load(path, groups, target="torch/cpu", force=parser.parse_args(["--force"]).force)
    assert any("torch/cpu" in note for note in forced.provenance.notes)


def test_plot_without_groups_and_with_a_wrong_name(groups: Any, profile: Factory, tmp_path: Path) -> None:
    model = budgets.fit(profile(groups))
    assert model.plot(tmp_path / "fit.svg").stat().st_size > 10_000
    with pytest.raises(ProfileError, match=r"\.png, \.svg or \.pdf"):
        model.plot(tmp_path / "fit.xyz")
