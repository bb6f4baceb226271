"""nn.Module -> the list of its ATen operations, with shapes and with the place in the user's code.

``torch.export`` (non-strict) runs the model's own Python once on fake tensors; what comes back is a flat graph in which
``conv2d``, ``linear``, ``layer_norm`` ... are still single operations. Everything above this module works on that list
and never on the model's source.
"""

from __future__ import annotations

import contextlib
import copy
import io
import operator
import os
import pathlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from dsa_hw.errors import TraceError

__all__ = ["Trace", "TracedOperation", "as_inputs", "copy_sharing_tensors", "evaluating", "trace"]

_TORCH_FOLDER = f"{pathlib.Path(torch.__file__).parent}{os.sep}"  # with the separator: not torchvision's
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True, eq=False)
class TracedOperation:
    """One ATen call. ``arguments`` maps the schema's argument names to Python values and ``fx.Node`` references."""

    node: fx.Node
    kind: str
    arguments: Mapping[str, Any]
    module: str
    place: str

    @property
    def name(self) -> str:
        """Unique name in the graph."""
        return self.node.name

    def __str__(self) -> str:
        where = f" in {self.module!r}" if self.module else ""
        return f"{self.kind}{where}" + (f" ({self.place})" if self.place else "")


@dataclass(frozen=True, eq=False)
class Trace:
    """The operations in execution order, and which graph inputs are the model's own tensors (by state_dict name)."""

    operations: tuple[TracedOperation, ...]
    tensors: Mapping[str, str]
    """Graph input -> name of the parameter or buffer."""
    values: Mapping[str, torch.Tensor]
    """Name of a parameter, buffer or constant -> its value."""
    constants: Mapping[str, str]
    """Graph input -> name of a constant that is neither parameter nor buffer."""
    inputs: tuple[fx.Node, ...]
    """The user's inputs."""
    outputs: tuple[fx.Node, ...] = field(default=())


def as_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tensor, a sequence of arguments, or a mapping of keyword arguments."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise TraceError(
        f"example_inputs is a {type(example_inputs).__name__}: "
        "give a tensor, a tuple of arguments or a dict of keyword arguments"
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode restored outside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def trace(model: nn.Module, example_inputs: Any) -> Trace:
    """Export a copy of ``model`` in evaluation mode; ``model`` itself is never run and does not change."""
    args, kwargs = as_inputs(example_inputs)
    copied = copy_sharing_tensors(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # On failure torch.export prints the half-made graph to the terminal; the error says it in one line.
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                program = torch.export.export(copied, args, kwargs, strict=False)
        except Exception as error:
            _check_forward(copy_sharing_tensors(model).eval(), args, kwargs)
            raise TraceError(
                f"torch.export cannot trace {type(model).__name__}: {_first_line(error)}. Data-dependent control flow "
                "in forward is the usual cause: remove it, or trace the part of the model without it"
            ) from error
    signature = program.graph_signature
    # A tied tensor has several names; everywhere else it goes by the first, as in model.named_parameters().
    first: dict[int, str] = {}
    canonical = {
        name: first.setdefault(id(tensor), name)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    given = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = {graph_name: canonical.get(name, name) for graph_name, name in given.items()}
    constants = dict(signature.inputs_to_lifted_tensor_constants)
    values: dict[str, torch.Tensor] = {}
    for graph_name, name in [*given.items(), *constants.items()]:
        value = program.state_dict.get(name, program.constants.get(name))
        if isinstance(value, torch.Tensor):
            values[tensors.get(graph_name) or str(name)] = value
    user_inputs = set(signature.user_inputs)
    operations: list[TracedOperation] = []
    inputs: list[fx.Node] = []
    outputs: list[fx.Node] = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in user_inputs:
            inputs.append(node)
        elif node.op == "call_function":
            operations.append(_operation(node))
        elif node.op == "output":
            outputs = list(node.all_input_nodes)
    return Trace(tuple(operations), tensors, values, constants, tuple(inputs), tuple(outputs))


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """Copy ``model`` with all its attributes; parameters and buffers are those of ``model``, not copies of them.

    ``forward`` may assign attributes. During an export these are fake tensors, which torch.export removes only where
    the instance had the attribute before. In a copy they do no harm.
    """
    memo = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the __deepcopy__ and __reduce__ of the user's attributes raise
        raise TraceError(
            f"{type(model).__name__} cannot be copied with copy.deepcopy, which pruning needs: {_first_line(error)}. "
            "Remove the attribute that cannot be copied"
        ) from error


def _check_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the model once, so that a wrong input is told apart from a model that cannot be traced."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        shapes = ", ".join(
            "x".join(map(str, a.shape)) for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)
        )
        raise TraceError(
            f"{type(model).__name__} does not run on the example input ({shapes or 'no tensor'}): "
            f"{_first_line(error)}. Give the shape that the model takes"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ")


def _operation(node: fx.Node) -> TracedOperation:
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    target = node.target
    if target is operator.getitem:
        return TracedOperation(node, "getitem", {"input": node.args[0], "index": node.args[1]}, module, "")
    schema = getattr(target, "_schema", None)
    if schema is None:  # a higher-order operation: its arguments are only known by position
        arguments = {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
        return TracedOperation(node, str(getattr(target, "__name__", target)), arguments, module, place(node))
    arguments = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            arguments[argument.name] = node.args[i]
        else:
            arguments[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    kind = schema.name.split("::")[-1]
    if kind.endswith("_") and not kind.endswith("__"):
        kind = kind[:-1]  # the in-place variant does the same to the channels
    return TracedOperation(node, kind, arguments, module, place(node))


def place(node: fx.Node) -> str:
    """``file:line`` of the innermost frame outside torch, without the folders before the package."""
    found = ""
    for match in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        if not match["file"].startswith(_TORCH_FOLDER):
            found = f"{short_path(match['file'])}:{match['line']}"
    return found


def short_path(path: str) -> str:
    """A file's path without the part that belongs to one machine."""
    parts = pathlib.PurePath(path).parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    return parts[-1]
