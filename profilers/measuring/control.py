"""The control workload: a small fixed network whose time shows how much a measurement was disturbed."""

from __future__ import annotations

from profilers.networks.chains import Layer, artefact_of, input_of
from profilers.networks.loaded import Loaded
from profilers.targets import Target

__all__ = ["control_chain", "control_name", "load_control"]


def control_name(target: Target) -> str:
    """Return which control a target has.

    It is part of the environment, since stored references are in units of the control.
    """
    return "2" if _has_large_activations(target) else "2, dense"


def load_control(target: Target) -> Loaded:
    """Load the control workload on a target."""
    chain = control_chain(target)
    return target.load(artefact_of(chain, target), (input_of(chain, precision=target.precision),))


def control_chain(target: Target) -> tuple[Layer, ...]:
    """Return the control workload, which takes about a millisecond. Change ``control_name`` with it.

    For runtimes with a memory arena on a CPU it is an inverted bottleneck with activations of 5 MB. That is more than
    the core's own caches hold, so that it also detects processes that only use the shared cache and the memory (these
    slowed a MobileNetV2 by 7%, but two small dense convolutions by 1%). Other targets get two dense 3x3 convolutions:
    under PyTorch on a CPU the bottleneck once took 1.94 times its reference in the median of a run, probably because
    of the allocation of large activations (not verified).
    """
    if _has_large_activations(target):
        return (
            Layer(16, 96, (112, 112), (1, 1), (1, 1), (0, 0), (1, 1)),
            Layer(96, 96, (112, 112), (3, 3), (2, 2), (1, 1), (1, 1), groups=96),
            Layer(96, 24, (56, 56), (1, 1), (1, 1), (0, 0), (1, 1)),
        )
    channels, side = (64, 20) if target.device == "cpu" else (256, 56)
    layer = Layer(channels, channels, (side, side), (3, 3), (1, 1), (1, 1), (1, 1))
    return (layer, layer)


def _has_large_activations(target: Target) -> bool:
    return target.device == "cpu" and target.artefact == "onnx"
