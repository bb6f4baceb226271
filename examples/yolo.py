"""YOLOv8n of ultralytics, pruned to a share of its FLOPs or latency with its own loss, saved and loaded again.

    pip install ultralytics   # AGPL-3.0; not a dependency of dsa_hw
    python examples/yolo.py flops=60%

The weights are random and the pictures are made up. For your own detector give YOLO("best.pt").model and the batches of
your training: a dict with img, cls, bboxes and batch_idx.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dsa_hw
import dsa_hw.zoo.torchvision_compat  # torchvision then works beside a torch without CUDA, too
import torch
from dsa_hw.utils.weights import read_weights
from torch import Tensor
from ultralytics.nn.tasks import DetectionModel

SIDE = 128


def detector() -> Any:
    """Return YOLOv8n for three classes, with the gains of its loss."""
    torch.manual_seed(0)
    model: Any = DetectionModel("yolov8n.yaml", nc=3, verbose=False)
    model.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
    return model


def scenes(batches: int, size: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Return batches with one bright square in each picture."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(batches):
        side = torch.randint(24, 64, (size,), generator=rng)
        corner = (torch.rand(size, 2, generator=rng) * (SIDE - side[:, None])).long()
        pictures = 0.1 * torch.rand(size, 3, SIDE, SIDE, generator=rng)
        for picture, (x, y), s in zip(pictures, corner.tolist(), side.tolist(), strict=True):
            picture[s % 3, y : y + s, x : x + s] = 1.0
        boxes = torch.cat([(corner + side[:, None] / 2) / SIDE, side[:, None].expand(-1, 2) / SIDE], 1)
        classes = (side % 3).float()[:, None]
        found.append({"img": pictures, "cls": classes, "bboxes": boxes, "batch_idx": torch.arange(size).float()})
    return found


def step(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the loss that the detector computes: boxes, classes and distributions."""
    return model.loss(batch)[0].sum()


def main(budget: str = "flops=60%", out: str = "small-yolo", *, batches: int = 8, **options: Any) -> dsa_hw.Allocation:
    """Prune with the detector's loss, save, and load into a new detector."""
    model, example = detector(), torch.zeros(1, 3, SIDE, SIDE)
    result = dsa_hw.allocate(model, budget, example_inputs=example, val=scenes(batches), step=step, **options)
    dsa_hw.finetune(result.model, scenes(batches, seed=1), 1, lr=0.001, step=step)
    result = result.assess(model, scenes(batches, seed=2), step=step, source="test data")
    result.save(out)
    print(result)
    again = dsa_hw.apply_plan(detector(), dsa_hw.Plan.load(Path(out, "plan.json")), example)
    again.load_state_dict(read_weights(Path(out, "model.safetensors")))
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
