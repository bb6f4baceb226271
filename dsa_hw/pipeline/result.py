"""The result of an allocation: network, plan, certificate, and how it was found."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pandas as pd
import torch
from torch import nn

from dsa_hw.channels.plan import CARD, RESULT_FILES, Plan, PrunedNetwork
from dsa_hw.channels.trace import copy_sharing_tensors
from dsa_hw.errors import ModelError, PlanError
from dsa_hw.methods.problem import Proposal
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.constraints import Constraint
from dsa_hw.pipeline.model_card import is_replaceable, model_card
from dsa_hw.pipeline.quality import Metric, Quality, Source, measure_quality, unknown_quality
from dsa_hw.pipeline.quantised import calibration_inputs, certified_quality, int8_meters, quantise_all
from dsa_hw.training.fingerprints import check_loader
from dsa_hw.training.losses import OwnLoss, Step
from dsa_hw.utils.files import whole_folder, write_bytes, write_text
from dsa_hw.utils.inputs import as_path, check_model
from dsa_hw.utils.modules import check_finite_weights, device_of
from dsa_hw.utils.text import first_line, one_line
from dsa_hw.utils.weights import weights_bytes
from dsa_hw.zoo.pretrained import hub_upload
from profilers.networks.onnx_export import export
from profilers.networks.quantised import QuantisedNetwork

__all__ = [
    "INT8_ONNX",
    "INT8_TFLITE",
    "ONNX",
    "WEIGHTS",
    "Allocation",
    "archive_bytes",
    "check_files",
    "file_digest",
    "onnx_bytes",
    "write_onnx",
]

WEIGHTS: Final = "model.safetensors"
"""The weights of the pruned network, beside its plan."""
ONNX: Final = "model.onnx"
"""The pruned network as ONNX, beside its plan."""
INT8_ONNX: Final = "model.int8.onnx"
"""The pruned network in int8 as ONNX, beside its plan."""
INT8_TFLITE: Final = "model.int8.tflite"
"""The pruned network in int8 as a LiteRT file, beside its plan, where the budget is on LiteRT."""
_COST_MODELS: Final = tuple(name for name in RESULT_FILES if name.startswith("cost_model"))


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
        recovery: What was done to the weights that remain.
        quantised: The quantised network for each target in int8, by title; it runs in the runtime of the target.
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
    recovery: str = ""
    quantised: Mapping[str, QuantisedNetwork] = field(default_factory=dict, repr=False)

    @property
    def quality(self) -> Quality:
        """What is left of the metric, or of the agreement with the dense network."""
        return self.certificate.quality

    def assess(
        self,
        dense: nn.Module,
        data: Iterable[Any],
        *,
        metric: Metric | None = None,
        step: Step | None = None,
        max_drop: float | None = None,
        source: Source = "validation data",
        confidence: float | None = None,
        calibration: Iterable[Any] | None = None,
    ) -> Allocation:
        """Return the result with its quality measured again, for example after fine-tuning.

        Where a budget is on a target in int8, the network is calibrated and quantised again.

        Args:
            dense: The dense network.
            data: Loader of (inputs, targets).
            metric: ``metric(outputs, targets)``, a score for each input or one for the batch; None is the accuracy.
            step: ``step(model, batch)``, whose negative loss is the metric where none is given.
            max_drop: The largest drop of the metric, which becomes a part of the verdict.
            source: What the data are.
            confidence: Of the intervals; None is that of the present quality.
            calibration: Inputs to calibrate int8 on, e.g. the training loader; None is ``data``.

        Returns:
            The same network with a certificate and a plan for the weights that it has now.
        """
        check_model(dense)
        check_loader(dense, data, "data", None if step is None else OwnLoss(step), labelled=False)

        def compare(network: nn.Module) -> Quality:
            return measure_quality(
                dense, network, data, source=source, metric=metric, step=step, max_drop=max_drop,
                confidence=self.quality.confidence if confidence is None else confidence,
            )  # fmt: skip

        meters, networks, int8 = int8_meters(c.meter for c in self.constraints), self.quantised, self.certificate.int8
        if meters:
            given: tuple[Source, Iterable[Any]] = (
                (source, data) if calibration is None else ("training data", calibration)
            )
            found = calibration_inputs(dense, self.inputs, [given], 0)
            networks, int8 = quantise_all(dense, self.model, self.inputs, meters, found, compare, earlier=int8)
        certificate = replace(self.certificate, quality=certified_quality(int8) or compare(self.model), int8=int8)
        network = PrunedNetwork.of(self.model, self.inputs)
        plan = replace(self.plan, certificate=certificate.to_dict(), network=network, files={})
        return replace(self, certificate=certificate, plan=plan, quantised=networks)

    def export(self, path: str | Path, precision: str = "fp32") -> Path:
        """Write the network as one ONNX file, in evaluation mode, with the shapes of the example inputs.

        In int8 it is a LiteRT file where that is the runtime of the target.

        Args:
            path: The file.
            precision: "fp32", or "int8" for the quantised network of the first target in int8.

        Raises:
            PlanError: No budget was on a target in int8.
        """
        if precision == "fp32":
            return write_onnx(self.model, self.inputs, path)
        if precision != "int8" or not self.quantised:
            raise PlanError(
                f"`precision` must be fp32, or int8 where a budget is on a target in int8; got {precision!r}."
            )
        path = as_path(path, "path")
        write_bytes(path, next(iter(self.quantised.values())).content)
        return path

    def save(self, folder: str | Path, *, onnx: bool = False) -> Path:
        """Write the result to a folder: all of its files, or none.

        They are plan.json (with the certificate), model.safetensors (weights), README.md (a model card), widths.csv,
        rounds.csv, history.csv, the cost model of each measured budget (cost_model.json), the network in int8 where a
        budget is on a target in int8 (model.int8.onnx, or .tflite) and, if ``onnx``, model.onnx. `dsa_hw.load` reads
        the folder. The plan has the SHA-256 of all others but the card, and of the network as it is now. A README.md
        that is not a card, or a card that was edited, stays as it is. Save a network that was trained further again,
        after `assess`: the quality of other weights is not saved.

        Args:
            folder: The folder; it is made where it does not exist. Other files in it stay as they are.
            onnx: Whether to write the network as ONNX too.

        Returns:
            The folder.

        Raises:
            DsaError: The folder or a file cannot be written; an earlier result stays as it was.
            ModelError: A weight or an output is NaN or infinite, or the network cannot be exported.
        """
        folder = as_path(folder, "folder")
        check_finite_weights(self.model, "the pruned network")
        plan = self.current_plan()
        own_card = is_replaceable(folder / CARD)
        with whole_folder(folder, RESULT_FILES if own_card else RESULT_FILES[:-1]) as staging:
            write_bytes(staging / WEIGHTS, weights_bytes(self.model.state_dict()))
            tables = {
                "widths.csv": pd.DataFrame({"width": self.widths, "keep_ratio": self.keep_ratios}),
                "rounds.csv": self.rounds,
                "history.csv": self.history,
            }
            for name, table in tables.items():
                write_text(staging / name, table.to_csv(index=name == "widths.csv"))
            models = {id(c.model): c.model for c in self.constraints if c.model is not None}
            for name, model in zip(_COST_MODELS, models.values(), strict=False):
                model.save(staging / name)
            if onnx:
                write_onnx(self.model, self.inputs, staging / ONNX)
            if self.quantised:
                name = INT8_TFLITE if next(iter(self.quantised)).startswith("litert/") else INT8_ONNX
                self.export(staging / name, "int8")
            files = {path.name: file_digest(path) for path in sorted(staging.iterdir())}
            replace(plan, files=files).save(staging / "plan.json")
            if own_card:
                known = Certificate.from_dict(plan.certificate)
                card = model_card(type(self.model).__name__, plan, known, self.recovery, list(files))
                write_text(staging / CARD, card)
        return folder

    def push_to_hub(self, repository: str, *, private: bool | None = None, onnx: bool = False) -> str:
        """Save the result to a repository of the Hugging Face hub; `dsa_hw.from_hub` loads it.

        Args:
            repository: ``org/name``; it is made where it does not exist.
            private: Whether a new repository is private; None follows the account. You log in with huggingface_hub:
                ``hf auth login``, or ``HF_TOKEN``.
            onnx: Whether to write the network as ONNX too.

        Returns:
            The address of the commit.

        Raises:
            MissingDependencyError: huggingface_hub is not installed.
            ModelError: The hub refuses, or there is no network.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save(folder, onnx=onnx)
            return hub_upload(Path(folder), repository, RESULT_FILES, private)

    def current_plan(self) -> Plan:
        """Return the plan with the hash of the weights as they are now, and their reference output.

        Where the weights have changed, the quality in its certificate is unknown.
        """
        network, known = PrunedNetwork.of(self.model, self.inputs), self.quality
        certificate = self.certificate
        if self.plan.network is not None and network.weights != self.plan.network.weights:
            reason = "the weights have changed since it was measured; Allocation.assess measures it again"
            unknown = unknown_quality(reason, known.source, max_drop=known.max_drop, confidence=known.confidence)
            int8 = tuple(
                replace(c, variants=tuple(replace(v, quality=None) for v in c.variants)) for c in certificate.int8
            )
            certificate = replace(certificate, quality=unknown, int8=int8)
        return replace(self.plan, certificate=certificate.to_dict(), network=network, files={})

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
            *([f"  {self.recovery}"] if self.recovery else []),
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
    path = as_path(path, "path")
    write_bytes(path, onnx_bytes(model, inputs))
    return path


