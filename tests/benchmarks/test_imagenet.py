"""benchmarks/imagenet.py under torchrun: two gloo processes on a made image folder, interrupted and continued."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from dsa_hw.channels.plan import apply_plan
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.training.origins import read_state
from dsa_hw.zoo import models

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, 40 + 12 small pictures: bright ones and dark ones."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 6)):
        for label, low in (("dark", 0), ("light", 128)):
            place = folder / part / label
            place.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(low, low + 128, (40, 48, 3), np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.JPEG")
    return folder


def start(images: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--data", str(images), "--model", "resnet18", "--size", "32", "--batch", "8", "--workers", "0"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, str(ROOT / "benchmarks" / "imagenet.py"), *options, "--out", str(out), "--limit", "36", *more],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, cwd=ROOT,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return text


@pytest.mark.slow
def test_two_processes_are_interrupted_and_continue(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--epochs", "4", "--flops", "60%", "--lr", "0.01")
    first = start(images, out, *options)
    end = time.monotonic() + 100
    while not (out / "checkpoint.pt").exists() and first.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    text = finished(first)
    assert first.returncode != 0, text
    assert "Interrupted at step" in text, text
    assert not (out / "result.json").exists()
    stopped = read_state(out / "checkpoint.pt")[1]["step"]
    assert 0 < stopped < 16

    second = start(images, out, *options)
    text = finished(second)
    assert second.returncode == 0, text
    assert f"Continuing at step {stopped} of 16" in text
    result = json.loads((out / "result.json").read_text())
    assert result["started_at_step"] == stopped
    assert result["processes"] == 2
    assert 0.5 < result["flops"] <= 0.6
    assert 12 * result["accuracy"] == pytest.approx(round(12 * result["accuracy"])), "every test image counts once"
    assert pd.read_csv(out / "log.csv")["epoch"].tolist() == [1, 2, 3, 4]
    model, _ = models.load_model("resnet18", (1, 3, 32, 32))
    small = apply_plan(model, out / "plan.json")
    small.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    assert {m.out_channels for m in small.modules() if isinstance(m, torch.nn.Conv2d)} != {64, 128, 256, 512}


def test_what_cannot_be_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("imagenet", ROOT / "benchmarks" / "imagenet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--out", str(tmp_path), "--data", str(tmp_path / "none")]) == 2
    assert "train/CLASS/*.JPEG" in capsys.readouterr().err


def test_an_epoch_that_was_whole_is_not_read_again() -> None:
    class Counting(list):  # type: ignore[type-arg]
        read = 0

        def __iter__(self) -> Any:
            for item in super().__iter__():
                Counting.read += 1
                yield item

    source = RepeatingLoader(Counting([1, 2, 3]))
    assert [next(source) for _ in range(6)] == [1, 2, 3, 1, 2, 3]
    Counting.read = 0
    again = RepeatingLoader(Counting([1, 2, 3]))
    again.load_state_dict(source.state_dict())
    assert Counting.read == 0
    assert again.state_dict() == source.state_dict()
    assert next(again) == next(source) == 1
    assert again.state_dict() == source.state_dict() == {"passes": 3, "position": 1}
