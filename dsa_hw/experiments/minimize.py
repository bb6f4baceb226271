"""The lowest cost whose metric drops by at most a given amount: bisection over limits, each network certified.

A network passes if the upper end of the confidence interval of its drop is at most ``max_drop``: the inputs of both
networks are the same, so that differences are paired. Passing and failing networks bracket the lowest limit, and the
bracket is halved until it is as narrow as asked. A network that passes as it was recovered is not fine-tuned.

Several networks are judged, and one of them may pass by chance. With ``test``, the networks that passed on ``val`` are
judged on it from the largest cost down, up to the first that fails. Such a fixed sequence of tests is wrong about any
network with at most the error of a single test (Maurer, Hothorn and Lehmacher 1995). Without it, the error is divided
by the number of judgements (Bonferroni).
"""

from __future__ import annotations

import copy
import logging
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import torch
from pydantic import ConfigDict, Field
from scipy import stats
from torch import nn

import dsa_hw
from budgets import Budget
from budgets.budget import BUDGETS
from dsa_hw.channels import find_groups
from dsa_hw.errors import BudgetError, InfeasibleBudgetError, TrainingError
from dsa_hw.experiments.dense import Loaders, named_model, question_of, train_dense
from dsa_hw.experiments.front import Front, SweepRowDocument
from dsa_hw.experiments.report import About, flops_share, plots, write_minimum
from dsa_hw.experiments.run_folder import RunFolder
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.methods.problem import Batches, Loss
from dsa_hw.methods.registry import check_method
from dsa_hw.methods.rounding import narrowest
from dsa_hw.pipeline.allocate import check_budgets
from dsa_hw.pipeline.constraints import common_grid, cost_set
from dsa_hw.pipeline.example_inputs import example_for
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.quality import ACCURACY, Metric, Quality, Source, measure_quality
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.pipeline.recovering import check_level
from dsa_hw.pipeline.result import Allocation
from dsa_hw.training.fingerprints import check_loader
from dsa_hw.utils.files import only_process, write_text
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.modules import check_finite_weights
from dsa_hw.utils.numbers import check_share
from dsa_hw.utils.random_state import random_state_kept
from dsa_hw.utils.records import Log, recorder
from dsa_hw.utils.text import percent, unknown_name
from profilers.profiling.schemes import resolve_for
from profilers.targets import resolve

if TYPE_CHECKING:
    from profilers.targets import Target

