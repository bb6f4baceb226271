"""Layers as matrices: the samples of a layer reproduce it, for every setting of a convolution."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from dsa_hw.training.linear_maps import LinearMap
from dsa_hw.training.lockstep import CONVOLUTIONS, TRANSPOSED

_KINDS = {**CONVOLUTIONS, **TRANSPOSED}


@st.composite
def layers(draw: st.DrawFn) -> tuple[LinearMap, Tensor, Tensor, Tensor]:
    """A convolution, its input, its weight and its output."""
    kind = draw(st.sampled_from(sorted(_KINDS)))
    dims = _KINDS[kind]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, stride, dilation, padding = each(1, 4), each(1, 3), each(1, 2), each(0, 2)
    groups, inputs, outputs = (draw(st.integers(1, 3)) for _ in range(3))
    torch.manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(2, groups * inputs, *each(7, 9), dtype=torch.float64)
    more: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if kind in TRANSPOSED:
        weight = torch.randn(groups * inputs, outputs, *kernel, dtype=torch.float64)
        more["output_padding"] = tuple(draw(st.integers(0, s - 1)) if s > 1 else 0 for s in stride)
    else:
        weight = torch.randn(groups * outputs, inputs, *kernel, dtype=torch.float64)
    y = getattr(functional, kind)(x, weight, **more)
    return LinearMap(kind, groups, kernel, stride, padding, dilation), x, weight, y


@given(layers(), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_samples_times_matrix_are_the_outputs(case: tuple[LinearMap, Tensor, Tensor, Tensor], images: int) -> None:
    layer, x, weight, y = case
    matrix = layer.matrix(weight)
    assert torch.equal(layer.weight(matrix, tuple(weight.shape)), weight)
    seen = 0
    for inputs, outputs in layer.samples(x, y, images, torch.Generator().manual_seed(0)):
        torch.testing.assert_close(torch.einsum("ngd,god->ngo", inputs, matrix), outputs)
        seen += len(inputs)
    assert seen
    assert seen % len(x) == 0, "every image gives equally many"
