"""Values per unit, against the parameters of the layers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from dsa_hw.methods.baselines import global_gamma, uniform
from dsa_hw.methods.baselines._units import Gammas, Norms, gamma_scores
from tests.fakes.problems import Network, problem_of


def test_raw_gamma_is_not_normalised_per_group(network: Network) -> None:
    model, groups, _ = network
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.first[1].weight.mul_(0.1)
    k = groups.names.index(next(n for n, m in zip(groups.names, groups.members, strict=True) if "first.0" in m))
    scores = gamma_scores(model, groups)
    np.testing.assert_allclose(scores[k], model.first[1].weight.detach().abs(), rtol=1e-6)
    plain = next(k for k, m in enumerate(groups.members) if "plain" in m)
    covered = Gammas(model, groups).covered
    assert not covered[groups.offsets[plain] : groups.offsets[plain + 1]].any()
    raw = np.concatenate(scores)
    assert scores[plain].mean() == pytest.approx(raw[covered].mean(), rel=1e-6)
    # A residual group has two batch norms: their mean or their maximum counts.
    stem = next(k for k, m in enumerate(groups.members) if "stem.0" in m)
    both = torch.stack([model.stem[1].weight, model.second[1].weight]).abs().detach()
    np.testing.assert_allclose(scores[stem], both.mean(0), rtol=1e-6)
    np.testing.assert_allclose(gamma_scores(model, groups, "amax")[stem], both.amax(0), rtol=1e-6)
    assert (np.argmin([s.mean() for s in scores])) == k
    problem = problem_of((model, groups, network[2]), share=0.6)
    assert global_gamma(problem).alpha[k] < uniform(problem).alpha[k]


def test_weight_norms_of_units_are_over_all_members(network: Network) -> None:
    model, groups, _ = network
    rms = np.split(Norms(model, groups).rms().detach().numpy(), groups.offsets[1:-1])
    stem = next(k for k, m in enumerate(groups.members) if "stem.0" in m)
    filters = torch.stack([model.stem[0].weight.flatten(1).norm(dim=1), model.second[0].weight.flatten(1).norm(dim=1)])
    np.testing.assert_allclose(rms[stem], filters.square().mean(0).sqrt().detach(), rtol=1e-4)
