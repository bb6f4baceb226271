"""Memory of an int8 network on a microcontroller: the arena in SRAM and the weights in flash.

The arena holds the activations, in the buffers that `dsa_hw.channels.int8_buffers` lists for a planner. Vela searches
for a layout that needs no more than the largest sum of buffers that exist at the same time: that sum is counted for it.
tflite-micro places the largest buffers first, each at the lowest gap, which can leave gaps; its layout is simulated.
docs/guide/ethos-u.md compares the counts with Vela's own report.

Flash holds one byte for each weight of a convolution or linear layer, and the bias and scale of each of its output
channels. Batch norms are folded. Program code, the list of commands and the metadata of the file are not counted.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike

from budgets.analytic import AnalyticCost, Counted, quadratics
from dsa_hw.channels import ChannelGroups
from dsa_hw.channels.counts import Term
from dsa_hw.channels.int8_buffers import Planner, int8_buffers, int8_layers
from dsa_hw.utils.arrays import Floats

__all__ = ["ArenaCost", "arena", "flash", "greedy_layout"]

_ALIGNMENT = 16  # bytes at which a buffer begins, in both planners
# Bytes for each output channel. Ethos-U: bias (5), scale (4) and shift (1). A LiteRT file: bias (4), and scale (4) and
# zero point (8) of the weights and of the bias.
_PER_CHANNEL = {"vela": 10.0, "tflite-micro": 28.0}
_EXACT = 1e-6  # of a channel: widths are whole, keep ratios times sizes are so only up to rounding


def arena(groups: ChannelGroups, planner: Planner = "vela") -> ArenaCost:
    """Return the bytes of the int8 arena as a function of the keep ratios.

    Args:
        groups: Channel groups of the network.
        planner: "vela" for Arm Ethos-U, or "tflite-micro".
    """
    buffers = int8_buffers(groups.counted, planner)
    alive = np.array([[b.born <= step <= b.last for b in buffers] for step in range(max(b.last for b in buffers) + 1)])
    return ArenaCost(
        "arena",
        "byte",
        groups.names,
        groups.sizes,
        channels=np.array([[b.channels.constant, *b.channels.coefficients] for b in buffers]),
        positions=np.array([b.positions for b in buffers]),
        bricks=np.array([float(b.brick) for b in buffers]),
        alive=alive.astype(np.float64),
        greedy=planner == "tflite-micro",
    )


def flash(groups: ChannelGroups, planner: Planner = "vela") -> AnalyticCost:
    """Return the bytes of int8 weights, biases and scales as a function of the keep ratios.

    Args:
        groups: Channel groups of the network.
        planner: Whose format holds biases and scales: "vela" or "tflite-micro".
    """
    terms: list[Term] = []
    for layer in int8_layers(groups.counted):
        terms += [layer.weight, Term(_PER_CHANNEL[planner], (layer.made,))]
    return AnalyticCost("flash", "byte", groups.names, groups.sizes, *quadratics(terms, groups.sizes))


@dataclass(frozen=True, eq=False)
class ArenaCost(Counted):
    """Bytes of the arena: of a perfect layout, or of a greedy one.

    A buffer takes s_b = positions * channels(alpha) bytes, the channels rounded up to whole bricks and the product to
    the alignment. A perfect layout needs the largest sum over the buffers of one step. A greedy one needs the height of
    its highest stack, which is a sum of buffers as well. Either way F is the sum of s_b over some buffers, and its
    gradient is that of these buffers without rounding: it leads to the channels that cost most also where one channel
    more or less is free. The greedy height can grow by a little when a buffer shrinks.

    Attributes:
        channels: Channels of each of B buffers, affine in the keep ratios, (B, 1 + K), the constant first.
        positions: Elements of one channel (B,).
        bricks: Multiple to which channels are rounded up (B,).
        alive: Which buffers exist in each step, (T, B), 0 or 1.
        greedy: Whether the layout is tflite-micro's.
    """

    channels: Floats = field(repr=False)
    positions: Floats = field(repr=False)
    bricks: Floats = field(repr=False)
    alive: Floats = field(repr=False)
    greedy: bool = False

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the value at keep ratios (..., K), shape (...)."""
        sizes = self._bytes(alpha)
        return np.asarray((sizes * self._counted(sizes)).sum(-1))

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return the value at keep ratios (..., K), shape (...), with the gradient of `gradient`."""
        point = alpha.detach().cpu().double().numpy()
        exact = torch.as_tensor(self(point), dtype=alpha.dtype, device=alpha.device)
        if not alpha.requires_grad:
            return exact
        slopes = torch.as_tensor(self.gradient(point), dtype=alpha.dtype, device=alpha.device)
        linear = (slopes * alpha).sum(-1)
        return exact + linear - linear.detach()

    def gradient(self, alpha: ArrayLike) -> Floats:
        """Return the gradient (..., K), without rounding, of the buffers that are counted at ``alpha``."""
        return np.asarray(self._counted(self._bytes(alpha)) @ (self.positions[:, None] * self.channels[:, 1:]))

    def _bytes(self, alpha: ArrayLike) -> Floats:
        """Return the bytes of each buffer (..., B)."""
        channels = self.channels[:, 0] + np.asarray(alpha, np.float64) @ self.channels[:, 1:].T
        whole = np.where(self.bricks > 1, np.ceil(channels / self.bricks - _EXACT) * self.bricks, channels)
        return np.asarray(np.ceil(self.positions * whole / _ALIGNMENT - _EXACT) * _ALIGNMENT)

    def _counted(self, sizes: Floats) -> Floats:
        """Return which buffers (..., B), 0 or 1, make up the arena."""
        if not self.greedy:
            return np.asarray(self.alive[(sizes @ self.alive.T).argmax(-1)])
        rows = [self._stack(row) for row in sizes.reshape(-1, sizes.shape[-1])]
        return np.asarray(rows).reshape(sizes.shape)

    def _stack(self, sizes: Floats) -> Floats:
        """Return the buffers of the highest stack of a greedy layout, 0 or 1, (B,)."""
        offsets, below = greedy_layout(sizes.tolist(), self._conflicts)
        top = int(np.argmax(np.asarray(offsets) + sizes))
        found = np.zeros(len(sizes))
        while top >= 0:
            found[top] = 1.0
            top = below[top]
        return found

    @functools.cached_property
    def _conflicts(self) -> list[set[int]]:
        """The buffers that exist at the same time as each buffer."""
        return [set(np.flatnonzero(self.alive[self.alive[:, b] > 0].any(0)).tolist()) for b in range(len(self.bricks))]

    def _at_widths(self, widths: Floats) -> Floats:
        return np.rint(self(widths / self.sizes))


def greedy_layout(sizes: Sequence[float], conflicts: Sequence[Collection[int]]) -> tuple[list[float], list[int]]:
    """Place buffers as tflite-micro's greedy planner does: the largest first, each at the lowest gap.

    Args:
        sizes: Bytes of each buffer.
        conflicts: The buffers that exist at the same time as each buffer.

    Returns:
        The offset of each buffer, and the buffer directly below it (-1 for none).
    """
    offsets, below = [0.0] * len(sizes), [-1] * len(sizes)
    placed: list[tuple[float, int]] = []  # by offset
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        offset, under = 0.0, -1
        for start, j in placed:
            if j in conflicts[i]:
                if offset + sizes[i] <= start:
                    break
                if start + sizes[j] > offset:
                    offset, under = start + sizes[j], j
        offsets[i], below[i] = offset, under
        bisect.insort(placed, (offset, i))
    return offsets, below
