"""Budgets, and costs as functions of the keep ratios, counted or fitted.

    model = budgets.fit(profile, groups)         # compares several estimators and calibrates a bound
    model.value(alpha), model.gradient(alpha), model.upper(alpha, 0.9), model.predict(configurations)
    model.save("latency.json"); budgets.load_cost_model("latency.json", groups, target="onnxruntime/cpu fp32 x1")

Names are loaded when first used: naming a budget does not import scikit-learn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Budget": "budgets.budget",
    "CostModel": "budgets.cost_model",
    "CountedBudget": "budgets.budget",
    "EnergyBudget": "budgets.budget",
    "EstimatedEnergyBudget": "budgets.budget",
    "FlopsBudget": "budgets.budget",
    "LatencyBudget": "budgets.budget",
    "MeasuredBudget": "budgets.budget",
    "MemoryBudget": "budgets.budget",
    "ParamsBudget": "budgets.budget",
    "activation_memory": "budgets.analytic",
    "arena": "budgets.microcontroller",
    "estimated_energy": "budgets.analytic_energy",
    "fit": "budgets.fitting",
    "flash": "budgets.microcontroller",
    "flops": "budgets.analytic",
    "load_cost_model": "budgets.cost_model",
    "params": "budgets.analytic",
    "physics_features": "budgets.work_classes",
}
__all__ = [
    "Budget",
    "CostModel",
    "CountedBudget",
    "EnergyBudget",
    "EstimatedEnergyBudget",
    "FlopsBudget",
    "LatencyBudget",
    "MeasuredBudget",
    "MemoryBudget",
    "ParamsBudget",
    "activation_memory",
    "arena",
    "estimated_energy",
    "fit",
    "flash",
    "flops",
    "load_cost_model",
    "params",
    "physics_features",
]

if TYPE_CHECKING:
    from budgets.analytic import activation_memory, flops, params
    from budgets.analytic_energy import estimated_energy
    from budgets.budget import (
        Budget,
        CountedBudget,
        EnergyBudget,
        EstimatedEnergyBudget,
        FlopsBudget,
        LatencyBudget,
        MeasuredBudget,
        MemoryBudget,
        ParamsBudget,
    )
    from budgets.cost_model import CostModel, load_cost_model
    from budgets.fitting import fit
    from budgets.microcontroller import arena, flash
    from budgets.work_classes import physics_features


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'budgets' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
