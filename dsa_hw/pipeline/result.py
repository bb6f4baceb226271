"""The result of an allocation: network, plan, certificate, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from dsa_hw.channels.plan import Plan
from dsa_hw.errors import DsaError
from dsa_hw.methods.problem import Proposal
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.constraints import Constraint
from dsa_hw.utils.files import whole_file
from dsa_hw.utils.modules import device_of
from profilers.networks.onnx_export import export

__all__ = ["Allocation", "write_onnx"]


@dataclass(frozen=True, eq=False)
class Allocation:
    """A smaller network within its budgets, with its certificate.

    Attributes:
        model: An ordinary module.
        plan: Rebuilds the network from the plain constructor; holds the certificate.
        certificate: What was asked, predicted and measured.
        widths: Channels that each group keeps.
        keep_ratios: The same as shares.
        history: A row for each step of the method.
        rounds: A row for each measured network and budget.
        inputs: The example inputs.
        constraints: The budgets made concrete, with their cost models.
        proposal: What the method proposed; can be reused as ``allocate(..., method=result.proposal)``.
    """

    model: nn.Module
    plan: Plan
    certificate: Certificate
    widths: pd.Series[int]
    keep_ratios: pd.Series[float]
    history: pd.DataFrame
    rounds: pd.DataFrame
    inputs: tuple[Any, ...]
    constraints: tuple[Constraint, ...] = field(default=(), repr=False)
    proposal: Proposal | None = field(default=None, repr=False)

    def export(self, path: str | Path) -> Path:
        """Write the network as one ONNX file, in evaluation mode, with the shapes of the example inputs."""
        return write_onnx(self.model, self.inputs, path)

    def save(self, folder: str | Path) -> Path:
        """Write plan.json (with the certificate), model.pt (weights), widths.csv, rounds.csv and history.csv.

        Each file is replaced whole or not at all; plan.json is written last.

        Raises:
            DsaError: The folder cannot be made or a file cannot be written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DsaError(f"Cannot make the folder {folder}: {error.strerror}.") from error
        with whole_file(folder / "model.pt") as file:
            torch.save(self.model.state_dict(), file)
        tables = {
            "widths.csv": pd.DataFrame({"width": self.widths, "keep_ratio": self.keep_ratios}),
            "rounds.csv": self.rounds,
            "history.csv": self.history,
        }
        for name, table in tables.items():
            with whole_file(folder / name) as file:
                table.to_csv(file, index=name == "widths.csv")
        self.plan.save(folder / "plan.json")
        return folder

    def __repr__(self) -> str:
        """Return what to paste into an issue: network, budgets, widths and versions."""
        sizes = dict(zip(self.plan.names, self.plan.sizes, strict=True))
        kept, total = int(self.widths.sum()), sum(sizes.values())
        shown = [f"{name} {width}/{sizes[str(name)]}" for name, width in list(self.widths.items())[:24]]
        more = f" and {len(sizes) - 24} more" if len(sizes) > 24 else ""
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.plan.inputs)
        c = self.certificate
        lines = [
            f"Allocation of {type(self.model).__name__} on {shapes}: {c.verdict}",
            *(f"  {line}" for line in str(c).splitlines()),
            f"  {c.measurements} network(s) measured, {c.date}",
            f"  {kept} of {total} channels kept in {len(sizes)} groups: {', '.join(shown)}{more}",
            "  " + ", ".join(f"{name} {version}" for name, version in c.versions.items()),
        ]
        return "\n".join(lines)


def write_onnx(model: nn.Module, inputs: tuple[Any, ...], path: str | Path) -> Path:
    """Write ``model`` as one ONNX file, whole or not at all.

    Args:
        model: The network.
        inputs: Example inputs.
        path: The file.

    Returns:
        The path.

    Raises:
        ModelError: The network cannot be exported.
        DsaError: The file cannot be written.
    """
    path, device = Path(path), device_of(model)
    content = export(model, tuple(x.to(device) for x in inputs)).SerializeToString()
    with whole_file(path) as file:
        file.write_bytes(content)
    return path
