"""One profile, step by step: channel groups, export, grid, design, measurements, store."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import nn

from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import MeasurementError, ProfileError
from dsa_hw.profiles import QUANTITIES, Profile
from dsa_hw.utils.text import unknown_name
from profilers import machine
from profilers.measuring import environment as environments
from profilers.measuring.bench import Bench
from profilers.measuring.energy_bench import EnergyBench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.reference import ReferenceFile
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder
from profilers.profiling import grid as grids
from profilers.profiling.design import Space, adaptive, corners, spread, work_of
from profilers.profiling.events import Event, Listener
from profilers.storage.store import Store, StoredConfiguration, identity
from profilers.storage.tables import measurements, read_profile
from profilers.targets import Loaded, Target

__all__ = ["ProfileJob", "bench_for"]

_log = logging.getLogger(__name__)

_WAVE_BYTES = 2**31  # memory for networks that are loaded at the same time
_WAVE = 64  # networks that are loaded at the same time
_LEAST = 12  # trusted configurations besides the hold-out; a profile with fewer is refused
_LEAST_SHARE = 0.9  # of the requested configurations, where that is fewer than 12
_FIRST_SHARE = 0.75  # of the time is for the first part of the design, the rest for the second and for repetitions
_SAVE_EVERY = 1.0  # seconds between transactions


@dataclass
class _Clock:
    """Seconds spent per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def bench_for(quantity: str, target: Target, *, counter: Any = None, **options: Any) -> Bench:
    """Return the bench that measures a quantity on a target.

    Args:
        quantity: "latency" or "energy".
        target: Where networks run.
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`; the device's own if None.
        **options: Further arguments of the bench.

    Raises:
        ProfileError: The quantity is unknown.
    """
    if quantity not in QUANTITIES:
        raise ProfileError(unknown_name("quantity", quantity, QUANTITIES, "quantities"))
    if quantity == "energy":
        return EnergyBench(target, counter, **options)
    return (target.bench_class or Bench)(target, **options)


