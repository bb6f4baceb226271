"""Recovery: the weights that remain are refitted to the dense network's outputs, without labels and without training.

After a cut, every convolution and linear layer q reads fewer channels. Its best weights for that input are a least
squares problem (He et al. 2017, channel pruning; Luo et al. 2017, ThiNet): with X the inputs of q in the pruned network
and Y the outputs of q in the dense network, on the same images and both centred,

    minimise over W   |Y - W X|^2 + r |W - W_cut|^2     =>     W = W_cut + (Y - W_cut X) X' (X X' + r I)^-1.

The penalty is the distance to the weights as they were cut. With r = infinity nothing changes except the bias, which
then compensates the mean; so the fit is never worse than that, and where nothing was cut nothing changes. Layers are
refitted in execution order, and X contains the errors of the layers before, which are thereby corrected as well. Where
the output of q is added to a shortcut, the target is the dense network's sum minus the pruned network's shortcut.

Both networks are run as graphs of ATen operations, one operation at a time and each on all images, so that every
operation runs once per image. Of the inputs of a layer only second moments are kept. Where the values of all images do
not fit into the memory, the first layers, whose outputs are large and have many positions, are fitted on fewer images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.channels.plan import Plan
from dsa_hw.channels.surgery import first_difference
from dsa_hw.channels.trace import TracedOperation, trace
from dsa_hw.errors import TrainingError
from dsa_hw.training.fingerprints import check_loader
from dsa_hw.training.least_squares import Moments, best_fit, solve
from dsa_hw.training.linear_maps import LinearMap
from dsa_hw.training.loaders import equal_batches, unlabelled
from dsa_hw.training.lockstep import TRANSPOSED, Lockstep, Sink, argument_name, find_sink, paired_readers
from dsa_hw.training.workload import measure_workload
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.inputs import check_model
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["Recovered", "recover", "refit"]

_HELD_OUT = 5  # every fifth batch is held out, to choose the ridge
_MEMORY = 2**29  # bytes of the values of both networks
_LEAST_SCALE = 1e-3  # of a batch norm's median scale; below it, a channel cannot carry a correction


@dataclass(frozen=True)
class Recovered:
    """What recovery did to one layer.

    Attributes:
        layer: The module.
        before: Error of its outputs on held-out images as cut, with the mean compensated, over the variance of the
            dense network's outputs.
        after: The same error with the new weights.
        ridge: The penalty that was chosen; infinity where the weights stay as they were cut.
    """

    layer: str
    before: float
    after: float
    ridge: float


def recover(
    small: nn.Module,
    dense: nn.Module,
    images: Iterable[Any],
    plan: Plan,
    *,
    limit: int = 512,
    seed: int = 0,
    listener: Callable[[str, float], None] | None = None,
) -> list[Recovered]:
    """Refit the weights of a pruned network to the dense network's outputs, in place.

    Args:
        small: The pruned network; its weights, biases and batch-norm statistics change.
        dense: The network that it was cut from; not changed.
        images: Batches of inputs, or of (inputs, anything). Labels are not used.
        plan: Which channels of ``dense`` the pruned network has.
        limit: How many inputs are used, at most.
        seed: Seed of the output positions that are used.
        listener: Called with a layer's name and the share of layers that are done.

    Returns:
        A row for each layer that was refitted, in execution order.

    Raises:
        TrainingError: There are no inputs, or they are not finite.
        PlanError: The plan belongs to another network.

    Example:
        >>> import torch
        >>> from dsa_hw import Plan, find_groups, shrink
        >>> from dsa_hw.training.recovery import recover
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).eval()
        >>> groups = find_groups(model, torch.randn(1, 3, 16, 16))
        >>> small = shrink(model, groups, [[0, 1, 2, 3]])
        >>> layers = recover(small, model, [torch.randn(16, 3, 16, 16)], Plan.of(groups, [[0, 1, 2, 3]]))
        >>> [row.layer for row in layers]
        ['2']
        >>> layers[0].after <= layers[0].before
        True
    """
    check_model(small)
    check_model(dense)
    check_loader(dense, images, "images", labelled=False)
    inputs = unlabelled(images, limit, device_of(dense))
    groups = find_groups(dense, tuple(x[:1] for x in inputs))
    if found := first_difference(dense, plan.shapes):
        raise TrainingError(f"The plan belongs to another network: {found} in the plan.")
    return refit(small, dense, groups, [list(units) for units in plan.kept], inputs, seed=seed, listener=listener)


@torch.no_grad()
def refit(
    small: nn.Module,
    dense: nn.Module,
    groups: ChannelGroups,
    kept: Sequence[Ints | Sequence[int]],
    inputs: tuple[Tensor, ...],
    *,
    seed: int = 0,
    listener: Callable[[str, float], None] | None = None,
) -> list[Recovered]:
    """Refit as `recover` does.

    Args:
        small: The pruned network, changed in place.
        dense: The network that it was cut from.
        groups: The channel groups of ``dense``.
        kept: The kept units of each group.
        inputs: Positional inputs of the networks, each (N, ...).
        seed: Seed of the output positions that are used.
        listener: Called with a layer's name and the share of layers that are done.
    """
    with evaluating(dense):
        # At least five batches fit into the memory, one of them held out.
        batches = equal_batches(inputs, max(measure_workload(dense, tuple(x[:1] for x in inputs)).fitting // 5, 1))
        first = batches[:2]
        whole, part = Lockstep(trace(dense, first[0]), first), Lockstep(trace(small, first[0]), first)
        readers = paired_readers(whole.trace, part.trace)
        slices = groups.slices(kept)
        generator = torch.Generator().manual_seed(seed)
        found: list[Recovered] = []
        for number, (theirs, ours) in enumerate(readers):
            if listener is not None:
                listener(ours.module, number / len(readers))
            whole.run_before(theirs.node)
            part.run_before(ours.node)
            _load(whole, part, batches)
            same = not found and _same_inputs(whole, part, theirs, ours)
            whole.run_through(theirs.node)
            if same:
                continue
            name = part.trace.tensors.get(argument_name(ours.arguments["weight"]), "")
            row = _refit_layer(whole, part, theirs, ours, slices.get(name, {}), generator)
            if row is not None:
                found.append(row)
    return found


def _load(whole: Lockstep, part: Lockstep, batches: Sequence[tuple[Any, ...]]) -> None:
    """Add batches while the values of all of them, here and in what follows, need no more than `_MEMORY`."""
    most = _MEMORY // max(whole.peak() + part.peak(), 1)
    for batch in batches[len(whole) : most]:
        whole.append(batch)
        part.append(batch)


def _same_inputs(whole: Lockstep, part: Lockstep, theirs: TracedOperation, ours: TracedOperation) -> bool:
    """Return whether a layer reads in both networks the same."""
    for batch in range(len(whole)):
        x, y = part.value(ours.arguments["input"], batch), whole.value(theirs.arguments["input"], batch)
        if x.shape != y.shape or not torch.equal(x, y):
            return False
    return True


def _refit_layer(
    whole: Lockstep,
    part: Lockstep,
    theirs: TracedOperation,
    ours: TracedOperation,
    cuts: dict[int, Ints],
    generator: torch.Generator,
) -> Recovered | None:
    """Fit one layer and write its new weights into the pruned network."""
    weight = part.tensor(ours.arguments["weight"])
    bias_node = ours.arguments.get("bias")
    bias = part.tensor(bias_node) if isinstance(bias_node, fx.Node) else None
    sink = find_sink(ours, part.trace)
    mean_node = sink.norm.arguments["running_mean"] if sink.norm is not None else None
    layer = LinearMap.of(ours, tuple(weight.shape))
    rows = cuts.get(1 if ours.kind in TRANSPOSED else 0)
    if rows is not None and layer.groups > 1 and ours.kind in TRANSPOSED:
        return None  # the kept outputs of each group are not one list
    correction = _Correction.of(whole, part, theirs, sink, rows, layer.axis)
    train, test = _moments(whole, part, theirs, ours, layer, rows, correction, generator)
    if train.n < 2:
        return None
    centred = bias is not None or mean_node is not None
    start = layer.matrix(weight).double()
    new, ridge, before, after = best_fit(train, test, start, centred)
    both = train if test is None else train.joined(test)
    if not math.isinf(ridge):
        new = solve(both, start, ridge, centred)
    mean_x, mean_y = both.means
    weight.copy_(layer.weight(new, tuple(weight.shape)))
    if centred:
        shift = (mean_y - torch.einsum("god,gd->go", new, mean_x)).flatten()
        if bias is not None:
            bias.copy_(shift)
        else:
            assert mean_node is not None
            running = part.tensor(mean_node)
            running.sub_(shift.to(running.dtype))
    return Recovered(ours.module, before, after, ridge)


@dataclass(frozen=True)
class _Correction:
    """What the pruned network's shortcut lacks, in units of the layer's output."""

    whole: Lockstep
    part: Lockstep
    theirs: fx.Node
    ours: fx.Node
    rows: Tensor | None
    axis: int
    scale: Tensor | None

    @classmethod
    def of(
        cls, whole: Lockstep, part: Lockstep, theirs: TracedOperation, sink: Sink, rows: Ints | None, axis: int
    ) -> _Correction | None:
        """Return the correction where the shortcut is known before the layer, else None."""
        other = find_sink(theirs, whole.trace).other
        if sink.other is None or other is None or not part.knows(sink.other) or not whole.knows(other):
            return None
        scale = None
        if sink.norm is not None:
            names = ("weight", "running_var")
            gamma, variance = (
                part.tensor(sink.norm.arguments[n]) if isinstance(sink.norm.arguments[n], fx.Node) else None
                for n in names
            )
            assert variance is not None
            scale = (variance + float(sink.norm.arguments["eps"])).rsqrt() * (1.0 if gamma is None else gamma)
        indices = None if rows is None else torch.from_numpy(rows)
        return cls(whole, part, other, sink.other, indices, axis, scale)

    def __call__(self, batch: int, like: Tensor) -> Tensor | None:
        """Return what to add to the targets of a batch, in the shape of ``like``."""
        dense, small = self.whole.value(self.theirs, batch), self.part.value(self.ours, batch)
        if self.rows is not None and dense.ndim == like.ndim:
            dense = dense.index_select(self.axis, self.rows.to(dense.device))
        if dense.shape != like.shape or small.shape != like.shape:
            return None
        lacking = dense - small
        if self.scale is None:
            return lacking
        usable = self.scale.abs() > _LEAST_SCALE * self.scale.abs().median()
        inverse = torch.where(usable, 1 / torch.where(usable, self.scale, 1.0), 0.0)
        shape = [1] * like.ndim
        shape[self.axis] = -1
        return lacking * inverse.view(shape)


def _moments(
    whole: Lockstep,
    part: Lockstep,
    theirs: TracedOperation,
    ours: TracedOperation,
    layer: LinearMap,
    rows: Ints | None,
    correction: _Correction | None,
    generator: torch.Generator,
) -> tuple[Moments, Moments | None]:
    """Return the moments of the samples of a layer, those of the held-out batches apart."""
    train: Moments | None = None
    test: Moments | None = None
    kept = None if rows is None else torch.from_numpy(rows)
    images = sum(len(whole.value(theirs.node, batch)) for batch in range(len(whole)))
    for batch in range(len(whole)):
        x = part.value(ours.arguments["input"], batch)
        y = whole.value(theirs.node, batch)
        if kept is not None:
            y = y.index_select(layer.axis, kept.to(y.device))
        if correction is not None and (more := correction(batch, y)) is not None:
            y = y + more
        for inputs, targets in layer.samples(x, y, images, generator):
            inputs, targets = inputs.double(), targets.double()
            if train is None:
                train, test = Moments(inputs, targets), Moments(inputs, targets) if len(whole) > 1 else None
            (test if test is not None and batch % _HELD_OUT == 1 else train).add(inputs, targets)
    assert train is not None
    return train, test
