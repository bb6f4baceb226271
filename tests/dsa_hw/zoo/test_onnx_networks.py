"""Networks from ONNX files compute what the file says, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dsa_hw
import dsa_hw.zoo.torchvision_compat
from dsa_hw.cli.main import main
from dsa_hw.errors import ModelError
from dsa_hw.zoo.models import load_model
from dsa_hw.zoo.onnx_networks import from_onnx

onnx = pytest.importorskip("onnx", reason="pip install 'dsa-hw[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'dsa-hw[onnx]'")
pytest.importorskip("onnx2torch", reason="pip install 'dsa-hw[onnx]'")

from tests.fakes.onnx_files import small_network  # noqa: E402


def outputs(path: Path, image: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(None, {session.get_inputs()[0].name: image.numpy()})[0]))


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_converted_network_equals_the_file(opset: int, tmp_path: Path) -> None:
    path = small_network(tmp_path / "net.onnx", opset=opset)
    model, (example,) = from_onnx(path)
    assert example.shape == (1, 3, 12, 12)
    image = torch.randn(1, 3, 12, 12)
    torch.testing.assert_close(model(image), outputs(path, image), rtol=1e-4, atol=1e-5)
    assert sorted(dsa_hw.find_groups(model, (example,)).sizes.tolist()) == [8, 16]


def test_open_sizes_must_be_given(tmp_path: Path) -> None:
    path = small_network(tmp_path / "net.onnx", batch="N")
    assert from_onnx(path)[1][0].shape == (1, 3, 12, 12)
    path = small_network(tmp_path / "net.onnx", side="S")
    with pytest.raises(ModelError, match=r"open \(1x3x\?x\?\). Give it: --input"):
        from_onnx(path)
    assert load_model(str(path), (1, 3, 20, 16))[1][0].shape == (1, 3, 20, 16)
    with pytest.raises(ModelError, match=r"is 1x3x\?x\?; got 1x4x20x20"):
        from_onnx(path, (1, 4, 20, 20))


def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="Cannot read the ONNX file"):
        from_onnx(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\x08\x07nothing")
    with pytest.raises(ModelError, match="Cannot read the ONNX file"):
        from_onnx(tmp_path / "bad.onnx")
    gelu = onnx.helper.make_node("Gelu", ["y"], ["z"])
    with pytest.raises(ModelError, match=r"operators that onnx2torch does not know: Gelu \(1\)"):
        from_onnx(small_network(tmp_path / "gelu.onnx", opset=20, extra=[gelu]))
    foreign = onnx.helper.make_node("Run", ["y"], ["z"], domain="com.example")
    with pytest.raises(ModelError, match="ONNX Runtime cannot run"):
        from_onnx(small_network(tmp_path / "foreign.onnx", extra=[foreign]))
    path = small_network(tmp_path / "net.onnx")
    for options in ({"pretrained": True}, {"classes": 3}, {"imports": False}):
        with pytest.raises(ModelError, match=r"its own weights|must not choose"):
            load_model(str(path), **options)  # type: ignore[arg-type]


def test_wrong_conversion_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx2torch

    path, convert = small_network(tmp_path / "net.onnx"), onnx2torch.convert

    def wrong(graph: object) -> torch.nn.Module:
        model = convert(graph)
        next(model.parameters()).data.mul_(1.01)
        return model

    monkeypatch.setattr(onnx2torch, "convert", wrong)
    with pytest.raises(ModelError, match="computes something else than the file"):
        from_onnx(path)


def test_onnx_in_onnx_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    small_network(tmp_path / "net.onnx")
    words = ["--budget", "flops=60%", "--method", "uniform", "--out", "small"]
    assert main(["allocate", "--model", "net.onnx", *words]) == 0
    assert "weights are random" not in (printed := capsys.readouterr().out)
    assert "onnx: small/model.onnx" in printed
    small = dsa_hw.load("small", model=dsa_hw.from_onnx("net.onnx")[0])
    image = torch.randn(1, 3, 12, 12)
    torch.testing.assert_close(outputs(tmp_path / "small" / "model.onnx", image), small(image), rtol=1e-4, atol=1e-5)
    assert main(["export", "small", "--model", "net.onnx", "--format", "torch", "--out", "net.pt2"]) == 0
    program = torch.export.load("net.pt2").module()
    torch.testing.assert_close(program(image), small(image))
