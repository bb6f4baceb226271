"""Fitted cost models: prediction, gradient, calibrated bounds, files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike

from budgets.conformal import Calibration
from budgets.features import FeatureMap
from budgets.model_document import CostModelDocument
from budgets.plots import plot_cost_model
from budgets.provenance import Provenance
from budgets.regression import CostRegressor
from budgets.residual_shape import ResidualShape
from budgets.serialization import decode, encode, encode_frame, plain_data, to_json
from budgets.work_classes import Groups
from dsa_hw.errors import ProfileError, WidthError
from dsa_hw.profiles import QUANTITIES
from dsa_hw.units import format_magnitude
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.documents import read_document, sealed
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import first_line, percent

__all__ = ["CostModel", "Provenance", "load_cost_model"]


@dataclass(frozen=True, eq=False)
class CostModel:
    """Cost of a network on a target as a function of the keep ratios.

    ``budgets.fit`` makes it and has an example.

    All costs are in ``provenance.unit``. K is the number of channel groups.

    Attributes:
        name: The candidate that was chosen.
        estimator: The fitted estimator.
        calibration: What the bounds are computed from.
        names: The channel groups.
        sizes: The dense width of each group, (K,).
        provenance: Where the model comes from.
        report: A row of cross-validated errors for each candidate.
        why: Why this candidate was chosen.
        fitted: Measured and cross-validated costs of the configurations, for plots and audits.
        flops_shares: Share of each group in the FLOPs; None where the network is not known.
    """

    name: str
    estimator: CostRegressor
    calibration: Calibration
    names: tuple[str, ...]
    sizes: Ints
    provenance: Provenance
    report: pd.DataFrame = field(repr=False)
    why: str = ""
    fitted: pd.DataFrame | None = field(default=None, repr=False)
    flops_shares: Mapping[str, float] | None = field(default=None, repr=False)

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return the cost at keep ratios (..., K), shape (...)."""
        x, rows = self._points(alpha)
        return self.estimator.at(rows).reshape(x.shape[:-1])

    def value(self, alpha: torch.Tensor, confidence: float | None = None) -> torch.Tensor:
        """Return the differentiable cost at keep ratios (..., K), shape (...).

        With ``confidence``, return its upper bound.
        """
        return self.estimator.value(alpha) if confidence is None else self.calibration.upper_value(alpha, confidence)

    def gradient(self, alpha: ArrayLike, confidence: float | None = None) -> Floats:
        """Return the gradient of `value` at keep ratios (..., K), shape (..., K)."""
        x, rows = self._points(alpha)
        slope = self.estimator.slope(rows) if confidence is None else self.calibration.upper_gradient(rows, confidence)
        return slope.reshape(x.shape)

    def upper(self, alpha: ArrayLike, confidence: float = 0.9) -> Floats:
        """Return the upper bound at keep ratios (..., K), shape (...).

        The cost does not exceed it with ``confidence``; see ``budgets.conformal``.
        """
        x, rows = self._points(alpha)
        return self.calibration.upper(rows, confidence)[0].reshape(x.shape[:-1])

    def lower(self, alpha: ArrayLike, confidence: float = 0.9) -> Floats:
        """Return the lower bound at keep ratios (..., K), shape (...)."""
        x, rows = self._points(alpha)
        return self.calibration.lower(rows, confidence)[0].reshape(x.shape[:-1])

    def _points(self, alpha: ArrayLike) -> tuple[Floats, Floats]:
        x = np.asarray(alpha, np.float64)
        if x.ndim == 0 or x.shape[-1] != len(self.names):
            raise WidthError(
                f"The last axis of `alpha` must be the {len(self.names)} channel groups; got shape {x.shape}."
            )
        if not np.isfinite(x).all():
            raise WidthError("Keep ratios must be finite; got NaN or infinity.")
        return x, x.reshape(-1, len(self.names))

    def predict(self, configurations: pd.DataFrame) -> pd.Series[float]:
        """Return the cost of configurations, a column of widths per channel group.

        Raises:
            WidthError: A channel group is missing, or a width is not between 1 and the group's size.
        """
        missing = [name for name in self.names if name not in configurations.columns]
        if missing:
            raise WidthError(
                f"The table has no widths for {len(missing)} of {len(self.names)} channel groups: "
                f"{', '.join(missing[:5])}."
            )
        widths = configurations[list(self.names)].to_numpy(np.float64)
        if not np.isfinite(widths).all() or (widths < 1).any() or (widths > self.sizes).any():
            raise WidthError(
                "Widths must lie between 1 and the size of their channel group. For keep ratios call the model itself."
            )
        costs = self.estimator.at(widths / self.sizes)
        return pd.Series(costs, index=configurations.index, name=self.provenance.quantity)

    @property
    def dense(self) -> float:
        """Predicted cost of the dense network."""
        return float(self(np.ones(len(self.names))))

    def shares(self, alpha: ArrayLike | None = None) -> pd.Series[float]:
        """Return the share of each channel group in the cost at ``alpha`` (K,).

        The default is the dense network.

        The share is alpha_k dF/dalpha_k, divided by its sum over the groups.
        """
        point = np.ones(len(self.names)) if alpha is None else np.asarray(alpha, np.float64)
        effect = np.maximum(self.gradient(point) * point, 0.0)
        total = effect.sum()
        return pd.Series(effect / total if total > 0 else effect, index=list(self.names), name=self.provenance.quantity)

    def half_width(self, confidence: float = 0.9) -> float:
        """Return the relative distance of the upper bound from the prediction.

        It is the median over the fitted configurations.
        """
        if self.fitted is None:
            points = np.ones((1, len(self.names)))
        else:
            points = self.fitted[list(self.names)].to_numpy(np.float64) / self.sizes
        return float(np.median(self.upper(points, confidence) / self(points) - 1))

    def save(self, path: str | Path) -> Path:
        """Write the model as JSON, which `load_cost_model` reads."""
        maps: list[FeatureMap] = []
        state = {
            "format": "dsa_hw cost model 3",
            "name": self.name,
            "why": self.why,
            "groups": {name: int(size) for name, size in zip(self.names, self.sizes, strict=True)},
            "provenance": asdict(self.provenance),
            "report": encode_frame(self.report.reset_index()),
            "coefficients": self.estimator.coefficients() if hasattr(self.estimator, "coefficients") else None,
            "estimator": encode(self.estimator, maps),
            "calibration": {
                "method": self.calibration.method,
                "scores": self.calibration.scores.tolist(),
                "owner": self.calibration.owner.tolist(),
                "shape": _encode_shape(self.calibration.shape),
                # With split calibration the only model is the estimator itself.
                "models": []
                if self.calibration.models == (self.estimator,)
                else [encode(fold, maps) for fold in self.calibration.models],
            },
            "fitted": None if self.fitted is None else encode_frame(self.fitted),
            "flops_shares": None if self.flops_shares is None else dict(self.flops_shares),
        }
        state["features"] = [phi.to_dict() for phi in maps]
        write_text(path, to_json(sealed(plain_data(state))), ProfileError)
        return Path(path)

    def plot(self, path: str | Path, confidence: float = 0.9) -> Path:
        """Draw the model to ``path`` (.png, .svg, .pdf)."""
        return plot_cost_model(self, path, confidence)

    def __repr__(self) -> str:
        """Describe what is predicted, where, and how well."""
        p = self.provenance
        errors = ", ".join(f"{key.replace('_', ' ')} {percent(value)}" for key, value in p.errors.items())
        dense = format_magnitude(self.dense, QUANTITIES[p.quantity].dimension)
        lines = [
            f"{p.quantity} of {len(self.names)} channel groups on {p.target}: {self.name}, dense {dense}",
            f"  fitted to {p.configurations} configurations, {p.holdout} held out; {errors}",
            f"  bound: {self.calibration.method}; chosen: {self.why}",
        ]
        lines += [f"  note: {note}" for note in p.notes]
        return "\n".join(lines)


