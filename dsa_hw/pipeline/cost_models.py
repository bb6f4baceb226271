"""Cost models of measured budgets: from new measurements, a store, a profile, or a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import budgets
import profilers
from budgets import CostModel
from budgets.profile_rows import MINIMUM
from dsa_hw.channels import ChannelGroups
from dsa_hw.errors import ProfileError
from dsa_hw.methods.costs import check_network
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.profiles import Profile
from profilers.measuring.environment import environment
from profilers.networks.builder import ConfigurationBuilder
from profilers.profiling.events import Event

if TYPE_CHECKING:
    from profilers import MeasuringRules
    from profilers.targets import Target

__all__ = ["FITTING", "Task", "fit_cost_model", "profile_for"]

FITTING = "fitting the cost model"
"""What a listener is told before a cost model is fitted."""


@dataclass(frozen=True, eq=False)
class Task:
    """The network to prune, and what does not depend on the budgets or the method.

    Attributes:
        model: The dense network; never changed.
        groups: Its channel groups.
        inputs: Example inputs.
        profiling: How cost models are obtained.
        minimum: Smallest keep ratio.
        seed: Seed of everything random.
        store: Where measurements are kept and continued; None keeps none.
        listener: Called with each event of a profile.
        builders: What builds configurations, by the title of the target; see `builder`.
    """

    model: nn.Module
    groups: ChannelGroups
    inputs: tuple[Any, ...]
    profiling: ProfileOptions = field(default_factory=ProfileOptions)
    minimum: float = 0.05
    seed: int = 0
    store: Path | None = None
    listener: Callable[[Any], None] | None = None
    builders: dict[str, ConfigurationBuilder] = field(default_factory=dict)

    def builder(self, target: Target) -> ConfigurationBuilder:
        """Return what builds configurations for a target; made, and the network exported, at the first call."""
        if target.title not in self.builders:
            if self.listener is not None:
                self.listener(Event("exporting once" if target.artefact == "onnx" else "preparing"))
            self.builders[target.title] = ConfigurationBuilder(self.model, self.groups, self.inputs, target)
        return self.builders[target.title]

    @property
    def name(self) -> str:
        """The name of the network in the store."""
        return self.profiling.name or type(self.model).__name__


def fit_cost_model(
    task: Task,
    target: Target,
    rules: MeasuringRules,
    *,
    source: Any = None,
    quantity: str = "latency",
    counter: Any = None,
) -> CostModel:
    """Return the cost model of a network on a target.

    Args:
        task: The network.
        target: Where it is measured.
        rules: How it is measured.
        source: Where the model comes from (see `ProfileOptions.source`); None measures.
        quantity: "latency" or "energy".
        counter: The energy counter; None finds the device's own.

    Returns:
        A fitted cost model of this network on this target.

    Raises:
        ProfileError: The source is of another network or target, or there are too few configurations.
        MeasurementError: Too few measurements can be trusted.
    """
    groups = task.groups
    if isinstance(source, Mapping):
        source = source.get(target.title, source.get(target.name))
    if isinstance(source, CostModel):
        check_network(source, groups)
        _check_target(source.provenance.target, target)
        return source
    if isinstance(source, (str, Path)) and Path(source).suffix == ".json":
        force = task.profiling.force
        return budgets.load_cost_model(source, groups, target=target.title, environment=target.describe(), force=force)
    profile = profile_for(task, target, rules, source=source, quantity=quantity, counter=counter)
    if task.listener is not None:
        task.listener(Event(FITTING))
    return budgets.fit(profile, groups)


def profile_for(
    task: Task,
    target: Target,
    rules: MeasuringRules,
    *,
    source: Any = None,
    quantity: str = "latency",
    counter: Any = None,
) -> Profile:
    """Return the profile of a network on a target; the arguments are those of `fit_cost_model`.

    Raises:
        ProfileError: The source has no such profile, or there are too few configurations.
        MeasurementError: Too few measurements can be trusted.
    """
    if isinstance(source, Profile):
        profile = source
    elif isinstance(source, (str, Path)):
        profile = _stored(Path(source), task.groups, target, rules, quantity)
    elif source is None:
        profile = _measured(task, target, rules, quantity, counter)
    else:
        raise ProfileError(
            f"The source of measurements must be a store (.sqlite) or a Profile; got {type(source).__name__}."
        )
    _check_target(profile.target, target)
    return profile


def _measured(task: Task, target: Target, rules: MeasuringRules, quantity: str, counter: Any) -> Profile:
    options, least = task.profiling, MINIMUM + 2  # the dense network and a repetition are not fitted
    if options.samples < least:
        raise ProfileError(f"A cost model needs at least {least} samples, 40 for a good one; got {options.samples}.")
    return profilers.profile(
        task.model,
        task.inputs,
        target,
        samples=options.samples,
        holdout=options.holdout,
        grid=options.grid,
        out=task.store,
        time_limit=options.time_limit,
        rules=rules,
        seed=task.seed,
        name=task.name,
        groups=task.groups,
        listener=task.listener,
        quantity=quantity,
        counter=counter,
        builder=task.builder(target),
    )


def _stored(path: Path, groups: ChannelGroups, target: Target, rules: MeasuringRules, quantity: str) -> Profile:
    profiles = profilers.load_tables(path, rules=rules).profiles
    fitting = [p for p in profiles.values() if p.fingerprint == groups.fingerprint]
    here = [p for p in fitting if (p.target, p.quantity) == (target.title, quantity)]
    if not here:
        held = sorted({f"{name} on {where}" for name, where, _ in profiles})
        raise ProfileError(
            f"{path} has no {quantity} profile of this network on {target.title}; it has {'; '.join(held)}. Profile "
            "this network on this target, or leave the source out."
        )
    if len(here) > 1:  # the same target in several environments: other versions, or different boards of a fleet
        now = dict(environment(target))
        same = [p for p in here if dict(p.environment) == now]
        if len(same) != 1:
            raise ProfileError(
                f"{path} has {len(here)} profiles of this network on {target.title} from different environments. "
                f"Choose one of profilers.load_tables({str(path)!r}).profiles as the source."
            )
        here = same
    return here[0]


def _check_target(found: str, target: Target) -> None:
    if found not in (target.title, target.name):
        raise ProfileError(
            f"The profile is of {found}, but the budget is on {target.title}. Profile that target, or name the other "
            "one in the budget."
        )
