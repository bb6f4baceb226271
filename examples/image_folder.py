"""A pretrained timm network on a folder of images, pruned to milliseconds.

    python examples/image_folder.py --weights resnet.safetensors --classes 5 flowers/ 5ms

The folder has a folder for each class, or train/ and val/ with such folders. Without --weights the pretrained weights
of timm are loaded, from its cache or the network; then the folder must have the classes of ImageNet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dsa_hw
from dsa_hw.utils.modules import load_weights
from dsa_hw.utils.weights import read_weights
from dsa_hw.zoo.data import load_data
from dsa_hw.zoo.models import load_model, parse_shape, preprocessing_of


def main(words: list[str] | None = None) -> dsa_hw.Allocation:
    """Prune, fine-tune and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("budget", help="for example 5ms or 50%%")
    parser.add_argument("--model", default="timm/resnet18.a1_in1k")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--classes", type=int)
    parser.add_argument("--input", type=parse_shape, help="for example 1x3x160x160")
    parser.add_argument("--finetune", type=float, default=1.0, metavar="EPOCHS")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=40, help="networks to measure")
    parser.add_argument("--out", type=Path, default=Path("small"))
    args = parser.parse_args(words)

    model, inputs = load_model(args.model, args.input, pretrained=args.weights is None, classes=args.classes)
    if args.weights:
        load_weights(model, read_weights(args.weights), args.model)
    data = load_data(
        f"imagefolder:{args.folder}",
        batch=args.batch_size,
        workers=args.workers,
        preprocessing=preprocessing_of(args.model, args.input),
    )
    result = dsa_hw.allocate(
        model,
        f"latency={args.budget}",
        example_inputs=inputs,
        train=data.train,
        val=data.val,
        profiling=dsa_hw.ProfileOptions(samples=args.samples, holdout=max(args.samples // 4, 3)),
        out=args.out,
    )
    if args.finetune:
        dsa_hw.finetune(result.model, data.train, args.finetune, lr=0.01, teacher=model)
    result = result.assess(model, data.test, source="test data")
    result.save(args.out, onnx=True)
    print(result)
    print(f"{data.skipped} images could not be read")
    return result


if __name__ == "__main__":
    main()
