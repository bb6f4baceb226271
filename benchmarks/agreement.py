"""How far below the limit must `allocate` aim, so that `verify` agrees an hour later?

A simulation of the two measurements with the product's own intervals. A network's ratio shifts between sittings with
a standard deviation that differs between networks. The distribution is the one of which the prior is the most likely
(see `repeatability.py --prior`), or half as wide. The anchor shifts with the network (correlation 0.6, measured on the
same lines). `allocate` aims at a multiple of its interval's reach below the limit and ends up to 1% lower, because
widths are whole numbers. `verify` looks once, with the scatter of both sittings.

    python benchmarks/agreement.py
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dsa_hw.pipeline.reading import CONFIDENCE
from profilers.measuring.sittings import PRIOR_RATIO, Scatter, Sitting
from profilers.measuring.statistics import Estimate

OWN, FREEDOM = 0.004, 8.0  # error of a ratio within a sitting, and its degrees of freedom
SHARED = 0.6  # correlation of the shifts of a network and of its anchor
HOUR = 3600.0


@dataclass
class Network:
    """A network whose ratio shifts between sittings.

    Attributes:
        sd: Standard deviation of a shift.
        rng: Source of random numbers.
    """

    sd: float
    rng: np.random.Generator

    def sit(self) -> tuple[float, float]:
        """Return the errors of the anchor's and of the network's measured ratio in a new sitting, as logarithms."""
        shift, own = self.sd * self.rng.normal(size=2), OWN * self.rng.normal(size=2)
        return shift[0] + own[0], SHARED * shift[0] + math.sqrt(1 - SHARED**2) * shift[1] + own[1]


def reach(anchors: list[float]) -> float:
    """Return the reach of the interval of a ratio after sittings that found these ratios of the anchor."""
    known = [Sitting(Estimate(log, OWN**2), Estimate(0.0, OWN**2), HOUR * i) for i, log in enumerate(anchors)]
    scatter = Scatter.of(known)
    error = Estimate(0.0, OWN**2, FREEDOM).widened(scatter.ratio, scatter.ratio_freedom)
    return math.log(error.interval(CONFIDENCE)[1])


def outcome(network: Network, margin: float, earlier: int) -> tuple[float, str, bool]:
    """Allocate, verify an hour later, and return the use, the second verdict and whether the limit is exceeded."""
    anchors = [network.sit()[0] for _ in range(earlier)]
    anchor, error = network.sit()
    anchors.append(anchor)
    used = -margin * reach(anchors) - network.rng.uniform(0.0, 0.01)
    truth = used - error
    anchor, error = network.sit()
    width = reach([*anchors, anchor])
    found = truth + error
    verdict = "MET" if found + width <= 0 else "NOT MET" if found - width > 0 else "INCONCLUSIVE"
    return math.exp(used), verdict, truth > 0


def main() -> None:
    """Print the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    args = parser.parse_args()
    rows = []
    for typical in (PRIOR_RATIO, PRIOR_RATIO / 2):
        for earlier in (0, 4):
            for margin in (1.0, 1.4, 1.8, 2.2):
                rng = np.random.default_rng(0)
                sds = np.minimum(np.sqrt(2 * typical**2 / rng.chisquare(2, args.trials)), 0.05)
                found = [outcome(Network(sd, rng), margin, earlier) for sd in sds]
                verdicts = pd.Series([verdict for _, verdict, _ in found])
                rows.append({
                    "typical sd %": 100 * typical, "earlier sittings": earlier, "margin / reach": margin,
                    "use %": 100 * np.mean([used for used, _, _ in found]),
                    **{f"{name} %": 100 * (verdicts == name).mean() for name in ("MET", "INCONCLUSIVE", "NOT MET")},
                    "really exceeded %": 100 * np.mean([over for _, _, over in found]),
                })  # fmt: skip
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.1f}".format))


if __name__ == "__main__":
    main()
