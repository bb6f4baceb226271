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


def sitting(ratio: float, scale: float = 1e-2, variance: float = VARIANCE) -> Sitting:
    return Sitting(Estimate(math.log(ratio), variance), Estimate(math.log(scale), variance))


def sittings(rng: np.random.Generator, n: int, ratio: float, scale: float = 0.0) -> list[Sitting]:
    """Sittings whose ratios and scales scatter by these standard deviations, and by their own error."""
    own = math.sqrt(VARIANCE)
    logs = rng.normal(0, 1, (4, n))
    return [
        sitting(0.4 * math.exp(ratio * a + own * b), 1e-2 * math.exp(scale * c + own * d))
        for a, b, c, d in zip(*logs, strict=True)
    ]


def test_prior_stands_before_the_second_sitting() -> None:
    for found in (Scatter(), Scatter.of([]), Scatter.of([sitting(0.5)])):
        assert found.ratio == pytest.approx(PRIOR_RATIO**2)
        assert found.scale == pytest.approx(PRIOR_SCALE**2)
        assert (found.ratio_freedom, found.scale_freedom) == (Scatter().ratio_freedom, Scatter().scale_freedom)
    assert Scatter.of([sitting(0.5)]).anchor == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(("ratio", "scale"), [(0.03, 0.005), (0.005, 0.08)])
def test_scatter_is_that_of_the_sittings_without_their_own_error(ratio: float, scale: float) -> None:
    rng = np.random.default_rng(0)
    found = [Scatter.of(sittings(rng, 400, ratio, scale)) for _ in range(5)]
    assert np.mean([f.ratio for f in found]) == pytest.approx(ratio**2, rel=0.15)
    assert np.mean([f.scale for f in found]) == pytest.approx(scale**2, rel=0.15)


def test_sittings_that_agree_lower_the_scatter_and_raise_its_freedom() -> None:
    rng = np.random.default_rng(1)
    found = [Scatter.of(sittings(rng, n, 0.0)) for n in (1, 5, 30)]
    assert found[0].ratio > found[1].ratio > found[2].ratio > 0
    assert [f.ratio_freedom - Scatter().ratio_freedom for f in found] == [0, 4, 29]
    assert [f.sittings for f in found] == [1, 5, 30]


@given(st.floats(-5, 0.5), st.floats(0.1, 0.95))
@settings(max_examples=60, deadline=None)
def test_narrow_networks_scatter_more_than_wide_ones_within_bounds(log: float, anchor: float) -> None:
    known = Scatter.of([sitting(anchor)])
    proportion = math.sqrt(known.at(log) / known.ratio)
    assert 0.7 - 1e-9 <= proportion <= 2 + 1e-9
    assert known.at(log) <= known.at(log - 0.1)
    own = known.at(math.log(anchor))
    assert own == pytest.approx(known.ratio) or anchor > 0.9, "a ratio near 1 says little about other networks"


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
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
    for ratio in (0.30, 0.33):
        file.add("a", sitting(ratio))
    file.add("b", sitting(0.9))
    again = SittingFile(file.path)
    assert again.scatter("a") == Scatter.of([sitting(0.30), sitting(0.33)])
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
    new = sittings(rng, 30, 0.0)
    for i, each in enumerate(new):
        file.add("a", each)
        file.add(f"other {i}", sitting(0.1))
    assert file.scatter("a") == Scatter.of(new)
    assert len(file.path.read_text().splitlines()) == 80, "nothing is deleted"


def _append(path: str, writer: int, lines: int) -> None:
    file = SittingFile(path)
    for i in range(lines):
        file.add(f"writer {writer}", sitting(0.1 + i / 1000))


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
    ],
)
def test_damaged_line_is_skipped(tmp_path: Path, damage: bytes) -> None:
    file = SittingFile(tmp_path / "s.jsonl")
    file.add("a", sitting(0.4))
    with file.path.open("ab") as stream:
        stream.write(damage + b"\n")
    file.add("a", sitting(0.5))
    assert file.scatter("a") == Scatter.of([sitting(0.4), sitting(0.5)])


@given(st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_file_that_ends_anywhere_is_continued(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    file = SittingFile(tmp_path_factory.mktemp("cut") / "s.jsonl")
    for ratio in (0.4, 0.45):
        file.add("a", sitting(ratio))
    whole = file.path.read_bytes()
    end = round(share * len(whole))
    file.path.write_bytes(whole[:end])
    complete = [sitting(ratio) for ratio in (0.4, 0.45)][: sum(whole[i] == ord("}") for i in range(end))]
    assert file.scatter("a") == Scatter.of(complete)
    file.add("a", sitting(0.5))
    assert file.scatter("a") == Scatter.of([*complete, sitting(0.5)]), "a cut line does not swallow the next one"


def test_folder_that_cannot_be_written_is_reported_and_the_process_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    file = SittingFile(tmp_path / "file" / "s.jsonl")
    known = [sitting(0.4), sitting(0.5)]
    for each in known:
        file.add("a", each)
    assert "DSA_HW_CACHE" in caplog.text
    assert file.scatter("a") == Scatter.of(known), "this process has them in memory"
    assert SittingFile(file.path).scatter("a") == Scatter()
