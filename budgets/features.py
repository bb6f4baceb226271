"""Feature maps: sums of products of two affine forms of the keep ratios.

Every size of an operation is affine in alpha with non-negative coefficients (``dsa_hw.channels.counts``), so an amount
of work is a sum of products of two such forms:

    phi_j(alpha) = sum_t  s_t (u0_t + u_t' alpha) (v0_t + v_t' alpha),        s_t, u0_t, u_t, v0_t, v_t >= 0

It is quadratic and does not fall when a keep ratio grows, and its Jacobian is a closed form. A linear model with
non-negative coefficients on phi has the same three properties. Features are divided by their value at alpha = 1, so a
coefficient is the cost of that feature in the dense network, in seconds or joules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from budgets.quadratic import Quadratic
from dsa_hw.channels.counts import Count, Term
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arrays import Floats

__all__ = ["FeatureMap", "dense_value"]


def dense_value(terms: Iterable[Term]) -> float:
    """Return the sum of ``terms`` at alpha = 1."""
    return sum(term.scale * float(np.prod([factor.dense for factor in term.factors])) for term in terms)


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Map of keep ratios (..., K) to features phi (..., d).

    It is a sum of T products of two affine forms.

    Attributes:
        names: Of the d features.
        classes: The class of work of each feature.
        dense: (d,) value of each feature at alpha = 1, in FLOPs or bytes.
        owner: (T,) feature that a term belongs to, ascending.
        left0: (T,) constant of the left factor; scale and division by the dense value are part of the left factor.
        left: (T, K) coefficients of the left factor.
        right0: (T,) constant of the right factor.
        right: (T, K) coefficients of the right factor.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    dense: Floats
    owner: NDArray[np.intp]
    left0: Floats
    left: Floats
    right0: Floats
    right: Floats

    @classmethod
    def from_terms(
        cls, terms: Mapping[str, Sequence[Term]], size: int, classes: Mapping[str, str] | None = None
    ) -> FeatureMap:
        """Build a map from the terms of each feature.

        Features that are zero at alpha = 1 are dropped.

        Args:
            terms: Feature -> its terms.
            size: Number of channel groups K.
            classes: Feature -> its class, where that is not the feature itself.

        Raises:
            ProfileError: A term is negative, or has more than two factors.
        """
        names: list[str] = []
        totals: list[float] = []
        owner: list[int] = []
        rows: list[tuple[float, Floats, float, Floats]] = []
        for name, work in terms.items():
            dense = dense_value(work)
            if dense <= 0:
                continue
            merged: dict[tuple[object, ...], tuple[float, Floats, float, Floats]] = {}
            for term in work:
                row = _factors(term, size, dense)
                if (row[0] < 0 or row[2] < 0) or (row[1] < 0).any() or (row[3] < 0).any():
                    raise ProfileError(f"Feature {name!r} has a negative size; sizes must be at least 0.")
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
        """Build the map of monomials.

        They are 1, ``alpha_i`` for i in ``linear`` (default: all) and ``alpha_i alpha_j`` for (i, j) in ``pairs``.
        """
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
        """Return the object itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: object) -> FeatureMap:
        """Return the object itself, so that scikit-learn's ``clone`` does not copy it."""
        return self

    def __call__(self, alpha: ArrayLike) -> Floats:
        """Return phi at keep ratios (..., K), shape (..., d)."""
        x = np.asarray(alpha, np.float64)
        products = (x @ self.left.T + self.left0) * (x @ self.right.T + self.right0)
        return self._sum(products, -1)

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        """Return phi at keep ratios (..., K), differentiable, shape (..., d)."""

        def tensor(array: Floats) -> torch.Tensor:
            return torch.as_tensor(array, dtype=alpha.dtype, device=alpha.device)

        products = (alpha @ tensor(self.left).T + tensor(self.left0)) * (
            alpha @ tensor(self.right).T + tensor(self.right0)
        )
        result = torch.zeros((*products.shape[:-1], len(self)), dtype=alpha.dtype, device=alpha.device)
        return result.index_add(-1, torch.as_tensor(self.owner, device=alpha.device), products)

    def jacobian(self, alpha: ArrayLike) -> Floats:
        """Return dphi/dalpha at keep ratios (..., K), shape (..., d, K)."""
        x = np.asarray(alpha, np.float64)
        u, v = x @ self.left.T + self.left0, x @ self.right.T + self.right0
        rows = u[..., :, None] * self.right + v[..., :, None] * self.left
        return self._sum(rows, -2)

    def combine(self, coefficients: ArrayLike) -> Quadratic:
        """Return ``coefficients @ phi`` as one quadratic form; ``coefficients`` (d,)."""
        w = np.asarray(coefficients, np.float64)[self.owner]
        half = (w[:, None] * self.left).T @ self.right
        linear = (w * self.left0) @ self.right + (w * self.right0) @ self.left
        return Quadratic(0.5 * (half + half.T), linear, float((w * self.left0) @ self.right0))

    def _sum(self, rows: Floats, axis: int) -> Floats:
        """Add the terms of each feature along ``axis``."""
        return np.add.reduceat(rows, self._starts, axis=axis)

    @cached_property
    def _starts(self) -> NDArray[np.intp]:
        return np.searchsorted(self.owner, np.arange(len(self.names)))

    def aggregate(self) -> tuple[tuple[str, ...], NDArray[np.intp], Floats]:
        """Return the classes, the class of each feature (d,), and its share (d,).

        The share is that of the feature in its class at alpha = 1.
        """
        names = tuple(dict.fromkeys(self.classes))
        index = np.array([names.index(name) for name in self.classes])
        return names, index, self.dense / np.bincount(index, self.dense)[index]

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of groups (i <= j) that meet in a product.

        This is the sparsity pattern of the paper's F_A.
        """
        met = (np.abs(self.left).T @ np.abs(self.right)) > 0
        i, j = np.nonzero(np.triu(met | met.T))
        return tuple(zip(i.tolist(), j.tolist(), strict=True))

    def same(self, other: FeatureMap) -> bool:
        """Whether both maps are equal in every number."""
        return self.names == other.names and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("dense", "owner", "left0", "left", "right0", "right")
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; factors are sparse (group -> coefficient)."""
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
        """Read what `to_dict` wrote; every number is equal bit for bit."""
        size, terms = int(state["groups"]), state["terms"]
        left0, left = _unsparse([term["left"] for term in terms], size)
        right0, right = _unsparse([term["right"] for term in terms], size)
        owner = np.array([int(term["feature"]) for term in terms], np.intp)
        dense = np.array(state["dense"], np.float64)
        return cls(tuple(state["names"]), tuple(state["classes"]), dense, owner, left0, left, right0, right)


