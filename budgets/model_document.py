"""The schema of a cost model's file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from budgets import regression
from budgets.conformal import METHODS
from budgets.provenance import Provenance
from dsa_hw.utils.documents import Document, Line, SealedDocument

__all__ = ["CostModelDocument"]

_MOST = 10**8  # numbers of one array, when a sparse one is written out
_Count = Annotated[int, Field(ge=1, le=2**31)]
_Index = Annotated[int, Field(ge=-1, le=2**31)]
_Column = list[str] | list[bool] | list[int] | list[float]


class _Array(Document):
    array: list[float] | list[list[float]] | list[list[list[float]]]
    dtype: Literal["int", "float"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype == "int" and not all(float(v).is_integer() and abs(v) < 2**53 for v in _flat(self.array)):
            raise ValueError("an array of dtype 'int' must have whole numbers")
        return self


class _Blocks(Document):
    block: _Count
    sizes: list[_Count] = Field(min_length=1)
    channels: list[_Count]
    narrow: bool


class _FeatureReference(Document):
    features: int = Field(ge=0)


class _Estimator(Document):
    estimator: str
    parameters: dict[str, _Value]
    learnt: dict[str, _Value]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.estimator not in regression.__all__:
            raise ValueError(f"Unknown estimator {self.estimator!r}. Available: {', '.join(regression.__all__)}")
        return self


def _kind(value: Any) -> str:
    """Return which of the classes a JSON value of an estimator is, by a key that only this class has."""
    keys = value if isinstance(value, dict) else vars(value) if isinstance(value, Document) else ()
    return next((key for key in ("estimator", "array", "block", "features") if key in keys), "plain")


_Value = Annotated[
    Annotated[_Estimator, Tag("estimator")]
    | Annotated[_Array, Tag("array")]
    | Annotated[_Blocks, Tag("block")]
    | Annotated[_FeatureReference, Tag("features")]
    | Annotated[bool | int | float | str | None, Tag("plain")],
    Discriminator(_kind),
]
_Estimator.model_rebuild()


class _Term(Document):
    feature: int = Field(ge=0)
    left: dict[str, float]
    right: dict[str, float]


class _Features(Document):
    groups: int = Field(ge=1, le=10**6)
    names: list[str] = Field(min_length=1)
    classes: list[str] = Field(min_length=1)
    dense: list[float] = Field(min_length=1)
    terms: list[_Term] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.groups * len(self.terms) > _MOST:
            raise ValueError(f"groups x terms must not exceed {_MOST}")
        if not len(self.names) == len(self.classes) == len(self.dense):
            raise ValueError("names, classes and dense must have the same length")
        for term in self.terms:
            if term.feature >= len(self.names):
                raise ValueError(f"feature {term.feature} is none of {len(self.names)}")
            for key in (*term.left, *term.right):
                if key and not (key.isascii() and key.isdigit() and len(key) < 8 and int(key) < self.groups):
                    raise ValueError(f"{key!r} is none of {self.groups} channel groups")
        return self


class _Shape(Document):
    logs: list[float] = Field(min_length=1)
    residuals: list[float] = Field(min_length=1)
    owner: list[_Index] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.logs) == len(self.residuals) == len(self.owner):
            raise ValueError("logs, residuals and owner must have the same length")
        return self


class _Calibration(Document):
    method: str
    scores: list[float] = Field(min_length=1)
    owner: list[Annotated[int, Field(ge=0, le=2**31)]] = Field(min_length=1)
    shape: _Shape | None
    models: list[_Estimator]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}")
        if len(self.scores) != len(self.owner) or max(self.owner) >= max(len(self.models), 1):
            raise ValueError("owner must have the number of a model for each score")
        return self


class CostModelDocument(SealedDocument):
    """A fitted cost model: cost of a network on a target as a function of its keep ratios."""

    model_config = ConfigDict(title="dsa_hw cost model")
    remedy = "Make it with dsa-hw fit."

    format: Literal["dsa_hw cost model 3"]
    name: Line
    why: Line
    groups: dict[str, _Count] = Field(min_length=1, max_length=10**6)
    provenance: Provenance
    report: dict[str, _Column]
    coefficients: dict[str, float] | None
    estimator: _Estimator
    calibration: _Calibration
    fitted: dict[str, _Column] | None
    flops_shares: dict[str, float] | None
    features: list[_Features]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := [name for name in self.provenance.grid if name not in self.groups]:
            raise ValueError(f"provenance.grid has a step for {unknown[0]!r}, which is none of the groups")
        for name, table, needed in (("report", self.report, ["candidate"]), ("fitted", self.fitted, self.groups)):
            if table is None:
                continue
            if missing := [column for column in needed if column not in table]:
                raise ValueError(f"{name} has no column {missing[0]!r}")
            if len({len(column) for column in table.values()}) != 1:
                raise ValueError(f"the columns of {name} must have the same length")
        return self


def _flat(values: Any) -> list[float]:
    return [v for row in values for v in (_flat(row) if isinstance(row, list) else [row])]
