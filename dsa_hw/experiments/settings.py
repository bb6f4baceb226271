"""Settings of comparisons and sweeps, light enough for the ``--help`` of a command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dsa_hw.errors import TrainingError
from dsa_hw.utils.numbers import check_number, check_positive, check_seed

__all__ = ["ExperimentSettings"]


@dataclass(frozen=True)
class ExperimentSettings:
    """How the networks of a comparison or a sweep are trained and measured; the same for all of them.

    Attributes:
        train_epochs: Epochs of the dense network before everything else; 0 uses its weights as they are.
        epochs: Epochs that a method may train while it allocates. A method that does not train gets them for
            fine-tuning instead, so that all networks are trained equally long.
        finetune_epochs: Epochs of fine-tuning.
        lr: Peak learning rate of the dense network.
        finetune_lr: Peak learning rate of fine-tuning.
        precision: "fp32" or "bf16".
        seed: Seed of everything random.
        reading: Seconds that one network may be measured.

    Example:
        >>> ExperimentSettings(epochs=1.0).finetune_epochs
        4.0
    """

    train_epochs: float = 0.0
    epochs: float = 4.0
    finetune_epochs: float = 4.0
    lr: float = 0.05
    finetune_lr: float = 0.02
    precision: str = "fp32"
    seed: int = 0
    reading: float = field(default=20.0, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("train_epochs", "epochs", "finetune_epochs"):
            check_number(getattr(self, name), name, TrainingError)
        for name in ("lr", "finetune_lr", "reading"):
            check_positive(getattr(self, name), name, TrainingError)
        check_seed(self.seed)

    def described(self) -> str:
        """Return the training in words."""
        parts = ((self.train_epochs, "dense"), (self.epochs, "allocating"), (self.finetune_epochs, "fine-tuning"))
        return ", ".join(f"{epochs:g} epochs {what}" for epochs, what in parts) + f"; seed {self.seed}"

    def question(self) -> dict[str, Any]:
        """Return what changes the results; the time for measuring does not."""
        return {k: v for k, v in asdict(self).items() if k != "reading"}
