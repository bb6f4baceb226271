"""What is left of a network after pruning: its metric beside the dense network's, or its agreement with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsa_hw.errors import TrainingError
from dsa_hw.methods.synthetic import synthetic_inputs
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.training.fingerprints import first_batch
from dsa_hw.training.intervals import Interval, difference_interval, mean_interval, ratio_interval, share_interval
from dsa_hw.training.loaders import known_length, on_device
from dsa_hw.training.losses import OwnLoss, Step, checked_loss, logits_of, outputs_of
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.documents import Document, Line
from dsa_hw.utils.modules import device_of, evaluating, weights_digest
from dsa_hw.utils.numbers import check_number, check_share
from dsa_hw.utils.text import first_line, one_line, percent, unknown_name

__all__ = [
    "ACCURACY",
    "AGREEMENT",
    "METRIC",
    "NEGATIVE_LOSS",
    "OUTPUT_ERROR",
    "UNKNOWN",
    "Metric",
    "Quality",
    "QualityDocument",
    "Source",
    "check_metric",
    "measure_quality",
    "quality_on_noise",
    "unknown_quality",
]

ACCURACY, METRIC, AGREEMENT, OUTPUT_ERROR, UNKNOWN = (
    "accuracy", "metric", "arg-max agreement", "relative output error", "unknown",
)  # fmt: skip
NEGATIVE_LOSS: Final = "negative loss"
"""Name of the metric of networks that compute their own loss."""
Source = Literal[
    "validation data", "test data", "training data", "images without labels", "synthesised inputs", "noise"
]
"""What a quality was measured on. Inputs are synthesised to match the batch-norm statistics; noise is random."""
Metric = Callable[[Any, Any], Any]
"""``metric(outputs, targets)``: a score for each input, shape (N,), or one for the batch; more is better."""

CONFIDENCE: Final = 0.95
ENOUGH: Final = 0.9
"""Agreement with the dense network, or share of its accuracy, below which the network needs fine-tuning before use."""
_INPUTS = 256  # of noise: an agreement then has a standard error of at most 3 percentage points
_BATCH = 8  # fits into memory for large images too; in evaluation mode the result does not depend on it
_MOST = 10_000  # inputs of a loader without a length, which may be endless
_ADVICE = "Fine-tune before use."


class IntervalDocument(Document):
    """An estimate with its interval. Null is an end that is not bounded."""

    value: float
    low: float | None
    high: float | None


class QualityDocument(Document):
    """A quality in a certificate; `Quality` describes the fields."""

    measure: Literal["accuracy", "metric", "arg-max agreement", "relative output error", "unknown"]
    inputs: int = Field(ge=0)
    source: Source
    value: IntervalDocument | None
    dense: IntervalDocument | None
    drop: IntervalDocument | None
    max_drop: Annotated[float, Field(ge=0)] | None
    constant: Annotated[float, Field(ge=0, le=1)] | None
    confidence: float = Field(ge=0.5, lt=1)
    name: Line
    dense_weights: str = Field(pattern=r"^([0-9a-f]{64})?$")
    reason: Line


@dataclass(frozen=True)
class Quality:
    """The pruned network beside the dense one on the same inputs, both in evaluation mode.

    ``measure`` says what ``value`` is:

    - ``ACCURACY``: share of correct predictions. Wilson intervals; Bonett and Price's for the drop.
    - ``METRIC``: mean score of the user's metric ``name``. Student's t, or as for the accuracy if scores are 0 and 1.
    - ``AGREEMENT``: share of inputs with the same arg-max, for outputs of shape (N, C). Wilson interval.
    - ``OUTPUT_ERROR``: L2 norm of the difference over the L2 norm of the dense output, averaged over the outputs.
    - ``UNKNOWN``: None, with the ``reason``.

    Attributes:
        measure: What is measured.
        inputs: On how many inputs.
        source: Of which kind they are.
        value: The pruned network's, with its interval.
        dense: The dense network's, for an accuracy or a metric.
        drop: ``dense`` minus ``value`` on the same inputs, with the interval of paired differences.
        max_drop: The largest drop that was asked for; None where none was.
        constant: For an agreement, the share that a constant answer reaches: the dense network's most frequent class.
        confidence: Of every interval.
        name: Of the user's metric.
        dense_weights: SHA-256 of the dense network's weights.
        reason: Why the quality is unknown.
    """

    measure: str
    inputs: int
    source: Source
    value: Interval | None = None
    dense: Interval | None = None
    drop: Interval | None = None
    max_drop: float | None = None
    constant: float | None = None
    confidence: float = CONFIDENCE
    name: str = ""
    dense_weights: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that contradict each other; certificates are read from files."""
        compared = self.measure in (ACCURACY, METRIC)
        wanted = (self.measure != UNKNOWN, compared, compared, self.measure == AGREEMENT)
        if wanted != tuple(x is not None for x in (self.value, self.dense, self.drop, self.constant)):
            raise ValueError(f"the numbers do not belong to a quality of the measure {self.measure!r}")
        for found in (self.value, self.dense, self.drop):
            if found is not None and not (math.isfinite(found.value) and found.low <= found.value <= found.high):
                raise ValueError(f"{found.value!r} is not in its interval from {found.low!r} to {found.high!r}")
        if self.measure in (ACCURACY, AGREEMENT):
            for found in (self.value, self.dense):
                if found is not None and not _is_share(found, self.inputs, self.confidence):
                    raise ValueError(f"{found} is no share of {self.inputs} inputs with Wilson's interval")
        if self.value is not None and self.measure == OUTPUT_ERROR and self.value.value < 0:
            raise ValueError(f"{self.measure} must be at least 0; got {self.value.value!r}")
        difference = self.dense.value - self.value.value if self.dense and self.value else 0.0
        if self.drop and not math.isclose(self.drop.value, difference, rel_tol=1e-9, abs_tol=1e-12):
            raise ValueError(f"the drop is {difference!r}; got {self.drop.value!r}")

    @property
    def verdict(self) -> Verdict | None:
        """Whether the drop is at most ``max_drop``, with the whole interval; None where no limit was asked for."""
        if self.max_drop is None:
            return None
        if self.drop is None or self.drop.low <= self.max_drop < self.drop.high:
            return Verdict.INCONCLUSIVE
        return Verdict.MET if self.drop.high <= self.max_drop else Verdict.NOT_MET

    @property
    def needs_training(self) -> bool:
        """Whether the pruned network is too far from the dense one to be used as it is."""
        if self.value is None:
            return True
        if self.measure == OUTPUT_ERROR:
            return self.value.value > 1 - ENOUGH
        return self.measure != METRIC and self.value.value < ENOUGH * (self.dense.value if self.dense else 1.0)

    def against(self, then: Quality) -> Verdict:
        """Return whether this measurement confirms an earlier one: the floor again, or intervals that overlap."""
        if self.verdict is not None:
            return self.verdict
        if self.value is None or then.value is None or (self.measure, self.name) != (then.measure, then.name):
            return Verdict.INCONCLUSIVE
        sign = -1 if self.measure == OUTPUT_ERROR else 1  # of a measure of which more is better
        best, least = (
            max(sign * self.value.low, sign * self.value.high),
            min(sign * then.value.low, sign * then.value.high),
        )
        return Verdict.MET if best >= least else Verdict.NOT_MET

    def __str__(self) -> str:
        """Return, for example, ``Accuracy on 1000 inputs (validation data): 91.2% [89.3%, 92.8%], ...``."""
        advice = f" {_ADVICE}" if self.needs_training else ""
        where = f"on {self.inputs} inputs ({self.source})"
        if self.value is None:
            text = f"Quality unknown: {self.reason}"
        elif self.dense and self.drop:
            name = self.name if self.measure == METRIC else "Accuracy"
            text = (
                f"{name} {where}: {self._say(self.value)}, dense {self._say(self.dense)}, drop {self._say(self.drop)} "
                f"({100 * self.confidence:.3g}% intervals)"
            )
        elif self.measure == OUTPUT_ERROR:
            text = f"Relative output error against the dense network {where}: {self._say(self.value)}"
        else:
            constant = "" if self.constant is None else f" (a constant answer: {percent(self.constant)})"
            text = f"Same class as the dense network {where}: {self._say(self.value)}{constant}"
        if self.max_drop is not None:
            limit = percent(self.max_drop, 2) if self.measure != METRIC else f"{self.max_drop:.4g}"
            text += f"; drop <= {limit}: {self.verdict}"
        return f"{text}.{advice}"

    @property
    def brief(self) -> str:
        """The value with its interval and what it is, for a table."""
        name = self.name if self.measure == METRIC else "same class" if self.measure == AGREEMENT else self.measure
        return name if self.value is None else f"{name} {self._say(self.value)}"

    def _say(self, found: Interval) -> str:
        def one(x: float) -> str:
            return f"{x:.4g}" if self.measure == METRIC or not math.isfinite(x) else percent(x)

        return f"{one(found.value)} [{one(found.low)}, {one(found.high)}]"


