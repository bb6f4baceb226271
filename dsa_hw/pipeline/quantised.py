"""int8 in an allocation: calibration, and the dense and the pruned network side by side in fp32 and in int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dsa_hw.errors import PlanError
from dsa_hw.methods.synthetic import synthetic_batch_size, synthetic_inputs
from dsa_hw.pipeline.meters import DeviceMeter
from dsa_hw.pipeline.quality import Quality, QualityDocument, Source
from dsa_hw.training.loaders import unlabelled
from dsa_hw.training.synthesis import can_match_statistics, match_statistics
from dsa_hw.units import format_magnitude
from dsa_hw.utils.documents import Document, Line
from dsa_hw.utils.modules import device_of
from profilers.networks.quantised import QuantisedNetwork, quantise_network

__all__ = [
    "Calibration",
    "CalibrationInputs",
    "QuantisationDocument",
    "Variant",
    "calibration_inputs",
    "certified_quality",
    "int8_meters",
    "quantise_all",
    "quantised_for",
]

_INPUTS: Final = 128  # calibration inputs; ranges of activations hardly grow with more
_STEPS: Final = 40  # of the synthesis of one batch
_FP32, _INT8 = "fp32", "int8"

_Positive = Annotated[float, Field(gt=0)]


class VariantDocument(Document):
    """One network in one precision; `Variant` describes the fields."""

    network: Literal["dense", "pruned"]
    precision: Literal["fp32", "int8"]
    dimension: Literal["time", "energy"]
    measured: _Positive
    low: _Positive
    high: _Positive
    file_bytes: int = Field(ge=1)
    quality: QualityDocument | None


class QuantisationDocument(Document):
    """How the network of a certificate is quantised; `Calibration` describes the fields."""

    target: Line
    inputs: int = Field(ge=1)
    source: Source
    ranges: dict[Line, tuple[float, float]] = Field(min_length=1, max_length=100_000)
    variants: tuple[VariantDocument, ...] = Field(min_length=4, max_length=4)


@dataclass(frozen=True)
class Variant:
    """The dense or the pruned network in fp32 or in int8.

    Attributes:
        network: "dense" or "pruned".
        precision: "fp32" or "int8".
        dimension: Dimension of what was measured: "time" or "energy".
        measured: Time or energy of one run (s, J), with its 95% interval from ``low`` to ``high``.
        low: Lower end of the interval.
        high: Upper end of the interval.
        file_bytes: Size of the ONNX file.
        quality: Metric or agreement, compared with the dense network in fp32; None for that network itself, and where
            the weights were changed after it was measured.
    """

    network: str
    precision: str
    dimension: str
    measured: float
    low: float
    high: float
    file_bytes: int
    quality: Quality | None = None

    def __str__(self) -> str:
        value = format_magnitude(self.measured, self.dimension)
        factor = self.measured / float(value.split()[0])
        score = f", {self.quality.brief}" if self.quality is not None else ""
        return (
            f"{self.network} {self.precision}: {value} [{self.low / factor:.4g}, {self.high / factor:.4g}], "
            f"{self.file_bytes / 2**20:.2f} MiB{score}"
        )


@dataclass(frozen=True)
class Calibration:
    """How the network of a certificate is quantised for one target.

    Attributes:
        target: Title of the target, with the scheme and the layers that stay in fp32.
        inputs: On how many inputs activations were observed.
        source: What these inputs were.
        ranges: The smallest and the largest value of each activation, by the name of its tensor in the ONNX graph.
        variants: Dense and pruned, in fp32 and in int8, measured in runs next to each other.
    """

    target: str
    inputs: int
    source: Source
    ranges: Mapping[str, tuple[float, float]] = field(repr=False)
    variants: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that contradict each other; certificates are read from files."""
        wanted = [(network, precision) for network in ("dense", "pruned") for precision in (_FP32, _INT8)]
        if [(v.network, v.precision) for v in self.variants] != wanted:
            raise ValueError(f"int8 on {self.target} needs the dense and the pruned network in fp32 and int8")
        for variant in self.variants:
            if not variant.low <= variant.measured <= variant.high:
                raise ValueError(f"measured {variant.measured!r} is outside {variant.low!r} to {variant.high!r}")
        for name, (low, high) in self.ranges.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(f"the range of {name!r} must be finite and in order; got {low!r} to {high!r}")

    @property
    def precision(self) -> str:
        """The precision in the title of the target, e.g. "int8-u8"."""
        return next((word for word in self.target.split()[1:] if word.startswith("int8")), "")

    def __str__(self) -> str:
        """Return a line for each variant."""
        return "\n".join(
            [f"On {self.target}, calibrated on {self.inputs} inputs ({self.source}):"]
            + [f"  {variant}" for variant in self.variants]
        )


