"""Check a certificate again: does it still hold, on this machine, today?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from budgets.budget import Budget, CountedBudget
from dsa_hw.channels.plan import Plan, apply_plan
from dsa_hw.errors import BudgetError, PlanError, ProfileError
from dsa_hw.pipeline.certificate import Certificate, Entry, entry_of
from dsa_hw.pipeline.meters import DENSE, Meter, meter_for
from dsa_hw.pipeline.quality import (
    ACCURACY,
    AGREEMENT,
    METRIC,
    NEGATIVE_LOSS,
    OUTPUT_ERROR,
    Metric,
    Quality,
    Source,
    measure_quality,
)
from dsa_hw.pipeline.quantised import quantised_for
from dsa_hw.pipeline.reading import Reading, Verdict, worst_verdict
from dsa_hw.pipeline.result import WEIGHTS, check_files
from dsa_hw.training.fingerprints import check_loader
from dsa_hw.training.losses import OwnLoss, Step
from dsa_hw.utils.inputs import as_path, as_tensors, check_model
from dsa_hw.utils.modules import (
    check_finite_inputs,
    check_finite_outputs,
    check_finite_weights,
    load_weights,
    weights_digest,
)
from dsa_hw.utils.numbers import check_positive, check_seed
from dsa_hw.utils.weights import read_weights
from profilers.networks.quantisation import PRECISIONS
from profilers.targets import from_title, resolve

if TYPE_CHECKING:
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["Verification", "plan_inputs", "pruned_network", "verify", "weights_beside"]

_DEVICE: Final = ("cpu", "cores", "system", "target", "gpu", "device")
# The end of a title: precision and threads, which are plain data.
_CONDITIONS: Final = re.compile(rf" (?P<precision>{PRECISIONS})( x(?P<threads>[1-9]\d{{0,3}}))?$", re.ASCII)

Weights = Mapping[str, Any] | str | os.PathLike[str]
"""A state dict, or the path of its file."""


@dataclass(frozen=True)
class Verification:
    """A certificate, and the same measured again.

    Attributes:
        then: The certificate of the plan.
        now: The certificate of today's measurement.
        device: What differs of the device, in words; empty where nothing does.
        versions: What differs of the versions, in words.
        weights: Whether weights and outputs are those that the plan was saved with, in words.
        measured_quality: Whether the quality was measured again.
    """

    then: Certificate
    now: Certificate
    device: str
    versions: str
    weights: str
    measured_quality: bool = False

    @property
    def verdict(self) -> Verdict:
        """Whether everything that was measured again still holds: budgets, and the quality where there were data."""
        again = [self.now.quality.against(self.then.quality)] if self.measured_quality else []
        return worst_verdict([self.now.verdict, *again])

    @property
    def same_device(self) -> bool:
        """Whether both were measured on what looks like the same device."""
        return not self.device

    def __str__(self) -> str:
        lines = [self._answer()]
        for before, after in zip(self.then.entries, self.now.entries, strict=True):
            lines += [f"  then: {before}", f"  now:  {after}"]
        if self.measured_quality:
            lines += [f"  then: {self.then.quality}", f"  now:  {self.now.quality}"]
        else:
            lines.append(f"  {self.then.quality} Not measured again: give data with --data (data=).")
        lines.append(f"  weights: {self.weights}")
        if self.device:
            lines.append(f"  different device: {self.device}")
        if self.versions:
            lines.append(f"  changed since: {self.versions}")
        if self.now.verdict == Verdict.INCONCLUSIVE:
            lines.append("  to decide: verify again after ten minutes or more; every sitting adds to what is known")
        return "\n".join(lines)

    def _answer(self) -> str:
        certificate = f"certificate of {self.then.date}"
        where = "" if self.same_device else " (measured on a different device)"
        if self.verdict == Verdict.MET:
            return f"The {certificate} still holds{where}."
        if self.verdict != Verdict.NOT_MET:
            return f"Inconclusive: cannot determine whether the {certificate} still holds{where}."
        if self.then.verdict == Verdict.MET:
            return f"The {certificate} no longer holds{where}."
        return f"The {certificate} does not hold{where}; its verdict was {self.then.verdict} when it was made."


def verify(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module,
    *,
    example_inputs: Any = None,
    target: str | Target | None = None,
    rules: MeasuringRules | None = None,
    weights: Weights | None = None,
    data: Iterable[Any] | None = None,
    metric: Metric | None = None,
    step: Step | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    counter: Any = None,
    technology: Any = None,
) -> Verification:
    """Measure the network of a plan beside the dense one again, for every budget of its certificate.

    A plan is a file: it chooses neither code nor host nor path. What belongs to it is compared with its hashes: the
    files that were saved beside it, the architecture, the weights, and the outputs of the pruned network.

    Args:
        plan: The plan, or the path of its file.
        model: The dense network; not changed.
        example_inputs: Inputs of the shapes that the plan names; None makes random ones.
        target: Where to measure. It must be given where the target of the certificate is not this computer. Precision
            and threads are those of the certificate, unless the name has its own ("onnxruntime/cpu fp16 x4").
        rules: How to measure; None uses the defaults.
        weights: State dict of the pruned network, or its file. None uses model.safetensors beside the plan; where there
            is none, only the budgets are verified.
        data: Loader of (inputs, targets) to measure the quality on again; None leaves it. It is confirmed where its
            interval is not wholly worse than that of the certificate, and where the drop is within its limit.
        metric: The user's metric, if the certificate has one.
        step: The user's step, if its negative loss is the metric.
        time_limit: Seconds for each budget. Measuring ends as soon as the verdict is MET or NOT MET.
        seed: Seed of the order of runs.
        counter: The energy counter, where the budget was made with the user's own.
        technology: The technology of an energy estimate, where the budget was made with the user's own.

    Returns:
        The certificate then and now.

    Raises:
        PlanError: The plan has no certificate, is damaged, names something that only the user may choose, or does not
            belong to the network, the weights, the inputs or the files beside it.
        ModelError: A weight or an output is NaN or infinite.

    Example:
        >>> import dsa_hw, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        >>> result = dsa_hw.allocate(
        ...     model, dsa_hw.FlopsBudget("50%"), example_inputs=torch.zeros(1, 3, 8, 8), method="uniform"
        ... )
        >>> str(dsa_hw.verify(result.plan, model).now.verdict)
        'MET'
    """
    check_model(model)
    check_seed(seed)
    check_positive(time_limit, "time_limit")
    folder = None if isinstance(plan, Plan) else as_path(plan, "plan").parent
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    then = Certificate.from_dict(plan.certificate)
    if plan.network is None:
        raise PlanError("The plan has no hash of its weights. Make a new one with dsa-hw allocate.")
    if folder is not None:
        check_files(plan, folder)
        weights = weights_beside(plan, folder) if weights is None else weights
    budgets = [_budget(entry.budget, counter=counter, technology=technology) for entry in then.entries]
    # What is printed as asked follows from the budget that is checked, whatever the file says beside it.
    then = replace(then, entries=tuple(replace(e, asked=str(b)) for e, b in zip(then.entries, budgets, strict=True)))
    places = [
        None if isinstance(b, CountedBudget) else _target(target, e) for e, b in zip(then.entries, budgets, strict=True)
    ]
    inputs = plan_inputs(plan, model, example_inputs)
    check_finite_inputs(inputs)
    check_finite_weights(model, "the dense network")
    small = pruned_network(model, plan, inputs, weights)
    if weights is None:
        checked = (
            f"not compared, because there is no {WEIGHTS} beside the plan; name the file with --weights (weights=)"
        )
    else:
        checked = f"as saved; outputs differ by at most {plan.check_network(small, inputs, _named(weights)):.1g}"
    check_finite_weights(small, "the pruned network")
    for what, network in (("the dense network", model), ("the pruned network", small)):
        check_finite_outputs(network, inputs, what)
    pruned = [
        quantised_for(small, inputs, place, then.int8) if place is not None and place.int8 is not None else small
        for place in places
    ]
    judged = next((network for network in pruned if network is not small), small)  # in int8, if there is one
    quality = then.quality if data is None else _quality_again(then.quality, model, judged, data, metric, step, weights)
    entries, device, versions = [], [], []
    for entry, budget, place, network in zip(then.entries, budgets, places, pruned, strict=True):
        meter = meter_for(budget, place, inputs, rules, seed)
        entries.append(_measured(entry, budget, meter, {DENSE: model, "pruned": network}, time_limit))
        if entry.environment:
            here = dict(meter.environment)
            changed = {
                key: f"{key} {entry.environment.get(key, 'absent')} -> {here.get(key, 'absent')}"
                for key in dict.fromkeys((*entry.environment, *here))
                if entry.environment.get(key) != here.get(key)
            }
            device += [text for key, text in changed.items() if key in _DEVICE]
            versions += [text for key, text in changed.items() if key not in _DEVICE]
    now = Certificate(tuple(entries), time.strftime("%Y-%m-%d"), 1, quality, then.versions, then.int8)
    different, changes = "; ".join(dict.fromkeys(device)), "; ".join(dict.fromkeys(versions))
    return Verification(then, now, different, changes, checked, data is not None)


def plan_inputs(plan: Plan, model: nn.Module, example_inputs: Any = None) -> tuple[Any, ...]:
    """Return the given inputs, or random ones of the shapes that the plan was made for.

    Raises:
        PlanError: The given inputs have other shapes: budgets hold for the shapes of the plan.
    """
    if example_inputs is not None:
        given = as_tensors(example_inputs)
        if (shapes := tuple(tuple(x.shape) for x in given)) != plan.inputs:
            here, there = (", ".join("x".join(map(str, s)) for s in found) for found in (shapes, plan.inputs))
            raise PlanError(f"The plan was made for inputs of {there}, and its budgets hold for these; got {here}.")
        return given
    return plan.example_inputs(model)


def pruned_network(model: nn.Module, plan: Plan, inputs: tuple[Any, ...], weights: Weights | None = None) -> nn.Module:
    """Return the network of a plan.

    Args:
        model: The dense network; not changed.
        plan: What to keep.
        inputs: Example inputs.
        weights: State dict of the pruned network, or its file; None takes the weights of the dense one.

    Returns:
        The pruned network.

    Raises:
        ModelError: The weights cannot be read or do not fit.
    """
    small = apply_plan(model, plan, inputs)
    if weights is not None:
        state = weights if isinstance(weights, Mapping) else read_weights(weights)
        load_weights(small, state, "the pruned network of the plan")
    return small


def weights_beside(plan: Plan, folder: Path) -> Path | None:
    """Return the weights that were saved beside a plan; None where they are not there.

    The name is always the same: a plan does not choose a path. They are left out only where the plan has no hash to
    compare them with.
    """
    path = folder / WEIGHTS
    return path if path.exists() and (plan.network is not None or WEIGHTS in plan.files) else None


def _named(weights: Weights) -> str:
    return "`weights`" if isinstance(weights, Mapping) else str(weights)


def _quality_again(
    then: Quality,
    dense: nn.Module,
    small: nn.Module,
    data: Iterable[Any],
    metric: Metric | None,
    step: Step | None,
    weights: Any,
) -> Quality:
    """Measure the quality of a certificate on data that the user gives.

    Raises:
        PlanError: The pruned or the dense network does not have its weights, or the metric is missing.
    """
    if weights is None:
        raise PlanError("The quality needs the weights of the pruned network. Give them with --weights (weights=).")
    if then.dense_weights and then.dense_weights != weights_digest(dense):
        raise PlanError(
            "The quality needs the dense network with the weights that the certificate was made with; its weights "
            "differ. Give them with --dense-weights (load them into `model`)."
        )
    check_loader(dense, data, "data", None if step is None else OwnLoss(step), labelled=False)
    if then.measure == METRIC and metric is None and step is None:
        given = "step" if then.name == NEGATIVE_LOSS else "metric"
        raise PlanError(f"The certificate has the metric {then.name!r} of the user. Give it with {given}= in Python.")
    # An agreement is compared with an agreement: without labels, whatever the inputs were.
    source: Source = "images without labels" if then.measure in (AGREEMENT, OUTPUT_ERROR) else "validation data"
    if then.measure in (ACCURACY, METRIC):
        source = then.source
    return measure_quality(
        dense, small, data, source=source, metric=metric, step=step, max_drop=then.max_drop,
        confidence=then.confidence,
    )  # fmt: skip


def _measured(then: Entry, budget: Budget, meter: Meter, networks: Mapping[str, nn.Module], time_limit: float) -> Entry:
    """Measure until the verdict is clear or the time is used up."""

    def entry(found: Mapping[str, Reading]) -> Entry:
        return entry_of(budget, meter, then.predicted, found["pruned"], found[DENSE], then.confidence)

    return entry(meter.read(networks, time_limit, decided=lambda found: entry(found).verdict != Verdict.INCONCLUSIVE))


def _budget(content: Mapping[str, Any], **own: Any) -> Budget:
    try:
        return Budget.from_dict(content, **own)
    except BudgetError as error:
        raise PlanError(f"Cannot use a budget of the plan. {error}") from error


def _target(given: str | Target | None, entry: Entry) -> Target:
    """Return the target that the user gave, by name or title, or that of the plan if it is this computer."""
    if given is None:
        return _own_target(entry)
    if not isinstance(given, str):
        return resolve(given)
    name, _, rest = given.strip().partition(" ")
    typed = _CONDITIONS.search(f" {rest}") if rest else _CONDITIONS.search(entry.target)
    if not name or (rest and (typed is None or typed.start())):
        raise ProfileError(f"Cannot read the target {given!r}. Write for example 'onnxruntime/cpu fp16 x4'.")
    found = typed.groupdict() if typed else {}
    return resolve(name, precision=found.get("precision") or "fp32", threads=int(found.get("threads") or 1))


def _own_target(entry: Entry) -> Target:
    """Return the target of a certificate if it is this computer with its usual settings."""
    try:
        found = from_title(entry.target)
    except ProfileError as error:
        known = (
            f" It was given as {entry.specification!r}: check it before you repeat it." if entry.specification else ""
        )
        raise ProfileError(f"{error}{known}") from error
    if found.name != entry.specification:
        raise ProfileError(
            f"A file cannot choose the options of a target. Name it with --target (target= in Python); the file names "
            f"{entry.specification!r}."
        )
    return found
