"""Profile on a fleet: one profile for each type of board, all in one store."""

from __future__ import annotations

import contextlib
import copy
import ipaddress
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torch import nn

from dsa_hw.channels import find_groups
from dsa_hw.errors import DsaError, MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.profiles import Profile
from dsa_hw.utils.inputs import as_tensors
from dsa_hw.utils.text import one_line
from profilers.fleet.bench import FleetTarget, SlowFleetTarget
from profilers.fleet.members import BoardType, Fleet
from profilers.measuring.rules import MeasuringRules
from profilers.measuring.sittings import SittingFile
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
    sittings: SittingFile | None = None,
    seed: int = 0,
    name: str | None = None,
    groups: ChannelGroups | None = None,
    listener: Callable[[Event], None] | None = None,
    insecure: bool = False,
) -> dict[str, Profile]:
    """Profile a network on every type of board of a fleet.

    Boards are Dask workers that declare ``target`` as a resource. Boards have the same type if their environments are
    equal. Every type gets ``samples`` and ``holdout`` configurations. Results are stored as they arrive, so that the
    same call continues after an interruption.

    Args:
        model: The network.
        example_inputs: Its inputs, a tensor or a tuple of tensors.
        fleet: Address of the Dask scheduler, "tls://host:8786"; "tcp://127.0.0.1:8786" on this computer.
        target: The resource, e.g. "onnxruntime/cpu"; "auto/cpu" is every runtime on the CPU, "auto/any" everything.
        samples: Configurations to fit a cost model, at least 2.
        holdout: Further configurations to test it.
        grid, out, time_limit, precision, threads, statistic, rules, sittings, seed, name, groups, listener:
            As in `profilers.profile`.
        insecure: Accept "tcp://" to another computer, where anyone who can reach the port can run code on every board
            and on this computer.

    Returns:
        The profile of each type of board. A key is the title of the target, with what differs in the environment where
        several types have the same title.

    Raises:
        ProfileError: An argument is invalid, or no worker declares ``target``.
        MeasurementError: The scheduler cannot be reached, or no board can measure.
        MissingDependencyError: Dask is not installed.
    """
    if samples < 2 or holdout < 0:
        raise ProfileError(f"`samples` must be at least 2 and `holdout` at least 0; got {samples} and {holdout}.")
    if time_limit <= 0:
        raise ProfileError(f"`time_limit` must be a positive number of seconds; got {time_limit}.")
    rules = rules or MeasuringRules(statistic=statistic)
    deadline = time.monotonic() + time_limit
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "profile.sqlite"
        place = out
        Store(place).close()  # first, so that an unusable file is refused before any work
        client = stack.enter_context(connected(fleet, insecure))
        inputs = as_tensors(example_inputs)
        many = _Listeners(listener or (lambda event: None))
        many.say(Event("finding channel groups"))
        found_groups = groups or find_groups(model, inputs)
        found = Fleet(client, target, precision, threads)
        many.say(Event("describing the boards"))
        board_types = found.discover()
        targets = {
            board_type: (SlowFleetTarget if board_type.about["slow_to_load"] else FleetTarget)(found, board_type)
            for board_type in board_types
        }
        many.say(Event("exporting once"))
        builder = ConfigurationBuilder(model, found_groups, inputs, targets[board_types[0]])

        def job(board_type: BoardType) -> Profile:
            with Store(place) as store:
                return ProfileJob(
                    copy.deepcopy(model),  # hooks are put on it, and types run in parallel
                    inputs,
                    targets[board_type],
                    store,
                    rules=rules,
                    sittings=sittings,
                    seed=seed,
                    name=name or type(model).__name__,
                    groups=found_groups,
                    deadline=deadline,
                    limit=time_limit,
                    listener=many.of(str(board_type)),
                    quantity="latency",
                    counter=None,
                    builder=builder.for_target(targets[board_type]),
                ).run(samples, holdout, grid)

        tables = _in_parallel(job, board_types, found.stop)
    return {str(board_type): table for board_type, table in zip(board_types, tables, strict=True)}


