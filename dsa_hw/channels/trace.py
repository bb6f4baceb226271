"""A network as the list of its ATen operations, with shapes and with the place in the user's code.

``torch.export`` (non-strict) runs the Python code of the model once on fake tensors and returns a flat graph in which
``conv2d``, ``linear``, ``layer_norm`` and so on are single operations. The rest of the package uses that graph only,
never the source of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import operator
import os
import pathlib
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import TraceError
from dsa_hw.utils.inputs import as_inputs, check_inputs, check_model
from dsa_hw.utils.modules import copy_module
from dsa_hw.utils.text import first_line

__all__ = [
    "Trace",
    "TracedOperation",
    "as_operation",
    "copy_sharing_tensors",
    "failing_code",
    "short_path",
    "tensor_attributes",
    "trace",
]

_TORCH_FOLDER = f"{pathlib.Path(torch.__file__).parent}{os.sep}"  # the separator keeps torchvision out
_OWN_FOLDER = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True, eq=False)
class TracedOperation:
    """One ATen call; ``arguments`` maps the names in its schema to Python values and ``fx.Node`` references."""

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
    """The operations in execution order, and which graph inputs are parameters, buffers or user inputs."""

    operations: tuple[TracedOperation, ...]
    tensors: Mapping[str, str]
    """Graph input -> state_dict name of the parameter or buffer."""
    values: Mapping[str, torch.Tensor]
    """Name of a parameter, buffer or constant -> its value."""
    constants: Mapping[str, str]
    """Graph input -> name of a constant that is neither parameter nor buffer."""
    attributes: frozenset[str]
    """Names of constants that are attributes of modules, such as a table of positions."""
    inputs: tuple[fx.Node, ...]
    """The user's inputs."""
    outputs: tuple[fx.Node, ...] = field(default=())


def trace(model: nn.Module, example_inputs: Any) -> Trace:
    """Export a copy of ``model`` in evaluation mode; ``model`` itself is not run and does not change.

    Raises:
        TraceError: The model cannot be copied, does not run on ``example_inputs``, or cannot be exported.
        ModelError: ``example_inputs`` is not a tensor, a sequence or a mapping.
    """
    check_model(model)
    check_inputs(example_inputs)
    args, kwargs = as_inputs(example_inputs)
    copied = copy_sharing_tensors(model).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # On failure torch.export prints the incomplete graph; the error message has its cause in one line.
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                program = _exported(model, copied, args, kwargs)
        except Exception as error:
            _check_forward(copy_module(model).eval(), args, kwargs)
            raise TraceError(
                f"torch.export cannot trace {type(model).__name__}{_where(error, copied)}: {first_line(error)}. The "
                f"usual cause is data-dependent control flow. {_advice(error, copied)}."
            ) from error
    signature = program.graph_signature
    # A tied tensor has several names. The first one is used, as in model.named_parameters().
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
            operations.append(as_operation(node))
        elif node.op == "output":
            outputs = list(node.all_input_nodes)
    attributes = frozenset(dict(tensor_attributes(model)).keys() & set(constants.values()))
    return Trace(tuple(operations), tensors, values, constants, attributes, tuple(inputs), tuple(outputs))


def _exported(
    model: nn.Module, copied: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.export.ExportedProgram:
    """Export the copy; where torch does not know the class of an output, make it known and export a new copy."""
    try:
        return torch.export.export(copied, args, kwargs, strict=False)
    except (ValueError, RuntimeError):
        with torch.no_grad():
            outputs = copy_module(model).eval()(*args, **kwargs)
        if not _register_dataclasses(outputs):
            raise
        return torch.export.export(copy_sharing_tensors(model).eval(), args, kwargs, strict=False)


def _register_dataclasses(outputs: Any) -> bool:
    """Make the dataclasses in the outputs of a network known to torch; return whether there were unknown ones."""
    found = False
    for leaf in tree_leaves(outputs):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            _register_dataclasses(leaf)
            found = True
    return found


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """Copy ``model`` with all its attributes; parameters and buffers are those of ``model``, not copies of them.

    ``forward`` may assign attributes. During an export these are fake tensors, which torch.export removes only where
    the instance had the attribute before. The copy is discarded, and they with it.
    """
    return copy_module(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})


def tensor_attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of tensors that are plain attributes of modules, neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def failing_code(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """Return the innermost module of ``model`` that raised ``error``, and the ``file:line`` of the user's code.

    Both are "" where they are not known; the module is "" also where it is ``model`` itself.
    """
    names = {id(module): name for name, module in model.named_modules()}
    module, place = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(owner, nn.Module):
            module = names.get(id(owner), module)
        if not file.startswith((_TORCH_FOLDER, _OWN_FOLDER)) and os.path.isabs(file):
            place = f"{short_path(file)}:{line}"
    return module, place


def _where(error: BaseException, model: nn.Module) -> str:
    module, place = failing_code(error, model)
    parts = [f"in {module!r}" if module else "", f"at {place}" if place else ""]
    return " ".join(["", *filter(None, parts)])


def _advice(error: BaseException, model: nn.Module) -> str:
    """Return the call for the largest child of the model that does not contain the code that failed."""
    module, _ = failing_code(error, model)
    failing = module.partition(".")[0]
    children = {name: sum(p.numel() for p in c.parameters()) for name, c in model.named_children() if name != failing}
    largest = max(children, key=lambda name: children[name], default="")
    if not largest or not children[largest]:
        return "Change that code"
    part = f"model.{largest}" if largest.isidentifier() else f"model.get_submodule({largest!r})"
    return f"Change that code, or prune a part of the model without it: dsa_hw.find_groups({part}, ...)"


def _check_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the model once, to distinguish a wrong input from a model that cannot be traced."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        tensors = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)]
        given = ", ".join(f"{'x'.join(map(str, a.shape))} {str(a.dtype)[6:]} on {a.device}" for a in tensors)
        raise TraceError(
            f"{type(model).__name__} does not run on the example input ({given or 'no tensor'}){_where(error, model)}: "
            f"{first_line(error)}. Give an input of a shape, type and device that the model accepts."
        ) from error


def as_operation(node: fx.Node) -> TracedOperation:
    """Describe a call of an ATen operation."""
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    target = node.target
    if target is operator.getitem:
        return TracedOperation(node, "getitem", {"input": node.args[0], "index": node.args[1]}, module, "")
    schema = getattr(target, "_schema", None)
    if schema is None:  # a higher-order operation: its arguments have no names
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
    """Return ``file:line`` of the innermost frame outside torch, without the folders before the package."""
    found = ""
    for match in _FRAME.finditer(node.meta.get("stack_trace") or ""):
        if not match["file"].startswith(_TORCH_FOLDER):
            found = f"{short_path(match['file'])}:{match['line']}"
    return found


def short_path(path: str) -> str:
    """Return the path of a file from its package on, without the part that differs between machines."""
    parts = pathlib.PurePath(path).parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    return parts[-1]
