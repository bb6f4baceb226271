"""The findings of a comparison, and sentences that follow from their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from budgets.budget import BUDGETS
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.profiles import Profile
from dsa_hw.utils.text import percent

if TYPE_CHECKING:
    from budgets import CostModel

__all__ = ["COLUMNS", "Difference", "Findings", "seconds"]

COLUMNS = (
    "id", "kind", "asked", "method", "matches", "limit", "flops", "params", "predicted", "seconds", "low", "high",
    "runs", "trusted", "accuracy_before", "accuracy",
)  # fmt: skip
# Within this share two measured latencies are called the same.
_SAME = 0.03


@dataclass(frozen=True)
class Difference:
    """Difference of two accuracies.

    Attributes:
        points: The difference in percentage points.
        error: Half of its 95% interval over paired test images; NaN where single predictions are not known.
    """

    points: float
    error: float

    @property
    def verdict(self) -> str:
        """Either "better", "worse", or "inconclusive" where the interval contains zero or is not known."""
        if math.isnan(self.error) or abs(self.points) <= self.error:
            return "inconclusive"
        return "better" if self.points > 0 else "worse"


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything that the page shows.

    Attributes:
        rows: A row for each network, with `COLUMNS`. ``kind`` is "dense" or the key of a budget; ``matches`` names the
            network whose measured latency this one was brought to. Times in seconds, accuracies in [0, 1].
        widths: A row for each network (index: id), a column for each channel group.
        sizes: Dense widths (K,).
        histories: The steps of each allocation.
        correct: Which test images each network classifies correctly, bool (n,).
        profile: The profile of latency.
        cost: The cost model of latency.
        about: Model, data, target, command and settings, as text.
    """

    rows: pd.DataFrame
    widths: pd.DataFrame
    sizes: NDArray[np.int64]
    histories: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    correct: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    profile: Profile | None = None
    cost: CostModel | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def dense(self) -> pd.Series[Any]:
        """The row of the dense network."""
        return self.rows[self.rows["kind"] == "dense"].iloc[0]

    def row(self, id: str) -> pd.Series[Any]:
        """Return the row of one network."""
        return self.rows[self.rows["id"] == id].iloc[0]

    def pairs(self) -> list[tuple[pd.Series[Any], pd.Series[Any]]]:
        """Return pairs of a latency-budget network and the network brought to its latency, DSA first."""
        found = [
            (self.row(str(r["matches"])), r)
            for _, r in self.rows.iterrows()
            if isinstance(r["matches"], str) and r["matches"]
        ]
        return sorted(found, key=lambda pair: (pair[0]["method"] != "dsa", pair[1]["method"] != "dsa"))

    def difference(self, a: str, b: str) -> Difference:
        """Return the accuracy of network ``a`` minus that of network ``b``."""
        points = 100 * float(self.row(a)["accuracy"] - self.row(b)["accuracy"])
        if a not in self.correct or b not in self.correct:
            return Difference(points, math.nan)
        each = self.correct[a].astype(float) - self.correct[b].astype(float)
        return Difference(points, 196 * float(each.std(ddof=1)) / math.sqrt(len(each)))

    def headline(self) -> str:
        """Return the result in one sentence."""
        if (text := self._asked_and_got()) is not None:
            return text
        pairs = self.pairs()
        if pairs:
            ours, theirs = pairs[0]
            return self._equal(ours, theirs)
        dense = self.dense
        parts = []
        for _, row in self.rows[self.rows["kind"] != "dense"].iterrows():
            if row["method"] == self.methods()[0]:
                share = row["seconds"] / dense["seconds"]
                parts.append(f"{BUDGETS[row['kind']].title} {row['asked']} takes {percent(share)} of the dense latency")
        return f"A budget of {'; of '.join(parts)}." if parts else "Nothing was pruned."

    def _asked_and_got(self) -> str | None:
        """Return what a latency budget and a FLOPs budget of the same share gave; None without such a pair."""
        first = self.rows[(self.rows["method"] == (self.methods() or [""])[0]) & ~self.rows["matches"].map(_matches)]
        ours = first[first["kind"] == "latency"]
        for _, row in ours.iterrows():
            other = first[(first["kind"] == "flops") & (first["asked"] == row["asked"])]
            if not str(row["asked"]).endswith("%") or other.empty:
                continue
            theirs, dense = other.iloc[0], self.dense
            asked = float(str(row["asked"]).rstrip("%")) / 100
            got, gave = (float(r["seconds"] / dense["seconds"]) for r in (row, theirs))
            off = f"{percent(abs(gave / asked - 1), 0)} too {'slow' if gave > asked else 'fast'}"
            met = f"{str(row.get('verdict', '')).lower()}, " if row.get("verdict") else ""
            return (
                f"Asked for {row['asked']} of the latency: the latency budget gave {percent(got)} ({met}accuracy "
                f"{percent(row['accuracy'])}), the FLOPs budget of {row['asked']} gave {percent(gave)} ({off}, "
                f"accuracy {percent(theirs['accuracy'])}); the dense network has {percent(dense['accuracy'])}."
            )
        return None

    def _equal(self, ours: pd.Series[Any], theirs: pd.Series[Any]) -> str:
        ratio, both = float(theirs["seconds"] / ours["seconds"]), (seconds(ours["seconds"]), seconds(theirs["seconds"]))
        if abs(ratio - 1) <= _SAME / 3:
            when = f"At the same measured latency ({both[0]})"
        elif abs(ratio - 1) <= _SAME:
            when = f"At nearly the same measured latency ({both[0]} and {both[1]})"
        else:
            when = f"At {both[0]} against {both[1]}, the closest that was found"
        if (self.widths.loc[str(ours["id"])] == self.widths.loc[str(theirs["id"])]).all():
            return f"{when}, both budgets give the same network."
        d, other = self.difference(str(ours["id"]), str(theirs["id"])), BUDGETS[theirs["kind"]].title
        if d.verdict == "inconclusive":
            sure = "" if math.isnan(d.error) else f" ± {d.error:.1f}"
            text = f"accuracies of latency and {other} budget do not differ clearly ({d.points:+.1f}{sure} points)"
        else:
            size = f"{abs(d.points):.1f} percentage point{'' if f'{abs(d.points):.1f}' == '1.0' else 's'}"
            more = "more" if d.verdict == "better" else "less"
            text = f"the latency budget's network is {size} {more} accurate than the {other} budget's"
        return f"{when}, {text}."

    def lede(self) -> list[str]:
        """Return two or three sentences: the latency that each budget gave, and whether it was met."""
        dense, found = self.dense, []
        first = self.methods()[0] if self.methods() else ""
        chosen = self.rows[(self.rows["method"] == first) & ~self.rows["matches"].map(_matches)]
        for _, row in chosen.drop_duplicates("kind").iterrows():
            share = float(row["seconds"] / dense["seconds"])
            name = f"{BUDGETS[row['kind']].title} budget of {row['asked']}"
            if row["kind"] == "latency":
                used = float(row["seconds"] / row["limit"])
                kept = "was met" if used <= 1 else f"was missed by {percent(used - 1)}"
                if row.get("verdict") == Verdict.INCONCLUSIVE:
                    kept = "is too close to its limit for a verdict"
                found.append(f"The {name} {kept}: measured {seconds(row['seconds'])}, {percent(share)} of dense.")
            else:
                found.append(f"The {name} gave a network that takes {percent(share)} of the dense latency.")
        if self._asked_and_got() is not None and (pairs := self.pairs()):
            found.append(self._equal(*pairs[0]))
        return found

    def methods(self) -> list[str]:
        """Return the names of the methods that were compared, "dsa" first."""
        names = [m for m in dict.fromkeys(self.rows["method"]) if m]
        return sorted(names, key=lambda m: m != "dsa")


def _matches(value: Any) -> bool:
    """Return whether a network was made to match the latency of another."""
    return isinstance(value, str) and bool(value)


def seconds(value: float) -> str:
    """Format a time in milliseconds.

    >>> seconds(0.001234)
    '1.23 ms'
    """
    return f"{1e3 * float(value):#.3g}".rstrip(".") + " ms"
