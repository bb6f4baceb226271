"""Recovery: what least squares promises, for every kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dsa_hw.channels import find_groups, shrink
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import TrainingError
from dsa_hw.training import recovery
from dsa_hw.training.recovery import recover
from dsa_hw.zoo.cifar import ResNet


class Residual(nn.Module):
    """A stem, a residual block and a classifier."""

    def __init__(self, width: int = 16, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=not norm)
        self.first = nn.Conv2d(width, 24, 3, padding=1, bias=not norm)
        self.second = nn.Conv2d(24, width, 3, padding=1, bias=not norm)
        kinds = [nn.BatchNorm2d(c) if norm else nn.Identity() for c in (width, 24, width)]
        self.norms = nn.ModuleList(kinds)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 5)."""
        x = functional.relu(self.norms[0](self.stem(x)))
        y = functional.relu(self.norms[1](self.first(x)))
        x = functional.relu(x + self.norms[2](self.second(y)))
        return self.head(x.mean(dim=(2, 3)))


class Decoder(nn.Module):
    """Grouped, depthwise, strided and dilated convolutions, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding="same"), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=4), nn.ReLU(),
            nn.ConvTranspose2d(24, 8, 3, stride=2, padding=1, output_padding=1), nn.ReLU(),
            nn.Conv2d(8, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 2, H, W)."""
        return self.inner(x)


class Tokens(nn.Module):
    """Attention and an MLP with layer norms."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.norm, self.query, self.key, self.value = nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 6) -> (N, 3)."""
        x = self.embed(x)
        y = self.norm(x)
        y = functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))
        x = x + self.project(y)
        x = x + self.mlp(x)
        return self.head(x.mean(1))


class Queries(nn.Module):
    """Attention of learnt queries to tokens, packed as `nn.MultiheadAttention` does, after a recurrent layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, width))
        self.recurrent, self.embed = nn.GRU(6, 16, batch_first=True), nn.Linear(16, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 6) -> (N, 4, 3)."""
        x = self.embed(self.recurrent(x)[0])
        y, _ = self.attention(self.queries.expand(len(x), -1, -1), x, x, need_weights=False)
        return self.head(y + self.mlp(y))


def ready(model: nn.Module, inputs: Tensor) -> nn.Module:
    """Give the batch norms statistics of their own, and return the network in evaluation mode."""
    model.train()
    with torch.no_grad():
        for _ in range(30):
            model(inputs)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    return model.eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (3, 12, 12)),
    "residual without norms": (lambda: Residual(norm=False), (3, 12, 12)),
    "decoder": (Decoder, (3, 12, 12)),
    "tokens": (Tokens, (10, 6)),
    "queries": (Queries, (10, 6)),
    "option A": (lambda: ResNet(blocks=1, width=8, shortcut="A"), (3, 16, 16)),
    "option B": (lambda: ResNet(blocks=1, width=8, shortcut="B"), (3, 16, 16)),
}


@pytest.fixture(params=NETWORKS, ids=list(NETWORKS))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[request.param]
    inputs = torch.randn(80, *shape)
    return ready(make(), inputs), inputs


def cut(model: nn.Module, inputs: Tensor, share: float) -> tuple[nn.Module, Plan]:
    groups = find_groups(model, inputs[:1])
    rng = np.random.default_rng(0)
    kept = [np.sort(rng.choice(int(c), max(round(share * int(c)), 1), replace=False)) for c in groups.sizes]
    return shrink(model, groups, kept), Plan.of(groups, kept)


def error(small: nn.Module, dense: nn.Module, inputs: Tensor) -> float:
    with torch.no_grad():
        return float((small(inputs) - dense(inputs)).square().mean() / dense(inputs).var())


def test_network_without_cuts_stays_as_it_is(case: tuple[nn.Module, Tensor]) -> None:
    model, inputs = case
    small, plan = cut(model, inputs, 1.0)
    assert recover(small, model, [inputs], plan) == []
    for (name, one), two in zip(small.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_outputs_are_closer_to_those_of_the_dense_network(case: tuple[nn.Module, Tensor]) -> None:
    model, inputs = case
    small, plan = cut(model, inputs, 0.6)
    before, dense = copy.deepcopy(small), copy.deepcopy(model.state_dict())
    rows = recover(small, model, [inputs[:60]], plan)
    assert rows
    assert all(row.after <= row.before for row in rows)
    new = inputs[60:]
    assert error(small, model, new) < 0.7 * error(before, model, new)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), dense.values(), strict=True))


