"""Sweep a budget: the front of what is possible, from one profile and warm-started allocations, each point certified.

Each allocation starts from the weights that the next larger budget adapted, which already work with fewer channels. A
budget that cannot be met ends the front and does not discard it.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import dsa_hw
from budgets import Budget, flops
from budgets.budget import MeasuredBudget
from dsa_hw.channels import find_groups
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import BudgetError, InfeasibleBudgetError
from dsa_hw.experiments.dense import named_data, named_model, question_of, train_dense
from dsa_hw.experiments.front import Front, SweepRowDocument
from dsa_hw.experiments.report import About, plots, write_sweep
from dsa_hw.experiments.report.allocation import environment_facts
from dsa_hw.experiments.run_folder import RunFolder
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.allocate import check_budgets
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.example_inputs import example_for
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.utils.files import only_process, write_text
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.modules import check_finite_weights
from dsa_hw.utils.random_state import random_state_kept
from profilers.profiling.schemes import resolve_for
from profilers.targets import resolve

if TYPE_CHECKING:
    from dsa_hw.zoo.data import Data
    from profilers.targets import Target

__all__ = ["sweep"]

_log = logging.getLogger(__name__)


def sweep(
    model: str | nn.Module,
    budgets: Sequence[Budget],
    *,
    data: str | Data | None = None,
    example_inputs: Any = None,
    target: str | Target = "onnxruntime/cpu",
    method: str = "dsa",
    options: Mapping[str, Any] | None = None,
    settings: ExperimentSettings | None = None,
    profiling: ProfileOptions | None = None,
    refinement: RefinementOptions | None = None,
    out: str | Path | None = None,
    progress: bool = False,
    listener: Callable[[str], None] | None = None,
    command: str = "",
) -> pd.DataFrame:
    """Allocate under several budgets of one kind, from the largest down.

    Args:
        model: A name (the weights are random, so set ``settings.train_epochs`` and ``data``) or a module.
        budgets: Several budgets of one kind.
        data: A name or a `dsa_hw.zoo.data.Data`. None uses synthetic inputs, and no accuracy is known.
        example_inputs: Inputs of a module; None infers them.
        target: Where measured budgets hold that name no target.
        method: Name of the method.
        options: Settings of the method.
        settings: How networks are trained and measured.
        profiling: How the cost model is obtained.
        refinement: How keep ratios become a network.
        out: Folder for everything, continued where it exists: ``index.html`` (the page), ``front.csv``, ``front.png``,
            ``plans/``, ``networks/``.
        progress: Whether to show progress bars on a terminal.
        listener: Called with a line of text for each step.
        command: The command line, for the page.

    Returns:
        A row for each budget: limit, predicted, measured, interval, utilisation, verdict, accuracy, FLOPs, and the
        interval of the utilisation, which decides the verdict. Costs are in base units. ``attrs["widths"]`` maps budget
        to group to width, ``attrs["dense"]`` has the FLOPs, the accuracy and the widths of the dense network.
        ``attrs["infeasible"]`` maps each budget that cannot be met, which has no row, to the reason.

    Raises:
        BudgetError: There is no budget, or they are of several kinds.
        InfeasibleBudgetError: Not even the largest budget can be met.
    """
    budgets = check_budgets(list(budgets))
    folder = None if out is None else as_path(out, "out")
    if len({type(b) for b in budgets}) > 1:
        kinds = ", ".join(sorted({b.key for b in budgets}))
        raise BudgetError(f"A sweep needs budgets of one kind; got {kinds}.")
    with tempfile.TemporaryDirectory() as spare, random_state_kept(), only_process(folder):
        run = _SweepRun(
            model, list(budgets), data, example_inputs, resolve(target), method, dict(options or {}),
            settings or ExperimentSettings(), profiling or ProfileOptions(), refinement or RefinementOptions(),
            folder or Path(spare), progress, listener or (lambda text: None),
        )  # fmt: skip
        table = run.run()
        if out is not None:
            page = write_sweep(table, budgets[0], run.about(table, command), run.front.folder.path / "index.html")
            table.attrs["page"] = str(page)
        return table


class _SweepRun:
    """One sweep, step by step."""

    def __init__(
        self,
        model: str | nn.Module,
        budgets: list[Budget],
        data: str | Data | None,
        example_inputs: Any,
        target: Target,
        method: str,
        options: dict[str, Any],
        settings: ExperimentSettings,
        profiling: ProfileOptions,
        refinement: RefinementOptions,
        out: Path,
        progress: bool,
        say: Callable[[str], None],
    ) -> None:
        self.data, self.budgets = named_data(data, settings.seed), _ordered(budgets)
        torch.manual_seed(settings.seed)
        dense, name, example = named_model(model, profiling.name, self.data, example_inputs)
        check_finite_weights(dense, "the dense network")
        inputs = example_for(dense, example)
        target = resolve_for(dense, inputs, target)
        found = self.data
        # Each point starts from the weights of the one before, so that the budgets belong to the question.
        folder = RunFolder(
            out,
            question_of(
                {name: getattr(found, name) for name in ("train", "val", "test") if found}, what="sweep", model=name,
                weights=dict(dense.state_dict()), method=method, inputs=[[str(x.dtype), *x.shape] for x in inputs],
                data=found.name if found else None, budgets=[b.to_dict() for b in self.budgets], target=target.title,
                samples=profiling.samples, holdout=profiling.holdout, grid=profiling.grid,
                refinement=asdict(refinement), **settings.question(), options=options,
            ),
            SweepRowDocument,
        )  # fmt: skip
        if folder.rows():
            _log.warning("Continuing an earlier sweep: %d points are finished in %s.", len(folder.rows()), out)
        self.front = Front(
            dense, find_groups(dense, inputs), inputs, name, found.train if found else None,
            found.val if found else None, target, method, options, settings, profiling, refinement, folder, progress,
            say,
        )  # fmt: skip

    def run(self) -> pd.DataFrame:
        """Train, profile, allocate from the largest budget down."""
        front, folder = self.front, self.front.folder
        if self.data is not None:
            train_dense(
                folder, front.dense, self.data, front.settings, progress=front.progress, say=front.say
            )  # fmt: skip
        cost = getattr(front.with_cost(self.budgets[0]), "profile", None)
        warm = copy.deepcopy(front.dense)
        ordered = {str(budget.quantity).replace(" ", ""): budget for budget in self.budgets}
        infeasible: dict[str, str] = {}
        for number, (id, budget) in enumerate(ordered.items(), 1):
            kept = front.adapted(id) if id in folder.rows() else None
            if kept is not None:
                warm = kept
                continue
            front.say(f"[{number}/{len(ordered)}] {budget}")
            try:
                known = replace(budget, profile=cost) if isinstance(budget, MeasuredBudget) else budget
                warm = self._point(id, known, warm)
            except InfeasibleBudgetError as error:
                if number == 1:
                    raise  # the largest: nothing is left of the front
                infeasible[str(budget.quantity)] = str(error)
        return self._table([id for id in ordered if id in folder.rows()], infeasible)

    def about(self, table: pd.DataFrame, command: str) -> About:
        """Return what the page says besides the table."""
        front, certificate = self.front, self._certificate(table["plan"].iloc[0])
        made = [("method", front.method), ("training", front.settings.described())]
        return About(
            front.name,
            front.target.title,
            certificate.date,
            dsa_hw.__version__,
            command,
            [*made, *environment_facts(certificate)],
        )  # fmt: skip

    def _certificate(self, plan: str) -> Certificate:
        return Certificate.from_dict(Plan.load(self.front.folder.path / plan).certificate)

    def _point(self, id: str, budget: Budget, warm: nn.Module) -> nn.Module:
        front = self.front
        result = front.allocate(id, [budget], warm)
        if self.data is not None:
            front.finetune(id, result)
            result = result.assess(front.dense, self.data.test, source="test data")
        front.keep(id, result, warm)
        return result.proposal.model if result.proposal is not None else warm

    def _table(self, ids: Sequence[str], infeasible: dict[str, str]) -> pd.DataFrame:
        folder = self.front.folder
        rows = [folder.rows()[id] for id in ids]
        table = pd.DataFrame([{k: v for k, v in row.items() if k not in ("id", "widths")} for row in rows])
        table["accuracy"] = table["accuracy"].astype(float)
        groups = self.front.groups
        work = flops(groups)
        alphas = [np.array([row["widths"][name] for name in groups.names]) / groups.sizes for row in rows]
        table["flops"] = [float(work(alpha)) for alpha in alphas]
        entries = [self._certificate(row["plan"]).entries[0] for row in rows]
        for end in ("least_used", "most_used"):
            table[end] = [getattr(entry, end) for entry in entries]
        write_text(folder.path / "front.csv", table.to_csv(index=False))
        budget = self.budgets[0]
        unit = "s" if budget.dimension == "time" else budget.dimension
        plots.save(plots.front(table, budget.title, unit), folder.path / "front.png")
        widths = {row["asked"]: row["widths"] for row in rows}
        quality = self._certificate(rows[0]["plan"]).quality
        table.attrs = {
            "widths": widths,
            "infeasible": infeasible,
            "target": self.front.target.title,
            "dense": {
                "flops": float(work.dense),
                "accuracy": None if quality.dense is None else quality.dense.value,
                "widths": {name: int(size) for name, size in zip(groups.names, groups.sizes, strict=True)},
            },
        }
        return table


def _ordered(budgets: Sequence[Budget]) -> list[Budget]:
    """Return the budgets from the largest down."""
    return sorted(budgets, key=lambda b: -b.quantity.magnitude)
