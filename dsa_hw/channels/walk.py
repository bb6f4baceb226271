"""The state of a walk over the operations of a network, and the registry of rules that a walk applies."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from dsa_hw.channels.identities import Ids, Ledger, fixed, varying
from dsa_hw.channels.standardised import Standardised
from dsa_hw.channels.trace import Trace, TracedOperation
from dsa_hw.utils.arrays import Bools, Ints
from dsa_hw.utils.text import one_line

__all__ = [
    "LARGEST_FREE_TENSOR",
    "RULES",
    "Extent",
    "Flops",
    "Mean",
    "Pad",
    "Value",
    "Walk",
    "mixed",
    "rule",
    "unknown",
]

_logger = logging.getLogger(__name__)
LARGEST_FREE_TENSOR = 1 << 22  # elements; identities of a larger tensor, one per element, would take too much memory


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the network: identities, shape and, for a parameter or buffer of the model, its name."""

    ids: Ids
    shape: tuple[int, ...]
    itemsize: int = 4
    name: str | None = None
    number: torch.Tensor | None = None
    """The values themselves, where they are known at trace time (buffers, constants)."""


@dataclass(frozen=True, eq=False)
class Flops:
    """``scale`` FLOPs for each combination of entries of ``factors``; the first factor holds the outputs."""

    operation: str
    scale: float
    factors: tuple[Ids, ...]


@dataclass(frozen=True, eq=False)
class Extent:
    """An axis of channels whose length ``module`` may hold as an attribute (for example a view to heads)."""

    module: str
    axis: int
    ids: Ids


@dataclass(frozen=True, eq=False)
class Pad:
    """Channels of zeros inserted by ``operation``: the first ``before`` of ``ids`` in front, the rest behind."""

    operation: TracedOperation
    position: int
    """Index of the amount in front in the argument ``pad``; the amount behind follows it."""
    before: int
    ids: Ids


@dataclass(frozen=True, eq=False)
class Mean:
    """A mean over all channels, as in a norm that a user wrote; masked, it is the mean over the kept ones."""

    operation: TracedOperation
    axis: int
    ids: Ids


