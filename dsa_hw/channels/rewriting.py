"""Modules whose code contains a channel count: their traced graph instead, with other counts.

``x.view(b, n, 3, heads, c // heads)`` with ``c = x.shape[-1]`` ties the width of attention to the width of its input;
no attribute can change that. In the shrunk network such a module is replaced by the graph that ``torch.export`` traces
from it, in which every size along an axis of channels is the number of kept ones. Sizes that vary with the batch or
the length of a text are computed from those of its inputs; other sizes of the input are those of the example inputs.
Children of torch's own classes stay modules, with their training mode. `find_groups` verifies the result, as everything
else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dsa_hw.channels.identities import varying
from dsa_hw.channels.sizes import Sizes
from dsa_hw.channels.trace import Trace, TracedOperation, as_operation, copy_sharing_tensors
from dsa_hw.channels.walk import Value
from dsa_hw.utils.arrays import Bools
from dsa_hw.utils.inputs import as_inputs
from dsa_hw.utils.modules import copy_module, device_of
from dsa_hw.utils.text import first_line

__all__ = ["Rewrite", "UnresizableError", "resize", "rewrite"]

_logger = logging.getLogger(__name__)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class UnresizableError(Exception):
    """An operation in a module (named ``module``) whose arguments cannot be adapted to fewer channels."""

    module = ""


@dataclass(frozen=True, eq=False)
class Rewrite:
    """The graph of one module, and which operation of the network each of its nodes is."""

    module: fx.GraphModule
    operations: Mapping[str, TracedOperation]


def rewrite(model: nn.Module, trace: Trace, example_inputs: Any, paths: Sequence[str]) -> dict[str, Rewrite]:
    """Trace modules of ``model`` on their own; leave out those for which that fails.

    Args:
        model: The network.
        trace: Its trace.
        example_inputs: As for `find_groups`.
        paths: Names of the modules.

    Returns:
        The graphs by name of the module.
    """
    calls = _calls(model, example_inputs, paths)
    made: dict[Any, fx.GraphModule | None] = {}
    result: dict[str, Rewrite] = {}
    for path, found in calls.items():
        module = model.get_submodule(path)
        inside = [o for o in trace.operations if f"{o.module}.".startswith(f"{path}.") and _computes(o)]
        for key in [(type(module), *map(_signature, found)), path]:  # modules of a class usually have the same graph
            if key not in made:
                made[key] = _graph(module, found)
            graph = made[key]
            pairs = _matched(graph, inside, path) if graph is not None else None
            if graph is not None and pairs is not None:
                result[path] = Rewrite(graph, pairs)
                break
    return result


def _calls(model: nn.Module, example_inputs: Any, paths: Sequence[str]) -> dict[str, list[Call]]:
    """Return the arguments of the only call of each module: with the example inputs, then with other sizes.

    The network is run without data, also on inputs of another batch size and length where it accepts them.
    """
    empty = copy_module(model, {id(t): _empty(t) for t in [*model.parameters(), *model.buffers()]}).eval()

    def run(network: nn.Module, inputs: Any) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {path: [] for path in paths}
        handles = [
            network.get_submodule(path).register_forward_pre_hook(
                lambda _, args, kwargs, path=path: found[path].append((args, kwargs)), with_kwargs=True
            )
            for path in paths
        ]
        args, kwargs = as_inputs(inputs)
        try:
            with torch.no_grad():
                network(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def record(inputs: Any) -> dict[str, list[Call]]:
        with contextlib.suppress(Exception):
            return run(empty, pytree.tree_map_only(Tensor, lambda t: t.to("meta"), inputs))
        with contextlib.suppress(Exception):  # some networks do not run without data, or not on such inputs
            return run(copy_module(model).eval(), inputs)
        return {}

    variants = [pytree.tree_map_only(Tensor, change, example_inputs) for change in (_more, _longer, _both)]
    distinct_inputs = {_signature(as_inputs(inputs)): inputs for inputs in (example_inputs, *variants)}
    runs = [record(inputs) for inputs in distinct_inputs.values()]
    result: dict[str, list[Call]] = {}
    for path in paths if runs[0] else ():
        found = [run[path] for run in runs if run]
        if all(len(calls) == 1 for calls in found):
            distinct = {_signature(calls[0]): calls[0] for calls in found}
            result[path] = list(distinct.values())
    return result


def _empty(tensor: Tensor) -> Tensor:
    new = tensor.detach().to("meta")
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _more(x: Tensor) -> Tensor:
    """Add one to the batch."""
    return torch.cat([x, x[:1]]) if x.ndim else x


def _longer(x: Tensor) -> Tensor:
    """Add one to the length of a sequence of integers (words)."""
    return x if x.is_floating_point() or x.ndim < 2 else torch.cat([x, x[..., :1]], -1)


def _both(x: Tensor) -> Tensor:
    return _longer(_more(x))


def _signature(call: Call) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else str(x) for x in pytree.tree_leaves(call))


def _graph(module: nn.Module, calls: Sequence[Call]) -> fx.GraphModule | None:
    """Trace a module for each of its calls, and return the first graph, with the sizes that vary as expressions.

    Traces with constant sizes are faster than one with symbols, and have the same operations as that of the network.
    """
    graphs = []
    for call in calls:
        graph = _exported(module, call)
        if graph is None:
            return None
        graphs.append(graph)
    return graphs[0] if len(graphs) == 1 or _vary(graphs) else None


def _exported(module: nn.Module, call: Call) -> fx.GraphModule | None:
    device = device_of(module)
    made: dict[int, Tensor] = {}  # one tensor for query, key and value stays one
    args, kwargs = pytree.tree_map_only(
        Tensor,
        lambda t: made.setdefault(id(t), torch.zeros(t.shape, dtype=t.dtype, device=device)),
        call,
    )
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            copied = copy_sharing_tensors(module).eval()
            program = torch.export.export(copied, bound.args, bound.kwargs, strict=False)
            return program.module(check_guards=False)
    except Exception as error:
        _logger.debug("Cannot trace %s: %s", type(module).__name__, first_line(error))
        return None


def _vary(graphs: Sequence[fx.GraphModule]) -> bool:
    """Replace numbers in the first graph that differ in the others by expressions of the sizes of its inputs.

    Returns:
        Whether all of them could be expressed; the graph then computes each of the others.
    """
    nodes = [list(g.graph.nodes) for g in graphs]
    if not _tensor_inputs(graphs[0]) or any(
        [(n.op, _kind(n)) for n in each] != [(n.op, _kind(n)) for n in nodes[0]] for each in nodes
    ):
        return False
    number = [{node: i for i, node in enumerate(each)} for each in nodes]
    inputs = [_tensor_inputs(g) for g in graphs]
    sizes = _Sizes(graphs[0].graph, nodes[0])
    for same in zip(*inputs, strict=True):
        for dim, found in enumerate(zip(*[n.meta["val"].shape for n in same], strict=True)):
            if len(set(found)) > 1:
                sizes.known[same[0], dim] = found
    for same in zip(*nodes, strict=True):
        if same[0].op != "call_function":
            continue
        flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in same]
        if any(spec != flat[0][1] for _, spec in flat):
            return False
        leaves: list[Any] = []
        for values in zip(*[found for found, _ in flat], strict=True):
            if isinstance(values[0], fx.Node):
                if len({number[i].get(value) for i, value in enumerate(values)}) > 1:
                    return False
                leaves.append(values[0])
            elif all(type(v) is type(values[0]) and v == values[0] for v in values):
                leaves.append(values[0])
            elif all(type(v) is int for v in values) and (expression := sizes.expression(values)) is not None:
                leaves.append(expression)
            else:
                return False
        same[0].args, same[0].kwargs = pytree.tree_unflatten(leaves, flat[0][1])
    return True


def _kind(node: fx.Node) -> str:
    return "" if node.op in ("placeholder", "output") else str(node.target)


class _Sizes:
    """Sizes of the inputs of a graph that vary, and numbers as expressions of them."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        self.graph = graph
        last = max(i for i, n in enumerate(nodes) if n.op == "placeholder")
        self.first = nodes[last + 1]
        self.known: dict[tuple[fx.Node, int], tuple[int, ...]] = {}
        self.made: dict[Any, fx.Node] = {}

    def expression(self, values: tuple[int, ...]) -> fx.Node | None:
        """Return a node with this value in each trace: a multiple of one or two sizes, or a size plus a number."""
        choices = [(d,) for d in self.known] + list(itertools.combinations_with_replacement(self.known, 2))
        for dims in choices:
            product = [prod(found) for found in zip(*[self.known[d] for d in dims], strict=True)]
            if all(v * product[0] == values[0] * p for v, p in zip(values, product, strict=True)):
                many = functools.reduce(lambda a, b: self._call(_times, a, b), map(self._size, dims))
                ratio = Fraction(values[0], product[0])
                many = many if ratio.numerator == 1 else self._call(_times, many, ratio.numerator)
                return many if ratio.denominator == 1 else self._call(_over, many, ratio.denominator)
        for dim, found in self.known.items():
            if len({v - f for v, f in zip(values, found, strict=True)}) == 1:
                return self._call(operator.add, self._size(dim), values[0] - found[0])
        return None

    def _size(self, dim: tuple[fx.Node, int]) -> fx.Node:
        return self._call(torch.ops.aten.sym_size.int, *dim)

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        if (function, *args) not in self.made:
            with self.graph.inserting_before(self.first):
                self.made[function, *args] = self.graph.call_function(function, args)
        return self.made[function, *args]