@dataclass(frozen=True, eq=False)
class CalibrationInputs:
    """Inputs that activations are observed on.

    Attributes:
        inputs: Each positional input as one tensor.
        source: What they are.
    """

    inputs: tuple[Tensor, ...]
    source: Source


def calibration_inputs(
    dense: nn.Module, example: tuple[Any, ...], data: Sequence[tuple[Source, Iterable[Any] | None]], seed: int
) -> CalibrationInputs:
    """Return up to 128 inputs of the first data that exist, or else inputs that are made up.

    Args:
        dense: The dense network, whose batch-norm statistics synthesised inputs match.
        example: Its example inputs.
        data: Sources of inputs with what they are, the best first.
        seed: Seed of made-up inputs.
    """
    for source, batches in data:
        if batches is not None:
            return CalibrationInputs(unlabelled(batches, _INPUTS, torch.device("cpu")), source)
    if not all(x.is_floating_point() for x in example):
        return CalibrationInputs(tuple(x.cpu() for x in example), "noise")
    size = synthetic_batch_size(example)
    start = next(synthetic_inputs(example, size, seed + 2, device_of(dense)))
    if len(example) == 1 and can_match_statistics(dense):
        (made,) = match_statistics(dense, list(start), steps=_STEPS, seed=seed)
        return CalibrationInputs((made.cpu(),), "synthesised inputs")
    return CalibrationInputs(tuple(x.cpu() for x in start), "noise")


def int8_meters(meters: Iterable[Any]) -> dict[str, DeviceMeter]:
    """Return the meters of targets in int8, by the title of the target."""
    return {m.title: m for m in meters if isinstance(m, DeviceMeter) and m.target.int8 is not None}


def quantise_all(
    dense: nn.Module,
    pruned: nn.Module,
    example: tuple[Any, ...],
    meters: Mapping[str, DeviceMeter],
    found: CalibrationInputs,
    compare: Callable[[nn.Module], Quality],
    limit: float = 60.0,
    earlier: Sequence[Calibration] = (),
) -> tuple[dict[str, QuantisedNetwork], tuple[Calibration, ...]]:
    """Quantise the pruned network for every target in int8, and put it beside the others.

    Args:
        dense: The dense network.
        pruned: The pruned network, with its final weights.
        example: Example inputs.
        meters: The meters by title, see `int8_meters`.
        found: Calibration inputs.
        compare: Compares a network with the dense one in fp32.
        limit: About how many seconds to measure for each target.
        earlier: Of the same network with other weights: its times are used again, since they do not depend on weights.

    Returns:
        The quantised networks by the title of their target, and what the certificate says of them.
    """
    networks: dict[str, QuantisedNetwork] = {}
    calibrations = []
    plain = compare(pruned) if meters else None
    timed = {calibration.target: calibration.variants for calibration in earlier}
    for title, meter in meters.items():
        large, small = (
            quantise_network(model, example, meter.target, batches=[found.inputs]) for model in (dense, pruned)
        )
        if title not in timed:
            both = {
                ("dense", _FP32): dense,
                ("dense", _INT8): large,
                ("pruned", _FP32): pruned,
                ("pruned", _INT8): small,
            }
            timed[title] = tuple(
                Variant(*key, meter.dimension, reading.value, reading.low, reading.high, size)
                for key, (reading, size) in meter.side_by_side(both, limit).items()
            )
        qualities = {("dense", _INT8): compare(large), ("pruned", _FP32): plain, ("pruned", _INT8): compare(small)}
        variants = tuple(replace(v, quality=qualities.get((v.network, v.precision))) for v in timed[title])
        networks[title] = small
        calibrations.append(Calibration(title, len(found.inputs[0]), found.source, small.ranges, variants))
    return networks, tuple(calibrations)


def certified_quality(calibrations: Sequence[Calibration]) -> Quality | None:
    """Return the quality of the pruned network in int8 on the first target; None where there is no such target."""
    return calibrations[0].variants[-1].quality if calibrations else None


def quantised_for(
    model: nn.Module, example: tuple[Any, ...], target: Any, calibrations: Sequence[Calibration]
) -> QuantisedNetwork:
    """Quantise the pruned network of a certificate again, with the ranges in it.

    Args:
        model: The pruned network, with its weights.
        example: Example inputs.
        target: A target in int8.
        calibrations: Those of the certificate.

    Raises:
        PlanError: The certificate has no calibration for this precision.
    """
    for calibration in calibrations:
        if calibration.precision == target.precision:
            return quantise_network(model, example, target, ranges=calibration.ranges)
    raise PlanError(
        f"The certificate has no calibration for {target.precision}. Make one with dsa-hw allocate --precision int8."
    )
