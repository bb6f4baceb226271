"""Physics features: work by class of operation, exact in the keep ratios.

Each feature adds up one class of work over the network's operations: multiply-adds of dense, pointwise and depthwise
convolutions and of matrix products, bytes read and written by each kind of operation, bytes of weights. With blocks of
channels (``budgets.blocks``) there are two more: depthwise bytes of groups that end in a partial block, and the
multiply-adds of convolutions that read less than a block.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from budgets.features import FeatureMap, dense_value
from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.errors import ProfileError

__all__ = ["GRANULARITIES", "Groups", "physics_features", "unit_channels", "work_class"]


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


def unit_channels(groups: Groups) -> tuple[int, ...]:
    """Return the channels that a unit of each group has in one tensor, (K,).

    It is 1 almost everywhere, and more where channels can only be removed together: a unit of ShuffleNetV2's last stage
    has 8 channels in each half of its split. A tensor of both halves has twice as many, so the smallest counts.
    """
    found = np.full(len(groups.names), np.inf)
    for operation in groups.operations:
        for factor in (factor for term in operation.flops for factor in term.factors):
            own = np.asarray(factor.coefficients) / np.asarray(groups.sizes)
            found = np.where(own > 0, np.minimum(found, own), found)
    return tuple(max(1, round(float(c))) if np.isfinite(c) else 1 for c in found)


def physics_features(
    groups: Groups, granularity: str = "classes", blocks: bool = False, without: Collection[str] = ()
) -> FeatureMap:
    """Return the physics features of a network.

    Args:
        groups: Channel groups of the network.
        granularity: ``"coarse"`` adds up multiply-adds, activation bytes and weight bytes of the whole network (3
            features and the constant); ``"classes"`` by class of operation (up to 20); ``"operations"`` gives every
            convolution and matrix product its own feature and keeps the classes for the rest.
        blocks: Whether the map is of the 3 K columns that a `budgets.blocks.Blocks` returns instead of keep ratios.
        without: Operations whose multiply-adds are left out.

    Returns:
        A map of K keep ratios to d features, each 1 at alpha = 1. With ``blocks``, of 3 K columns, each 1 where all
        columns are.

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
        if operation.name not in without:
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
    if not blocks:
        return FeatureMap.from_terms(terms, len(groups.names), classes)
    wide = {
        name: [Term(term.scale, tuple(_column(f, 0) for f in term.factors)) for term in work]
        for name, work in terms.items()
    }
    wide["partial depthwise bytes"] = [
        Term(float(operation.itemsize), (_column(count, 1),))
        for operation in groups.operations
        if operation.depthwise
        for count in (*operation.inputs, operation.output)
    ]
    wide["narrow convolution work"] = [
        Term(term.scale, (_column(made, 0), _column(read, 2)))
        for operation in groups.operations
        if _traffic_class(operation) == "convolution" and not operation.depthwise
        for term in operation.flops
        if len(term.factors) == 2
        for made, read in [term.factors]
        # Two groups side by side, or a group beside channels that stay, are one wide tensor.
        if not read.constant and np.count_nonzero(read.coefficients) == 1
    ]
    return FeatureMap.from_terms(wide, 3 * len(groups.names), classes)


def _column(count: Count, column: int) -> Count:
    """Return a count of K keep ratios as one of column 0, 1 or 2 of the 3 K.

    Only column 0 has the constant: channels that always stay are neither partial nor narrow.
    """
    zeros = np.zeros(len(count.coefficients))
    parts = [count.coefficients if column == c else zeros for c in range(3)]
    return Count(0.0 if column else count.constant, np.concatenate(parts))


def _traffic_class(operation: Operation) -> str:
    return _CLASS_OF.get(operation.kind, "other")
