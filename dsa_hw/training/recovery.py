"""Recovery: the weights that remain are refitted to the dense network's outputs, without labels and without training.

After a cut, every convolution and linear layer q reads fewer channels. Its best weights for that input are a least
squares problem (He et al. 2017, channel pruning; Luo et al. 2017, ThiNet): with X the inputs of q in the pruned network
and Y the outputs of q in the dense network, on the same images and both centred,

    minimise over W   |Y - W X|^2 + r |W - W_cut|^2     =>     W = W_cut + (Y - W_cut X) X' (X X' + r I)^-1.

The penalty is the distance to the weights as they were cut. With r = infinity nothing changes except the bias, which
then compensates the mean; so the fit is never worse than that, and where nothing was cut nothing changes. Layers are
refitted in execution order, and X contains the errors of the layers before, which are thereby corrected as well. Where
the output of q is added to a shortcut, the target is the dense network's sum minus the pruned network's shortcut.

Both networks are run as graphs of ATen operations, one operation at a time, with all images at once: so every
operation runs once per image, and only second moments are kept of the inputs of a layer.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.channels.plan import Plan
from dsa_hw.channels.surgery import first_difference
from dsa_hw.channels.trace import Trace, TracedOperation, trace
from dsa_hw.errors import TrainingError
from dsa_hw.training.fingerprints import check_loader
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.inputs import check_model
from dsa_hw.utils.modules import device_of, evaluating

__all__ = ["Recovered", "equal_batches", "recover", "refit", "unlabelled"]

_log = logging.getLogger(__name__)

_RIDGES = (
    1e-4,
    1e-3,
    1e-2,
    3e-2,
    1e-1,
    3e-1,
)  # times the mean variance of an input; the best on held-out images is taken
_HELD_OUT = 0.2  # of the images, to choose it
_SAMPLES = 100  # output positions for each unknown of a layer, at least
_POSITIONS = 16  # of each image, at least
_PATCH_BYTES = 2**27  # of inputs that are gathered at once
_LEAST_SCALE = 1e-3  # of a batch norm's median scale; below it, a channel cannot carry a correction
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


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
    batches = equal_batches(unlabelled(images, limit, device_of(dense)))
    groups = find_groups(dense, batches[0])
    if found := first_difference(dense, plan.shapes):
        raise TrainingError(f"The plan belongs to another network: {found} in the plan.")
    return refit(small, dense, groups, [list(units) for units in plan.kept], batches, seed=seed, listener=listener)


@torch.no_grad()
def refit(
    small: nn.Module,
    dense: nn.Module,
    groups: ChannelGroups,
    kept: Sequence[Ints | Sequence[int]],
    batches: Sequence[tuple[Any, ...]],
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
        batches: Positional inputs of the networks, equally many in each batch.
        seed: Seed of the output positions that are used.
        listener: Called with a layer's name and the share of layers that are done.
    """
    with evaluating(dense):
        whole, part = _Lockstep(trace(dense, batches[0]), batches), _Lockstep(trace(small, batches[0]), batches)
        readers = _paired_readers(whole.trace, part.trace)
        slices = groups.slices(kept)
        held = max(math.ceil(_HELD_OUT * len(batches)), 1) if len(batches) > 1 else 0
        generator = torch.Generator().manual_seed(seed)
        found: list[Recovered] = []
        for number, (theirs, ours) in enumerate(readers):
            if listener is not None:
                listener(ours.module, number / len(readers))
            whole.run_through(theirs.node)
            part.run_before(ours.node)
            name = part.trace.tensors.get(_name(ours.arguments["weight"]), "")
            cuts = slices.get(name, {})
            if found or (0 if ours.kind in _TRANSPOSED else 1) in cuts:  # before the first such cut, inputs are equal
                row = _refit_layer(whole, part, theirs, ours, cuts, held, generator)
                if row is not None:
                    found.append(row)
    return found


