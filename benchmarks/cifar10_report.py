"""Tables and pictures of the CIFAR-10 studies, from the rows that `cifar10.py` recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import t

from dsa_hw import find_groups
from dsa_hw.zoo.models import load_model

NETWORKS = {"resnet20": "ResNet-20", "resnet56": "ResNet-56", "vgg": "quarter VGG-16"}
PLAIN = ("dsa", "uniform", "global_gamma", "ssl", "morphnet", "netadapt", "annealing", "knapsack", "torch_pruning")


def write_report(rows: pd.DataFrame, pictures: Path) -> None:
    """Print every table and draw every picture."""
    for column in ("finish", "order"):
        rows[column] = rows[column].fillna("") if column in rows else ""
    recovered = rows[rows["finish"] == "recovered"]
    shared = recovered[recovered["order"] == "elimination"]
    _allocation_only(shared, pictures / "cifar10_allocation.png")
    _product(shared[shared["method"] == "dsa"])
    rows = rows[rows["finish"] == ""]
    for study in ("resnet20", "vgg"):
        part = rows[(rows["study"] == study) & (rows["method"] != "dense")]
        if len(part):
            _table(study, part)
            _accuracies(study, part, pictures / f"cifar10_{study}.png")
            _heat_map(study, part, pictures / f"cifar10_{study}_widths.png")
    for study in sorted(s for s in set(rows["study"]) if s.startswith("scratch")):
        _scratch_table(study, rows[rows["study"] == study])
    for study in ("guidance", "rationality", "overhead"):
        part = rows[rows["study"] == study].dropna(axis=1, how="all")
        hidden = ["widths", "torch", "study", "kept", "seconds", "groups", "gradient"]
        print(f"\n{study}\n\n{_markdown(part.drop(columns=hidden, errors='ignore'))}\n")
        if study == "rationality" and len(part):
            _scatter(part.iloc[-1], pictures / "cifar10_rationality.png")


def paired(first: pd.Series, second: pd.Series) -> tuple[float, float, int]:
    """Return mean and half of the 95% interval of the difference over the seeds that both have, and their number."""
    gap = (first - second).dropna()
    half = float(t.ppf(0.975, len(gap) - 1) * gap.std() / len(gap) ** 0.5) if len(gap) > 1 else np.nan
    return float(gap.mean()), half, len(gap)


def _allocation_only(rows: pd.DataFrame, path: Path) -> None:
    """Methods that share ranking, recovery and finish: mean, every seed, and the lead of DSA seed by seed."""
    leads = []
    for value, title in (("before", "before fine-tuning"), ("accuracy", "after 2 epochs")):
        for (study, budget), part in rows.dropna(subset=[value]).groupby(["study", "budget"]):
            part = part.drop_duplicates(["method", "seed"], keep="last")
            cells = 100 * part.pivot(index="seed", columns="method", values=value)
            if "dsa" not in cells or len(cells.columns) < 2:
                continue
            lines = []
            for method in cells.mean().sort_values(ascending=False).index:
                found, lead = cells[method].dropna(), ""
                if method != "dsa":
                    mean, half, count = paired(cells["dsa"], cells[method])
                    lead = f"{mean:+.2f}" + (f" ± {half:.2f}" if count > 1 else "")
                    name = f"{NETWORKS[str(study)]}, {100 * float(str(budget)):.0f}%, {title}: {method} ({count})"
                    leads.append((name, mean, half))
                seeds = ", ".join(f"{one:.2f}" for one in found)
                lines.append([method, f"{found.mean():.2f}", seeds, lead])
            head = ["method", "mean [%]", "by seed [%]", "lead of dsa [points], 95% interval"]
            where = f"{study} at {100 * float(str(budget)):.0f}% FLOPs, {title}"
            print(f"\nallocation only: {where}\n\n{_markdown(pd.DataFrame(lines, columns=head))}\n")
    if not leads:
        return
    figure, axis = plt.subplots(figsize=(9, 0.8 + 0.3 * len(leads)), layout="constrained")
    places = list(range(len(leads)))[::-1]
    spread = [0.0 if np.isnan(half) else half for _, _, half in leads]
    axis.errorbar([mean for _, mean, _ in leads], places, xerr=spread, fmt="o", capsize=3, color="black")
    axis.axvline(0.0, color="grey", linewidth=1)
    axis.set_yticks(places, [name for name, _, _ in leads], fontsize=8)
    axis.set_xlabel("lead of DSA [points], mean and 95% interval over paired seeds (number of seeds)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _product(rows: pd.DataFrame) -> None:
    """DSA as it ships."""
    lines = []
    for (study, budget), part in rows.sort_values("seed").groupby(["study", "budget"]):
        cells = [NETWORKS[str(study)], f"{100 * float(str(budget)):.0f}%"]
        for name in ("before", "accuracy"):
            found = 100 * part.dropna(subset=[name]).drop_duplicates("seed")[name] if name in part else pd.Series()
            seeds = ", ".join(f"{one:.2f}" for one in found)
            cells.append(f"{found.mean():.2f} ({seeds})" if len(found) > 1 else seeds)
        lines.append(cells)
    head = ["network", "FLOPs", "before [%]", "after 2 epochs [%]"]
    print(f"\nproduct\n\n{_markdown(pd.DataFrame(lines, columns=head))}\n")


def _table(study: str, part: pd.DataFrame) -> None:
    """Mean and every seed's accuracy, best mean at the hardest budget first."""
    for budget, at in part.sort_values("seed").groupby("budget"):
        found = at.groupby("method").agg(
            {"accuracy": ["mean", "std", list], "before": "mean", "allocate_cpu_s": "mean"}
        )
        lines = []
        line: Any  # a row with two levels of names
        for method, line in found.sort_values(("accuracy", "mean"), ascending=False).iterrows():
            seeds = ", ".join(f"{100 * a:.2f}" for a in line["accuracy", "list"])
            mean, spread = 100 * line["accuracy", "mean"], 100 * line["accuracy", "std"]
            shown = f"{mean:.2f}" + (f" ({spread:.2f})" if np.isfinite(spread) else "")
            before, seconds = 100 * line["before", "mean"], line["allocate_cpu_s", "mean"]
            lines.append([method, shown, seeds, f"{before:.1f}", f"{seconds:.0f}"])
        head = ["method", "accuracy (deviation) [%]", "by seed", "before [%]", "CPU s to allocate"]
        print(
            f"\n{study} at {100 * float(str(budget)):.0f} % FLOPs\n\n{_markdown(pd.DataFrame(lines, columns=head))}\n"
        )


