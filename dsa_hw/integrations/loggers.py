"""Adapters for ``log=``: TensorBoard, MLflow and Weights & Biases.

    dsa_hw.allocate(model, "latency=5ms", log=TensorBoardLog("runs/small"))

Numbers become the metrics ``STAGE/NAME`` at their step. Texts, such as the verdict, become text, tags or the summary.
Any other function that takes a dict will do, for example ``records.append``.
"""

from __future__ import annotations

import os
import re
from typing import Any

from dsa_hw.errors import MissingDependencyError
from dsa_hw.utils.records import numbers_in

__all__ = ["MLflowLog", "TensorBoardLog", "WandbLog"]


class TensorBoardLog:
    """Writes event files to a folder, for ``tensorboard --logdir FOLDER``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open the folder.

        Raises:
            MissingDependencyError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        self.writer: Any = SummaryWriter(os.fspath(folder))

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a record."""
        for name, value in numbers_in(record).items():
            self.writer.add_scalar(f"{record['stage']}/{name}", value, record["step"])
        for name, text in _texts(record).items():
            self.writer.add_text(f"{record['stage']}/{name}", text, record["step"])
        self.writer.flush()


class MLflowLog:
    """Writes to the active run of MLflow, or starts one; the tracking address is MLflow's own setting."""

    def __init__(self, experiment: str | None = None) -> None:
        """Choose the experiment; None leaves it.

        Raises:
            MissingDependencyError: MLflow is not installed.
        """
        try:
            import mlflow
        except ImportError as error:
            raise _missing("MLflow", "mlflow") from error
        self.mlflow: Any = mlflow
        if experiment is not None:
            mlflow.set_experiment(experiment)
        if mlflow.active_run() is None:
            mlflow.start_run()

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a record."""
        numbers = {_slug(f"{record['stage']}/{name}"): value for name, value in numbers_in(record).items()}
        if numbers:
            self.mlflow.log_metrics(numbers, step=record["step"])
        for name, text in _texts(record).items():
            self.mlflow.set_tag(_slug(f"{record['stage']}/{name}"), text)


class WandbLog:
    """Writes to a run of Weights & Biases, ``wandb.init(...)``."""

    def __init__(self, run: Any = None) -> None:
        """Take the run; None starts one with wandb's own settings (``WANDB_MODE=offline`` sends nothing).

        Raises:
            MissingDependencyError: wandb is not installed.
        """
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise _missing("Weights & Biases", "wandb") from error
            run = wandb.init()
        self.run = run
        self._stages: set[str] = set()

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a record; each stage counts its own steps."""
        stage, texts = record["stage"], _texts(record)
        numbers = {f"{stage}/{name}": value for name, value in numbers_in(record).items()}
        if numbers and stage not in self._stages:
            self._stages.add(stage)
            self.run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        if numbers:
            self.run.log({f"{stage}/step": record["step"], **numbers})
        if texts:
            self.run.summary.update({f"{stage}/{name}": text for name, text in texts.items()})


def _texts(record: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in record.items() if name != "stage" and isinstance(value, str)}


def _slug(name: str) -> str:
    """Return a name of the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _missing(name: str, package: str) -> MissingDependencyError:
    return MissingDependencyError(f"{name} is not installed. Run pip install {package}.")
