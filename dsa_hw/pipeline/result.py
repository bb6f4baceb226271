"""The result of an allocation: network, plan, certificate, and how it came about."""

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
from dsa_hw.pipeline.constraints import Line

__all__ = ["Allocation", "write_onnx"]


@dataclass(frozen=True, eq=False)
class Allocation:
    """A smaller network that keeps its budgets, with proof.

    ``model`` is an ordinary module; ``plan`` rebuilds it from the plain constructor; ``widths`` and ``keep_ratios`` are
    by channel group. ``history`` has a row per step of the method, ``rounds`` one per network measured and budget.
    """

    model: nn.Module
    plan: Plan
    certificate: Certificate
    widths: pd.Series[int]
    keep_ratios: pd.Series[float]
    history: pd.DataFrame
    rounds: pd.DataFrame
    inputs: tuple[Any, ...]
    lines: tuple[Line, ...] = field(default=(), repr=False)
    proposal: Proposal | None = field(default=None, repr=False)

    def export(self, path: str | Path) -> Path:
        """Write the network as ONNX: evaluation mode, one file, with the shape of the example inputs."""
        return write_onnx(self.model, self.inputs, path)

    def save(self, folder: str | Path) -> Path:
        """Write plan.json (with the certificate), model.pt (weights), widths.csv, rounds.csv and history.csv."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / "model.pt")
            pd.DataFrame({"width": self.widths, "keep_ratio": self.keep_ratios}).to_csv(folder / "widths.csv")
            self.rounds.to_csv(folder / "rounds.csv", index=False)
            self.history.to_csv(folder / "history.csv", index=False)
        except OSError as error:
            raise DsaError(f"the result cannot be written to {folder}: {error}") from error
        self.plan.save(folder / "plan.json")
        return folder

    def __repr__(self) -> str:
        """What to paste into an issue: network, budgets with proof, the widths, the versions."""
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
    """``model`` as one ONNX file at ``path``, whole or not at all."""
    from profilers.networks.onnx_export import export

    path = Path(path)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    content = export(model, tuple(x.to(device) for x in inputs)).SerializeToString()
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise DsaError(f"cannot write {path}: {error}") from error
    return path
