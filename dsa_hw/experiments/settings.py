"""Settings of comparisons and sweeps, light enough for a command's ``--help``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How networks are trained and measured; the same for all of them.

    ``train_epochs`` train the dense network first (0: its weights are used as they are). ``epochs`` are what a method
    may train while it allocates; a method that leaves the weights alone gets them for fine-tuning instead, so that all
    networks are trained equally long. ``reading``: seconds that one network may be timed.
    """

    train_epochs: float = 0.0
    epochs: float = 4.0
    finetune_epochs: float = 4.0
    lr: float = 0.05
    finetune_lr: float = 0.02
    precision: str = "fp32"
    minimum: float = 0.05
    samples: int = 40
    holdout: int = 10
    seed: int = 0
    time_limit: float = field(default=600.0, compare=False)
    reading: float = field(default=20.0, compare=False)

    def question(self) -> dict[str, Any]:
        """What changes the results; the time given to measuring does not."""
        return {k: v for k, v in asdict(self).items() if k not in ("time_limit", "reading")}
