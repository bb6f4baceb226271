"""Modules whose code contains a channel count: their traced graph instead, with other counts.

``x.view(b, n, 3, heads, c // heads)`` with ``c = x.shape[-1]`` ties the width of attention to the width of its input;
no attribute can change that. In the shrunk network such a module is replaced by the graph that ``torch.export`` traces
from it, in which every size along an axis of channels is the number of kept ones. Sizes that vary with the batch or
the length of a text stay symbolic; other sizes of the input are those of the example inputs. Children of torch's own
classes stay modules, with their training mode. `find_groups` verifies the result, as everything else.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from dsa_hw.utils.modules import copy_module

__all__ = ["Rewrite", "resize", "rewrite"]

Call = tuple[tuple[Any, ...], dict[str, Any]]


class UnresizableError(Exception):
    """An operation whose arguments cannot be adapted to fewer channels."""


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
    for path, (call, dynamic) in calls.items():
        module = model.get_submodule(path)
        inside = [o for o in trace.operations if f"{o.module}.".startswith(f"{path}.") and _computes(o)]
        for key in [(type(module), _signature(call)), path]:  # modules of a class usually have the same graph
            if key not in made:
                made[key] = _graph(module, call, dynamic)
            graph = made[key]
            pairs = _matched(graph, inside, path) if graph is not None else None
            if graph is not None and pairs is not None:
                result[path] = Rewrite(graph, pairs)
                break
    return result


def _calls(model: nn.Module, example_inputs: Any, paths: Sequence[str]) -> dict[str, tuple[Call, list[set[int]]]]:
    """Return the arguments of the only call of each module, and the dimensions of each tensor that are not constant.

    The network is run without data, on inputs of other batch sizes, lengths and sides where it accepts them.
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

    plain = record(example_inputs)
    variants = [record(pytree.tree_map_only(Tensor, change, example_inputs)) for change in (_more, _longer)]
    base = variants[0] or plain
    result = {}
    for path, calls in base.items():
        if len(calls) != 1:
            continue
        others = [v[path][0] for v in [*variants, plain] if v and len(v[path]) == 1]
        leaves = [pytree.tree_leaves(call) for call in (calls[0], *others)]
        if any(len(found) != len(leaves[0]) for found in leaves):
            continue
        dynamic = [
            {d for other in same[1:] for d in range(same[0].ndim) if other.shape[d] != same[0].shape[d]}
            for same in zip(*leaves, strict=True)
            if isinstance(same[0], Tensor)
        ]
        result[path] = (calls[0], dynamic)
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


def _signature(call: Call) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else str(x) for x in pytree.tree_leaves(call))


def _graph(module: nn.Module, call: Call, dynamic: Sequence[set[int]]) -> fx.GraphModule | None:
    device = next((t.device for t in [*module.parameters(), *module.buffers()]), torch.device("cpu"))
    made: dict[int, Tensor] = {}  # one tensor for query, key and value stays one
    args, kwargs = pytree.tree_map_only(
        Tensor,
        lambda t: made.setdefault(id(t), torch.zeros(t.shape, dtype=t.dtype, device=device)),
        call,
    )
    shapes: Any = torch.export.ShapesCollection()
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    for tensor, dims in zip(tensors, dynamic, strict=True):
        if dims:
            shapes[tensor] = dict.fromkeys(dims, torch.export.Dim.AUTO)
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            copied = copy_sharing_tensors(module).eval()
            program = torch.export.export(
                copied,
                bound.args,
                bound.kwargs,
                dynamic_shapes=shapes if any(dynamic) else None,
                strict=False,
            )
            graph = program.module(check_guards=False)
    except Exception:
        return None
    symbolic = [
        all(not isinstance(node.meta["val"].shape[d], int) for d in dims)
        for node, dims in zip(_tensor_inputs(graph), dynamic, strict=False)
    ]
    return graph if all(symbolic) else None  # it must accept what the network accepts


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
        """Which positions of an axis are kept."""
        ids = value.ids
        if ids.shape[axis] == 1:
            return np.ones(value.shape[axis], bool)
        kept = mask[sizes.units(ids)]
        return np.asarray(kept.any(axis=tuple(a for a in range(ids.ndim) if a != axis)))

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
            constants[str(node.target)] = _attribute(given.module, str(node.target))
        operation = given.operations.get(node.name)
        if operation is not None:
            _adapt(graph, new, operation, values, line)
    if names is None:
        graph._codegen = given.module.graph._codegen
    result = fx.GraphModule(_Root(small, constants), graph, f"Resized{type(small).__name__}")
    for key in ("_parameters", "_modules"):
        result.__dict__[key] = dict(small.__dict__[key])
    result.__dict__["_buffers"] = dict(small._buffers)
    result.__dict__["_non_persistent_buffers_set"] = set(small._non_persistent_buffers_set)
    for target, tensor in constants.items():
        result.register_buffer(target, tensor.clone(), persistent=False)
    # Code around the module may read its attributes; without an entry in ``meta`` a copy of the graph loses them.
    plain = {k: v for k, v in vars(small).items() if isinstance(v, (bool, int, float, str)) and k not in vars(result)}
    result.__dict__.update(plain)
    result.meta["_user_preserved_attributes"] = plain
    return result.train(small.training)


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
    elif kind in ("split", "split_with_sizes"):
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
