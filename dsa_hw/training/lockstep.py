"""Run two networks side by side, one operation at a time, and find which layers belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from dsa_hw.channels.trace import Trace, TracedOperation

__all__ = ["CONVOLUTIONS", "TRANSPOSED", "Lockstep", "Sink", "argument_name", "find_sink", "paired_readers"]

CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


class Lockstep:
    """A network as a graph whose operations are run one after the other, each on all batches.

    Args:
        graph: The operations.
        batches: The inputs, of the batch size that the graph was traced with; more may follow with `append`.
    """

    def __init__(self, graph: Trace, batches: Sequence[tuple[Any, ...]]) -> None:
        self.trace = graph
        self._position = {operation.node: n for n, operation in enumerate(graph.operations)}
        self._next = 0
        self._values: list[dict[fx.Node, Any]] = []
        last: dict[fx.Node, fx.Node] = {}
        for operation in graph.operations:
            for node in operation.node.all_input_nodes:
                last[node] = operation.node
        self._freed: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            if node not in graph.outputs:
                self._freed.setdefault(user, []).append(node)
        for batch in batches:
            self.append(batch)
        self._peaks = self._measured_peaks()

    def append(self, batch: tuple[Any, ...]) -> None:
        """Add a batch and bring it to the present position."""
        values = dict(zip(self.trace.inputs, batch, strict=True))
        for operation in self.trace.operations[: self._next]:
            self._run(operation, values)
        self._values.append(values)

    def peak(self) -> int:
        """Return the most bytes that the values of a batch have at once from the present position on."""
        return max(self._peaks[self._next :], default=0)

    def _measured_peaks(self) -> list[int]:
        values = dict(self._values[0])
        return [_bytes(values) + self._run(operation, values) for operation in self.trace.operations]

    def value(self, node: Any, batch: int) -> Any:
        """Return the value of a node (or of an argument that is none) for a batch."""
        return self._filled(node, self._values[batch])

    def tensor(self, node: fx.Node) -> Tensor:
        """Return a parameter, buffer or constant of the graph."""
        name = self.trace.tensors.get(node.name) or self.trace.constants[node.name]
        return self.trace.values[name]

    def knows(self, node: Any) -> bool:
        """Return whether a node has been computed and is still needed."""
        return isinstance(node, fx.Node) and all(node in values for values in self._values)

    def run_before(self, node: fx.Node) -> None:
        """Run the operations before a node; the node itself is run next."""
        self._run_to(self._position[node])

    def run_through(self, node: fx.Node) -> None:
        """Run the operations up to and including a node."""
        self._run_to(self._position[node] + 1)

    def _run_to(self, position: int) -> None:
        for operation in self.trace.operations[self._next : position]:
            for values in self._values:
                self._run(operation, values)
        self._next = max(self._next, position)

    def _run(self, operation: TracedOperation, values: dict[fx.Node, Any]) -> int:
        """Run an operation on one batch, drop what is not needed any more, and return the bytes of the result."""
        node = operation.node
        args, kwargs = self._filled(node.args, values), self._filled(node.kwargs, values)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        size = _bytes({node: values[node]})
        for old in self._freed.get(node, () if node.users or node in self.trace.outputs else (node,)):
            values.pop(old, None)
        return size

    def _filled(self, arguments: Any, values: dict[fx.Node, Any]) -> Any:
        return fx.node.map_arg(arguments, lambda n: values[n] if n in values else self.tensor(n))

    def __len__(self) -> int:
        return len(self._values)


def _bytes(values: dict[fx.Node, Any]) -> int:
    """Return the bytes of the memory that values use; views of the same memory count once."""
    memory = [x.untyped_storage() for x in tree_leaves(list(values.values())) if isinstance(x, Tensor)]
    return sum({part.data_ptr(): part.nbytes() for part in memory}.values())


def argument_name(argument: Any) -> str:
    """Return the name of an argument that is a node of the graph, else an empty text."""
    return argument.name if isinstance(argument, fx.Node) else ""


def _is_reader(operation: TracedOperation, graph: Trace) -> bool:
    known = operation.kind in CONVOLUTIONS or operation.kind in TRANSPOSED or operation.kind == "linear"
    return known and argument_name(operation.arguments["weight"]) in graph.tensors


def paired_readers(dense: Trace, small: Trace) -> list[tuple[TracedOperation, TracedOperation]]:
    """Return the layers of both graphs in execution order; a weight that several operations use is left as it is."""
    lists = []
    for graph in (dense, small):
        found = [operation for operation in graph.operations if _is_reader(operation, graph)]
        names = [graph.tensors[argument_name(o.arguments["weight"])] for o in found]
        lists.append({n: o for n, o in zip(names, found, strict=True) if names.count(n) == 1})
    return [(operation, lists[1][name]) for name, operation in lists[0].items() if name in lists[1]]


@dataclass(frozen=True)
class Sink:
    """What follows a layer: a batch norm that can take up a shift, and the other side of a sum."""

    norm: TracedOperation | None
    other: fx.Node | None


def _has_statistics(norm: TracedOperation, graph: Trace) -> bool:
    return argument_name(norm.arguments["running_mean"]) in graph.tensors


def find_sink(operation: TracedOperation, graph: Trace) -> Sink:
    """Find what becomes of a layer's output, where it is used once."""
    by_node = {o.node: o for o in graph.operations}
    node, norm = operation.node, None
    while len(node.users) == 1:
        user = by_node.get(next(iter(node.users)))
        if user is None:
            break
        if (
            user.kind == "batch_norm"
            and norm is None
            and argument_name(user.arguments["running_mean"]) in graph.tensors
        ):
            norm, node = user, user.node
        elif user.kind in {"dropout", "feature_dropout", "contiguous", "clone", "alias"}:
            node = user.node
        elif user.kind == "add" and user.arguments.get("alpha", 1) == 1:
            sides = [user.arguments.get("self", user.arguments.get("input")), user.arguments["other"]]
            rest = [side for side in sides if side is not node]
            return Sink(norm, rest[0] if len(rest) == 1 and isinstance(rest[0], fx.Node) else None)
        else:
            break
    return Sink(norm, None)
