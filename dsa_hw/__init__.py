"""dsa_hw: prune a PyTorch network to a budget in the unit that counts, on the device that counts, with proof.

Names are loaded when first used, so that the lower layers can be imported alone and ``import dsa_hw`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Allocation": "dsa_hw.pipeline.result",
    "Allocator": "dsa_hw.methods.dsa.allocator",
    "Certificate": "dsa_hw.pipeline.certificate",
    "ChannelGroups": "dsa_hw.channels",
    "Recipe": "dsa_hw.methods.dsa.recipe",
    "Trainer": "dsa_hw.methods.dsa.trainer",
    "allocate": "dsa_hw.pipeline.allocate",
    "compare": "dsa_hw.experiments.compare",
    "recheck": "dsa_hw.pipeline.verification",
    "round_widths": "dsa_hw.methods.rounding",
    "sweep": "dsa_hw.experiments.sweep",
    "find_groups": "dsa_hw.channels",
    "select_channels": "dsa_hw.channels",
    "shrink": "dsa_hw.channels",
    "masked": "dsa_hw.channels",
    "Plan": "dsa_hw.channels.plan",
    "apply_plan": "dsa_hw.channels.plan",
    "EnergyBudget": "budgets",
    "EstimatedEnergyBudget": "budgets",
    "FlopsBudget": "budgets",
    "LatencyBudget": "budgets",
    "MemoryBudget": "budgets",
    "ParamsBudget": "budgets",
}
__all__ = [
    "Allocation",
    "Allocator",
    "Certificate",
    "ChannelGroups",
    "EnergyBudget",
    "EstimatedEnergyBudget",
    "FlopsBudget",
    "LatencyBudget",
    "MemoryBudget",
    "ParamsBudget",
    "Plan",
    "Recipe",
    "Trainer",
    "allocate",
    "apply_plan",
    "compare",
    "find_groups",
    "masked",
    "recheck",
    "round_widths",
    "select_channels",
    "shrink",
    "sweep",
]

if TYPE_CHECKING:
    from budgets import EnergyBudget, EstimatedEnergyBudget, FlopsBudget, LatencyBudget, MemoryBudget, ParamsBudget
    from dsa_hw.channels import ChannelGroups, find_groups, masked, select_channels, shrink
    from dsa_hw.channels.plan import Plan, apply_plan
    from dsa_hw.experiments.compare import compare
    from dsa_hw.experiments.sweep import sweep
    from dsa_hw.methods.dsa.allocator import Allocator
    from dsa_hw.methods.dsa.recipe import Recipe
    from dsa_hw.methods.dsa.trainer import Trainer
    from dsa_hw.methods.rounding import round_widths
    from dsa_hw.pipeline.allocate import allocate
    from dsa_hw.pipeline.certificate import Certificate
    from dsa_hw.pipeline.result import Allocation
    from dsa_hw.pipeline.verification import recheck


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsa_hw' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
