"""``plan.json``: which units of each channel group are kept.

A plan, the constructor of the network and a state dict restore the pruned network:

    Plan.of(groups, kept).save("plan.json")
    safetensors.torch.save_file(small.state_dict(), "small.safetensors")
    ...
    small = apply_plan(resnet18(), "plan.json")
    small.load_state_dict(safetensors.torch.load_file("small.safetensors"))

The file is JSON (`PlanDocument`) with a checksum over its content, so that a truncated or edited file is rejected;
nothing is unpickled. It has the names and shapes of the tensors of the network, so that an error can say where a
network differs, and SHA-256 hashes of what belongs to it: the pruned network's weights, and the files beside it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, cast, get_args

import numpy as np
import torch
from pydantic import Field, JsonValue, model_validator
from torch import Tensor, nn

from dsa_hw.channels.discovery import find_groups
from dsa_hw.channels.groups import ChannelGroups, architecture_fingerprint
from dsa_hw.channels.reference_output import ReferenceOutput, Sha256, reference_output, tolerance
from dsa_hw.channels.surgery import first_difference, shrink
from dsa_hw.errors import PlanError
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.documents import Document, Line, SealedDocument, read_document, sealed
from dsa_hw.utils.files import settle_folder, write_text
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.weights import tensors_digest
from dsa_hw.zoo.constructors import Constructor

__all__ = ["CARD", "RESULT_FILES", "Plan", "PlanDocument", "PrunedNetwork", "apply_plan", "input_types"]

CARD: Final = "README.md"
"""The model card of a result. The plan has no hash of it: its reader may add to it."""
RESULT_FILES: Final = (
    "plan.json", "model.safetensors", "model.onnx", "model.int8.onnx", "model.int8.tflite", "widths.csv",
    "rounds.csv", "history.csv",
    "cost_model.json", *(f"cost_model-{i}.json" for i in range(2, 10)), CARD,
)  # fmt: skip
"""Files of a result that belong together. `dsa_hw.pipeline.result.Allocation.save` writes them."""

_LARGEST: Final = 2**28  # values of all inputs: 1 GiB in 32 bits, a minute of video

_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Size = Annotated[int, Field(ge=1, lt=2**31)]
# RESULT_FILES beside a plan. A plan cannot name any other.
_File = Annotated[str, Field(pattern="^(" + "|".join(RESULT_FILES[1:-1]).replace(".", r"\.") + ")$")]
_Type = Literal["float", "bool", "uint8", "int8", "int16", "int32", "int64"]


class PrunedNetwork(Document):
    """The pruned network that a plan was saved with.

    Attributes:
        weights: SHA-256 of its parameters and buffers with their names, types and shapes
            (`dsa_hw.utils.weights.tensors_digest`).
        reference: Some of its outputs on a fixed input.
    """

    weights: Sha256
    reference: ReferenceOutput

    @classmethod
    def of(cls, model: nn.Module, inputs: Sequence[Any]) -> PrunedNetwork:
        """Describe a network; ``inputs`` are tensors of the shapes and types that it takes.

        Raises:
            ModelError: An output is not finite, or the weights are not plain tensors.
        """
        shapes = [tuple(x.shape) for x in inputs]
        return cls(weights=tensors_digest(model.state_dict()), reference=reference_output(model, shapes, inputs))


class PlanDocument(SealedDocument):
    """The content of ``plan.json``; `Plan` describes the fields."""

    remedy: ClassVar[str] = "Make a plan with dsa-hw allocate."

    format: Literal["dsa_hw plan 2"]
    names: tuple[Line, ...]
    sizes: tuple[_Size, ...]
    kept: tuple[tuple[_Count, ...], ...]
    shapes: dict[Line, tuple[_Count, ...]]
    inputs: tuple[tuple[_Size, ...], ...] = Field(max_length=64)
    fingerprint: Sha256
    certificate: dict[str, JsonValue] | None
    network: PrunedNetwork | None
    files: dict[_File, Sha256]
    types: tuple[_Type, ...] = Field(default=(), max_length=64)
    constructor: Constructor | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PlanDocument:
        if not len(self.names) == len(set(self.names)) == len(self.sizes) == len(self.kept):
            raise ValueError(
                f"names must be distinct, with a size and kept units for each; got {len(self.names)} names, "
                f"{len(self.sizes)} sizes and {len(self.kept)} lists of units"
            )
        for name, size, units in zip(self.names, self.sizes, self.kept, strict=True):
            if not units or units[-1] >= size or any(a >= b for a, b in itertools.pairwise(units)):
                raise ValueError(f"kept units of {name!r} must be increasing, at least one, from 0 to {size - 1}")
        if sum(math.prod(shape) for shape in self.inputs) > _LARGEST:
            raise ValueError(f"the inputs must have at most {_LARGEST} values")
        if self.types and len(self.types) != len(self.inputs):
            raise ValueError(f"there must be a type for each input; got {len(self.types)} for {len(self.inputs)}")
        if self.fingerprint != architecture_fingerprint(self.names, self.sizes, self.shapes):
            raise ValueError("the fingerprint does not follow from names, sizes and shapes")
        if self.certificate is not None and self.network is None:
            raise ValueError("a certificate needs the hash of the weights and a reference output (network)")
        return self


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
    network: PrunedNetwork | None = field(default=None, repr=False)
    """Weights and reference output of the pruned network; a plan with a certificate has it."""
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """SHA-256 of the files that were saved beside the plan, by name."""
    types: tuple[_Type, ...] = field(default=(), repr=False)
    """Types of the example inputs: "float" is that of the weights. () where all are."""
    constructor: Constructor | None = None
    """How to make the unpruned network; None where its own code is needed."""

    @classmethod
    def of(
        cls,
        groups: ChannelGroups,
        kept: Sequence[Ints | Sequence[int]],
        certificate: Mapping[str, Any] | None = None,
        network: PrunedNetwork | None = None,
    ) -> Plan:
        """Make a plan from channel groups.

        Args:
            groups: The channel groups of the unpruned network.
            kept: For each group the indices of the units to keep.
            certificate: What `dsa_hw.allocate` asked for and measured, as JSON data.
            network: Weights and reference output of the pruned network.

        Returns:
            The plan.

        Raises:
            WidthError: ``kept`` does not match ``groups``.
        """
        units = tuple(tuple(int(i) for i in u) for u in groups.check_kept(kept))
        sizes = tuple(int(n) for n in groups.sizes)
        return cls(groups.names, sizes, units, dict(groups.shapes), groups.inputs, certificate, network)

    @property
    def widths(self) -> dict[str, int]:
        """Number of kept units by name of the group."""
        return {name: len(units) for name, units in zip(self.names, self.kept, strict=True)}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the unpruned architecture, as `ChannelGroups.fingerprint`."""
        return architecture_fingerprint(self.names, self.sizes, self.shapes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file; if that fails (`PlanError`), an existing file stays as it was."""
        content = {
            "format": "dsa_hw plan 2",
            "names": self.names,
            "sizes": self.sizes,
            "kept": self.kept,
            "shapes": self.shapes,
            "inputs": self.inputs,
            "fingerprint": self.fingerprint,
            "certificate": self.certificate,
            "network": None if self.network is None else self.network.model_dump(mode="json"),
            "files": self.files,
            "types": self.types,
            "constructor": None if self.constructor is None else self.constructor.model_dump(mode="json"),
        }
        try:
            document = sealed(content)
        except (TypeError, ValueError) as error:
            raise PlanError(f"The plan cannot be written as JSON: {error}.") from error
        read_document(document, PlanDocument, "the plan", error=PlanError)  # what cannot be read is not written
        write_text(as_path(path, "path"), json.dumps(document, indent=1, allow_nan=False), PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: The file cannot be read, is not a plan, is truncated, was edited, or contradicts itself.
        """
        settle_folder(as_path(path, "plan").parent, RESULT_FILES, PlanError)
        found = read_document(path, PlanDocument, f"plan {path}", error=PlanError)
        return cls(
            names=found.names,
            sizes=found.sizes,
            kept=found.kept,
            shapes=found.shapes,
            inputs=found.inputs,
            certificate=found.certificate,
            network=found.network,
            files=found.files,
            types=found.types,
            constructor=found.constructor,
        )

    def example_inputs(self, model: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of the shapes and types of the plan: noise, and zeros where they are not floating-point."""
        parameter = next(iter(model.parameters()), torch.empty(0))
        source = torch.Generator().manual_seed(0)
        found = []
        for shape, kind in itertools.zip_longest(self.inputs, self.types, fillvalue="float"):
            assert not isinstance(shape, str)
            if kind == "float":
                found.append(torch.randn(shape, generator=source).to(parameter.device, parameter.dtype))
            else:
                found.append(torch.zeros(shape, dtype=getattr(torch, kind), device=parameter.device))
        return tuple(found)

    def check_network(self, small: nn.Module, inputs: Sequence[Any], source: str) -> float:
        """Check that a pruned network has the weights and the outputs that the plan was saved with.

        Args:
            small: The pruned network.
            inputs: Tensors of the types that it takes.
            source: Where its weights come from, for messages.

        Returns:
            The largest difference of an output from the stored one, over the largest stored one.

        Raises:
            PlanError: The plan has no record of its network, or weights or outputs differ from it.
        """
        if self.network is None:
            raise PlanError("The plan has no hash of its weights. Make a new one with dsa-hw allocate.")
        if tensors_digest(small.state_dict()) != self.network.weights:
            raise PlanError(
                f"The weights in {source} are not those of the plan: their SHA-256 differs, so the file is damaged, or "
                "the network was trained further. Restore the file, or save the network again with Allocation.save."
            )
        found = self.network.reference.difference(reference_output(small, self.inputs, inputs))
        if not found <= tolerance(small):
            how = f"its outputs differ by {found:.2g} of the largest one; at most {tolerance(small):g} is accepted"
            if math.isinf(found):
                how = "the reference output is of other inputs, or of another number of outputs"
            raise PlanError(
                f"The network computes something else than the one that the plan was saved with: {how}. Build the "
                "network with the constructor and the arguments that the plan was made for."
            )
        return found


def input_types(inputs: Sequence[Any]) -> tuple[_Type, ...]:
    """Return the types of example inputs, as a plan has them; () where all are floating-point or none has a type."""
    found = tuple("float" if x.is_floating_point() else str(x.dtype).removeprefix("torch.") for x in inputs)
    known = set(get_args(_Type))
    return cast(tuple[_Type, ...], found) if set(found) <= known and set(found) != {"float"} else ()


def apply_plan(model: nn.Module, plan: Plan | str | os.PathLike[str], example_inputs: Any = None) -> nn.Module:
    """Remove from an unpruned network the units that a plan does not keep.

    Args:
        model: The unpruned network; it is not changed.
        plan: A plan, or the path of its file.
        example_inputs: As for `find_groups`. Needed only where the network takes something other than tensors by
            position.

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
        example_inputs = plan.example_inputs(model)
    groups = find_groups(model, example_inputs)
    if groups.names != plan.names or tuple(groups.sizes.tolist()) != plan.sizes:
        here = dict(zip(groups.names, groups.sizes.tolist(), strict=True))
        there = dict(zip(plan.names, plan.sizes, strict=True))
        name = next((n for n in [*there, *here] if here.get(n) != there.get(n)), None)
        if name is None:
            raise PlanError("The plan does not match the network: its groups are in another order. Make a new plan.")
        raise PlanError(
            f"The plan does not match the network: group {name!r} has {here.get(name, 'no')} units in the network and "
            f"{there.get(name, 'no')} in the plan. Build the network as it was, or use the versions of dsa_hw and "
            "torch that the plan was made with."
        )
    return shrink(model, groups, [np.asarray(units) for units in plan.kept])