def unlabelled(images: Iterable[Any], limit: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return up to ``limit`` inputs, each positional input as one tensor.

    Args:
        images: Batches of inputs, or of (inputs, anything); inputs that are a tuple or list are positional.
        limit: How many inputs, at most.
        device: Where to put them.

    Raises:
        TrainingError: There are no inputs, or they are not finite.
    """
    parts: list[tuple[Tensor, ...]] = []
    have = 0
    for batch in images:
        first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch
        inputs = tuple(first) if isinstance(first, (tuple, list)) else (first,)
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise TrainingError(f"`images` must yield tensors or (inputs, targets); got a {type(batch).__name__}.")
        if not all(bool(torch.isfinite(x).all()) for x in inputs if x.is_floating_point()):
            raise TrainingError("An input contains NaN or infinity. Check the images and their normalisation.")
        parts.append(tuple(x[: limit - have].to(device) for x in inputs))
        have += len(parts[-1][0])
        if have >= limit:
            break
    if not have:
        raise TrainingError("`images` yields no inputs. Give at least one batch; a few hundred images are enough.")
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def equal_batches(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return inputs in batches of equal size, at least five where there are enough inputs."""
    have = len(inputs[0])
    size = max(min(have // 5, 64), 1)
    return [tuple(x[i : i + size] for x in inputs) for i in range(0, have - size + 1, size)]


class _Lockstep:
    """A network as a graph whose operations are run one after the other, each on all batches.

    Args:
        graph: The operations.
        batches: The inputs, of the batch size that the graph was traced with.
    """

    def __init__(self, graph: Trace, batches: Sequence[tuple[Any, ...]]) -> None:
        self.trace = graph
        self._operations = iter(graph.operations)
        self._done: set[fx.Node] = set()
        self._values: list[dict[fx.Node, Any]] = []
        for batch in batches:
            self._values.append(dict(zip(graph.inputs, batch, strict=True)))
        last: dict[fx.Node, fx.Node] = {}
        for operation in graph.operations:
            for node in operation.node.all_input_nodes:
                last[node] = operation.node
        self._freed: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            if node not in graph.outputs:
                self._freed.setdefault(user, []).append(node)

    def value(self, node: Any, batch: int) -> Any:
        """Return the value of a node (or of an argument that is none) for a batch."""
        return fx.node.map_arg(node, lambda n: self._values[batch][n] if n in self._values[batch] else self.tensor(n))

    def tensor(self, node: fx.Node) -> Tensor:
        """Return a parameter, buffer or constant of the graph."""
        name = self.trace.tensors.get(node.name) or self.trace.constants[node.name]
        return self.trace.values[name]

    def knows(self, node: Any) -> bool:
        """Return whether a node has been computed and is still needed."""
        return isinstance(node, fx.Node) and all(node in values for values in self._values)

    def run_before(self, node: fx.Node) -> None:
        """Run the operations before a node; the node itself is run next."""
        if node in self._done:
            return
        for operation in self._operations:
            if operation.node is node:
                self._operations = itertools.chain([operation], self._operations)
                return
            self._run(operation)

    def run_through(self, node: fx.Node) -> None:
        """Run the operations up to and including a node."""
        if node in self._done:
            return
        for operation in self._operations:
            self._run(operation)
            if operation.node is node:
                return

    def _run(self, operation: TracedOperation) -> None:
        node = operation.node
        for batch, values in enumerate(self._values):
            args, kwargs = self.value(node.args, batch), self.value(node.kwargs, batch)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for old in self._freed.get(node, ()):
                values.pop(old, None)
        self._done.add(node)

    def __len__(self) -> int:
        return len(self._values)


def _name(argument: Any) -> str:
    return argument.name if isinstance(argument, fx.Node) else ""


def _is_reader(operation: TracedOperation, graph: Trace) -> bool:
    known = operation.kind in _CONVOLUTIONS or operation.kind in _TRANSPOSED or operation.kind == "linear"
    return known and _name(operation.arguments["weight"]) in graph.tensors


def _paired_readers(dense: Trace, small: Trace) -> list[tuple[TracedOperation, TracedOperation]]:
    """Return the layers of both graphs in execution order; a weight that several operations use is left as it is."""
    lists = []
    for graph in (dense, small):
        found = [operation for operation in graph.operations if _is_reader(operation, graph)]
        names = [graph.tensors[_name(o.arguments["weight"])] for o in found]
        lists.append({n: o for n, o in zip(names, found, strict=True) if names.count(n) == 1})
    return [(operation, lists[1][name]) for name, operation in lists[0].items() if name in lists[1]]


@dataclass(frozen=True)
class _Sink:
    """What follows a layer: a batch norm that can take up a shift, and the other side of a sum."""

    norm: TracedOperation | None
    other: fx.Node | None


def _sink(operation: TracedOperation, graph: Trace) -> _Sink:
    """Find what becomes of a layer's output, where it is used once."""
    by_node = {o.node: o for o in graph.operations}
    node, norm = operation.node, None
    while len(node.users) == 1:
        user = by_node.get(next(iter(node.users)))
        if user is None:
            break
        if user.kind == "batch_norm" and norm is None and _name(user.arguments["running_mean"]) in graph.tensors:
            norm, node = user, user.node
        elif user.kind in {"dropout", "feature_dropout", "contiguous", "clone", "alias"}:
            node = user.node
        elif user.kind == "add" and user.arguments.get("alpha", 1) == 1:
            sides = [user.arguments.get("self", user.arguments.get("input")), user.arguments["other"]]
            rest = [side for side in sides if side is not node]
            return _Sink(norm, rest[0] if len(rest) == 1 and isinstance(rest[0], fx.Node) else None)
        else:
            break
    return _Sink(norm, None)


class _Moments:
    """First and second moments of inputs X (n, G, d) and targets Y (n, G, o), about a fixed point near the mean."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x0, self.y0 = x.double().mean(0), y.double().mean(0)
        groups, d = self.x0.shape
        self.n = 0
        self.x, self.y = torch.zeros_like(self.x0), torch.zeros_like(self.y0)
        self.xx, self.xy = (self.x0.new_zeros(groups, d, n) for n in (d, self.y0.shape[1]))
        self.yy = torch.zeros_like(self.y0)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples."""
        x, y = (x - self.x0.to(x.dtype)).movedim(1, 0), (y - self.y0.to(y.dtype)).movedim(1, 0)
        self.n += x.shape[1]
        self.x += x.sum(1)
        self.y += y.sum(1)
        self.xx += x.mT @ x
        self.xy += x.mT @ y
        self.yy += y.square().sum(1)

    def joined(self, other: _Moments) -> _Moments:
        """Return the moments of all samples; both are about the same point."""
        both = object.__new__(_Moments)
        both.x0, both.y0, both.n = self.x0, self.y0, self.n + other.n
        for name in ("x", "y", "xx", "xy", "yy"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def about(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean products XX (G, d, d), XY (G, d, o) and YY (G, o) of deviations from points near the mean."""
        n = self.n
        dx, dy, mx, my = x - self.x0, y - self.y0, self.x / n, self.y / n
        outer = torch.einsum
        xx = self.xx / n - outer("gi,gj->gij", mx, dx) - outer("gi,gj->gij", dx, mx) + outer("gi,gj->gij", dx, dx)
        xy = self.xy / n - outer("gi,gj->gij", mx, dy) - outer("gi,gj->gij", dx, my) + outer("gi,gj->gij", dx, dy)
        yy = self.yy / n - 2 * my * dy + dy.square()
        return xx, xy, yy

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Means of X (G, d) and of Y (G, o)."""
        return self.x0 + self.x / self.n, self.y0 + self.y / self.n


def _refit_layer(
    whole: _Lockstep,
    part: _Lockstep,
    theirs: TracedOperation,
    ours: TracedOperation,
    cuts: dict[int, Ints],
    held: int,
    generator: torch.Generator,
) -> Recovered | None:
    """Fit one layer and write its new weights into the pruned network."""
    weight = part.tensor(ours.arguments["weight"])
    bias_node = ours.arguments.get("bias")
    bias = part.tensor(bias_node) if isinstance(bias_node, fx.Node) else None
    sink = _sink(ours, part.trace)
    mean_node = sink.norm.arguments["running_mean"] if sink.norm is not None else None
    layer = _Layer.of(ours, tuple(weight.shape))
    rows = cuts.get(1 if ours.kind in _TRANSPOSED else 0)
    if rows is not None and layer.groups > 1 and ours.kind in _TRANSPOSED:
        return None  # the kept outputs of each group are not one list
    correction = _Correction.of(whole, part, theirs, sink, rows, layer.axis)
    train, test = _moments(whole, part, theirs, ours, layer, rows, correction, held, generator)
    if train.n < 2:
        return None
    centred = bias is not None or mean_node is not None
    start = layer.matrix(weight).double()
    new, ridge, before, after = _best(train, test, start, centred)
    both = train if test is None else train.joined(test)
    if not math.isinf(ridge):
        new = _solve(both, start, ridge, centred)
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


def _best(train: _Moments, test: _Moments | None, start: Tensor, centred: bool) -> tuple[Tensor, float, float, float]:
    """Return the weights and the ridge with the least error on held-out samples, and the errors before and after."""
    judge = train if test is None else test
    mean_x, mean_y = train.means
    if not centred:
        mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
    xx, xy, yy = judge.about(mean_x, mean_y)
    total = float(yy.sum().clamp_min(1e-30))

    def error(w: Tensor) -> float:
        fitted = torch.einsum("goi,gij,goj->", w, xx, w)
        return float(yy.sum() - 2 * torch.einsum("god,gdo->", w, xy) + fitted) / total

    before = error(start)
    best = (start, math.inf, before)
    ridges = _RIDGES if test is not None else _RIDGES[1:2]
    for ridge in ridges:
        w = _solve(train, start, ridge, centred)
        found = error(w)
        if found < best[2]:
            best = (w, ridge, found)
    return best[0], best[1], max(before, 0.0), max(best[2], 0.0)


def _solve(moments: _Moments, start: Tensor, ridge: float, centred: bool) -> Tensor:
    """Return the weights (G, o, d) that minimise the error with a penalty on the distance from ``start``."""
    mean_x, mean_y = moments.means
    if not centred:
        mean_x, mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
    xx, xy, _ = moments.about(mean_x, mean_y)
    d = xx.shape[-1]
    typical = xx.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
    system = xx + (ridge * typical)[:, None, None] * torch.eye(d, dtype=xx.dtype, device=xx.device)
    rest = xy - xx @ start.mT
    return start + torch.linalg.solve(system, rest).mT


@dataclass(frozen=True)
class _Correction:
    """What the pruned network's shortcut lacks, in units of the layer's output."""

    whole: _Lockstep
    part: _Lockstep
    theirs: fx.Node
    ours: fx.Node
    rows: Tensor | None
    axis: int
    scale: Tensor | None

    @classmethod
    def of(
        cls, whole: _Lockstep, part: _Lockstep, theirs: TracedOperation, sink: _Sink, rows: Ints | None, axis: int
    ) -> _Correction | None:
        """Return the correction where the shortcut is known before the layer, else None."""
        other = _sink(theirs, whole.trace).other
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
    whole: _Lockstep,
    part: _Lockstep,
    theirs: TracedOperation,
    ours: TracedOperation,
    layer: _Layer,
    rows: Ints | None,
    correction: _Correction | None,
    held: int,
    generator: torch.Generator,
) -> tuple[_Moments, _Moments | None]:
    """Return the moments of the samples of a layer, those of the held-out batches apart."""
    train: _Moments | None = None
    test: _Moments | None = None
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
                train, test = _Moments(inputs, targets), _Moments(inputs, targets) if held else None
            (test if test is not None and batch >= len(whole) - held else train).add(inputs, targets)
    assert train is not None
    return train, test


@dataclass(frozen=True)
class _Layer:
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
    def of(cls, operation: TracedOperation, shape: tuple[int, ...]) -> _Layer:
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
        if self.kind in _TRANSPOSED:
            return weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(2)
        return weight.unflatten(0, (self.groups, -1)).flatten(2)

    def weight(self, matrix: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return (G, o, d) as a weight of this shape."""
        if self.kind in _TRANSPOSED:
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
            if self.kind in _TRANSPOSED:
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