def test_layer_is_never_worse_than_as_cut_with_the_mean_compensated() -> None:
    """Against a direct computation on the images that were used, layer by layer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 6, 3)).eval()
    inputs = torch.randn(30, 3, 10, 10)
    small, plan = cut(model, inputs, 0.5)
    with torch.no_grad():
        wanted, as_cut = model(inputs), small(inputs)
        compensated = as_cut + (wanted - as_cut).mean(dim=(0, 2, 3), keepdim=True)
        recover(small, model, [inputs], plan)
        assert (small(inputs) - wanted).square().mean() < (compensated - wanted).square().mean()
        assert torch.allclose(small(inputs).mean(dim=(0, 2, 3)), wanted.mean(dim=(0, 2, 3)), atol=1e-3)


@pytest.mark.parametrize("norm", [False, True])
def test_affine_copy_of_kept_channels_is_removed_without_loss(norm: bool) -> None:
    torch.manual_seed(2)
    first = nn.Conv2d(3, 8, 3)
    model = nn.Sequential(first, nn.Conv2d(8, 5, 3, bias=not norm))
    if norm:
        model.append(nn.BatchNorm2d(5))
    assert first.bias is not None
    with torch.no_grad():
        first.weight[6] = 0.5 * first.weight[0] - 2 * first.weight[3]
        first.bias[6] = 0.7
        first.weight[7], first.bias[7] = first.weight[1], -0.3
    inputs = torch.randn(60, 3, 12, 12)
    ready(model, inputs)
    groups = find_groups(model, inputs[:1])
    kept = [np.arange(6)]
    small = shrink(model, groups, kept)
    assert error(small, model, inputs) > 0.01
    recover(small, model, [inputs], Plan.of(groups, kept))
    assert error(small, model, inputs) < 1e-5


def test_shortcut_is_corrected_by_the_layer_before_the_sum() -> None:
    """The target before a sum contains what the pruned shortcut lacks: here the branch could be left as it is."""
    torch.manual_seed(3)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 6, 1)
            self.c = nn.Conv2d(3, 6, 1)

        def forward(self, x: Tensor) -> Any:
            return self.b(functional.relu(self.a(x))) + self.c(x)

    model, inputs = Sum().eval(), torch.randn(64, 3, 6, 6)
    small, plan = cut(model, inputs, 0.4)
    rows = recover(small, model, [inputs], plan)
    assert [row.layer for row in rows] == ["b", "c"], "the second operand is refitted because its target has changed"
    alone = copy.deepcopy(small)
    alone.get_submodule("c").load_state_dict(model.c.state_dict())
    assert error(small, model, inputs) < error(alone, model, inputs)


def test_images_join_as_activations_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers see few images where memory is short, the last ones all of them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for c_in, c_out in ((3, 16), (16, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(c_in, c_out, 3, padding=1, stride=2), nn.ReLU()]
    model, inputs = nn.Sequential(*layers, nn.Conv2d(16, 4, 1)).eval(), torch.randn(96, 3, 32, 32)
    counts: list[int] = []
    load = recovery._load

    def noted(whole: Any, part: Any, batches: Any) -> None:
        load(whole, part, batches)
        counts.append(len(whole))
        total = len(whole) * (whole.peak() + part.peak())
        assert total <= recovery._MEMORY or len(whole) == 2

    monkeypatch.setattr(recovery, "_load", noted)
    results = []
    for memory in (2**30, 2**21):
        monkeypatch.setattr(recovery, "_MEMORY", memory)
        small, plan = cut(model, inputs, 0.6)
        counts.clear()
        recover(small, model, [inputs[:80]], plan)
        results.append((counts[0], counts[-1], error(small, model, inputs[80:])))
    (first, last, plain), (few, all_, short) = results
    assert (first, last) == (5, 5)
    assert 2 <= few < 5 == all_
    small, _ = cut(model, inputs, 0.6)
    assert max(plain, short) < 0.7 * error(small, model, inputs[80:])


def test_labels_are_not_needed_and_not_used() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(40, 3, 12, 12)
    model = ready(Residual(), inputs)
    results = []
    for images in ([inputs], [(inputs, torch.zeros(40))], list(inputs.split(8)), [(inputs, "anything")]):
        small, plan = cut(model, inputs, 0.5)
        recover(small, model, images, plan)
        results.append(small.state_dict())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0].values(), other.values(), strict=True))


@pytest.mark.parametrize(
    ("images", "words"),
    [([], "loader is empty"), ([torch.full((4, 3, 12, 12), torch.nan)], "NaN"), (["text"], "must yield tensors")],
)
def test_unusable_images_are_refused(images: Any, words: str) -> None:
    model = Residual().eval()
    small, plan = cut(model, torch.randn(2, 3, 12, 12), 0.5)
    with pytest.raises(TrainingError, match=words):
        recover(small, model, images, plan)


def test_plan_of_another_network_is_refused() -> None:
    model = Residual().eval()
    small, plan = cut(model, torch.randn(2, 3, 12, 12), 0.5)
    with pytest.raises(TrainingError, match="another network"):
        recover(small, Residual(width=8).eval(), [torch.randn(8, 3, 12, 12)], plan)


@given(
    outputs=st.integers(1, 6), kernel=st.sampled_from([1, 2, 3]), stride=st.integers(1, 2), bias=st.booleans(),
    kept=st.sets(st.integers(0, 7), min_size=1, max_size=7), copies=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_refitted_layer_is_never_worse_than_the_mean_and_exact_for_affine_copies(
    outputs: int, kernel: int, stride: int, bias: bool, kept: set[int], copies: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    first, second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, outputs, kernel, stride, bias=bias)
    units = sorted(kept)
    if copies and bias:  # a constant needs somewhere to go
        with torch.no_grad():
            for unit in set(range(8)) - kept:
                first.weight[unit] = 2 * first.weight[units[0]] - first.weight[units[-1]]
    model = nn.Sequential(first, second).eval()
    inputs = torch.randn(40, 3, 6, 6)
    groups = find_groups(model, inputs[:1])
    small = shrink(model, groups, [units])
    with torch.no_grad():
        wanted, as_cut = model(inputs), small(inputs)
        if bias:
            as_cut += (wanted - as_cut).mean(dim=(0, 2, 3), keepdim=True)
        (row,) = recover(small, model, [inputs], Plan.of(groups, [units]))
        found = small(inputs)
    assert row.after <= row.before
    assert (found - wanted).square().mean() <= 1.02 * (as_cut - wanted).square().mean() + 1e-9
    if copies and bias:
        assert (found - wanted).square().mean() < 1e-4 * wanted.var().clamp(min=1e-3)
