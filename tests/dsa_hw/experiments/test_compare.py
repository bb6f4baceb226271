"""Comparison and sweep on a target whose times are a formula."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import budgets
import dsa_hw.experiments.compare as comparison
from budgets import EstimatedEnergyBudget, FlopsBudget, LatencyBudget, ParamsBudget
from dsa_hw.channels import find_groups
from dsa_hw.channels.plan import Plan, apply_plan
from dsa_hw.errors import BudgetError, DsaError, InfeasibleBudgetError
from dsa_hw.experiments.compare import compare
from dsa_hw.experiments.dense import pin_cost
from dsa_hw.experiments.equal_latency import match_latency
from dsa_hw.experiments.run_folder import RunFolder, slug
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.experiments.sweep import sweep
from dsa_hw.pipeline.certificate import Certificate
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.utils.documents import sealed
from dsa_hw.zoo.data import Data
from tests.fakes.digits import digits, formula, net

QUICK = ExperimentSettings(train_epochs=2, epochs=1, finetune_epochs=1, reading=1.0)
PROFILING = ProfileOptions(samples=16, holdout=4, time_limit=30.0)
BUDGETS = [FlopsBudget("50%"), LatencyBudget("50%"), ParamsBudget("60%")]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    from dsa_hw.methods import registry as methods

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "_HOMES", ("dsa_hw.methods.baselines",))
        out = tmp_path_factory.mktemp("report")
        table = compare(
            net(), digits(), BUDGETS, target="formula/cpu", methods=("tilted", "uniform"), settings=QUICK,
            profiling=PROFILING, out=out, command="dsa-hw compare --model net",
        )  # fmt: skip
    return out, table


def test_a_row_per_budget_and_method(done: tuple[Path, pd.DataFrame]) -> None:
    _, table = done
    assert list(table["kind"]) == [
        "dense",
        "flops",
        "flops",
        "latency",
        "latency",
        "params",
        "params",
        "flops",
        "flops",
    ]
    assert list(table["method"][1:]) == ["tilted", "uniform"] * 4
    pruned = table[table["kind"] != "dense"]
    assert pruned["accuracy_before"].between(0, 1).all()
    assert (pruned["flops"] < table["flops"][0]).all()
    assert set(table.attrs["widths"]) == set(pruned["id"])


def test_numbers_are_those_of_the_networks(done: tuple[Path, pd.DataFrame]) -> None:
    out, table = done
    for _, row in table[table["kind"] != "dense"].iterrows():
        small = apply_plan(net(), Plan.load(out / "plans" / f"{slug(row['id'])}.json"))
        small.load_state_dict(torch.load(out / "networks" / f"{slug(row['id'])}.pt", weights_only=True)["state_dict"])
        assert sum(p.numel() for p in small.parameters()) == row["params"]
        assert row["seconds"] == pytest.approx(formula(small.eval(), (torch.zeros(1, 3, 32, 32),)))


def test_budgets_are_kept(done: tuple[Path, pd.DataFrame]) -> None:
    _, table = done
    plain = table[table["matches"] == ""]
    assert (plain[plain["kind"] == "flops"]["flops"] <= 0.5 * table["flops"][0]).all()
    assert (plain[plain["kind"] == "params"]["params"] <= 0.6 * table["params"][0]).all()
    assert (plain[plain["kind"] == "latency"]["verdict"] == Verdict.MET).all()


def test_equal_latency_is_equal(done: tuple[Path, pd.DataFrame]) -> None:
    _, table = done
    twins = table[table["matches"] != ""]
    assert list(twins["matches"]) == ["latency-50%-tilted", "latency-50%-uniform"]
    for _, twin in twins.iterrows():
        goal = table[table["id"] == twin["matches"]].iloc[0]
        assert twin["seconds"] == pytest.approx(goal["seconds"], rel=0.03)


def test_the_page_is_written_and_says_who_estimated(done: tuple[Path, pd.DataFrame]) -> None:
    out, table = done
    page = (out / "index.html").read_text()
    assert "a formula" in page
    assert page.count("<figure>") >= 4
    assert table.attrs["report"] == str(out / "index.html")


def test_the_same_call_trains_and_measures_nothing_again(
    done: tuple[Path, pd.DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, table = done
    monkeypatch.setattr(comparison, "solve_or_resume", _never)
    monkeypatch.setattr("dsa_hw.experiments.dense.finetune", _never)
    monkeypatch.setattr("dsa_hw.pipeline.meters.DeviceMeter.read", _never)
    again = compare(
        net(),
        digits(),
        BUDGETS,
        target="formula/cpu",
        methods=("tilted", "uniform"),
        settings=QUICK,
        profiling=PROFILING,
        out=out,
    )
    pd.testing.assert_frame_equal(again, table)


ASK: dict[str, Any] = {
    "target": "formula/cpu",
    "methods": ("uniform",),
    "settings": QUICK,
    "profiling": PROFILING,
    "equal": False,
}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": 1}, "weights"),
        ({"settings": replace(QUICK, seed=1)}, "seed"),
        ({"settings": replace(QUICK, finetune_lr=0.01)}, "finetune_lr"),
        ({"options": {"uniform": {"x": 1}}}, "options"),
        ({"profiling": replace(PROFILING, samples=17)}, "samples"),
        ({"refinement": RefinementOptions(minimum=0.1)}, "refinement"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_comparison_and_sweep_continue_only_where_everything_is_the_same(
    changes: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither trains: reaching the training means that the folder was accepted."""
    monkeypatch.setattr(comparison, "train_dense", _never)
    monkeypatch.setattr("dsa_hw.experiments.sweep.train_dense", _never)

    def ask(experiment: str, model: int = 0, **options: Any) -> None:
        network = net()
        next(network.parameters()).data[0] += model
        wanted = {**ASK, **options, "out": tmp_path / experiment}
        if experiment == "compare":
            compare(network, digits(), BUDGETS[:1], **wanted)
        wanted["options"] = wanted.get("options", {}).get("uniform")
        del wanted["methods"], wanted["equal"]
        sweep(network, BUDGETS[:1], data=digits(), method="uniform", **wanted)

    for experiment in ("compare", "sweep"):
        for _ in range(2):
            with pytest.raises(AssertionError, match="done already"):
                ask(experiment)
        with pytest.raises(
            DsaError, match=rf"different settings \(.*{name}=.+, requested {name}=.+\)\. Choose another"
        ):
            ask(experiment, **changes)