__all__ = ["Minimum", "MinimumRowDocument", "minimize", "next_share"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Minimum(Allocation):
    """The network of the lowest cost that was found; an `Allocation` whose certificate has ``max_drop`` too.

    Attributes:
        front: A row for each network that was tried, from the largest limit down: limit, measured cost with its
            interval, drop of the metric with its interval, whether it passes, epochs of fine-tuning.
    """

    front: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __repr__(self) -> str:
        """Return the lines of an allocation, and how many networks were tried."""
        passed, trained = int(self.front["passes"].sum()), int((self.front["epochs"] > 0).sum())
        tried = f"{len(self.front)} limit(s) tried, {passed} with a small enough drop, {trained} network(s) fine-tuned"
        return f"{super().__repr__()}\n  {tried}"


def minimize(
    model: nn.Module,
    cost: str | Budget,
    max_drop: str | float,
    *,
    val: Batches,
    train: Batches | None = None,
    test: Batches | None = None,
    budgets: Budget | Sequence[Budget] = (),
    example_inputs: Any = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    recovery: str = "refit",
    target: str | Target = "onnxruntime/cpu",
    method: str = "dsa",
    options: Mapping[str, Any] | None = None,
    tolerance: float = 0.02,
    most: int = 6,
    confidence: float = 0.95,
    settings: ExperimentSettings | None = None,
    profiling: ProfileOptions | None = None,
    refinement: RefinementOptions | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    listener: Callable[[str], None] | None = None,
    log: Log | None = None,
    command: str = "",
) -> Minimum:
    """Return the network of the lowest cost whose metric drops by at most ``max_drop``, certified for both.

    Args:
        model: The trained dense network; not changed.
        cost: What to minimise: "latency", "energy", "estimated_energy", "flops", "params", "memory", or a budget, whose
            options hold and whose amount is not exceeded, such as ``LatencyBudget("5ms", quantile=0.95)``.
        max_drop: The largest drop of the metric: "1%" or 0.01 is one percentage point of accuracy.
        val: Loader of (inputs, targets): for the keep ratios, and to judge each network.
        train: Loader of (inputs, targets) for training. None recovers weights on ``val`` and trains nothing.
        test: Loader of (inputs, targets) that nothing else has seen, for the certificate. None uses ``val``, with wider
            intervals.
        budgets: Further limits that every network keeps.
        example_inputs: A tensor or a tuple of tensors; None takes them from the first batch of a loader, or infers
            them from the first layer.
        loss: ``loss(outputs, targets)``, a scalar; None is the cross entropy.
        metric: ``metric(outputs, targets)``, a score for each input or one for the batch, more is better. None is the
            accuracy.
        recovery: See `dsa_hw.allocate`.
        target: Where measured costs hold that name no target.
        method: Name of the method.
        options: Settings of the method.
        tolerance: How far the lowest limit that passes may be from the highest that fails, as a share of the dense
            cost.
        most: Networks to try, at most.
        confidence: Of the interval of the drop.
        settings: How networks are trained: ``epochs`` while the method allocates (0 leaves the weights alone),
            ``finetune_epochs`` for a network that does not pass without. ``train_epochs`` trains the dense network
            first.
        profiling: How cost models are obtained; each is measured once.
        refinement: How keep ratios become a network.
        out: Folder for the result and everything that was measured and trained, so that the same call continues after
            an interruption.
        progress: Whether to show progress bars on a terminal.
        listener: Called with a line of text for each step.
        log: Called with a dict for each network that was tried (stage "limits"), beside the dicts that
            `dsa_hw.allocate` makes for each of them.
        command: The command line, for the page.

    Returns:
        The network, its plan, its certificate and the networks that were tried.

    Raises:
        BudgetError: ``max_drop`` is too small for the number of inputs, or a limit cannot be used.
        InfeasibleBudgetError: No network that was tried is within ``max_drop``.

    Example:
        >>> import dsa_hw, torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten()).eval()
        >>> images = torch.randn(400, 3, 6, 6)
        >>> val = [(images, model(images).argmax(1))]
        >>> found = dsa_hw.minimize(
        ...     model, "flops", "60%", example_inputs=images[:1], val=val, method="uniform", most=2, progress=False
        ... )
        >>> str(found.certificate.verdict), found.quality.drop.high <= 0.6
        ('MET', True)
    """
    asked = _budget(cost)
    limits = check_budgets(budgets) if isinstance(budgets, Budget) or list(budgets) else []
    for other in limits:
        if type(other) is type(asked) and getattr(other, "quantile", None) == getattr(asked, "quantile", None):
            raise BudgetError(f"`budgets` limits the cost that is minimised ({other}). Give it as `cost` instead.")
    drop = _drop(max_drop)
    check_share(tolerance, "tolerance", BudgetError, strict=True)
    check_share(confidence, "confidence", BudgetError, strict=True)
    if confidence < 0.5:
        raise BudgetError(f"`confidence` must be at least 0.5; got {confidence!r}.")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise BudgetError(f"`most` must be a whole number from 1; got {most!r}.")
    check_method(method)
    check_level(recovery)
    folder = None if out is None else as_path(out, "out")
    with tempfile.TemporaryDirectory() as spare, random_state_kept(), only_process(folder):
        search = _Search(
            model, asked, limits, drop, Loaders("the training data", train, val, test), tolerance, most, confidence,
            settings or ExperimentSettings(), profiling or ProfileOptions(), refinement or RefinementOptions(),
            folder or Path(spare), listener or (lambda text: None), example_inputs, resolve(target),
            method=method, options=dict(options or {}), progress=progress, loss=loss, metric=metric, recovery=recovery,
            log=recorder(log),
        )  # fmt: skip
        found = search.run()
        if folder is not None:
            found.save(folder)
            front = search.front
            about = About(front.name, front.target.title, found.certificate.date, dsa_hw.__version__, command)
            share = flops_share(front.groups, found.widths)
            write_minimum(found, found.front, asked, share, about, folder / "index.html")
        return found


def next_share(tried: Mapping[float, bool], least: float, top: float, tolerance: float, known: bool) -> float | None:
    """Return the next limit to try, as a share of the dense cost; None if there is none.

    >>> next_share({}, 0.2, 1.0, 0.02, known=True)  # the dense network itself passes
    0.6
    >>> next_share({0.6: False, 0.8: True}, 0.2, 1.0, 0.02, known=True)
    0.7

    Args:
        tried: Whether each limit that was tried passes.
        least: The smallest limit that can be met.
        top: The largest limit.
        tolerance: Width of the bracket that is narrow enough.
        known: Whether ``top`` passes without a trial, because it is the dense network.
    """
    passing = [share for share, passes in tried.items() if passes]
    if not passing and not known:
        return None if tried else top
    high = min(passing, default=top)
    low = max((share for share, passes in tried.items() if share < high and not passes), default=least)
    return round((low + high) / 2, 3) if high - low > tolerance else None


class MinimumRowDocument(SweepRowDocument):
    """A network that a minimisation tried.

    Attributes:
        share: Its limit, as a share of the dense network's cost.
        drop: Of the metric, with its interval from ``drop_low`` to ``drop_high``; null is an end that is not bounded.
        passes: Whether the drop is within its limit.
        epochs: Of fine-tuning.
    """

    model_config = ConfigDict(title="dsa_hw minimum row")

    share: Annotated[float, Field(gt=0)]
    drop: float
    drop_low: float | None
    drop_high: float | None
    passes: bool
    epochs: Annotated[float, Field(ge=0)]


class _Search:
    """One minimisation, step by step."""

    def __init__(
        self,
        model: nn.Module,
        cost: Budget,
        limits: list[Budget],
        max_drop: float,
        loaders: Loaders,
        tolerance: float,
        most: int,
        confidence: float,
        settings: ExperimentSettings,
        profiling: ProfileOptions,
        refinement: RefinementOptions,
        out: Path,
        say: Callable[[str], None],
        example_inputs: Any,
        target: Target,
        **more: Any,
    ) -> None:
        self.cost, self.limits, self.max_drop, self.loaders = cost, limits, max_drop, loaders
        self.tolerance, self.most, self.confidence = tolerance, most, confidence
        # A network is judged as it was recovered and, if it does not pass, again after fine-tuning.
        looks = most * (2 if loaders.train is not None and settings.finetune_epochs else 1)
        self.level = confidence if loaders.test is not None else 1 - (1 - confidence) / looks
        torch.manual_seed(settings.seed)
        dense, name, example = named_model(model, profiling.name, None, example_inputs)
        check_finite_weights(dense, "the dense network")
        data = {part: getattr(loaders, part) for part in ("train", "val", "test")}
        inputs = example_for(dense, example, data)
        target = resolve_for(dense, inputs, target)
        for part, loader in data.items():
            check_loader(dense, loader, part)
        folder = RunFolder(
            out,
            question_of(
                data, what="minimize", model=name, weights=dict(dense.state_dict()), cost=cost.to_dict(),
                max_drop=max_drop, budgets=[b.to_dict() for b in limits], confidence=confidence, level=self.level,
                inputs=[[str(x.dtype), *x.shape] for x in inputs], target=target.title, samples=profiling.samples,
                holdout=profiling.holdout, grid=profiling.grid, refinement=asdict(refinement), **settings.question(),
                **{key: more[key] for key in ("method", "options", "loss", "metric", "recovery")},
            ),
            MinimumRowDocument,
        )  # fmt: skip
        if folder.rows():
            _log.warning("Continuing an earlier search: %d networks are finished in %s.", len(folder.rows()), out)
        self.front = Front(
            dense, find_groups(dense, inputs), inputs, name, loaders.train, loaders.val, target, settings=settings,
            profiling=profiling, refinement=refinement, folder=folder, say=say, **more,
        )  # fmt: skip

    def run(self) -> Minimum:
        """Profile, try limits until the bracket is narrow, and certify the best network."""
        front = self.front
        # First, as nothing but the number of inputs decides: the dense network is compared with itself.
        self._check_inputs(self.loaders.val, "validation data", self.level)
        if self.loaders.test is not None:
            self._check_inputs(self.loaders.test, "test data", self.confidence)
        if front.train is not None and front.settings.train_epochs:
            data = replace(self.loaders, test=None)
            train_dense(
                front.folder, front.dense, data, front.settings, progress=front.progress, say=front.say, loss=front.loss
            )
        self.cost, *self.limits = [front.with_cost(budget) for budget in (self.cost, *self.limits)]
        least, top = self._range()
        known = top >= 1 and not self.limits
        tried: dict[float, bool] = {}
        while len(tried) < self.most:
            share = next_share(tried, least, top, self.tolerance, known)
            if share is None:
                break
            tried[share] = self._passes(share, len(tried) + 1)
        passed = [self._restored(share) for share, passes in tried.items() if passes]
        if not passed:
            raise self._infeasible(list(tried))
        return self._certified(passed, list(tried))

    def _range(self) -> tuple[float, float]:
        """Return the smallest and the largest limit as shares of the dense cost."""
        constraints = self.front.constraints([self.cost, *self.limits])
        sizes = self.front.groups.sizes
        costs = cost_set(constraints, sizes)
        small = narrowest(sizes, common_grid(constraints, len(sizes)), self.front.refinement.minimum)
        return float(costs.at_widths(small)[0] / costs.dense[0]), constraints[0].limit / constraints[0].dense

    def _budgets(self, share: float) -> list[Budget]:
        return [replace(self.cost, amount=f"{100 * share:.10g}%"), *self.limits]

    def _passes(self, share: float, number: int) -> bool:
        """Prune to a limit, judge, fine-tune if that is needed, judge again; or look up what was kept."""
        front, id = self.front, _id(share)
        row = front.folder.rows().get(id)
        if row is None:
            budgets = self._budgets(share)
            front.say(f"[{number} of at most {self.most}] {', '.join(map(str, budgets))}")
            warm = self._neighbour(share)
            try:
                result = front.allocate(id, budgets, warm)
            except InfeasibleBudgetError as error:
                front.say(str(error))
                return False
            result, epochs = self._judged(result), 0.0
            if not _passes(result.quality) and front.finetune(id, result):
                result, epochs = self._judged(result), front.settings.finetune_epochs
            drop = result.quality.drop
            assert drop is not None
            row = front.keep(
                id, result, warm, share=share, drop=drop.value, drop_low=drop.low, drop_high=drop.high,
                passes=_passes(result.quality), epochs=epochs,
            )  # fmt: skip
            front.say(str(result.quality))
        if front.log is not None:
            front.log({"stage": "limits", "step": number, **{k: v for k, v in row.items() if k != "widths"}})
        return bool(row["passes"])

    def _judged(self, result: Allocation) -> Allocation:
        return result.assess(
            self.front.dense, self.loaders.val, metric=self.front.metric, max_drop=self.max_drop, confidence=self.level
        )

    def _neighbour(self, share: float) -> nn.Module:
        """Return the weights that the next larger limit adapted, or the dense network."""
        larger = [row for row in self.front.folder.rows().values() if row["share"] > share]
        nearest = min(larger, key=lambda row: float(row["share"]), default=None)
        found = None if nearest is None else self.front.adapted(nearest["id"])
        return copy.deepcopy(self.front.dense) if found is None else found

    def _restored(self, share: float) -> Allocation:
        return self.front.restored(_id(share), self._budgets(share))

    def _certified(self, passed: list[Allocation], shares: Sequence[float]) -> Minimum:
        """Return the network of the lowest cost; with test data, the last that passes from the largest cost down."""
        # Relative to the dense network in the same run: absolute times drift between sittings.
        passed = sorted(passed, key=lambda a: -a.certificate.entries[0].measured / a.certificate.entries[0].dense)
        best = passed[-1]
        if self.loaders.test is not None:
            for number, candidate in enumerate(passed):
                judged = candidate.assess(
                    self.front.dense, self.loaders.test, metric=self.front.metric, max_drop=self.max_drop,
                    source="test data", confidence=self.confidence,
                )  # fmt: skip
                if number == 0 or _passes(judged.quality):
                    best = judged
                if not _passes(judged.quality):
                    break
        parts = {f.name: getattr(best, f.name) for f in fields(Allocation)}
        return Minimum(**parts, front=self._table(shares))

    def _table(self, shares: Sequence[float]) -> pd.DataFrame:
        rows = self.front.folder.rows()
        found = [rows[_id(share)] for share in sorted(shares, reverse=True) if _id(share) in rows]
        table = pd.DataFrame([{k: v for k, v in row.items() if k not in ("id", "widths")} for row in found])
        table["accuracy"] = table["accuracy"].astype(float)
        path = self.front.folder.path
        write_text(path / "front.csv", table.to_csv(index=False))
        unit = "s" if self.cost.dimension == "time" else self.cost.dimension
        plots.save(plots.front(table, self.cost.title, unit, "validation"), path / "front.png")
        return table

    def _check_inputs(self, data: Batches, source: Source, confidence: float) -> None:
        """Refuse data on which not even the dense network itself could be shown to be within the drop."""
        front = self.front
        found = measure_quality(
            front.dense, front.dense, data, source=source, metric=front.metric, max_drop=self.max_drop,
            confidence=confidence,
        )  # fmt: skip
        if found.drop is None:
            why = found.reason or "its targets are not classes"
            raise TrainingError(f"The metric is not known on the {source}: {why}. Give (inputs, targets), or `metric`.")
        if found.drop.high > self.max_drop:
            needed = ""
            if found.measure == ACCURACY and self.max_drop > 0:
                normal = float(stats.norm.ppf(0.5 + confidence / 2))
                needed = f" at least {math.ceil(normal * math.sqrt(2) / self.max_drop) - 2} inputs,"
            raise BudgetError(
                f"{found.inputs} inputs ({source}) cannot show a drop of at most {_said(found, self.max_drop)}: the "
                f"{100 * confidence:.3g}% interval of two equal networks reaches {_said(found, found.drop.high)}. Give"
                f"{needed} a larger `max_drop`, or less `confidence`."
            )

    def _infeasible(self, shares: Sequence[float]) -> InfeasibleBudgetError:
        rows = self.front.folder.rows()
        known = [rows[_id(share)] for share in shares if _id(share) in rows]
        best = min(known, key=lambda row: math.inf if row["drop_high"] is None else row["drop_high"], default=None)
        tried = "" if best is None else (
            f" The smallest drop has {best['asked']} of the dense {self.cost.title}: {best['drop']:.4g}, "
            f"at most {best['drop_high']:.4g}."
        )  # fmt: skip
        return InfeasibleBudgetError(
            f"None of the {len(shares)} networks that were tried has a drop of at most {self.max_drop:.4g} with "
            f"{100 * self.level:.3g}% confidence.{tried} Train longer, give more inputs, or allow a larger drop."
        )


def _id(share: float) -> str:
    return f"{100 * share:.1f}%"


def _passes(quality: Quality) -> bool:
    return quality.verdict == Verdict.MET


def _said(quality: Quality, drop: float) -> str:
    return percent(drop, 2) if quality.measure == ACCURACY else f"{drop:.4g}"


def _budget(cost: Any) -> Budget:
    if isinstance(cost, Budget):
        return cost
    if not isinstance(cost, str):
        raise BudgetError(f"`cost` must be the name of a cost, such as 'latency', or a Budget; got {cost!r}.")
    if cost not in BUDGETS:
        raise BudgetError(unknown_name("cost", cost, BUDGETS))
    return BUDGETS[cost]("100%")


def _drop(value: Any) -> float:
    """Return the largest drop as a number.

    >>> _drop("1%"), _drop(0.5)
    (0.01, 0.5)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", value)
        number = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    else:
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise BudgetError(f"`max_drop` must be a percentage such as '1%' or a number from 0; got {value!r}.")
    return number
