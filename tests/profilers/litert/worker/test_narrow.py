"""Narrowing of LiteRT files, run by a small interpreter of operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from dsa_hw.channels import find_groups, shrink
from profilers.litert.worker.masks import CannotNarrowError, reshaped
from profilers.litert.worker.narrow import TfliteTemplate, _source

KINDS = [
    "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "MUL", "RELU", "MEAN", "CONCATENATION", "PAD",
    "RESHAPE", "TRANSPOSE", "SPLIT_V", "SLICE", "STRIDED_SLICE", "GATHER", "SOFTMAX", "PACK",
]  # fmt: skip


CODES = dict(enumerate(KINDS))


class Flat:
    """A LiteRT file as an object tree, written down operator by operator, and run by torch."""

    def __init__(self, *shape: int) -> None:
        self.tensors: list[Any] = []
        self.operators: list[Any] = []
        self.buffers = [SimpleNamespace(data=None)]
        self.x = self._tensor(shape, 0)

    def _tensor(self, shape: Any, kind: int, buffer: int = 0) -> int:
        name = f"a.b.t{len(self.tensors)}".encode()
        new = SimpleNamespace(
            shape=np.asarray(shape, np.int32), shapeSignature=None, type=kind, buffer=buffer, name=name
        )
        self.tensors.append(new)
        return len(self.tensors) - 1

    def constant(self, array: Any) -> int:
        array = np.asarray(array)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
        self.buffers.append(SimpleNamespace(data=np.frombuffer(array.tobytes(), np.uint8)))
        return self._tensor(array.shape, 0 if array.dtype.kind == "f" else 2, len(self.buffers) - 1)

    def add(self, kind: str, inputs: list[int], *shapes: tuple[int, ...], **options: Any) -> Any:
        outputs = [self._tensor(shape, 0) for shape in shapes]
        self.operators.append(
            SimpleNamespace(
                opcodeIndex=KINDS.index(kind),
                inputs=np.asarray(inputs, np.int32),
                outputs=np.asarray(outputs, np.int32),
                builtinOptions=SimpleNamespace(**options),
            )
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def model(self, *outputs: int) -> Any:
        graph = SimpleNamespace(
            tensors=self.tensors, operators=self.operators, inputs=[self.x], outputs=np.asarray(outputs)
        )
        codes = [SimpleNamespace(builtinCode=i) for i in range(len(KINDS))]
        return SimpleNamespace(subgraphs=[graph], buffers=self.buffers, operatorCodes=codes, metadata=None)


def run(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The first output, by torch; checks that every computed tensor has the shape that is written down."""
    graph = model.subgraphs[0]
    values: dict[int, Any] = {int(graph.inputs[0]): x}
    for i, t in enumerate(graph.tensors):
        data = model.buffers[t.buffer].data
        if data is not None:
            values[i] = torch.from_numpy(np.frombuffer(bytes(data), "<f4" if t.type == 0 else "<i4").copy())
            values[i] = values[i].reshape(tuple(int(n) for n in t.shape))
    for o in graph.operators:
        a = [values[int(i)] for i in o.inputs]
        made = _KERNELS[KINDS[o.opcodeIndex]](a, o.builtinOptions)
        for index, value in zip(o.outputs, made if isinstance(made, (list, tuple)) else [made], strict=True):
            assert tuple(value.shape) == tuple(graph.tensors[int(index)].shape)
            values[int(index)] = value
    return values[int(graph.outputs[0])]


def _convolved(a: list[Any], groups: int, weight: Any) -> Any:
    x = functional.conv2d(a[0].permute(0, 3, 1, 2), weight, a[2], padding="same", groups=groups)
    return x.permute(0, 2, 3, 1)


