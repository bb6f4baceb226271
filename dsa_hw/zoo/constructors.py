"""Constructors of networks as data: a library, a name in its register, and plain arguments.

A saved result has such a record, so that it can be loaded without the code that made the network. The record may come
from a stranger. It is looked up, never imported: a name must be in the register of its library, and an argument must be
one of those below, with a number, a boolean or one of a few words as its value. No argument names a file, a host or
weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field, JsonValue
from torch import nn

from dsa_hw.channels.reference_output import reference_output, tolerance
from dsa_hw.errors import DsaError, MissingDependencyError, ModelError
from dsa_hw.utils.documents import Document
from dsa_hw.utils.modules import device_of
from dsa_hw.utils.random_state import random_state_kept
from dsa_hw.utils.text import first_line, one_line

__all__ = ["Constructor", "constructor_of"]

_LARGEST: Final = 2**24  # of an integer argument: the vocabulary and the positions of large language models
_DEPTH: Final = 3  # of lists and objects in each other
_SMALL_ARGUMENTS: Final = ("classes",)
_TORCHVISION_ARGUMENTS: Final = ("num_classes", "image_size", "aux_logits", "aux_loss", "transform_input")
_TIMM_ARGUMENTS: Final = ("num_classes", "in_chans", "img_size", "global_pool")
# Self-contained architectures of transformers: their configuration names no other network, which would be downloaded.
_TRANSFORMERS_TYPES: Final = (
    "albert", "bart", "beit", "bert", "convnext", "convnextv2", "data2vec-text", "data2vec-vision", "deit", "dinov2",
    "distilbert", "electra", "gpt2", "gpt_neox", "hubert", "llama", "mistral", "mobilenet_v1", "mobilenet_v2",
    "mobilevit", "mpnet", "opt", "poolformer", "qwen2", "qwen3", "regnet", "resnet", "roberta", "segformer", "swin",
    "swinv2", "t5", "vit", "wav2vec2", "xlm-roberta",
)  # fmt: skip
# Words that choose how a network computes. All other text of a configuration is names, labels and paths.
_WORDS: Final = (
    "absolute", "relative_key", "relative_key_query", "eager", "sdpa", "default", "linear", "dynamic", "yarn", "llama3",
    "layer", "group", "batch", "bottleneck", "basic", "x", "y", "full_attention", "sliding_attention",
    "single_label_classification", "multi_label_classification", "regression",
    "avg", "avgmax", "catavgmax", "fast", "map", "max", "token", "",
    "elu", "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "hardswish", "leaky_relu",
    "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
_NO_ARGUMENTS: Final = ("id2label", "label2id", "architectures", "torch_dtype", "dtype", "model_type")


class Constructor(Document):
    """How to make a network, as data.

    Attributes:
        library: Where its name is registered: torchvision, timm, transformers, or the small networks of dsa_hw.
        name: The name; of transformers ``MODEL_TYPE/CLASS``.
        arguments: Arguments by name; of transformers, values of the configuration.
    """

    library: Literal["dsa_hw", "torchvision", "timm", "transformers"]
    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,99}$")
    arguments: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,59}$")], JsonValue] = Field(max_length=500)

    def __str__(self) -> str:
        """Return, for example, ``torchvision resnet18 (num_classes=10)``; without a configuration of transformers."""
        given = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.library} {self.name}" + (f" ({given})" if given and self.library != "transformers" else "")

    def build(self, device: str = "cpu") -> nn.Module:
        """Make the network with random weights, in evaluation mode; random numbers stay as they were.

        Args:
            device: "meta" makes it without memory for its weights.

        Raises:
            ModelError: The name is not registered, an argument is not permitted, or the library refuses it.
            MissingDependencyError: The library is not installed.
        """
        _check_arguments(self)
        try:
            with random_state_kept(), torch.device(device):
                return _BUILDERS[self.library](self.name, dict(self.arguments)).eval()
        except DsaError:
            raise
        except ImportError as error:
            raise MissingDependencyError(
                f"The network is one of {self.library}, which is not installed. Run pip install "
                f"'dsa-hw[{self.library}]'."
            ) from error
        except Exception as error:  # whatever a constructor raises for arguments that do not fit
            raise ModelError(f"Cannot make {self} ({first_line(error)}).") from error


def constructor_of(model: nn.Module, inputs: Sequence[Any]) -> Constructor | None:
    """Return a constructor that makes this network up to its weights; None where there is none.

    It is checked: the network that it makes has the same tensors and, with the same weights, the same outputs.

    Args:
        model: The network; not changed.
        inputs: Its example inputs.
    """
    library = type(model).__module__.partition(".")[0]
    find = _FINDERS.get(library)
    if find is None:
        return None
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    expected = None
    for found in find(model, inputs):
        try:
            made = found.build()
            if {name: (t.shape, t.dtype) for name, t in made.state_dict().items()} != own:
                continue
            made.load_state_dict(model.state_dict())
            made.to(device_of(model))
            shapes = [tuple(x.shape) for x in inputs]
            expected = expected or reference_output(model, shapes, inputs)
            if expected.difference(reference_output(made, shapes, inputs)) <= tolerance(model):
                return found
        except Exception:  # of a constructor that is not the right one, or a network that differs from it
            continue
    return None


# Making networks ------------------------------------------------------------------------------------------------------


def _small(name: str, arguments: dict[str, Any]) -> nn.Module:
    from dsa_hw.zoo.cifar import SMALL

    return SMALL[_registered(name, SMALL, "dsa_hw")](**arguments)


def _torchvision(name: str, arguments: dict[str, Any]) -> nn.Module:
    from dsa_hw.zoo.torchvision_compat import torchvision

    _registered(name, torchvision.models.list_models(), "torchvision")
    known = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    # Never weights: they would be downloaded.
    nothing: dict[str, Any] = {key: None for key in ("weights", "weights_backbone") if key in known}
    if name in ("googlenet", "inception_v3"):
        nothing["init_weights"] = False
    model: nn.Module = torchvision.models.get_model(name, **nothing, **arguments)
    return model


def _timm(name: str, arguments: dict[str, Any]) -> nn.Module:
    import dsa_hw.zoo.torchvision_compat  # noqa: F401  (timm imports torchvision)

    import timm  # isort: skip

    _registered(name, timm.list_models(), "timm")
    model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    return model


def _transformers(name: str, arguments: dict[str, Any]) -> nn.Module:
    import dsa_hw.zoo.torchvision_compat  # noqa: F401  (transformers imports torchvision)

    import transformers  # isort: skip

    kind, _, class_name = name.partition("/")
    _registered(kind, _TRANSFORMERS_TYPES, "transformers")
    _registered(class_name, _transformers_classes(kind), f"transformers for {kind}")
    implementation = arguments.pop("attn_implementation", "eager")
    config = transformers.AutoConfig.for_model(kind, **arguments)
    config._attn_implementation = implementation
    model: nn.Module = getattr(transformers, class_name)(config)
    return model


_BUILDERS: Final = {"dsa_hw": _small, "torchvision": _torchvision, "timm": _timm, "transformers": _transformers}


def _transformers_classes(kind: str) -> set[str]:
    """Return the names of the networks that transformers registers for a type of configuration."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for name, register in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES") and isinstance(register, Mapping):
            value = register.get(kind, ())
            found.update([value] if isinstance(value, str) else value)
    return found