def test_sweep_of_other_budgets_is_not_mixed_into_a_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point starts from the weights of the one before."""
    monkeypatch.setattr("dsa_hw.experiments.front.allocate", _never)
    ask: dict[str, Any] = {"example_inputs": torch.zeros(1, 3, 32, 32), "method": "uniform", "out": tmp_path}
    with pytest.raises(AssertionError):
        sweep(net(), [FlopsBudget("70%"), FlopsBudget("40%")], **ask)
    with pytest.raises(AssertionError):
        sweep(net(), [FlopsBudget("40%"), FlopsBudget("70%")], **ask)
    with pytest.raises(DsaError, match=r"different settings \(budgets=.+, requested budgets=.+\)"):
        sweep(net(), [FlopsBudget("70%"), FlopsBudget("50%"), FlopsBudget("40%")], **ask)


def test_networks_of_another_cost_model_are_not_mixed(tmp_path: Path) -> None:
    groups = find_groups(net(), (torch.zeros(1, 3, 32, 32),))
    cost = budgets.flops(groups)

    class Other:
        def value(self, alpha: torch.Tensor) -> torch.Tensor:
            return cost.value(alpha) * (1 + 0.02 * alpha[..., 0])

        def gradient(self, alpha: Any) -> Any:
            return cost.gradient(alpha)

    folder = RunFolder(tmp_path, {"a": 1})
    pin_cost(folder, cost, groups.sizes)
    pin_cost(folder, Other(), groups.sizes)  # nothing was allocated yet
    pin_cost(folder, cost, groups.sizes)
    folder.add({"id": "one"})
    pin_cost(folder, cost, groups.sizes)
    with pytest.raises(DsaError, match=r"another cost model \(cost model=\S+, requested cost model=.*Use the profile"):
        pin_cost(folder, Other(), groups.sizes)


def test_budgets_that_differ_in_an_option_have_rows_of_their_own(done: tuple[Path, pd.DataFrame]) -> None:
    run = object.__new__(comparison._ComparisonRun)
    run.budgets = [LatencyBudget("50%"), LatencyBudget("50%", quantile=0.95), FlopsBudget("50%", convention="paper")]
    ids = [run._id(i, "dsa") for i in range(3)]
    assert ids == ["latency-50%-dsa", "latency-50%-quantile=0.95-dsa", "flops-50%-convention=paper-dsa"]


def test_random_numbers_of_the_caller_are_given_back() -> None:
    network, asked = net(), [FlopsBudget("70%")]
    torch.manual_seed(7)
    np.random.seed(7)
    expected = (float(torch.rand(())), float(np.random.rand()))
    torch.manual_seed(7)
    np.random.seed(7)
    sweep(network, asked, example_inputs=torch.zeros(1, 3, 32, 32), target="formula/cpu", method="uniform")
    assert (float(torch.rand(())), float(np.random.rand())) == expected


def _never(*args: Any, **options: Any) -> Any:
    raise AssertionError("this was done already")


def test_an_interrupted_call_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = comparison.solve_or_resume

    def interrupted(problem: Any, name: str, *more: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(problem, name, *more)

    wanted = [*BUDGETS[:2], EstimatedEnergyBudget("60%")]
    monkeypatch.setattr(comparison, "solve_or_resume", interrupted)
    ask = {
        "target": "formula/cpu",
        "methods": ("uniform",),
        "settings": QUICK,
        "profiling": PROFILING,
        "out": tmp_path,
        "equal": False,
    }
    with pytest.raises(KeyboardInterrupt):
        compare(net(), digits(), wanted, **ask)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["flops-50%-uniform"]
    table = compare(net(), digits(), wanted, **ask)
    assert list(table["kind"]) == ["dense", "flops", "latency", "estimated_energy"]
    assert table["verdict"].iloc[-1] == "MET"
    assert len(calls) == 4  # one before, one interrupted, two after
    assert len(table) == 4


def test_another_question_in_the_same_folder_is_refused(done: tuple[Path, pd.DataFrame]) -> None:
    out, _ = done
    other = replace(QUICK, epochs=7)
    with pytest.raises(DsaError, match=r"different settings \(epochs=1, requested epochs=7\)"):
        compare(
            net(),
            digits(),
            BUDGETS,
            target="formula/cpu",
            methods=("uniform",),
            settings=other,
            profiling=PROFILING,
            out=out,
        )


def _again(out: Path, wanted: list[Any]) -> pd.DataFrame:
    """Ask the question of ``done`` again."""
    return compare(
        net(), digits(), wanted, target="formula/cpu", methods=("tilted", "uniform"), settings=QUICK,
        profiling=PROFILING, out=out, command="dsa-hw compare --model net",
    )  # fmt: skip


def test_networks_are_judged_by_their_own_budgets_whatever_their_order(
    done: tuple[Path, pd.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "solve_or_resume", _never)
    out, before = done
    copied = Path(shutil.copytree(out, tmp_path / "copy"))
    after = _again(copied, [BUDGETS[i] for i in (1, 2, 0)])
    columns = ["limit", "verdict", "seconds"]
    wanted = before.set_index("id")[columns]
    pd.testing.assert_frame_equal(after.set_index("id")[columns].loc[wanted.index], wanted)


def test_networks_and_histories_must_be_those_of_the_rows(
    done: tuple[Path, pd.DataFrame], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, before = done
    copied = Path(shutil.copytree(out, tmp_path / "copy"))
    (history, *_) = sorted((copied / "histories").iterdir())
    history.write_text(history.read_text().replace("0", "1", 1))
    pd.testing.assert_frame_equal(_again(copied, BUDGETS), before)
    assert f"{history.name} is not the file that was written" in caplog.text
    file = copied / "networks" / f"{slug(before['id'].iloc[1])}.pt"
    content = torch.load(file, weights_only=True)
    correct = content["correct"].clone()
    torch.save({**content, "correct": ~correct}, file)
    with pytest.raises(DsaError, match="not those of its accuracy"):
        _again(copied, BUDGETS)
    content["state_dict"][next(iter(content["state_dict"]))] += 1e-3
    torch.save(content, file)
    (copied / "session.json").unlink()
    with pytest.raises(DsaError, match="not those of its line"):
        _again(copied, BUDGETS)


@pytest.mark.parametrize("change", [{"widths": {"x": 1}}, {"alpha": [0.5]}])
def test_rows_of_another_network_are_refused(
    change: dict[str, Any], done: tuple[Path, pd.DataFrame], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(done[0], tmp_path / "copy"))
    lines = (copied / "rows.jsonl").read_text().splitlines()
    row = {key: value for key, value in json.loads(lines[0]).items() if key != "sha256"}
    (copied / "rows.jsonl").write_text("\n".join([json.dumps(sealed({**row, **change})), *lines[1:]]) + "\n")
    with pytest.raises(DsaError, match="are not of this network"):
        _again(copied, BUDGETS)


def test_a_session_that_cannot_be_read_is_measured_again(
    done: tuple[Path, pd.DataFrame], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, before = done
    copied = Path(shutil.copytree(out, tmp_path / "copy"))
    path = copied / "session.json"
    document = json.loads(path.read_text())
    document["content"]["readings"]["dense"]["low"] = "soon"
    del document["content"]["readings"]["dense"]["cost"]
    path.write_text(json.dumps(sealed({key: value for key, value in document.items() if key != "sha256"})))
    pd.testing.assert_frame_equal(_again(copied, BUDGETS), before)
    assert "Measuring again" in caplog.text


def other(part: str) -> Data:
    """The same data set by name; one pixel of one image is different."""
    data = digits()
    loader = getattr(data, part)
    images = loader.images.clone()
    images[-1, 0, 0, 0] ^= 1
    return replace(data, **{part: replace(loader, images=images)})


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_other_data_of_the_same_name_in_the_same_folder_are_refused(
    part: str, done: tuple[Path, pd.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = done
    with pytest.raises(DsaError, match=rf"different settings \({part}=[0-9a-f]{{8}}, requested {part}=[0-9a-f]{{8}}\)"):
        compare(
            net(),
            other(part),
            BUDGETS,
            target="formula/cpu",
            methods=("uniform",),
            settings=QUICK,
            profiling=PROFILING,
            out=out,
        )
    ask: dict[str, Any] = {
        "target": "formula/cpu",
        "method": "uniform",
        "settings": QUICK,
        "profiling": PROFILING,
        "out": tmp_path,
    }
    monkeypatch.setattr("dsa_hw.experiments.sweep.train_dense", _never)
    for _ in range(2):  # the same data are let in, twice
        with pytest.raises(AssertionError):
            sweep(net(), BUDGETS[:1], data=digits(), **ask)
    with pytest.raises(DsaError, match=rf"different settings \({part}=[0-9a-f]{{8}}, requested {part}=[0-9a-f]{{8}}\)"):
        sweep(net(), BUDGETS[:1], data=other(part), **ask)


def test_a_latency_budget_on_another_target_is_refused(tmp_path: Path) -> None:
    elsewhere = [LatencyBudget("50%", target="torch/cpu")]
    with pytest.raises(BudgetError, match="on one target"):
        compare(net(), digits(), elsewhere, target="formula/cpu", methods=("uniform",), out=tmp_path)


def test_an_impossible_budget_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsa_hw.experiments.dense.finetune", _never)
    with pytest.raises(InfeasibleBudgetError, match="cannot be met"):
        compare(
            net(),
            digits(),
            [FlopsBudget("0.01%")],
            target="formula/cpu",
            methods=("uniform",),
            settings=QUICK,
            profiling=PROFILING,
            out=tmp_path,
        )


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {"a": 1})
    folder.add({"id": "one"})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"id": "tw')
    assert list(folder.rows()) == ["one"]
    folder.add({"id": "three"})
    assert list(folder.rows()) == ["one", "three"]


@pytest.mark.parametrize("share", [0.35, 0.6, 0.9])
def test_match_comes_close_by_the_model(share: float) -> None:
    groups = find_groups(net(), (torch.zeros(1, 3, 32, 32),))
    cost = budgets.flops(groups)

    def latency(widths: Any) -> float:
        alpha = widths / groups.sizes
        return 0.1 + float(alpha[0] * alpha[1] + 3 * alpha[1] * alpha[2])

    aim = share * latency(groups.sizes)
    found = match_latency(np.full(len(groups), 0.5), groups.sizes, cost, latency, aim, np.full(len(groups), 4))
    assert found.seconds == pytest.approx(aim, rel=0.03)
    assert found.seconds == latency(found.widths)
    assert float(cost(found.widths / groups.sizes)) <= found.limit


def test_sweep_is_monotone_and_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [LatencyBudget(f"{p}%") for p in (40, 80, 60)]
    table = sweep(
        net(),
        asked,
        data=digits(),
        target="formula/cpu",
        method="uniform",
        settings=QUICK,
        profiling=PROFILING,
        out=tmp_path,
    )
    assert list(table["asked"]) == ["80%", "60%", "40%"]
    assert table["measured"].is_monotonic_decreasing
    assert (table["measured"] <= table["limit"]).all()
    assert (table["verdict"] == Verdict.MET).all()
    assert (table["utilisation"] > 0.9).all()
    for plan in table["plan"]:
        assert Certificate.from_dict(Plan.load(tmp_path / plan).certificate).verdict == Verdict.MET
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert len(pd.read_csv(tmp_path / "front.csv")) == 3
    monkeypatch.setattr("dsa_hw.experiments.front.allocate", _never)
    again = sweep(
        net(),
        asked,
        data=digits(),
        target="formula/cpu",
        method="uniform",
        settings=QUICK,
        profiling=PROFILING,
        out=tmp_path,
    )
    pd.testing.assert_frame_equal(again, table)


def test_a_budget_that_cannot_be_kept_ends_the_front_and_does_not_undo_it(tmp_path: Path) -> None:
    asked = [LatencyBudget("80%"), LatencyBudget("0.1%"), LatencyBudget("0.2%")]
    settings = {
        "data": digits(),
        "target": "formula/cpu",
        "method": "uniform",
        "settings": QUICK,
        "profiling": PROFILING,
    }
    table = sweep(net(), asked, **settings, out=tmp_path)
    assert list(table["asked"]) == ["80%"]
    assert list(table.attrs["infeasible"]) == ["0.2%", "0.1%"]
    assert "narrowest network" in table.attrs["infeasible"]["0.1%"]
    assert len(pd.read_csv(tmp_path / "front.csv")) == 1
    with pytest.raises(InfeasibleBudgetError, match="cannot be met"):
        sweep(net(), asked[1:], **settings)


def test_sweep_of_two_kinds_is_refused() -> None:
    with pytest.raises(BudgetError, match="one kind"):
        sweep(net(), [LatencyBudget("50%"), FlopsBudget("50%")], target="formula/cpu")


def test_sweep_of_a_counted_cost_without_data() -> None:
    inputs = torch.zeros(1, 3, 32, 32)
    asked = [FlopsBudget("70%"), FlopsBudget("40%")]
    table = sweep(net(), asked, example_inputs=inputs, target="formula/cpu", method="uniform")
    assert table["accuracy"].isna().all()
    assert (table["measured"] <= table["limit"]).all()