_KERNELS: dict[str, Any] = {
    "CONV_2D": lambda a, o: _convolved(a, 1, a[1].permute(0, 3, 1, 2)),
    "DEPTHWISE_CONV_2D": lambda a, o: _convolved(a, a[0].shape[3], a[1].permute(3, 0, 1, 2)),
    "FULLY_CONNECTED": lambda a, o: functional.linear(a[0], a[1], a[2]),
    "ADD": lambda a, o: a[0] + a[1],
    "MUL": lambda a, o: a[0] * a[1],
    "RELU": lambda a, o: a[0].relu(),
    "MEAN": lambda a, o: a[0].mean(dim=a[1].tolist()),
    "CONCATENATION": lambda a, o: torch.cat(a, dim=o.axis),
    "RESHAPE": lambda a, o: a[0].reshape(a[1].tolist()),
    "TRANSPOSE": lambda a, o: a[0].permute(a[1].tolist()),
    "SPLIT_V": lambda a, o: a[0].split(a[1].tolist(), dim=int(a[2])),
    "SLICE": lambda a, o: a[0][tuple(slice(b, b + n) for b, n in zip(a[1].tolist(), a[2].tolist(), strict=True))],
    "GATHER": lambda a, o: a[0].index_select(o.axis, a[1]),
}


