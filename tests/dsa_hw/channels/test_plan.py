"""A plan restores the pruned network, and a plan that is damaged or does not match is rejected."""

from __future__ import annotations

import json
import os
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsa_hw import Plan, apply_plan, find_groups, select_channels, shrink
from dsa_hw.channels.discovery import difference, randomise
from dsa_hw.channels.plan import PrunedNetwork
from dsa_hw.errors import PlanError
from dsa_hw.utils.documents import sealed
from tests.fakes.proving import IMAGE, Small, run


def test_constructor_plan_and_state_dict_restore_the_pruned_network(small: Small, tmp_path: pathlib.Path) -> None:
    randomise(small, 1).eval()
    groups = find_groups(small, IMAGE)
    kept = select_channels(small, groups, [3, 7])
    got = shrink(small, groups, kept)
    Plan.of(groups, kept).save(tmp_path / "plan.json")
    torch.save(got.state_dict(), tmp_path / "weights.pt")
    again = apply_plan(Small(), tmp_path / "plan.json").eval()
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert difference(run(got, IMAGE), run(again, IMAGE)) == 0
    assert Plan.load(tmp_path / "plan.json") == Plan.of(groups, kept)
    assert Plan.of(groups, kept).widths == {"stem.0": 3, "deep.1": 7}
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".pt")] == [], "no stray files"


def test_plan_of_a_network_with_other_shapes_is_rejected(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    plan = Plan.of(groups, select_channels(small, groups, [3, 7]))
    other = Small()
    other.head = nn.Linear(12, 6)
    with pytest.raises(PlanError, match=r"head.weight is \(6, 12\) in the model and \(5, 12\) in the plan"):
        apply_plan(other, plan)


def test_plan_of_a_network_with_another_forward_is_rejected(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    plan = Plan.of(groups, select_channels(small, groups, [3, 7]))

    class Rewired(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            x = self.deep(y).mean((2, 3))
            return self.head(self.norm(x)), y

    with pytest.raises(PlanError, match=r"group 'stem.0' has no units in the network and 8 in the plan"):
        apply_plan(Rewired(), plan)


def saved(small: Small, path: pathlib.Path) -> dict[str, Any]:
    groups = find_groups(small, IMAGE)
    kept = select_channels(small, groups, [3, 7])
    network = PrunedNetwork.of(shrink(small, groups, kept), (IMAGE,))
    Plan.of(groups, kept, {"any": 1}, network).save(path)
    return dict(json.loads(path.read_text()))


def test_damaged_plans_are_rejected(small: Small, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    document = saved(small, path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match="not valid JSON"):
        Plan.load(path)
    document["kept"][0][0] = 7
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="changed after it was saved"):
        Plan.load(path)
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(
        PlanError, match=r"its format must be 'dsa_hw plan 2'; got None\. Make a plan with dsa-hw allocate"
    ):
        Plan.load(path)
    path.write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(PlanError, match="Cannot read plan"):
        Plan.load(path)
    with pytest.raises(PlanError, match="Cannot read plan"):
        Plan.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "dsa_hw plan"}, "format must be"),
        ({"more": 1}, "unknown field"),
        ({"sizes": [8, 0]}, "sizes"),
        ({"sizes": [8, 12.0]}, "sizes"),
        ({"sizes": [8, True]}, "sizes"),
        ({"sizes": [8]}, "names must be distinct, with a size"),
        ({"sizes": [9, 12]}, "fingerprint"),
        ({"names": ["a", "a"]}, "names must be distinct"),
        ({"kept": [[0, 1, 8], [0]]}, "kept units of 'stem.0'"),
        ({"kept": [[1, 0], [0]]}, "kept units of 'stem.0'"),
        ({"kept": [[1, 1], [0]]}, "kept units of 'stem.0'"),
        ({"kept": [[0], []]}, "kept units of 'deep.1'"),
        ({"kept": [[0], [-1]]}, "kept"),
        ({"shapes": {"x": [1]}}, "fingerprint"),
        ({"shapes": []}, "shapes"),
        ({"inputs": [[1, 3, 200000, 200000]]}, "the inputs must have at most"),
        ({"inputs": [[1, 3, 0, 5]]}, "inputs"),
        ({"inputs": "x"}, "inputs"),
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"fingerprint": None}, "fingerprint"),
        ({"network": None}, "a certificate needs the hash of the weights"),
        ({"network": {"weights": "0" * 64}}, "network.reference: is missing"),
        ({"network": {"weights": "0"}}, "network.weights"),
        ({"files": {"../model.safetensors": "0" * 64}}, "files"),
        ({"files": {"/etc/passwd": "0" * 64}}, "files"),
        ({"files": {"model.safetensors\n": "0" * 64}}, "files"),
        ({"files": {"model.safetensors": "short"}}, "files"),
        ({"certificate": "MET"}, "certificate"),
    ],
    ids=str,
)
def test_wrong_plans_with_a_right_checksum_are_rejected(
    changes: dict[str, Any], message: str, small: Small, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "plan.json"
    document = {**saved(small, path), **changes}
    del document["sha256"]
    path.write_text(json.dumps(sealed(document)))
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["sha256", "fingerprint", "network", "files", "kept", "certificate"])
def test_a_missing_field_is_rejected(field: str, small: Small, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    document = saved(small, path)
    document.pop(field)
    if field != "sha256":
        document = sealed(document)
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=field):
        Plan.load(path)


