"""Profiles from a fleet: one for each kind of board, all in one store."""

from __future__ import annotations

import contextlib
import copy
import ipaddress
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pandas as pd
from torch import nn

from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.utils.inputs import as_tensors
from profilers.fleet.bench import OnFleet, SlowOnFleet
from profilers.fleet.members import Fleet, Kind
from profilers.fleet.on_worker import Memory
from profilers.measuring.rules import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder
from profilers.profiling.events import Event
from profilers.profiling.job import ProfileJob
from profilers.storage.store import Store

if TYPE_CHECKING:
    from dsa_hw.channels import ChannelGroups

__all__ = ["check_address", "connected", "profile_fleet"]

_log = logging.getLogger(__name__)


def profile_fleet(
    model: nn.Module,
    example_inputs: Any,
    fleet: str,
    target: str = "auto/cpu",
    *,
    samples: int = 40,
    holdout: int = 10,
    grid: str | int = "auto",
    out: str | Path | None = None,
    time_limit: float = 600.0,
    precision: str = "fp32",
    threads: int = 1,
    statistic: str = "quiet",
    rules: MeasuringRules | None = None,
    reset_reference: bool = False,
    seed: int = 0,
    name: str | None = None,
    groups: ChannelGroups | None = None,
    listener: Callable[[Event], None] | None = None,
) -> dict[str, pd.DataFrame]:
    """A profile table for each kind of board behind the Dask scheduler at ``fleet`` ("tcp://host:8786", "tls://...").

    Boards are workers that declare ``target`` as a Dask resource ("onnxruntime/cpu"; "auto/cpu" takes every runtime on
    the device, "auto/any" every board). Kinds are boards with equal environments whose controls agree to half of the
    rules' tolerance (the other half is for disturbances). Keys are the kinds in words, the fastest board's first;
    tables and other arguments are those of `profilers.profile`, and every kind gets ``samples`` and ``holdout``
    configurations. Results are stored as they come, so the same call continues after an interruption.
    """
    from dsa_hw.channels import find_groups

    if samples < 2 or holdout < 0:
        raise ProfileError(f"{samples} samples and {holdout} hold-out asked for; use at least 2 and 0")
    if time_limit <= 0:
        raise ProfileError(f"a time limit of {time_limit} s was asked for; give a positive number of seconds")
    rules = rules or MeasuringRules(statistic=statistic)
    deadline = time.monotonic() + time_limit
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "profile.sqlite"
        place = out
        with Store(place) as store:  # first: a file that cannot be used is refused before any work
            rows = store.table("environments")
        known = [json.loads(row[rows[0].index("description")]) for row in rows[1]]
        client = stack.enter_context(connected(fleet))
        inputs = as_tensors(example_inputs)
        many = _Listeners(listener or (lambda event: None))
        many.say(Event("finding channel groups"))
        found_groups = groups or find_groups(model, inputs)
        found = Fleet(client, target, precision, threads, reset=reset_reference)
        many.say(Event("introducing the boards"))
        kinds = found.meet(known, rules.tolerance / 2)
        targets = {kind: (SlowOnFleet if kind.about["slow_to_load"] else OnFleet)(found, kind) for kind in kinds}
        many.say(Event("exporting once"))
        builder = ConfigurationBuilder(model, found_groups, inputs, targets[kinds[0]])

        def job(kind: Kind) -> pd.DataFrame:
            with Store(place) as store:
                return ProfileJob(
                    copy.deepcopy(model),  # hooks are put on it, and kinds run side by side
                    inputs,
                    targets[kind],
                    store,
                    rules=rules,
                    references=Memory(),
                    reset_reference=reset_reference,
                    seed=seed,
                    name=name or type(model).__name__,
                    groups=found_groups,
                    deadline=deadline,
                    limit=time_limit,
                    listener=many.of(str(kind)),
                    quantity="latency",
                    counter=None,
                    builder=builder.for_target(targets[kind]),
                ).run(samples, holdout, grid)

        tables = _side_by_side(job, kinds, found.stop)
    titles = [kind.title for kind in kinds]
    return {
        kind.title if titles.count(kind.title) == 1 else str(kind): table
        for kind, table in zip(kinds, tables, strict=True)
    }


def _side_by_side(job: Callable[[Kind], pd.DataFrame], kinds: list[Kind], stop: threading.Event) -> list[pd.DataFrame]:
    """All kinds at once; an error of one does not stop the others, and is raised when they are done."""
    with ThreadPoolExecutor(len(kinds)) as pool:
        futures = [pool.submit(job, kind) for kind in kinds]
        try:
            errors = [future.exception() for future in futures]
        except BaseException:
            stop.set()  # Ctrl-C: the threads store what they have
            raise
    wrong = [(kind, error) for kind, error in zip(kinds, errors, strict=True) if error is not None]
    for kind, error in wrong[1:]:
        _log.warning("%s: %s", kind, error)
    if wrong:
        kind, error = wrong[0]
        if len(kinds) > 1 and isinstance(error, DsaError):
            done = len(kinds) - len(wrong)
            raise type(error)(f"{kind}: {error} ({done} of {len(kinds)} kinds are profiled and stored)") from error
        raise error
    return [future.result() for future in futures]


class _Listeners:
    """One listener for several kinds: says which, and how far all of them are."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._done: dict[str, float] = {}

    def say(self, event: Event) -> None:
        with self._lock:
            self._listener(event)

    def of(self, kind: str) -> Callable[[Event], None]:
        self._done[kind] = 0.0

        def say(event: Event) -> None:
            with self._lock:
                if event.done is not None:
                    self._done[kind] = event.done
                share = None if event.done is None else sum(self._done.values()) / len(self._done)
                what = event.what if len(self._done) == 1 else f"{event.what} on {kind}"
                self._listener(Event(event.stage, what, share, event.accepted))

        return say


@contextlib.contextmanager
def connected(fleet: str) -> Iterator[Any]:
    """A Dask client; certificates of ``tls://`` come from Dask's own configuration."""
    check_address(fleet)
    try:
        import dask
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(
            f"--fleet {fleet} needs the package distributed, which is not installed; pip install 'dsa-hw[fleet]'"
        ) from error
    # Networks are large, and are meant to be sent; Dask would warn about each.
    quiet = {"distributed.admin.large-graph-warning-threshold": "4GiB"}
    with dask.config.set(quiet):
        try:
            client = Client(fleet, timeout="10s", set_as_default=False)  # type: ignore[no-untyped-call]
        except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
            raise MeasurementError(
                f"the scheduler at {fleet} cannot be reached ({' '.join(str(error).split())[:200]}); start it with "
                "dask scheduler, and for tls:// set its certificates in Dask's configuration (docs/guide/fleets.md)"
            ) from error
        with client:
            yield client


def check_address(fleet: str) -> None:
    """Refuse what is no address; warn where the connection is open to others."""
    address = fleet if "://" in fleet else f"tcp://{fleet}"
    try:
        parts = urlsplit(address)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise ProfileError(f"--fleet {fleet}: {error}; write tcp://scheduler:8786 or tls://scheduler:8786") from error
    if scheme not in ("tcp", "tls") or not host or port is None:
        raise ProfileError(f"--fleet {fleet} is no address; write tcp://scheduler:8786 or tls://scheduler:8786")
    if scheme == "tcp" and not _loopback(host):
        _log.warning(
            "--fleet %s: the connection is neither encrypted nor authenticated, and who can reach it can run code on "
            "every board and here; use tls:// (docs/guide/fleets.md), or an ssh tunnel to a scheduler on 127.0.0.1",
            fleet,
        )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
