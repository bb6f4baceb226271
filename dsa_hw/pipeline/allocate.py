"""The front door: profile -> fit -> allocate -> shrink -> measure -> correct -> certificate.

    result = dsa_hw.allocate(model, budget=LatencyBudget("5ms"))
    result.model, result.certificate, result.plan.save("plan.json"), result.export("model.onnx")

(The module is not called ``allocate``: importing it would put the module in the place of the function.)
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from budgets import Budget
from dsa_hw.channels import find_groups
from dsa_hw.channels.importance import Importance
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import BudgetError, DsaError, ModelError
from dsa_hw.methods.checkpoint import solve_or_resume
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Batches, Loss, Problem, Proposal, Realised, realise
from dsa_hw.methods.registry import check_method
from dsa_hw.pipeline.certificate import Certificate, Reading, entry_of, reference_of
from dsa_hw.pipeline.constraints import Line, Work, common_grid, prepare
from dsa_hw.pipeline.example_inputs import example_for
from dsa_hw.pipeline.meters import DENSE
from dsa_hw.pipeline.quality import Quality, quality_on_synthetic_inputs
from dsa_hw.pipeline.refinement import Round, Settings, settle
from dsa_hw.pipeline.result import Allocation
from dsa_hw.utils.progress import Bar

if TYPE_CHECKING:
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["Allocation", "allocate"]

_log = logging.getLogger(__name__)
_LONGEST = 60.0  # seconds for one measurement of the loop


def allocate(
    model: nn.Module,
    budget: Budget | Sequence[Budget],
    *,
    example_inputs: Any = None,
    train: Batches | None = None,
    val: Batches | None = None,
    target: str | Target | None = None,
    profile: Any = None,
    method: str = "dsa",
    epochs: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
    rules: MeasuringRules | None = None,
    options: dict[str, Any] | None = None,
    loss: Loss | None = None,
    importance: str | Importance = "auto",
    minimum: float = 0.05,
    samples: int = 40,
    holdout: int = 10,
    grid: str | int = "auto",
    time_limit: float = 600.0,
    settings: Settings | None = None,
    proposal: Proposal | None = None,
    name: str | None = None,
    force: bool = False,
) -> Allocation:
    """A smaller network within every budget, measured on the target, with a certificate. ``model`` is not changed.

    Args:
        model: any network that ``torch.export`` traces.
        budget: one budget or several (``LatencyBudget("5ms")``, ``FlopsBudget("50%")``).
        example_inputs: a tensor or a tuple of tensors; inferred from the first layer where not given.
        train, val: loaders of (inputs, targets). Both: weights and keep ratios are learnt together; ``val`` alone: keep
            ratios only; neither: made-up inputs, the dense network's own outputs are the target. Without data the
            result needs fine-tuning; ``certificate.quality`` says how closely it follows the dense network.
        target: where latency is measured, if budgets do not say: ``"onnxruntime/cpu"``, or CUDA where the model is.
        profile: measurements to use instead of profiling: a store, a profile table, a fitted model or its JSON file;
            with several targets, a mapping from target to one of these.
        method: ``"dsa"`` or the name of another method; ``options`` are passed to it, ``epochs`` bounds its training.
        out: a folder (or a ``.sqlite`` store). What was measured and trained is kept there, so that the same call goes
            on after an interruption; in a folder the result is saved too.
        rules: rules of measuring, ``MeasuringRules.allowing(0.05)`` on a busy machine.
        importance: which channels matter most: "gamma", "l1", "l2", a function, or "auto", the method's own choice.
        minimum: smallest keep ratio of a group.
        samples, holdout, grid, time_limit: of the profile: configurations, widths to sample (``"auto"`` finds what the
            target likes), seconds.
        settings: of the correction.
        proposal: of an earlier allocation of this network (``result.proposal``): its keep ratios are projected to the
            new budgets and the method is not run again.
        force: use a fitted model's file though it is of another network, target or runtime version.

    Raises:
        InfeasibleBudgetError: no configuration keeps the budget (before anything is trained).
        MeasurementError: the profile cannot be trusted. A doubtful measurement of the result is no error: the verdict
            is then CANNOT TELL, with the reason.
    """
    wanted: list[Any] = list(budget) if isinstance(budget, (list, tuple)) else [budget]
    if not wanted:
        raise BudgetError("no budget: give budget=LatencyBudget('5ms'), or a list of budgets")
    for one in wanted:
        if not isinstance(one, Budget):
            raise BudgetError(
                f"budget={one!r} does not say of what: give LatencyBudget('5ms'), FlopsBudget('50%') or a list of those"
            )
    check_method(method)
    inputs = example_for(model, example_inputs)
    folder, store = _places(out)
    with Bar(progress) as bar:
        bar.say("finding channel groups")
        groups = find_groups(model, inputs)
        if not len(groups):
            raise ModelError("the network has no channel group that can be pruned; dsa-hw inspect says why")
        work = Work(
            model,
            groups,
            inputs,
            store=store,
            rules=rules,
            samples=samples,
            holdout=holdout,
            grid=grid,
            time_limit=time_limit,
            seed=seed,
            minimum=minimum,
            name=name or type(model).__name__,
            force=force,
            listener=bar,
        )
        lines = prepare(wanted, work, target or _target_of(model), profile)
        steps = common_grid(lines, len(groups))
        problem = Problem(
            model,
            groups,
            CostSet([line.cost for line in lines], groups.sizes, [line.limit for line in lines], wanted),
            example_inputs=inputs,
            grid=steps,
            train=train,
            val=val,
            loss=loss or nn.functional.cross_entropy,
            importance=importance,
            minimum=minimum,
            epochs=epochs,
            seed=seed,
            progress=progress,
            options=options or {},
        )
        bar.say(f"allocating ({method})")
        proposal = proposal or solve_or_resume(problem, method, folder)
        networks = _Networks(problem, proposal, lines, min(_LONGEST, time_limit / 6), bar, settings or Settings())
        rounds = settle(
            lines,
            proposal.alpha,
            groups.sizes,
            steps,
            networks.measure,
            minimum=minimum,
            settings=settings,
            listener=lambda found, number: _log.info("measurement %d: %s", number, _sentence(lines, found)),
        )
    best = max(rounds, key=lambda found: found.rank)
    found = networks.made[tuple(best.widths.tolist())]
    kept, small = found.kept, found.model
    data = train if train is not None else val
    if data is not None:
        from dsa_hw.training.batchnorm import recalibrate

        recalibrate(small, data)
        quality = None
    else:
        quality = quality_on_synthetic_inputs(model, small, inputs, seed)
    certificate = _certificate(lines, best, len(rounds), quality)
    names = list(groups.names)
    result = Allocation(
        model=small,
        plan=Plan.of(groups, kept, certificate.to_dict()),
        certificate=certificate,
        widths=pd.Series(best.widths, index=names, name="width"),
        keep_ratios=pd.Series(best.widths / groups.sizes, index=names, name="keep_ratio"),
        history=proposal.history,
        rounds=_rounds_frame(lines, rounds),
        inputs=inputs,
        lines=tuple(lines),
        proposal=proposal,
    )
    if folder is not None:
        result.save(folder)
    return result


class _Networks:
    """Widths -> the really smaller network of a proposal, and its readings beside the dense one."""

    def __init__(
        self, problem: Problem, proposal: Proposal, lines: Sequence[Line], limit: float, bar: Bar, settings: Settings
    ) -> None:
        self.made: dict[tuple[int, ...], Realised] = {}
        self._problem, self._proposal, self._lines = problem, proposal, lines
        self._limit, self._bar, self._most, self._count = limit, bar, settings.most, 0

    def measure(self, widths: NDArray[np.int64]) -> tuple[list[Reading], list[Reading]]:
        """Readings for every budget, of this network and of the dense one."""
        self._bar.say("measuring and correcting", self._count / self._most, f"network {self._count + 1}")
        self._count += 1
        key, problem = tuple(widths.tolist()), self._problem
        if key not in self.made:
            self.made[key] = realise(problem, self._proposal, widths)
        small = self.made[key].model
        readings, dense = [], []
        for line in self._lines:
            if line.gauge.exact:
                readings.append(line.gauge.read({"pruned": small}, self._limit)["pruned"])
                dense.append(Reading(line.dense, line.dense, line.dense))
            else:
                found = line.gauge.read({DENSE: problem.model, "pruned": small}, self._limit)
                readings.append(found["pruned"])
                dense.append(found[DENSE])
        return readings, dense


def _target_of(model: nn.Module) -> str:
    """ONNX Runtime on the CPU, or the best runtime of the CUDA device that the model lives on."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        return "onnxruntime/cpu"
    return f"auto/{parameter.device}"


