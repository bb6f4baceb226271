"""plan.json: which units of each channel group are kept. With the plain constructor and a state_dict it is the pruned
network.

    plan = Plan.of(groups, kept)
    plan.save("plan.json")
    torch.save(small.state_dict(), "small.pt")
    ...
    small = apply_plan(resnet18(), "plan.json")
    small.load_state_dict(torch.load("small.pt", weights_only=True))

The file is JSON with a checksum over its own content, so a truncated or edited one is refused; nothing is ever
unpickled. It also holds the names and shapes that the network had, so a plan that does not fit says where the two
differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsa_hw.channels.discovery import find_groups
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.surgery import first_difference, shrink
from dsa_hw.errors import PlanError

__all__ = ["Plan", "apply_plan"]

_FORMAT = "dsa_hw plan"
_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Kept units per group, and what they were found in."""

    names: tuple[str, ...]
    """The K channel groups."""
    sizes: tuple[int, ...]
    """C_k: units of each group before pruning."""
    kept: tuple[tuple[int, ...], ...]
    """Kept units of each group, sorted."""
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Parameters and buffers of the network before pruning."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the example inputs."""
    certificate: Mapping[str, Any] | None = None
    """What was asked and measured (``dsa_hw.allocate`` writes it)."""

    @classmethod
    def of(
        cls, groups: ChannelGroups, kept: Sequence[NDArray[np.int64]], certificate: Mapping[str, Any] | None = None
    ) -> Plan:
        """The plan that keeps these units of these groups."""
        units = tuple(tuple(int(i) for i in u) for u in groups.check_kept(kept))
        sizes = tuple(int(n) for n in groups.sizes)
        return cls(groups.names, sizes, units, dict(groups.shapes), groups.inputs, certificate)

    @property
    def widths(self) -> dict[str, int]:
        """Group name -> number of kept units."""
        return {name: len(units) for name, units in zip(self.names, self.kept, strict=True)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole or not at all."""
        content = asdict(self)
        document = {"format": _FORMAT, "version": _VERSION, "sha256": _checksum(content), **content}
        target = pathlib.Path(path)
        try:
            with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False) as file:
                json.dump(document, file, indent=1)
            os.replace(file.name, target)
        except OSError as error:
            raise PlanError(f"cannot write {target}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan; a file that is not one, is cut off or was edited is refused."""
        try:
            text = pathlib.Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{path} is not a whole plan: the JSON breaks off at line {error.lineno}. Save it again"
            ) from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise PlanError(f"{path} is not a plan of dsa_hw: a plan is written by Plan.save")
        if document.get("version") != _VERSION:
            version = document.get("version")
            raise PlanError(
                f"{path} has plan version {version}, this dsa_hw reads {_VERSION}: use the one that wrote it"
            )
        content = {key: value for key, value in document.items() if key not in ("format", "version", "sha256")}
        if set(content) != set(cls.__dataclass_fields__) or _checksum(content) != document.get("sha256"):
            raise PlanError(f"{path} was changed after it was saved (its checksum does not fit): save the plan again")
        return cls(
            names=tuple(content["names"]),
            sizes=tuple(content["sizes"]),
            kept=tuple(tuple(units) for units in content["kept"]),
            shapes={name: tuple(shape) for name, shape in content["shapes"].items()},
            inputs=tuple(tuple(shape) for shape in content["inputs"]),
            certificate=content["certificate"],
        )


def apply_plan(model: nn.Module, plan: Plan | str | os.PathLike[str], example_inputs: Any = None) -> nn.Module:
    """The pruned network: ``model`` (a plain, unpruned one) without the units that the plan does not keep.

    ``example_inputs`` is needed only where the network does not take floating-point tensors.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if found := first_difference(model, plan.shapes):
        raise PlanError(
            f"the plan belongs to another network: {found} in the plan. "
            "Build the model with the constructor and arguments that the plan was made for"
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
            f"the plan does not fit: group {name!r} has {here.get(name, 'no')} units in the model and "
            f"{there.get(name, 'no')} in the plan. Build the model as it was, or use the versions of dsa_hw and torch "
            "that the plan was made with"
        )
    return shrink(model, groups, [np.asarray(units) for units in plan.kept])


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