def _registered(name: str, register: Any, what: str) -> str:
    if name not in register:
        raise ModelError(f"{one_line(name, 80)!r} is not a network that can be made from a file with {what}.")
    return name


def _check_arguments(record: Constructor) -> None:
    """Refuse arguments that are not permitted.

    Raises:
        ModelError: An argument is unknown, or its value is not plain.
    """
    permitted = {
        "dsa_hw": _SMALL_ARGUMENTS, "torchvision": _TORCHVISION_ARGUMENTS, "timm": _TIMM_ARGUMENTS,
    }.get(record.library)  # fmt: skip
    for key, value in record.arguments.items():
        if permitted is not None and key not in permitted:
            raise ModelError(
                f"The constructor of the network has the argument {one_line(key, 60)!r}; permitted for "
                f"{record.library}: {', '.join(permitted)}."
            )
        if key in _NO_ARGUMENTS or not _is_plain(value):
            raise ModelError(
                f"The argument {one_line(key, 60)!r} of the constructor must be a number, true, false or a word that "
                f"is known; got {one_line(repr(value), 60)}."
            )


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, str):
        return value in _WORDS
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return True
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    if isinstance(value, (list, tuple)):
        return depth > 0 and len(value) <= 1000 and all(_is_plain(v, depth - 1) for v in value)
    if isinstance(value, Mapping):
        keys = all(isinstance(k, str) and re.fullmatch(r"[A-Za-z_]\w{0,59}", k, re.ASCII) for k in value)
        return depth > 0 and keys and all(_is_plain(v, depth - 1) for v in value.values())
    return False


