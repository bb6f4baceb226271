"""``dsa-hw export``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from dsa_hw.channels.plan import Plan, apply_plan
from dsa_hw.cli.main import main
from dsa_hw.utils.weights import read_weights
from tests.dsa_hw.cli.test_allocate import HALF, MODEL, allocate, make
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'dsa-hw[onnx]'")


def test_exported_network_computes_what_the_pruned_one_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allocate(tmp_path, *HALF) == 0
    capsys.readouterr()
    plan, weights, out = tmp_path / "plan.json", tmp_path / "model.safetensors", tmp_path / "model.onnx"
    words = ["export", str(plan), "--model", MODEL]
    assert main([*words, "--json"]) == 0
    content = printed_json(capsys, "export")
    small = apply_plan(make()[0], Plan.load(plan))
    small.load_state_dict(read_weights(weights))
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


def test_the_plan_has_the_hash_of_the_onnx_file_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate(tmp_path, *HALF) == 0
    plan, out = tmp_path / "plan.json", tmp_path / "model.onnx"
    words = [str(plan), "--model", MODEL]
    assert main(["export", *words, "--out", str(tmp_path / "other.onnx")]) == 0
    assert "model.onnx" not in Plan.load(plan).files
    assert main(["export", *words]) == 0
    assert Plan.load(plan).files["model.onnx"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert main(["verify", *words]) == 0
    out.write_bytes(out.read_bytes() + b"\n")
    capsys.readouterr()
    assert main(["verify", *words]) == 2
    assert "model.onnx is not the file that the plan was saved with" in capsys.readouterr().err
    assert main(["export", *words]) == 0
    assert main(["verify", *words]) == 0


def test_damaged_and_other_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate(tmp_path, *HALF) == 0
    plan, weights, tuned = tmp_path / "plan.json", tmp_path / "model.safetensors", tmp_path / "tuned.pt"
    words = ["export", str(plan), "--model", MODEL]
    state = read_weights(weights)
    state["one.weight"] = state["one.weight"] * 1.5
    torch.save(state, tuned)
    assert main([*words, "--weights", str(tuned)]) == 2
    assert "not those of the plan" in capsys.readouterr().err
    assert not (tmp_path / "model.onnx").exists()
    assert main([*words, "--weights", str(tuned), "--retrained"]) == 0
    assert "model.onnx" not in Plan.load(plan).files, "it is not the network of the certificate"
    state["one.weight"] = state["one.weight"] * float("nan")
    torch.save(state, tuned)
    assert main([*words, "--weights", str(tuned), "--retrained"]) == 2
    assert "one.weight of the pruned network has NaN" in capsys.readouterr().err
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(words) == 2
    assert "SHA-256 differs" in capsys.readouterr().err


def test_random_weights_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate(tmp_path, *HALF) == 0
    (tmp_path / "model.safetensors").unlink()
    words = ["export", str(tmp_path / "plan.json"), "--model", MODEL, "--out", str(tmp_path / "model.onnx")]
    assert main(words) == 0
    assert "The weights are random" in capsys.readouterr().err
