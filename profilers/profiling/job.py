"""One profile, step by step: channel groups, export, grid, design, measurements, store."""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from dsa_hw.channels import ChannelGroups, find_groups
from dsa_hw.errors import MeasurementError, ProfileError
from dsa_hw.profiles import QUANTITIES, Profile
from dsa_hw.utils.text import unknown_name
from profilers import machine
from profilers.measuring import environment as environments
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.energy_bench import EnergyBench
from profilers.measuring.measurement import Measurement, Samples
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import Scatter, SittingFile, anchor_widths
from profilers.networks.builder import ConfigurationBuilder
from profilers.profiling import grid as grids
from profilers.profiling.design import Space, adaptive, corners, spread, work_of
from profilers.profiling.events import Event, Listener
from profilers.storage.store import Store, StoredConfiguration, identity
from profilers.storage.tables import measurements, read_profile
from profilers.targets import Target

__all__ = ["ProfileJob", "bench_for", "described"]

_log = logging.getLogger(__name__)

_WAVE_BYTES = 2**31  # memory for networks that are loaded at the same time
_WAVE = 64  # networks that are loaded at the same time
_FIRST_SHARE = 0.75  # of the time is for the first part of the design, the rest for the second
_WIDEST = 0.10  # half-width of the dense network's interval within the sitting; a wider one is refused
_LEAST = 12  # configurations besides the hold-out; a profile with fewer is refused
_FITTED = ("dense", "train")  # the parts of a design that cost models are fitted to
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
        sittings: Where the scatter of sittings is kept; the user's cache folder if None.
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
        sittings: SittingFile | None = None,
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
        network = (self.groups.fingerprint, described(self.inputs))
        options = {"rules": rules, "sittings": sittings, "seed": seed}
        self.bench = bench_for(quantity, target, counter=counter, network=network, **options)
        # The grid depends on the kernels. Time shows it within a second, energy would take minutes.
        self.timer = self.bench if quantity == "latency" else Bench(target, seed=seed)
        self.environment = self.bench.key
        self.network = self._register()
        self._session: int | None = None
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
        first = self._first_design(space, samples, holdout)
        share = len(first) / max(samples + holdout + 2, len(first))  # of all configurations, with dense and anchor
        self._measure(first, _FIRST_SHARE * self._left(), (0.0, share))
        design = self._full_design(space, samples)
        self._measure(design, self._left(), (share, 1 - share))
        self._narrow_scale(design)
        found = self._found()
        anchor = next((found[c.id] for c in design if c.split == "anchor" and c.id in found), None)
        if anchor is not None:
            self.bench.record(self._of_session(anchor))
            found = self._found()  # with what this sitting tells about the scatter
        self._refuse_or_warn(design, found, samples)
        return read_profile(
            self.store,
            self.network,
            self.environment,
            self.rules,
            self.bench.scatter,
            breakdown=dict(self.clock.seconds),
            prepared=self.builder.how,
            agreement=agreement,
        )

    def _found(self) -> dict[str, Measurement]:
        return measurements(self.store, self.network, self.environment, self.rules, self.bench.scatter)

    def _of_session(self, anchor: Measurement) -> Measurement:
        """Return the anchor as this session alone measured it."""
        return replace(
            anchor,
            samples=anchor.samples.of_sitting(self._session),
            dense=anchor.dense.of_sitting(self._session),
        )

    def _register(self) -> str:
        """Add environment and network to the store and return the identity of the network."""
        about = {
            "names": list(self.groups.names),
            "sizes": [int(c) for c in self.groups.sizes],
            "fingerprint": self.groups.fingerprint,
            "inputs": described(self.inputs),
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

            def show(_: Mapping[str, Samples]) -> None:
                self.notify(Event("finding the grid"))

            found, evidence = grids.find_grid(
                self.timer, self.groups, swept, batch=batch, few=few, limit=max(self._left() / 4, 10), on_round=show
            )
        self.store.set_grid(self.network, self.environment, found, [asdict(e) for e in evidence])
        return found

    def _first_design(self, space: Space, samples: int, holdout: int) -> list[StoredConfiguration]:
        """Add the hold-out, the dense network, corners and the evenly spread configurations; return all."""
        store, network, environment = self.store, self.network, self.environment
        drawn = corners(space)
        present = store.design(network, environment)
        held = [c.widths for c in present if c.split == "holdout"]
        others = [c.widths for c in present if c.split in _FITTED]
        avoid = {*(tuple(r.tolist()) for r in drawn), *held, *others}
        if self.target.estimated is None:
            avoid.add(anchor_widths(space.sizes))
        new = spread(space, max(holdout - len(held), 0), self.seed + 1, avoid)
        store.add_design(network, environment, new.tolist(), "holdout")
        held += [tuple(r) for r in new.tolist()]
        store.add_design(network, environment, drawn[:1].tolist(), "dense")
        if self.target.estimated is None:
            store.add_design(network, environment, [anchor_widths(space.sizes)], "anchor")
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
        missing = samples - sum(c.split in _FITTED for c in present)
        found = self._found()
        usable = [c for c in present if c.split in _FITTED and c.id in found]
        if missing <= 0 or len(usable) < 2:
            return present
        pool = spread(space, 256, self.seed + 2, {c.widths for c in present})
        known = np.asarray([c.widths for c in usable], np.int64)
        values = np.asarray([found[c.id].value for c in usable])
        work, pool_work = work_of(self.groups, known), work_of(self.groups, pool)
        rows = adaptive(space, missing, known, values, work, pool, pool_work)
        self.store.add_design(self.network, self.environment, rows.tolist(), "train")
        return self.store.design(self.network, self.environment)

    def _measure(self, design: Sequence[StoredConfiguration], limit: float, progress: tuple[float, float]) -> None:
        """Measure what is not finished, in waves that fit into memory, each beside the dense network.

        ``progress``: the share of the profile that is done before, and the share that this is.
        """
        found = self._found()
        dense = next(c for c in design if c.split == "dense")
        pending = [c for c in design if c.split != "dense" and not self._done(found.get(c.id))]
        rng = np.random.default_rng(self.seed)
        pending = [pending[i] for i in rng.permutation(len(pending))]
        wave = max(1, min(_WAVE, _WAVE_BYTES // max(self.builder.size, 1)))
        end = time.monotonic() + limit
        for start in range(0, len(pending), wave):
            part = pending[start : start + wave]
            if start and time.monotonic() >= end:
                break
            share = len(part) / (len(pending) - start)
            span = (progress[0] + progress[1] * start / len(pending), progress[1] * len(part) / len(pending))
            with self.clock.stage("measure"):
                self._wave(part, dense, found, max(share * (end - time.monotonic()), 0.0), span)

    def _narrow_scale(self, design: Sequence[StoredConfiguration]) -> None:
        """Measure the dense network until its interval is narrow enough for a scale, or the time is over."""
        dense = next(c for c in design if c.split == "dense")
        while (whole := self._found().get(dense.id)) is not None and _scale_doubt(whole) and self._left() > 0:
            self.notify(Event("measuring the dense network again"))
            with self.clock.stage("measure"):
                self._wave([], dense, {}, self._left(), (1.0, 0.0))

    def _done(self, m: Measurement | None) -> bool:
        """Return whether another measurement in this session is of no use."""
        return m is not None and m.finished and (m.trusted or len(m.samples.of_sitting(self._session)) > 0)

    def _wave(
        self,
        part: Sequence[StoredConfiguration],
        dense: StoredConfiguration,
        found: Mapping[str, Measurement],
        limit: float,
        progress: tuple[float, float],
    ) -> None:
        """Measure networks in the session of this job."""
        away = self.target.remote_device
        if self._session is None:
            load = machine.load_average() if away is None else away.state()
            self._session = self.store.add_session(self.environment, f"profile {shlex.quote(self.name)}", load)
        ids = {c.id: c.id for c in part} | {DENSE: dense.id}
        # What is finished and still not as precise as required is measured again, in a sitting of its own.
        earlier = {c.id: found[c.id].samples for c in part if c.id in found and not found[c.id].finished}
        if dense.id in found:
            earlier[DENSE] = found[dense.id].samples
        needed = max(len(part) * self.rules.least_blocks * self.rules.rounds, 1)
        made = 0

        def keep(new: Mapping[str, Samples]) -> None:
            nonlocal made
            self._unsaved += [(ids[name], samples) for name, samples in new.items()]
            made += sum(len(samples) for name, samples in new.items() if name != DENSE)
            self.notify(Event("measuring", "", progress[0] + progress[1] * min(made / needed, 1.0)))
            if time.monotonic() - self._saved > _SAVE_EVERY:
                self._save()

        try:
            self.bench.measure(
                {c.id: self.builder.loadable(c.widths) for c in part},
                self.builder.loadable(dense.widths),
                limit=limit,
                earlier=earlier,
                sitting=self._session,
                on_round=keep,
            )
        finally:
            self._save()

    def _save(self) -> None:
        assert self._session is not None
        unsaved, self._unsaved = self._unsaved, []
        self._saved = time.monotonic()
        self.store.add_samples(self._session, unsaved)

    def _refuse_or_warn(
        self, design: Sequence[StoredConfiguration], found: Mapping[str, Measurement], samples: int
    ) -> None:
        """Refuse a profile without enough configurations, or less precise than the user requires; warn otherwise."""
        missing = [c for c in design if c.id not in found]
        fitted = [c for c in design if c.split in _FITTED]
        usable = sum(c.id in found for c in fitted)
        if usable < min(_LEAST, samples, len(fitted)):
            raise MeasurementError(
                f"Only {usable} of {len(fitted)} configurations were measured within the time limit of "
                f"{self.limit:.0f} s. Give more time with --time-limit. The same command continues."
            )
        if missing:
            _log.warning(
                "%d of %d configurations were not measured within the time limit. The same command continues.",
                len(missing),
                len(design),
            )
        whole = next(found[c.id] for c in design if c.split == "dense")
        others = [c for c in design if c.id in found and c.split != "dense"]
        doubtful = {_short(c): found[c.id] for c in others if not found[c.id].trusted}
        if self.rules.require is None and (alone := _scale_doubt(whole)):
            doubtful = {"the dense network": alone}
        if doubtful:
            raise self.bench.refuse(doubtful, self.limit)


def _scale_doubt(dense: Measurement) -> Measurement | None:
    """Return the dense network's measurement within these sittings if its interval is too wide for a scale."""
    within = replace(dense, scatter=Scatter(ratio=0.0, scale=0.0), rules=replace(dense.rules, require=_WIDEST))
    return None if within.trusted else within


def described(inputs: Sequence[Any]) -> list[list[Any]]:
    """Return shape and type of each input, as plain data."""
    return [[list(x.shape), str(x.dtype)] for x in inputs]


def _short(configuration: StoredConfiguration) -> str:
    """Return a configuration as text for a message."""
    widths = configuration.widths
    shown = ",".join(map(str, widths[:6])) + ("..." if len(widths) > 6 else "")
    return f"{configuration.split} {shown}"
