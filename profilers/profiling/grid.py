"""Which channel counts a target likes.

Kernels work in blocks: on many CPUs 63 channels take longer than 64. For the heaviest channel groups, the operations
that make and use them are rebuilt alone, at real sizes, on the real target, and their width is swept. The grid is the
finest one whose widths take no longer than coarser, better aligned ones would make expect.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsa_hw.errors import ProfileError
from profilers.measuring.measurement import Measurement
from profilers.measuring.rules import MeasuringRules
from profilers.networks.chains import Layer, artefact_of, input_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dsa_hw.channels import ChannelGroups
    from profilers.measuring.bench import Bench

__all__ = ["Evidence", "Sweep", "excess", "find_grid", "finest_free_grid", "plot", "sweeps"]

_CANDIDATES = (32, 16, 8, 4, 2, 1)
_TOLERATED = 0.03  # of excess
_LEAST_SWEPT = 0.75  # of the widths of a sweep must be trusted, or it is no evidence
_USUAL = 8  # channels; the vector units of most devices work on a multiple of 4 or 8 floats

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evidence:
    """One point of a sweep: the group, its width, the channels that makes, and what they took (seconds, 95 % interval).

    ``excess`` is the share of time beyond what widths on the grid would take, ``divisor`` the largest power of two in
    ``channels``, up to 32.
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
    """The operations around one group, as functions of its width; ``unit`` channels go with one unit of width.

    Where several groups lie side by side in one tensor, it is the tensor that is swept: its width makes the blocks.
    """

    group: str
    size: int
    unit: int
    make: Callable[[int], tuple[Layer, ...]]


