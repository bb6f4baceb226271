"""NetAdapt: fine-tuning between iterations, and the choice of the group."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.channels import masked, select_channels
from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines import netadapt
from tests.fakes.problems import Network, loader, problem_of, used


def test_weights_are_tuned_between_iterations(network: Network) -> None:
    options = {"iterations": 3, "batches": 1, "tune_steps": 2, "score_steps": 1}
    problem = problem_of(network, share=0.7, options=options, train=loader())
    proposal = netadapt(problem)
    assert proposal.model is not problem.model
    assert any(
        not torch.equal(a, b) for a, b in zip(problem.model.parameters(), proposal.model.parameters(), strict=True)
    )
    assert used(problem, proposal.alpha)[0] <= 1.0
    np.testing.assert_array_equal(proposal.alpha, netadapt(problem).alpha)
    with pytest.raises(DsaError, match="`train` loader"):
        netadapt(dataclasses.replace(problem, train=None))


def test_candidates_are_scored_after_short_term_fine_tuning_that_is_discarded(network: Network) -> None:
    val = list(loader(32, shuffle=False))
    options = {"iterations": 2, "batches": 1}
    plain = problem_of(network, share=0.8, val=val, train=loader(shuffle=False), options=options)
    tuned = dataclasses.replace(plain, options={**options, "score_steps": 20, "lr": 0.05})
    before, proposal = netadapt(plain), netadapt(tuned)
    assert (proposal.history["loss"].to_numpy() < before.history["loss"].to_numpy()).all()
    assert proposal.model is plain.model, "the weights of the scores are not kept, so they can be recovered"
    assert used(tuned, proposal.alpha)[0] <= 1.0


def test_first_group_has_the_least_loss_of_all(network: Network) -> None:
    """Against the definition, group by group."""
    model, groups, _ = network
    val = list(loader(16))
    problem = problem_of(network, share=0.8, val=val, options={"iterations": 4, "statistics": "stored"})
    first = netadapt(problem).history.iloc[0]
    bound = problem.costs.costs[0].dense * (1 - 0.2 / 4)

    losses = {}
    for k, size in enumerate(groups.sizes.tolist()):
        fits = [
            w
            for w in range(1, size)
            if problem.costs.costs[0](np.where(np.arange(len(groups)) == k, w / size, 1)) <= bound
        ]
        if fits and max(fits) >= np.ceil(0.05 * size):
            widths = np.where(np.arange(len(groups)) == k, max(fits), groups.sizes)
            with torch.no_grad(), masked(model, groups, select_channels(model, groups, widths)):
                losses[groups.names[k]] = float(nn.functional.cross_entropy(model(val[0][0]), val[0][1])), max(fits)
    best = min(losses, key=lambda name: losses[name][0])
    assert (first["group"], first["width"]) == (best, losses[best][1])
    assert first["loss"] == pytest.approx(losses[best][0], rel=1e-5)