def _in_parallel(
    job: Callable[[BoardType], Profile], board_types: list[BoardType], stop: threading.Event
) -> list[Profile]:
    """Profile all types at once; an error of one is raised when the others are done."""
    with ThreadPoolExecutor(len(board_types)) as pool:
        futures = [pool.submit(job, board_type) for board_type in board_types]
        try:
            errors = [future.exception() for future in futures]
        except BaseException:
            stop.set()  # Ctrl-C: the threads store their results
            raise
    wrong = [(board_type, error) for board_type, error in zip(board_types, errors, strict=True) if error is not None]
    for board_type, error in wrong[1:]:
        _log.warning("%s: %s", board_type, error)
    if wrong:
        board_type, error = wrong[0]
        if len(board_types) > 1 and isinstance(error, DsaError):
            done = len(board_types) - len(wrong)
            raise type(error)(
                f"{board_type}: {error} ({done} of {len(board_types)} board types are profiled and stored)"
            ) from error
        raise error
    return [future.result() for future in futures]


class _Listeners:
    """One listener for several types: adds the type to events, and the progress of all."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._done: dict[str, float] = {}

    def say(self, event: Event) -> None:
        with self._lock:
            self._listener(event)

    def of(self, board_type: str) -> Callable[[Event], None]:
        self._done[board_type] = 0.0

        def say(event: Event) -> None:
            with self._lock:
                if event.done is not None:
                    self._done[board_type] = event.done
                share = None if event.done is None else sum(self._done.values()) / len(self._done)
                what = event.what if len(self._done) == 1 else f"{event.what} on {board_type}"
                self._listener(Event(event.stage, what, share, event.interval))

        return say


@contextlib.contextmanager
def connected(fleet: str, insecure: bool = False) -> Iterator[Any]:
    """Connect to a scheduler; yields a Dask client.

    Certificates of ``tls://`` are in Dask's configuration. ``insecure`` is that of `check_address`.
    """
    check_address(fleet, insecure)
    try:
        import dask
        from distributed import Client
    except ImportError as error:
        raise MissingDependencyError(
            f"--fleet {fleet} needs the package distributed, which is not installed. Run: pip install 'dsa-hw[fleet]'"
        ) from error
    # Networks are large; Dask would warn about each.
    quiet = {"distributed.admin.large-graph-warning-threshold": "4GiB"}
    with dask.config.set(quiet):
        try:
            client = Client(fleet, timeout="10s", set_as_default=False)  # type: ignore[no-untyped-call]
        except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
            raise MeasurementError(
                f"Cannot reach the scheduler at {fleet} ({one_line(error, 200)}). Start it with dask scheduler, and "
                "for tls:// set its certificates in Dask's configuration (docs/guide/fleets.md)."
            ) from error
        with client:
            yield client


def check_address(fleet: str, insecure: bool = False) -> None:
    """Check the address of a scheduler.

    Args:
        fleet: The address.
        insecure: Accept a connection to another computer that is neither encrypted nor authenticated.

    Raises:
        ProfileError: It is no address, or it is not secure.
    """
    address = fleet if "://" in fleet else f"tcp://{fleet}"
    try:
        parts = urlsplit(address)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise ProfileError(
            f"--fleet must be tcp://scheduler:8786 or tls://scheduler:8786; got {fleet} ({error})."
        ) from error
    if scheme not in ("tcp", "tls") or not host or port is None:
        raise ProfileError(f"--fleet must be tcp://scheduler:8786 or tls://scheduler:8786; got {fleet}.")
    if scheme == "tcp" and not insecure and not _loopback(host):
        raise ProfileError(
            "--fleet with tcp:// to another computer is neither encrypted nor authenticated: anyone who can reach the "
            "port can run code on every board and on this computer. Use tls:// (docs/guide/fleets.md), or an ssh "
            f"tunnel to 127.0.0.1. In a network that you trust add --insecure (Python: insecure=True); got {fleet}."
        )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
