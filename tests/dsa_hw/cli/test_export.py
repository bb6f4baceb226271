"""``dsa-hw export``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dsa_hw.channels.plan import Plan, apply_plan
from dsa_hw.cli.main import main
from tests.dsa_hw.cli.test_allocate import HALF, MODEL, allocate, make
from tests.dsa_hw.cli.test_options import documented_keys

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'dsa-hw[onnx]'")


def test_exported_network_computes_what_the_pruned_one_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allocate(tmp_path, *HALF) == 0
    capsys.readouterr()
    plan, weights, out = tmp_path / "plan.json", tmp_path / "model.pt", tmp_path / "model.onnx"
    words = ["export", str(plan), "--model", MODEL, "--weights", str(weights), "--out", str(out)]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    small = apply_plan(make()[0], Plan.load(plan))
    small.load_state_dict(torch.load(weights, weights_only=True))
    image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(str(out))
    (found,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, small.eval()(image).numpy(), rtol=1e-4, atol=1e-5)
    parameters = sum(p.numel() for p in small.parameters())
    assert set(content) == documented_keys("export")
    assert content == {"out": str(out), "bytes": out.stat().st_size, "parameters": parameters}
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"saved: {out}, {parameters / 1e6:.3f} M parameters, ")


def test_random_weights_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate(tmp_path, *HALF) == 0
    words = ["export", str(tmp_path / "plan.json"), "--model", MODEL, "--out", str(tmp_path / "model.onnx")]
    assert main(words) == 0
    assert "The weights are random" in capsys.readouterr().err
