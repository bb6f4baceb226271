"""Estimators as JSON, without pickles.

An estimator is its class name, its constructor arguments and the attributes that it learnt. Arrays are nested lists (a
Python float survives JSON bit for bit). Feature maps, which several models share, are stored once and referred to by
number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from budgets import regression
from budgets.blocks import Blocks
from budgets.features import FeatureMap
from budgets.regression import CostRegressor
from budgets.regression.base import OUTSIDE
from dsa_hw.errors import ProfileError

__all__ = ["decode", "encode", "encode_frame", "plain_data", "to_json"]


def encode(value: Any, maps: list[FeatureMap]) -> Any:
    """Return ``value`` as plain data.

    Its feature maps are appended to ``maps`` and replaced by their numbers.
    """
    if isinstance(value, FeatureMap):
        for number, known in enumerate(maps):
            if known is value or known.same(value):
                return {"features": number}
        maps.append(value)
        return {"features": len(maps) - 1}
    if isinstance(value, Blocks):
        return {
            "block": value.block,
            "sizes": list(value.sizes),
            "channels": list(value.channels),
            "narrow": value.narrow,
        }
    if isinstance(value, CostRegressor):
        return {
            "estimator": type(value).__name__,
            "parameters": {name: encode(item, maps) for name, item in value.get_params(deep=False).items()},
            "learnt": {name: encode(getattr(value, name), maps) for name in _learnt_names(value)},
        }
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": "int" if value.dtype.kind in "iu" else "float"}
    if isinstance(value, np.generic):
        return value.item()
    return value


def decode(state: Any, maps: list[FeatureMap]) -> Any:
    """Return the value that `encode` wrote.

    Args:
        state: What `encode` returned, checked by `budgets.model_document`.
        maps: The feature maps that it refers to.

    Raises:
        ProfileError: A learnt attribute is missing or unknown.
    """
    if not isinstance(state, dict):
        return state
    if "features" in state:
        return maps[state["features"]]
    if "block" in state:
        return Blocks(int(state["block"]), tuple(state["sizes"]), tuple(state["channels"]), bool(state["narrow"]))
    if "array" in state:
        return np.array(state["array"], np.intp if state["dtype"] == "int" else np.float64)
    parameters = {key: decode(item, maps) for key, item in state["parameters"].items()}
    model: CostRegressor = getattr(regression, state["estimator"])(**parameters)
    if model.outside not in OUTSIDE:
        raise ProfileError(f"`outside` must be one of {', '.join(OUTSIDE)}; got {model.outside!r}.")
    expected = _learnt_names(model)
    if set(state["learnt"]) != set(expected):
        wrong = sorted(set(state["learnt"]) ^ set(expected))[0]
        raise ProfileError(f"A saved {state['estimator']} has {', '.join(expected)}; {wrong!r} is missing or unknown.")
    for key, item in state["learnt"].items():
        setattr(model, key, decode(item, maps))
    model._restore()
    return model


def _learnt_names(model: CostRegressor) -> tuple[str, ...]:
    return ("n_features_in_", "low_", "high_", *model._learnt)


def encode_frame(frame: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the columns of a table as lists."""
    return {str(name): frame[name].tolist() for name in frame.columns}


def plain_data(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` as it will be read from its file; every number is finite."""
    return dict(json.loads(json.dumps(state, allow_nan=False, default=_plain)))


def to_json(state: Mapping[str, Any]) -> str:
    """Return indented JSON, with the long entries on one line each."""
    lines = []
    for key, value in state.items():
        indent = None if key in ("features", "estimator", "calibration", "fitted") else 2
        text = json.dumps(value, indent=indent, allow_nan=False).replace("\n", "\n  ")
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
