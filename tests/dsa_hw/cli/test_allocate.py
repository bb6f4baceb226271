"""``dsa-hw allocate``."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from dsa_hw.channels.plan import Plan
from dsa_hw.cli.main import main
from dsa_hw.utils.weights import read_weights
from tests.dsa_hw.cli.test_options import documented_keys
from tests.fakes.formula import Net
from tests.fakes.outputs import printed_json

MODEL = "tests.dsa_hw.cli.test_allocate:make"
HALF = ("--budget", "flops=50%", "--method", "uniform")


def make() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.zeros(1, 3, 16, 16)


def make_random() -> tuple[Net, torch.Tensor]:
    return Net().eval(), torch.zeros(1, 3, 16, 16)


def allocate(out: Path, *words: str, model: str = MODEL) -> int:
    return main(["allocate", "--model", model, *words, "--out", str(out)])


def test_text_has_verdict_widths_and_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "my small network"
    assert allocate(out, *HALF) == 0
    text = capsys.readouterr().out
    widths = Plan.load(out / "plan.json").widths
    assert text.startswith("Allocation of Net on 1x3x16x16: MET")
    assert "FLOPs <= 50% of the dense network" in text
    assert all(f"{name} {width}/" in text for name, width in widths.items())
    assert (out / "index.html").exists()
    assert text.endswith(
        f"saved: {out}\npage: {out}/index.html\nnext: dsa-hw verify '{out}/plan.json' --model {MODEL}\n"
    )


def test_json_has_the_certificate_and_the_saved_widths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate(tmp_path, *HALF, "--json") == 0
    content = printed_json(capsys, "allocate")
    assert set(content) == documented_keys("allocate")
    assert content["certificate"]["verdict"] == "MET"
    assert content["accuracy"] == {}
    assert Plan.load(tmp_path / "plan.json").widths == content["widths"]


def test_minimum_bounds_what_can_be_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert allocate(tmp_path, *HALF, "--minimum", "60%") == 0
    assert pd.read_csv(tmp_path / "widths.csv")["keep_ratio"].min() >= 0.6
    assert allocate(tmp_path, *HALF, "--minimum", "90%") == 3
    assert "cannot be met" in capsys.readouterr().err


def test_fine_tuned_weights_are_saved_and_accuracies_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--budget", "flops=60%", "--data", "digits", "--epochs", "0.2", "--finetune", "0.2")
    assert allocate(tmp_path, *words, "--json") == 0
    content = printed_json(capsys, "allocate")
    assert set(content["accuracy"]) == {"dense", "pruned", "fine-tuned"}
    assert content["certificate"]["entries"][0]["utilisation"] >= 0.97
    tuned = read_weights(tmp_path / "model.safetensors")
    quality = content["certificate"]["quality"]
    assert (quality["measure"], quality["source"], quality["inputs"]) == ("accuracy", "test data", 360)
    assert quality["value"]["value"] == content["accuracy"]["fine-tuned"]
    assert Plan.load(tmp_path / "plan.json").certificate == content["certificate"]
    verify = ["verify", str(tmp_path / "plan.json"), "--model", MODEL, "--data", "digits"]
    assert main(verify) == 0
    text = capsys.readouterr().out
    assert text.count(f"Accuracy on 360 inputs (test data): {100 * content['accuracy']['fine-tuned']:.1f}%") == 2
    assert allocate(tmp_path, *words[:-2]) == 0
    text = capsys.readouterr().out
    assert f"Accuracy on 360 inputs (test data): {100 * content['accuracy']['pruned']:.1f}%" in text
    plain = read_weights(tmp_path / "model.safetensors")
    assert any(not torch.equal(tuned[name], plain[name]) for name in tuned)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    model = "tests.dsa_hw.cli.test_allocate:make_random"
    found = []
    for number, seed in enumerate(("1", "1", "2")):
        torch.manual_seed(number)
        out = tmp_path / str(number)
        assert allocate(out, "--budget", "flops=50%", "--method", "uniform", "--seed", seed, model=model) == 0
        found.append(read_weights(out / "model.safetensors")["one.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--budget", "flops=0.001%"), 3, "cannot be met"),
        (("--budget", "flops=50%", "--finetune", "1"), 2, "--data"),
        (("--budget", "flops=50%", "--weights", "none.pt"), 2, "Cannot read the weights none.pt"),
        (("--budget", "flops=50%", "--method", "unifrom"), 2, "Did you mean 'uniform'?"),
        (("--budget", "flops=50%", "--data", "digit"), 2, "Did you mean 'digits'?"),
        (("--budget", "flops"), 2, "COST=AMOUNT"),
    ],
)
def test_wrong_input_is_one_line_with_the_name_of_the_command(
    words: tuple[str, ...], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allocate(tmp_path / "out", *words) == code
    error = capsys.readouterr().err
    assert error.startswith("dsa-hw allocate: ")
    assert error.count("\n") == 1
    assert message in error


def test_weights_of_another_network_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "other.pt"
    torch.save(torch.nn.Linear(2, 2).state_dict(), weights)
    assert allocate(tmp_path, *HALF, "--weights", str(weights)) == 2
    assert f"The weights do not fit {MODEL}: " in capsys.readouterr().err
    torch.save([1, 2], weights)
    assert allocate(tmp_path, *HALF, "--weights", str(weights)) == 2
    assert "must contain a state dict; it contains a list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"some text\n", "is not a file of torch.save"),
        ({"state_dict": {}, "epoch": 1}, "a dict under 'state_dict'"),
        ({k: v * float("nan") for k, v in make()[0].state_dict().items()}, "one.weight of the network has NaN"),
    ],
    ids=["text", "checkpoint", "nan"],
)
def test_unusable_weights_are_refused_on_one_line(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        weights.write_bytes(content)
    else:
        torch.save(content, weights)
    assert allocate(tmp_path / "out", *HALF, "--weights", str(weights)) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsa-hw allocate: ")
    assert error.count("\n") == 1
    assert message in error