def _factors(term: Term, size: int, dense: float) -> tuple[float, Floats, float, Floats]:
    """Return the two affine factors of a term.

    ``scale / dense`` is part of the left one; of a constant and another factor, the constant one is the right one.
    """
    if len(term.factors) > 2:
        raise ProfileError(f"A term must have at most two factors to be quadratic; got {len(term.factors)}.")
    scale = term.scale / dense
    one = Count(1.0, np.zeros(size))
    first, second = (*term.factors, one, one)[:2]
    if len(term.factors) == 2 and not second.coefficients.any():
        scale, second = scale * second.constant, one
    elif len(term.factors) == 2 and not first.coefficients.any():
        scale, first, second = scale * first.constant, second, one
    coefficients = np.asarray(first.coefficients, np.float64)
    return scale * first.constant, scale * coefficients, second.constant, np.asarray(second.coefficients, np.float64)


def _sparse(constant: float, row: Floats) -> dict[str, float]:
    # "" is the constant; a group index cannot be empty.
    entries = {str(k): float(row[k]) for k in np.flatnonzero(row)}
    return ({"": float(constant)} if constant else {}) | entries


def _unsparse(rows: Sequence[Mapping[str, float]], size: int) -> tuple[Floats, Floats]:
    constant, matrix = np.zeros(len(rows)), np.zeros((len(rows), size))
    for index, row in enumerate(rows):
        for key, coefficient in row.items():
            if key == "":
                constant[index] = coefficient
            else:
                matrix[index, int(key)] = coefficient
    return constant, matrix
