"""The summary of a profile as text and as plain data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dsa_hw.profiles import Profile
from profilers.profiling.api import SelfCheck
from profilers.summary import profile_data, profile_text, self_check_text

OUT = Path("p.sqlite")
TABLE = pd.DataFrame(
    {
        "stem": [16, 8, 12],
        "seconds": [4e-3, 2e-3, 3e-3],
        "low": [3.9e-3, 1.9e-3, 2.9e-3],
        "high": [4.1e-3, 2.1e-3, 3.1e-3],
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
    rejected=0.25,
    untrusted=2,
    breakdown={"export": 1.0, "measure": 2.5},
    prepared="narrowed",
    agreement=2e-6,
)


def lines(profile: Profile, allow: float = 0.02) -> dict[str, str]:
    *rows, last = profile_text(profile, OUT, allow).splitlines()
    return {**{row.partition("  ")[0]: row.partition("  ")[2].strip() for row in rows}, "next": last}


def test_text_states_every_fact_of_a_profile() -> None:
    assert lines(PROFILE) == {
        "network": "tiny, 1 channel groups",
        "target": "torch/cpu fp32 x1",
        "dense": "4 ms, 95% CI [3.9, 4.1] ms (quiet)",
        "range": "2 to 4 ms",
        "configurations": "1 dense, 1 train, 1 holdout",
        "grid": "4 (1 groups); off the grid up to 25% slower (15 channels of stem)",
        "noise": "spread 1.2% (median), 25% of the runs rejected",
        "left out": "2 configurations that cannot be trusted yet",
        "networks": "narrowed, outputs agree to 2e-06",
        "time": "4 s: export 1.0, measure 2.5",
        "store": "p.sqlite",
        "next": "next: dsa-hw fit p.sqlite",
    }


def test_estimates_have_neither_interval_nor_noise() -> None:
    found = lines(replace(PROFILE, estimated="estimated by Vela 5.2.0"))
    assert found["estimated"] == "not measured: estimated by Vela 5.2.0"
    assert found["dense"] == "4 ms"
    assert "noise" not in found


def test_next_command_repeats_the_allowance() -> None:
    assert lines(PROFILE, allow=0.05)["next"] == "next: dsa-hw fit p.sqlite --allow 5%"


def test_data_is_json_with_a_record_per_configuration() -> None:
    found = json.loads(json.dumps(profile_data(PROFILE, OUT)))
    assert [row["seconds"] for row in found["configurations"]] == [4e-3, 2e-3, 3e-3]
    assert (found["target"], found["unit"], found["rejected"]) == ("torch/cpu fp32 x1", "s", 0.25)


def test_self_check_lists_both_values_and_their_difference() -> None:
    table = pd.DataFrame({"first": [1e-3, 2e-3], "second": [1.01e-3, 1.99e-3], "difference": [0.01, -0.005]})
    *_, first, second, last = self_check_text(SelfCheck(table, "t"), "latency").splitlines()
    assert first.split() == ["1", "1.01", "+1.00%"]
    assert second.split() == ["2", "1.99", "-0.50%"]
    assert last == "Difference: median 0.75%, largest 1.00%."
