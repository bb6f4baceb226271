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

    def pruned(self) -> pd.DataFrame:
        """Return the rows of the first method without those that were brought to the latency of another."""
        first = self.methods()[0] if self.methods() else ""
        return self.rows[
            (self.rows["method"] == first) & (self.rows["kind"] != "dense") & ~self.rows["matches"].map(_matches)
        ]

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
        for _, row in self.pruned().iterrows():
            share = percent(row["seconds"] / dense["seconds"])
            parts.append(f"{BUDGETS[row['kind']].title} {row['asked']}: {share}")
        return f"Asked for a budget, got of the dense latency: {'; '.join(parts)}." if parts else "Nothing was pruned."

    def asked_alike(self) -> tuple[pd.Series[Any], pd.Series[Any]] | None:
        """Return the networks of a latency budget and a FLOPs budget of the same share; None without such a pair."""
        first = self.pruned()
        for _, row in first[first["kind"] == "latency"].iterrows():
            other = first[(first["kind"] == "flops") & (first["asked"] == row["asked"])]
            if str(row["asked"]).endswith("%") and not other.empty:
                return row, other.iloc[0]
        return None

    def verdict(self) -> str:
        """Return the verdict on the latency budget of the headline; empty without one."""
        two = self.asked_alike()
        verdict = "" if two is None else two[0].get("verdict", "")
        return verdict if isinstance(verdict, str) else ""

    def _asked_and_got(self) -> str | None:
        """Return what a latency budget and a FLOPs budget of the same share gave; None without such a pair."""
        two = self.asked_alike()
        if two is None:
            return None
        got, gave = (percent(row["seconds"] / self.dense["seconds"]) for row in two)
        asked = two[0]["asked"]
        return (
            f"Asked for {asked} of the dense latency: the latency budget gave {got}, the FLOPs budget of {asked} gave "
            f"{gave}."
        )

    def _accuracies(self) -> list[str]:
        """Return how far the FLOPs budget is off, and the accuracies of the networks of the headline."""
        two = self.asked_alike()
        if two is None:
            return []
        ours, theirs = two
        off = float(theirs["seconds"] / self.dense["seconds"]) / (float(str(ours["asked"]).rstrip("%")) / 100) - 1
        way = f"{percent(abs(off), 0)} {'slower' if off > 0 else 'faster'} than asked"
        way = "as fast as asked, within 1%" if abs(off) < 0.01 else way
        return [
            f"The network of the FLOPs budget is {way}. Accuracy is {percent(ours['accuracy'])} with the latency "
            f"budget, {percent(theirs['accuracy'])} with the FLOPs budget and {percent(self.dense['accuracy'])} of the "
            f"dense network."
        ]

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
        if self._asked_and_got() is not None:
            pairs = self.pairs()
            return [*self._missed(), *self._accuracies(), *([self._equal(*pairs[0])] if pairs else [])]
        dense, found = self.dense, self._missed(met=True)
        for _, row in self.pruned().drop_duplicates("kind").iterrows():
            if row["kind"] != "latency":
                name = f"{BUDGETS[row['kind']].title} budget of {row['asked']}"
                share = percent(row["seconds"] / dense["seconds"])
                found.append(f"The {name} gave a network that takes {share} of the dense latency.")
        return found

    def _missed(self, *, met: bool = False) -> list[str]:
        """Return whether the first latency budget was met, with the measured time; ``met``: also where it was."""
        ours = self.pruned()
        ours = ours[ours["kind"] == "latency"]
        if ours.empty:
            return []
        row = ours.iloc[0]
        used = float(row["seconds"] / row["limit"])
        name = f"The latency budget of {row['asked']}"
        verdict = row.get("verdict") or (Verdict.MET if used <= 1 else Verdict.NOT_MET)
        if verdict == Verdict.INCONCLUSIVE:
            return [f"{name} is too close to its limit for a verdict: measured {percent(used)} of it."]
        if verdict == Verdict.MET:
            return [f"{name} is met: measured {seconds(row['seconds'])}."] if met else []
        return [f"{name} is not met: measured {percent(used)} of the limit."]

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
