"""The grid: which channel counts a target runs efficiently.

Kernels work in blocks: on many CPUs 63 channels take longer than 64. For the channel groups with the most work, the
operations that produce and consume them are rebuilt alone, at their real sizes, on the real target, and their width is
swept. The grid is the finest one whose widths take no longer than predicted from coarser grids.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import nn

from dsa_hw.channels import ChannelGroups
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.modules import evaluating
from profilers.measuring.bench import DENSE, Bench, OnRound
from profilers.measuring.rules import MeasuringRules
from profilers.networks.chains import Layer, artefact_of, input_of
from profilers.networks.loaded import Loadable
from profilers.targets import Target

__all__ = ["Evidence", "Sweep", "excess", "find_grid", "finest_free_grid", "sweeps"]

_CANDIDATES = (32, 16, 8, 4, 2, 1)
_TOLERATED = 0.03  # of excess
_LEAST_SWEPT = 0.75  # of the widths of a sweep must be measured, or the sweep is not used
_USUAL = 8  # channels; the vector units of most devices work on a multiple of 4 or 8 floats

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """One point of a sweep.

    Attributes:
        group: The swept channel group.
        width: Its width.
        channels: The channels of the tensor at that width.
        seconds: The measured time.
        low: Lower end of its 95% interval.
        high: Upper end of its 95% interval.
        runs: Number of runs.
        excess: Share of time beyond what is predicted from widths on the grid.
        divisor: Largest power of two that divides ``channels``, up to 32.
    """

    group: str
    width: int
    channels: int
    seconds: float
    low: float
    high: float
    runs: int
    excess: float
    divisor: int


@dataclass(frozen=True, eq=False)
class Sweep:
    """The operations around one group, as functions of its width.

    Where several groups are concatenated in one tensor, the tensor is swept, because its width determines the blocks.

    Attributes:
        group: Name of the group.
        size: Its dense width.
        unit: Channels per unit of width.
        make: Returns the operations at a width.
    """

    group: str
    size: int
    unit: int
    make: Callable[[int], tuple[Layer, ...]]


def sweeps(model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...], most: int = 3) -> list[Sweep]:
    """Return sweeps of the groups with the most FLOPs that have convolutions or linear layers around them.

    Args:
        model: The network.
        groups: Its channel groups.
        inputs: Its example inputs.
        most: Number of sweeps.

    Returns:
        Sweeps of distinct shapes, the one with the most FLOPs first.
    """
    layers = _layers(model, inputs)
    shares = groups.to_frame().set_index("group")["flops_share"]
    found: list[Sweep] = []
    seen: set[tuple[Layer, ...]] = set()
    for name in sorted(groups.names, key=lambda n: -float(shares.get(n, 0.0))):
        if len(found) >= most:
            break
        sweep = _around(groups, name, layers)
        if sweep is not None and sweep.size >= 4 and sweep.make(sweep.size) not in seen:
            seen.add(sweep.make(sweep.size))
            found.append(sweep)
    return found


def _layers(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Layer]:
    """Return every convolution and linear layer of the network, with the spatial size of its input."""
    found: dict[str, Layer] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, nn.Linear) and args[0].ndim == 2:
                found[name] = Layer(module.in_features, module.out_features)
            elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not isinstance(module.padding, str):
                found[name] = Layer(
                    module.in_channels,
                    module.out_channels,
                    tuple(args[0].shape[2:]),
                    tuple(module.kernel_size),
                    tuple(module.stride),
                    tuple(module.padding),
                    tuple(module.dilation),
                    module.groups,
                )

        return hook

    handles = [module.register_forward_pre_hook(remember(name)) for name, module in model.named_modules()]
    try:
        with evaluating(model), torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _around(groups: ChannelGroups, name: str, layers: Mapping[str, Layer]) -> Sweep | None:
    """Return the producer with the most work, a following depthwise convolution, and the consumer with the most work.

    Where their sizes do not match (a pooling between them), the producer alone. None where no layer produces the group.
    """
    k = groups.names.index(name)
    size = int(groups.sizes[k])
    everything = [np.arange(int(c)) for c in groups.sizes]
    everything[k] = everything[k][:-1]  # without the last unit: tensors that become smaller belong to the group
    made: dict[str, int] = {}
    used: dict[str, int] = {}
    for tensor, cuts in groups.slices(everything).items():
        module = tensor.removesuffix(".weight")
        if not tensor.endswith(".weight") or module not in layers:
            continue
        layer = layers[module]
        if 0 in cuts:
            made[module] = layer.outputs - len(cuts[0])
        elif 1 in cuts:
            used[module] = layer.inputs // layer.groups - len(cuts[1])
    depthwise = [m for m in made if layers[m].groups == layers[m].inputs > 1]
    producers = [m for m in made if m not in depthwise]
    if not producers:
        return None
    producer = max(producers, key=lambda m: layers[m].macs)
    unit = made[producer]
    first = layers[producer]
    middle = next((layers[m] for m in depthwise if layers[m].side == first.out_side), None)
    side = middle.out_side if middle else first.out_side
    last = max((layers[m] for m in used), key=lambda layer: layer.macs, default=None)
    if first.outputs % unit == 0:
        size = first.outputs // unit

    def channels(dense: int, width: int, each: int) -> int:
        return dense - each * (size - width)

    def chain(width: int) -> tuple[Layer, ...]:
        rows = [first.widened(outputs=channels(first.outputs, width, unit))]
        if middle is not None:
            rows.append(middle.widened(inputs=channels(middle.inputs, width, unit)))
        if last is not None and last.side == side and last.inputs == rows[-1].outputs + unit * (size - width):
            rows.append(last.widened(inputs=channels(last.inputs, width, unit)))
        return tuple(rows)

    return Sweep(name, size, unit, chain)


def swept_widths(size: int, few: bool = False) -> list[int]:
    """Return the widths to sweep, widest first: several below C, 3/4 C and C/2, so that every divisor occurs."""
    offsets = (0, 1, 2, 4, 8, 16) if few else (0, 1, 2, 4, 8, 12, 16)
    bases = (size, size // 2) if few else (size, 3 * size // 4, size // 2)
    reach = max(size // 4, 1)
    widths = {base - offset for base in bases for offset in offsets if offset <= reach and base - offset >= 1} | {reach}
    return sorted(widths, reverse=True)


def excess(channels: Floats, seconds: Floats, grid: int) -> Floats:
    """Return the time beyond what is predicted from widths on a grid, as a share of the prediction.

    The prediction interpolates between widths on the grid and extrapolates from the nearest two outside them.

    Args:
        channels: Channel counts, shape (n,).
        seconds: Their times, shape (n,).
        grid: The step of the grid.

    Returns:
        Shares, shape (n,); 0 on the grid.
    """
    on = np.flatnonzero(channels % grid == 0)
    on = on[np.argsort(channels[on])]
    if len(on) < 2:
        return np.zeros(len(channels))
    x, y = channels[on], seconds[on]
    left = np.clip(np.searchsorted(x, channels) - 1, 0, len(x) - 2)
    slope = (y[left + 1] - y[left]) / (x[left + 1] - x[left])
    usual = y[left] + slope * (channels - x[left])
    return np.where(usual > 0, seconds / np.where(usual > 0, usual, 1.0) - 1, 0.0)


def finest_free_grid(channels: Floats, seconds: Floats, tolerated: float = _TOLERATED) -> int:
    """Return the finest grid (in channels) without a time penalty.

    Divisors are tried from coarse to fine. A divisor is accepted if three quarters of the channel counts with exactly
    that divisor take at most ``tolerated`` longer than predicted from the grid so far. The first that is not accepted
    ends the search.

    >>> channels = np.arange(8.0, 65.0)
    >>> finest_free_grid(channels, 1e-3 * np.ceil(channels / 16))  # blocks of 16 channels
    16

    Args:
        channels: Channel counts of a sweep, shape (n,).
        seconds: Their times, shape (n,).
        tolerated: Accepted excess.
    """
    divisors = np.gcd(channels.astype(np.int64), _CANDIDATES[0])
    grid = next((d for d in _CANDIDATES if (divisors >= d).sum() >= 2), 1)
    for divisor in _CANDIDATES[_CANDIDATES.index(grid) + 1 :]:
        on = channels[divisors >= grid]
        new = (divisors == divisor) & (channels > on.min()) & (channels < on.max())  # extrapolation does not count
        if not new.any():
            continue
        if np.quantile(excess(channels, seconds, grid)[new], 0.75) > tolerated:
            break
        grid = divisor
    return grid


def find_grid(
    bench: Bench,
    groups: ChannelGroups,
    swept: Sequence[Sweep],
    *,
    batch: int = 1,
    few: bool = False,
    limit: float = 60.0,
    on_round: OnRound | None = None,
) -> tuple[dict[str, int], list[Evidence]]:
    """Measure sweeps and return the grid of every group.

    A group that was not swept, or not precisely enough, gets the grid of most other groups. Where there is none, it is
    8 channels, with a warning. A grid is halved until it leaves a group at least two widths.

    Args:
        bench: Where to measure.
        groups: The channel groups.
        swept: The sweeps, see `sweeps`.
        batch: Batch size.
        few: Sweep fewer widths, on targets that load slowly.
        limit: Time limit in seconds.
        on_round: Called after each round, see `profilers.measuring.bench.OnRound`.

    Returns:
        The grid in units of width by group, and the measured points.
    """
    networks, about = {}, {}
    for sweep in swept:
        for width in swept_widths(sweep.size, few):
            label = f"{sweep.group} at {width}"
            networks[label] = _chain(bench.target, sweep.make(width), batch)
            about[label] = (sweep, width)
    if not networks:
        return spread_grid(groups, {}, {}), []
    # The first sweep's dense width is what all are compared with; its own time is the scale.
    whole, others = next(iter(networks)), dict(list(networks.items())[1:])
    measured = bench.measure(others, networks[whole], limit=limit, on_round=on_round, rules=_relaxed(bench.rules))
    measured[whole] = measured.pop(DENSE)
    evidence: list[Evidence] = []
    choices: dict[str, int] = {}
    for sweep in swept:
        swept_here = [(about[label][1], measured[label]) for label in about if about[label][0] is sweep]
        rows = [(width, m) for width, m in swept_here if m.runs]
        if len(rows) < _LEAST_SWEPT * len(swept_here):
            continue
        channels = np.asarray([float(sweep.unit * width) for width, _ in rows])
        seconds = np.asarray([m.seconds for _, m in rows])
        choices[sweep.group] = finest_free_grid(channels, seconds)
        beyond = excess(channels, seconds, choices[sweep.group])
        evidence += [
            Evidence(
                sweep.group,
                width,
                sweep.unit * width,
                m.seconds,
                m.low,
                m.high,
                m.runs,
                round(float(e), 6),
                gcd(sweep.unit * width, _CANDIDATES[0]),
            )
            for (width, m), e in zip(rows, beyond, strict=True)
        ]
    if swept and not choices:
        _log.warning(
            "Could not determine the channel counts that %s runs efficiently within %.0f s. Multiples of %d are used. "
            "Give more time with --time-limit, or choose a grid with --grid.",
            bench.target.title, limit, _USUAL,
        )  # fmt: skip
        return fixed_grid(groups, _USUAL), []
    return spread_grid(groups, choices, {s.group: s.unit for s in swept}), evidence


def _chain(target: Target, chain: tuple[Layer, ...], batch: int) -> Loadable:
    inputs = (input_of(chain, batch, target.precision),)

    def made() -> Any:
        return artefact_of(chain, target, batch)

    make = made if target.int8 is None else functools.cache(made)  # to quantise takes longer than to load
    return Loadable(lambda: target.load(make(), inputs), 4 * sum(c.weights for c in chain))


def _relaxed(rules: MeasuringRules) -> MeasuringRules:
    """Return rules for a sweep, which needs the typical time, and less precision than a profile."""
    return replace(rules, statistic="quiet", precision=1.5 * rules.precision, require=None, most_blocks=3)


def spread_grid(groups: ChannelGroups, choices: Mapping[str, int], units: Mapping[str, int]) -> dict[str, int]:
    """Return the grid of all groups in units of width, from that of some groups in channels.

    Args:
        groups: The channel groups.
        choices: Grid in channels by group.
        units: Channels per unit of width by group; 1 where missing.
    """
    usual = max(Counter(choices.values()).items(), key=lambda item: (item[1], item[0]))[0] if choices else 1
    found = {}
    for name, size in zip(groups.names, groups.sizes, strict=True):
        grid = choices.get(name, usual)
        grid //= gcd(grid, units.get(name, 1))
        while grid > 1 and size < 2 * grid:
            grid //= 2
        found[name] = grid
    return found


def fixed_grid(groups: ChannelGroups, grid: int) -> dict[str, int]:
    """Return the same grid for every group, as far as its size allows."""
    if grid < 1:
        raise ProfileError(f"`grid` must be 'auto' or a number of channels from 1; got {grid}.")
    return spread_grid(groups, dict.fromkeys(groups.names, grid), {})
