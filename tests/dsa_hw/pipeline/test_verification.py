"""A plan is a file: it chooses neither code nor host nor path, and a forged certificate is never MET."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import budgets
from dsa_hw.channels.plan import Plan
from dsa_hw.cli.main import main
from dsa_hw.errors import BudgetError, DsaError, ModelError, PlanError, ProfileError
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.verification import verify
from dsa_hw.utils.documents import sealed
from dsa_hw.utils.weights import read_weights, weights_bytes
from profilers.targets import from_title, resolve
from tests.dsa_hw.cli.test_allocate import make
from tests.fakes.formula import Formula, Net

MODEL = "tests.dsa_hw.cli.test_allocate:make"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """An honest plan: half of the FLOPs."""
    net, example = make()
    return allocate(net, budgets.FlopsBudget("50%"), example_inputs=example, method="uniform", progress=False).plan


def forged(plan: Plan, **changes: Any) -> Plan:
    """The plan with other values in its one entry; ``budget`` brings a dimension and a limit that fit it."""
    certificate = dict(plan.certificate or {})
    entry = {**certificate["entries"][0], **changes}
    if "budget" in changes:
        entry["dimension"] = getattr(getattr(budgets, str(entry["budget"]["kind"]), None), "dimension", "time")
        share = float(entry["budget"]["amount"].rstrip("%")) / 100
        entry["limit"] = changes.get("limit", share * entry["dense"])
        entry["utilisation"] = entry["least_used"] = entry["most_used"] = entry["measured"] / entry["limit"]
        entry["verdict"] = "MET" if entry["utilisation"] <= 1 else "NOT MET"
    if "target" in changes and "specification" not in changes:
        entry["specification"] = (changes["target"].split() or [""])[0]
    return replace(plan, certificate={**certificate, "entries": [entry], "verdict": entry["verdict"]})


def run_command(plan: Plan, folder: Path, *words: str) -> int:
    """Save it (with the right checksum) and run the command."""
    plan.save(folder / "plan.json")
    return main(["verify", str(folder / "plan.json"), "--model", MODEL, *words])


# Code -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exists once the module "payload" of the current folder was imported."""
    found = tmp_path / "ran"
    (tmp_path / "payload.py").write_text(
        f"import pathlib\npathlib.Path({str(found)!r}).touch()\ndef read():\n    return 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    return found


ENERGY = {"kind": "EnergyBudget", "amount": "60.0%"}
ESTIMATE = {"kind": "EstimatedEnergyBudget", "amount": "60.0%"}


@pytest.mark.parametrize(
    "budget",
    [
        {**ENERGY, "counter": "payload:read"},
        {**ENERGY, "own": ["counter"], "counter": "payload:read"},
        {**ENERGY, "own": ["counter"]},
        {**ENERGY, "own": ["profile"], "profile": "payload"},
        {**ENERGY, "profile": "payload"},
        {**ESTIMATE, "technology": "technology.json"},
        {**ESTIMATE, "technology": {"mac": 1.0, "byte": {}}},
        {**ESTIMATE, "own": ["technology"]},
        {**ENERGY, "unknown": 1},
        {"kind": "LatencyBudget", "amount": "60.0%", "counter": "payload:read"},
        {"kind": "load", "amount": "60.0%"},
        {"kind": "Budget", "amount": "60.0%"},
        {"kind": ["LatencyBudget"], "amount": "60.0%"},
    ],
    ids=str,
)
def test_a_plan_does_not_choose_code(budget: dict[str, Any], plan: Plan, net: Net, mark: Path) -> None:
    (mark.parent / "technology.json").write_text('{"mac": 1.0, "byte": {"dram": 1, "large": 1, "small": 1}}')
    with pytest.raises(PlanError, match=r"Cannot use a budget of the plan|Unknown kind|must be text or a number"):
        verify(forged(plan, budget=budget, target="torch/cpu fp32 x1"), net)
    assert run_command(forged(plan, budget=budget, target="torch/cpu fp32 x1"), mark.parent) == 2
    assert not mark.exists()
    assert "payload" not in sys.modules


def test_the_user_may_name_the_counter(
    plan: Plan, mark: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    energy = forged(plan, budget={**ENERGY, "own": ["counter"]}, target="torch/cpu fp32 x1")
    assert run_command(energy, mark.parent) == 2
    assert "--counter" in capsys.readouterr().err
    assert run_command(energy, mark.parent, "--counter", "payload:read", "--time-limit", "1") != 0
    assert mark.exists(), "the payload works; as a meter that stands still it proves nothing"


def test_a_counter_and_a_technology_of_ones_own_are_not_written_but_asked_for() -> None:
    own = {"mac": 2.0, "byte": {"dram": 1.0, "large": 1.0, "small": 1.0}}
    metered = budgets.EnergyBudget("5mJ", counter=lambda: 0.0)
    estimated = budgets.EstimatedEnergyBudget("50%", technology=own)
    assert metered.to_dict() == {"kind": "EnergyBudget", "amount": "0.005 J", "own": ["counter"]}
    assert estimated.to_dict()["own"] == ["technology"]
    assert "technology" not in estimated.to_dict()
    for budget in (metered, estimated):
        with pytest.raises(BudgetError, match="--"):
            budgets.Budget.from_dict(budget.to_dict())
    again = budgets.Budget.from_dict(estimated.to_dict(), counter="payload:read", technology=own)
    assert replace(again, amount=estimated.amount) == estimated
    assert budgets.Budget.from_dict(metered.to_dict(), counter=metered.counter).counter is metered.counter  # type: ignore[attr-defined]
    plain = budgets.EnergyBudget("5mJ").to_dict()
    assert budgets.Budget.from_dict(plain, counter="mine:read").counter == "mine:read"  # type: ignore[attr-defined]


# Hosts and files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def contacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exists once a program called ssh or adb was started: these here, whether or not there are real ones."""
    found, programs = tmp_path / "contacted", tmp_path / "bin"
    programs.mkdir()
    for name in ("ssh", "adb"):
        (programs / name).write_text(f"#!/bin/sh\n: > '{found}'\nexit 255\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(f"Host *\n  ProxyCommand touch {tmp_path / 'proxied'}\n")
    (tmp_path / "cpu").write_text("a table")
    return found


ELSEWHERE = [
    "ssh://board",
    "ssh://board?config=notes.txt",
    "ssh://board?config=notes.txt fp32 x1",
    "onnxruntime/ssh://board fp32 x1",
    "onnxruntime/ssh://board?config=notes.txt fp32 x1",
    "auto/ssh://board?config=notes.txt fp32 x1",
    "ssh/ssh://board?config=notes.txt fp32 x1",
    "ssh/cpu fp32 x1",
    "adb:0123?binary=/data/local/tmp/evil",
    "litert/adb:0123 fp32 x4",
    "table:cpu",
    "table/cpu fp32 x1",
    "table/table:cpu fp32 x1",
    "ethos-u55-128?config=notes.txt&system=A&memory=B int8 A B",
    "torch/cpu fp32 x1 ssh://board",
    "torch/cpu",
    "../cpu fp32 x1",
    "",
]


@pytest.mark.parametrize("title", ELSEWHERE)
def test_a_plan_does_not_choose_a_host_or_a_file(title: str, plan: Plan, contacted: Path, net: Net) -> None:
    from profilers.targets import ssh

    boards = dict(ssh._BOARDS)
    latency = forged(plan, budget={"kind": "LatencyBudget", "amount": "60.0%", "target": title or "x"}, target=title)
    with pytest.raises(ProfileError, match="--target"):
        verify(latency, net)
    assert run_command(latency, contacted.parent) == 2
    assert not contacted.exists(), "no connection was tried"
    assert boards == ssh._BOARDS, "no address was even read"


def test_the_user_may_name_the_host(plan: Plan, contacted: Path, net: Net) -> None:
    latency = forged(
        plan, budget={"kind": "LatencyBudget", "amount": "60.0%"}, target="onnxruntime/ssh://board fp32 x1"
    )
    with pytest.raises(DsaError):
        verify(latency, net, target="ssh://board?config=notes.txt&patience=0")
    assert contacted.exists(), "the trap of the test above works"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client; the tests above use a program of that name")
@pytest.mark.parametrize("title", [t for t in ELSEWHERE if "config" in t])
def test_the_ssh_configuration_of_a_plan_is_not_read(
    title: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "proxied"
    (tmp_path / "notes.txt").write_text(f"Host *\n  ProxyCommand touch {mark}\n")
    monkeypatch.chdir(tmp_path)
    latency = forged(plan, budget={"kind": "LatencyBudget", "amount": "60.0%"}, target=title)
    assert run_command(latency, tmp_path) == 2
    assert not mark.exists()
    typed = "ssh://board?config=notes.txt&patience=0"
    assert run_command(latency, tmp_path, "--target", typed) != 0
    assert mark.exists(), "the payload works"


@pytest.mark.parametrize("name", ["torch/cpu", "onnxruntime/cpu"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_title_of_a_local_target_names_it(name: str, threads: int) -> None:
    if name.startswith("onnxruntime"):
        pytest.importorskip("onnxruntime")
    target = resolve(name, threads=threads)
    again = from_title(target.title)
    assert (type(again), again.title, again.threads) == (type(target), target.title, threads)


@pytest.mark.parametrize(
    ("typed", "precision", "threads"),
    [
        ("ssh://pi@board?python=%2Fopt%2Fpython", "fp16", 4),  # as in the certificate
        ("ssh://pi@board fp32 x2", "fp32", 2),
        ("ssh://pi@board fp32", "fp32", 1),
    ],
)
def test_a_plan_of_a_board_is_verified_where_the_user_says(
    typed: str, precision: str, threads: int, plan: Plan, net: Net, formula: Formula, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsa_hw.pipeline import verification

    specification = "ssh://pi@board?runtime=onnxruntime&python=%2Fopt%2Fpython"
    board = forged(
        plan,
        budget={"kind": "LatencyBudget", "amount": "60.0%"},
        target="onnxruntime/ssh://pi@board fp16 x4",
        specification=specification,
    )
    with pytest.raises(ProfileError, match="--target") as caught:
        verify(board, net)
    assert repr(specification) in str(caught.value), "with all options, so that it can be named again"
    asked: list[tuple[Any, ...]] = []

    def fake(target: Any, *, precision: str, threads: int) -> Formula:
        asked.append((target, precision, threads))
        return formula

    monkeypatch.setattr(verification, "resolve", fake)
    found = verify(board, net, target=typed, time_limit=5)
    assert asked == [(typed.split()[0], precision, threads)]
    assert found.now.verdict in ("MET", "NOT MET")
    assert found.now.entries[0].specification == formula.name
    for wrong in ("", " ", "ssh://pi@board x", "ssh://pi@board fp32 x0", "ssh://pi@board fp8"):
        with pytest.raises(ProfileError, match="Cannot read the target"):
            verify(board, net, target=wrong)


def test_options_that_a_title_does_not_show_must_be_typed(plan: Plan, net: Net) -> None:
    """The configuration file of an Ethos-U, for example, is not part of its title."""
    odd = forged(
        plan,
        budget={"kind": "LatencyBudget", "amount": "60.0%"},
        target="torch/cpu fp32 x1",
        specification="torch/cpu?config=notes.txt",
    )
    with pytest.raises(ProfileError, match=r"--target.*notes\.txt"):
        verify(odd, net)


# What belongs to a plan -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved result."""
    net, example = make()
    result = allocate(net, budgets.FlopsBudget("50%"), example_inputs=example, method="uniform", progress=False)
    return result.save(tmp_path / "small")


def run_saved(folder: Path, *words: str) -> int:
    return main(["verify", str(folder / "plan.json"), "--model", MODEL, *words])


def test_the_weights_beside_the_plan_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_saved(folder) == 0
    assert "weights: as saved" in capsys.readouterr().out
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for position in (10, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        for words in ((), ("--weights", str(weights))):
            assert run_saved(folder, *words) == 2
            error = capsys.readouterr().err
            assert "SHA-256 differs" in error
            assert error.count("\n") == 1
    weights.unlink()
    assert run_saved(folder) == 0
    assert "weights: not compared" in capsys.readouterr().out


def test_weights_are_compared_where_the_plan_does_not_list_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(Plan.load(folder / "plan.json"), files={}).save(folder / "plan.json")
    assert run_saved(folder) == 0
    assert "weights: as saved" in capsys.readouterr().out
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert run_saved(folder) == 2
    assert "not those of the plan" in capsys.readouterr().err


def test_a_plan_does_not_move_or_remove_files_of_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "thesis.tex").write_text("mine")
    (folder / ".switch").mkdir()
    (folder / ".switch" / ".removed.json").write_text('["thesis.tex"]')
    assert run_saved(folder) == 0
    (folder / ".switch").mkdir()
    (folder / ".switch" / "thesis.tex").write_text("stranger")
    assert run_saved(folder) == 2
    assert "foreign file, 'thesis.tex'" in capsys.readouterr().err
    assert (folder / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.safetensors", "widths.csv", "rounds.csv", "history.csv"])
def test_a_file_of_another_result_is_refused(name: str, folder: Path) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"\n")
    assert run_saved(folder) == 2
    with pytest.raises(PlanError, match=name):
        verify(folder / "plan.json", make()[0])


def test_weights_of_the_user_are_compared_whatever_file_holds_them(
    folder: Path, net: Net, capsys: pytest.CaptureFixture[str]
) -> None:
    right = read_weights(folder / "model.safetensors")
    torch.save(right, folder / "copy.pt")
    assert run_saved(folder, "--weights", str(folder / "copy.pt")) == 0
    assert "as saved" in capsys.readouterr().out
    wrong = {name: tensor.clone() for name, tensor in right.items()}
    wrong["one.weight"].view(-1)[0] += 1e-6
    torch.save(wrong, folder / "other.pt")
    assert run_saved(folder, "--weights", str(folder / "other.pt")) == 2
    assert "not those of the plan" in capsys.readouterr().err
    with pytest.raises(PlanError, match="not those of the plan"):
        verify(folder / "plan.json", net, weights=wrong)


def make_other() -> tuple[Net, torch.Tensor]:
    """The same tensors in another function."""

    class Other(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    torch.manual_seed(0)
    return Other().eval(), torch.zeros(1, 3, 16, 16)


def test_another_architecture_with_the_same_tensors_is_noticed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "tests.dsa_hw.pipeline.test_verification:make_other"
    assert main(["verify", str(folder / "plan.json"), "--model", model]) == 2
    assert "computes something else" in capsys.readouterr().err


def test_inputs_of_another_shape_are_refused(folder: Path, net: Net) -> None:
    with pytest.raises(PlanError, match=r"made for inputs of 1x3x16x16, .* got 2x3x16x16"):
        verify(folder / "plan.json", net, example_inputs=torch.zeros(2, 3, 16, 16))
    assert run_saved(folder, "--input", "1x3x8x8") == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_networks_with_nan_or_infinity_are_refused(bad: float, folder: Path, plan: Plan, net: Net) -> None:
    net.one.weight.data[0, 0, 0, 0] = bad
    with pytest.raises(ModelError, match=r"one\.weight of the dense network"):
        verify(folder / "plan.json", net)
    with pytest.raises(ModelError, match="input 0"):
        verify(plan, make()[0], example_inputs=torch.full((1, 3, 16, 16), bad))
    weights = {name: tensor.clone() for name, tensor in read_weights(folder / "model.safetensors").items()}
    weights["one.weight"][0] = bad
    with pytest.raises((PlanError, ModelError)):
        verify(folder / "plan.json", make()[0], weights=weights)


def test_a_certificate_without_the_hash_of_its_weights_is_refused(plan: Plan, net: Net) -> None:
    with pytest.raises(PlanError, match="no hash"):
        verify(replace(plan, network=None), net)


# Forged certificates --------------------------------------------------------------------------------------------------


def test_an_honest_plan_holds(plan: Plan, tmp_path: Path) -> None:
    assert run_command(plan, tmp_path) == 0
    assert run_command(forged(plan), tmp_path) == 0, "what the tests below change is all that makes the difference"


@pytest.mark.parametrize(
    "changes",
    [
        {"limit": 1e30},
        {"limit": 1e30, "utilisation": 0.0},
        {"dense": 1e30},
        {"dense": 0.0, "limit": 0.0},
        {"verdict": "SURELY"},
        {"verdict": None},
        {"verdict": "NOT MET"},
        {"verdict": "INCONCLUSIVE"},
        {"limit": None},
        {"measured": None},
        {"utilisation": None},
        {"measured": -1.0},
        {"measured": True},
        {"measured": "1"},
        {"predicted": "nan"},
        {"confidence": 0.0},
        {"confidence": 1.0},
        {"runs": -1},
        {"specification": 5},
        {"specification": "x" * 10_000},
        {"doubt": "busy"},
        {"most_used": 1.01},
        {"utilisation": 0.5},
        {"dimension": "time"},
        {"dimension": "x"},
        {"environment": "abc"},
        {"environment": {"cpu": 5}},
        {"budget": {"kind": "FlopsBudget", "amount": "50.0%"}, "target": 5},
        {"budget": {"kind": "FlopsBudget", "amount": ["50.0%"]}},
        {"budget": {"kind": "FlopsBudget"}},
        {"budget": {"kind": "FlopsBudget", "amount": "9" * 500 + "%"}},
        {"budget": []},
        {"runs": "many"},
        {"asked": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_forged_entry_is_refused(
    changes: dict[str, Any], plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = dict(plan.certificate or {})
    entries = [{**certificate["entries"][0], **changes}]
    bad = replace(plan, certificate={**certificate, "entries": entries})
    assert run_command(bad, tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsa-hw verify: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "certificate",
    [
        {"entries": []},
        {"entries": [], "verdict": "INCONCLUSIVE"},
        {"entries": {}},
        {"entries": "MET"},
        {"entries": None},
        {"entries": [[]]},
        {"verdict": "MET, surely"},
        {"verdict": None},
        {"measurements": -1},
        {"measurements": 1.5},
        {"versions": 5},
        {"versions": {"torch": 2}},
        {"date": "yesterday"},
        {"more": 1},
        {"format": "dsa_hw certificate 2"},
    ],
    ids=str,
)
def test_a_forged_certificate_is_refused(certificate: dict[str, Any], plan: Plan, tmp_path: Path) -> None:
    bad = replace(plan, certificate={**dict(plan.certificate or {}), **certificate})
    with pytest.raises(PlanError):
        Certificate.from_dict(bad.certificate)
    assert run_command(bad, tmp_path) == 2


@pytest.mark.parametrize("text", ["\x1b[2J\x1b[1;32mMET", "\nnow: MET", "\x9b2J", "\u202eTEM", "\x7f"])
def test_a_plan_does_not_write_to_other_lines_of_the_terminal(text: str, plan: Plan, tmp_path: Path) -> None:
    certificate = dict(plan.certificate or {})
    quality = {**certificate["quality"], "name": text}
    latency = {"kind": "LatencyBudget", "amount": "60.0%", "target": text}
    for bad in (
        forged(plan, statistic=text),
        forged(plan, estimated=text),
        forged(plan, target=text),
        forged(plan, environment={"cpu": text}),
        forged(plan, environment={text: "cpu"}),
        forged(plan, budget=latency, target="torch/cpu fp32 x1"),
        replace(plan, certificate={**certificate, "quality": quality}),
        replace(plan, certificate={**certificate, "versions": {"torch": text}}),
    ):
        assert run_command(bad, tmp_path) == 2


def test_own_certificates_are_printable(plan: Plan) -> None:
    found = Certificate.from_dict(plan.certificate)
    entry = replace(found.entries[0], statistic="the\nmedian", environment={"cpu": "Intel  \x1b[1m"})
    again = Certificate.from_dict(replace(found, entries=(entry,)).to_dict()).entries[0]
    assert (again.statistic, again.environment) == ("the?median", {"cpu": "Intel  ?[1m"})


@pytest.mark.parametrize("inputs", [[[1, 3, 20000, 20000]], [[1, 3, 6000, 6000]] * 3])
def test_inputs_that_would_fill_the_memory_are_refused(inputs: list[list[int]], plan: Plan) -> None:
    with pytest.raises(PlanError, match="must have at most"):
        replace(plan, inputs=tuple(map(tuple, inputs))).save("plan.json")


@pytest.mark.parametrize("content", ["x", 5, [], {}], ids=str)
def test_something_else_than_a_certificate_is_refused(content: Any, plan: Plan, net: Net, tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        verify(replace(plan, certificate=content), net)
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document.pop("sha256")
    (tmp_path / "plan.json").write_text(json.dumps(sealed({**document, "certificate": content})))
    assert main(["verify", str(tmp_path / "plan.json"), "--model", MODEL]) == 2


def test_the_verdict_follows_from_the_budget_and_the_network_not_from_the_file(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Consistent in itself, but the network is ten times too large for what was asked."""
    entry = dict((plan.certificate or {})["entries"][0])
    lie = forged(plan, budget={"kind": "FlopsBudget", "amount": "5.0%"}, dense=1e30, asked="FLOPs <= 1 %")
    assert (lie.certificate or {})["verdict"] == "MET"
    assert run_command(lie, tmp_path) == 3
    out = capsys.readouterr().out
    assert "NOT MET" in out
    assert "<= 1 %" not in out, "what is asked is said from the budget"
    small = {"kind": "FlopsBudget", "amount": f"{0.1 * entry['measured']!r} FLOPs"}
    absolute = {**entry, "budget": small, "limit": 1e30, "utilisation": 0.0, "least_used": 0.0, "most_used": 0.0}
    certificate = {**dict(plan.certificate or {}), "entries": [absolute]}
    assert run_command(replace(plan, certificate=certificate), tmp_path) == 2


def test_nothing_certified_is_never_met(plan: Plan) -> None:
    honest = Certificate.from_dict(plan.certificate)
    assert honest.verdict == "MET"
    assert replace(honest, entries=()).verdict == "INCONCLUSIVE"
    odd = replace(honest.entries[0], verdict="SURELY")
    assert replace(honest, entries=(odd,)).verdict == "INCONCLUSIVE"
    assert replace(honest, entries=(honest.entries[0], odd)).verdict == "INCONCLUSIVE"


def test_export_does_not_replace_its_inputs(plan: Plan, net: Net, tmp_path: Path) -> None:
    from dsa_hw.channels.plan import apply_plan

    file, weights = tmp_path / "plan.json", tmp_path / "weights.pt"
    plan.save(file)
    torch.save(apply_plan(net, plan).state_dict(), weights)
    before = file.read_bytes(), weights.read_bytes()
    words = ["export", str(file), "--model", MODEL, "--weights", str(weights)]
    for out in (file, weights, tmp_path / "." / "plan.json"):
        assert main([*words, "--out", str(out)]) == 2
    assert (file.read_bytes(), weights.read_bytes()) == before


def test_allocate_does_not_replace_the_weights_of_the_dense_network(net: Net, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights_bytes(net.state_dict()))
    before = weights.read_bytes()
    words = ["--budget", "flops=50%", "--method", "uniform", "--weights", str(weights)]
    assert main(["allocate", "--model", MODEL, *words, "--out", str(tmp_path)]) == 2
    assert weights.read_bytes() == before
