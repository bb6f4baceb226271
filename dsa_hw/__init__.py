"""Prune PyTorch networks to a latency, energy or FLOPs budget, measured and verified on the target device.

Names are loaded when first used, so that ``import dsa_hw`` is fast and the lower layers can be imported alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOMES = {
    "Allocation": "dsa_hw.pipeline.result",
    "Allocator": "dsa_hw.methods.dsa.allocator",
    "BudgetError": "dsa_hw.errors",
    "Certificate": "dsa_hw.pipeline.certificate",
    "ChannelGroups": "dsa_hw.channels",
    "CostModel": "budgets",
    "CostSet": "dsa_hw.methods.costs",
    "DsaError": "dsa_hw.errors",
    "EnergyBudget": "budgets",
    "EstimatedEnergyBudget": "budgets",
    "ExperimentSettings": "dsa_hw.experiments.settings",
    "FileError": "dsa_hw.errors",
    "FlopsBudget": "budgets",
    "InfeasibleBudgetError": "dsa_hw.errors",
    "LatencyBudget": "budgets",
    "MeasurementError": "dsa_hw.errors",
    "MeasuringRules": "profilers",
    "MemoryBudget": "budgets",
    "Minimum": "dsa_hw.experiments.minimize",
    "MissingDependencyError": "dsa_hw.errors",
    "ModelError": "dsa_hw.errors",
    "ParamsBudget": "budgets",
    "Plan": "dsa_hw.channels.plan",
    "PlanError": "dsa_hw.errors",
    "Profile": "dsa_hw.profiles",
    "ProfileError": "dsa_hw.errors",
    "ProfileOptions": "dsa_hw.pipeline.options",
    "Recipe": "dsa_hw.methods.dsa.recipe",
    "RefinementOptions": "dsa_hw.pipeline.options",
    "StoreError": "dsa_hw.errors",
    "Teacher": "dsa_hw.training.teachers",
    "TraceError": "dsa_hw.errors",
    "Trainer": "dsa_hw.methods.dsa.trainer",
    "TrainingError": "dsa_hw.errors",
    "Verdict": "dsa_hw.pipeline.reading",
    "Verification": "dsa_hw.pipeline.verification",
    "WidthError": "dsa_hw.errors",
    "allocate": "dsa_hw.pipeline.allocate",
    "apply_plan": "dsa_hw.channels.plan",
    "compare": "dsa_hw.experiments.compare",
    "find_groups": "dsa_hw.channels",
    "finetune": "dsa_hw.training.finetune",
    "fit": "budgets",
    "from_hub": "dsa_hw.pipeline.sharing",
    "from_onnx": "dsa_hw.zoo.onnx_networks",
    "load": "dsa_hw.pipeline.sharing",
    "load_cost_model": "budgets",
    "masked": "dsa_hw.channels",
    "load_profile": "profilers",
    "measure": "profilers",
    "minimize": "dsa_hw.experiments.minimize",
    "profile": "profilers",
    "recover": "dsa_hw.training.recovery",
    "round_widths": "dsa_hw.methods.rounding",
    "select_channels": "dsa_hw.channels",
    "shrink": "dsa_hw.channels",
    "sweep": "dsa_hw.experiments.sweep",
    "verify": "dsa_hw.pipeline.verification",
}
__all__ = [
    "Allocation",
    "Allocator",
    "BudgetError",
    "Certificate",
    "ChannelGroups",
    "CostModel",
    "CostSet",
    "DsaError",
    "EnergyBudget",
    "EstimatedEnergyBudget",
    "ExperimentSettings",
    "FileError",
    "FlopsBudget",
    "InfeasibleBudgetError",
    "LatencyBudget",
    "MeasurementError",
    "MeasuringRules",
    "MemoryBudget",
    "Minimum",
    "MissingDependencyError",
    "ModelError",
    "ParamsBudget",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "ProfileOptions",
    "Recipe",
    "RefinementOptions",
    "StoreError",
    "Teacher",
    "TraceError",
    "Trainer",
    "TrainingError",
    "Verdict",
    "Verification",
    "WidthError",
    "allocate",
    "apply_plan",
    "compare",
    "find_groups",
    "finetune",
    "fit",
    "from_hub",
    "from_onnx",
    "load",
    "load_cost_model",
    "load_profile",
    "masked",
    "measure",
    "minimize",
    "profile",
    "recover",
    "round_widths",
    "select_channels",
    "shrink",
    "sweep",
    "verify",
]

if TYPE_CHECKING:
    from budgets import (
        CostModel,
        EnergyBudget,
        EstimatedEnergyBudget,
        FlopsBudget,
        LatencyBudget,
        MemoryBudget,
        ParamsBudget,
        fit,
        load_cost_model,
    )
    from dsa_hw.channels import ChannelGroups, find_groups, masked, select_channels, shrink
    from dsa_hw.channels.plan import Plan, apply_plan
    from dsa_hw.errors import (
        BudgetError,
        DsaError,
        FileError,
        InfeasibleBudgetError,
        MeasurementError,
        MissingDependencyError,
        ModelError,
        PlanError,
        ProfileError,
        StoreError,
        TraceError,
        TrainingError,
        WidthError,
    )
    from dsa_hw.experiments.compare import compare
    from dsa_hw.experiments.minimize import Minimum, minimize
    from dsa_hw.experiments.settings import ExperimentSettings
    from dsa_hw.experiments.sweep import sweep
    from dsa_hw.methods.costs import CostSet
    from dsa_hw.methods.dsa.allocator import Allocator
    from dsa_hw.methods.dsa.recipe import Recipe
    from dsa_hw.methods.dsa.trainer import Trainer
    from dsa_hw.methods.rounding import round_widths
    from dsa_hw.pipeline.allocate import allocate
    from dsa_hw.pipeline.certificate import Certificate
    from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
    from dsa_hw.pipeline.reading import Verdict
    from dsa_hw.pipeline.result import Allocation
    from dsa_hw.pipeline.sharing import from_hub, load
    from dsa_hw.pipeline.verification import Verification, verify
    from dsa_hw.profiles import Profile
    from dsa_hw.training.finetune import finetune
    from dsa_hw.training.recovery import recover
    from dsa_hw.training.teachers import Teacher
    from dsa_hw.zoo.onnx_networks import from_onnx
    from profilers import MeasuringRules, load_profile, measure, profile


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsa_hw' has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    except (ImportError, AttributeError) as error:
        from dsa_hw.errors import MissingDependencyError
        from dsa_hw.utils.packages import OWN, why_hidden

        if hidden := next(filter(None, map(why_hidden, OWN)), None):
            raise MissingDependencyError(hidden) from error
        raise
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
