"""A look-up table as a device: tables with known sums, then that of a Raspberry Pi."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import budgets
import profilers
from dsa_hw.channels import find_groups, shrink
from dsa_hw.errors import ProfileError
from dsa_hw.zoo import models
from profilers import latency
from profilers.measuring.rules import MeasuringRules
from profilers.targets import resolve
from profilers.targets.latency_table import LatencyTable
from tests.fakes.outputs import printed_json

Network = tuple[nn.Module, tuple[torch.Tensor, ...]]


def cost(c_in: int, c_out: int) -> float:
    return 1e-5 + 1e-7 * c_in * c_out


def made(path: Path, step: int = 1, hole: tuple[int, int] | None = None) -> Path:
    """A table for the small network, at multiples of ``step``: convolutions on 16x16, and the linear layer behind."""
    rows = []
    for c_in in (3, *range(step, 25, step)):
        for c_out in range(step, 25, step):
            if (c_in, c_out) != hole:
                rows.append((16, "3", 1, c_in, c_out, 1e3 * cost(c_in, c_out)))
    rows += [(1, "linear", 1, c_in, 5, 1e3 * 2e-6 * c_in) for c_in in range(step, 25, step)]
    frame = pd.DataFrame(rows, columns=["hw_in", "k", "stride", "c_in", "c_out", "latency_ms"])
    frame.drop_duplicates(["hw_in", "k", "c_in", "c_out"]).to_csv(path, index=False)
    return path


def by_hand(stem: int, inner: int) -> float:
    return cost(3, stem) + cost(stem, inner) + cost(inner, stem) + 2e-6 * stem


def test_time_of_a_network_is_the_sum_of_its_entries(tiny: Network, tmp_path: Path) -> None:
    device = f"table:{made(tmp_path / 't.csv')}"
    found = profilers.measure(*tiny, target=device, name="tiny")
    assert found.seconds == pytest.approx(by_hand(16, 24), rel=1e-12)
    assert found.low == found.seconds == found.high
    assert found.trusted
    assert found.finished
    assert found.runs == 1
    assert found.estimated == "estimated from look-up table t.csv"
    assert repr(found) == f"tiny on {device}: {1e3 * found.seconds:.4g} ms (estimated from look-up table t.csv)"


def test_profile_is_exact_deterministic_and_on_the_tables_grid(tiny: Network, tmp_path: Path) -> None:
    device = f"table:{made(tmp_path / 't.csv', step=4)}"
    options: dict[str, Any] = {"samples": 10, "holdout": 3, "out": tmp_path / "p.sqlite"}
    found = profilers.profile(*tiny, target=device, **options)
    table = found.table
    stem, inner = found.names if found.sizes == (16, 24) else reversed(found.names)
    assert set(found.grid.values()) == {4}
    assert len(table) == 13
    for _, row in table.iterrows():
        assert row["seconds"] == pytest.approx(by_hand(int(row[stem]), int(row[inner])), rel=1e-12)
        assert row["low"] == row["seconds"] == row["high"]
        assert row["error"] == 0
    assert found.estimated == "estimated from look-up table t.csv"
    assert found.untrusted == 0
    assert set(found.environment) == {"target", "estimated", "table", "outside", "layers"}
    again = profilers.profile(*tiny, target=device, **options)
    pd.testing.assert_frame_equal(again.table, table)
    assert len(profilers.load_tables(options["out"]).samples) == len(table), "nothing is asked twice"
    groups = find_groups(*tiny)
    model = budgets.fit(found, groups)
    assert model.predict(table).to_numpy() == pytest.approx(table["seconds"].to_numpy(), rel=0.02)
    check = profilers.self_check(*tiny, target=device, configurations=3)
    assert check.largest == 0.0


def test_channels_outside_are_refused_or_interpolated(tiny: Network, tmp_path: Path) -> None:
    path = made(tmp_path / "t.csv", step=4)
    groups = find_groups(*tiny)
    sizes = dict(zip(groups.names, groups.sizes, strict=True))
    stem, inner = sorted(groups.names, key=lambda n: sizes[n])
    widths = {stem: 10, inner: 22}
    small = shrink(tiny[0], groups, [np.arange(widths[n]) for n in groups.names])
    with pytest.raises(ProfileError, match=r"stem.*3 -> 10 channels\) is outside the table.*outside=interpolate"):
        profilers.measure(small, tiny[1], f"table:{path}")
    with pytest.raises(ProfileError, match="outside the table"):
        profilers.measure(small, tiny[1], f"table:{path}?outside=refuse")
    found = profilers.measure(small, tiny[1], f"table:{path}?outside=interpolate")
    assert found.seconds == pytest.approx(by_hand(10, 22), rel=1e-12), "this cost is bilinear"
    narrow = shrink(tiny[0], groups, [np.arange(2) for _ in groups.names])
    with pytest.raises(ProfileError, match="not extrapolated"):
        profilers.measure(narrow, tiny[1], f"table:{path}?outside=interpolate")
    holed = made(tmp_path / "h.csv", step=4, hole=(12, 24))
    with pytest.raises(ProfileError, match="Entries around it are missing"):
        profilers.measure(small, tiny[1], f"table:{holed}?outside=interpolate")


def test_layers_that_a_table_lacks_are_errors(tiny: Network, tmp_path: Path) -> None:
    device = f"table:{made(tmp_path / 't.csv')}"
    strided = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1))
    with pytest.raises(ProfileError, match=r"has no kind for .*stride 2"):
        profilers.measure(strided, tiny[1], device)
    depthwise = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8))
    with pytest.raises(ProfileError, match=r"has no kind for .*8 groups\)"):
        profilers.measure(depthwise, tiny[1], device)
    with pytest.raises(ProfileError, match="transposed"):
        profilers.measure(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 3)), tiny[1], device)
    with pytest.raises(ProfileError, match="batch size 1"):
        profilers.measure(tiny[0], torch.randn(2, 3, 16, 16), device)


def test_kinds_are_mapped_by_layer_names(tiny: Network, tmp_path: Path) -> None:
    rows = [("stem", 3, 16, 5.0), ("inner", 16, 24, 7.0), ("back", 24, 16, 11.0), ("head", 16, 5, 13.0)]
    frame = pd.DataFrame(rows, columns=["layer", "c_in", "c_out", "latency_us"])
    frame.to_csv(tmp_path / "n.csv", index=False)
    assert profilers.measure(*tiny, target=f"table:{tmp_path / 'n.csv'}").seconds == pytest.approx(36e-6)
    named = tmp_path / "k.csv"
    frame.assign(layer=["first", "up", "down", "out"]).rename(columns={"layer": "kind"}).to_csv(named, index=False)
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps({"first": "stem", "up": ["inner"], "down": "ba*", "out": "head"}))
    found = profilers.measure(*tiny, target=f"table:{named}?layers={layers}")
    assert found.seconds == pytest.approx(36e-6)
    with pytest.raises(ProfileError, match="has no kind for"):
        profilers.measure(*tiny, target=f"table:{named}")
    layers.write_text(json.dumps({"second": "stem"}))
    with pytest.raises(ProfileError, match="'second'"):
        resolve(f"table:{named}?layers={layers}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("c_in,c_out\n1,1\n", "a time"),
        ("c_in,latency_ms\n1,1\n", "c_out"),
        ("c_in,c_out,latency_ms\n1,1,1\n", "it has neither"),
        ("kind,c_in,c_out,latency_ms\na,1,1,0\n", "row 2"),
        ("kind,c_in,c_out,latency_ms\na,1,1,3\na,1,1,4\n", "two times"),
        ("", "Cannot read"),
        ("kind,c_in,c_out,latency_ms\n", "has no rows"),
        ("kind,c_in,c_out,latency_ms\na,1,1,-3\n", "above 0"),
        ("kind,c_in,c_out,latency_ms\na,1,1,inf\n", "above 0"),
        ("kind,c_in,c_out,latency_ms\na,1,1,1e300\n", "below 100000 s"),
        ("kind,c_in,c_out,latency_ms\na,x,1,1\n", "'c_in' .* whole numbers .* got 'x' in row 2"),
        ("kind,c_in,c_out,latency_ms\na,1,1.5,1\n", "'c_out' .* whole numbers"),
        ("kind,c_in,c_out,latency_ms\na,1,,1\n", "'c_out' .* whole numbers"),
        ("kind,c_in,c_out,latency_ms\na,1,1e30,1\n", "'c_out' .* whole numbers"),
        ("k,hw_in,c_in,c_out,latency_ms\nq,1,1,1,1\n", "Kernel and groups .* got 'q'"),
        ("k,hw_in,groups,c_in,c_out,latency_ms\n3,1,q,1,1,1\n", "Kernel and groups .* 'q' in row 2"),
    ],
)
def test_invalid_tables_are_errors(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(ProfileError, match=words):
        resolve(f"table:{path}")


def test_damaged_compressed_tables_are_one_line(tmp_path: Path) -> None:
    content = gzip.compress(made(tmp_path / "t.csv").read_bytes())
    path = tmp_path / "t.csv.gz"
    path.write_bytes(content)
    wanted = LatencyTable.read(path).kinds
    generator = random.Random(0)
    for _ in range(100):
        changed = bytearray(content[: generator.choice([len(content), generator.randrange(len(content))])] or b"x")
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(ProfileError):
            found = LatencyTable.read(path).kinds
            assert {k: v.seconds for k, v in found.items()} == {k: v.seconds for k, v in wanted.items()}


def test_compressed_table_has_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"c_in," * 10_000))
    monkeypatch.setattr("profilers.targets.latency_table.MAX_BYTES", 10_000)
    with pytest.raises(ProfileError, match="more than 10000 bytes"):
        LatencyTable.read(path)


def test_an_empty_kind_is_read_by_its_geometry(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("kind,hw_in,k,c_in,c_out,latency_ms\n,16,3,8,8,1\n,16,3,8,16,2\n")
    (kind,) = LatencyTable.read(path).kinds.values()
    assert kind.seconds == {(8, 8): 1e-3, (8, 16): 2e-3}


@pytest.mark.parametrize("content", ["[1]", '{"a": 5}', '{"a": [5]}', "[" * 100_000, '{"a": "b", "a": "c"}', "x"])
def test_layers_that_are_no_mapping_are_one_line(content: str, tmp_path: Path) -> None:
    path, layers = made(tmp_path / "t.csv"), tmp_path / "layers.json"
    layers.write_text(content)
    with pytest.raises(ProfileError, match="layers=") as caught:
        resolve(f"table:{path}?layers={layers}")
    assert "\n" not in str(caught.value)


def test_invalid_devices_are_errors(tmp_path: Path) -> None:
    path = made(tmp_path / "t.csv")
    for device, words in (
        ("table:", "no file"),
        (f"table:{path}?outside=guess", "'guess'"),
        (f"table:{path}?inside=no", "'inside'"),
        (f"table:{tmp_path / 'absent.csv'}", "Cannot read"),
        (f"torch/table:{path}", "Omit --runtime"),
    ):
        with pytest.raises(ProfileError, match=words):
            resolve(device)
    with pytest.raises(ProfileError, match="--precision"):
        resolve(f"table:{path}", precision="fp16")


def test_command_says_that_times_are_estimates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "tests.fakes.machine:Tiny", "--input", "1x3x16x16"]
    device = ["--device", f"table:{made(tmp_path / 't.csv')}"]
    arguments = [*model, *device, "--samples", "8", "--holdout", "2", "--out", str(tmp_path / "p.sqlite")]
    assert latency.main(arguments) == 0
    text = capsys.readouterr().out
    assert "not measured: estimated from look-up table t.csv" in text
    assert "precision" not in text
    assert "CI" not in text
    assert latency.main([*arguments, "--json"]) == 0
    assert printed_json(capsys, "profile")["estimated"] == "estimated from look-up table t.csv"


# Raspberry Pi 3, WideResNet-40-2 -------------------------------------------------------------------------------------

KINDS = {"Conv_0": "conv1", "FC": "linear"} | {
    kind: pattern
    for g in (1, 2, 3)
    for kind, pattern in (
        (f"Stride_{g}", f"block{g}.0.conv1"),
        (f"Skip_{g}", f"block{g}.0.shortcut"),
        (f"No_Stride_{g}", [f"block{g}.*.conv2", f"block{g}.[1-9].conv1"]),
    )
}


@pytest.mark.needs_data
def test_wide_resnet_meets_a_latency_of_the_raspberry_pi(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    path, layers = shared_data("rpi3_wrn40_2/rpi3_wrn40_2_table.csv.gz"), tmp_path / "layers.json"
    layers.write_text(json.dumps(KINDS))
    pi = f"table:{path}?layers={layers}"
    model, inputs = models.load_model("wrn40_2")
    groups = find_groups(model, inputs)
    entries = pd.read_csv(path).set_index(["table", "c_in", "c_out"])["latency_s"]
    expected = entries["Conv_0", 3, 16] + entries["FC", 128, 1]
    for g, i, o in ((1, 16, 32), (2, 32, 64), (3, 64, 128)):
        expected += entries[f"Stride_{g}", i, o] + entries[f"Skip_{g}", i, o] + 11 * entries[f"No_Stride_{g}", o, o]
    profile = profilers.profile(model, inputs, pi, samples=14, holdout=4, groups=groups, out=tmp_path / "pi.sqlite")
    dense = profile.table[profile.table["split"] == "dense"].iloc[0]
    assert dense["seconds"] == pytest.approx(expected, rel=1e-12)
    cost = budgets.fit(profile, groups)
    limit = budgets.LatencyBudget("200ms", target=pi).limit(cost.dense)
    low, high = 0.05, 1.0
    for _ in range(30):  # the widest uniform keep ratio that the fitted model allows
        middle = (low + high) / 2
        low, high = (middle, high) if float(cost(np.full(len(groups), middle))) <= 0.97 * limit else (low, middle)
    widths = np.maximum((low * groups.sizes).astype(int), 1)
    small = shrink(model, groups, [np.arange(w) for w in widths])
    found = profilers.measure(small, inputs, pi, rules=MeasuringRules())
    assert 0.9 * limit < found.seconds <= limit
    assert found.estimated == f"estimated from look-up table {path.name}"
    plain = profilers.measure(small, inputs, f"table:{path}")
    assert plain.seconds == pytest.approx(found.seconds, rel=0.05), "kinds by geometry: near, not the same"
