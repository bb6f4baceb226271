"""Synthetic inputs and the distance of outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsa_hw.channels import find_groups
from dsa_hw.errors import TrainingError
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.synthetic import output_distance, own_targets, perturbed, synthetic_batch_size, synthetic_batches


def test_images_have_a_1_over_f_spectrum_and_other_inputs_are_refused() -> None:
    example = torch.randn(1, 3, 16, 16)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    net(example)
    x, y = next(synthetic_batches(net, (example,), 8, seed=0))
    assert x.shape == (8, 3, 16, 16)
    assert y.shape == (8, 3)
    spectrum = torch.fft.rfft2(x).abs().mean((0, 1))
    assert spectrum[0, 1] > 4 * spectrum[0, 7]
    again, _ = next(synthetic_batches(net, (example,), 8, seed=0))
    assert torch.equal(x, again)
    with pytest.raises(TrainingError, match="cannot be generated"):
        next(synthetic_batches(net, (torch.zeros(1, 5, dtype=torch.long),), 8, seed=0))
    assert float(output_distance(y, y)) == 0.0
    assert 0.5 < float(output_distance(y.roll(1, 0), y)) < 8.0


def test_targets_without_labels_are_the_answers_of_the_dense_network() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(6, 3), torch.randn(20, 6)
    batches, loss = own_targets(model, (inputs,), 8)
    assert [len(x) for x, _ in batches] == [8, 8, 4]
    assert loss is nn.functional.cross_entropy
    assert torch.equal(torch.cat([y for _, y in batches]), model(inputs).argmax(1))
    vector = nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (3, 1)))
    batches, loss = own_targets(vector, (inputs,), 20)
    assert loss is output_distance
    assert float(loss(vector(inputs), batches[0][1]).detach()) == pytest.approx(0.0, abs=1e-10)


def test_fisher_information_of_drawn_targets_is_that_of_a_normal_distribution(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Masks on the inputs of a linear layer: the information of unit i is in proportion to E[x_i^2] |w_i|^2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Unflatten(1, (5, 1)))
    inputs = torch.randn(8192, 4)
    groups = find_groups(model, inputs[:1])
    batches, loss = own_targets(model, (inputs,), 64)
    (found,) = fisher(model, groups, perturbed(batches, 0), loss)
    with torch.no_grad():
        expected = (model[0](inputs).square().mean(0) * model[1].weight.square().sum(0)).numpy()
    assert "no gradient" not in caplog.text
    assert found / found.sum() == pytest.approx(expected / expected.sum(), rel=0.3)


@pytest.mark.parametrize(("side", "expected"), [(1, 64), (32, 64), (112, 31), (224, 8), (1024, 8)])
def test_batches_of_large_images_are_smaller(side: int, expected: int) -> None:
    assert synthetic_batch_size((torch.zeros(1, 3, side, side),), 64) == expected
    assert synthetic_batch_size((torch.zeros(1, 12),), 64) == 64
