"""The summary of a profile as text and as plain data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dsa_hw.profiles import Profile
from profilers.profiling.api import SelfCheck
from profilers.summary import profile_data, profile_text, self_check_data, self_check_text

OUT = Path("p.sqlite")
TABLE = pd.DataFrame(
    {
        "stem": [16, 8, 12],
        "seconds": [4e-3, 2e-3, 3e-3],
        "low": [3.9e-3, 1.9e-3, 2.9e-3],
        "high": [4.1e-3, 2.1e-3, 3.1e-3],
        "error": [0.0, 0.004, 0.005],
        "split": ["dense", "train", "holdout"],
        "runs": [20, 20, 20],
    }
)
PROFILE = Profile(
    TABLE,
    names=("stem",),
    sizes=(16,),
    target="torch/cpu fp32 x1",
    network="tiny",
    grid={"stem": 4},
    grid_evidence=({"group": "stem", "width": 15, "channels": 15, "excess": 0.25},),
    statistic="quiet",
    noise=0.012,
    interval=0.017,
    untrusted=2,
    breakdown={"export": 1.0, "measure": 2.5},
    prepared="narrowed",
    agreement=2e-6,
)


def lines(profile: Profile) -> dict[str, str]:
    *rows, last = profile_text(profile, OUT).splitlines()
    return {**{row.partition("  ")[0]: row.partition("  ")[2].strip() for row in rows}, "next": last}


def test_text_states_every_fact_of_a_profile() -> None:
    assert lines(PROFILE) == {
        "network": "tiny, 1 channel groups",
        "target": "torch/cpu fp32 x1",
        "dense": "4 ms, 95% CI [3.9, 4.1] ms (quiet)",
        "range": "2 to 4 ms",
        "configurations": "1 dense, 1 train, 1 holdout",
        "grid": "4 (1 groups); off the grid up to 25% slower (15 channels of stem)",
        "precision": "+/-1.7% of the ratio to the dense network (median of the 95% intervals); spread of the runs 1.2%",
        "left out": "2 configurations that are less precise than required",
        "networks": "narrowed, outputs agree to 2e-06",
        "time": "4 s: export 1.0, measure 2.5",
        "store": "p.sqlite",
        "next": "next: dsa-hw fit p.sqlite",
    }


def test_estimates_have_neither_interval_nor_precision() -> None:
    found = lines(replace(PROFILE, estimated="estimated by Vela 5.2.0"))
    assert found["estimated"] == "not measured: estimated by Vela 5.2.0"
    assert found["dense"] == "4 ms"
    assert "precision" not in found


def test_data_is_json_with_a_record_per_configuration() -> None:
    found = json.loads(json.dumps(profile_data(PROFILE, OUT)))
    assert [row["seconds"] for row in found["configurations"]] == [4e-3, 2e-3, 3e-3]
    assert (found["target"], found["unit"], found["interval"]) == ("torch/cpu fp32 x1", "s", 0.017)
    assert [row["error"] for row in found["configurations"]] == [0.0, 0.004, 0.005]


CHECK = SelfCheck(
    pd.DataFrame(
        {
            "first": [1e-3, 2e-3, 4e-3],
            "second": [1.01e-3, 1.99e-3, 4.08e-3],
            "difference": [0.01, -0.005, 0.02],
            "ratio_difference": [0.0, -0.015, 0.01],
        }
    ),
    "t",
)


def test_self_check_lists_both_values_and_their_differences() -> None:
    *_, first, second, third, last = self_check_text(CHECK, "latency").splitlines()
    assert first.split() == ["1", "1.01", "+1.00%", "+0.00%"]
    assert second.split() == ["2", "1.99", "-0.50%", "-1.50%"]
    assert third.split() == ["4", "4.08", "+2.00%", "+1.00%"]
    assert last == "Difference of the ratios: median 1.25%, largest 1.50%.", "the dense network's is always 0"


def test_self_check_as_data_is_json() -> None:
    found = json.loads(json.dumps(self_check_data(CHECK)))
    assert (found["target"], found["median"], found["largest"]) == ("t", 0.0125, 0.015)
    assert found["configurations"][1]["ratio_difference"] == -0.015
