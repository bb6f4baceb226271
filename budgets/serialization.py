"""Cost models as readable JSON: no pickles, and nothing private of scikit-learn.

An estimator is its class name, its constructor arguments and the attributes it learnt; arrays are nested lists (a
Python float survives JSON bit for bit), and feature maps, which several models share, are stored once and referred to
by number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from budgets import regression
from budgets.blocks import Blocks
from budgets.conformal import Calibration
from budgets.cost_model import CostModel, Provenance
from budgets.features import FeatureMap, Groups
from budgets.regression import CostRegressor
from dsa_hw.errors import ProfileError

__all__ = ["load", "save"]

FORMAT: Final = "dsa_hw cost model 1"


def save(model: CostModel, path: str | Path) -> Path:
    """Write ``model`` to ``path``; the file appears complete or not at all."""
    maps: list[FeatureMap] = []
    state = {
        "format": FORMAT,
        "name": model.name,
        "why": model.why,
        "factor": model.factor,
        "groups": {name: int(size) for name, size in zip(model.names, model.sizes, strict=True)},
        "provenance": asdict(model.provenance),
        "report": _frame(model.report.reset_index()),
        "coefficients": model.estimator.coefficients() if hasattr(model.estimator, "coefficients") else None,
        "estimator": _encode(model.estimator, maps),
        "calibration": {
            "method": model.calibration.method,
            "ratios": model.calibration.ratios.tolist(),
            "owner": model.calibration.owner.tolist(),
            # With split calibration the only model is the estimator itself.
            "models": []
            if model.calibration.models == (model.estimator,)
            else [_encode(fold, maps) for fold in model.calibration.models],
        },
        "fitted": None if model.fitted is None else _frame(model.fitted),
        "flops_shares": None if model.flops_shares is None else dict(model.flops_shares),
    }
    state["features"] = [phi.to_dict() for phi in maps]
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(_pretty(state) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ProfileError(f"cannot write the cost model to {path}: {error.strerror}; choose another place") from error
    return path


def load(
    path: str | Path,
    groups: Groups | None = None,
    *,
    target: str | None = None,
    environment: Mapping[str, Any] | None = None,
    force: bool = False,
) -> CostModel:
    """Read a cost model, and refuse it where it does not belong.

    Args:
        path: a file that ``save`` wrote.
        groups: channel groups of the network that it will be used on; another network is refused.
        target: the target that it will be used on; another one is refused.
        environment: what must be equal on the target, for example ``{"runtime": "onnxruntime 1.31.1"}``; every key
            given here is compared with the file's.
        force: use it in spite of differences; they become notes of the model.
    """
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read the cost model {path}: {error.strerror}; make it with dsa-hw fit") from error
    except ValueError as error:
        raise ProfileError(f"{path} is not a cost model: {error}; make it again with dsa-hw fit") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ProfileError(
            f"{path} is not a cost model of this version (format {found!r}, expected {FORMAT!r}); make it again with "
            "dsa-hw fit"
        )
    try:
        model = _decode_model(state)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ProfileError(
            f"{path} is damaged ({type(error).__name__}: {error}); make it again with dsa-hw fit"
        ) from error
    differences = _differences(model, groups, target, environment)
    if differences and not force:
        raise ProfileError(
            f"{path} belongs elsewhere: {'; '.join(differences)}. Profile and fit here, or use force=True (--force) to "
            "accept the difference"
        )
    if differences:
        provenance = model.provenance
        notes = (*provenance.notes, *(f"forced in spite of: {difference}" for difference in differences))
        model = CostModel(**{**_fields(model), "provenance": Provenance(**{**asdict(provenance), "notes": notes})})
    return model


def _decode_model(state: Mapping[str, Any]) -> CostModel:
    maps = [FeatureMap.from_dict(phi) for phi in state["features"]]
    estimator = _decode(state["estimator"], maps)
    bound = state["calibration"]
    models = tuple(_decode(fold, maps) for fold in bound["models"]) or (estimator,)
    provenance = dict(state["provenance"])
    provenance["notes"] = tuple(provenance["notes"])
    return CostModel(
        name=state["name"],
        estimator=estimator,
        calibration=Calibration(bound["method"], np.array(bound["ratios"]), models, np.array(bound["owner"], np.intp)),
        names=tuple(state["groups"]),
        sizes=np.array(list(state["groups"].values()), np.int64),
        provenance=Provenance(**provenance),
        report=pd.DataFrame(state["report"]).set_index("candidate"),
        why=state["why"],
        factor=float(state["factor"]),
        fitted=None if state["fitted"] is None else pd.DataFrame(state["fitted"]),
        flops_shares=state["flops_shares"],
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


def _encode(value: Any, maps: list[FeatureMap]) -> Any:
    if isinstance(value, FeatureMap):
        for number, known in enumerate(maps):
            if known is value or known.same(value):
                return {"features": number}
        maps.append(value)
        return {"features": len(maps) - 1}
    if isinstance(value, Blocks):
        return {"block": value.block, "sizes": list(value.sizes)}
    if isinstance(value, CostRegressor):
        learnt = ("n_features_in_", "low_", "high_", *value._learnt)
        return {
            "estimator": type(value).__name__,
            "parameters": {name: _encode(item, maps) for name, item in value.get_params(deep=False).items()},
            "learnt": {name: _encode(getattr(value, name), maps) for name in learnt},
        }
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": "int" if value.dtype.kind in "iu" else "float"}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _decode(state: Any, maps: list[FeatureMap]) -> Any:
    if not isinstance(state, dict):
        return state
    if "features" in state:
        return maps[state["features"]]
    if "block" in state:
        return Blocks(int(state["block"]), tuple(state["sizes"]))
    if "array" in state:
        return np.array(state["array"], np.intp if state["dtype"] == "int" else np.float64)
    name = state["estimator"]
    if name not in regression.__all__:
        raise ProfileError(
            f"the file needs an estimator {name!r} that this version does not have; it has "
            f"{', '.join(regression.__all__)}"
        )
    parameters = {key: _decode(item, maps) for key, item in state["parameters"].items()}
    model: CostRegressor = getattr(regression, name)(**parameters)
    for key, item in state["learnt"].items():
        setattr(model, key, _decode(item, maps))
    model._restore()
    return model


def _fields(model: CostModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


def _frame(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return {str(name): frame[name].tolist() for name in frame.columns}


def _pretty(state: Mapping[str, Any]) -> str:
    """Indented for people at the top, one line for each array or term below."""
    lines = []
    for key, value in state.items():
        if key in ("features", "estimator", "calibration", "fitted"):
            text = json.dumps(value, allow_nan=False, default=_plain)
        else:
            text = json.dumps(value, indent=2, allow_nan=False, default=_plain).replace("\n", "\n  ")
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
