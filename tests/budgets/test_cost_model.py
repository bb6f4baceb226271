"""Cost models: evaluation, files (readable, exact, refused elsewhere) and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import budgets
from budgets.selection import candidates
from dsa_hw.errors import ProfileError, WidthError

Factory = Callable[..., Any]
NAMES = [
    "physics",
    "physics, coarse",
    "flops",
    "physics, blocks of 16",
    "physics, blocks of 16, narrow inputs",
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
def test_a_model_read_from_its_file_is_identical(
    groups: Any, profile: Factory, tmp_path: Path, name: str, calibration: str | None
) -> None:
    model = budgets.fit(
        profile(groups, train=24), groups, candidates={name: candidates(groups)[name]}, calibration=calibration
    )
    path = model.save(tmp_path / "latency.json")
    again = budgets.load_cost_model(path, groups, target="synthetic/cpu", environment={"runtime": "synthetic 1.0"})
    alpha = np.random.default_rng(0).uniform(0.1, 1, (20, 6))
    np.testing.assert_array_equal(again.estimator.predict(alpha), model.estimator.predict(alpha))
    np.testing.assert_array_equal(again.gradient(alpha), model.gradient(alpha))
    np.testing.assert_array_equal(again.upper(alpha, 0.9), model.upper(alpha, 0.9))
    np.testing.assert_array_equal(again.value(torch.tensor(alpha)).numpy(), model.value(torch.tensor(alpha)).numpy())
    assert again.provenance == model.provenance
    pd.testing.assert_frame_equal(again.report, model.report)
    assert repr(again) == repr(model)
    assert [file.name for file in tmp_path.iterdir()] == ["latency.json"]


def test_the_file_is_readable_json_without_private_attributes(groups: Any, profile: Factory, tmp_path: Path) -> None:
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


def test_a_model_of_another_network_target_or_version_is_refused(
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
            budgets.load_cost_model(path, **arguments)
        assert "force=True" in str(caught.value)
        forced = budgets.load_cost_model(path, **arguments, force=True)
        assert any(difference in note for note in forced.provenance.notes)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is not a cost model"),
        ("{", "is not a cost model"),
        ("[]", "got 'list'"),
        ('{"format": "x"}', "got 'x'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=found):
        budgets.load_cost_model(path)


def test_missing_and_damaged_files_are_refused(groups: Any, profile: Factory, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="Make it with dsa-hw fit"):
        budgets.load_cost_model(tmp_path / "nothing.json")
    model = budgets.fit(profile(groups), groups)
    path = model.save(tmp_path / "latency.json")
    state = json.loads(path.read_text())
    del state["estimator"]["learnt"]["coef_"]
    path.write_text(json.dumps(state))
    with pytest.raises(ProfileError, match="damaged"):
        budgets.load_cost_model(path)
    state["estimator"]["estimator"] = "os.system"
    path.write_text(json.dumps(state))
    with pytest.raises(ProfileError, match="Unknown estimator"):
        budgets.load_cost_model(path)
    with pytest.raises(ProfileError, match="Cannot write"):
        model.save(tmp_path / "no" / "such" / "place.json")


def test_plot_without_groups_and_with_an_unknown_format(groups: Any, profile: Factory, tmp_path: Path) -> None:
    model = budgets.fit(profile(groups))
    assert model.plot(tmp_path / "fit.svg").stat().st_size > 10_000
    with pytest.raises(ProfileError, match=r"\.png, \.svg or \.pdf"):
        model.plot(tmp_path / "fit.xyz")


def test_value_and_gradient_are_batched_and_agree(network: Factory, profile: Factory) -> None:
    groups = network(size=6, operations=20, seed=1)
    model = budgets.fit(profile(groups), groups)
    alpha = np.random.default_rng(0).uniform(0.2, 1, (3, 4, 6))
    for confidence in (None, 0.9):
        tensor = torch.tensor(alpha, requires_grad=True)
        value = model.value(tensor, confidence)
        assert value.shape == (3, 4)
        value.sum().backward()
        assert tensor.grad is not None
        np.testing.assert_allclose(model.gradient(alpha, confidence), tensor.grad.numpy(), rtol=1e-9)
    np.testing.assert_allclose(model.value(torch.tensor(alpha), 0.9).numpy(), model.upper(alpha, 0.9), rtol=1e-12)
    assert (model.lower(alpha) < model.upper(alpha)).all()
    with pytest.raises(WidthError, match="6 channel groups"):
        model.gradient(np.ones(5))
    with pytest.raises(WidthError, match="finite"):
        model.gradient(np.full(6, np.nan))
    with pytest.raises(WidthError, match="group5"):
        model.predict(pd.DataFrame([groups.sizes[:5]], columns=list(groups.names[:5])))
    with pytest.raises(WidthError, match="between 1 and the size"):
        model.predict(pd.DataFrame([np.full(6, 0.5)], columns=list(groups.names)))
