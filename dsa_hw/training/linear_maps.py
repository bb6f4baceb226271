"""Convolutions and linear layers as matrices: which inputs an output is computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_hw.channels.trace import TracedOperation
from dsa_hw.training.lockstep import TRANSPOSED

__all__ = ["LinearMap"]

_SAMPLES = 100  # output positions for each unknown of a layer, at least
_POSITIONS = 16  # of each image, at least
_PATCH_BYTES = 2**25  # of inputs that are gathered at once


@dataclass(frozen=True)
class LinearMap:
    """The linear map of a layer: how its samples are gathered, and its weight as matrices (G, outputs, inputs)."""

    kind: str
    groups: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    @property
    def axis(self) -> int:
        """The axis of the channels in inputs and outputs."""
        return -1 if self.kind == "linear" else 1

    @classmethod
    def of(cls, operation: TracedOperation, shape: tuple[int, ...]) -> LinearMap:
        """Read the settings of an operation whose weight has this shape."""
        arguments, kind = operation.arguments, operation.kind
        if kind == "linear":
            return cls(kind, 1)
        kernel = shape[2:]
        stride, dilation = (_each(arguments[n], len(kernel)) for n in ("stride", "dilation"))
        given = arguments["padding"]
        if given == "same":
            padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
        else:
            padding = (0,) * len(kernel) if given == "valid" else _each(given, len(kernel))
        return cls(kind, int(arguments["groups"]), kernel, stride, padding, dilation)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight as (G, o, d)."""
        if self.kind in TRANSPOSED:
            return weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(2)
        return weight.unflatten(0, (self.groups, -1)).flatten(2)

    def weight(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return (G, o, d) as a weight of this shape."""
        if self.kind in TRANSPOSED:
            return matrix.unflatten(2, (shape[0] // self.groups, *self.kernel)).transpose(1, 2).flatten(0, 1)
        return matrix.reshape(shape)

    def samples(self, x: Tensor, y: Tensor, images: int, generator: torch.Generator) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield samples (n, G, d) of inputs and (n, G, o) of outputs, at random positions of each image.

        Args:
            x: Inputs of the layer.
            y: Outputs of the layer.
            images: How many images there are in all, which decides how many positions of each are needed.
            generator: Of the positions.
        """
        if self.kind == "linear":
            inputs, outputs = x.flatten(0, -2)[:, None], y.flatten(0, -2)[:, None]
            most = max(_SAMPLES * inputs.shape[-1], 4096) * len(x) // images + 1
            if len(inputs) > most:
                chosen = torch.randperm(len(inputs), generator=generator)[:most].to(x.device)
                inputs, outputs = inputs[chosen], outputs[chosen]
            yield inputs, outputs
            return
        taps = math.prod(self.kernel)
        unknowns = x.shape[1] // self.groups * taps
        places = math.prod(y.shape[2:])
        count = min(places, max(math.ceil(_SAMPLES * unknowns / images), _POSITIONS))
        chosen = torch.randperm(places, generator=generator)[:count]
        outputs = y.flatten(2)[:, :, chosen.to(y.device)].movedim(2, 1).flatten(0, 1).unflatten(1, (self.groups, -1))
        step = max(_PATCH_BYTES // (8 * x.shape[1] * taps * count), 1)
        for start in range(0, len(x), step):
            inputs = self._patches(x[start : start + step], tuple(y.shape[2:]), chosen)
            yield inputs, outputs[start * count : (start + step) * count]

    def _patches(self, x: Tensor, size: tuple[int, ...], chosen: Tensor) -> Tensor:
        """Return what the outputs at chosen positions are computed from: (N * positions, G, d)."""
        valid: Tensor | None = None
        rest = chosen
        places: list[Tensor] = []
        for length in reversed(size):
            places.insert(0, rest % length)
            rest = rest // length
        indices: list[Tensor] = []
        n, dims = len(chosen), len(size)
        for axis, place in enumerate(places):
            taps = torch.arange(self.kernel[axis]) * self.dilation[axis]
            if self.kind in TRANSPOSED:
                raw = place[:, None] + self.padding[axis] - taps
                at = torch.div(raw, self.stride[axis], rounding_mode="floor")
                inside = (raw % self.stride[axis] == 0) & (at >= 0) & (at < x.shape[2 + axis])
            else:
                at = place[:, None] * self.stride[axis] - self.padding[axis] + taps
                inside = (at >= 0) & (at < x.shape[2 + axis])
            shape = [n] + [1] * dims
            shape[1 + axis] = self.kernel[axis]
            indices.append(at.clamp(0, x.shape[2 + axis] - 1).view(shape).to(x.device))
            inside = inside.view(shape)
            valid = inside if valid is None else valid & inside
        assert valid is not None
        every: tuple[slice | Tensor, ...] = (slice(None), slice(None), *indices)
        found = x[every]  # (N, C, positions, *kernel)
        found = found * valid.to(x.device, x.dtype)
        found = found.movedim(2, 1).flatten(0, 1)  # (N * positions, C, *kernel)
        return found.unflatten(1, (self.groups, -1)).flatten(2)


def _each(value: Any, count: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return tuple(int(v) for v in (given * count if len(given) == 1 else given))