# Recognising networks -------------------------------------------------------------------------------------------------


def _find_small(model: nn.Module, _inputs: Sequence[Any]) -> Iterator[Constructor]:
    from dsa_hw.zoo.cifar import SMALL

    if type(model).__module__ == "dsa_hw.zoo.cifar":
        for name in SMALL:
            yield from _with_outputs(Constructor(library="dsa_hw", name=name, arguments={}), model, "classes")


def _find_torchvision(model: nn.Module, _inputs: Sequence[Any]) -> Iterator[Constructor]:
    from dsa_hw.zoo.torchvision_compat import torchvision

    given: dict[str, Any] = {}
    for key, kind in {"image_size": int, "aux_logits": bool, "transform_input": bool}.items():
        if isinstance(value := getattr(model, key, None), kind):
            given[key] = value
    if hasattr(model, "aux_classifier"):
        given["aux_loss"] = model.aux_classifier is not None
    home = type(model).__module__
    for name in torchvision.models.list_models():
        if torchvision.models.get_model_builder(name).__module__ == home:
            yield from _with_outputs(
                Constructor(library="torchvision", name=name, arguments=given), model, "num_classes"
            )


def _find_timm(model: nn.Module, inputs: Sequence[Any]) -> Iterator[Constructor]:
    config = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, Mapping) else None
    if not isinstance(name, str):
        return
    given = getattr(model, "_model_args", {})  # what timm.create_model was called with; older versions do not keep it
    given = {k: v for k, v in given.items() if k in _TIMM_ARGUMENTS and _is_plain(v)} if isinstance(given, dict) else {}
    if isinstance(classes := getattr(model, "num_classes", None), int):
        given = {**given, "num_classes": classes}
    yield Constructor(library="timm", name=name, arguments=given)
    if len(inputs) == 1 and inputs[0].ndim == 4:
        channels = int(inputs[0].shape[1])
        size: list[JsonValue] = [int(side) for side in inputs[0].shape[2:]]
        yield Constructor(library="timm", name=name, arguments={**given, "in_chans": channels})
        yield Constructor(library="timm", name=name, arguments={**given, "in_chans": channels, "img_size": size})


def _find_transformers(model: nn.Module, _inputs: Sequence[Any]) -> Iterator[Constructor]:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or kind not in _TRANSFORMERS_TYPES:
        return
    values = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k not in _NO_ARGUMENTS}
    values = {k: v for k, v in values.items() if v is not None and _is_plain(v)}
    values["num_labels"] = int(config.num_labels)
    if (implementation := config._attn_implementation) in ("eager", "sdpa"):
        values["attn_implementation"] = implementation
    yield Constructor(library="transformers", name=f"{kind}/{type(model).__name__}", arguments=values)


_FINDERS: Final = {
    "dsa_hw": _find_small, "torchvision": _find_torchvision, "timm": _find_timm, "transformers": _find_transformers,
}  # fmt: skip


def _with_outputs(record: Constructor, model: nn.Module, argument: str) -> Iterator[Constructor]:
    """Yield the constructor where it makes tensors of the same names, with the number of outputs of the network."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    outputs = int(next(reversed(shapes.values()), (0,))[0])
    for candidate in (record, record.model_copy(update={"arguments": {**record.arguments, argument: outputs}})):
        try:
            found = {name: tensor.shape for name, tensor in candidate.build("meta").state_dict().items()}
        except ModelError:  # an argument that this one does not have
            return
        if list(found) != list(shapes):
            return
        if found == shapes:
            yield candidate
            return
