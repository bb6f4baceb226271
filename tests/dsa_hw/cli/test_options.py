"""Options that several commands share, and the help of every command."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

import dsa_hw
from dsa_hw.cli.documents import OUTPUTS
from dsa_hw.cli.loading import profile_options, refinement_options, settings_of, target_of
from dsa_hw.cli.main import build_parser, main
from dsa_hw.cli.options import EXIT_CODES, METHODS
from dsa_hw.errors import ProfileError
from dsa_hw.methods import registry
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.zoo import models


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    return next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices


def documented_keys(name: str) -> set[str]:
    """The keys of the JSON object that the help of a command lists."""
    match = re.search(r"--json prints an object with ([\w, ]+)\.", " ".join((commands()[name].epilog or "").split()))
    assert match is not None
    return set(match[1].split(", "))


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_a_description_and_every_option_a_help_text(name: str) -> None:
    parser = commands()[name]
    assert parser.description
    assert parser.description.endswith(".")
    for action in parser._actions:
        assert action.help, action.option_strings


@pytest.mark.parametrize("name", sorted(commands()))
def test_examples_in_the_help_of_a_command_can_be_typed(name: str) -> None:
    epilog = commands()[name].epilog or ""
    assert epilog.startswith("Examples:\n")
    lines = epilog.partition("\n\n")[0].replace("\\\n", " ").splitlines()[1:]
    assert lines
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program == "dsa-hw"
        assert parse(*words[: words.index(">")] if ">" in words else words).command == name


@pytest.mark.parametrize("command", ["allocate", "sweep", "compare"])
def test_precision_becomes_a_part_of_the_target(command: str) -> None:
    words = {
        "allocate": ["--budget", "latency=50%"],
        "sweep": ["--budgets", "latency=50%"],
        "compare": ["--budgets", "latency=50%", "--data", "digits"],
    }[command]
    given = [command, "--model", "resnet20", *words]
    assert target_of(parse(*given)) == "onnxruntime/cpu"
    assert target_of(parse(*given, "--precision", "int8", "--target", "openvino/cpu")) == "openvino/cpu int8"
    layers = ["--int8-without", "conv1,fc"]
    assert target_of(parse(*given, "--precision", "int8-u8", *layers)) == "onnxruntime/cpu int8-u8-without:conv1,fc"
    with pytest.raises(ProfileError, match="needs --precision int8"):
        target_of(parse(*given, *layers))


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_lists_the_fields_of_the_json_output(name: str) -> None:
    assert documented_keys(name) == set(OUTPUTS[name].model_fields)


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "where to measure, for example torch/cuda (default: onnxruntime/cpu)",
        "time for measuring the profile, for example 90s (default: 10min)",
        "seed of everything random (default: 0)",
        "epochs of fine-tuning each pruned network (default: 4)",
        "(default: accept every interval)",
        "uses less of the budget (default: 0.9)",
    ):
        assert part in text


def test_help_lists_every_method() -> None:
    ours = [name for name in registry.available_methods() if registry.METHODS[name].__module__.startswith("dsa_hw")]
    assert tuple(ours) == METHODS


def test_every_verdict_has_an_exit_code() -> None:
    assert EXIT_CODES == {Verdict.MET: 0, Verdict.NOT_MET: 3, Verdict.INCONCLUSIVE: 4}


@pytest.mark.parametrize("command", ["allocate", "compare", "sweep"])
def test_options_reach_profile_and_refinement(command: str) -> None:
    budget = "--budget" if command == "allocate" else "--budgets"
    words = [command, "--model", "resnet20", "--data", "digits", budget, "latency=50%", "--profile", "p.sqlite"]
    words += ["--samples", "20", "--holdout", "5", "--grid", "8", "--time-limit", "2min", "--minimum", "25%"]
    args = parse(*words, "--require", "5%", "--confidence", "0.8")
    found = profile_options(args)
    assert (found.source, found.samples, found.holdout, found.grid) == (Path("p.sqlite"), 20, 5, "8")
    assert (found.time_limit, found.name, found.force) == (120.0, "resnet20", False)
    assert found.rules == dsa_hw.MeasuringRules(require=0.05)
    assert refinement_options(args).minimum == 0.25
    assert refinement_options(args).confidence == 0.8
    if command != "compare":  # which takes profiles only, and these need no force
        assert profile_options(parse(*words, "--force")).force


@pytest.mark.parametrize(
    ("words", "epochs"),
    [
        (["--data", "digits"], 20),
        (["--data", "digits", "--weights", "w.pt"], 0),
        ([], 0),
        (["--data", "digits", "--train-epochs", "3"], 3),
    ],
)
def test_dense_network_is_trained_unless_there_are_weights_or_no_data(words: list[str], epochs: float) -> None:
    args = parse("sweep", "--model", "resnet20", "--budgets", "flops=50%", *words)
    assert settings_of(args).train_epochs == epochs


class ReachedError(BaseException):
    """The command has done everything before its work."""


@pytest.mark.parametrize(
    ("words", "random"),
    [
        (["allocate", "--model", "resnet20", "--budget", "flops=50%"], True),
        (["allocate", "--model", "resnet20", "--budget", "flops=50%", "--weights", "{weights}"], False),
        (["allocate", "--model", "tests.fakes.digits:net", "--budget", "flops=50%"], False),
        (["compare", "--model", "resnet20", "--data", "digits", "--budgets", "flops=50%"], False),
        (["compare", "--model", "resnet20", "--data", "digits", "--budgets", "flops=50%", "--train-epochs", "0"], True),
        (["sweep", "--model", "resnet20", "--budgets", "flops=50%"], True),
        (["sweep", "--model", "resnet20", "--budgets", "flops=50%", "--train-epochs", "5"], True),
        (["sweep", "--model", "resnet20", "--data", "digits", "--budgets", "flops=50%"], False),
        (["sweep", "--model", "resnet20", "--budgets", "flops=50%", "--weights", "{weights}"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize("as_json", [False, True])
def test_first_line_says_that_the_weights_are_random(
    words: list[str],
    random: bool,
    as_json: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reach(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr(dsa_hw, words[0], reach)
    weights = tmp_path / "weights.pt"
    torch.save(models.load_model("resnet20")[0].state_dict(), weights)
    with pytest.raises(ReachedError):
        main([*(word.format(weights=weights) for word in words), *(["--json"] if as_json else [])])
    captured = capsys.readouterr()
    found = captured.err if as_json else captured.out
    assert found.startswith("The weights are random (no --pretrained or --weights)") == random
    assert (captured.out if as_json else captured.err) == "", "with --json, standard output is one JSON object"
