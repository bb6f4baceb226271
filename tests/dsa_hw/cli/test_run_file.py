"""Run files: read strictly, replaced by what is typed, saved with a result, and never choosing code."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dsa_hw.channels.plan import Plan
from dsa_hw.cli import main as cli
from dsa_hw.cli.main import build_parser, main
from dsa_hw.cli.run_file import as_yaml, effective_options, expand_run_file

MODEL = "tests.dsa_hw.cli.test_allocate:make"


def expanded(command: str, path: Path, *words: str) -> list[str]:
    return expand_run_file(command, cli._parsers(build_parser())[command], ["--config", str(path), *words])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "command: allocate\nmodel: resnet20\nbudget: [latency=50%, flops=80%]\n"
        "time_limit: 90s\nforce: true\njson: false\n"
    )
    return path


def test_options_of_the_file_are_those_of_the_command_line(file: Path) -> None:
    args = build_parser().parse_args(["allocate", *expanded("allocate", file)])
    assert (args.model, args.budget) == ("resnet20", ["latency=50%", "flops=80%"])
    assert (args.time_limit, args.force, args.json) == (90.0, True, False)


def test_what_is_typed_replaces_the_file(file: Path) -> None:
    words = expanded("allocate", file, "--budget", "params=1M", "--time-limit=5s")
    args = build_parser().parse_args(["allocate", *words])
    assert (args.budget, args.time_limit, args.model) == (["params=1M"], 5.0, "resnet20")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modelx: resnet18", "Unknown option 'modelx'. Did you mean 'model'?"),
        ("model: a\nmodel: b", "the key 'model' occurs twice"),
        ("- model", "it must have lines such as"),
        ("model: [a, b]", "model must be a single value"),
        ("model: {a: b}", "model must be a text"),
        ("force: perhaps", "force must be true or false; got 'perhaps'"),
        ("command: sweep", "is a run file of dsa-hw sweep, not of dsa-hw allocate"),
        ("model: nets:make", "names code to import (model: nets:make), which a file must not choose. Type it: --model"),
        ("data: mine.data:loaders", "names code to import"),
        ("target: onnxruntime/ssh://pi@board", "names another computer"),
        ("a: &a [b]\nmodel: !!python/object/apply:os.system [x]", "Unknown option 'a'"),
        ("model: !!python/object/apply:os.system [x]", "model must be a single value"),
        ("model: 'open", "Cannot read the run file"),
    ],
)
def test_wrong_files_are_refused_on_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["allocate", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("dsa-hw allocate: ")
    assert error.count("\n") == 1


def test_values_of_the_file_pass_the_same_checks(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("model: resnet20\nbudget: flops=50%\nminimum: 5")
    with pytest.raises(SystemExit):
        main(["allocate", "--config", str(file)])
    assert "Argument --minimum: must be a percentage" in capsys.readouterr().err


def test_result_is_repeated_from_its_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", MODEL, "--budget", "flops=50%", "--method", "uniform", "--minimum", "10%"]
    assert main(["allocate", *words, "--out", str(tmp_path / "first")]) == 0
    saved = tmp_path / "first" / "run.yaml"
    content = yaml.safe_load(saved.read_text())
    assert (content["command"], content["budget"], content["minimum"]) == ("allocate", ["flops=50%"], "10%")
    capsys.readouterr()
    assert main(["allocate", "--config", str(saved), "--out", str(tmp_path / "again")]) == 2  # its model is code
    assert f"Type it: --model {MODEL}" in capsys.readouterr().err
    assert main(["allocate", "--config", str(saved), "--model", MODEL, "--out", str(tmp_path / "again")]) == 0
    first, again = (Plan.load(tmp_path / name / "plan.json") for name in ("first", "again"))
    assert first.widths == again.widths
    assert yaml.safe_load((tmp_path / "again" / "run.yaml").read_text()) == {**content, "out": str(tmp_path / "again")}


@pytest.mark.parametrize("command", sorted(cli._COMMANDS))
def test_printed_options_of_every_command_can_be_read_again(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--print-config"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(text)
    parser = cli._parsers(build_parser())[command]
    words = expand_run_file(command, parser, ["--config", str(tmp_path / "run.yaml")])
    found = effective_options(command, parser, words)
    assert {key: "true" if value is True else value for key, value in found.items()} == yaml.load(text, yaml.BaseLoader)


def test_numbers_are_written_as_people_write_them_and_every_text_comes_back(tmp_path: Path) -> None:
    texts = ["40", "0.5", "no", "a: b", "# c", "- d", "'e'", "[f", "1e3", "*g", "größer", "2026-11-18", " h", "!i"]
    options = {"command": "allocate", "quiet": True, "samples": "40", "budget": texts}
    assert "samples: 40\n" in as_yaml(options)
    (tmp_path / "run.yaml").write_text(as_yaml(options), encoding="utf-8")
    parser = cli._parsers(build_parser())["allocate"]
    words = expand_run_file("allocate", parser, ["--config", str(tmp_path / "run.yaml")])
    assert words[:-2] == ["--quiet", "--samples=40", *(f"--budget={text}" for text in texts)]


def test_positional_arguments_are_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("plan: small/plan.json\nmodel: resnet18\n")
    args = build_parser().parse_args(["verify", *expanded("verify", path)])
    assert (str(args.plan), args.model) == ("small/plan.json", "resnet18")
    args = build_parser().parse_args(["verify", *expanded("verify", path, "other.json")])
    assert str(args.plan) == "other.json"
