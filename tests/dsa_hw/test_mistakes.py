"""Mistakes of users, on the command line and in Python: one clear line each, and a typed error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dsa_hw
from dsa_hw import FlopsBudget, LatencyBudget, ProfileOptions, RefinementOptions
from dsa_hw.cli.main import main
from dsa_hw.errors import DsaError
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.training.finetune import finetune

MODULE = """
from torch import nn
def make(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1))
def needs(n): return make()
def raises(): raise OSError("no disk\\nsecond line")
def leaves(): raise SystemExit(5)
def number(): return 5
value = 3
"""
ALLOCATE = ["allocate", "--model", "tiny:make", "--input", "1x3x8x8", "--method", "uniform"]
FLOPS = [*ALLOCATE, "--budget", "flops=50%"]
INSPECT = ["inspect", "--model", "tiny:make", "--input"]
SWEEP = ["sweep", "--model", "tiny:make", "--budgets"]

COMMANDS = [
    (["inspect", "--model", ":"], "Cannot import model ':'. Use the form package.module:function"),
    (["inspect", "--model", ".tiny:make"], "Cannot import model '.tiny:make'. Use the form"),
    (["inspect", "--model", "tiny:"], "Cannot import model 'tiny:'. Use the form"),
    (["inspect", "--model", "tiny:nothing"], "Cannot import model 'tiny:nothing' (module 'tiny' has no attribute"),
    (["inspect", "--model", "tiny:needs"], "tiny:needs failed (TypeError: needs() missing 1 required positional"),
    (["inspect", "--model", "tiny:raises"], "tiny:raises failed (OSError: no disk). It must be a function that takes"),
    (["inspect", "--model", "tiny:leaves"], "tiny:leaves failed (SystemExit: 5)"),
    (["inspect", "--model", "tiny:number"], "must return a torch.nn.Module or (module, example_inputs); it returned"),
    (["inspect", "--model", "tiny:value"], "must be a function that returns a torch.nn.Module; it is int"),
    (["inspect", "--model", "broken:make"], "Cannot import model 'broken:make' (ZeroDivisionError: division by zero)"),
    (["inspect", "--model", ""], "Unknown model ''"),
    ([*INSPECT, "1x3x99999999x99999999"], "An input may have at most"),
    ([*INSPECT, f"1x3x{'9' * 5000}"], "An input may have at most"),
    ([*INSPECT, "1x3x\uff18x\uff18"], "An input shape has the form"),
    ([*INSPECT, "0x3x8x8"], "An input shape has the form"),
    (["profile", "--model", "tiny:make", "--batch", "9" * 12], "An input may have at most"),
    (["profile", "--model", "tiny:make", "--threads", "9" * 12], "`threads` must be a number from 1 to"),
    (["profile", "--model", "tiny:make", "--holdout", "-1"], "--holdout: must be a whole number from 0, got '-1'"),
    ([*SWEEP, "latency=1.2.3%..90%:3"], "A range has the form latency=30%..90%:7"),
    ([*SWEEP, f"flops=30%..90%:{'9' * 5000}"], "A range has the form"),
    ([*SWEEP, "flops=\uff130%..90%:3"], "A range has the form"),
    ([*SWEEP, "flops=90%..30%:3"], "A range goes up"),
    ([*FLOPS, "--epochs", "nan"], "--epochs: must be a number from 0, got 'nan'"),
    ([*FLOPS, "--epochs", "-1"], "--epochs: must be a number from 0, got '-1'"),
    ([*FLOPS, "--finetune", "inf"], "--finetune: must be a number from 0, got 'inf'"),
    ([*FLOPS, "--time-limit", "-1"], "--time-limit: must be a time such as 90"),
    ([*FLOPS, "--time-limit", "9" * 400], "--time-limit: must be a time such as 90"),
    ([*FLOPS, "--seed", "-3"], "--seed: must be a whole number from 0, got '-3'"),
    ([*FLOPS, "--seed", "9" * 30], "--seed: must be a whole number from 0"),
    ([*FLOPS, "--minimum", "200%"], "--minimum: must be a percentage"),
    ([*FLOPS, "--confidence", "7"], "--confidence: must be a number between 0 and 1"),
    ([*FLOPS, "--samples", "0"], "--samples: must be a whole number from 1"),
    ([*FLOPS, "--out", "tiny.py"], "Cannot make the folder tiny.py"),
    ([*FLOPS, "--method", "dsaa"], "Unknown method 'dsaa'. Did you mean 'dsa'?"),
    ([*ALLOCATE, "--budget", "flops=\uff150%"], "it does not start with a number"),
    ([*ALLOCATE, "--budget", "50%"], "A budget has the form COST=AMOUNT"),
    ([*ALLOCATE, "--budget", "flops=1e999%"], "the budget must be finite"),
    ([*ALLOCATE, "--budget", "latency=50%", "--profile", "text"], "text"),
    ([*ALLOCATE, "--budget", "latency=50%", "--target", "x/y"], "Unknown device 'y'"),
    ([*FLOPS, "--weights", "text"], "text"),
    ([*FLOPS, "--weights", "wrapped.pt"], "The weights do not fit"),
    ([*FLOPS, "--data", "cifar10:text"], "Cannot read CIFAR-10 from text: it is not an .npz file"),
    (["fit", "text"], "text is not a profile store"),
    (["verify", "text", "--model", "tiny:make"], "text"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "text").write_text("hello")
    torch.save({"state_dict": {"0.weight": torch.zeros(1)}, "epoch": 3}, tmp_path / "wrapped.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    for name in ("tiny", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    COMMANDS,
    ids=[" ".join([w[0], *w[-2:]])[:50].encode("ascii", "replace").decode() for w, _ in COMMANDS],
)
def test_command_with_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err.strip()
    assert code == 2, error
    assert message in error
    assert error.startswith(f"dsa-hw {words[0]}: ")
    assert len(error.splitlines()) == 1
    assert len(error) < 700
    assert "allow_pickle" not in error
    assert "weights_only" not in error


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten())


IMAGE, HALF = torch.zeros(1, 3, 8, 8), FlopsBudget("50%")
DATA = [(torch.randn(4, 3, 8, 8), torch.arange(4)) for _ in range(3)]
BYTES = [((10 * x).to(torch.uint8), y) for x, y in DATA]
NARROW = [(x[:, :2], y) for x, y in DATA]
SET = TensorDataset(*DATA[0])


def allocate(model: Any = None, budget: Any = HALF, **options: Any) -> Any:
    options = {"example_inputs": IMAGE, "method": "uniform", "progress": False, **options}
    return dsa_hw.allocate(net() if model is None else model, budget, **options)


def train(**options: Any) -> Any:
    return allocate(method="dsa", **{"train": DATA, "val": DATA, **options})


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "model None": (lambda: dsa_hw.allocate(None, HALF, example_inputs=IMAGE), "`model` must be a torch.nn.Module; got"),
    "model class": (lambda: allocate(nn.Conv2d), "got the class Conv2d. Call it to make a network"),
    "model name": (lambda: allocate("resnet18"), "`model` must be a torch.nn.Module; got a str"),
    "model function": (lambda: allocate(net), "got a function. Call it to make a network"),
    "state dict": (lambda: allocate(net().state_dict()), "`model` must be a torch.nn.Module; got a OrderedDict"),
    "groups of None": (lambda: dsa_hw.find_groups(None, IMAGE), "`model` must be"),  # type: ignore[arg-type]
    "groups of a class": (lambda: dsa_hw.find_groups(nn.Conv2d, IMAGE), "`model` must be"),  # type: ignore[arg-type]
    "compare a class": (lambda: dsa_hw.compare(nn.Conv2d, "digits", [HALF]), "`model` must be"),  # type: ignore[arg-type]
    "inputs 5": (lambda: allocate(example_inputs=5), "`example_inputs` must be a tensor, a tuple"),
    "inputs a shape": (lambda: allocate(example_inputs=(1, 3, 8, 8)), "must be a tensor or a tuple of tensors"),
    "batch 0": (lambda: allocate(example_inputs=IMAGE[:0]), "must not be empty; got a tensor of shape 0x3x8x8"),
    "NaN inputs": (lambda: allocate(example_inputs=IMAGE / 0), "must be finite"),
    "float64 inputs": (lambda: allocate(example_inputs=IMAGE.double()), "1x3x8x8 float64 on cpu"),
    "inputs on meta": (lambda: allocate(example_inputs=IMAGE.to("meta")), "1x3x8x8 float32 on meta"),
    "uint8 images": (lambda: train(train=BYTES), "does not run on a batch of the train loader (4x3x8x8 uint8)"),
    "uint8 val": (lambda: allocate(val=BYTES), "does not run on a batch of the val loader (4x3x8x8 uint8)"),
    "images of a wrong size": (lambda: train(val=NARROW), "of the val loader (4x2x8x8 float32)"),
    "a data set": (lambda: train(train=SET), "`train` must be a loader of batches, for example DataLoader(dataset"),
    "a number as loader": (lambda: train(train=5), "`train` must be a loader of (inputs, targets); got 5"),
    "a name as loader": (lambda: train(val="cifar10"), "`val` must be a loader of (inputs, targets); got 'cifar10'"),
    "an empty loader": (lambda: train(val=[]), "The val loader is empty"),
    "labels that are no classes": (lambda: train(val=[(x, y + 9) for x, y in DATA]), "Labels run from 9 to 12"),
    "epochs nan": (lambda: train(options={"epochs": float("nan")}), "`epochs` must be a number from 0; got nan"),
    "epochs inf": (lambda: train(options={"epochs": float("inf")}), "`epochs` must be a number from 0; got inf"),
    "epochs text": (lambda: train(options={"epochs": "1"}), "`epochs` must be a number from 0; got '1'"),
    "epochs unused": (lambda: allocate(options={"epochs": -1}), "`epochs` must be a number from 0; got -1"),
    "options 5": (lambda: allocate(options=5), "`options` must map names of options to values; got 5"),
    "finetune nan": (lambda: finetune(net(), DATA, float("nan")), "`epochs` must be a number from 0; got nan"),
    "recipe": (lambda: Recipe(warm_up=-1, allocation=1, finetune=1), "`warm_up` must be a number from 0; got -1"),
    "minimum 2": (lambda: RefinementOptions(minimum=2.0), "`minimum` must lie in [0, 1]; got 2.0"),
    "minimum nan": (lambda: RefinementOptions(minimum=float("nan")), "`minimum` must lie in [0, 1]; got nan"),
    "confidence": (lambda: RefinementOptions(confidence=1), "`confidence` must lie strictly between 0 and 1; got 1"),
    "time limit": (lambda: ProfileOptions(time_limit=-1), "`time_limit` must be a number above 0; got -1"),
    "samples": (lambda: ProfileOptions(samples="x"), "`samples` must be a whole number from 1"),  # type: ignore[arg-type]
    "out 5": (lambda: allocate(out=5), "`out` must be a path; got 5"),
    "out of a sweep": (lambda: dsa_hw.sweep(net(), [HALF], out=5), "`out` must be a path; got 5"),  # type: ignore[arg-type]
    "profile 5": (lambda: allocate(budget=LatencyBudget("50%", profile=5)), "got int"),  # type: ignore[arg-type]
    "source 5": (lambda: allocate(budget=LatencyBudget("50%"), profiling=ProfileOptions(source=5)), "got int"),
    "target 5": (lambda: allocate(budget=LatencyBudget("50%"), target=5), "`target` must be a Target or its name"),
    "method 5": (lambda: allocate(method=5), "`method` must be the name of a method or a Proposal; got 5"),
    "seed": (lambda: allocate(seed=-1), "`seed` must be a whole number from 0; got -1"),
    "seed text": (lambda: allocate(seed="x"), "`seed` must be a whole number from 0; got 'x'"),
    "budget 5": (lambda: allocate(budget=5), "`budget` must be a Budget or a list of Budgets"),
    "budgets of a sweep": (lambda: dsa_hw.sweep(net(), [5]), "`budget` must be a Budget"),  # type: ignore[list-item]
    "no budgets": (lambda: dsa_hw.sweep(net(), []), "got an empty list"),
    "data 5": (lambda: dsa_hw.compare(net(), 5, [HALF]), "`data` must be the name of a data set"),  # type: ignore[arg-type]
    "settings": (lambda: ExperimentSettings(epochs=float("nan")), "`epochs` must be a number from 0; got nan"),
    "images 5": (lambda: allocate(images=5), "`images` must be a loader of batches; got 5"),
    "images name": (lambda: allocate(images="digits"), "`images` must be a loader of batches; got 'digits'"),
    "images uint8": (lambda: allocate(images=[x for x, _ in BYTES]), "of the images loader (4x3x8x8 uint8)"),
    "images of a narrow shape": (lambda: allocate(images=[x for x, _ in NARROW]), "images loader (4x2x8x8 float32)"),
    "images data set": (lambda: allocate(images=SET), "`images` must be a loader of batches, for example"),
    "images tensor": (lambda: allocate(images=DATA[0][0]), "or a list of batches; got a tensor"),
    "images empty": (lambda: allocate(images=[]), "The images loader is empty"),
    "images nan": (lambda: allocate(images=[IMAGE / 0]), "The images loader gives NaN or infinity"),
    "val nan": (lambda: allocate(val=[(x / 0, y) for x, y in DATA]), "The val loader gives NaN or infinity"),
    "metric 5": (lambda: allocate(metric=5, val=DATA), "`metric` must be a function metric(outputs, targets); got 5"),
    "metric nan": (lambda: allocate(metric=lambda o, t: o.sum() / 0, val=DATA), "`metric` must return a finite number"),
    "recovery x": (lambda: allocate(recovery="x"), "Unknown recovery 'x'"),
    "recover 5": (lambda: dsa_hw.recover(net(), 5, DATA, None), "`model` must be"),  # type: ignore[arg-type]
    "assess 5": (lambda: allocate().assess(net(), 5), "`data` must be a loader of batches; got 5"),
    "assess uint8": (lambda: allocate().assess(net(), BYTES), "of the data loader (4x3x8x8 uint8)"),
    "assess max_drop": (lambda: allocate().assess(net(), DATA, max_drop=float("nan")), "`max_drop` must be a number"),
    "assess confidence": (lambda: allocate().assess(net(), DATA, confidence=2), "`confidence` must lie strictly"),
    "assess confidence 0.1": (lambda: allocate().assess(net(), DATA, confidence=0.1), "must be at least 0.5; got 0.1"),
    "assess source": (lambda: allocate().assess(net(), DATA, source="x"), "Unknown source 'x'"),
    "assess None": (lambda: allocate().assess(None, DATA), "`model` must be"),
    "save 5": (lambda: allocate().save(5), "`folder` must be a path; got 5"),
    "export 5": (lambda: allocate().export(5), "`path` must be a path; got 5"),
    "plan 5": (lambda: dsa_hw.Plan.load(5), "`plan` must be a path; got 5"),  # type: ignore[arg-type]
    "apply 5": (lambda: dsa_hw.apply_plan(net(), 5), "`plan` must be a path; got 5"),  # type: ignore[arg-type]
    "verify 5": (lambda: dsa_hw.verify(5, net()), "`plan` must be a path; got 5"),  # type: ignore[arg-type]
    "verify no model": (lambda: dsa_hw.verify(allocate().plan, None), "`model` must be"),  # type: ignore[arg-type]
    "verify weights": (lambda: dsa_hw.verify(allocate().plan, net(), weights=5), "`weights` must be a path; got 5"),
    "verify time": (lambda: dsa_hw.verify(allocate().plan, net(), time_limit=float("nan")), "`time_limit` must be"),
    "full-width digits": (lambda: FlopsBudget("\uff150%"), "does not start with a number"),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_with_a_mistake_raises_a_typed_error_that_names_it(call: str) -> None:
    run, message = CALLS[call]
    with pytest.raises(DsaError, match=re.escape(message)) as caught:
        run()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