def unknown_quality(reason: str, source: Source, **more: Any) -> Quality:
    """Return that the quality is not known, and why."""
    return Quality(UNKNOWN, 0, source, reason=reason[:1000], **more)


def check_metric(model: nn.Module, data: Any, metric: Metric | None) -> None:
    """Check that the metric accepts the outputs of the dense network on the first batch, before anything is trained.

    Args:
        model: The dense network.
        data: Loader of (inputs, targets); one that can be read only once is not read.
        metric: The user's metric; None is accepted.

    Raises:
        TrainingError: There are no data, or the metric does not return numbers.
    """
    if metric is None:
        return
    if not callable(metric):
        raise TrainingError(f"`metric` must be a function metric(outputs, targets); got {metric!r}.")
    if data is None:
        raise TrainingError("`metric` needs a `val` loader of (inputs, targets). Give `val`.")
    batch = first_batch(data)
    if batch is not None:
        measure_quality(model, model, [batch], source="validation data", metric=metric)


def measure_quality(
    dense: nn.Module,
    pruned: nn.Module,
    data: Iterable[Any],
    *,
    source: Source,
    metric: Metric | None = None,
    step: Step | None = None,
    max_drop: float | None = None,
    confidence: float = CONFIDENCE,
    listener: Callable[[str, float], None] | None = None,
) -> Quality:
    """Compare two networks in evaluation mode on the same inputs.

    Args:
        dense: The dense network.
        pruned: The pruned network.
        data: Batches of (inputs, targets), of dicts, or of inputs where ``source`` has no labels. All of them are used,
            or 10,000 inputs of a loader without a length.
        source: What the data are.
        metric: The user's metric; None is the accuracy.
        step: The user's step, whose negative loss is the metric where none is given.
        max_drop: The largest drop that was asked for, in the unit of the metric.
        confidence: Of the intervals.
        listener: Called with a text and the share that is done.

    Returns:
        The metric of both networks where there are targets, or the accuracy where targets are classes. Otherwise the
        arg-max agreement for outputs (N, C), the relative error for other outputs, or unknown with the reason.

    Raises:
        TrainingError: The metric fails or does not return finite numbers, or an argument is out of range.
    """
    if source not in get_args(Source):
        raise TrainingError(unknown_name("source", str(source), get_args(Source)))
    if max_drop is not None:
        check_number(max_drop, "max_drop", TrainingError)
    check_share(confidence, "confidence", TrainingError, strict=True)
    if confidence < 0.5:
        raise TrainingError(f"`confidence` must be at least 0.5; got {confidence!r}.")
    labelled = source in ("validation data", "test data", "training data")
    own = OwnLoss(step) if step is not None and metric is None and labelled else None
    found = _Comparison(metric, labelled)
    length = known_length(data)
    device = device_of(dense)
    with torch.no_grad(), evaluating(dense), evaluating(pruned):
        for number, batch in enumerate(data):
            if length is None and found.inputs >= _MOST:
                break
            if listener is not None:
                listener("comparing with the dense network", number / length if length else 0.0)
            pair = on_device(batch, device)
            count = _count(pair)
            if own is not None:
                scores = [-float(checked_loss(network, pair, own)) for network in (dense, pruned)]
                found.add_score(count, *scores)
            else:
                found.add(count, outputs_of(dense, pair[0]), outputs_of(pruned, pair[0]), pair[1])
    more = {"max_drop": max_drop, "confidence": confidence, "dense_weights": weights_digest(dense)}
    return found.quality(source, more)


