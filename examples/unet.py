"""A U-Net for segmentation, pruned to a share of its latency with a loss and a metric of its own.

    pip install segmentation-models-pytorch
    python examples/unet.py 60%

The pictures are made up: discs on noise. Replace `scenes` by your own loader of (images, masks).
"""

from __future__ import annotations

import sys
from typing import Any

import dsa_hw
import dsa_hw.zoo.torchvision_compat  # torchvision then works beside a torch without CUDA, too
import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn

SIDE = 64


def scenes(batches: int, size: int = 8, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return batches of images (B, 3, H, W) and masks (B, 1, H, W): a bright disc on noise."""
    rng = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    found = []
    for _ in range(batches):
        centre = torch.randint(16, SIDE - 16, (size, 2, 1, 1), generator=rng)
        radius = torch.randint(6, 14, (size, 1, 1), generator=rng)
        masks = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < radius**2).float()[:, None]
        found.append((0.7 * torch.randn(size, 3, SIDE, SIDE, generator=rng) + masks, masks))
    return found


def overlap(outputs: Tensor, masks: Tensor) -> Tensor:
    """Return the intersection over the union for each picture."""
    found, wanted = outputs > 0, masks > 0.5
    both, either = ((found & wanted).sum((1, 2, 3)), (found | wanted).sum((1, 2, 3)))
    return both / either.clamp(min=1)


def main(budget: str = "60%", *, batches: int = 40, encoder: str = "resnet18", **options: Any) -> dsa_hw.Allocation:
    """Train, prune, fine-tune, and compare the overlap of the two networks."""
    torch.manual_seed(0)
    model = smp.Unet(encoder, encoder_weights=None, classes=1, decoder_channels=(64, 32, 32, 16, 16))
    train, val, test = scenes(batches), scenes(max(batches // 4, 2), seed=1), scenes(max(batches // 4, 2), seed=2)
    loss = nn.functional.binary_cross_entropy_with_logits
    dsa_hw.finetune(model, train, 2, lr=0.02, loss=loss)
    result = dsa_hw.allocate(
        model,
        f"latency={budget}" if "=" not in budget else budget,
        example_inputs=torch.zeros(1, 3, SIDE, SIDE),
        train=train,
        val=val,
        loss=loss,
        metric=overlap,
        **options,
    )
    dsa_hw.finetune(result.model, train, 1, lr=0.01, loss=loss, teacher=model)
    result = result.assess(model, test, metric=overlap, source="test data")
    print(result)
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
