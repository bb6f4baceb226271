"""A few outputs on a fixed input tell a network from other weights and other architectures."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsa_hw.channels.reference_output import ReferenceOutput, reference_output, tolerance
from dsa_hw.errors import ModelError

SHAPE = (1, 3, 12, 12)


def network(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), activation(), nn.Conv2d(8, 5, 3), nn.Flatten())


def found(model: nn.Module) -> ReferenceOutput:
    like = torch.zeros(1, dtype=next((p.dtype for p in model.parameters()), torch.float32))
    return reference_output(model, [SHAPE], (like,))


def test_the_same_network_gives_the_same_values_and_nothing_changes() -> None:
    model = network()
    state = torch.get_rng_state()
    one = found(model)
    assert one == found(copy.deepcopy(model))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert (one.size, len(one.values)) == (5 * 8 * 8, 64)
    assert one.difference(found(model)) == 0
    assert ReferenceOutput.model_validate_json(one.model_dump_json()) == one


def test_rounding_is_accepted_and_other_networks_are_not() -> None:
    model = network()
    one = found(model)
    double = found(copy.deepcopy(model).double())  # the input has another type, so another digest
    assert one.difference(double) == float("inf")
    assert 0 < one.difference(double.model_copy(update={"input": one.input})) < 0.01 * tolerance(model)
    for other in (network(nn.GELU), network(nn.LeakyReLU), network(nn.Identity)):
        assert one.difference(found(other)) > tolerance(other), other
    model[2].bias.data[1] += 0.02
    assert one.difference(found(model)) > tolerance(model)
    assert one.difference(found(model[:2])) == float("inf"), "another number of outputs"


def test_all_outputs_count_and_integers_are_zero() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 5)

        def forward(self, index: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"a": self.table(index) * scale, "b": index + 2, "c": torch.rand(3)}

    model = Words()
    one = reference_output(model, [(2, 4), (1,)], (torch.zeros(2, 4, dtype=torch.long), torch.zeros(1)))
    assert one.size == 2 * 4 * 5 + 8 + 3
    assert one == reference_output(model, [(2, 4), (1,)], (torch.zeros(2, 4, dtype=torch.long), torch.zeros(1)))


def test_an_output_that_is_not_finite_or_not_there_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self, value: float | None) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor | None:
            return None if self.value is None else x * self.value

    for value in (float("nan"), float("inf")):
        with pytest.raises(ModelError, match="NaN or infinity"):
            found(Odd(value))
    with pytest.raises(ModelError, match="no output"):
        found(Odd(None))
    zero = found(Odd(0.0))
    assert zero.difference(found(Odd(0.0))) == 0
    assert zero.difference(found(Odd(1e-9))) == float("inf")


def test_the_fixed_input_is_noise_that_does_not_depend_on_versions() -> None:
    seen: list[Tensor] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    reference_output(Look(), [(4, 3, 50, 50)], (torch.zeros(1),))
    values = seen[0].numpy()
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 1) < 0.02
    mask, z = 2**64 - 1, (5 * 0x9E3779B97F4A7C15) % 2**64  # splitmix64 in integers, for the fifth value
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    assert values.reshape(-1)[4] == np.float32(((z >> 40) / 2**23 - 1) * 3**0.5)