def test_deep_and_endless_plans_are_rejected(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("[" * 100_000, '{"format": ' + "9" * 5000 + "}", '{"sizes": [NaN]}', '{"a": 1, "a": 2}'):
        path.write_text(text)
        with pytest.raises(PlanError, match="Cannot read plan"):
            Plan.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PlanError, match="not a regular file"):
        Plan.load(path)


def test_a_plan_that_could_not_be_read_is_not_written(small: Small, tmp_path: pathlib.Path) -> None:
    groups = find_groups(small, IMAGE)
    plan = Plan.of(groups, select_channels(small, groups, [3, 7]))
    for bad in (
        replace(plan, certificate={"x": float("nan")}),
        replace(plan, certificate={"x": object()}),
        replace(plan, certificate={"x": 1}),  # without the hash of the weights
        replace(plan, kept=((9,), (0,))),
    ):
        with pytest.raises(PlanError):
            bad.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_other_weights_and_other_functions_are_noticed(small: Small) -> None:
    randomise(small, 1).eval()
    groups = find_groups(small, IMAGE)
    kept = select_channels(small, groups, [3, 7])
    got = shrink(small, groups, kept)
    plan = Plan.of(groups, kept, network=PrunedNetwork.of(got, (IMAGE,)))
    assert plan.check_network(shrink(small, groups, kept), (IMAGE,), "it") == 0
    with pytest.raises(PlanError, match="no hash of its weights"):
        replace(plan, network=None).check_network(got, (IMAGE,), "it")

    class Rewired(Small):
        def forward(self, x: Tensor) -> Any:
            return tuple(1.01 * y for y in super().forward(x))

    got.__class__ = Rewired
    with pytest.raises(PlanError, match=r"outputs differ by 0\.0\d+ of the largest one; at most 0.001"):
        plan.check_network(got, (IMAGE,), "it")
    got.__class__ = Small
    next(got.parameters()).data.view(-1)[0] += 1e-6
    with pytest.raises(PlanError, match=r"The weights in file\.pt are not those of the plan"):
        plan.check_network(got, (IMAGE,), "file.pt")


def test_failed_save_keeps_the_old_plan(small: Small, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = find_groups(small, IMAGE)
    path = tmp_path / "plan.json"
    Plan.of(groups, select_channels(small, groups, [3, 7])).save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(PlanError, match="No space left on device"):
        Plan.of(groups, select_channels(small, groups, [2, 2])).save(path)
    assert Plan.load(path).widths == {"stem.0": 3, "deep.1": 7}
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
