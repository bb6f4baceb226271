"""Check a certificate again: does it still hold, on this machine, today?"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from budgets.budget import Budget, CountedBudget
from dsa_hw.channels.plan import Plan, apply_plan
from dsa_hw.errors import BudgetError, ModelError, PlanError, ProfileError
from dsa_hw.pipeline.certificate import CANNOT_TELL, MET, NOT_MET, Certificate, Entry, Reading, entry_of
from dsa_hw.pipeline.meters import DENSE, Gauge, gauge_for
from dsa_hw.utils.inputs import as_tensors

if TYPE_CHECKING:
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["Recheck", "plan_inputs", "pruned", "recheck"]

_DEVICE = ("cpu", "cores", "system", "target", "gpu", "device")


@dataclass(frozen=True)
class Recheck:
    """The certificate ``then`` and ``now``; what of the device and of the versions changed in between, in words."""

    then: Certificate
    now: Certificate
    device: str
    versions: str

    @property
    def same_device(self) -> bool:
        """Whether it was measured on what looks like the same device."""
        return not self.device

    def __str__(self) -> str:
        lines = [self._answer()]
        for before, after in zip(self.then.entries, self.now.entries, strict=True):
            lines += [f"  then: {before}", f"  now:  {after}"]
        if self.then.quality:
            lines.append(f"  {self.then.quality}")
        if self.device:
            lines.append(f"  different device: {self.device}")
        if self.versions:
            lines.append(f"  changed since: {self.versions}")
        return "\n".join(lines)

    def _answer(self) -> str:
        certificate = f"certificate of {self.then.date}"
        where = "" if self.same_device else " (measured on a different device)"
        if self.now.verdict == MET:
            return f"The {certificate} still holds{where}."
        if self.now.verdict != NOT_MET:
            return f"Inconclusive: cannot determine whether the {certificate} still holds{where}."
        if self.then.verdict == MET:
            return f"The {certificate} no longer holds{where}."
        return f"The {certificate} does not hold{where}; its verdict was {self.then.verdict} when it was made."


def recheck(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module,
    *,
    example_inputs: Any = None,
    target: str | Target | None = None,
    rules: MeasuringRules | None = None,
    weights: Mapping[str, Any] | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    counter: Any = None,
    technology: Any = None,
) -> Recheck:
    """Measure the network of ``plan`` beside the dense ``model`` again, for every budget of its certificate.

    ``weights`` (a state dict of the small network) make it the shipped one; time does not depend on them. ``target``
    replaces the one that the certificate names; it must be given where that one is not this computer. ``counter`` and
    ``technology`` are those of `budgets.EnergyBudget`, and must be given where the budget was made with the user's own:
    a plan is a file, and chooses neither code nor host nor path.

    Each budget is measured until its verdict is MET or NOT MET, for ``time_limit`` seconds at most.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    then = Certificate.from_dict(plan.certificate)
    wanted = [_budget(entry.budget, counter=counter, technology=technology) for entry in then.entries]
    # What is printed as asked follows from the budget that is checked, whatever the file says beside it.
    then = replace(then, entries=tuple(replace(e, asked=str(b)) for e, b in zip(then.entries, wanted, strict=True)))
    places = [
        None if isinstance(b, CountedBudget) else _target(target, e.target)
        for e, b in zip(then.entries, wanted, strict=True)
    ]
    inputs = plan_inputs(plan, model, example_inputs)
    small = pruned(model, plan, inputs, weights)
    entries, device, versions = [], [], []
    for entry, budget, place in zip(then.entries, wanted, places, strict=True):
        gauge = gauge_for(budget, place, inputs, rules, seed)
        entries.append(_measure_entry(entry, budget, gauge, {DENSE: model, "pruned": small}, time_limit))
        if entry.environment:
            here = dict(gauge.environment)
            changed = {
                key: f"{key} {entry.environment.get(key, 'absent')} -> {here.get(key, 'absent')}"
                for key in dict.fromkeys((*entry.environment, *here))
                if entry.environment.get(key) != here.get(key)
            }
            device += [text for key, text in changed.items() if key in _DEVICE]
            versions += [text for key, text in changed.items() if key not in _DEVICE]
    now = Certificate(tuple(entries), time.strftime("%Y-%m-%d"), 1, then.versions, then.quality)
    return Recheck(then, now, "; ".join(dict.fromkeys(device)), "; ".join(dict.fromkeys(versions)))


def _measure_entry(
    then: Entry, budget: Budget, gauge: Gauge, networks: Mapping[str, nn.Module], time_limit: float
) -> Entry:
    """Measure the budget of ``then`` until its verdict is clear or the time is used up."""

    def judge(found: Mapping[str, Reading]) -> Entry:
        return entry_of(budget, gauge, then.predicted, found["pruned"], found[DENSE])

    return judge(gauge.read(networks, time_limit, decided=lambda found: judge(found).verdict != CANNOT_TELL))


def plan_inputs(plan: Plan, model: nn.Module, example_inputs: Any = None) -> tuple[Any, ...]:
    """The given inputs, or random ones of the shapes that the plan was made for."""
    if example_inputs is not None:
        return as_tensors(example_inputs)
    parameter = next(iter(model.parameters()), torch.empty(0))
    source = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=source).to(parameter.device, parameter.dtype) for s in plan.inputs)


def pruned(
    model: nn.Module, plan: Plan, inputs: tuple[Any, ...], weights: Mapping[str, Any] | None = None
) -> nn.Module:
    """The network of ``plan``, with ``weights`` (those of the small network) where they are given."""
    small = apply_plan(model, plan, inputs)
    if weights is not None:
        try:
            small.load_state_dict(weights)
        except RuntimeError as error:
            raise ModelError(
                f"the weights do not fit the pruned network ({' '.join(str(error).split())[:200]}); give the model.pt "
                "that was saved with this plan"
            ) from error
    return small


def _budget(content: Mapping[str, Any], **own: Any) -> Budget:
    try:
        return Budget.from_dict(content, **own)
    except BudgetError as error:
        raise PlanError(f"Cannot use a budget of the plan. {error}") from error


def _target(given: str | Target | None, title: str) -> Target:
    """The target that the user gave, by name or title (``"onnxruntime/cpu fp32 x1"``), or the plan's if it is local."""
    from profilers.targets import from_title, resolve

    if given is None:
        return from_title(title)
    if not isinstance(given, str):
        return resolve(given)
    name, *rest = given.split() or [""]
    try:
        threads = next((int(part[1:]) for part in rest if part[:1] == "x"), 1)
    except ValueError as error:
        raise ProfileError(f"Cannot read the target {given!r}. Write for example 'onnxruntime/cpu fp16 x4'.") from error
    precision = next((part for part in rest if part in ("fp32", "fp16")), "fp32")
    return resolve(name, precision=precision, threads=threads)
