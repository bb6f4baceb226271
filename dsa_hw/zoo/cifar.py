"""Small networks for 32 x 32 images, as pruned in papers on CIFAR-10, and smaller ones for demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SMALL", "ResNet", "WideResNet", "mobilenet_v2", "vgg16"]


class _OptionA(nn.Module):
    """Every second pixel, with channels of zeros on both sides; a module, so that ``shrink`` can replace it."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C + 2 extra, H / 2, W / 2)."""
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))


class _Basic(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: "A" slices and pads, "B" is a 1 x 1 convolution."""

    def __init__(self, before: int, after: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            projection = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            self.shortcut = _OptionA((after - before) // 2) if shortcut == "A" else projection

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H / stride, W / stride)."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR ResNet of He et al. with depth 6 n + 2; parameter names as in akamaster/pytorch_resnet_cifar10."""

    def __init__(self, blocks: int = 3, width: int = 16, shortcut: str = "B", classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages = []
        for stage, after in enumerate((width, 2 * width, 4 * width)):
            before = width if stage == 0 else after // 2
            first = _Basic(before, after, 1 if stage == 0 else 2, shortcut)
            stages.append(nn.Sequential(first, *[_Basic(after, after, 1, shortcut) for _ in range(blocks - 1)]))
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(4 * width, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> (B, classes)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


class _Preactivated(nn.Module):
    """Block with batch norm and ReLU before each of two 3 x 3 convolutions."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H / stride, W / stride)."""
        y = functional.relu(self.bn1(x))
        if self.shortcut is not None:
            x = self.shortcut(y)
        return self.conv2(functional.relu(self.bn2(self.conv1(y)))) + x


class WideResNet(nn.Module):
    """WRN-depth-factor of Zagoruyko and Komodakis, with pre-activation."""

    def __init__(self, depth: int = 40, factor: int = 2, classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        widths = (16, 16 * factor, 32 * factor, 64 * factor)
        stages = []
        for before, after, stride in zip(widths, widths[1:], (1, 2, 2), strict=False):
            first = _Preactivated(before, after, stride)
            stages.append(nn.Sequential(first, *[_Preactivated(after, after, 1) for _ in range(blocks - 1)]))
        self.block1, self.block2, self.block3 = stages
        self.bn = nn.BatchNorm2d(widths[-1])
        self.linear = nn.Linear(widths[-1], classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> (B, classes)."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.linear(functional.relu(self.bn(x)).mean((2, 3)))


def vgg16(width: float = 1.0, classes: int = 10) -> nn.Module:
    """Build VGG-16 with batch norm for 32 x 32 images: thirteen convolutions, one linear layer."""
    layers: list[nn.Module] = []
    before = 3
    for size in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512):
        if size == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        after = max(1, round(size * width))
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    _initialise(network)
    return network


def mobilenet_v2(width: float = 1.0, classes: int = 10, stem: int = 1) -> nn.Module:
    """Build torchvision's MobileNetV2 for 32 x 32 images, without the first two of its five reductions.

    Args:
        width: Factor for the number of channels.
        classes: Number of outputs.
        stem: Stride of the first convolution; 2 restores the first reduction, for a quarter of the work.

    Returns:
        The network, with random weights.
    """
    from dsa_hw.zoo.torchvision_compat import torchvision

    settings = [
        [1, 16, 1, 1],
        [6, 24, 2, 1],
        [6, 32, 3, 2],
        [6, 64, 4, 2],
        [6, 96, 3, 1],
        [6, 160, 3, 2],
        [6, 320, 1, 1],
    ]
    network = torchvision.models.MobileNetV2(num_classes=classes, width_mult=width, inverted_residual_setting=settings)
    network.features[0][0].stride = (stem, stem)
    return network


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet8": partial(ResNet, blocks=1),
    "resnet20": ResNet,
    "resnet56": partial(ResNet, blocks=9),
    "resnet20_a": partial(ResNet, shortcut="A"),
    "vgg16_cifar": vgg16,
    "vgg16_quarter": partial(vgg16, width=0.25),
    "mobilenet_v2_cifar": mobilenet_v2,
    "mobilenet_v2_small": partial(mobilenet_v2, width=0.5, stem=2),
    "wrn40_2": WideResNet,
}
"""Name -> constructor. Example inputs have shape (1, 3, 32, 32)."""
