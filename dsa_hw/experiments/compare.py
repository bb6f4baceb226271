"""Compare budgets: what would a FLOPs budget have given in place of a latency budget, on this device, with this data?

One dense network and one profile; for every budget and method an allocation, surgery and fine-tuning, by the pipeline
of `dsa_hw.allocate`. Then each FLOPs-budget network is brought to the measured latency of the latency-budget network
(`dsa_hw.experiments.equal_latency`). At the end all networks are measured in one interleaved session.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import ConfigDict, Field
from torch import nn

import budgets as cost_models
from budgets import Budget, LatencyBudget
from budgets.budget import CountedBudget
from dsa_hw.channels import find_groups, shrink
from dsa_hw.channels.plan import Plan
from dsa_hw.channels.reference_output import Sha256
from dsa_hw.errors import BudgetError, DsaError, MeasurementError, ModelError
from dsa_hw.experiments.dense import named_data, named_model, pin_cost, question_of, rewind, train, train_dense
from dsa_hw.experiments.equal_latency import match_latency
from dsa_hw.experiments.report import write
from dsa_hw.experiments.report.collect import ReportInputs, collect
from dsa_hw.experiments.run_folder import RunFolder, RunRowDocument, Share, slug
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.methods.checkpoint import solve_or_resume
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, Proposal, Realised, realise
from dsa_hw.methods.registry import check_method
from dsa_hw.pipeline.allocate import as_problem, check_budgets
from dsa_hw.pipeline.constraints import Constraint, resolve_budgets
from dsa_hw.pipeline.cost_models import Task, profile_for
from dsa_hw.pipeline.meters import DENSE, DeviceMeter, rules_for
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.reading import Reading, Verdict, judge
from dsa_hw.pipeline.recovering import recover_network
from dsa_hw.pipeline.refinement import best_candidate, find_network
from dsa_hw.pipeline.result import file_digest
from dsa_hw.pipeline.unlabelled import unlabelled_set
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.metrics import correct_predictions
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.documents import Line
from dsa_hw.utils.files import only_process, write_text
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.modules import check_finite_weights, load_weights, weights_digest
from dsa_hw.utils.progress import Bar
from dsa_hw.utils.random_state import random_state_kept
from dsa_hw.utils.text import one_line
from profilers.profiling.schemes import resolve_for
from profilers.targets import resolve

if TYPE_CHECKING:
    from dsa_hw.zoo.data import Data
    from profilers.targets import Target

__all__ = ["ComparisonRowDocument", "compare"]

_log = logging.getLogger(__name__)

_CLOSE = 0.01  # latencies nearer than this are equal enough to stop measuring
_MOST = 4  # measurements for one network that is brought to equal latency


def compare(
    model: str | nn.Module,
    data: str | Data,
    budgets: Sequence[Budget],
    *,
    target: str | Target = "onnxruntime/cpu",
    methods: Sequence[str] | Mapping[str, Sequence[str]] = ("dsa", "uniform"),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: ExperimentSettings | None = None,
    profiling: ProfileOptions | None = None,
    refinement: RefinementOptions | None = None,
    out: str | Path | None = None,
    equal: bool = True,
    progress: bool = False,
    listener: Callable[[str], None] | None = None,
    command: str = "",
) -> pd.DataFrame:
    """Compare budgets and methods on one network, with measured latencies and accuracies.

    Args:
        model: A name (`dsa_hw.zoo.models`; the weights are random, so set ``settings.train_epochs``) or a module.
        data: A name, or a `dsa_hw.zoo.data.Data`.
        budgets: Budgets of any kind, several of one kind for a front.
        target: Where latency is measured.
        methods: Names of methods, or names by kind of budget ("latency", "flops", ...).
        options: Settings of the methods, by method.
        settings: How networks are trained and measured.
        profiling: How the cost model is obtained.
        refinement: How keep ratios become a network.
        out: Folder for everything, continued where it exists; its ``index.html`` is the report. None keeps nothing.
        equal: Whether to bring the FLOPs-budget networks to the measured latency of the latency-budget networks.
        progress: Whether to show progress bars on a terminal.
        listener: Called with a line of text for each step.
        command: The command line, for the report.

    Returns:
        A row for each budget and method, with the columns of ``dsa_hw.experiments.report.findings.COLUMNS`` and the
        ``verdict``. ``attrs["widths"]`` maps id to group to width, ``attrs["report"]`` is the page.

    Raises:
        BudgetError: There is no budget or no method, or a latency budget is on another target.
        InfeasibleBudgetError: A budget cannot be met; raised before anything is allocated.
        MeasurementError: Latencies cannot be trusted; what was trained stays in ``out``.
    """
    folder = None if out is None else as_path(out, "out")
    with tempfile.TemporaryDirectory() as spare, random_state_kept(), only_process(folder):
        run = _ComparisonRun(
            model, data, list(budgets), resolve(target), methods, dict(options or {}),
            settings or ExperimentSettings(), profiling or ProfileOptions(), refinement or RefinementOptions(),
            folder or Path(spare), progress, listener or (lambda text: None), command,
        )  # fmt: skip
        table = run.run(equal)
        if out is None:
            table.attrs.pop("report")
        return table


class ComparisonRowDocument(RunRowDocument):
    """A finished network of a comparison.

    Attributes:
        kind: The key of its budget.
        asked: The amount of its budget.
        method: The method that allocated it.
        matches: The id of the network whose latency it was brought to; "" for others.
        limit: The limit in base units.
        verdict: Of its own measurement; "" where it was brought to the latency of another one.
        accuracy_before: On the test images, before fine-tuning.
        accuracy: After it.
        epochs: Of training after the dense network.
        weights: SHA-256 of the weights in ``networks/``.
        alpha: Keep ratios that were proposed.
        widths: Width of each channel group.
        history: SHA-256 of its file in ``histories/``; null where there is none.
    """

    model_config = ConfigDict(title="dsa_hw comparison row", extra="forbid")

    kind: Line
    asked: Line
    method: Line
    matches: Line
    limit: Annotated[float, Field(gt=0)] | None
    verdict: Verdict | Literal[""]
    accuracy_before: Share
    accuracy: Share
    epochs: float = Field(ge=0)
    weights: Sha256
    alpha: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)
    widths: dict[str, Annotated[int, Field(ge=1)]] = Field(min_length=1)
    history: Sha256 | None


class _ComparisonRun:
    """One comparison, step by step."""

    def __init__(
        self,
        model: str | nn.Module,
        data: str | Data,
        budgets: list[Budget],
        target: Target,
        methods: Sequence[str] | Mapping[str, Sequence[str]],
        options: dict[str, Mapping[str, Any]],
        settings: ExperimentSettings,
        profiling: ProfileOptions,
        refinement: RefinementOptions,
        out: Path,
        progress: bool,
        say: Callable[[str], None],
        command: str,
    ) -> None:
        budgets = check_budgets(list(budgets))
        methods = [methods] if isinstance(methods, str) else methods
        if not methods:
            raise BudgetError(f"Give at least one method; got {methods!r}.")
        self.wanted = [
            (i, method)
            for i, budget in enumerate(budgets)
            for method in (methods.get(budget.key, ()) if isinstance(methods, Mapping) else methods)
        ]
        for _, method in self.wanted:
            check_method(method)
        for budget in budgets:
            if isinstance(budget, LatencyBudget) and budget.target and resolve(budget.target).title != target.title:
                raise BudgetError(f"{budget}: a comparison measures latency on one target, {target.title}.")
        self.budgets, self.options = budgets, options
        self.settings, self.profiling, self.refinement = settings, profiling, refinement
        self.progress, self.say, self.command = progress, say, command
        timed = next((b for b in budgets if isinstance(b, LatencyBudget)), LatencyBudget("50%"))
        self.rules = rules_for(timed, profiling.rules)
        found = named_data(data, settings.seed)
        assert found is not None
        self.data = found
        torch.manual_seed(settings.seed)
        self.dense, self.name, _ = named_model(model, profiling.name, found)
        check_finite_weights(self.dense, "the dense network")
        if found.shape is None:
            raise ModelError(f"The loaders of {found.name} must yield (inputs, targets) with a tensor of inputs.")
        inputs = (torch.randn(found.shape, generator=torch.Generator().manual_seed(0)),)
        self.target = target = resolve_for(self.dense, inputs, target)
        self.folder = RunFolder(
            out,
            question_of(
                {"train": found.train, "val": found.val, "test": found.test}, what="comparison", model=self.name,
                weights=dict(self.dense.state_dict()), data=found.name, target=target.title,
                statistic=self.rules.statistic, samples=profiling.samples, holdout=profiling.holdout,
                grid=profiling.grid, refinement=asdict(refinement), **settings.question(),
                options={m: dict(o) for m, o in options.items()},
            ),
            ComparisonRowDocument,
        )  # fmt: skip
        if self.folder.rows():
            finished = len(self.folder.rows())
            _log.warning("Continuing an earlier comparison: %d networks are finished in %s.", finished, out)
        self.groups = find_groups(self.dense, inputs)
        self._check_rows()
        self.task = Task(
            self.dense, self.groups, inputs, replace(profiling, name=self.name), refinement.minimum, settings.seed,
            self.folder.path / "profile.sqlite",
        )  # fmt: skip
        self.meter = DeviceMeter(target, inputs, self.rules, settings.seed)

    def _check_rows(self) -> None:
        """Refuse finished networks that cannot be of this network, though the settings are the same."""
        sizes = dict(zip(self.groups.names, self.groups.sizes.tolist(), strict=True))
        for id, row in self.folder.rows().items():
            narrow = row["widths"].keys() == sizes.keys() and all(w <= sizes[n] for n, w in row["widths"].items())
            if not narrow or len(row["alpha"]) != len(sizes):
                raise DsaError(
                    f"The widths or keep ratios of {one_line(id, 60)!r} in {self.folder.path} are not of this network. "
                    "Delete its line in rows.jsonl."
                )

    def run(self, equal: bool) -> pd.DataFrame:
        """Train, profile, allocate, bring to equal latency, measure, report."""
        # Counted budgets are checked before anything is trained or measured.
        resolve_budgets([b for b in self.budgets if isinstance(b, CountedBudget)], self.task, None)
        train_dense(self.folder, self.dense, self.data, self.settings, progress=self.progress, say=self.say)
        self._profile()
        constraints = self._constraints()
        ids = [DENSE]
        for number, (i, method) in enumerate(self.wanted, 1):
            id = self._id(i, method)
            ids.append(id)
            if id not in self.folder.rows():
                self.say(f"[{number}/{len(self.wanted)}] {self.budgets[i]}, {method}")
                self._allocate(id, i, constraints[i], method)
        for ours, theirs in self._twins(constraints) if equal else []:
            id = f"{theirs}@{ours}"
            ids.append(id)
            if id not in self.folder.rows():
                self.say(f"bringing {theirs} to the measured latency of {ours}")
                self._match(id, ours, theirs, constraints[self._budget(theirs)])
        return self._report(ids, self._session(ids))

    def _id(self, i: int, method: str) -> str:
        """Return the id of a network; equal only for budgets that are the same in every option."""
        budget = self.budgets[i]
        plain = type(budget)(budget.quantity).to_dict()
        options = [f"{k}={v}" for k, v in budget.to_dict().items() if plain.get(k) != v]
        kind = "-".join([budget.key, str(budget.quantity).replace(" ", ""), *options])
        return f"{kind}-{method}"

    def _budget(self, id: str) -> int:
        """Return the number of a network's budget in this call; an earlier one may have had them in another order."""
        known = {self._id(i, method): i for i, method in self.wanted}
        return known[id] if id in known else known[id.partition("@")[0]]

    def _profile(self) -> None:
        self.say(f"profiling on {self.target.title}")
        with Bar(self.progress) as bar:
            task = replace(self.task, listener=bar)
            source, store = self.profiling.source, self.task.store
            if source is None and self.folder.rows():  # more measurements would be another cost model
                source = store
            self.profile = profile_for(task, self.target, self.rules, source=source)
        self.cost = cost_models.fit(self.profile, self.groups)
        pin_cost(self.folder, self.cost, self.groups.sizes)
        grid = self.cost.provenance.grid
        self.grid = np.array([int(grid.get(n, 1)) for n in self.groups.names], np.int64)

    def _constraints(self) -> list[Constraint]:
        """Return a constraint for each budget, all on the grid of the target."""
        known = [
            replace(b, profile=self.cost) if isinstance(b, LatencyBudget) and b.profile is None else b
            for b in self.budgets
        ]
        task = replace(self.task, profiling=replace(self.task.profiling, source=None))
        return [replace(c, grid=self.grid) for c in resolve_budgets(known, task, self.target)]

    def _propose(self, id: str, constraint: Constraint, method: str) -> tuple[Problem, Proposal]:
        rewind(self.data.train, self.data.val)
        torch.manual_seed(self.settings.seed)
        problem = as_problem(
            self.task, [constraint], self.refinement, train=self.data.train, val=self.data.val,
            options={"epochs": self.settings.epochs, **self.options.get(method, {})}, progress=self.progress,
        )  # fmt: skip
        folder = self.folder.unfinished(id, f"allocating under {constraint.limit:.6g}")
        folder.mkdir(parents=True, exist_ok=True)
        return problem, solve_or_resume(problem, method, folder)

    def _allocate(self, id: str, i: int, constraint: Constraint, method: str) -> None:
        problem, proposal = self._propose(id, constraint, method)
        candidates, found = find_network(
            problem, proposal, [constraint], self.refinement, reading_limit=2 * self.settings.reading
        )
        about: dict[str, Any] = {
            "kind": self.budgets[i].key,
            "asked": str(self.budgets[i].quantity),
            "method": method,
            "matches": "",
        }
        about |= {"limit": constraint.limit, "verdict": str(best_candidate(candidates).verdict)}
        self._finish(id, about, problem, proposal, found, constraint)

    def _finish(
        self,
        id: str,
        about: dict[str, Any],
        problem: Problem,
        proposal: Proposal,
        found: Realised,
        constraint: Constraint,
    ) -> None:
        """Recover, fine-tune, test, and write everything down."""
        s, small = self.settings, found.model.eval()
        rewind(self.data.train)  # an interrupted run continues only from the same weights
        adapted = weights_digest(proposal.model) != weights_digest(self.dense)
        if adapted:
            recalibrate(small, self.data.train)
        else:
            images = unlabelled_set(
                self.dense, self.task.inputs, self.data.train, seed=s.seed, listener=lambda *_: None
            )
            recover_network(problem, found, images, "refit", lambda *_: None)
        before = float(correct_predictions(small, self.data.test).mean())
        epochs = s.finetune_epochs + (0.0 if adapted else s.epochs)
        if epochs:
            train(
                small, self.data.train, epochs, s.finetune_lr, s, progress=self.progress, title=f"fine-tuning {id}",
                folder=self.folder.unfinished(id, f"fine-tuning {found.widths.tolist()}"), teacher=self.dense,
            )  # fmt: skip
        correct = correct_predictions(small, self.data.test)
        self.folder.keep(id, small, correct=torch.from_numpy(correct))
        Plan.of(self.groups, found.kept).save(self.folder.path / "plans" / f"{slug(id)}.json")
        history, digest = proposal.history, None
        if {"step", "used_0", "limit_0"} <= set(history.columns):
            dense = float(CostSet([constraint.cost], self.groups.sizes).dense[0])
            shares = {
                "step": history["step"],
                "cost": history["used_0"] * about["limit"] / dense,
                "limit": history["limit_0"] / dense,
            }
            path = self.folder.path / "histories" / f"{slug(id)}.csv"
            write_text(path, pd.DataFrame(shares).to_csv(index=False))
            digest = file_digest(path)
        self.folder.add(
            {
                "id": id,
                **about,
                "accuracy_before": before,
                "accuracy": float(correct.mean()),
                "epochs": epochs + (s.epochs if adapted else 0.0),
                "weights": weights_digest(small),
                "alpha": [float(a) for a in proposal.alpha],
                "widths": {n: int(w) for n, w in zip(self.groups.names, found.widths, strict=True)},
                "history": digest,
            }
        )

    def _twins(self, constraints: Sequence[Constraint]) -> list[tuple[str, str]]:
        """Return pairs of a latency-budget network and the nearest FLOPs-budget network of the same method."""
        share = [c.limit / c.dense for c in constraints]
        found = []
        for i, method in self.wanted:
            others = [j for j, m in self.wanted if self.budgets[j].key == "flops" and m == method]
            if self.budgets[i].key == "latency" and others:
                j = min(others, key=lambda j: abs(share[j] - share[i]))
                found.append((self._id(i, method), self._id(j, method)))
        return found

    def _match(self, id: str, ours: str, theirs: str, constraint: Constraint) -> None:
        """Find the FLOPs budget whose network takes as long as ``ours``, allocate under it, measure, adjust."""
        rows, sizes = self.folder.rows(), self.groups.sizes
        costs = CostSet([self.cost], sizes)
        goal = self._rebuilt(ours)

        def seconds(widths: Ints) -> float:
            return float(costs.at_widths(widths)[0])

        def matched(alpha: Any, aim: float) -> Any:
            return match_latency(
                alpha, sizes, constraint.cost, seconds, aim, self.grid, minimum=self.refinement.minimum
            )

        aim = seconds(np.array([rows[ours]["widths"][n] for n in self.groups.names]))
        limit = matched(np.array(rows[theirs]["alpha"]), aim).limit
        problem, proposal = self._propose(id, replace(constraint, limit=limit), rows[theirs]["method"])
        tried: dict[tuple[int, ...], tuple[float, float, Realised]] = {}
        for _ in range(_MOST):
            match = matched(proposal.alpha, aim)
            key = tuple(match.widths.tolist())
            if key in tried:
                break
            found = realise(problem, proposal, match.widths)
            readings = self.meter.read({"network": found.model, "goal": goal}, 2 * self.settings.reading)
            ratio = readings["network"].value / readings["goal"].value
            tried[key] = (abs(float(np.log(ratio))), match.limit, found)
            if abs(ratio - 1) <= _CLOSE:
                break
            aim = match.seconds / ratio  # what must be predicted for the two to be measured equal
        _, limit, best = min(tried.values(), key=lambda item: item[0])
        about = {k: rows[theirs][k] for k in ("kind", "asked", "method")}
        about |= {"matches": ours, "limit": limit, "verdict": ""}
        self._finish(id, about, problem, proposal, best, constraint)

    def _rebuilt(self, id: str) -> nn.Module:
        """Return a finished network from its plan and weights."""
        if id == DENSE:
            return self.dense
        plan = Plan.load(self.folder.path / "plans" / f"{slug(id)}.json")
        small = shrink(self.dense, self.groups, [np.asarray(u) for u in plan.kept])
        kept = self.folder.weights(id)
        if kept is None:
            raise DsaError(
                f"The weights of {one_line(id, 60)!r} are missing in {self.folder.path}. Delete its line in rows.jsonl."
            )
        load_weights(small, kept["state_dict"], f"the network {id}")
        if weights_digest(small) != self.folder.rows()[id]["weights"]:
            raise DsaError(
                f"The weights of {one_line(id, 60)!r} in {self.folder.path} are not those of its line in rows.jsonl. "
                "Delete the line to make the network again."
            )
        return small.eval()

    def _session(self, ids: Sequence[str]) -> dict[str, Any]:
        """Measure all networks in one interleaved session, or reuse one of the same networks and rules."""
        rules = asdict(self.meter.rules)
        known = self.folder.read("session.json")
        rows = self.folder.rows()
        weights = {id: rows[id]["weights"] if id in rows else weights_digest(self._rebuilt(id)) for id in ids}
        same = {"ids": list(ids), "weights": weights, "rules": rules, "environment": dict(self.meter.environment)}
        if isinstance(known, dict) and {key: known.get(key) for key in same} == same:
            try:
                readings = _with_infinity(known["readings"])
                for id in ids:
                    Reading.from_dict(readings[id])
                return {**known, "date": str(known["date"]), "readings": readings}
            except (KeyError, TypeError, ValueError) as error:
                _log.warning("session.json in %s cannot be used (%s). Measuring again.", self.folder.path, error)
        self.say(f"measuring {len(ids)} networks in one interleaved session")
        with Bar(self.progress) as bar:
            found = self.meter.read(
                {id: self._rebuilt(id) for id in ids},
                self.settings.reading * len(ids),
                lambda id, done: bar.say("measuring all networks", done, id),
                self._decided,
            )
        doubtful = {id: r.doubt for id, r in found.items() if r.doubt}
        if doubtful:
            id, why = next(iter(doubtful.items()))
            raise MeasurementError(
                f"{len(doubtful)} of {len(ids)} networks cannot be timed on {self.target.title}; {id}: {why}. What was "
                "trained is kept: repeat the command, or require less with --require."
            )
        date = pd.Timestamp.now().strftime("%Y-%m-%d")
        session = {**same, "date": date, "readings": {id: asdict(r) for id, r in found.items()}}
        self.folder.write("session.json", {**session, "readings": _without_infinity(session["readings"])})
        return session

    def _decided(self, found: Mapping[str, Reading]) -> bool:
        """Return whether the verdict of every latency budget is clear."""
        rows = self.folder.rows()
        judgements = (
            judge(
                self.budgets[self._budget(id)],
                found[id],
                found[DENSE],
                exact=False,
                confidence=self.refinement.confidence,
            )
            for id in found.keys() & rows.keys()
            if rows[id]["kind"] == "latency"
        )
        return all(judgement.verdict != Verdict.INCONCLUSIVE for judgement in judgements)

    def _report(self, ids: Sequence[str], session: dict[str, Any]) -> pd.DataFrame:
        s = self.settings
        training = (
            f"{s.train_epochs:g} epochs for the dense network, then {s.epochs + s.finetune_epochs:g} for every pruned "
            f"one (of these {s.epochs:g} while allocating, where the method trains); {s.precision}, seed {s.seed}"
        )
        findings = collect(
            ReportInputs(
                self.folder, ids, session, self.groups, self.cost, self.profile,
                {id: self.budgets[self._budget(id)] for id in ids[1:]}, self.name,
                self.data.name, training, self.command,
            )
        )  # fmt: skip
        table = findings.rows.copy()
        write_text(self.folder.path / "comparison.csv", table.to_csv(index=False))
        page = write(findings, self.folder.path / "index.html")
        widths = {str(id): {g: int(w) for g, w in row.items()} for id, row in findings.widths.iterrows()}
        table.attrs = {"widths": widths, "report": str(page), "headline": findings.headline()}
        return table


def _without_infinity(value: Any) -> Any:
    """Return plain data with text in place of infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_infinity(item) for key, item in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _with_infinity(value: Any) -> Any:
    """Return what `_without_infinity` was given."""
    if isinstance(value, dict):
        return {key: _with_infinity(item) for key, item in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value
