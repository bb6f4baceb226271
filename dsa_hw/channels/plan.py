"""``plan.json``: which units of each channel group are kept.

A plan, the constructor of the network and a state_dict restore the pruned network:

    Plan.of(groups, kept).save("plan.json")
    torch.save(small.state_dict(), "small.pt")
    ...
    small = apply_plan(resnet18(), "plan.json")
    small.load_state_dict(torch.load("small.pt", weights_only=True))

The file is JSON with a checksum over its content, so that a truncated or edited file is rejected; nothing is unpickled.
It also contains the names and shapes of the tensors of the network, so that an error can say where a network differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from dsa_hw.channels.discovery import find_groups
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.surgery import first_difference, shrink
from dsa_hw.errors import PlanError
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import first_line

__all__ = ["Plan", "apply_plan"]

_FORMAT = "dsa_hw plan"
_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Kept units of each channel group, and the network that they belong to.

    Example:
        >>> import torch
        >>> from dsa_hw import Plan, find_groups
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        >>> groups = find_groups(model, torch.randn(1, 3, 16, 16))
        >>> Plan.of(groups, [[0, 2, 5]]).widths
        {'0': 3}
    """

    names: tuple[str, ...]
    """Names of the K channel groups."""
    sizes: tuple[int, ...]
    """Units of each group before pruning."""
    kept: tuple[tuple[int, ...], ...]
    """Kept units of each group, sorted."""
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Shapes of all parameters and buffers before pruning."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the example inputs."""
    certificate: Mapping[str, Any] | None = None
    """The certificate that `dsa_hw.allocate` adds: budgets, predictions and measurements."""

    @classmethod
    def of(
        cls, groups: ChannelGroups, kept: Sequence[Ints | Sequence[int]], certificate: Mapping[str, Any] | None = None
    ) -> Plan:
        """Make a plan from channel groups.

        Args:
            groups: The channel groups of the unpruned network.
            kept: For each group the indices of the units to keep.
            certificate: What `dsa_hw.allocate` asked for and measured, as JSON data.

        Returns:
            The plan.

        Raises:
            WidthError: ``kept`` does not match ``groups``.
        """
        units = tuple(tuple(int(i) for i in u) for u in groups.check_kept(kept))
        sizes = tuple(int(n) for n in groups.sizes)
        return cls(groups.names, sizes, units, dict(groups.shapes), groups.inputs, certificate)

    @property
    def widths(self) -> dict[str, int]:
        """Number of kept units by name of the group."""
        return {name: len(units) for name, units in zip(self.names, self.kept, strict=True)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file; if that fails (`PlanError`), an existing file stays as it was."""
        content = asdict(self)
        document = {"format": _FORMAT, "version": _VERSION, "sha256": _checksum(content), **content}
        write_text(path, json.dumps(document, indent=1), PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: The file cannot be read, is not a plan, is truncated, or was edited.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"Cannot read plan {path}: {first_line(error)}.") from error
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{path} is truncated or damaged: invalid JSON at line {error.lineno}. Save the plan again."
            ) from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise PlanError(f"{path} is not a plan. Use a file that Plan.save wrote.")
        if document.get("version") != _VERSION:
            version = document.get("version")
            raise PlanError(
                f"{path} has format version {version}; this version of dsa_hw reads version {_VERSION}. "
                "Use the version of dsa_hw that wrote it."
            )
        content = {key: value for key, value in document.items() if key not in ("format", "version", "sha256")}
        if set(content) != set(cls.__dataclass_fields__) or _checksum(content) != document.get("sha256"):
            raise PlanError(f"{path} was changed after it was saved: the checksum does not match. Save the plan again.")
        return cls(
            names=tuple(content["names"]),
            sizes=tuple(content["sizes"]),
            kept=tuple(tuple(units) for units in content["kept"]),
            shapes={name: tuple(shape) for name, shape in content["shapes"].items()},
            inputs=tuple(tuple(shape) for shape in content["inputs"]),
            certificate=content["certificate"],
        )


def apply_plan(model: nn.Module, plan: Plan | str | os.PathLike[str], example_inputs: Any = None) -> nn.Module:
    """Remove from an unpruned network the units that a plan does not keep.

    Args:
        model: The unpruned network; it is not changed.
        plan: A plan, or the path of its file.
        example_inputs: As for `find_groups`. Needed only where the network takes something other than floating-point
            tensors by position.

    Returns:
        The pruned network, with the remaining weights of ``model``.

    Raises:
        PlanError: The file cannot be read, or the plan belongs to another network.

    Example:
        >>> import torch
        >>> from dsa_hw import Plan, apply_plan, find_groups
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
        >>> plan = Plan.of(find_groups(model, torch.randn(1, 3, 16, 16)), [[0, 2, 5]])
        >>> apply_plan(model, plan)[0]
        Conv2d(3, 3, kernel_size=(3, 3), stride=(1, 1))
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if found := first_difference(model, plan.shapes):
        raise PlanError(
            f"The plan belongs to another network: {found} in the plan. "
            "Build the network with the constructor and the arguments that the plan was made for."
        )
    if example_inputs is None:
        parameter = next(iter(model.parameters()), torch.empty(0))
        example_inputs = tuple(
            torch.zeros(shape, dtype=parameter.dtype, device=parameter.device) for shape in plan.inputs
        )
    groups = find_groups(model, example_inputs)
    if groups.names != plan.names or tuple(groups.sizes.tolist()) != plan.sizes:
        here = dict(zip(groups.names, groups.sizes.tolist(), strict=True))
        there = dict(zip(plan.names, plan.sizes, strict=True))
        name = next(n for n in [*there, *here] if here.get(n) != there.get(n))
        raise PlanError(
            f"The plan does not match the network: group {name!r} has {here.get(name, 'no')} units in the network and "
            f"{there.get(name, 'no')} in the plan. Build the network as it was, or use the versions of dsa_hw and "
            "torch that the plan was made with."
        )
    return shrink(model, groups, [np.asarray(units) for units in plan.kept])


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