def _tensor_inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), Tensor)]


def _computes(operation: TracedOperation) -> bool:
    """Return whether an operation returns tensors, and is no slice of everything, which a trace may leave out."""
    value: Any = operation.node.meta.get("val")
    if operation.kind == "slice" and str(value.shape) == str(operation.node.all_input_nodes[0].meta["val"].shape):
        return False
    return operation.kind != "_assert_tensor_metadata" and isinstance(value, (Tensor, tuple, list))


def _matched(graph: fx.GraphModule, inside: Sequence[TracedOperation], path: str) -> dict[str, TracedOperation] | None:
    """Return the operation of the network for each node, or None if the two are not the same."""
    own = [as_operation(node) for node in graph.graph.nodes if node.op == "call_function"]
    own = [o for o in own if _computes(o)]
    if len(own) != len(inside):
        return None
    for a, b in zip(own, inside, strict=True):
        prefix = f"{path}." if a.module else path
        if a.kind != b.kind or f"{prefix}{a.module}" != b.module or not _same_numbers(a, b):
            return None
    return {a.name: b for a, b in zip(own, inside, strict=True)}


def _same_numbers(a: TracedOperation, b: TracedOperation) -> bool:
    """Return whether the constants of ``b`` are those of ``a``, whose sizes that depend on the input are symbolic."""
    ours, theirs = (pytree.tree_leaves(list(o.arguments.values()), is_leaf=lambda x: x is None) for o in (a, b))
    return len(ours) == len(theirs) and all(isinstance(x, fx.Node) or x == y for x, y in zip(ours, theirs, strict=True))