def onnx_bytes(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    """Return ``model`` as the bytes of one ONNX file."""
    device = device_of(model)
    return bytes(export(model, tuple(x.to(device) for x in inputs)).SerializeToString())


def archive_bytes(model: nn.Module, inputs: tuple[Any, ...]) -> bytes:
    """Return ``model`` in evaluation mode as an archive of ``torch.export``, which ``torch.export.load`` reads.

    Raises:
        ModelError: torch cannot export the network.
    """
    device, file = device_of(model), io.BytesIO()
    try:
        program = torch.export.export(copy_sharing_tensors(model).eval(), tuple(x.to(device) for x in inputs))
        torch.export.save(program, file)
    except Exception as error:  # torch.export raises a dozen classes
        raise ModelError(f"torch.export cannot export the network ({first_line(error)}). Use --format onnx.") from error
    return file.getvalue()


def check_files(plan: Plan, folder: Path) -> None:
    """Compare the files beside a plan with the hashes in it; what is not there is not compared.

    A plan names only files that `Allocation.save` writes, in its own folder.

    Raises:
        PlanError: A file was changed after the plan was saved, or cannot be read.
    """
    for name, wanted in plan.files.items():
        path = folder / name
        if path.exists() and file_digest(path) != wanted:
            raise PlanError(
                f"{path} is not the file that the plan was saved with: its SHA-256 differs, so it is damaged or of "
                "another result. Restore it, or run dsa-hw allocate again."
            )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a regular file.

    Raises:
        PlanError: It cannot be read.
    """
    try:
        # Not blocking: opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PlanError(f"Cannot read {path}: it is not a regular file.")
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PlanError(f"Cannot read {path}: {one_line(error.strerror or error)}.") from error
