"""Networks under several limits of one dense network: one profile, each allocation from the weights of a neighbour.

A sweep and a minimisation choose the limits; what happens at each of them is here. Everything is kept in a `RunFolder`,
so that the same call continues after an interruption.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from pydantic import ConfigDict, Field
from torch import nn

from budgets import Budget
from budgets.budget import MeasuredBudget
from dsa_hw.channels import ChannelGroups, shrink
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import DsaError
from dsa_hw.experiments.dense import pin_cost, rewind, train
from dsa_hw.experiments.run_folder import RunFolder, RunRowDocument, slug
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.methods.problem import Batches, Loss
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.constraints import Constraint, resolve_budgets
from dsa_hw.pipeline.cost_models import Task, fit_cost_model
from dsa_hw.pipeline.meters import rules_for
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.quality import Metric
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.pipeline.result import Allocation
from dsa_hw.utils.documents import Line
from dsa_hw.utils.modules import load_weights, weights_digest
from dsa_hw.utils.progress import Bar
from dsa_hw.utils.records import Log
from profilers.profiling.schemes import resolve_for

if TYPE_CHECKING:
    from profilers.targets import Target

__all__ = ["Front", "SweepRowDocument"]

_Cost = Annotated[float, Field(ge=0)] | None


class SweepRowDocument(RunRowDocument):
    """A finished point of a sweep; costs in base units as in a certificate. Null is a number that is not known."""

    model_config = ConfigDict(title="dsa_hw sweep row", extra="forbid")

    asked: Line
    limit: _Cost
    predicted: _Cost
    measured: _Cost
    low: _Cost
    high: _Cost
    dense: _Cost
    utilisation: _Cost
    verdict: Verdict
    measurements: int = Field(ge=0)
    accuracy: float | None
    plan: Line
    widths: dict[str, Annotated[int, Field(ge=1)]] = Field(min_length=1)


@dataclass(frozen=True, eq=False)
class Front:
    """The dense network, and how networks under a limit are made from it.

    Attributes:
        dense: The dense network.
        groups: Its channel groups.
        inputs: Example inputs.
        name: Its name in the store of measurements.
        train: Loader for the weights; None where there is none.
        val: Loader for the keep ratios; None where there is none.
        target: Where measured budgets hold that name no target.
        method: Name of the method.
        options: Its settings.
        settings: How networks are trained and measured.
        profiling: How cost models are obtained.
        refinement: How keep ratios become a network.
        folder: Where everything is kept.
        progress: Whether to show progress bars.
        say: Called with what is done.
        loss: ``loss(outputs, targets)``; None is the cross entropy.
        metric: The user's metric; None is the accuracy.
        recovery: See `dsa_hw.allocate`.
        log: See `dsa_hw.allocate`.
    """

    dense: nn.Module
    groups: ChannelGroups
    inputs: tuple[Any, ...]
    name: str
    train: Batches | None
    val: Batches | None
    target: Target
    method: str
    options: Mapping[str, Any]
    settings: ExperimentSettings
    profiling: ProfileOptions
    refinement: RefinementOptions
    folder: RunFolder
    progress: bool = False
    say: Callable[[str], None] = field(default=lambda text: None)
    loss: Loss | None = None
    metric: Metric | None = None
    recovery: str = "refit"
    log: Log | None = None

    def with_cost(self, budget: Budget) -> Budget:
        """Return a measured budget with its cost model, profiled once; a counted budget as it is."""
        if not isinstance(budget, MeasuredBudget):
            return budget
        target = resolve_for(self.dense, self.inputs, budget.target or self.target)
        self.say(f"profiling on {target.title}")
        rules = rules_for(budget, self.profiling.rules)
        with Bar(self.progress) as bar:
            task = self._task(bar)
            source = self.profiling.source if budget.profile is None else budget.profile
            if source is None and self.folder.rows():  # more measurements would be another cost model
                source = task.store
            cost = fit_cost_model(
                task, target, rules, source=source, quantity=budget.key, counter=getattr(budget, "counter", None)
            )
        pin_cost(
            self.folder, cost, self.groups.sizes, f"cost-{slug(f'{budget.key} {target.title} {rules.statistic}')}.json"
        )
        return replace(budget, profile=cost)

    def constraints(self, budgets: Sequence[Budget]) -> list[Constraint]:
        """Return budgets of `with_cost` made concrete; one that cannot be met is refused."""
        return resolve_budgets(budgets, self._task(None), self.target)

    def allocate(self, id: str, budgets: Sequence[Budget], warm: nn.Module) -> Allocation:
        """Prune ``warm`` to budgets of `with_cost`; without epochs for it, the method leaves the weights alone.

        Args:
            id: Of the point.
            budgets: One or several.
            warm: The dense network, or what a larger limit made of it (`adapted`).

        Returns:
            The network with its certificate, which compares it with ``warm``.
        """
        s = self.settings
        rewind(self.train, self.val)
        learns = self.train is not None and s.epochs > 0
        return allocate(
            warm,
            list(budgets),
            example_inputs=self.inputs,
            train=self.train if learns else None,
            val=self.val,
            images=None if learns else self.train,
            loss=self.loss,
            metric=self.metric,
            recovery=self.recovery,
            target=self.target,
            method=self.method,
            options={**({"epochs": s.epochs} if learns else {}), **self.options},
            seed=s.seed,
            progress=self.progress,
            profiling=replace(self.profiling, source=None, time_limit=6 * s.reading, name=self.name),
            refinement=self.refinement,
            out=self.folder.unfinished(id, f"allocating from {weights_digest(warm)}"),
            log=self.log,
        )

    def finetune(self, id: str, result: Allocation) -> bool:
        """Fine-tune the network of a result in place, taught by the dense one; return whether anything was done."""
        s = self.settings
        if self.train is None or not s.finetune_epochs:
            return False
        train(
            result.model, self.train, s.finetune_epochs, s.finetune_lr, s, progress=self.progress,
            title=f"fine-tuning at {id}", folder=self.folder.unfinished(id, weights_digest(result.model)),
            loss=self.loss, teacher=self.dense,
        )  # fmt: skip
        return True

    def keep(self, id: str, result: Allocation, warm: nn.Module, **more: Any) -> dict[str, Any]:
        """Keep a finished network, the weights for the next one, and a row.

        Args:
            id: Of the point.
            result: Its network and certificate.
            warm: What it was allocated from.
            more: Further columns of the row.

        Returns:
            The row.
        """
        self.folder.keep(id, result.model)
        adapted = result.proposal.model if result.proposal is not None else warm
        self.folder.keep(f"{id} warm", adapted)
        result.current_plan().save(self._plan(id))
        tables = {name: table.to_json(orient="split") for name, table in _tables(result).items()}
        self.folder.write(self._about(id), {"recovery": result.recovery, **tables})
        entry = result.certificate.entries[0]
        row = {
            "id": id,
            "asked": str(Budget.from_dict({k: entry.budget[k] for k in ("kind", "amount")}).quantity),
            "limit": entry.limit,
            "predicted": entry.predicted,
            "measured": entry.measured,
            "low": entry.low,
            "high": entry.high,
            "dense": entry.dense,
            "utilisation": entry.utilisation,
            "verdict": str(entry.verdict),
            "measurements": result.certificate.measurements,
            "accuracy": None
            if result.quality.dense is None or not result.quality.value
            else result.quality.value.value,
            "plan": f"plans/{slug(id)}.json",
            "widths": {str(n): int(w) for n, w in result.widths.items()},
            **more,
        }
        self.folder.add(row)
        return row

    def adapted(self, id: str) -> nn.Module | None:
        """Return a network of the dense shapes with the weights that a finished point leaves for the next one."""
        kept = self.folder.weights(f"{id} warm")
        if kept is None:
            return None
        model = copy.deepcopy(self.dense)
        load_weights(model, kept["state_dict"], f"the network at {id}")
        return model

    def restored(self, id: str, budgets: Sequence[Budget]) -> Allocation:
        """Return a finished point as it was kept; it has no proposal.

        Args:
            id: Of the point.
            budgets: Its budgets, with their cost models.

        Raises:
            DsaError: Files of the point are missing or damaged.
        """
        plan, kept = Plan.load(self._plan(id)), self.folder.weights(id)
        about = self.folder.read(self._about(id))
        if kept is None or about is None:
            raise DsaError(f"Files of {id} are missing in {self.folder.path}. Delete its line in rows.jsonl.")
        small = shrink(self.dense, self.groups, [np.asarray(units) for units in plan.kept])
        load_weights(small, kept["state_dict"], f"the network at {id}")
        plan.check_network(small.eval(), self.inputs, f"{self.folder.path}, network {id}")
        widths = pd.Series(plan.widths, name="width")
        return Allocation(
            model=small,
            plan=plan,
            certificate=Certificate.from_dict(plan.certificate),
            widths=widths,
            keep_ratios=(widths / self.groups.sizes).rename("keep_ratio"),
            history=pd.read_json(io.StringIO(about["history"]), orient="split"),
            rounds=pd.read_json(io.StringIO(about["rounds"]), orient="split"),
            inputs=self.inputs,
            constraints=tuple(self.constraints(budgets)),
            recovery=str(about["recovery"]),
        )

    def _task(self, listener: Callable[[Any], None] | None) -> Task:
        profiling = replace(self.profiling, name=self.name)
        store = self.folder.path / "profile.sqlite"
        return Task(
            self.dense,
            self.groups,
            self.inputs,
            profiling,
            self.refinement.minimum,
            self.settings.seed,
            store,
            listener,
        )

    def _plan(self, id: str) -> Any:
        return self.folder.path / "plans" / f"{slug(id)}.json"

    def _about(self, id: str) -> str:
        return f"histories/{slug(id)}.json"


def _tables(result: Allocation) -> dict[str, pd.DataFrame]:
    return {"history": result.history, "rounds": result.rounds}
