"""Physics features: work by class of operation, exact in the keep ratios.

Each feature adds up one class of work over the network's operations: multiply-adds of dense, pointwise and depthwise
convolutions and of matrix products, bytes read and written by each kind of operation, bytes of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from budgets.features import FeatureMap, dense_value
from dsa_hw.channels.counts import Operation, Term
from dsa_hw.errors import ProfileError

__all__ = ["GRANULARITIES", "Groups", "physics_features", "work_class"]


class Groups(Protocol):
    """The part of ``dsa_hw.channels.ChannelGroups`` that costs are computed from."""

    @property
    def names(self) -> Sequence[str]:
        """The K names."""

    @property
    def sizes(self) -> NDArray[Any]:
        """The channels of each group, (K,)."""

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations in execution order."""

    @property
    def fingerprint(self) -> str:
        """The identity of the network."""


# Beyond its multiply-adds an operation costs traffic, at a rate that depends on what is done to each element. A kind
# that is not listed here belongs to the class "other"; none is left out.
_TRAFFIC_CLASSES: Final[dict[str, str]] = {
    "convolution": "conv1d conv2d conv3d convolution conv_transpose2d",
    "matrix": "linear addmm mm bmm matmul baddbmm scaled_dot_product_attention einsum",
    "elementwise": """
        add add_ sub sub_ mul mul_ div div_ relu relu_ relu6 relu6_ hardtanh hardtanh_ clamp clamp_ clamp_min leaky_relu
        leaky_relu_ neg abs maximum minimum where prelu hardswish hardswish_ hardsigmoid hardsigmoid_""",
    "transcendental": """
        silu silu_ sigmoid sigmoid_ gelu tanh tanh_ exp log softmax _softmax log_softmax elu elu_ softplus mish mish_
        pow sqrt rsqrt erf""",
    "normalisation": """
        batch_norm _native_batch_norm_legit_no_training native_batch_norm layer_norm native_layer_norm group_norm
        native_group_norm instance_norm rms_norm""",
    "pooling": """
        max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d mean
        sum amax amin max_pool1d avg_pool1d upsample_nearest2d upsample_bilinear2d interpolate""",
    "movement": """
        cat stack clone copy contiguous pad constant_pad_nd index index_select gather roll reshape flatten repeat expand
        embedding _reshape_copy channel_shuffle pixel_shuffle pixel_unshuffle _to_copy to slice_scatter
        select_scatter""",
}
_CLASS_OF: Final = {kind: name for name, kinds in _TRAFFIC_CLASSES.items() for kind in kinds.split()}

GRANULARITIES: Final = ("coarse", "classes", "operations")


def work_class(operation: Operation) -> str:
    """Return the class of an operation's multiply-adds.

    It is "pointwise", "spatial", "depthwise" or "matrix".

    The kernel size is not needed. With ``P = flops / (2 weights)`` output positions, ``weights / C_out`` reads for each
    output and ``inputs / P`` input elements for each output position, the ratio ``(weights / C_out) / (inputs / P)`` is
    ``kernel area / (stride area * groups)``: how often an input element is reused by overlapping windows. Up to 1 the
    windows do not overlap (1x1, patchify) and the convolution is a matrix product.
    """
    if _traffic_class(operation) != "convolution":
        return "matrix"
    if operation.depthwise:
        return "depthwise"
    flops, weights = dense_value(operation.flops), dense_value(operation.weights)
    inputs, output = sum(count.dense for count in operation.inputs[:1]), operation.output.dense
    if min(flops, weights, inputs, output) <= 0:
        return "spatial"
    # weights / C_out = flops / (2 output); inputs / P = inputs * 2 weights / flops
    overlap = (flops / (2 * output)) / (inputs * 2 * weights / flops)
    # A bias is part of the weights and moves the ratio by less than a factor 1 + 1 / C_in.
    return "pointwise" if overlap <= 1.5 else "spatial"


def physics_features(groups: Groups, granularity: str = "classes") -> FeatureMap:
    """Return the physics features of a network.

    Args:
        groups: Channel groups of the network.
        granularity: ``"coarse"`` adds up multiply-adds, activation bytes and weight bytes of the whole network (3
            features and the constant); ``"classes"`` by class of operation (up to 20); ``"operations"`` gives every
            convolution and matrix product its own feature and keeps the classes for the rest.

    Returns:
        A map of K keep ratios to d features, each 1 at alpha = 1.

    Raises:
        ProfileError: The granularity is unknown.
    """
    if granularity not in GRANULARITIES:
        raise ProfileError(f"Unknown granularity {granularity!r}. Available granularities: {', '.join(GRANULARITIES)}.")
    terms: dict[str, list[Term]] = {"constant": [Term(1.0, ())]}
    classes: dict[str, str] = {}

    def charge(name: str, *work: Term) -> None:
        terms.setdefault(name, []).extend(work)

    for operation in groups.operations:
        if operation.view:
            continue
        own = granularity == "operations" and bool(operation.flops)
        kind, size = _traffic_class(operation), float(operation.itemsize)
        traffic = [Term(size, (count,)) for count in (*operation.inputs, operation.output)]
        weights = [Term(size * term.scale, term.factors) for term in operation.weights]
        work = "work" if granularity == "coarse" else f"{work_class(operation)} work"
        if own:
            classes[f"{work}: {operation.name}"] = work
        charge(f"{work}: {operation.name}" if own else work, *operation.flops)
        if granularity == "coarse":
            charge("activation bytes", *traffic)
            charge("weight bytes", *weights)
        else:
            kind = "depthwise" if operation.depthwise and kind == "convolution" else kind
            charge(f"{kind} bytes", *traffic)
            # A normalisation's parameters are a few bytes per channel next to its activations: the same class of
            # traffic.
            charge("weight bytes" if operation.flops else f"{kind} bytes", *weights)
    return FeatureMap.from_terms(terms, len(groups.names), classes)


def _traffic_class(operation: Operation) -> str:
    return _CLASS_OF.get(operation.kind, "other")
