"""``dsa-hw inspect``."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from dsa_hw.cli.main import main
from dsa_hw.zoo import models
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.outputs import printed_json


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def with_inputs() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.randn(1, 4)


def untraceable() -> nn.Module:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    return Model()


def not_a_module() -> int:
    return 3


HERE = "tests.dsa_hw.cli.test_inspect"


def test_layers_are_ranked_by_their_error_in_int8(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    words = ["inspect", "--model", f"{HERE}:tiny", "--input", "1x3x8x8", "--int8"]
    assert main([*words, "--json"]) == 0
    found = printed_json(capsys, "inspect")["int8"]
    assert found["source"] == "noise"
    assert {row["layer"] for row in found["layers"]} == {"0", "2"}
    assert all(0 < row["error"] < 0.1 for row in found["layers"])
    assert main(words) == 0
    assert "relative error of the outputs with one layer in int8 (noise)" in capsys.readouterr().out


def test_text_has_the_groups_and_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", f"{HERE}:tiny", "--input", "1x3x8x8"]) == 0
    out = capsys.readouterr().out
    assert "on 1x3x8x8: 1 channel group that can be pruned" in out
    header, group, frozen = out.splitlines()[2:5]
    assert header.split() == ["group", "channels", "produced", "by", "FLOPs", "frozen", "because"]
    assert group.split()[1] == "4"
    assert frozen.endswith("network output")
    assert "M parameters" in out.splitlines()[-1]


def test_json_has_the_totals_and_plot_is_written(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "groups.png"
    assert main(["inspect", "--model", "squeezenet1_1", "--input", "1x3x64x64", "--json", "--plot", str(picture)]) == 0
    content = printed_json(capsys, "inspect")
    assert set(content) == documented_keys("inspect")
    assert content["params"] == sum(p.numel() for p in models.load_model("squeezenet1_1")[0].parameters())
    assert {"group", "channels", "members", "flops_share", "why_frozen"} == set(content["groups"][0])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_factory_may_return_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", f"{HERE}:with_inputs"]) == 0
    assert "on 1x4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet81"], "Did you mean resnet8 or resnet18"),
        (["--model", "timm/no_such_net"], "Unknown model 'timm/no_such_net'"),
        (["--model", "no.such:thing"], "package.module:function"),
        (["--model", f"{HERE}:absent"], "package.module:function"),
        (["--model", f"{HERE}:not_a_module"], "must return a torch.nn.Module"),
        (["--model", f"{HERE}:HERE"], "must be a function"),
        (
            ["--model", "resnet18", "--input", "1x1x32x32"],
            "Give an input of a shape, type and device that the model accepts",
        ),
        (["--model", "resnet18", "--input", "224"], "does not run on the example input"),
        (["--model", "resnet18", "--input", "big"], "for example 1x3x224x224"),
        (["--model", f"{HERE}:untraceable", "--input", "1x3"], "torch.export cannot trace"),
        (
            ["--model", f"{HERE}:tiny", "--input", "1x3x8x8", "--plot", "no/such/folder/x.png"],
            "Cannot write no/such/folder/x.png: ",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_timm_model_is_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm", reason="pip install 'dsa-hw[timm]'")
    assert main(["inspect", "--model", "timm/lcnet_050", "--input", "1x3x64x64"]) == 0
    assert "conv_stem" in capsys.readouterr().out
