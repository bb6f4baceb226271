"""``dsa-hw allocate`` with class folders and the user's loaders."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsa_hw.cli.main import main
from dsa_hw.zoo.models import load_model
from tests.dsa_hw.zoo.test_folders_and_loaders import pets
from tests.fakes.outputs import printed_json

QUICK = ("--budget", "flops=60%", "--method", "uniform", "--recovery", "none")


def allocate(out: Path, *words: str) -> int:
    return main(["allocate", "--model", "resnet8", *QUICK, *words, "--out", str(out)])


def test_class_folders_give_test_accuracies_and_a_count_of_damaged_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pets(tmp_path / "pets", 24)
    (tmp_path / "pets" / "dog" / "broken.jpg").write_bytes(b"nothing")
    state = {f"module.{key}": value for key, value in load_model("resnet8", classes=2)[0].state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "own.pth")
    words = ["--classes", "2", "--weights", str(tmp_path / "own.pth"), "--data", f"imagefolder:{tmp_path / 'pets'}"]
    assert allocate(tmp_path / "out", *words, "--batch-size", "8", "--finetune", "1") == 0
    text = capsys.readouterr().out
    assert "random" not in text
    assert "(test data)" in text
    assert "skipped: 1 image that cannot be read" in text
    assert text.rstrip().endswith("--model resnet8 --classes 2")


def test_other_number_of_classes_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pets(tmp_path / "pets", 24)
    assert allocate(tmp_path / "out", "--data", f"imagefolder:{tmp_path / 'pets'}") == 2
    found = capsys.readouterr()
    assert found.out.startswith("The weights are random (no --pretrained or --weights)")
    assert "has 2 classes, but resnet8 has 10 outputs. Use --classes 2" in found.err


def test_loaders_of_the_user_bring_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = [{"image": torch.randn(4, 3, 32, 32), "wanted": torch.randn(4, 10)} for _ in range(2)]
    module = ModuleType("own_project")
    module.step = lambda model, batch: (model(batch["image"]) - batch["wanted"]).square().mean()
    module.loaders = lambda: {"train": batches, "val": batches, "step": module.step}
    monkeypatch.setitem(sys.modules, "own_project", module)
    assert allocate(tmp_path / "out", "--data", "own_project:loaders", "--json") == 0
    content = printed_json(capsys, "allocate")
    assert content["certificate"]["quality"]["name"] == "negative loss"
    assert content["certificate"]["quality"]["source"] == "validation data"
    assert allocate(tmp_path / "tuned", "--data", "own_project:loaders", "--finetune", "1") == 0
    assert "  before fine-tuning: negative loss -" in capsys.readouterr().out