class ProfileJob:
    """One call of `profilers.profile`, or the part of one kind of board in `profilers.fleet.profile_fleet`.

    Args:
        model: The network.
        inputs: Its example inputs.
        target: Where to measure.
        store: Where runs are kept.
        rules: The rules of measuring.
        references: Where references of the control workload are kept; the user's cache folder if None.
        reset_reference: Forget the reference of this environment.
        seed: Seed of the sampling and of the order of visits.
        name: Name of the network.
        groups: Its channel groups; found if None.
        deadline: When to stop, by ``time.monotonic``.
        limit: The time limit in seconds, for messages.
        listener: Called with the progress.
        quantity: "latency" or "energy".
        counter: The energy meter, see `profilers.measuring.counters.Counter.of`.
        builder: Builds configurations; made if None.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        target: Target,
        store: Store,
        *,
        rules: MeasuringRules,
        references: ReferenceFile | None,
        reset_reference: bool,
        seed: int,
        name: str,
        groups: ChannelGroups | None,
        deadline: float,
        limit: float,
        listener: Listener,
        quantity: str,
        counter: Any,
        builder: ConfigurationBuilder | None = None,
    ) -> None:
        self.clock = _Clock()
        self.model, self.inputs, self.target, self.store = model, inputs, target, store
        self.rules, self.seed, self.name, self.notify = rules, seed, name, listener
        self.deadline, self.limit = deadline, limit
        self.notify(Event("finding channel groups"))
        with self.clock.stage("channel groups"):
            self.groups = groups or find_groups(model, inputs)
        self.notify(Event("exporting once" if target.artefact == "onnx" else "preparing"))
        with self.clock.stage("export"):
            self.builder = builder or ConfigurationBuilder(model, self.groups, inputs, target)
        self.notify(Event("calibrating the control workload"))
        with self.clock.stage("calibration"):
            references = references or ReferenceFile()
            self.bench = bench_for(quantity, target, counter=counter, rules=rules, references=references, seed=seed)
            # The grid depends on the kernels. Time shows it within a second, energy would take minutes.
            self.timer = self.bench if quantity == "latency" else Bench(target, references=references, seed=seed)
            if reset_reference:
                references.reset(self.bench.key)
                store.forget_reference(self.bench.key)
            self.bench.calibrate()
        self.environment = self.bench.key
        self.network = self._register()
        self._unsaved: list[tuple[str, Samples]] = []
        self._saved = time.monotonic()

    def run(self, samples: int, holdout: int, grid: str | int) -> Profile:
        """Find the grid, draw configurations, measure them, and return the profile.

        Args:
            samples: Configurations besides the hold-out.
            holdout: Configurations of the hold-out.
            grid: "auto", or a number of channels.

        Raises:
            MeasurementError: Too few configurations can be trusted.
        """
        space = Space.of(self.groups.names, self.groups.sizes, self._grid(grid))
        with self.clock.stage("check"):
            self.notify(Event("checking against the shrunk network"))
            agreement = self.builder.check(self.seed)
        self._measure(self._first_design(space, samples, holdout), _FIRST_SHARE * self._left())
        design = self._full_design(space, samples)
        while self._measure(design, self._left()):  # a reference that fell makes finished measurements doubtful again
            pass
        self._refuse_or_warn(design, samples)
        return read_profile(
            self.store,
            self.network,
            self.environment,
            self.rules,
            breakdown=dict(self.clock.seconds),
            prepared=self.builder.how,
            agreement=agreement,
        )

    def _register(self) -> str:
        """Add environment and network to the store and return the identity of the network."""
        about = {
            "names": list(self.groups.names),
            "sizes": [int(c) for c in self.groups.sizes],
            "fingerprint": self.groups.fingerprint,
            "inputs": [[list(x.shape), str(x.dtype)] for x in self.inputs],
            # The fingerprint covers tensors; strides and pooling change the work of operations.
            "operations": [
                [o.kind, *(t(np.ones(len(self.groups))).item() for t in o.flops)] for o in self.groups.operations
            ],
        }
        network = identity(about)
        self.store.add_environment(self.environment, self.bench.environment)
        self.store.add_network(network, self.name, about)
        quantity = self.bench.environment.get("quantity")
        others = {
            id: about
            for id, about in self.store.environments_of(network, self.target.title).items()
            if about.get("quantity") == quantity
        }
        if others and self.environment not in others:
            changed = environments.differences(list(others.values())[-1], self.bench.environment)
            _log.warning(
                "%s contains measurements of this network from another environment (%s). They are kept separately, and "
                "this environment is measured from the beginning.",
                self.store.path,
                changed,
            )
        return network

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _grid(self, wanted: str | int) -> dict[str, int]:
        if wanted == "auto":
            wanted = self.target.known_grid() or wanted
        if wanted != "auto":
            try:
                found = grids.fixed_grid(self.groups, int(wanted))
            except ValueError as error:
                raise ProfileError(f"`grid` must be 'auto' or a number of channels from 1; got {wanted!r}.") from error
            self.store.set_grid(self.network, self.environment, found, [])
            return found
        known = self.store.grid(self.network, self.environment)
        if known is not None and known[1]:
            return known[0]
        with self.clock.stage("grid"):
            few = self.target.slow_to_load
            self.notify(Event("finding the grid"))
            swept = grids.sweeps(self.model, self.groups, self.inputs, 1 if few else 3)
            batch = int(self.inputs[0].shape[0])

            def show(what: str, _: Samples, so_far: Measurement) -> None:
                self.notify(Event("finding the grid", what, accepted=1 - so_far.rejected))

            found, evidence = grids.find_grid(
                self.timer, self.groups, swept, batch=batch, few=few, limit=max(self._left() / 4, 10), on_visit=show
            )
        self.store.set_grid(self.network, self.environment, found, [asdict(e) for e in evidence])
        return found

    def _first_design(self, space: Space, samples: int, holdout: int) -> list[StoredConfiguration]:
        """Add the hold-out, the dense network, corners and the evenly spread configurations; return all."""
        store, network, environment = self.store, self.network, self.environment
        drawn = corners(space)
        present = store.design(network, environment)
        held = [c.widths for c in present if c.split == "holdout"]
        others = [c.widths for c in present if c.split != "holdout"]
        avoid = {*(tuple(r.tolist()) for r in drawn), *held, *others}
        new = spread(space, max(holdout - len(held), 0), self.seed + 1, avoid)
        store.add_design(network, environment, new.tolist(), "holdout")
        held += [tuple(r) for r in new.tolist()]
        store.add_design(network, environment, drawn[:1].tolist(), "dense")
        even = max(int(np.ceil(0.75 * samples)), min(samples, len(drawn)))
        rows = [*drawn[1:].tolist(), *spread(space, even, self.seed, {*avoid, *held} - set(others)).tolist()][
            : even - 1
        ]
        if len(others) < samples:
            store.add_design(network, environment, rows[: samples - 1], "train")
        return store.design(network, environment)

    def _full_design(self, space: Space, samples: int) -> list[StoredConfiguration]:
        """Add the other configurations, where a simple model of the measured ones is most uncertain; return all."""
        present = self.store.design(self.network, self.environment)
        missing = samples - sum(c.split != "holdout" for c in present)
        found = measurements(self.store, self.network, self.environment, self.rules)
        usable = [c for c in present if c.split != "holdout" and c.id in found and found[c.id].trusted]
        if missing <= 0 or len(usable) < 2:
            return present
        pool = spread(space, 256, self.seed + 2, {c.widths for c in present})
        known = np.asarray([c.widths for c in usable], np.int64)
        values = np.asarray([found[c.id].value for c in usable])
        work, pool_work = work_of(self.groups, known), work_of(self.groups, pool)
        rows = adaptive(space, missing, known, values, work, pool, pool_work)
        self.store.add_design(self.network, self.environment, rows.tolist(), "train")
        return self.store.design(self.network, self.environment)

    def _measure(self, design: Sequence[StoredConfiguration], limit: float) -> bool:
        """Measure what is not finished and trusted, in waves that fit into memory; return whether anything was run."""
        found = measurements(self.store, self.network, self.environment, self.rules)
        pending = [c for c in design if c.id not in found or not (found[c.id].finished and found[c.id].trusted)]
        # Runs of a session that was disturbed too much do not count.
        quiet = {id for id, m in found.items() if m.hidden <= self.rules.worst}
        earlier = {c.id: found[c.id].samples for c in pending if c.id in quiet}
        rng = np.random.default_rng(self.seed)
        pending = [pending[i] for i in rng.permutation(len(pending))]
        wave = max(1, min(_WAVE, _WAVE_BYTES // max(3 * self.builder.size, 1)))
        end = time.monotonic() + limit
        measured = False
        for start in range(0, len(pending), wave):
            part = pending[start : start + wave]
            if time.monotonic() >= end:
                break
            networks: dict[str, Loaded] = {}
            with self.clock.stage("prepare"):
                for i, configuration in enumerate(part):
                    self.notify(Event("preparing", _short(configuration), (start + i) / len(pending)))
                    networks[configuration.id] = self.builder.load(configuration.widths)
                    self.bench.warm_up(networks[configuration.id])
            with self.clock.stage("measure"):
                share = len(part) / (len(pending) - start)
                disturbed = any(c.id in found and c.id not in quiet for c in part)
                if disturbed and not self.bench.wait_until_quiet(networks, share * (end - time.monotonic())):
                    continue
                span = (start / len(pending), len(part) / len(pending))
                measured |= self._wave(part, networks, earlier, max(share * (end - time.monotonic()), 0.0), span)
        return measured

    def _wave(
        self,
        part: Sequence[StoredConfiguration],
        networks: Mapping[str, Loaded],
        earlier: Mapping[str, Samples],
        limit: float,
        progress: tuple[float, float],
    ) -> bool:
        """Measure loaded networks in a session of the store; return whether there were any runs."""
        short = {c.id: _short(c) for c in part}
        ready = dict.fromkeys(short, 0.0)  # share of the runs that a configuration needs
        hidden = dict.fromkeys(short, 0.0)  # as far as the bench knows it while it measures
        tally = {"runs": 0, "accepted": 0}
        away = self.target.remote_device
        session = self.store.add_session(
            self.environment,
            f"profile {shlex.quote(self.name)}",
            machine.load_average() if away is None else away.state(),
            reference=self.bench.reference.seconds,
        )

        def save() -> None:
            scanned = self.bench.hidden_so_far(networks)
            shares = {id: max(hidden[id], scanned) for id, _ in self._unsaved}
            self._save(session, shares)

        def keep(id: str, samples: Samples, so_far: Measurement) -> None:
            self._unsaved.append((id, samples))
            hidden[id] = so_far.hidden
            accepted = int(samples.accepted(self.bench.reference.seconds, self.rules).sum())
            tally["runs"] += len(samples)
            tally["accepted"] += accepted
            ready[id] = min(ready[id] + accepted / so_far.needed[0], 1.0)
            done = progress[0] + progress[1] * sum(ready.values()) / len(ready)
            self.notify(Event("measuring", short[id], done, tally["accepted"] / max(tally["runs"], 1)))
            if time.monotonic() - self._saved > _SAVE_EVERY:
                save()

        try:
            result = self.bench.measure_once(networks, limit=limit, earlier=earlier, on_visit=keep)
        except BaseException:
            save()
            raise
        self._save(session, {id: m.hidden for id, m in result.items()})
        return tally["runs"] > 0

    def _save(self, session: int, hidden: Mapping[str, float]) -> None:
        self.store.add_samples(session, self._unsaved, reference=self.bench.reference.seconds, hidden=hidden)
        self._unsaved = []
        self._saved = time.monotonic()

    def _refuse_or_warn(self, design: Sequence[StoredConfiguration], samples: int) -> None:
        """Refuse a profile with too few trusted configurations; warn of the others that are left out."""
        found = measurements(self.store, self.network, self.environment, self.rules)
        doubtful = [c for c in design if c.id not in found or not found[c.id].trusted]
        if not doubtful:
            return
        fitted = [c for c in design if c.split != "holdout"]
        usable = len(fitted) - sum(c.split != "holdout" for c in doubtful)
        if usable < min(_LEAST, math.ceil(_LEAST_SHARE * min(samples, len(fitted)))):
            tried = {f"configuration {found[c.id].what}": found[c.id] for c in doubtful if c.id in found}
            if tried:
                raise self.bench.explain(tried, self.limit)
            raise MeasurementError(
                f"Only {usable} of {len(fitted)} configurations were measured within the time limit of "
                f"{self.limit:.0f} s. Give more time with --time-limit. The same command continues."
            )
        _log.warning(
            "%d of %d configurations could not be measured precisely enough and are left out. The same command "
            "continues.",
            len(doubtful),
            len(design),
        )


def _short(configuration: StoredConfiguration) -> str:
    """Return a configuration as text for a progress bar."""
    widths = configuration.widths
    shown = ",".join(map(str, widths[:6])) + ("..." if len(widths) > 6 else "")
    return f"{configuration.split} {shown}"