def resize(given: Rewrite, sizes: Sizes, values: Mapping[str, Any], mask: Bools, small: nn.Module) -> nn.Module:
    """Return a module that computes the graph of ``given`` with the shrunk tensors of ``small``.

    Args:
        given: The graph.
        sizes: Units of identities.
        values: Identities of every tensor of the network.
        mask: True for each kept unit.
        small: The shrunk module, whose parameters, buffers, children and other attributes the result has.

    Raises:
        UnresizableError: An operation cannot be adapted.
    """

    def line(value: Value, axis: int) -> Bools:
        return sizes.kept(value, axis, mask)

    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    constants: dict[str, Tensor] = {}
    known = {
        n for n, _ in [*small.named_parameters(remove_duplicate=False), *small.named_buffers(remove_duplicate=False)]
    }
    children = _torch_children(given, small)
    names = _argument_names(given.module.graph)
    for node in given.module.graph.nodes:
        if node.op == "placeholder" and names:
            made[node] = graph.placeholder(names.pop(0))
            continue
        if node.op == "output" and names is not None:
            flat: Any = node.args[0]
            results = [made[n] if isinstance(n, fx.Node) else n for n in flat]
            graph.output(pytree.tree_unflatten(results, _pytree_info(given.module.graph).out_spec))
            continue
        if node.name in children:
            target, source = children[node.name]
            made[node] = graph.call_module(target, (made[source],))
            continue
        new = made[node] = graph.node_copy(node, lambda n: made[n])
        if node.op == "get_attr" and node.target not in known:
            new.target = f"_constant{len(constants)}"  # in the trace it may be in a child that is not there
            constants[new.target] = _attribute(given.module, str(node.target))
        operation = given.operations.get(node.name)
        if operation is not None:
            _adapt(graph, new, operation, values, line)
        _follow_device(graph, new)
    if names is None:
        graph._codegen = given.module.graph._codegen
    result = fx.GraphModule(_Root(small, constants), graph, f"Resized{type(small).__name__}")
    for key in ("_parameters", "_modules"):
        result.__dict__[key] = dict(small.__dict__[key])
    result.__dict__["_buffers"] = dict(small._buffers)
    result.__dict__["_non_persistent_buffers_set"] = set(small._non_persistent_buffers_set)
    for target, tensor in constants.items():
        result.register_buffer(target, tensor.to(device_of(small), copy=True), persistent=False)
    # Code around the module may read its attributes; without an entry in ``meta`` a copy of the graph loses them.
    plain = {k: v for k, v in vars(small).items() if isinstance(v, (bool, int, float, str)) and k not in vars(result)}
    result.__dict__.update(plain)
    result.meta["_user_preserved_attributes"] = plain
    return result.train(small.training)


