"""Sweep a budget: the front of what is possible, from one profile and warm-started allocations, each point certified.

    dsa_hw.sweep(model, [LatencyBudget(f"{p}%") for p in (90, 70, 50, 30)], data="digits", out="front")

From the largest budget down: each allocation starts from the weights that the one before has adapted, which have
already learnt to live with fewer channels. A budget that cannot be kept ends the front and does not undo it.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import nn

from budgets.budget import CountedBudget
from dsa_hw.channels import find_groups
from dsa_hw.errors import BudgetError, InfeasibleBudgetError
from dsa_hw.experiments.run_folder import Workshop, digest, rewind, slug, train, train_dense
from dsa_hw.experiments.settings import Settings
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.constraints import Work, learn
from dsa_hw.pipeline.example_inputs import example_for
from dsa_hw.pipeline.meters import rules_for
from dsa_hw.training.fingerprints import fingerprint_data
from dsa_hw.training.metrics import correct_predictions
from dsa_hw.utils.progress import Bar

if TYPE_CHECKING:
    from budgets import Budget, CostModel
    from dsa_hw.pipeline.result import Allocation
    from dsa_hw.zoo.data import Data
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["sweep"]


def sweep(
    model: str | nn.Module,
    budgets: Sequence[Budget],
    *,
    data: str | Data | None = None,
    example_inputs: Any = None,
    target: str | Target = "onnxruntime/cpu",
    method: str = "dsa",
    settings: Settings | None = None,
    out: str | Path | None = None,
    name: str | None = None,
    rules: MeasuringRules | None = None,
    options: dict[str, Any] | None = None,
    progress: bool = False,
    listener: Callable[[str], None] | None = None,
    **more: Any,
) -> pd.DataFrame:
    """A row per budget, from the largest down: limit, predicted, measured, interval, utilisation, verdict, accuracy.

    Args:
        model: a name (random weights: give ``train_epochs`` and ``data``) or a module with its weights.
        budgets: several of one kind.
        data: a name or a ``dsa_hw.zoo.data.Data``; without it, made-up inputs guide the choice and no accuracy is
        known. target, rules: where and by which rules latency is measured.
        method, options: how keep ratios are found.
        settings: see ``dsa_hw.experiments.run_folder.Settings``; single ones can be given by name (``epochs=2``).
        out: folder for everything, continued where it exists: ``front.csv``, ``front.png``, ``plans/``, ``networks/``.

    Costs are in base units (s, FLOPs, ...). ``attrs["widths"]``: budget -> group -> width. ``attrs["infeasible"]``:
    budget -> why it cannot be kept; such a budget has no row. Raises ``InfeasibleBudgetError`` where none can be kept.
    """
    if not budgets:
        raise BudgetError("no budget to sweep over: give several, for example latency=30%..90%:7")
    if len({type(b) for b in budgets}) > 1:
        raise BudgetError(f"a sweep is over one kind of budget; found {', '.join(sorted({b.title for b in budgets}))}")
    chosen = Settings(**{**asdict(settings or Settings()), **more})
    with tempfile.TemporaryDirectory() as spare:
        job = _Sweep(
            model, list(budgets), data, example_inputs, target, method, chosen, Path(out or spare), name, rules,
            options or {}, progress, listener or (lambda text: None),
        )  # fmt: skip
        return job.run()


class _Sweep:
    """One sweep, step by step."""

    def __init__(
        self,
        model: str | nn.Module,
        budgets: list[Budget],
        data: str | Data | None,
        example_inputs: Any,
        target: str | Target,
        method: str,
        settings: Settings,
        out: Path,
        name: str | None,
        rules: MeasuringRules | None,
        options: dict[str, Any],
        progress: bool,
        say: Callable[[str], None],
    ) -> None:
        from dsa_hw.zoo import data as datasets
        from dsa_hw.zoo import models
        from profilers.targets import resolve

        self.data = datasets.load_data(data, seed=settings.seed) if isinstance(data, str) else data
        self.settings, self.method, self.options, self.rules = settings, method, options, rules
        self.progress, self.say, self.target = progress, say, resolve(target)
        torch.manual_seed(settings.seed)
        shape = self.data.shape if self.data else None
        example: Any
        if isinstance(model, str):
            self.name, (self.dense, example) = name or model, models.load_model(model, shape)
        else:
            self.name, self.dense, example = name or type(model).__name__, copy.deepcopy(model), example_inputs
            if example is None and shape is not None:
                example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.inputs = example_for(self.dense, example)
        question = {
            "what": "sweep", "model": self.name, "weights": digest(self.dense), "kind": budgets[0].key,
            "method": method, "data": self.data.name if self.data else None, "target": self.target.title,
            "contents": fingerprint_data(self.data.train, self.data.val, self.data.test) if self.data else None,
            **settings.question(),
            "options": options,
        }  # fmt: skip
        self.shop = Workshop(out, question)
        self.budgets = budgets

    def run(self) -> pd.DataFrame:
        """Train, profile, allocate from the largest budget down."""
        if self.data is not None:
            train_dense(self.shop, self.dense, self.data, self.settings, self.progress, self.say)
        cost = self._cost()
        warm = copy.deepcopy(self.dense)
        ordered = {
            str(budget.quantity).replace(" ", ""): budget
            for budget in sorted(self.budgets, key=lambda b: -b.quantity.magnitude)
        }
        infeasible: dict[str, str] = {}
        for number, (id, budget) in enumerate(ordered.items(), 1):
            kept = self.shop.weights(f"{id} warm")
            if id in self.shop.rows() and kept is not None:
                warm.load_state_dict(kept["state_dict"])
                continue
            self.say(f"[{number}/{len(ordered)}] {budget}")
            try:
                warm = self._point(id, budget, warm, cost)
            except InfeasibleBudgetError as error:
                if number == 1:
                    raise  # the largest: nothing is left of the front
                infeasible[str(budget.quantity)] = str(error)
        return self._table([id for id in ordered if id in self.shop.rows()], infeasible)

    def _cost(self) -> CostModel | None:
        """One profile for all points; None where the cost is counted."""
        budget = self.budgets[0]
        if isinstance(budget, CountedBudget):
            return None
        s = self.settings
        self.say(f"profiling on {self.target.title}")
        with Bar(self.progress) as bar:
            work = Work(
                self.dense, find_groups(self.dense, self.inputs), self.inputs, self.shop.path / "profile.sqlite",
                self.rules, s.samples, s.holdout, time_limit=s.time_limit, seed=s.seed, minimum=s.minimum,
                name=self.name, listener=bar,
            )  # fmt: skip
            source = getattr(budget, "profile", None)
            counter = getattr(budget, "counter", None)
            return learn(source, work, self.target, rules_for(budget, self.rules), budget.key, counter)

    def _point(self, id: str, budget: Budget, warm: nn.Module, cost: CostModel | None) -> nn.Module:
        s, data = self.settings, self.data
        if data is not None:
            rewind(data.train, data.val)
        result: Allocation = allocate(
            warm, budget, example_inputs=self.inputs, train=data.train if data else None,
            val=data.val if data else None, target=self.target, profile=cost, method=self.method,
            epochs=s.epochs if data else None, seed=s.seed,
            progress=self.progress, rules=self.rules, options=self.options, minimum=s.minimum, name=self.name,
            time_limit=6 * s.reading,
        )  # fmt: skip
        accuracy = math.nan
        if data is not None:
            if s.finetune_epochs:
                train(
                    result.model, data.train, s.finetune_epochs, s.finetune_lr, s, self.progress, f"fine-tuning at {id}"
                )
            accuracy = float(correct_predictions(result.model, data.test).mean())
        adapted = result.proposal.model if result.proposal is not None else warm
        self.shop.keep(id, result.model)
        self.shop.keep(f"{id} warm", adapted)
        result.plan.save(self.shop.path / "plans" / f"{slug(id)}.json")
        entry = result.certificate.entries[0]
        self.shop.add(
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
                "verdict": entry.verdict,
                "measurements": result.certificate.measurements,
                "accuracy": None if math.isnan(accuracy) else accuracy,
                "plan": f"plans/{slug(id)}.json",
                "widths": {str(n): int(w) for n, w in result.widths.items()},
            }
        )
        return adapted

    def _table(self, ids: Sequence[str], infeasible: dict[str, str]) -> pd.DataFrame:
        from dsa_hw.experiments.report import plots

        rows = [self.shop.rows()[id] for id in ids]
        frame = pd.DataFrame([{k: v for k, v in row.items() if k not in ("id", "widths")} for row in rows])
        frame["accuracy"] = frame["accuracy"].astype(float)
        frame.to_csv(self.shop.path / "front.csv", index=False)
        unit = "s" if self.budgets[0].dimension == "time" else self.budgets[0].dimension
        plots.save(plots.front(frame, self.budgets[0].title, unit), self.shop.path / "front.png")
        widths = {row["asked"]: row["widths"] for row in rows}
        frame.attrs = {"widths": widths, "infeasible": infeasible, "target": self.target.title}
        return frame