def sweeps(model: nn.Module, groups: ChannelGroups, inputs: tuple[Any, ...], most: int = 3) -> list[Sweep]:
    """The heaviest groups that have convolutions or linear layers around them, distinct in shape, heaviest first."""
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
    """Every convolution and linear layer of the network with the spatial size that it meets."""
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
    was = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(*inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in was.items():
            module.training = training
    return found


def _around(groups: ChannelGroups, name: str, layers: Mapping[str, Layer]) -> Sweep | None:
    """The heaviest producer, a depthwise convolution behind it if there is one, and the heaviest consumer, in a row.

    Where their sizes do not fit (a pooling in between), the heavier of the two alone.
    """
    k = groups.names.index(name)
    size = int(groups.sizes[k])
    everything = [np.arange(int(c)) for c in groups.sizes]
    everything[k] = everything[k][:-1]  # without the last unit: what becomes shorter belongs to the group
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
    """Widths to sweep, widest first: close together below C, 3/4 C and C/2, so that every divisor occurs."""
    offsets = (0, 1, 2, 4, 8, 16) if few else (0, 1, 2, 4, 8, 12, 16)
    bases = (size, size // 2) if few else (size, 3 * size // 4, size // 2)
    reach = max(size // 4, 1)
    widths = {base - offset for base in bases for offset in offsets if offset <= reach and base - offset >= 1} | {reach}
    return sorted(widths, reverse=True)


def excess(channels: NDArray[np.float64], seconds: NDArray[np.float64], grid: int) -> NDArray[np.float64]:
    """Time beyond what the widths on ``grid`` take, as a share of that; shapes (n,), 0 on the grid.

    Between two widths of the grid the time is interpolated, outside them extrapolated from the nearest two: what the
    channels would cost if the target took any number as gladly as multiples of ``grid``.
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


def finest_free_grid(channels: NDArray[np.float64], seconds: NDArray[np.float64], tolerated: float = _TOLERATED) -> int:
    """The finest grid (in channels) without a penalty, from a sweep.

    From coarse to fine: a divisor is as good as the grid so far if three quarters of the channel counts with exactly
    that divisor take at most ``tolerated`` longer than the grid so far says. The first that is not ends the search.
    """
    divisors = np.gcd(channels.astype(np.int64), _CANDIDATES[0])
    grid = next((d for d in _CANDIDATES if (divisors >= d).sum() >= 2), 1)
    for divisor in _CANDIDATES[_CANDIDATES.index(grid) + 1 :]:
        on = channels[divisors >= grid]
        new = (divisors == divisor) & (channels > on.min()) & (channels < on.max())  # extrapolation is no evidence
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
    on_visit: Callable[[str, Any, Measurement], None] | None = None,
) -> tuple[dict[str, int], list[Evidence]]:
    """Sweep, and give every group its grid in units of width; with the evidence.

    A group that was not swept, or not well enough, gets what most of the others like; where there are none, multiples
    of 8 channels, with a warning. A grid is halved until it leaves a group at least two widths.
    """
    rules = _relaxed(bench.rules)
    networks, about = {}, {}
    for sweep in swept:
        for width in swept_widths(sweep.size, few):
            chain, label = sweep.make(width), f"{sweep.group} at {width}"
            artefact = artefact_of(chain, bench.target, batch)
            networks[label] = bench.target.load(artefact, (input_of(chain, batch, bench.target.precision),))
            about[label] = (sweep, width)
    measured = bench.measure(networks, limit=limit, on_visit=on_visit, rules=rules)
    evidence: list[Evidence] = []
    choices: dict[str, int] = {}
    for sweep in swept:
        swept_here = [(about[label][1], m) for label, m in measured.items() if about[label][0] is sweep]
        rows = [(width, m) for width, m in swept_here if m.trusted]
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
            "The channel counts that suit %s could not be determined within %.0f s; multiples of %d are used. Repeat "
            "the command on a quieter machine, or choose a grid with --grid.",
            bench.target.title, limit, _USUAL,
        )  # fmt: skip
        return fixed_grid(groups, _USUAL), []
    return spread_grid(groups, choices, {s.group: s.unit for s in swept}), evidence


def _relaxed(rules: MeasuringRules) -> MeasuringRules:
    """A saw-tooth is larger than the precision that a profile needs, so a sweep may be quicker."""
    return replace(rules, precision=1.5 * rules.precision, worst=2 * rules.worst, least_runs=8, least_visits=4)


def spread_grid(groups: ChannelGroups, choices: Mapping[str, int], units: Mapping[str, int]) -> dict[str, int]:
    """Grid in channels of some groups -> grid in units of width of all groups."""
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
    """The same grid for every group, as far as its size allows."""
    if grid < 1:
        raise ProfileError(f"grid {grid} asked for; use auto, or a number of channels from 1")
    return spread_grid(groups, dict.fromkeys(groups.names, grid), {})


def plot(evidence: Sequence[Evidence | Mapping[str, Any]], grid: Mapping[str, int], title: str) -> Figure:
    """The saw-tooth: time against channels for every swept group, widths on the grid marked."""
    from matplotlib.figure import Figure

    rows = [asdict(e) if isinstance(e, Evidence) else dict(e) for e in evidence]
    names = list(dict.fromkeys(r["group"] for r in rows))
    figure = Figure(figsize=(4.5 * max(len(names), 1), 3.6), layout="constrained")
    for i, name in enumerate(names):
        axis = figure.add_subplot(1, len(names), i + 1)
        points = sorted((r for r in rows if r["group"] == name), key=lambda r: r["channels"])
        x = np.asarray([p["channels"] for p in points])
        y, low, high = (1e3 * np.asarray([p[key] for p in points]) for key in ("seconds", "low", "high"))
        axis.plot(x, y, color="0.6", linewidth=1, zorder=1)
        axis.errorbar(x, y, yerr=[np.maximum(y - low, 0), np.maximum(high - y, 0)], fmt="none", ecolor="0.6", zorder=1)
        on = np.asarray([p["width"] % grid.get(name, 1) == 0 for p in points])
        axis.scatter(x[~on], y[~on], s=22, facecolors="white", edgecolors="#b03a2e", label="off the grid", zorder=2)
        axis.scatter(x[on], y[on], s=26, color="#1f618d", label=f"multiples of {grid.get(name, 1)}", zorder=3)
        axis.set(title=name, xlabel="channels", ylabel="ms" if i == 0 else "")
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure
