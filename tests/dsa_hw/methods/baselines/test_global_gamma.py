"""One threshold on |gamma|."""

from __future__ import annotations

import numpy as np

from dsa_hw.methods.baselines import global_gamma
from tests.fakes.problems import Network, problem_of, used


def test_threshold_is_the_smallest_that_meets_the_budget(network: Network) -> None:
    problem = problem_of(network, share=0.5)
    proposal = global_gamma(problem)
    widths = np.rint(proposal.alpha * problem.groups.sizes).astype(int)
    assert proposal.importance is not None
    ordered = [np.sort(score)[::-1] for score in proposal.importance]
    floor = [max(1, int(np.ceil(0.05 * c))) for c in problem.groups.sizes]
    kept = min(s[w - 1] for s, w, f in zip(ordered, widths, floor, strict=True) if w > f)
    gone = max(s[w] for s, w in zip(ordered, widths, strict=True) if w < s.size)
    assert gone <= kept
    # With the most important of the removed units the budget is exceeded.
    more = widths.copy()
    more[int(np.argmax([s[w] if w < s.size else -1.0 for s, w in zip(ordered, widths, strict=True)]))] += 1
    assert used(problem, more / problem.groups.sizes)[0] > 1.0
