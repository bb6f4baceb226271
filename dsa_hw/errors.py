"""Every error this project raises on purpose, in one small tree.

Each message says what was asked, what was found and what to do. The command line prints the message on one
line and exits with the class's ``exit_code``.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DsaError",
    "InfeasibleBudgetError",
    "MeasurementError",
    "MissingDependencyError",
    "ModelError",
    "PlanError",
    "ProfileError",
    "StoreError",
    "TraceError",
    "TrainingError",
    "WidthError",
]


class DsaError(Exception):
    """Root of the tree: something that the user can act on."""

    exit_code = 2


class ModelError(DsaError, ValueError):
    """A model name that does not resolve, or an input that the model does not take."""


class TraceError(ModelError):
    """``torch.export`` cannot trace the model."""


class WidthError(DsaError, ValueError):
    """Widths, kept channels or importances that do not fit the channel groups."""


class PlanError(DsaError, ValueError):
    """A plan file that is damaged, or that belongs to another network."""


class BudgetError(DsaError, ValueError):
    """A budget without a unit, with the wrong one, or out of range."""


class InfeasibleBudgetError(BudgetError):
    """No configuration keeps the budget; ``smallest`` is the least that can be kept, in the budget's unit."""

    exit_code = 3

    def __init__(self, message: str, smallest: float | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class MissingDependencyError(DsaError, ImportError):
    """A runtime, device or counter that is not here; the message says how to get it."""


class MeasurementError(DsaError, RuntimeError):
    """A measurement that cannot be trusted, or that could not be taken."""

    exit_code = 4


class StoreError(DsaError):
    """A profile store that is foreign, damaged or cannot be written."""


class ProfileError(DsaError, ValueError):
    """A table of measurements that a cost model cannot be fitted to."""


class TrainingError(DsaError, RuntimeError):
    """A loss that is not finite or explodes, or data that does not fit the network."""
