"""The properties that hold for every network with channel groups, and small networks to check them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import budgets
from dsa_hw import ChannelGroups, masked, shrink
from dsa_hw.channels.discovery import difference, randomise
from dsa_hw.utils.inputs import as_inputs

IMAGE = torch.randn(2, 3, 8, 8)


class Net(nn.Module):
    """A module from a forward function and its parts: ``Net(lambda n, x: n.b(n.a(x)), a=..., b=...)``."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def run(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_inputs(inputs)
    with torch.no_grad():
        return model(*args, **kwargs)


def counted_flops(model: nn.Module, inputs: Any) -> int:
    """Count with torch, attention and LSTM as their products: the counter has no entry for fused kernels of CPUs."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
            FlopCounterMode(display=False) as counter,
        ):
            run(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    return counter.get_total_flops()


class LiveBytes(fx.Interpreter):
    """Run an exported graph, free each value after its last use, and record the peak of live storage."""

    def __init__(self, module: fx.GraphModule, own: set[int]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.own = own
        self.peak = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            live = [t for t in pytree.tree_leaves([list(self.env.values()), result]) if isinstance(t, Tensor)]
            sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live}
            self.peak = max(self.peak, sum(size for pointer, size in sizes.items() if pointer not in self.own))
        return result


def counted_peak(model: nn.Module, inputs: Any) -> int:
    args, kwargs = as_inputs(inputs)
    module = torch.export.export(model, args, kwargs, strict=False).module(check_guards=False)
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    interpreter = LiveBytes(module, own)
    with torch.no_grad():
        interpreter.run(*args, *kwargs.values())
    return interpreter.peak


def random_kept(groups: ChannelGroups, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.sort(rng.permutation(size)[: rng.integers(1, size + 1)]) for size in groups.sizes]


def prove(model: nn.Module, groups: ChannelGroups, inputs: Any, seed: int = 0, memory: bool = True) -> nn.Module:
    """Check at random widths that shrunk equals masked and predicted equals counted; return the shrunk network."""
    model = randomise(model.eval(), seed)
    kept = random_kept(groups, seed)
    small = shrink(model, groups, kept)
    with masked(model, groups, kept):
        expected = run(model, inputs)
    assert max(float(t.abs().max()) for t in pytree.tree_leaves(expected)) > 1e-3, (
        "outputs must not agree by being zero"
    )
    assert difference(expected, run(small, inputs)) <= 1e-4
    widths = pd.DataFrame([[len(k) for k in kept]], columns=list(groups.names))
    assert budgets.flops(groups).predict(widths)[0] == counted_flops(small, inputs)
    assert budgets.params(groups).predict(widths)[0] == sum(p.numel() for p in small.parameters())
    if memory:
        assert budgets.activation_memory(groups).predict(widths)[0] == counted_peak(small, inputs)
    return small


def conv(i: int, o: int, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=k // 2, **options)


def head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))


class OptionA(nn.Module):
    """The parameter-free shortcut of the CIFAR ResNets: every second pixel, zeros for the new channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.function = lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, after), "constant", 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Attention(nn.Module):
    """Self-attention with numbers of heads as attributes, as in most vision transformers."""

    def __init__(self, dim: int, heads: int, head_dim: int, fused: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim, self.fused = heads, head_dim, heads * head_dim, fused
        self.qkv = nn.Linear(dim, 3 * self.attn_dim)
        self.proj = nn.Linear(self.attn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-2, -1) * self.head_dim**-0.5, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, n, self.attn_dim))


def sizes(groups: ChannelGroups) -> Sequence[int]:
    return sorted(groups.sizes.tolist())


class Small(nn.Module):
    """A small network that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(conv(8, 8, groups=8), conv(8, 12, 1), nn.BatchNorm2d(12), nn.Dropout(0.5))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.stem(x)).mean((2, 3))
        return self.head(self.norm(x))
