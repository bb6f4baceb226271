"""Cost models: evaluation, files (readable, exact, refused elsewhere) and plots."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import budgets
from budgets.selection import candidates
from dsa_hw.errors import ProfileError, WidthError
from dsa_hw.utils.documents import sealed

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
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", r"a JSON object is expected; got \[\]"),
        ('{"format": "x"}', "'dsa_hw cost model 3'; got 'x'. Make it with dsa-hw fit"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"format": ' + "1" * 5000 + "}", "64 bits"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=found):
        budgets.load_cost_model(path)


def test_missing_and_damaged_files_are_refused(groups: Any, profile: Factory, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"Cannot read the cost model .*No such file"):
        budgets.load_cost_model(tmp_path / "nothing.json")
    for wrong in (5, None, ["latency.json"]):
        with pytest.raises(ProfileError, match=r"Cannot read the cost model .*path"):
            budgets.load_cost_model(wrong)  # type: ignore[arg-type]
    model = budgets.fit(profile(groups), groups)
    path = model.save(tmp_path / "latency.json")
    state = json.loads(path.read_text())
    del state["estimator"]["learnt"]["coef_"]
    path.write_text(json.dumps(state))
    with pytest.raises(ProfileError, match=r"the checksum does not match\. Make it with dsa-hw fit"):
        budgets.load_cost_model(path)
    path.write_text(json.dumps(sealed(state)))
    with pytest.raises(ProfileError, match="'coef_' is missing or unknown"):
        budgets.load_cost_model(path)
    state["estimator"]["estimator"] = "os.system"
    path.write_text(json.dumps(sealed(state)))
    with pytest.raises(ProfileError, match="Unknown estimator"):
        budgets.load_cost_model(path)
    with pytest.raises(ProfileError, match="Cannot write"):
        model.save(tmp_path / "no" / "such" / "place.json")


_SAVED: list[str] = []


@pytest.fixture
def saved(groups: Any, profile: Factory, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A saved model, fitted once for all tests, and its content."""
    path = tmp_path / "latency.json"
    if not _SAVED:
        _SAVED.append(budgets.fit(profile(groups, train=16), groups).save(path).read_text())
    path.write_text(_SAVED[0])
    return path, json.loads(_SAVED[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["provenance"].update(dense=-1), "provenance.dense: must be greater than 0; got -1"),
        (lambda s: s["provenance"].update(dense=1e308), "provenance.dense: must be less than or equal to"),
        (lambda s: s["provenance"]["grid"].update(group0=0), "provenance.grid.group0: must be greater than or equal"),
        (lambda s: s["provenance"]["grid"].update(group0=-8), "provenance.grid.group0"),
        (lambda s: s["provenance"]["grid"].update(other=8), "'other', which is none of the groups"),
        (lambda s: s["provenance"].update(unit="h"), "provenance.unit"),
        (lambda s: s["provenance"].update(unit="J"), "latency in 'J'"),
        (lambda s: s["groups"].update(group0=10**18), "groups.group0: must be less than or equal to"),
        (lambda s: s["groups"].update(group0=0), "groups.group0: must be greater than or equal to 1"),
        (lambda s: s["groups"].update(another=8), "fitted has no column 'another'"),
        (lambda s: s["features"][0].update(groups=10**6, terms=500 * s["features"][0]["terms"]), "must not exceed"),
        (lambda s: s["calibration"]["owner"].__setitem__(0, 10**6), "owner must have the number of a model"),
        (lambda s: s["estimator"]["learnt"]["coef_"].update(array=[-1e3] * 3), "Cannot use|finite|positive"),
        (lambda s: s["estimator"]["parameters"].update(outside="abroad"), "must be one of extrapolate"),
        (lambda s: s["estimator"]["learnt"].update(__class__="x"), "'__class__' is missing or unknown"),
    ],
)
def test_wrong_values_are_refused_by_name(saved: tuple[Path, dict[str, Any]], change: Any, words: str) -> None:
    path, state = saved
    change(state)
    path.write_text(json.dumps(sealed(state)))
    with pytest.raises(ProfileError, match=words) as caught:
        budgets.load_cost_model(path)
    assert "\n" not in str(caught.value)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*place, key))


def test_swapped_types_are_refused_or_give_a_finite_model(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    generator = random.Random(0)
    places = [place for place in _places(state) if place]
    others: list[Any] = [None, True, -1, 0, 1e308, -1e308, 10**18, "x", "", [], {}, [[]], [1], {"a": 1}]
    for _ in range(150):
        changed = copy.deepcopy(state)
        place = generator.choice(places)
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = generator.choice(others)
        path.write_text(json.dumps(sealed(changed)))
        with contextlib.suppress(ProfileError):
            model = budgets.load_cost_model(path)
            assert np.isfinite(model.dense)
            assert repr(model)


def test_no_flipped_byte_changes_a_number(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    data = path.read_bytes()
    generator = random.Random(0)
    for _ in range(150):
        changed = bytearray(data)
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(ProfileError):
            budgets.load_cost_model(path)
            assert json.loads(path.read_bytes()) == state


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
