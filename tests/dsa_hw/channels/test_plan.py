"""A plan restores the pruned network, and a plan that is damaged or does not match is rejected."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from torch import Tensor, nn

from dsa_hw import Plan, apply_plan, find_groups, select_channels, shrink
from dsa_hw.channels.discovery import difference, randomise
from dsa_hw.errors import PlanError
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


def test_damaged_plans_are_rejected(small: Small, tmp_path: pathlib.Path) -> None:
    groups = find_groups(small, IMAGE)
    path = tmp_path / "plan.json"
    Plan.of(groups, select_channels(small, groups, [3, 7])).save(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match="truncated or damaged: invalid JSON"):
        Plan.load(path)
    document = json.loads(text)
    document["kept"][0][0] = 7
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="changed after it was saved"):
        Plan.load(path)
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(PlanError, match="is not a plan"):
        Plan.load(path)
    path.write_text(json.dumps({**json.loads(text), "version": 99}))
    with pytest.raises(PlanError, match="format version 99"):
        Plan.load(path)
    path.write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(PlanError, match="Cannot read plan"):
        Plan.load(path)
    with pytest.raises(PlanError, match="Cannot read plan"):
        Plan.load(tmp_path / "absent.json")


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
