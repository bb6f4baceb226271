"""The int8 scheme is the one that was measured to be fastest, once for each network and environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import profilers
from dsa_hw.errors import MeasurementError, ProfileError
from dsa_hw.utils.files import cache_folder
from profilers.networks.quantisation import SCHEMES, Int8
from profilers.profiling.schemes import resolve_for
from profilers.targets import from_title, resolve
from tests.fakes.int8_formula import FACTORS, Int8Formula

pytest.importorskip("onnxruntime")


def test_the_fastest_scheme_is_chosen_once(tiny: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    first = Int8Formula("int8")
    found = resolve_for(*tiny, first)
    assert found.precision == f"int8-{min(('u8', 's8'), key=lambda name: FACTORS[name])}"
    assert first.precision == "int8", "the given target stays as it is"
    assert set(first.loaded) == {"int8-u8", "int8-s8"}
    repeated = Int8Formula("int8")
    assert resolve_for(*tiny, repeated).title == found.title
    assert repeated.loaded == [], "it is known"


def test_a_damaged_cache_is_measured_again(tiny: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    resolve_for(*tiny, Int8Formula("int8"))
    path: Path = cache_folder() / "int8_schemes.jsonl"
    path.write_text(path.read_text().replace('"s8"', '"u8"'))
    target = Int8Formula("int8")
    assert resolve_for(*tiny, target).precision == "int8-s8"
    assert target.loaded


def test_a_scheme_that_the_runtime_cannot_load_is_left_out(tiny: tuple[nn.Module, tuple[torch.Tensor, ...]]) -> None:
    class Picky(Int8Formula):
        refused: tuple[str, ...] = ("int8-s8",)

        def load(self, artefact: bytes, inputs: tuple[Any, ...]) -> Any:
            if self.precision in self.refused:
                raise MeasurementError("no kernel")
            return super().load(artefact, inputs)

    assert resolve_for(*tiny, Picky("int8")).precision == "int8-u8"
    Picky.refused = ("int8-s8", "int8-u8")
    other = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(MeasurementError, match="cannot load this network in int8"):
        resolve_for(other, tiny[1], Picky("int8"))


def test_precision_and_threads_may_follow_the_name() -> None:
    assert resolve("onnxruntime/cpu int8-u8 x2").title == "onnxruntime/cpu int8-u8 x2"
    assert resolve("openvino/cpu fp16").title == "openvino/cpu fp16 x1"
    found = Int8.parse("int8-without:inner")
    assert found is not None
    assert str(found.chosen(SCHEMES["s8"])) == "int8-s8-without:inner"
    assert from_title("onnxruntime/cpu int8-s8-without:conv1,fc x1").precision == "int8-s8-without:conv1,fc"
    assert resolve("onnxruntime/cpu int8-u8").describe()["int8"].startswith("static Q/DQ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch/cpu int8", "has no precision int8"),
        ("onnxruntime/cpu int8-s8sym", "runs int8 as int8-u8"),
        ("onnxruntime/cpu int8-x9", "Unknown int8 scheme"),
        ("onnxruntime/cpu int4", "Cannot read the target 'onnxruntime/cpu int4'"),
    ],
)
def test_what_a_target_cannot_run_is_refused(name: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        resolve(name)


@pytest.mark.slow
def test_profile_measures_int8_and_finds_its_grid_with_int8_layers(
    tiny: tuple[nn.Module, tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[bytes] = []
    target = Int8Formula("int8-u8")
    real = target.load

    def load(artefact: bytes, inputs: tuple[Any, ...]) -> Any:
        swept.append(artefact)
        return real(artefact, inputs)

    monkeypatch.setattr(target, "load", load)
    found = profilers.profile(*tiny, target, samples=14, holdout=2, time_limit=60)
    assert found.target == "int8formula/device int8-u8"
    assert len(found.table) >= 14
    plain = [artefact for artefact in swept if b"DequantizeLinear" not in artefact]
    assert len(plain) <= 2, "only narrowing is checked before networks are quantised"
    assert len(swept) > 14
