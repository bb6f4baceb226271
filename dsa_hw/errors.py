"""Every error that this project raises on purpose.

A message says what is wrong with which value, what is accepted and what to do. The command line prints it on one line
and exits with ``exit_code`` of the class.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "DsaError",
    "FileError",
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
    """Base class of all errors of this project; the user can act on each of them."""

    exit_code = 2


class FileError(DsaError, ValueError):
    """A file that cannot be read or written, is damaged, or does not follow its format."""


class ModelError(DsaError, ValueError):
    """An unknown model or data set, or example inputs that the model does not accept."""


class TraceError(ModelError):
    """A model that ``torch.export`` cannot trace, or that does not run on the example inputs."""


class WidthError(DsaError, ValueError):
    """Widths, kept channels, masks or importances that do not match the channel groups."""


class PlanError(DsaError, ValueError):
    """A plan file that cannot be read or written, is damaged, or belongs to another network."""


class BudgetError(DsaError, ValueError):
    """A budget without a unit, with a wrong unit, or out of range."""


class InfeasibleBudgetError(BudgetError):
    """No configuration of the network satisfies the budget.

    Attributes:
        smallest: The smallest value that can be reached, in the unit of the budget; None where it is not known.
    """

    exit_code = 3

    def __init__(self, message: str, smallest: float | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class MissingDependencyError(DsaError, ImportError):
    """A package, runtime, device or counter that is not available here; the message says how to install it."""


class MeasurementError(DsaError, RuntimeError):
    """A measurement that failed or that is not reliable."""

    exit_code = 4


class StoreError(DsaError):
    """A profile store that is damaged, belongs to another program or cannot be written."""


class ProfileError(DsaError, ValueError):
    """A profile or an option of profiling that cannot be used."""


class TrainingError(DsaError, RuntimeError):
    """A loss that is not finite or diverges, or data that does not match the network."""
