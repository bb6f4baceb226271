"""Sweep a budget: the front of what is possible, from one profile and warm-started allocations, each point certified.

Each allocation starts from the weights that the next larger budget adapted, which already work with fewer channels. A
budget that cannot be met ends the front and does not discard it.
"""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import nn

from budgets import Budget, CostModel
from budgets.budget import MeasuredBudget
from dsa_hw.channels import find_groups
from dsa_hw.errors import BudgetError, InfeasibleBudgetError
from dsa_hw.experiments.dense import named_data, named_model, pin_cost, question_of, rewind, train, train_dense
from dsa_hw.experiments.report import plots
from dsa_hw.experiments.run_folder import RunFolder, slug
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.allocate import allocate, check_budgets
from dsa_hw.pipeline.cost_models import Task, fit_cost_model
from dsa_hw.pipeline.example_inputs import example_for
from dsa_hw.pipeline.meters import rules_for
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.utils.files import write_text
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.modules import check_finite_weights
from dsa_hw.utils.progress import Bar
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
        out: Folder for everything, continued where it exists: ``front.csv``, ``front.png``, ``plans/``, ``networks/``.
        progress: Whether to show progress bars on a terminal.
        listener: Called with a line of text for each step.

    Returns:
        A row for each budget: limit, predicted, measured, interval, utilisation, verdict, accuracy. Costs are in base
        units. ``attrs["widths"]`` maps budget to group to width. ``attrs["infeasible"]`` maps each budget that cannot
        be met, which has no row, to the reason.

    Raises:
        BudgetError: There is no budget, or they are of several kinds.
        InfeasibleBudgetError: Not even the largest budget can be met.
    """
    check_budgets(list(budgets))
    folder = None if out is None else as_path(out, "out")
    if len({type(b) for b in budgets}) > 1:
        kinds = ", ".join(sorted({b.key for b in budgets}))
        raise BudgetError(f"A sweep needs budgets of one kind; got {kinds}.")
    with tempfile.TemporaryDirectory() as spare, random_state_kept():
        run = _SweepRun(
            model, list(budgets), data, example_inputs, resolve(target), method, dict(options or {}),
            settings or ExperimentSettings(), profiling or ProfileOptions(), refinement or RefinementOptions(),
            folder or Path(spare), progress, listener or (lambda text: None),
        )  # fmt: skip
        return run.run()


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
        self.data = named_data(data, settings.seed)
        self.budgets, self.method, self.options = budgets, method, options
        self.settings, self.profiling, self.refinement = settings, profiling, refinement
        self.progress, self.say = progress, say
        torch.manual_seed(settings.seed)
        self.dense, self.name, example = named_model(model, profiling.name, self.data, example_inputs)
        check_finite_weights(self.dense, "the dense network")
        self.inputs = example_for(self.dense, example)
        self.target = target = resolve_for(self.dense, self.inputs, target)
        found = self.data
        # Each point starts from the weights of the one before, so that the budgets belong to the question.
        self.folder = RunFolder(
            out,
            question_of(
                {name: getattr(found, name) for name in ("train", "val", "test") if found}, what="sweep",
                model=self.name, weights=dict(self.dense.state_dict()), method=method,
                inputs=[[str(x.dtype), *x.shape] for x in self.inputs], data=found.name if found else None,
                budgets=[b.to_dict() for b in _ordered(budgets)], target=target.title,
                samples=profiling.samples, holdout=profiling.holdout, grid=profiling.grid,
                refinement=asdict(refinement), **settings.question(), options=options,
            ),
        )  # fmt: skip
        if self.folder.rows():
            _log.warning("Continuing an earlier sweep: %d points are finished in %s.", len(self.folder.rows()), out)

    def run(self) -> pd.DataFrame:
        """Train, profile, allocate from the largest budget down."""
        if self.data is not None:
            train_dense(self.folder, self.dense, self.data, self.settings, progress=self.progress, say=self.say)
        cost = self._cost()
        warm = copy.deepcopy(self.dense)
        ordered = {str(budget.quantity).replace(" ", ""): budget for budget in _ordered(self.budgets)}
        infeasible: dict[str, str] = {}
        for number, (id, budget) in enumerate(ordered.items(), 1):
            kept = self.folder.weights(f"{id} warm")
            if id in self.folder.rows() and kept is not None:
                warm.load_state_dict(kept["state_dict"])
                continue
            self.say(f"[{number}/{len(ordered)}] {budget}")
            try:
                warm = self._point(id, budget, warm, cost)
            except InfeasibleBudgetError as error:
                if number == 1:
                    raise  # the largest: nothing is left of the front
                infeasible[str(budget.quantity)] = str(error)
        return self._table([id for id in ordered if id in self.folder.rows()], infeasible)

    def _cost(self) -> CostModel | None:
        """Return one cost model for all points; None where the cost is counted."""
        budget, s = self.budgets[0], self.settings
        if not isinstance(budget, MeasuredBudget):
            return None
        self.say(f"profiling on {self.target.title}")
        with Bar(self.progress) as bar:
            task = Task(
                self.dense, find_groups(self.dense, self.inputs), self.inputs, replace(self.profiling, name=self.name),
                self.refinement.minimum, s.seed, self.folder.path / "profile.sqlite", bar,
            )  # fmt: skip
            source = self.profiling.source if budget.profile is None else budget.profile
            if source is None and self.folder.rows():  # more measurements would be another cost model
                source = task.store
            cost = fit_cost_model(
                task,
                self.target,
                rules_for(budget, self.profiling.rules),
                source=source,
                quantity=budget.key,
                counter=getattr(budget, "counter", None),
            )
        pin_cost(self.folder, cost, task.groups.sizes)
        return cost

    def _point(self, id: str, budget: Budget, warm: nn.Module, cost: CostModel | None) -> nn.Module:
        s, data = self.settings, self.data
        options = self.options
        if data is not None:
            rewind(data.train, data.val)
            options = {"epochs": s.epochs, **options}
        result = allocate(
            warm,
            budget,
            example_inputs=self.inputs,
            train=data.train if data else None,
            val=data.val if data else None,
            target=self.target,
            method=self.method,
            options=options,
            seed=s.seed,
            progress=self.progress,
            profiling=replace(self.profiling, source=cost, time_limit=6 * s.reading, name=self.name),
            refinement=self.refinement,
        )
        score = math.nan
        if data is not None:
            if s.finetune_epochs:
                title = f"fine-tuning at {id}"
                train(
                    result.model, data.train, s.finetune_epochs, s.finetune_lr, s, progress=self.progress, title=title,
                    teacher=self.dense,
                )  # fmt: skip
            result = result.assess(self.dense, data.test, source="test data")
            score = result.quality.value.value if result.quality.value else math.nan
        adapted = result.proposal.model if result.proposal is not None else warm
        self.folder.keep(id, result.model)
        self.folder.keep(f"{id} warm", adapted)
        result.current_plan().save(self.folder.path / "plans" / f"{slug(id)}.json")
        entry = result.certificate.entries[0]
        self.folder.add(
            {
                "id": id,
                "asked": str(budget.quantity),
                "limit": entry.limit,
                "predicted": entry.predicted,
                "measured": entry.measured,
                "low": entry.low,
                "high": entry.high,
                "dense": entry.dense,
                "utilisation": entry.utilisation,
                "verdict": str(entry.verdict),
                "measurements": result.certificate.measurements,
                "accuracy": None if math.isnan(score) else score,
                "plan": f"plans/{slug(id)}.json",
                "widths": {str(n): int(w) for n, w in result.widths.items()},
            }
        )
        return adapted

    def _table(self, ids: Sequence[str], infeasible: dict[str, str]) -> pd.DataFrame:
        rows = [self.folder.rows()[id] for id in ids]
        table = pd.DataFrame([{k: v for k, v in row.items() if k not in ("id", "widths")} for row in rows])
        table["accuracy"] = table["accuracy"].astype(float)
        write_text(self.folder.path / "front.csv", table.to_csv(index=False))
        budget = self.budgets[0]
        unit = "s" if budget.dimension == "time" else budget.dimension
        plots.save(plots.front(table, budget.title, unit), self.folder.path / "front.png")
        widths = {row["asked"]: row["widths"] for row in rows}
        table.attrs = {"widths": widths, "infeasible": infeasible, "target": self.target.title}
        return table


def _ordered(budgets: Sequence[Budget]) -> list[Budget]:
    """Return the budgets from the largest down."""
    return sorted(budgets, key=lambda b: -b.quantity.magnitude)
