"""Networks by name, as on the command line.

``resnet18`` is a network of torchvision, ``resnet20`` one of `dsa_hw.zoo.cifar` for 32 x 32 images, ``timm/resnet50d``
or ``timm/resnet50.a1_in1k`` one of timm, ``hf-hub:org/name`` one of timm with its configuration on the Hugging Face
hub. ``network.onnx`` is a file, with its weights. ``package.module:factory`` calls a function of the user, which
returns a network or (network, example_inputs). Other weights are random unless ``pretrained``.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import MissingDependencyError, ModelError
from dsa_hw.utils.modules import load_weights
from dsa_hw.utils.text import first_line, one_line
from dsa_hw.utils.weights import read_weights
from dsa_hw.zoo.cifar import SMALL
from dsa_hw.zoo.onnx_networks import from_onnx, is_onnx
from dsa_hw.zoo.preprocessing import Preprocessing
from dsa_hw.zoo.pretrained import hub_file, hub_weights, torch_file
from dsa_hw.zoo.user_code import call_function

__all__ = ["load_model", "parse_shape", "preprocessing_of"]

_HUB = "hf-hub:"
_DEFAULT_SHAPE = (1, 3, 224, 224)
_MOST_NUMBERS = 2**30  # 4 GiB as float32; a slip of the keyboard asks for more
# Arguments of timm.create_model that name files, addresses or weights; a configuration must not choose them.
_PLACES = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
# torchvision's DenseNets were saved with names that a newer torch does not accept.
_OLD_DENSENET = re.compile(
    r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))$"
)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse an input shape.

    >>> parse_shape("1x3x224x224")
    (1, 3, 224, 224)
    """
    if not re.fullmatch(r"[1-9][0-9]*([x,][1-9][0-9]*)*", text):
        raise ModelError(
            "An input shape has the form BATCHxCHANNELSxHEIGHTxWIDTH, for example 1x3x224x224; got "
            f"{one_line(text, 60)!r}."
        )
    sides = re.split("[x,]", text)
    if sum(len(side) for side in sides) > 30 or math.prod(map(int, sides)) > _MOST_NUMBERS:
        raise ModelError(
            f"An input may have at most {_MOST_NUMBERS:.0e} numbers (1x3x224x224 has 150528); got "
            f"{one_line(text, 60)!r}."
        )
    return tuple(map(int, sides))


