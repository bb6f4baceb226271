"""Verification on a simulated machine: a verdict as soon as it is clear, and all the time where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from budgets import LatencyBudget
from dsa_hw import find_groups, shrink
from dsa_hw.channels.plan import Plan, PrunedNetwork
from dsa_hw.pipeline.certificate import Certificate, entry_of
from dsa_hw.pipeline.meters import DENSE, DeviceMeter
from dsa_hw.pipeline.quality import unknown_quality
from dsa_hw.pipeline.reading import Reading
from dsa_hw.pipeline.verification import verify
from profilers import MeasuringRules
from tests.fakes.formula import Net
from tests.fakes.machine import Machine, SimulatedDevice


def halved(net: Net, example: torch.Tensor) -> tuple[Any, list[Any], torch.nn.Module]:
    groups = find_groups(net, (example,))
    kept = [torch.arange(int(c) // 2).numpy() for c in groups.sizes]
    return groups, kept, shrink(net, groups, kept)


def certified(net: Net, example: torch.Tensor, device: SimulatedDevice, share: float) -> Plan:
    """A plan that keeps half of each group, certified with a budget of which it truly uses ``share``."""
    groups, kept, small = halved(net, example)
    meter = DeviceMeter(device, (example,), MeasuringRules(statistic="median"))
    found = meter.read({DENSE: net, "pruned": small}, 60)
    budget = LatencyBudget(f"{100 * device.truth(small) / device.truth(net) / share!r}%")
    entry = entry_of(budget, meter, found["pruned"].value, found["pruned"], found[DENSE])
    network = PrunedNetwork.of(small, (example,))
    return Plan.of(
        groups,
        kept,
        Certificate((entry,), "2026-11-16", 1, unknown_quality("not measured", "noise")).to_dict(),
        network,
    )


@pytest.mark.parametrize("share", [0.96, 0.98])
def test_a_certificate_that_is_met_still_holds_on_the_same_quiet_machine(
    net: Net, example: torch.Tensor, share: float
) -> None:
    machine = Machine(jitter=0.02)
    device = SimulatedDevice(machine)
    plan = certified(net, example, device, share)
    assert plan.certificate is not None
    assert plan.certificate["verdict"] == "MET"
    for seed in range(2):
        begin = machine.now
        found = verify(plan, net, example_inputs=example, target=device, time_limit=60, seed=seed)
        assert found.now.verdict == "MET", str(found)
        assert str(found).startswith("The certificate of 2026-11-16 still holds.\n")
        assert machine.now - begin < 60, "it stops when the verdict is clear"


def test_reading_goes_on_until_it_is_decided_precise_or_the_time_is_used(net: Net, example: torch.Tensor) -> None:
    machine = Machine(load_effect=0.1)  # such copies take minutes until their ratio is known
    meter = DeviceMeter(SimulatedDevice(machine), (example,), MeasuringRules(statistic="median"))
    networks = {DENSE: net, "pruned": halved(net, example)[2]}
    looks: list[tuple[int, float]] = []

    def undecided(found: Mapping[str, Reading]) -> bool:
        share = found["pruned"].share
        assert share is not None
        looks.append((found["pruned"].look, share.halfwidth()))
        return False

    begin = machine.now
    meter.read(networks, 60, decided=lambda _: True)
    assert machine.now - begin < 20, "it is decided at the first look"
    begin = machine.now
    found = meter.read(networks, 60, decided=undecided)
    assert machine.now - begin >= 60
    assert found["pruned"].share is not None
    assert found["pruned"].share.halfwidth() < 0.8 * looks[0][1], "the interval shrinks"
    assert [look for look, _ in looks] == [2, 3, 4], "in a few looks, which share half of the error rate"
    assert found["pruned"].look == 1, "the last look has the other half"


def test_a_slower_machine_does_not_change_a_share(net: Net, example: torch.Tensor) -> None:
    machine = Machine()
    device = SimulatedDevice(machine)
    plan = certified(net, example, device, 0.97)
    machine.slowdown = lambda t: 1.3
    found = verify(plan, net, example_inputs=example, target=device, time_limit=20)
    assert found.now.verdict == "MET", str(found)
    assert found.now.entries[0].dense > 1.2 * found.then.entries[0].dense


def test_inconclusive_is_said_when_more_of_the_same_sitting_cannot_tell(net: Net, example: torch.Tensor) -> None:
    """Exactly at the limit, no measurement can tell; a disturbed one is not given up before the time is over."""
    for load_effect, seconds in ((0.0, (0, 15)), (0.1, (30, 45))):
        machine = Machine(load_effect=load_effect)
        device = SimulatedDevice(machine)
        plan = certified(net, example, device, 1.0)
        begin = machine.now
        found = verify(plan, net, example_inputs=example, target=device, time_limit=30)
        assert found.now.verdict == "INCONCLUSIVE"
        assert seconds[0] <= machine.now - begin <= seconds[1]
        answer = "Inconclusive: cannot determine whether the certificate of 2026-11-16 still holds.\n"
        assert str(found).startswith(answer)
        assert str(found).endswith("every sitting adds to what is known"), "and it says what to do"
