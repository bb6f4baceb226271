"""The scatter between sittings, and the file in which it is kept."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.measuring.sittings import (
    PRIOR_RATIO,
    PRIOR_SCALE,
    Scatter,
    Sitting,
    SittingFile,
    anchor_widths,
    sitting_key,
)
from profilers.measuring.statistics import Estimate

VARIANCE = 0.002**2
HOUR = 3600.0


def sitting(ratio: float, scale: float = 1e-2, variance: float = VARIANCE, *, hour: float = 0.0) -> Sitting:
    return Sitting(Estimate(math.log(ratio), variance), Estimate(math.log(scale), variance), hour * HOUR)


def sittings(rng: np.random.Generator, n: int, ratio: float, scale: float = 0.0, first: int = 0) -> list[Sitting]:
    """Sittings, an hour apart, whose ratios and scales scatter by these standard deviations and by their own error."""
    own = math.sqrt(VARIANCE)
    logs = rng.normal(0, 1, (4, n))
    return [
        sitting(0.4 * math.exp(ratio * a + own * b), 1e-2 * math.exp(scale * c + own * d), hour=first + hour)
        for hour, (a, b, c, d) in enumerate(zip(*logs, strict=True))
    ]


def test_prior_stands_before_the_second_sitting() -> None:
    for found in (Scatter(), Scatter.of([]), Scatter.of([sitting(0.5)])):
        assert found.ratio == pytest.approx(PRIOR_RATIO**2)
        assert found.scale == pytest.approx(PRIOR_SCALE**2)
        assert (found.ratio_freedom, found.scale_freedom) == (Scatter().ratio_freedom, Scatter().scale_freedom)


@given(st.lists(st.floats(-0.05, 0.05), min_size=1, max_size=8), st.lists(st.floats(0, 0.16), min_size=1, max_size=8))
@settings(max_examples=60)
def test_measurements_within_ten_minutes_are_one_sitting(shifts: list[float], hours: list[float]) -> None:
    """However many there are, they say nothing about another hour."""
    together = [sitting(0.4 * math.exp(shift), hour=hour) for shift, hour in zip(shifts, hours, strict=False)]
    assert Scatter.of(together) == Scatter.of([sitting(0.4)])
    later = [sitting(0.4 * math.exp(shift), hour=2 + hour) for shift, hour in zip(shifts, hours, strict=False)]
    one, two = (math.exp(np.mean([s.ratio.log for s in part])) for part in (together, later))
    few = VARIANCE / len(together)
    expected = Scatter.of([sitting(one, variance=few), sitting(two, variance=few, hour=2)])
    found = Scatter.of([*later, *together])
    assert found.sittings == 2
    assert found.ratio == pytest.approx(expected.ratio, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("ratio", "scale"), [(0.03, 0.005), (0.005, 0.08)])
def test_scatter_is_that_of_the_sittings_without_their_own_error(ratio: float, scale: float) -> None:
    rng = np.random.default_rng(0)
    found = [Scatter.of(sittings(rng, 400, ratio, scale)) for _ in range(5)]
    for name, truth, prior in (("ratio", ratio, PRIOR_RATIO), ("scale", scale, PRIOR_SCALE)):
        counts = getattr(Scatter(), f"{name}_freedom")
        seen = [getattr(f, name) * (counts + 399) / 399 - prior**2 * counts / 399 for f in found]
        assert np.mean(seen) == pytest.approx(truth**2, rel=0.15)


def test_sittings_that_agree_lower_the_scatter_and_raise_its_freedom() -> None:
    rng = np.random.default_rng(1)
    found = [Scatter.of(sittings(rng, n, 0.0)) for n in (1, 5, 30)]
    assert found[0].ratio > found[1].ratio > found[2].ratio > 0
    assert [f.ratio_freedom - Scatter().ratio_freedom for f in found] == [0, 4, 29]
    assert [f.sittings for f in found] == [1, 5, 30]


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=30))
@settings(max_examples=60)
def test_anchor_has_about_half_of_each_group_in_multiples_of_eight(sizes: list[int]) -> None:
    widths = anchor_widths(sizes)
    for size, width in zip(sizes, widths, strict=True):
        assert 1 <= width <= size
        assert width % 8 == 0 if size >= 16 else width == max(size // 2, 1)
        assert abs(width - size / 2) <= 8
    assert anchor_widths(np.asarray(sizes)) == widths


def test_key_distinguishes_environments_networks_inputs_and_statistics() -> None:
    base = ("e", "f", [[[1, 3, 8, 8], "torch.float32"]], "quiet")
    others = [("E", *base[1:]), ("e", "F", *base[2:]), ("e", "f", [], "quiet"), (*base[:3], "median")]
    assert len({sitting_key(*arguments) for arguments in (base, *others)}) == 5
    again = json.loads(json.dumps(base))
    assert sitting_key(*again) == sitting_key(*base), "as read from a store"


def test_sittings_are_kept_by_key(tmp_path: Path) -> None:
    file = SittingFile(tmp_path / "new" / "sittings.jsonl")
    assert file.scatter("a") == Scatter()
    known = [sitting(0.30), sitting(0.33, hour=1)]
    for each in known:
        file.add("a", each)
    file.add("b", sitting(0.9))
    again = SittingFile(file.path)
    assert again.scatter("a") == Scatter.of(known)
    assert again.scatter("a").ratio > Scatter().ratio
    assert again.scatter("b").sittings == 1
    assert again.scatter("c") == Scatter()


def test_file_is_in_the_users_cache_folder(tmp_path: Path) -> None:
    assert SittingFile().path == tmp_path / "cache" / "sittings.jsonl"


def test_only_the_last_thirty_sittings_count(tmp_path: Path) -> None:
    file = SittingFile(tmp_path / "s.jsonl")
    rng = np.random.default_rng(0)
    for old in sittings(rng, 20, 0.3):
        file.add("a", old)
    assert file.scatter("a").ratio > 0.1**2
    new = sittings(rng, 30, 0.0, first=20)
    for i, each in enumerate(new):
        file.add("a", each)
        file.add(f"other {i}", sitting(0.1))
    assert file.scatter("a") == Scatter.of(new)
    assert len(file.path.read_text().splitlines()) == 80, "nothing is deleted"


def _append(path: str, writer: int, lines: int) -> None:
    file = SittingFile(path)
    for i in range(lines):
        file.add(f"writer {writer}", sitting(0.1 + i / 1000, hour=i))


def test_several_processes_append_at_once_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append, args=(str(path), writer, 150)) for writer in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert len(rows) == 600
    for writer in range(4):
        ratios = [row["ratio"][0] for row in rows if row["key"] == f"writer {writer}"]
        assert ratios == [math.log(0.1 + i / 1000) for i in range(150)]
    assert SittingFile(path).scatter("writer 3").sittings == 30


@pytest.mark.parametrize(
    "damage",
    [
        b'{"key": "a", "ratio": [-0.5, 1e-6], "sca',
        b"",
        b"\xff\xfe\x00 no text",
        b"[1, 2]",
        b'"a"',
        b'{"key": "a", "ratio": [-0.5, 1e-6]}',
        b'{"key": "a", "ratio": [NaN, 1e-6], "scale": [-4.0, 1e-6]}',
        b'{"key": "a", "ratio": [-0.5, -1.0], "scale": [-4.0, 1e-6]}',
        b'{"key": "a", "ratio": [-0.5, 1e-6], "scale": [-4.0, Infinity]}',
        b'{"key": "a", "ratio": "long", "scale": [-4.0, 1e-6]}',
        b'{"key": "a", "ratio": [-0.5, 1e-6], "scale": [-4.0, 1e-6]}',
        b'{"key": "a", "ratio": [-0.5, 1e-6], "scale": [-4.0, 1e-6], "time": NaN}',
    ],
)
def test_damaged_line_is_skipped(tmp_path: Path, damage: bytes) -> None:
    file = SittingFile(tmp_path / "s.jsonl")
    file.add("a", sitting(0.4))
    with file.path.open("ab") as stream:
        stream.write(damage + b"\n")
    file.add("a", sitting(0.5, hour=1))
    assert file.scatter("a") == Scatter.of([sitting(0.4), sitting(0.5, hour=1)])


@given(st.floats(0, 1))
@settings(max_examples=40)
def test_file_that_ends_anywhere_is_continued(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    file = SittingFile(tmp_path_factory.mktemp("cut") / "s.jsonl")
    known = [sitting(0.4), sitting(0.45, hour=1)]
    for each in known:
        file.add("a", each)
    whole = file.path.read_bytes()
    end = round(share * len(whole))
    file.path.write_bytes(whole[:end])
    complete = known[: sum(whole[i] == ord("}") for i in range(end))]
    assert file.scatter("a") == Scatter.of(complete)
    last = sitting(0.5, hour=2)
    file.add("a", last)
    assert file.scatter("a") == Scatter.of([*complete, last]), "a cut line does not swallow the next one"


def test_folder_that_cannot_be_written_is_reported_and_the_process_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    file = SittingFile(tmp_path / "file" / "s.jsonl")
    known = [sitting(0.4), sitting(0.5, hour=1)]
    for each in known:
        file.add("a", each)
    assert "DSA_HW_CACHE" in caplog.text
    assert file.scatter("a") == Scatter.of(known), "this process has them in memory"
    assert SittingFile(file.path).scatter("a") == Scatter()
