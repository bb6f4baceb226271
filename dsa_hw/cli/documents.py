"""What ``--json`` prints, command by command. ``docs/reference/schemas/output-*.schema.json`` are made from these.

Costs are in base units (s, J, B, FLOPs, parameters), accuracies and shares in [0, 1]. Null is a number that is not
known or not bounded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dsa_hw.pipeline.certificate import CertificateDocument
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.utils.documents import Document

__all__ = ["OUTPUTS", "ErrorOutput"]

Count = Annotated[int, Field(ge=0)]
Cost = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Widths = dict[str, Annotated[int, Field(ge=1)]]
"""Channel group -> channels that are kept."""


class ErrorOutput(Document):
    """What every command prints instead if it fails, and for 130 and 143 if it is interrupted.

    Wrong options (exit code 2) are reported on standard error alone: without them it is not known what is asked for.
    """

    error: str
    exit_code: Literal[1, 2, 3, 4, 130, 143]


class AllocateOutput(Document):
    """The result of an allocation; the exit code follows from the verdict of the certificate.

    Attributes:
        accuracy: On the test images, "dense", "pruned" and "fine-tuned", or the user's own metric; empty without
            labelled data.
        out: Folder of the result.
        page: The result as an HTML page.
    """

    model: str
    certificate: CertificateDocument
    widths: Widths
    accuracy: dict[Literal["dense", "pruned", "fine-tuned"], float]
    out: str
    page: str


class Point(Document):
    """A network and its budget; ``utilisation`` is the used share of the limit, ``plan`` a file in the folder."""

    asked: str
    limit: Cost | None
    predicted: Cost | None
    measured: Cost | None
    low: Cost | None
    high: Cost | None
    dense: Cost | None
    utilisation: Cost | None
    verdict: Verdict
    measurements: Count
    accuracy: float | None
    plan: str


class Trial(Point):
    """A network that a minimisation tried: its limit as a share of the dense cost, its drop, whether that is enough."""

    share: Cost
    drop: float
    drop_low: float | None
    drop_high: float | None
    passes: bool
    epochs: Cost


class MinimizeOutput(Document):
    """The network of the lowest cost, and all that were tried."""

    model: str
    certificate: CertificateDocument
    widths: Widths
    front: list[Trial]
    out: str
    page: str


class SweepPoint(Point):
    """A network of a sweep, with its FLOPs, and the interval of ``utilisation``, which decides the verdict."""

    flops: Cost
    least_used: Cost | None
    most_used: Cost | None


class DenseNetwork(Document):
    """The dense network of a sweep."""

    flops: Cost
    accuracy: float | None
    widths: Widths


class SweepOutput(Document):
    """The front of a budget; ``infeasible`` maps each budget that cannot be met to the reason."""

    points: list[SweepPoint]
    widths: dict[str, Widths]
    dense: DenseNetwork
    infeasible: dict[str, str]
    target: str
    out: str
    page: str


class ComparedNetwork(Document):
    """A network of a comparison; ``kind`` is "dense" or that of its budget, ``seconds`` its measured latency."""

    id: str
    kind: str
    asked: str
    method: str
    matches: str
    limit: Cost | None
    flops: Cost
    params: Cost
    predicted: Cost | None
    seconds: Cost
    low: Cost
    high: Cost
    runs: Count
    trusted: bool
    accuracy_before: float | None
    accuracy: float
    verdict: Verdict | Literal[""]


class CompareOutput(Document):
    """The networks of a comparison; ``report`` is the page."""

    networks: list[ComparedNetwork]
    widths: dict[str, Widths]
    headline: str
    report: str


class VerifyOutput(Document):
    """The certificate of a plan, then and now; ``verdict`` says whether it still holds.

    Attributes:
        device: What differs of the device, in words.
        versions: What differs of the versions, in words.
        weights: Whether weights and outputs are those that the plan was saved with, in words.
        measured_quality: Whether the quality was measured again.
    """

    verdict: Verdict
    same_device: bool
    device: str
    versions: str
    weights: str
    measured_quality: bool
    then: CertificateDocument
    now: CertificateDocument


class ExportOutput(Document):
    """The file that was written."""

    out: str
    bytes: Count
    parameters: Count


class Group(Document):
    """A channel group, or channels that cannot be removed and why."""

    group: str
    channels: Count
    members: str
    flops_share: Share
    why_frozen: str


class LayerError(Document):
    """The relative error of the outputs with this layer in int8."""

    layer: str
    error: Cost


class Sensitivity(Document):
    """The layers by their error in int8, and what it was measured on."""

    source: str
    layers: list[LayerError]


class InspectOutput(Document):
    """What can be pruned in a network; ``int8`` is null without ``--int8``."""

    model: str
    flops: Cost
    params: Cost
    activation_memory: Cost
    groups: list[Group]
    int8: Sensitivity | None


class OwnPackage(Document):
    """Whether an installed package is that of this distribution."""

    ours: bool
    reason: str | None


class TargetState(Document):
    """Whether a target can be used here, or why not."""

    usable: bool
    reason: str | None


class DoctorOutput(Document):
    """What is installed and usable; ``trials`` has what measuring on each target of ``--target`` gave."""

    dsa_hw: str
    python: str
    platform: str
    cores: Count | None
    packages: dict[str, str | None]
    own_packages: dict[str, OwnPackage]
    targets: dict[str, TargetState]
    trials: dict[str, str]


class FitOutput(Document):
    """The file of the cost model, and the cross-validated errors of every candidate."""

    out: str
    candidates: list[dict[str, Any]]


class ProfileOutput(Document):
    """A profile; the fields are those of `dsa_hw.Profile`, the configurations the rows of its table."""

    target: str
    network: str
    statistic: str | None
    quantity: Literal["latency", "energy"]
    unit: str
    grid: dict[str, int]
    grid_evidence: list[dict[str, Any]]
    noise: float | None
    interval: float | None
    estimated: str | None
    untrusted: Count
    breakdown: dict[str, float]
    prepared: str
    agreement: float | None
    environment: dict[str, Any]
    configurations: list[dict[str, Any]]
    out: str
    next: str


class SelfCheckOutput(Document):
    """Configurations that were measured twice (``--self-check``), and by how much the ratios differ."""

    target: str
    median: float
    largest: float
    configurations: list[dict[str, Any]]


class BoardProfile(ProfileOutput):
    """The profile of one kind of board."""

    kind: str


class FleetOutput(Document):
    """A profile for each kind of board (``--fleet``)."""

    kinds: list[BoardProfile]
    out: str


class SetupOutput(Document):
    """The environment, and the versions of its packages."""

    folder: str
    versions: dict[str, str]


OUTPUTS: dict[str, type[Document]] = {
    "allocate": AllocateOutput,
    "compare": CompareOutput,
    "demo": CompareOutput,
    "doctor": DoctorOutput,
    "error": ErrorOutput,
    "export": ExportOutput,
    "fit": FitOutput,
    "inspect": InspectOutput,
    "minimize": MinimizeOutput,
    "profile": ProfileOutput,
    "profile-fleet": FleetOutput,
    "profile-self-check": SelfCheckOutput,
    "setup": SetupOutput,
    "sweep": SweepOutput,
    "verify": VerifyOutput,
}
"""Command, or a variant of it -> what it prints with ``--json``."""