class Block(nn.Module):
    """Residual, depthwise and concatenated channels, and a channel shuffle before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 12, 1)
        self.deep = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.back = nn.Conv2d(12, 8, 1)
        self.side = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(14, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = x + self.back(torch.relu(self.deep(self.wide(x))))
        y = torch.cat([y, self.side(x)], 1) * 0.5
        return self.head(y.mean((2, 3)))


def block() -> tuple[Block, Flat, Any]:
    """`Block` with batch norm folded, as the converter writes it: biases of equal content are one tensor."""
    torch.manual_seed(0)
    m = Block().eval()
    with torch.no_grad():
        m.norm.weight.copy_(torch.linspace(-1, 1.5, 8))  # one factor is negative, none is 0
        m.norm.running_mean.uniform_(-1, 1)
        m.norm.running_var.uniform_(0.5, 2)
        m.wide.bias.zero_()
        m.deep.bias.zero_()
        factor = m.norm.weight / (m.norm.running_var + m.norm.eps).sqrt()
        folded = m.stem.weight * factor[:, None, None, None]
        offset = m.norm.bias - m.norm.running_mean * factor
    f = Flat(1, 6, 6, 3)
    one, zero = f.constant(offset.detach().numpy()), f.constant(np.zeros(12, np.float32))

    def weight(w: torch.Tensor, *order: int) -> int:
        return f.constant(np.ascontiguousarray(w.detach().permute(*order).numpy()))

    x = f.add("CONV_2D", [f.x, weight(folded, 0, 2, 3, 1), one], (1, 6, 6, 8))
    x = f.add("RELU", [x], (1, 6, 6, 8))
    y = f.add("CONV_2D", [x, weight(m.wide.weight, 0, 2, 3, 1), zero], (1, 6, 6, 12))
    y = f.add("DEPTHWISE_CONV_2D", [y, weight(m.deep.weight, 1, 2, 3, 0), zero], (1, 6, 6, 12))
    y = f.add("RELU", [y], (1, 6, 6, 12))
    bias = f.constant(m.back.bias.detach().numpy())
    y = f.add("CONV_2D", [y, weight(m.back.weight, 0, 2, 3, 1), bias], (1, 6, 6, 8))
    y = f.add("ADD", [x, y], (1, 6, 6, 8))
    bias = f.constant(m.side.bias.detach().numpy())
    z = f.add("CONV_2D", [x, weight(m.side.weight, 0, 2, 3, 1), bias], (1, 6, 6, 6))
    y = f.add("CONCATENATION", [y, z], (1, 6, 6, 14), axis=3)
    y = f.add("MUL", [y, f.constant(np.full(14, 0.5, np.float32))], (1, 6, 6, 14))
    y = f.add("MEAN", [y, f.constant([1, 2])], (1, 14))
    bias = f.constant(m.head.bias.detach().numpy())
    y = f.add("FULLY_CONNECTED", [y, weight(m.head.weight, 0, 1), bias], (1, 5))
    state = {k: v.detach().numpy() for k, v in m.state_dict().items()}
    return m, f, TfliteTemplate(f.model(y), CODES, state)


@pytest.fixture(scope="module")
def narrowable() -> tuple[Block, TfliteTemplate, Any]:
    model, _, template = block()
    return model, template, find_groups(model, torch.randn(1, 3, 6, 6))


def test_weights_are_recognised_through_folded_norms(narrowable: Any) -> None:
    _, template, _ = narrowable
    names = [name for name, _ in template.sources.values()]
    assert names == [f"{n}.weight" for n in ("stem", "wide", "deep", "back", "side", "head")]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_narrowed_file_equals_shrunk_network(narrowable: Any, seed: int) -> None:
    model, template, groups = narrowable
    rng = np.random.default_rng(seed)
    kept = [np.sort(rng.permutation(int(c))[: rng.integers(1, c + 1)]) for c in groups.sizes]
    slices = {n: {a: i.tolist() for a, i in cuts.items()} for n, cuts in groups.slices(kept).items()}
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    expected = shrink(model, groups, kept)(x).detach()
    torch.testing.assert_close(run(template.make(slices, []), x.permute(0, 2, 3, 1)), expected, rtol=1e-4, atol=1e-5)
    dense = run(template.model, x.permute(0, 2, 3, 1))  # the template itself stays as it is
    torch.testing.assert_close(dense, model(x).detach(), rtol=1e-4, atol=1e-5)


def test_narrowed_file_has_no_dense_weights(narrowable: Any) -> None:
    _, template, groups = narrowable
    kept = [np.arange(max(1, int(c) // 4)) for c in groups.sizes]
    made = template.make({n: dict(cuts) for n, cuts in groups.slices(kept).items()}, [])
    size = [sum(len(b.data) for b in m.buffers if b.data is not None) for m in (made, template.model)]
    assert size[0] < 0.4 * size[1]
    names = [t.name for t in made.subgraphs[0].tensors]
    assert len(set(names)) == len(names)


HALF = np.asarray([True, False, True, True, False, False])


def moved(kind: str, inputs: list[Any], *shapes: tuple[int, ...], pads: Any = (), **options: Any) -> list[Any]:
    """One operator on a tensor (1, 2, 2, 6) of which `HALF` survives: a convolution in front makes it so."""
    f = Flat(1, 2, 2, 3)
    weight = np.random.default_rng(0).normal(size=(6, 3, 1, 1)).astype(np.float32)
    w = f.constant(weight.transpose(0, 2, 3, 1))
    x = f.add("CONV_2D", [f.x, w, f.constant(np.zeros(6, np.float32))], (1, 2, 2, 6))
    outputs = f.add(kind, [x if i is None else f.constant(i) for i in inputs], *shapes, **options)
    template = TfliteTemplate(f.model(f.x), CODES, {"w": weight})
    graph = template.make({"w": {0: np.flatnonzero(HALF).tolist()}}, pads).subgraphs[0]
    values = graph.operators[-1]
    found = [tuple(int(n) for n in graph.tensors[i].shape) for i in np.atleast_1d(outputs)]
    return [*found, values]


def test_rules_follow_moved_channels() -> None:
    assert moved("RESHAPE", [None, [1, 24]], (1, 24))[0] == (1, 12)
    assert moved("RESHAPE", [None, [1, 4, 6]], (1, 4, 6), newShape=[1, 4, 6])[1].builtinOptions.newShape == [1, 4, 3]
    assert moved("TRANSPOSE", [None, [0, 3, 1, 2]], (1, 6, 2, 2))[0] == (1, 3, 2, 2)
    assert moved("SPLIT_V", [None, [2, 4], 3], (1, 2, 2, 2), (1, 2, 2, 4))[:2] == [(1, 2, 2, 1), (1, 2, 2, 2)]
    assert moved("SLICE", [None, [0, 0, 0, 2], [1, 2, 2, 4]], (1, 2, 2, 4))[0] == (1, 2, 2, 2)
    assert moved("GATHER", [None, [5, 3, 2]], (1, 2, 2, 3), axis=3, batchDims=0)[0] == (1, 2, 2, 2)
    assert moved("MEAN", [None, [1, 2]], (1, 6))[0] == (1, 3)
    masks = {"beginMask": 7, "endMask": 15, "ellipsisMask": 0, "newAxisMask": 0, "shrinkAxisMask": 0}
    sliced = moved("STRIDED_SLICE", [None, [0] * 4, [0] * 4, [1, 1, 1, 2]], (1, 2, 2, 3), **masks)
    assert sliced[0] == (1, 2, 2, 2)  # of 0, 2, 4 the first two stay
    assert sliced[1].builtinOptions.endMask == 7


def test_padded_channels_follow_the_groups() -> None:
    amounts = [[0, 0], [0, 0], [0, 0], [1, 2]]
    assert moved("PAD", [None, amounts], (1, 2, 2, 9), pads=[(1, [True, False, True])])[0] == (1, 2, 2, 5)
    with pytest.raises(CannotNarrowError, match="not in the channel groups"):
        moved("PAD", [None, amounts], (1, 2, 2, 9))
    with pytest.raises(CannotNarrowError, match="1 paddings of channels were not found"):
        moved("RELU", [None], (1, 2, 2, 6), pads=[(1, [True])])
    assert moved("PAD", [None, [[0, 0], [1, 1], [1, 1], [0, 0]]], (1, 4, 4, 6))[0] == (1, 4, 4, 3)


@pytest.mark.parametrize(
    ("kind", "inputs", "shape", "options", "why"),
    [
        ("PACK", [None], (1, 1, 2, 2, 6), {}, "PACK 't4': this operator is not supported"),
        ("SOFTMAX", [None], (1, 2, 2, 6), {}, "mixes the channels"),
        ("MEAN", [None, [3]], (1, 2, 2), {}, "mixes the channels"),
        ("RESHAPE", [None, [1, 2, 2, 2, 3]], (1, 2, 2, 2, 3), {}, "do not fit"),
        ("SLICE", [None, [0, 0, 0, 1], [1, 2, 2, 1]], (1, 2, 2, 1), {}, "not evenly spaced"),
    ],
)
def test_unsupported_operators_are_errors_with_the_reason(
    kind: str, inputs: Any, shape: Any, options: Any, why: str
) -> None:
    with pytest.raises(CannotNarrowError, match=why):
        moved(kind, inputs, shape, **options)


def test_outputs_are_never_narrowed() -> None:
    f = Flat(1, 2, 2, 3)
    weight = np.random.default_rng(0).normal(size=(6, 3, 1, 1)).astype(np.float32)
    bias = f.constant(np.zeros(6, np.float32))
    y = f.add("CONV_2D", [f.x, f.constant(weight.transpose(0, 2, 3, 1)), bias], (1, 2, 2, 6))
    template = TfliteTemplate(f.model(y), CODES, {"w": weight})
    with pytest.raises(CannotNarrowError, match="would lose channels"):
        template.make({"w": {0: [0, 1]}}, [])


def test_weight_of_another_network_is_not_recognised() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(4, 3, 3, 3)).astype(np.float32) for _ in range(2))
    assert _source(b.transpose(0, 2, 3, 1), "CONV_2D", {"a": a}) is None
    assert _source(a.transpose(0, 2, 3, 1) * -2, "CONV_2D", {"b": b, "a": a}) == ("a", {0: 0, 1: 2, 2: 3, 3: 1})


def test_reshape_to_no_box_is_none() -> None:
    assert reshaped({0: HALF}, (6, 2), (12,)) is not None
    assert reshaped({0: HALF}, (6,), (2, 3)) is None
