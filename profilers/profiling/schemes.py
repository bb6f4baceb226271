"""Choose how a network is quantised to int8 on a target: by measuring, once for each network and environment.

ONNX Runtime 1.31 on a CPU with VNNI runs ResNet-18 3.3 times faster than fp32 with unsigned activations and 1.3 times
with signed ones; on other processors signed ones are faster. So the dense network is timed in every scheme of the
target. The choice is kept in the user's cache folder: a command that is repeated continues with the same scheme.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from torch import nn

from dsa_hw.channels.groups import architecture_fingerprint
from dsa_hw.errors import FileError, MeasurementError
from dsa_hw.utils.documents import check_seal, parse_json, read_bytes, sealed
from dsa_hw.utils.files import append_line, cache_folder
from dsa_hw.utils.text import one_line
from profilers.measuring.bench import DENSE, Bench
from profilers.measuring.environment import digest
from profilers.measuring.sittings import sitting_key
from profilers.networks.builder import loadables
from profilers.networks.loaded import Loadable
from profilers.networks.quantisation import SCHEMES
from profilers.profiling.job import bench_for, described
from profilers.targets import Target, resolve

__all__ = ["resolve_for"]

_log = logging.getLogger(__name__)

_SECONDS = 15.0  # of measuring at most
_CLOSE = 0.03  # a scheme must be faster than an earlier one of the target by this share


def resolve_for(
    model: nn.Module, inputs: tuple[Any, ...], target: str | Target, *, precision: str = "fp32", threads: int = 1
) -> Target:
    """Return a target for a network: `resolve`, and for ``int8`` without a scheme the one that runs fastest.

    Args:
        model: The dense network.
        inputs: Its example inputs.
        target: See `resolve`.
        precision: See `resolve`.
        threads: See `resolve`.

    Raises:
        ProfileError: The target has no int8.
        MeasurementError: The target can load the network in none of its schemes.
    """
    found = resolve(target, precision=precision, threads=threads)
    if found.int8 is None or found.int8.scheme is not None:
        return found
    bench = bench_for("latency", found)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    key = sitting_key(digest(bench.environment), architecture_fingerprint((), (), shapes), described(inputs), "int8")
    path = cache_folder() / "int8_schemes.jsonl"
    name = _known(path, key)
    if name not in found.schemes:
        name = _fastest(model, inputs, found, bench)
        _keep(path, key, name)
    return found.at(str(found.int8.chosen(SCHEMES[name])))


def _fastest(model: nn.Module, inputs: tuple[Any, ...], target: Target, bench: Bench) -> str:
    """Measure the network in every scheme of a target, and return the first that no other is clearly faster than."""
    assert target.int8 is not None
    candidates = {name: target.at(str(target.int8.chosen(SCHEMES[name]))) for name in target.schemes}
    networks = {name: n for name, n in loadables(model, inputs, candidates).items() if _loads(n, candidates[name])}
    if not networks:
        raise MeasurementError(f"{target.name} cannot load this network in int8. Use --precision fp32.")
    first, *others = networks
    measured = bench.measure({name: networks[name] for name in others}, networks[first], limit=_SECONDS)
    times = {first: measured[DENSE].value, **{name: measured[name].value for name in others}}
    best = first
    for name in others:
        if times[name] < (1 - _CLOSE) * times[best]:
            best = name
    shown = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in times.items())
    _log.info("int8 on %s: %s; chosen: %s (%s)", target.name, shown, best, SCHEMES[best])
    return best


def _loads(network: Loadable, target: Target) -> bool:
    """Return whether a runtime accepts a network: OpenVINO refuses some paddings of signed activations, for example."""
    try:
        network.load()
    except MeasurementError as error:
        _log.info("%s is left out: %s", target.title, one_line(error))
        return False
    return True


def _known(path: Path, key: str) -> str:
    """Return the scheme that was chosen last; "" where none was."""
    found = ""
    with contextlib.suppress(FileError):
        for line in read_bytes(path).splitlines():
            # A damaged line is left out: the network is measured again.
            with contextlib.suppress(FileError, ValueError, KeyError, TypeError, AttributeError):
                row = parse_json(line, "a scheme", max_bytes=10_000)
                check_seal(row, "a scheme")
                if row["key"] == key:
                    found = str(row["scheme"])
    return found


def _keep(path: Path, key: str, name: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, json.dumps(sealed({"key": key, "scheme": name})))
    except (OSError, FileError) as error:
        _log.warning(
            "Cannot keep the int8 scheme %s in %s (%s). It is measured again next time. Set DSA_HW_CACHE to a folder "
            "that can be written, or name the precision int8-%s.",
            name, path, one_line(error), name,
        )  # fmt: skip