@dataclass
class Walk:
    """The state of one walk over a trace."""

    trace: Trace
    ledger: Ledger = field(default_factory=Ledger)
    values: dict[str, Any] = field(default_factory=dict)
    flops: list[Flops] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    pads: list[Pad] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    rewrites: dict[str, Any] = field(default_factory=dict)
    """Name of a module whose code contains a channel count -> its graph (`dsa_hw.channels.rewriting.Rewrite`)."""
    standardised: dict[str, Standardised] = field(default_factory=dict)
    """Convolution -> the weight that it standardises."""
    current: TracedOperation | None = None

    @cached_property
    def signatures(self) -> tuple[NDArray[np.uint64], Ints, Bools]:
        """Signature, first producing use (or -1) and whether it is summed over, for each component.

        A signature stands for the multiset of uses of a component: the sum of one random 64-bit number per use.
        """
        labels, count = self.ledger.components
        random = np.random.default_rng(0).integers(1, 2**63, size=len(self.ledger.uses), dtype=np.uint64)
        signature = np.zeros(count, np.uint64)
        producer = np.full(count, -1, np.int64)
        consumed = np.zeros(count, bool)
        for number, use in enumerate(self.ledger.uses):
            found = labels[use.ids[use.ids >= 0]]
            with np.errstate(over="ignore"):
                np.add.at(signature, found, random[number] * np.uint64(use.weight))
            if use.role == "out":
                producer[found[producer[found] < 0]] = number
            elif use.role in ("in", "norm", "standardised"):
                consumed[found] = True
        return signature, producer, consumed

    def value(self, argument: Any) -> Value:
        """Return the value of an argument; a Python number is a tensor of rank 0 without identities."""
        if not isinstance(argument, fx.Node):
            return Value(fixed(0), ())
        value = self.values[argument.name]
        assert isinstance(value, Value), f"{argument.name} is a tuple"
        if value.name is not None and not value.ids.size:
            ids = self.ledger.free(value.name, value.shape, self.name)
            return Value(ids, value.shape, value.itemsize, value.name, value.number)
        return value

    def known(self, value: Value) -> Value:
        """Return a value with the identities that the walk gave to its elements, if it is a parameter or buffer."""
        if value.name is None or value.ids.size:
            return value
        ids = self.ledger.elements(value.name)
        return replace(value, ids=fixed(len(value.shape)) if ids is None else ids)

    def tensor_name(self, argument: Any) -> str | None:
        """Return the state_dict name of an argument that is a floating-point parameter or buffer, else None."""
        if isinstance(argument, fx.Node) and isinstance(value := self.values[argument.name], Value):
            return value.name
        return None

    @property
    def name(self) -> str:
        """Name of the current operation."""
        return self.current.name if self.current else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output of the current operation, which has one output."""
        assert self.current is not None
        return tuple(int(n) for n in self.current.node.meta["val"].shape)

    @property
    def reason(self) -> str:
        """The reason for freezing channels that the current operation joins with fixed ones."""
        return f"{self.current} ties them to channels that cannot be removed"

    def vector(self, value: Value, axis: int) -> Ids:
        """Return the identities along one axis, shape (shape[axis],); join what differs along the others."""
        axis %= len(value.shape)
        others = [a for a in range(len(value.shape)) if a != axis]
        ids = self.ledger.join_along(value.ids, others, self.reason)
        return np.broadcast_to(ids.reshape(-1), (value.shape[axis],))

    def per_channel(self, argument: Any, ids: Ids, role: str = "per") -> None:
        """Record a vector with one value per channel (bias, scale, running mean); None is ignored."""
        if not isinstance(argument, fx.Node):
            return
        if (name := self.tensor_name(argument)) is not None:
            self.ledger.slot(name, 0, ids, role, self.name)
        else:
            value = self.value(argument)
            self.ledger.join(self.vector(value, len(value.shape) - 1), ids, self.reason)


def mixed(walk: Walk, ids: Ids, axes: Sequence[int]) -> Ids:
    """Join along ``axes``; freeze with a reason where that joins all channels into one unit."""
    if varying(ids) and set(varying(ids)) <= set(axes):
        walk.ledger.freeze(ids, f"{walk.current} mixes all of them")
    return walk.ledger.join_along(ids, axes, f"{walk.current} mixes them with channels that cannot be removed")


Rule = Callable[[Walk, TracedOperation], Any]
RULES: dict[str, Rule] = {}


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Register a rule for these kinds of operation (ATen names without namespace and overload)."""

    def register(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = function
        return function

    return register


def unknown(walk: Walk, operation: TracedOperation) -> Any:
    """Freeze every channel that reaches an operation without a rule, and count its FLOPs as constant."""
    for argument in operation.node.all_input_nodes:
        value = walk.values[argument.name]
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None and not (part.name and not part.ids.size):
                walk.ledger.freeze(part.ids, f"operation not supported: {operation}")
    if work := _flops_inside(operation.node):
        walk.flops.append(Flops(walk.name, work, ()))
    meta = operation.node.meta.get("val")
    if isinstance(meta, (tuple, list)):
        return tuple(fixed(m.ndim) if isinstance(m, torch.Tensor) else None for m in meta)
    return fixed(meta.ndim if isinstance(meta, torch.Tensor) else 0)


def _flops_inside(node: fx.Node) -> float:
    """Count the FLOPs of an operation without a rule (it may be a whole subgraph) with torch's counter."""

    def stand_in(source: fx.Node) -> Any:
        if source.op == "get_attr":
            return getattr(source.graph.owning_module, str(source.target))
        return source.meta.get("val")  # a fake tensor: shape, type and device without data

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), stand_in)
    try:
        fake = next((v.fake_mode for v in map(stand_in, node.all_input_nodes) if isinstance(v, FakeTensor)), None)
        with fake or contextlib.nullcontext(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:  # for example an operation without a shape function
        _logger.warning("Cannot count the FLOPs of %s: %s", node.name, one_line(error))
        return 0.0
    return float(counter.get_total_flops())
