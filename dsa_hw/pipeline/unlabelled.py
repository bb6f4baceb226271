"""Inputs without labels for an allocation, given or synthesised.

They guide the keep ratios and the order of channels where there are no labels, refit the weights that remain, and tell
how well the pruned network agrees with the dense one. A part of them is held out for the last purpose.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from dsa_hw.errors import DsaError, ModelError, TrainingError
from dsa_hw.methods.synthetic import synthetic_inputs
from dsa_hw.pipeline.quality import Source
from dsa_hw.training.loaders import unlabelled, without_augmentation
from dsa_hw.training.origins import Origin, read_state, write_state
from dsa_hw.training.synthesis import can_match_statistics, match_statistics, statistics_distance
from dsa_hw.training.workload import measure_workload
from dsa_hw.utils.files import cache_folder
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.modules import device_of, weights_digest
from dsa_hw.utils.text import one_line
from dsa_hw.zoo.image_folder import unlabelled_images
from dsa_hw.zoo.preprocessing import IMAGENET, Preprocessing

__all__ = ["NORMALISATIONS", "UnlabelledSet", "normalised", "synthesis_passes", "unlabelled_set"]

_log = logging.getLogger(__name__)

_IMAGES: Final = 512  # more bring little: the least squares of a layer have a hundred samples for each unknown
_HELD_OUT: Final = 0.125
_HELD_OUT_MOST: Final = 256  # an agreement then has a standard error of at most 3 percentage points
_STEPS: Final = 40  # of the synthesis of a batch
_SYNTHESIS: Final = 4e10  # operations of one pass over all inputs; with 40 steps, a minute or two of two cores
_LEAST: Final = 16  # synthesised inputs, also for large networks
_BATCH: Final = 128  # statistics of a batch are those of the training data only if it is large
_KEPT: Final = 8  # networks whose synthesised inputs stay in the cache
NORMALISATIONS: Final = {
    "the mean and deviation of ImageNet": IMAGENET,
    "a range of 0 to 1": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "a range of -1 to 1": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "a range of 0 to 255": ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)),
}
"""Usual normalisations of images: mean and deviation for values in [0, 1]."""


@dataclass(frozen=True)
class UnlabelledSet:
    """Inputs without labels.

    Attributes:
        used: Positional inputs for keep ratios, order and recovery, each (N, ...).
        held_out: The same of other inputs, to compare the networks on.
        source: What they are.
    """

    used: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    source: Source

    @property
    def is_real(self) -> bool:
        """Whether these are inputs that were given."""
        return self.source != "synthesised inputs"


def unlabelled_set(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    images: str | os.PathLike[str] | Iterable[Any] | None,
    *,
    seed: int,
    listener: Callable[[str, float], None],
) -> UnlabelledSet | None:
    """Return inputs without labels.

    Args:
        model: The dense network; not changed.
        example_inputs: Its inputs.
        images: A folder of image files; or batches of inputs, or of (inputs, anything). None synthesises inputs that
            reproduce the batch-norm statistics of the network, or reads them from the cache.
        seed: Seed of everything random.
        listener: Called with a text and the share that is done.

    Returns:
        The set; None where there are no images and inputs cannot be synthesised.

    Raises:
        TrainingError: There are no inputs, or they are not finite.
        ModelError: The folder has no images, or the network takes none.
    """
    if images is None:
        if not can_match_statistics(model) or len(example_inputs) != 1:
            return None
        made = _synthesised(model, example_inputs, seed, listener)
        return _divided((made,), "synthesised inputs")
    most = _IMAGES + _HELD_OUT_MOST
    if isinstance(images, (str, os.PathLike)):
        listener("reading images", 0.0)
        tensors: tuple[Tensor, ...] = (_from_folder(model, as_path(images, "images"), example_inputs, most, seed),)
    else:
        tensors = unlabelled(without_augmentation(images), most, device_of(model))
    return _divided(tensors, "images without labels")


def _divided(inputs: tuple[Tensor, ...], source: Source) -> UnlabelledSet:
    """Hold out an eighth of the inputs, or what recovery does not use."""
    count = len(inputs[0])
    apart = min(max(count - _IMAGES, int(_HELD_OUT * count)), _HELD_OUT_MOST)
    if apart == 0:  # very few: compared on those that are used
        return UnlabelledSet(inputs, inputs, source)
    return UnlabelledSet(tuple(x[:-apart] for x in inputs), tuple(x[-apart:] for x in inputs), source)


def _from_folder(model: nn.Module, folder: Path, example: tuple[Any, ...], limit: int, seed: int) -> Tensor:
    """Read images, normalised in the usual way that is closest to the batch-norm statistics of the network."""
    shape = tuple(example[0].shape) if len(example) == 1 and isinstance(example[0], Tensor) else ()
    if len(shape) != 4 or shape[1] not in (1, 3):
        size = "x".join(map(str, shape)) or f"{len(example)} inputs"
        raise ModelError(f"A folder of images needs a network for 1xCxHxW inputs with 1 or 3 channels; got {size}.")
    side = (shape[2], shape[3])
    raw = Preprocessing(side, side, *NORMALISATIONS["a range of 0 to 1"])
    (found,) = unlabelled(unlabelled_images(folder, raw, seed=seed), limit, device_of(model))
    found = (found if shape[1] == 3 else found.mean(1, keepdim=True)).to(example[0].dtype)
    if can_match_statistics(model):
        distances = {name: statistics_distance(model, normalised(found[:64], name)) for name in NORMALISATIONS}
        name, why = min(distances, key=lambda n: distances[n]), "closest to the batch-norm statistics of the network"
    else:
        name, why = next(iter(NORMALISATIONS)), "the network has no batch-norm statistics that could tell"
    _log.warning(
        "%d images of %s are normalised to %s (%s). Give batches of tensors for another normalisation.",
        len(found), folder, name, why,
    )  # fmt: skip
    return normalised(found, name)


def normalised(images: Tensor, name: str) -> Tensor:
    """Return images in [0, 1] with one of the `NORMALISATIONS`; grey images use the mean over the channels."""
    mean, deviation = (torch.tensor(values, device=images.device) for values in NORMALISATIONS[name])
    if images.shape[1] == 1:
        mean, deviation = mean.mean()[None], deviation.mean()[None]
    return (images - mean[:, None, None]) / deviation[:, None, None]


def _synthesised(
    model: nn.Module,
    example: tuple[Any, ...],
    seed: int,
    listener: Callable[[str, float], None],
) -> Tensor:
    """Return inputs that reproduce the batch-norm statistics, from the cache where they are there.

    How many depends on the network alone, not on the speed of the computer, so that a seed gives one result.
    """
    count, origin, file = _synthesis(model, example, seed)
    size = min(_BATCH, count)
    if file is not None and file.exists():
        try:
            known, state = read_state(file, device_of(model))
            if not known.differences(origin):
                os.utime(file)
                return torch.as_tensor(state["inputs"])
        except (TrainingError, KeyError, OSError) as error:
            _log.warning("%s Inputs are synthesised again.", one_line(error))
    source = synthetic_inputs(example, size, seed, device_of(model))
    starts = [start for (start,) in itertools.islice(source, -(-count // size))]
    made = torch.cat(match_statistics(model, starts, steps=_STEPS, seed=seed, listener=listener))[:count]
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_state(file, origin, {"inputs": made.cpu()})
            for old in sorted(file.parent.glob("*.pt"), key=lambda path: -path.stat().st_mtime)[_KEPT:]:
                old.unlink(missing_ok=True)
        except (DsaError, OSError) as error:
            _log.warning("Synthesised inputs are not kept for the next call: %s", one_line(error))
    return made


def synthesis_passes(model: nn.Module, example_inputs: tuple[Any, ...], seed: int) -> int:
    """Return how many inputs pass through the network while inputs are synthesised: none if they are in the cache."""
    if not can_match_statistics(model) or len(example_inputs) != 1:
        return 0
    count, _, file = _synthesis(model, example_inputs, seed)
    return 0 if file is not None and file.exists() else _STEPS * count


def _synthesis(model: nn.Module, example: tuple[Any, ...], seed: int) -> tuple[int, Origin, Path | None]:
    """Return how many inputs to synthesise, all that they depend on, and their file in the cache."""
    work = measure_workload(model, example)
    count = int(min(max(_SYNTHESIS // work.operations, _LEAST), max(work.fitting, _LEAST), _IMAGES))
    settings = {"shape": list(example[0].shape[1:]), "dtype": str(example[0].dtype), "count": count, "steps": _STEPS}
    origin = Origin.of({**settings, "seed": seed, "weights": weights_digest(model)})
    return count, origin, _cached_file(origin)


def _cached_file(origin: Origin) -> Path | None:
    try:
        name = "-".join(value.strip("'")[:16] for value in origin.settings.values() if len(value) >= 64)
        return cache_folder() / "synthesised" / f"{name}-{origin.settings['seed']}.pt"
    except DsaError:
        return None
