"""Physics features: what a configuration makes the device do, as exact functions of the keep ratios.

Each feature adds up one class of work over the network's operations: multiply-adds of dense, pointwise, depthwise
convolutions and matrix products, bytes read and written by each kind of operation, bytes of weights. Every size of an
operation is affine in alpha with non-negative coefficients (``dsa_hw.channels.counts``), so every feature is a sum of
products of two such forms:

    phi_j(alpha) = sum_t  s_t (u0_t + u_t' alpha) (v0_t + v_t' alpha),        s_t, u0_t, u_t, v0_t, v_t >= 0

It is quadratic, it never falls when a keep ratio grows, and its Jacobian is a closed form. A linear model with
non-negative coefficients on phi inherits all three. Features are divided by their value at alpha = 1, so a coefficient
is that class's cost in the dense network, in seconds or joules: something one can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from budgets.quadratic import Quadratic
from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.errors import ProfileError

__all__ = ["FeatureMap", "Groups", "physics_features", "work_class"]

Array = NDArray[np.float64]


class Groups(Protocol):
    """The part of ``dsa_hw.channels.ChannelGroups`` that costs are made from."""

    @property
    def names(self) -> Sequence[str]:
        """K readable names."""

    @property
    def sizes(self) -> NDArray[Any]:
        """(K,) channels of each group."""

    @property
    def operations(self) -> Sequence[Operation]:
        """Operations in execution order."""

    @property
    def fingerprint(self) -> str:
        """Identity of the network."""


# What an operation costs beyond its multiply-adds is traffic, and the rate depends on what is done to each element.
# A kind that is not listed here is charged to "other": a class of its own, never zero and never left out.
_TRAFFIC_CLASSES: Final[dict[str, tuple[str, ...]]] = {
    "convolution": ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d"),
    "matrix": ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "scaled_dot_product_attention", "einsum"),
    "elementwise": (
        *(
            "add",
            "add_",
            "sub",
            "sub_",
            "mul",
            "mul_",
            "div",
            "div_",
            "relu",
            "relu_",
            "relu6",
            "relu6_",
            "hardtanh",
            "hardtanh_",
        ),
        *(
            "clamp",
            "clamp_",
            "clamp_min",
            "leaky_relu",
            "leaky_relu_",
            "neg",
            "abs",
            "maximum",
            "minimum",
            "where",
            "prelu",
        ),
        *("hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_"),
    ),
    "transcendental": (
        *(
            "silu",
            "silu_",
            "sigmoid",
            "sigmoid_",
            "gelu",
            "tanh",
            "tanh_",
            "exp",
            "log",
            "softmax",
            "_softmax",
            "log_softmax",
        ),
        *("elu", "elu_", "softplus", "mish", "mish_", "pow", "sqrt", "rsqrt", "erf"),
    ),
    "normalisation": (
        *("batch_norm", "_native_batch_norm_legit_no_training", "native_batch_norm", "layer_norm", "native_layer_norm"),
        *("group_norm", "native_group_norm", "instance_norm", "rms_norm"),
    ),
    "pooling": (
        *(
            "max_pool2d",
            "max_pool2d_with_indices",
            "avg_pool2d",
            "adaptive_avg_pool2d",
            "_adaptive_avg_pool2d",
            "adaptive_max_pool2d",
        ),
        *(
            "mean",
            "sum",
            "amax",
            "amin",
            "max_pool1d",
            "avg_pool1d",
            "upsample_nearest2d",
            "upsample_bilinear2d",
            "interpolate",
        ),
    ),
    "movement": (
        *(
            "cat",
            "stack",
            "clone",
            "copy",
            "contiguous",
            "pad",
            "constant_pad_nd",
            "index",
            "index_select",
            "gather",
            "roll",
        ),
        *(
            "reshape",
            "flatten",
            "repeat",
            "expand",
            "embedding",
            "_reshape_copy",
            "channel_shuffle",
            "pixel_shuffle",
            "pixel_unshuffle",
        ),
        *("_to_copy", "to", "slice_scatter", "select_scatter"),
    ),
}
_CLASS_OF: Final = {kind: name for name, kinds in _TRAFFIC_CLASSES.items() for kind in kinds}

GRANULARITIES: Final = ("coarse", "classes", "operations")


def work_class(operation: Operation) -> str:
    """Class of an operation's multiply-adds: pointwise, spatial or depthwise convolution, or matrix product.

    The kernel size is not needed. With ``P = flops / (2 weights)`` output positions, ``weights / C_out`` reads for each
    output and ``inputs / P`` input elements for each output position, the ratio ``(weights / C_out) / (inputs / P)`` is
    ``kernel area / (stride area * groups)``: how often an input element is reused by overlapping windows. Up to 1 the
    windows do not overlap (1x1, patchify) and the convolution is a matrix product.
    """
    if _traffic_class(operation) != "convolution":
        return "matrix"
    if operation.depthwise:
        return "depthwise"
    flops, weights = _dense(operation.flops), _dense(operation.weights)
    inputs, output = sum(count.dense for count in operation.inputs[:1]), operation.output.dense
    if min(flops, weights, inputs, output) <= 0:
        return "spatial"
    # weights / C_out = flops / (2 output); inputs / P = inputs * 2 weights / flops
    overlap = (flops / (2 * output)) / (inputs * 2 * weights / flops)
    # A bias is part of the weights and moves the ratio by less than a factor 1 + 1 / C_in.
    return "pointwise" if overlap <= 1.5 else "spatial"


def physics_features(groups: Groups, granularity: str = "classes") -> FeatureMap:
    """Physics features of a network.

    Args:
        groups: channel groups with their ``operations``.
        granularity: ``"coarse"`` adds up multiply-adds, activation bytes and weight bytes of the whole network (3
            features and the constant); ``"classes"`` by class of operation (up to 20); ``"operations"`` gives every
            convolution and matrix product its own feature and keeps the classes for the rest.

    Returns:
        A map of K keep ratios to d features, each 1 at alpha = 1.
    """
    if granularity not in GRANULARITIES:
        raise ProfileError(f"granularity={granularity!r}: there are {', '.join(GRANULARITIES)}")
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


def _dense(terms: Iterable[Term]) -> float:
    return sum(term.scale * float(np.prod([factor.dense for factor in term.factors])) for term in terms)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """phi: (..., K) keep ratios -> (..., d) features, as a list of T products of two affine forms.

    ``owner`` (T,) is the feature that a term belongs to; ``left``, ``right`` (T, K) with ``left0``, ``right0`` (T,) are
    its two factors, the scale and the division by the dense value being folded into the left one. ``dense`` (d,) is
    that value in FLOPs or bytes and ``classes`` the class of work of each feature. Immutable, so copies share.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    dense: Array
    owner: NDArray[np.intp]
    left0: Array
    left: Array
    right0: Array
    right: Array

    @classmethod
    def from_terms(
        cls, terms: Mapping[str, Sequence[Term]], size: int, classes: Mapping[str, str] | None = None
    ) -> FeatureMap:
        """Build from the terms of each feature; features that are zero at alpha = 1 are dropped.

        ``classes`` names the class of a feature where that is not the feature itself.
        """
        names: list[str] = []
        totals: list[float] = []
        owner: list[int] = []
        rows: list[tuple[float, Array, float, Array]] = []
        for name, work in terms.items():
            dense = _dense(work)
            if dense <= 0:
                continue
            merged: dict[tuple[object, ...], tuple[float, Array, float, Array]] = {}
            for term in work:
                row = _factors(term, size, dense)
                if (row[0] < 0 or row[2] < 0) or (row[1] < 0).any() or (row[3] < 0).any():
                    raise ProfileError(
                        f"feature {name!r} has a negative size: costs are sums of sizes, which cannot be negative"
                    )
                # Terms with the same right factor are one term; most activation traffic collapses to a single row.
                key = (row[2], row[3].tobytes())
                if key in merged:
                    row = (merged[key][0] + row[0], merged[key][1] + row[1], row[2], row[3])
                merged[key] = row
            owner.extend([len(names)] * len(merged))
            rows.extend(merged.values())
            names.append(name)
            totals.append(dense)
        kinds = tuple((classes or {}).get(name, name) for name in names)
        left0, left, right0, right = (np.array(part, np.float64) for part in zip(*rows, strict=True))
        return cls(tuple(names), kinds, np.array(totals), np.array(owner, np.intp), left0, left, right0, right)

    @classmethod
    def monomials(cls, size: int, pairs: Iterable[tuple[int, int]], linear: Iterable[int] | None = None) -> FeatureMap:
        """``1``, ``alpha_i`` for i in ``linear`` (default: all), ``alpha_i alpha_j`` for (i, j) in ``pairs``."""
        eye = np.eye(size)
        ones, zeros = Count(1.0, np.zeros(size)), 0.0
        singles = range(size) if linear is None else linear
        terms: dict[str, list[Term]] = {"1": [Term(1.0, (ones,))]}
        terms |= {f"a[{i}]": [Term(1.0, (Count(zeros, eye[i]),))] for i in singles}
        terms |= {f"a[{i}]a[{j}]": [Term(1.0, (Count(zeros, eye[i]), Count(zeros, eye[j])))] for i, j in pairs}
        return cls.from_terms(terms, size)

    def __len__(self) -> int:
        """Number of features d."""
        return len(self.names)

    @property
    def size(self) -> int:
        """Number of channel groups K."""
        return int(self.left.shape[1])

    def __copy__(self) -> FeatureMap:
        """Immutable: a copy is the same object."""
        return self

    def __deepcopy__(self, memo: object) -> FeatureMap:
        """Immutable: scikit-learn's ``clone`` shares it instead of copying the network."""
        return self

    def __call__(self, alpha: ArrayLike) -> Array:
        """phi at keep ratios (..., K), shape (..., d)."""
        x = np.asarray(alpha, np.float64)
        products = (x @ self.left.T + self.left0) * (x @ self.right.T + self.right0)
        return self._sum(products, -1)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """phi at keep ratios (..., K), differentiable, shape (..., d)."""

        def tensor(array: Array) -> torch.Tensor:
            return torch.as_tensor(array, dtype=alpha.dtype, device=alpha.device)

        products = (alpha @ tensor(self.left).T + tensor(self.left0)) * (
            alpha @ tensor(self.right).T + tensor(self.right0)
        )
        result = torch.zeros((*products.shape[:-1], len(self)), dtype=alpha.dtype, device=alpha.device)
        return result.index_add(-1, torch.as_tensor(self.owner, device=alpha.device), products)

    def jacobian(self, alpha: ArrayLike) -> Array:
        """dphi/dalpha at keep ratios (..., K), shape (..., d, K): product rule, term by term."""
        x = np.asarray(alpha, np.float64)
        u, v = x @ self.left.T + self.left0, x @ self.right.T + self.right0
        rows = u[..., :, None] * self.right + v[..., :, None] * self.left
        return self._sum(rows, -2)

    def combine(self, coefficients: ArrayLike) -> Quadratic:
        """``coefficients @ phi`` as one quadratic form; ``coefficients`` (d,)."""
        w = np.asarray(coefficients, np.float64)[self.owner]
        half = (w[:, None] * self.left).T @ self.right
        linear = (w * self.left0) @ self.right + (w * self.right0) @ self.left
        return Quadratic(0.5 * (half + half.T), linear, float((w * self.left0) @ self.right0))

    def _sum(self, rows: Array, axis: int) -> Array:
        """Add the terms of each feature along ``axis``: terms are stored feature by feature, in segments."""
        return np.add.reduceat(rows, self._starts, axis=axis)

    @cached_property
    def _starts(self) -> NDArray[np.intp]:
        return np.searchsorted(self.owner, np.arange(len(self.names)))

    def aggregate(self) -> tuple[tuple[str, ...], NDArray[np.intp], Array]:
        """Classes: their names (m,), the class of each feature (d,), and its share of that class at alpha = 1 (d,)."""
        names = tuple(dict.fromkeys(self.classes))
        index = np.array([names.index(name) for name in self.classes])
        return names, index, self.dense / np.bincount(index, self.dense)[index]

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Groups (i <= j) that meet in a product, i.e. in one operation: the sparsity pattern of the paper's F_A."""
        met = (np.abs(self.left).T @ np.abs(self.right)) > 0
        i, j = np.nonzero(np.triu(met | met.T))
        return tuple(zip(i.tolist(), j.tolist(), strict=True))

    def same(self, other: FeatureMap) -> bool:
        """Equal in every number."""
        return self.names == other.names and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("dense", "owner", "left0", "left", "right0", "right")
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready description; factors are sparse (group -> coefficient)."""
        terms = [
            {"feature": int(owner), "left": _sparse(l0, row), "right": _sparse(r0, col)}
            for owner, l0, row, r0, col in zip(self.owner, self.left0, self.left, self.right0, self.right, strict=True)
        ]
        return {
            "groups": self.size,
            "names": list(self.names),
            "classes": list(self.classes),
            "dense": self.dense.tolist(),
            "terms": terms,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> FeatureMap:
        """Inverse of ``to_dict``; every number comes back bit for bit."""
        size, terms = int(state["groups"]), state["terms"]
        left0, left = _unsparse([term["left"] for term in terms], size)
        right0, right = _unsparse([term["right"] for term in terms], size)
        owner = np.array([int(term["feature"]) for term in terms], np.intp)
        dense = np.array(state["dense"], np.float64)
        return cls(tuple(state["names"]), tuple(state["classes"]), dense, owner, left0, left, right0, right)


def _factors(term: Term, size: int, dense: float) -> tuple[float, Array, float, Array]:
    """The two affine factors of a term, with scale / dense folded into the left one; the richer factor goes left."""
    if len(term.factors) > 2:
        raise ProfileError(
            f"a term with {len(term.factors)} factors is not quadratic; dsa_hw.channels.counts promises at most two"
        )
    scale = term.scale / dense
    one = Count(1.0, np.zeros(size))
    first, second = (*term.factors, one, one)[:2]
    if len(term.factors) == 2 and not second.coefficients.any():
        scale, second = scale * second.constant, one
    elif len(term.factors) == 2 and not first.coefficients.any():
        scale, first, second = scale * first.constant, second, one
    coefficients = np.asarray(first.coefficients, np.float64)
    return scale * first.constant, scale * coefficients, second.constant, np.asarray(second.coefficients, np.float64)


def _sparse(constant: float, row: Array) -> dict[str, float]:
    # "" is the constant; a group index cannot be empty.
    entries = {str(k): float(row[k]) for k in np.flatnonzero(row)}
    return ({"": float(constant)} if constant else {}) | entries


def _unsparse(rows: Sequence[Mapping[str, float]], size: int) -> tuple[Array, Array]:
    constant, matrix = np.zeros(len(rows)), np.zeros((len(rows), size))
    for index, row in enumerate(rows):
        for key, coefficient in row.items():
            if key == "":
                constant[index] = coefficient
            else:
                matrix[index, int(key)] = coefficient
    return constant, matrix