def _follow_device(graph: fx.Graph, node: fx.Node) -> None:
    """Put what ``forward`` creates or moves to a device on the device of the first input."""

    def follow(value: Any) -> Any:
        return graph.call_function(getattr, (source, "device")) if isinstance(value, torch.device) else value

    source = next((n for n in graph.nodes if n.op == "placeholder"), None)
    if source is not None and any(isinstance(v, torch.device) for v in pytree.tree_leaves((node.args, node.kwargs))):
        with graph.inserting_before(node):
            node.args, node.kwargs = pytree.tree_map(follow, (node.args, node.kwargs))


def _argument_names(graph: fx.Graph) -> list[str] | None:
    """Return the names of the arguments of ``forward``, or None if some are not single tensors or numbers."""
    info = _pytree_info(graph)
    args, kwargs = pytree.tree_unflatten(range(info.in_spec.num_leaves), info.in_spec)
    names = [name for name in info.orig_args if name != "self"]
    single = all(isinstance(a, int) for a in [*args, *kwargs.values()])
    return names if single and len(names) == info.in_spec.num_leaves else None


def _pytree_info(graph: fx.Graph) -> Any:
    codegen: Any = graph._codegen
    return codegen.pytree_info


class _Root(nn.Module):
    """What the graph refers to: the shrunk module, and constants of the trace."""

    def __init__(self, small: nn.Module, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        for key in ("_parameters", "_modules", "_buffers"):
            self.__dict__[key] = dict(small.__dict__[key])
        for name, tensor in constants.items():
            self.register_buffer(name, tensor)


def _attribute(module: nn.Module, path: str) -> Any:
    parent, _, leaf = path.rpartition(".")
    return getattr(module.get_submodule(parent), leaf)


def _torch_children(given: Rewrite, small: nn.Module) -> dict[str, tuple[str, fx.Node]]:
    """Return nodes that are the whole forward of a child of a torch class: name of the child, and its input."""
    by_child: dict[str, list[fx.Node]] = {}
    for node in given.module.graph.nodes:
        if node.op == "call_function" and (stack := node.meta.get("nn_module_stack")):
            by_child.setdefault(list(stack.values())[-1][0], []).append(node)
    modules, found = dict(small.named_modules()), {}
    for child, nodes in by_child.items():
        module = modules.get(child)
        if not child or module is None or len(nodes) != 1:
            continue
        sources = [n for n in nodes[0].all_input_nodes if n.op != "get_attr"]
        if type(module).__module__.startswith("torch.nn.") and len(sources) == 1:
            found[nodes[0].name] = (child, sources[0])
    return found


_Line = Callable[[Value, int], Bools]


def _adapt(graph: fx.Graph, node: fx.Node, operation: TracedOperation, values: Mapping[str, Any], line: _Line) -> None:
    """Adapt the sizes among the arguments of ``node`` to the kept channels."""
    kind, arguments = operation.kind, operation.arguments
    target: Any = node.target
    source: Any = values[operation.node.all_input_nodes[0].name] if operation.node.all_input_nodes else None
    if kind in ("view", "reshape", "expand"):
        _set(graph, node, 1, _scaled(graph, node, node.args[1], 0, values[operation.name], line))
    elif kind == "unflatten":
        first = arguments["dim"] % len(source.shape)
        _set(graph, node, 2, _scaled(graph, node, node.args[2], first, values[operation.name], line))
    elif kind in ("split", "split_with_sizes", "chunk"):
        axis = arguments["dim"] % len(source.shape)
        kept = line(source, axis)
        if not kept.all():
            parts = np.split(kept, np.cumsum([int(m.shape[axis]) for m in operation.node.meta["val"]])[:-1])
            node.target = torch.ops.aten.split_with_sizes.default
            node.args = (node.args[0], [int(p.sum()) for p in parts], axis)
    elif kind in ("slice", "narrow", "select"):
        axis = arguments["dim"] % len(source.shape)
        kept = line(source, axis)
        if not kept.all():
            _move(node, operation, axis, kept)
    elif kind in ("layer_norm", "rms_norm"):
        if not (kept := line(source, len(source.shape) - 1)).all():
            _set(graph, node, 1, [int(kept.sum())])
    elif kind.startswith("conv"):
        rank = len(operation.arguments["weight"].meta["val"].shape) - 2
        axis = len(source.shape) - rank - 1
        kept = line(source, axis)
        if arguments["groups"] == kept.size > 1:
            names = [a.name for a in target._schema.arguments]
            _set(graph, node, names.index("groups"), int(kept.sum()))
    elif kind in ("unbind", "index", "pad", "roll", "repeat", "unfold", "gather", "index_select") and any(
        not line(source, axis).all() for axis in _touched(operation, source)
    ):
        raise UnresizableError(f"{operation} selects single channels")


def _touched(operation: TracedOperation, source: Value) -> Iterator[int]:
    """Yield the axes that an operation treats position by position."""
    arguments, rank = operation.arguments, len(source.shape)
    if operation.kind == "index":
        yield from (a for a, index in enumerate(arguments["indices"]) if index is not None)
    elif operation.kind == "pad":
        yield from (rank - 1 - i // 2 for i, amount in enumerate(arguments["pad"]) if amount)
    elif operation.kind == "roll":
        yield from (d % rank for d in arguments["dims"] or range(rank))
    elif operation.kind == "unfold":
        yield from (arguments["dimension"] % rank,) if "dimension" in arguments else ()
    elif operation.kind != "repeat":
        yield arguments["dim"] % rank


def _scaled(graph: fx.Graph, node: fx.Node, given: Any, first: int, value: Value, line: _Line) -> list[Any]:
    """Return sizes in which each axis of channels has the share that is kept; -1 stays."""
    sizes = list(given)
    for position, size in enumerate(sizes):
        axis = first + position
        if axis not in varying(value.ids) or size == -1:
            continue
        kept = line(value, axis)
        if kept.all():
            continue
        if isinstance(size, int):
            sizes[position] = int(kept.sum())
        else:  # a size that is a multiple of the batch size
            with graph.inserting_before(node):
                many = graph.call_function(_times, (size, int(kept.sum())))
                sizes[position] = graph.call_function(_over, (many, int(kept.size)))
    return sizes


def _times(a: int, b: int) -> int:
    return a * b


def _over(a: int, b: int) -> int:
    return a // b


def _move(node: fx.Node, operation: TracedOperation, axis: int, kept: Bools) -> None:
    """Adapt bounds along an axis to the number of kept channels before them."""
    before = np.concatenate([[0], np.cumsum(kept)])
    arguments, size = operation.arguments, kept.size
    if operation.kind == "select":
        index = arguments["index"] % size
        if not kept[index]:
            raise UnresizableError(f"{operation} selects a single channel")
        node.args = (node.args[0], axis, int(before[index]))
    elif operation.kind == "narrow":
        start, end = arguments["start"] % size, arguments["start"] % size + arguments["length"]
        node.args = (node.args[0], axis, int(before[start]), int(before[end] - before[start]))
    else:
        if arguments["step"] != 1:
            raise UnresizableError(f"{operation} selects single channels")
        start, end, _ = slice(arguments["start"], arguments["end"]).indices(size)
        node.args = (node.args[0], axis, int(before[start]), int(before[max(start, end)]), 1)
    node.kwargs = {}


def _set(graph: fx.Graph, node: fx.Node, position: int, value: Any) -> None:
    args = list(node.args)
    if position < len(args):
        args[position] = value
        node.args = tuple(args)
    else:
        target: Any = node.target
        node.kwargs = {**node.kwargs, target._schema.arguments[position].name: value}
