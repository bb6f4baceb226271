"""Compare budgets: what would a FLOPs budget have given instead of a latency budget, on this device, with this data?

    dsa_hw.compare("resnet20", "digits", [FlopsBudget("50%"), LatencyBudget("50%")], train_epochs=20, out="report")

One dense network, one profile; for every budget and method an allocation, surgery, fine-tuning. Latency budgets are
measured and corrected as ``dsa_hw.allocate`` does. Then the fair question: each FLOPs-budget network is brought to the
*measured* latency of the latency-budget network (`dsa_hw.experiments.equal_latency`). At the end all networks are
timed in one interleaved session.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from budgets.budget import CountedBudget
from dsa_hw.channels import ChannelGroups, find_groups, shrink
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import BudgetError, DsaError, MeasurementError
from dsa_hw.experiments.equal_latency import match
from dsa_hw.experiments.run_folder import Workshop, digest, rewind, slug, train, train_dense
from dsa_hw.experiments.settings import Settings
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, Proposal, realise
from dsa_hw.methods.registry import check_method, solve
from dsa_hw.methods.rounding import round_widths
from dsa_hw.pipeline.certificate import CANNOT_TELL, Reading, limit_of, reference_of, verdict_of
from dsa_hw.pipeline.constraints import Line, Work, prepare
from dsa_hw.pipeline.meters import DENSE, DeviceGauge, rules_for
from dsa_hw.pipeline.refinement import settle
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.fingerprints import fingerprint_data
from dsa_hw.training.metrics import correct_predictions
from dsa_hw.utils.progress import Bar

if TYPE_CHECKING:
    from budgets import Budget, CostModel
    from dsa_hw.zoo.data import Data
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["compare"]

_CLOSE = 0.01  # latencies nearer than this are equal enough to stop measuring
_MOST = 4  # measurements for one network that is brought to equal latency


def compare(
    model: str | nn.Module,
    data: str | Data,
    budgets: Sequence[Budget],
    *,
    target: str | Target = "onnxruntime/cpu",
    methods: Sequence[str] | Mapping[str, Sequence[str]] = ("dsa", "uniform"),
    settings: Settings | None = None,
    out: str | Path | None = None,
    equal: bool = True,
    name: str | None = None,
    rules: MeasuringRules | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = False,
    listener: Callable[[str], None] | None = None,
    command: str = "",
    **more: Any,
) -> pd.DataFrame:
    """A row per budget and method: FLOPs, parameters, measured latency with its interval, accuracies.

    Args:
        model: a name (``dsa_hw.zoo.models``, random weights: give ``train_epochs``) or a module with its weights.
        data: a name, or a ``dsa_hw.zoo.data.Data``.
        budgets: any of FLOPs, parameters, activation memory and latency, several of a kind for a front.
        target: where latency is measured; ``rules`` are the rules of measuring.
        methods: names from ``dsa_hw.methods.registry``, or these by kind of budget ("latency", "flops", "params",
        "memory");
            ``options`` are their settings, by method.
        settings: see `Settings`; single ones can be given by name (``epochs=2``).
        out: folder for everything, continued where it exists; its ``index.html`` is the report. None: nothing is kept.
        equal: also bring the FLOPs-budget networks to the measured latency of the latency-budget networks.
        listener: gets a line of text for each step.

    Returns:
        Columns as in ``dsa_hw.experiments.report.findings.COLUMNS``, and ``verdict`` of latency budgets.
        ``attrs["widths"]``: id ->
        group -> width; ``attrs["report"]``: the page. Raises `MeasurementError` where times cannot be trusted; what was
        trained stays in ``out``.
    """
    chosen = Settings(**{**asdict(settings or Settings()), **more})
    with tempfile.TemporaryDirectory() as spare:
        job = _Job(
            model, data, list(budgets), target, methods, chosen, Path(out or spare), name, rules,
            dict(options or {}), progress, listener or (lambda text: None), command,
        )  # fmt: skip
        frame = job.run(equal)
        if out is None:
            frame.attrs.pop("report")
        return frame


def _kind(budget: Budget) -> str:
    if budget.dimension == "energy":
        raise BudgetError(f"Budgets of a comparison may limit latency, FLOPs, parameters and memory; got {budget}.")
    return budget.key


class _Job:
    """One comparison, step by step."""

    def __init__(
        self,
        model: str | nn.Module,
        data: str | Data,
        budgets: list[Budget],
        target: str | Target,
        methods: Sequence[str] | Mapping[str, Sequence[str]],
        settings: Settings,
        out: Path,
        name: str | None,
        rules: MeasuringRules | None,
        options: dict[str, Mapping[str, Any]],
        progress: bool,
        say: Callable[[str], None],
        command: str,
    ) -> None:
        from budgets import LatencyBudget
        from dsa_hw.zoo import data as datasets
        from dsa_hw.zoo import models
        from profilers import MeasuringRules
        from profilers.targets import resolve

        if not budgets or not methods:
            raise BudgetError(f"{len(budgets)} budgets and {len(methods)} methods asked for; give at least one of each")
        self.kinds = [_kind(b) for b in budgets]
        self.wanted = [
            (i, m)
            for i, kind in enumerate(self.kinds)
            for m in (methods.get(kind, ()) if isinstance(methods, Mapping) else methods)
        ]
        for _, method in self.wanted:
            check_method(method)
        self.settings, self.options = settings, options
        self.progress, self.say, self.command = progress, say, command
        self.target = resolve(target)
        self.requested = rules or MeasuringRules()
        timed = next((b for b in budgets if isinstance(b, LatencyBudget)), LatencyBudget("50%"))
        self.rules = rules_for(timed, self.requested)
        self.data = datasets.load_data(data, seed=settings.seed) if isinstance(data, str) else data
        torch.manual_seed(settings.seed)
        if isinstance(model, str):
            self.name, self.dense = name or model, models.load_model(model, self.data.shape)[0]
        else:
            self.name, self.dense = name or type(model).__name__, copy.deepcopy(model)
        self.inputs = (torch.randn(self.data.shape, generator=torch.Generator().manual_seed(0)),)
        question = {
            "what": "comparison", "model": self.name, "weights": digest(self.dense), "data": self.data.name,
            "contents": fingerprint_data(self.data.train, self.data.val, self.data.test),
            "target": self.target.title, "statistic": self.rules.statistic, **settings.question(),
            "options": {m: dict(o) for m, o in options.items()},
        }  # fmt: skip
        self.shop = Workshop(out, question)
        self.groups: ChannelGroups = find_groups(self.dense, self.inputs)
        self.gauge = DeviceGauge(self.target, self.inputs, self.rules, settings.seed)
        self.budgets = budgets
        self.profile: pd.DataFrame
        self.cost: CostModel
        self.grid: Any

    def run(self, equal: bool) -> pd.DataFrame:
        """Train, profile, allocate, bring to equal latency, measure, report."""
        # Counted budgets need no measurement: check them before anything that takes time.
        self._lines([b for b in self.budgets if isinstance(b, CountedBudget)])
        self._train_dense()
        self._learn()
        lines = self._lines(self.budgets, self.cost)
        wanted = self.wanted
        for number, (i, method) in enumerate(wanted, 1):
            id = self._id(i, method)
            if id not in self.shop.rows():
                self.say(f"[{number}/{len(wanted)}] {self.budgets[i]}, {method}")
                self._budget(id, lines[i], self.kinds[i], method)
        ids = [DENSE, *(self._id(i, m) for i, m in wanted)]
        for ours, theirs in self._twins(lines) if equal else []:
            id = f"{theirs}@{ours}"
            if id not in self.shop.rows():
                self.say(f"bringing {theirs} to the measured latency of {ours}")
                self._bring(id, ours, theirs, lines[int(self.shop.rows()[theirs]["budget"])])
            ids.append(id)
        return self._report(ids, self._session(ids))

    def _id(self, i: int, method: str) -> str:
        return f"{self.kinds[i]}-{str(self.budgets[i].quantity).replace(' ', '')}-{method}"

    def _train_dense(self) -> None:
        train_dense(self.shop, self.dense, self.data, self.settings, self.progress, self.say)

    def _learn(self) -> None:
        import budgets
        import profilers

        self.say(f"profiling on {self.target.title}")
        with Bar(self.progress) as listener:
            self.profile = profilers.profile(
                self.dense, self.inputs, self.target, samples=self.settings.samples, holdout=self.settings.holdout,
                out=self.shop.path / "profile.sqlite", time_limit=self.settings.time_limit, rules=self.rules,
                seed=self.settings.seed, name=self.name, groups=self.groups, listener=listener,
            )  # fmt: skip
        self.cost = budgets.fit(self.profile, self.groups)
        self.grid = np.array([int(self.profile.attrs["grid"].get(n, 1)) for n in self.groups.names], np.int64)

    def _lines(self, budgets: Sequence[Budget], cost: CostModel | None = None) -> list[Line]:
        work = Work(
            self.dense, self.groups, self.inputs, rules=self.requested, minimum=self.settings.minimum,
            seed=self.settings.seed,
        )  # fmt: skip
        return prepare(budgets, work, self.target, cost)

    def _solve(self, id: str, cost: Any, limit: float, method: str) -> Proposal:
        s = self.settings
        rewind(self.data.train, self.data.val)
        torch.manual_seed(s.seed)
        costs = CostSet([cost], self.groups.sizes, [limit])
        problem = Problem(
            self.dense, self.groups, costs, self.inputs, self.grid, self.data.train, self.data.val,
            minimum=s.minimum, epochs=s.epochs, seed=s.seed, progress=self.progress,
            options=dict(self.options.get(method, {})), folder=self.shop.begun(id, f"allocating under {limit:.6g}"),
        )  # fmt: skip
        return solve(problem, method)

    def _budget(self, id: str, line: Line, kind: str, method: str) -> None:
        proposal = self._solve(id, line.cost, line.limit, method)
        sizes, s = self.groups.sizes, self.settings
        if kind == "latency":
            rounds = settle(
                [line], proposal.alpha, sizes, self.grid, lambda w: self._read(proposal, w), minimum=s.minimum
            )
            widths = max(rounds, key=lambda r: r.rank).widths
        else:
            costs = CostSet([line.cost], sizes, [line.limit], [line.budget])
            widths = round_widths(proposal.alpha, costs, self.grid, minimum=s.minimum)
        about = {"budget": self.budgets.index(line.budget), "kind": kind, "asked": str(line.budget.quantity)}
        about |= {"method": method, "matches": "", "limit": line.limit}
        self._finish(id, about, proposal, widths, line)

    def _read(self, proposal: Proposal, widths: Any) -> tuple[list[Any], list[Any]]:
        found = self.gauge.read(
            {"network": self._shrunk(proposal, widths)[0], DENSE: self.dense}, 2 * self.settings.reading
        )
        return [found["network"]], [found[DENSE]]

    def _shrunk(self, proposal: Proposal, widths: Any) -> tuple[nn.Module, list[Any]]:
        problem = Problem(self.dense, self.groups, CostSet([self.cost], self.groups.sizes))
        found = realise(problem, proposal, widths)
        return found.model.eval(), found.kept

    def _finish(self, id: str, about: dict[str, Any], proposal: Proposal, widths: Any, line: Line) -> None:
        """Shrink, fine-tune, test, and write everything down."""
        s = self.settings
        small, kept = self._shrunk(proposal, widths)
        recalibrate(small, self.data.train)
        before = float(correct_predictions(small, self.data.test).mean())
        adapted = digest(proposal.model) != digest(self.dense)
        epochs = s.finetune_epochs + (0.0 if adapted else s.epochs)
        if epochs:
            begun = self.shop.begun(id, f"fine-tuning {widths.tolist()}")
            train(small, self.data.train, epochs, s.finetune_lr, s, self.progress, f"fine-tuning {id}", begun)
        right = correct_predictions(small, self.data.test)
        names, sizes = self.groups.names, self.groups.sizes
        self.shop.keep(id, small, correct=torch.from_numpy(right))
        Plan.of(self.groups, kept).save(self.shop.path / "plans" / f"{slug(id)}.json")
        history = proposal.history
        if {"step", "used_0", "limit_0"} <= set(history.columns):
            dense = float(CostSet([line.cost], sizes).dense[0])
            pd.DataFrame(
                {
                    "step": history["step"],
                    "cost": history["used_0"] * about["limit"] / dense,
                    "limit": history["limit_0"] / dense,
                }
            ).to_csv(self.shop.path / "histories" / f"{slug(id)}.csv", index=False)
        self.shop.add(
            {
                "id": id,
                **about,
                "accuracy_before": before,
                "accuracy": float(right.mean()),
                "epochs": epochs + (s.epochs if adapted else 0.0),
                "alpha": [float(a) for a in proposal.alpha],
                "widths": {n: int(w) for n, w in zip(names, widths, strict=True)},
            }
        )

    def _twins(self, lines: Sequence[Line]) -> list[tuple[str, str]]:
        """(latency-budget network, FLOPs-budget network of the same method that is nearest in what was asked)."""
        share = [line.limit / line.dense for line in lines]
        found = []
        for i, method in self.wanted:
            others = [j for j, m in self.wanted if self.kinds[j] == "flops" and m == method]
            if self.kinds[i] == "latency" and others:
                j = min(others, key=lambda j: abs(share[j] - share[i]))
                found.append((self._id(i, method), self._id(j, method)))
        return found

    def _bring(self, id: str, ours: str, theirs: str, line: Line) -> None:
        """Find the FLOPs budget whose network takes as long as ``ours``, allocate under it, measure, adjust."""
        rows, sizes, s = self.shop.rows(), self.groups.sizes, self.settings
        goal_widths = np.array([rows[ours]["widths"][n] for n in self.groups.names])
        goal = self._rebuilt(ours)

        def seconds(widths: Any) -> float:
            return float(CostSet([self.cost], sizes).at_widths(widths)[0])

        aim = seconds(goal_widths)
        guess = match(np.array(rows[theirs]["alpha"]), sizes, line.cost, seconds, aim, self.grid, minimum=s.minimum)
        proposal = self._solve(id, line.cost, guess.limit, rows[theirs]["method"])
        tried: dict[tuple[int, ...], tuple[float, Any]] = {}
        for _ in range(_MOST):
            found = match(proposal.alpha, sizes, line.cost, seconds, aim, self.grid, minimum=s.minimum)
            key = tuple(found.widths.tolist())
            if key in tried:
                break
            small, _ = self._shrunk(proposal, found.widths)
            readings = self.gauge.read({"network": small, "goal": goal}, 2 * s.reading)
            ratio = readings["network"].value / readings["goal"].value
            tried[key] = (abs(float(np.log(ratio))), found)
            if abs(ratio - 1) <= _CLOSE:
                break
            aim = found.seconds / ratio  # what must be predicted for the two to be measured equal
        best = min(tried.values(), key=lambda pair: pair[0])[1]
        about = {**{k: rows[theirs][k] for k in ("budget", "kind", "asked", "method")}, "matches": ours}
        self._finish(id, {**about, "limit": best.limit}, proposal, best.widths, line)

    def _rebuilt(self, id: str) -> nn.Module:
        """A finished network from its plan and weights."""
        if id == DENSE:
            return self.dense
        plan = Plan.load(self.shop.path / "plans" / f"{slug(id)}.json")
        small = shrink(self.dense, self.groups, [np.asarray(u) for u in plan.kept])
        kept = self.shop.weights(id)
        if kept is None:
            raise DsaError(f"the weights of {id} are missing in {self.shop.path}: delete its line in rows.jsonl")
        small.load_state_dict(kept["state_dict"])
        return small.eval()

    def _session(self, ids: Sequence[str]) -> dict[str, Any]:
        """All networks in one interleaved session; one that was made with the same networks and rules is used again."""
        rules = asdict(self.gauge.rules)
        known = self.shop.read("session.json")
        if (
            known
            and known["ids"] == list(ids)
            and known["rules"] == rules
            and known["environment"] == dict(self.gauge.environment)
        ):
            return dict(known)
        self.say(f"measuring {len(ids)} networks in one interleaved session")
        with Bar(self.progress) as bar:
            found = self.gauge.read(
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
                f"trained is kept: repeat the command on a quieter machine, or accept more disturbance with --allow 5%"
            )
        session = {
            "ids": list(ids), "rules": rules, "environment": dict(self.gauge.environment),
            "date": pd.Timestamp.now().strftime("%Y-%m-%d"), "readings": {id: asdict(r) for id, r in found.items()},
        }  # fmt: skip
        self.shop.write("session.json", session)
        return session

    def _decided(self, found: Mapping[str, Reading]) -> bool:
        """Whether the verdict of every latency budget is clear."""
        rows, dense = self.shop.rows(), found[DENSE]
        for id in found.keys() & rows.keys():
            if rows[id]["kind"] == "latency":
                budget = self.budgets[int(rows[id]["budget"])]
                limit = limit_of(budget, dense.value)
                if verdict_of(found[id], limit, reference_of(budget, dense, False))[0] == CANNOT_TELL:
                    return False
        return True

    def _report(self, ids: Sequence[str], session: dict[str, Any]) -> pd.DataFrame:
        from dsa_hw.experiments.report import write
        from dsa_hw.experiments.report.collect import Source, gather

        source = Source(
            self.shop, ids, session, self.groups, self.cost, self.profile, self.budgets, self.name, self.data.name,
            self._training(), self.command,
        )  # fmt: skip
        findings = gather(source)
        frame = findings.rows.copy()
        frame.to_csv(self.shop.path / "comparison.csv", index=False)
        page = write(findings, self.shop.path / "index.html")
        widths = {str(id): {g: int(w) for g, w in row.items()} for id, row in findings.widths.iterrows()}
        frame.attrs = {"widths": widths, "report": str(page), "headline": findings.headline()}
        return frame

    def _training(self) -> str:
        s = self.settings
        return (
            f"{s.train_epochs:g} epochs for the dense network, then {s.epochs + s.finetune_epochs:g} for every pruned "
            f"one (of these {s.epochs:g} while allocating, where the method trains); {s.precision}, seed {s.seed}"
        )