def _places(out: str | Path | None) -> tuple[Path | None, Path | None]:
    """Folder of results and store of measurements."""
    if out is None:
        return None, None
    path = Path(out)
    if path.suffix == ".sqlite":
        return None, path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DsaError(f"the folder {path} cannot be made: {error}; choose another out=") from error
    return path, path / "profile.sqlite"


def _certificate(lines: Sequence[Line], best: Round, measurements: int, quality: Quality | None) -> Certificate:
    entries = tuple(
        entry_of(line.budget, line.gauge, float(best.predicted[j]), best.readings[j], best.dense[j])
        for j, line in enumerate(lines)
    )
    versions = {package: importlib.metadata.version(package) for package in ("torch", "numpy", "scikit-learn")}
    from dsa_hw import __version__

    return Certificate(entries, time.strftime("%Y-%m-%d"), measurements, {"dsa_hw": __version__, **versions}, quality)


def _rounds_frame(lines: Sequence[Line], rounds: Sequence[Round]) -> pd.DataFrame:
    rows = [
        {
            "round": number,
            "asked": str(line.budget),
            "limit": r.limits[j],
            "predicted": r.predicted[j],
            "measured": r.readings[j].value,
            "low": r.readings[j].low,
            "high": r.readings[j].high,
            "dense": r.dense[j].value,
            "utilisation": r.used[j],
            "verdict": r.verdicts[j],
            "doubt": r.readings[j].doubt_beside(reference_of(line.budget, r.dense[j], line.gauge.exact)),
            "widths": tuple(r.widths.tolist()),
        }
        for number, r in enumerate(rounds, 1)
        for j, line in enumerate(lines)
    ]
    return pd.DataFrame(rows)


def _sentence(lines: Sequence[Line], found: Round) -> str:
    say = [
        f"{line.budget.format(reading.value)} for {line.budget} ({verdict})"
        for line, reading, verdict in zip(lines, found.readings, found.verdicts, strict=True)
    ]
    return "; ".join(say)