def quality_on_noise(dense: nn.Module, pruned: nn.Module, example_inputs: Any, seed: int) -> Quality:
    """Compare two networks in evaluation mode on random inputs, where there is nothing else.

    Args:
        dense: The dense network.
        pruned: The pruned network.
        example_inputs: Inputs whose shapes the random ones have.
        seed: Seed of the allocation; its inputs are not drawn again.

    Returns:
        Arg-max agreement for outputs (N, C), the relative error for other outputs, or unknown with the reason.
    """
    drawn = synthetic_inputs(example_inputs, _BATCH, seed + 1, device_of(dense))
    try:
        batches = [(made, None) for made in itertools.islice(drawn, _INPUTS // _BATCH)]
        return measure_quality(dense, pruned, batches, source="noise")
    except TrainingError:
        return unknown_quality("only floating-point inputs can be generated", "noise")
    except Exception as error:  # whatever the network raises where its batch size is fixed, for example
        reason = f"the network does not run on {_BATCH} random inputs at once ({first_line(error)})"
        return unknown_quality(reason, "noise")


class _Comparison:
    """Scores, classes and distances of two networks, collected batch by batch."""

    def __init__(self, metric: Metric | None, labelled: bool) -> None:
        self.metric, self.labelled, self.inputs, self.name = metric, labelled, 0, ""
        self.scores: list[tuple[Floats, Floats]] = []  # of the dense and the pruned network
        self.classes: list[Tensor] = []
        self.squares: list[Floats] = []
        self.is_scored = self.is_classifier = True

    def add_score(self, count: int, dense: float, pruned: float) -> None:
        """Note the scores of one batch of ``count`` inputs."""
        self.inputs += count
        self.name = NEGATIVE_LOSS
        self.scores.append((np.array([dense]), np.array([pruned])))

    def add(self, count: int, wanted: Any, found: Any, targets: Any) -> None:
        """Compare the outputs of one batch of ``count`` inputs."""
        self.inputs += count
        everything = zip(tree_leaves(wanted), tree_leaves(found), strict=True)
        if self.metric is not None:
            self.scores.append((self._score(wanted, targets), self._score(found, targets)))
        wanted, found = logits_of(wanted), logits_of(found)
        self.is_classifier &= _is_real(wanted) and wanted.ndim == 2 and len(wanted) == count and wanted.shape[1] > 1
        if self.metric is None and self.labelled and self.is_scored:
            targets = targets.get("labels") if isinstance(targets, Mapping) else targets
            self.is_scored = self.is_classifier and _are_classes(targets, count)
            if self.is_scored:
                a, b = ((outputs.argmax(1) == targets).double().cpu().numpy() for outputs in (wanted, found))
                self.scores.append((a, b))
        if self.is_classifier:
            self.classes.append(torch.stack([wanted.argmax(1), found.argmax(1)], 1).cpu())
        pairs = [(a.double(), b.double()) for a, b in everything if _is_real(a)]
        pairs = [(a, b) for a, b in pairs if a.ndim] or pairs  # without the loss that a network may return
        if pairs:
            units = count if all(a.ndim and len(a) == count for a, _ in pairs) else 1  # else a batch is one unit
            self.squares.append(np.stack([_squares(a, b, units) for a, b in pairs], 1))

    def quality(self, source: Source, more: dict[str, Any]) -> Quality:
        """Return the most telling measure that all batches have."""
        confidence = more["confidence"]
        if not self.inputs:
            return unknown_quality("there was no input, or the loader can be read only once", source, **more)
        if self.metric is not None or (self.labelled and self.is_scored):
            a, b = (np.concatenate(column) for column in zip(*self.scores, strict=True))
            numbers = (
                mean_interval(b, confidence),
                mean_interval(a, confidence),
                difference_interval(a, b, confidence),
            )
            if self.metric is None and not self.name:
                return Quality(ACCURACY, self.inputs, source, *numbers, **more)
            name = self.name or str(getattr(self.metric, "__name__", type(self.metric).__name__))
            return Quality(METRIC, self.inputs, source, *numbers, name=one_line(name, 200), **more)
        squares = np.concatenate(self.squares) if self.squares else np.zeros((0, 0, 2))
        total = squares.sum(0)
        if not total.size or not np.isfinite(total).all() or not (total[:, 1] > 0).all():
            return unknown_quality("the outputs are not finite, all zero or no floating-point numbers", source, **more)
        if not self.is_classifier:
            return Quality(OUTPUT_ERROR, self.inputs, source, ratio_interval(squares, confidence), **more)
        classes = torch.cat(self.classes)
        same = int((classes[:, 0] == classes[:, 1]).sum())
        constant = float(classes[:, 0].bincount().max()) / len(classes)
        value = share_interval(same, len(classes), confidence)
        return Quality(AGREEMENT, self.inputs, source, value, constant=constant, **more)

    def _score(self, outputs: Any, targets: Any) -> Floats:
        assert self.metric is not None
        try:
            value = self.metric(outputs, targets)
            found = torch.as_tensor(value).detach().double().cpu().reshape(-1).numpy()
        except Exception as error:  # whatever the user's function raises
            raise TrainingError(f"The metric cannot be computed: {first_line(error)}.") from error
        if not len(found) or not np.isfinite(found).all():
            got = one_line(value, 60)
            raise TrainingError(f"`metric` must return a finite number for each input or for the batch; got {got}.")
        return np.asarray(found)


def _squares(wanted: Tensor, found: Tensor, units: int) -> Floats:
    """Return squared error and squared output of each unit, shape (units, 2)."""
    both = torch.stack([(wanted - found).square(), wanted.square()])
    return both.reshape(2, units, -1).sum(2).T.cpu().numpy()


def _is_share(found: Interval, total: int, confidence: float) -> bool:
    count = found.value * total
    if total < 1 or not 0 <= found.value <= 1 or not math.isclose(count, round(count), abs_tol=1e-6):
        return False
    wanted = share_interval(round(count), total, confidence)
    return math.isclose(found.low, wanted.low, abs_tol=1e-9) and math.isclose(found.high, wanted.high, abs_tol=1e-9)


def _count(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its largest tensor."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
    return len(max(tensors, key=Tensor.numel)) if tensors else 1


def _are_classes(targets: Any, count: int) -> bool:
    return isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape == (count,)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