def load_model(
    name: str,
    input_shape: Sequence[int] | None = None,
    *,
    imports: bool = True,
    pretrained: bool = False,
    weights: str | Path | None = None,
    classes: int | None = None,
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Build a network by name.

    Args:
        name: Name of a network of torchvision or of `dsa_hw.zoo.cifar`, ``timm/NAME``, ``hf-hub:ORG/NAME``, the path of
            an ONNX file, or ``package.module:factory``.
        input_shape: Shape of the example input; the default of the network where it is not given.
        imports: Whether ``package.module:factory`` and paths are allowed. Use False for a name that was read from a
            file: a file must not choose which code runs, nor what is read.
        pretrained: Whether to load the default weights of torchvision, or those of the timm tag or the repository, from
            the caches of these libraries or from the network.
        weights: A file to load weights from, as with ``--weights``: .safetensors, or what ``torch.save`` wrote.
        classes: Number of outputs; the network's own where it is not given. With ``pretrained``, a last layer of
            another size keeps its random weights.

    Returns:
        The network in evaluation mode, and a tuple of example inputs.

    Raises:
        ModelError: The name is unknown, there are no pretrained weights, ``weights`` are those of another network, or
            the factory cannot be imported or does not return a network.
        MissingDependencyError: timm is not installed.

    Example:
        >>> model, (image,) = load_model("resnet20")
        >>> tuple(image.shape)
        (1, 3, 32, 32)
    """
    if pretrained and weights is not None:
        raise ModelError("Give --pretrained or --weights, not both.")
    example: tuple[Any, ...] | None = None
    if is_onnx(name):
        if not imports:
            raise ModelError(
                f"A file must not choose a file to read. Name the model on the command line; got {name!r}."
            )
        if pretrained or classes is not None:
            option = "--pretrained" if pretrained else "--classes"
            raise ModelError(
                f"{option} is for networks of the zoo; {one_line(name, 80)} has its own weights and outputs."
            )
        return from_onnx(name, input_shape)
    if ":" in name and not name.startswith(_HUB):
        if not imports:
            raise ModelError(
                f"A file must not choose code to import. Name the model on the command line; got {name!r}."
            )
        if pretrained or classes is not None:
            option = "--pretrained" if pretrained else "--classes"
            raise ModelError(f"{option} is for networks of the zoo. Load weights and set classes in {name} itself.")
        model, example = _user_network(name)
    else:
        source = _source(name)
        model = source.build(pretrained, classes)
        input_shape = input_shape or (1, *source.size)
    if input_shape is not None or example is None:
        shape = tuple(input_shape or _DEFAULT_SHAPE)
        if math.prod(shape) > _MOST_NUMBERS:
            raise ModelError(f"An input may have at most {_MOST_NUMBERS:.0e} numbers; got a shape of {shape}.")
        example = (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)
    if weights is not None:
        load_weights(model, read_weights(weights), name)
    return model.eval(), example


def preprocessing_of(name: str, input_shape: Sequence[int] | None = None) -> Preprocessing:
    """Return how the weights of a network expect pictures, for the size of ``input_shape`` where it is given.

    Networks of the user get 224 x 224 and the mean and standard deviation of ImageNet.

    Raises:
        ModelError: The name is unknown, or the shape is not that of colour images.
    """
    own = is_onnx(name) or (":" in name and not name.startswith(_HUB))
    found = Preprocessing() if own else _source(name).preprocessing()
    if input_shape is None:
        return found
    if len(input_shape) != 4 or input_shape[1] != 3:
        raise ModelError(f"Images need an input such as 1x3x224x224; got {'x'.join(map(str, input_shape))}.")
    return found.at(input_shape[2], input_shape[3])


@dataclass(frozen=True)
class _Small:
    """A network of `dsa_hw.zoo.cifar`."""

    name: str
    size: tuple[int, ...] = (3, 32, 32)

    def build(self, pretrained: bool, classes: int | None) -> nn.Module:
        if pretrained:
            raise ModelError(f"There are no pretrained weights of {self.name}. Give a file with --weights.")
        return SMALL[self.name](**({} if classes is None else {"classes": classes}))

    def preprocessing(self) -> Preprocessing:
        return Preprocessing((32, 32), (32, 32))


@dataclass(frozen=True)
class _Torchvision:
    """A network of torchvision, for images."""

    name: str

    @property
    def size(self) -> tuple[int, ...]:
        side = 299 if self.name == "inception_v3" else 224
        return (3, side, side)

    def build(self, pretrained: bool, classes: int | None) -> nn.Module:
        from dsa_hw.zoo.torchvision_compat import torchvision

        options: dict[str, Any] = {"weights": None} if classes is None else {"weights": None, "num_classes": classes}
        if self.name in ("googlenet", "inception_v3"):
            options |= {"init_weights": False, "transform_input": pretrained}
        model: nn.Module = torchvision.models.get_model(self.name, **options)
        if pretrained:
            state = read_weights(torch_file(self._weights().url))
            state = {_OLD_DENSENET.sub(r"\1\2", key): value for key, value in state.items()}
            load_weights(model, _fitting(model, state) if classes is not None else state, self.name)
        return model

    def preprocessing(self) -> Preprocessing:
        found = self._weights().transforms()
        if not hasattr(found, "crop_size"):
            return Preprocessing()
        crop, resize = int(found.crop_size[0]), int(found.resize_size[0])
        mean, deviation = tuple(map(float, found.mean)), tuple(map(float, found.std))
        return Preprocessing((crop, crop), (resize, resize), mean, deviation, found.interpolation.value)

    def _weights(self) -> Any:
        from dsa_hw.zoo.torchvision_compat import torchvision

        return torchvision.models.get_model_weights(self.name).DEFAULT


@dataclass(frozen=True)
class _Timm:
    """A network of timm.

    Attributes:
        name: What timm calls it.
        config: Its ``pretrained_cfg``.
        repository: Where its weights are on the Hugging Face hub; None where its configuration says.
        arguments: What timm makes it with.
    """

    name: str
    config: Mapping[str, Any]
    repository: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.config.get("input_size") or _DEFAULT_SHAPE[1:])

    def build(self, pretrained: bool, classes: int | None) -> nn.Module:
        import timm

        options: dict[str, Any] = {**self.arguments, **({} if classes is None else {"num_classes": classes})}
        if not pretrained:
            return _built(self.name, options)
        if self.repository is not None:
            model = _built(self.name, options)
            state = read_weights(hub_weights(self.repository))
            load_weights(model, _fitting(model, state) if classes is not None else state, self.repository)
            return model
        file, repository, url = (self.config.get(key) for key in ("hf_hub_filename", "hf_hub_id", "url"))
        if not repository and not url:
            tags = timm.list_pretrained(f"{self.name.partition('.')[0]}.*")[:3]
            known = f"Tags with weights: {', '.join(f'timm/{tag}' for tag in tags)}. Or give" if tags else "Give"
            raise ModelError(f"timm has no pretrained weights of {self.name}. {known} a file with --weights.")
        state = read_weights(hub_weights(repository, file) if repository else torch_file(str(url)))
        return _built(self.name, {**options, "pretrained": True, "pretrained_cfg_overlay": {"state_dict": state}})

    def preprocessing(self) -> Preprocessing:
        height, width = self.size[-2:]
        share = float(self.config.get("crop_pct") or 0.875)
        return Preprocessing(
            (height, width),
            (math.floor(height / share), math.floor(width / share)),
            tuple(self.config.get("mean") or Preprocessing.mean),
            tuple(self.config.get("std") or Preprocessing.deviation),
            str(self.config.get("interpolation") or "bicubic"),
            self.config.get("crop_mode") == "squash",
        )


def _source(name: str) -> _Small | _Torchvision | _Timm:
    if name in SMALL:
        return _Small(name)
    if name.startswith(("timm/", _HUB)):
        return _timm(name)
    from dsa_hw.zoo.torchvision_compat import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise _unknown(name, [*known, *SMALL])
    return _Torchvision(name)


def _timm(name: str) -> _Timm:
    import dsa_hw.zoo.torchvision_compat  # noqa: F401  (timm imports torchvision)

    try:
        import timm
    except ImportError as error:
        raise MissingDependencyError(
            f"Model {name} needs timm, which is not installed. Run pip install 'dsa-hw[timm]'."
        ) from error
    if name.startswith(_HUB):
        repository = name.removeprefix(_HUB)
        if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", repository):
            raise ModelError(f"A repository has the form hf-hub:ORG/NAME; got {one_line(name, 80)!r}.")
        return _hub_model(repository)
    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        raise _unknown(name, [f"timm/{n}" for n in timm.list_models()])
    try:
        config = timm.get_pretrained_cfg(short)
    except RuntimeError as error:  # a tag that does not exist
        tags = [f"timm/{n}" for n in timm.list_pretrained(f"{short.partition('.')[0]}.*")]
        raise _unknown(name, tags) from error
    return _Timm(short, {} if config is None else dict(vars(config)))


def _hub_model(repository: str) -> _Timm:
    """Return what the config.json of a repository of timm describes; it chooses among timm's own networks only."""
    import timm

    file = hub_file(repository, "config.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if "architecture" not in content:
            raise ValueError("its config.json names no architecture")
        name, config, given = content["architecture"], content.get("pretrained_cfg", {}), content.get("model_args", {})
        if not (timm.is_model(name) and isinstance(config, dict) and isinstance(given, dict)):
            raise ValueError(f"architecture {name!r}")
        if refused := sorted(set(given) & _PLACES):
            raise ValueError(f"model_args must not choose {', '.join(refused)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{repository} is no model of timm ({first_line(error)}). For models of other libraries give "
            "package.module:factory."
        ) from error
    classes = content.get("num_classes", config.get("num_classes"))
    return _Timm(name, config, repository, {**given, **({} if classes is None else {"num_classes": classes})})


def _built(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    try:
        model: nn.Module = timm.create_model(name, **{"pretrained": False, **options})
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"timm cannot make {name} ({first_line(error)}).") from error
    return model


def _fitting(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with the model's own tensors where the shapes differ, as in a last layer of new classes."""
    own = model.state_dict()
    return {key: own[key] if key in own and own[key].shape != value.shape else value for key, value in state.items()}


def _unknown(name: str, known: Sequence[str]) -> ModelError:
    near = difflib.get_close_matches(name, known, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ModelError(
        f"Unknown model {name!r}.{hint} Use the name of a torchvision model, timm/NAME, hf-hub:ORG/NAME, an ONNX file, "
        "or package.module:factory."
    )


def _user_network(name: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Call the factory of a user; return its network and, where it gives them, example inputs."""
    made = call_function(name, "model", "a torch.nn.Module")
    example = None
    if isinstance(made, tuple) and len(made) == 2:
        made, given = made
        example = given if isinstance(given, tuple) else (given,)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{name} must return a torch.nn.Module or (module, example_inputs); it returned {type(made).__name__}."
        )
    return made, example
