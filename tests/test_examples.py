"""The examples run, on small data."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import dsa_hw
import dsa_hw.zoo.torchvision_compat
from dsa_hw.pipeline.quality import ACCURACY, METRIC, NEGATIVE_LOSS
from dsa_hw.zoo.models import load_model
from profilers.targets import base
from tests.docs.test_guide import InPlaceOfOnnxRuntime
from tests.dsa_hw.zoo.test_folders_and_loaders import pets

FOLDER = Path(__file__).parents[1] / "examples"
MET = dsa_hw.Verdict.MET


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times from a formula, which are exact at once."""
    monkeypatch.setitem(base._REGISTRY, "onnxruntime", InPlaceOfOnnxRuntime)
    monkeypatch.chdir(tmp_path)


def test_examples_are_short() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) == 5
    assert all(len(file.read_text().splitlines()) <= 80 for file in files)


@pytest.mark.usefixtures("formula")
def test_image_folder(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    pets(tmp_path / "pets", 40)
    (tmp_path / "pets" / "cat" / "broken.png").write_bytes(b"nothing")
    model, _ = load_model("timm/mobilenetv3_small_050", classes=2)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "own.safetensors")
    words = ["pets", "70%", "--model", "timm/mobilenetv3_small_050", "--weights", "own.safetensors", "--classes", "2"]
    small = ["--input", "1x3x32x32", "--batch-size", "8", "--workers", "0", "--samples", "8"]
    result = example("image_folder").main([*words, *small])
    assert result.certificate.verdict == MET
    assert result.quality.measure == ACCURACY
    assert (tmp_path / "small" / "model.onnx").exists()


def test_unet() -> None:
    pytest.importorskip("segmentation_models_pytorch")
    result = example("unet").main("flops=60%", batches=3, options={"steps": 5}, progress=False)
    assert result.certificate.verdict == MET
    assert (result.quality.measure, result.quality.name) == (METRIC, "overlap")


@pytest.mark.slow
def test_yolo(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    yolo = example("yolo")
    yolo.SIDE = 64
    result = yolo.main(out=str(tmp_path), batches=2, options={"steps": 5}, progress=False)
    assert result.certificate.verdict == MET
    assert result.quality.name == NEGATIVE_LOSS


def test_bert_classifier() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    result = example("bert_classifier").main(epochs=2, count=64)
    assert result.certificate.verdict == MET
    assert result.quality.measure == ACCURACY


@pytest.mark.usefixtures("formula")
def test_own_loop() -> None:
    result = example("own_loop").main(epochs=1, samples=8, width=8)
    assert result.certificate.verdict == MET
    assert result.quality.measure == ACCURACY