def load_cost_model(
    path: str | Path,
    groups: Groups | None = None,
    *,
    target: str | None = None,
    environment: Mapping[str, Any] | None = None,
    force: bool = False,
) -> CostModel:
    """Read a cost model, and refuse one of another network, target or environment.

    Args:
        path: A file that `CostModel.save` wrote.
        groups: Channel groups of the network that it will be used on.
        target: Title of the target that it will be used on.
        environment: What must be equal on the target, e.g. ``{"onnxruntime": "1.31.1"}``; only keys given here are
            compared.
        force: Accept differences; they become notes of the model.

    Returns:
        The model.

    Raises:
        ProfileError: The file cannot be read, is not a cost model, or is one of another network, target or environment.

    Example:
        >>> import tempfile, budgets, pandas as pd, torch, dsa_hw
        >>> from budgets.regression import PhysicsNNLS
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.Conv2d(8, 4, 1))
        >>> groups = dsa_hw.find_groups(net, (torch.zeros(1, 3, 8, 8),))
        >>> table = pd.DataFrame({groups.names[0]: range(1, 9)})
        >>> table["seconds"] = 1e-3 + 1e-4 * table[groups.names[0]]
        >>> model = budgets.fit(table, groups, target="my board", candidates={"physics": PhysicsNNLS()})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = model.save(f"{folder}/latency.json")
        ...     again = budgets.load_cost_model(path, groups, target="my board")
        >>> round(again.dense, 6)
        0.0018
    """
    document = read_document(path, CostModelDocument, f"the cost model {path}", error=ProfileError)
    try:
        model = _decode_model(document)
        _try_out(model)
    except Exception as error:  # a file with a correct checksum can have any numbers
        if isinstance(error, ProfileError):
            raise
        reason = f"its parts do not match ({type(error).__name__}: {first_line(error)})"
        raise ProfileError(f"Cannot use the cost model {path}: {reason}. {document.remedy}") from error
    differences = _differences(model, groups, target, environment)
    if differences and not force:
        raise ProfileError(
            f"{path} does not apply here: {'; '.join(differences)}. Profile and fit here, or accept the difference "
            "with force=True (--force)."
        )
    if differences:
        notes = (*model.provenance.notes, *(f"forced in spite of: {difference}" for difference in differences))
        model = replace(model, provenance=replace(model.provenance, notes=notes))
    return model