def _scratch_table(study: str, part: pd.DataFrame) -> None:
    """Accuracies by seed, and how far below the dense network of the same seed: mean and standard error."""
    cells = 100 * part.pivot(index="method", columns="seed", values="accuracy")
    below = cells.reindex(["dense"]).iloc[0] - cells  # nothing where the dense network has not been trained yet
    lines = []
    for method in cells.mean(axis=1).sort_values(ascending=False).index:
        found, gap = cells.loc[method].dropna(), below.loc[method].dropna()
        shown = f"{gap.mean():.2f}" + (f" ± {gap.std() / len(gap) ** 0.5:.2f}" if len(gap) > 1 else "")
        seeds = ", ".join(f"{int(seed)}: {value:.2f}" for seed, value in found.items())
        lines.append([method, f"{found.mean():.2f}", seeds, shown if method != "dense" and len(gap) else ""])
    head = ["method", "mean [%]", "by seed [%]", "below dense, mean ± s.e."]
    print(f"\n{study}\n\n{_markdown(pd.DataFrame(lines, columns=head))}\n")


def _plain(part: pd.DataFrame) -> pd.DataFrame:
    """Without variants: names of one word."""
    return part[part["method"].isin(PLAIN)]


def _accuracies(study: str, part: pd.DataFrame, path: Path) -> None:
    part = _plain(part)
    cells = part.groupby(["method", "budget"])["accuracy"].agg(["mean", "min", "max"])
    order = cells["mean"].groupby("method").mean().sort_values(ascending=False).index
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for place, method in enumerate(order):
        line = 100 * cells.loc[method]
        spread = [line["mean"] - line["min"], line["max"] - line["mean"]]
        where = 100 * line.index.to_numpy() + 0.25 * (place - len(order) / 2)  # side by side, to be told apart
        emphasis = {"linewidth": 2.5, "zorder": 5, "color": "black"} if method == "dsa" else {"alpha": 0.85}
        axes[0].errorbar(where, line["mean"], spread, fmt="o-", capsize=3, markersize=4, label=method, **emphasis)
    axes[0].set(
        xlabel="FLOPs kept [%]", ylabel="test accuracy after 2 epochs [%]", title=f"{study}: mean and range of seeds"
    )
    axes[0].set_xticks([100 * budget for budget in sorted(part["budget"].unique())])
    axes[0].legend(fontsize=8)
    sizes = _sizes(study)
    for _, row in part[(part["method"] == "dsa") & (part["seed"] == 0)].sort_values("budget").iterrows():
        ratio = [row["widths"][name] / sizes[name] for name in sizes]
        axes[1].plot(ratio, "o-", label=f"{100 * row['budget']:.0f} % FLOPs", markersize=4)
    _name_groups(axes[1], sizes)
    axes[1].set(ylabel="keep ratio", ylim=(0, 1.05), title="DSA: keep ratio per channel group")
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _heat_map(study: str, part: pd.DataFrame, path: Path) -> None:
    part = _plain(part)
    part = part[(part["seed"] == 0) & (part["budget"] == part["budget"].min()) & part["widths"].notna()]
    part = part.sort_values("accuracy", ascending=False)
    sizes = _sizes(study)
    ratios = np.array([[row["widths"][name] / sizes[name] for name in sizes] for _, row in part.iterrows()])
    figure, axis = plt.subplots(figsize=(10, 4.5), layout="constrained")
    image = axis.imshow(ratios, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(ratios):
        axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value < 0.6 else "black")
    axis.set_yticks(
        range(len(part)), [f"{m} ({100 * a:.1f} %)" for m, a in zip(part["method"], part["accuracy"], strict=True)]
    )
    _name_groups(axis, sizes)
    axis.set_title(f"{study} at {100 * part['budget'].iloc[0]:.0f} % FLOPs, seed 0: keep ratio per channel group")
    figure.colorbar(image, label="keep ratio")
    figure.savefig(path, dpi=110)


def _scatter(row: pd.Series, path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for axis, (share, kept) in zip(axes, row["kept"].items(), strict=True):
        axis.scatter(row["gradient"], kept["rise"])
        for name, x, y in zip(row["groups"], row["gradient"], kept["rise"], strict=True):
            axis.annotate(name.removesuffix(".conv1"), (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axis.set(
            xscale="log",
            xlabel="|dL / d alpha|",
            ylabel="rise of the loss",
            title=f"kept {100 * float(share):.0f} % of one group, rank correlation {kept['spearman']:.2f}",
        )
        axis.title.set_fontsize(9)
    figure.savefig(path, dpi=110)


def _name_groups(axis: Any, names: Any) -> None:
    axis.set_xticks(range(len(names)), list(names), rotation=60, ha="right", fontsize=7)


def _markdown(frame: pd.DataFrame) -> str:
    lines = [list(map(str, frame.columns)), ["---"] * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sizes(study: str) -> dict[str, int]:
    model, inputs = load_model({"resnet20": "resnet20_a", "vgg": "vgg16_quarter"}[study])
    groups = find_groups(model, inputs)
    return dict(zip(groups.names, groups.sizes.tolist(), strict=True))