def _decode_model(document: CostModelDocument) -> CostModel:
    maps = [FeatureMap.from_dict(phi.model_dump()) for phi in document.features]
    estimator = decode(document.estimator.model_dump(), maps)
    bound = document.calibration
    models = tuple(decode(fold.model_dump(), maps) for fold in bound.models) or (estimator,)
    provenance = document.provenance
    if QUANTITIES[provenance.quantity].unit != provenance.unit:
        raise ProfileError(f"A cost model has {provenance.quantity} in {provenance.unit!r}. {document.remedy}")
    return CostModel(
        name=document.name,
        estimator=estimator,
        calibration=Calibration(
            bound.method,
            np.array(bound.scores),
            models,
            np.array(bound.owner, np.intp),
            None if bound.shape is None else _decode_shape(bound.shape.model_dump(), len(models)),
        ),
        names=tuple(document.groups),
        sizes=np.array(list(document.groups.values()), np.int64),
        provenance=provenance,
        report=pd.DataFrame(document.report).set_index("candidate"),
        why=document.why,
        fitted=None if document.fitted is None else pd.DataFrame(document.fitted),
        flops_shares=document.flops_shares,
    )


def _try_out(model: CostModel) -> None:
    """Evaluate a model that was read, in every way in which it will be used; raises where its parts do not match."""
    estimator, bound = model.estimator, model.calibration
    middle = (estimator.low_ + estimator.high_) / 2
    confidence = len(bound.scores) / (len(bound.scores) + 1)
    costs: list[Any] = [model(middle), model.upper(middle, confidence)]
    costs += [model.value(torch.from_numpy(middle)), model.value(torch.from_numpy(middle), confidence)]
    slopes = [model.gradient(middle), model.gradient(middle, confidence)]
    if estimator.outside != "refuse":
        costs.append(model(np.ones(len(model.names))))
    found = np.array([float(cost) for cost in costs])
    steep = np.array([slope.reshape(len(model.names)) for slope in slopes])
    if not (np.isfinite(found) & (found > 0)).all() or not np.isfinite(steep).all():
        raise ProfileError("A cost model must have a finite gradient and a positive cost. Make it with dsa-hw fit.")


def _encode_shape(shape: ResidualShape | None) -> dict[str, list[float]] | None:
    if shape is None:
        return None
    return {name: getattr(shape, name).tolist() for name in ("logs", "residuals", "owner")}


def _decode_shape(state: Mapping[str, Any], models: int) -> ResidualShape:
    return ResidualShape(
        np.array(state["logs"]), np.array(state["residuals"]), np.array(state["owner"], np.intp), models
    )


def _differences(
    model: CostModel, groups: Groups | None, target: str | None, environment: Mapping[str, Any] | None
) -> list[str]:
    found, p = [], model.provenance
    if groups is not None:
        sizes = np.asarray(groups.sizes).tolist()
        if tuple(groups.names) != model.names:
            only = [name for name in model.names if name not in set(groups.names)]
            found.append(
                f"network: the file has {len(model.names)} channel groups, this network {len(groups.names)}"
                + (f" (without {only[0]!r})" if only else "")
            )
        elif sizes != model.sizes.tolist():
            k = next(i for i, (a, b) in enumerate(zip(sizes, model.sizes.tolist(), strict=True)) if a != b)
            found.append(
                f"network: channel group {model.names[k]!r} has {model.sizes[k]} channels in the file and {sizes[k]} "
                "here"
            )
        elif p.fingerprint is not None and p.fingerprint != groups.fingerprint:
            found.append(f"network: fingerprint {p.fingerprint[:12]} in the file, {groups.fingerprint[:12]} here")
    if target is not None and target != p.target:
        found.append(f"target: {p.target!r} in the file, {target!r} here")
    for key, value in (environment or {}).items():
        known = p.environment.get(key)
        if json.loads(json.dumps(value)) != known:
            found.append(f"{key}: {known!r} in the file, {value!r} here")
    return found
