"""Budget in, certified network out: profile, fit, allocate, shrink, measure, correct, certify."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import nn

import dsa_hw
from budgets import Budget
from budgets.notation import BudgetLike, as_budgets
from dsa_hw.channels import find_groups
from dsa_hw.channels.plan import Plan, PrunedNetwork, input_types
from dsa_hw.errors import DsaError, ModelError
from dsa_hw.methods.checkpoint import solve_or_resume
from dsa_hw.methods.problem import Batches, Loss, Problem, Proposal
from dsa_hw.methods.registry import check_method
from dsa_hw.methods.synthetic import own_targets, synthetic_batch_size
from dsa_hw.pipeline.certificate import Certificate, entry_of
from dsa_hw.pipeline.constraints import Constraint, common_grid, cost_set, resolve_budgets
from dsa_hw.pipeline.cost_models import FITTING, Task
from dsa_hw.pipeline.example_inputs import example_for
from dsa_hw.pipeline.model_inputs import loader_inputs
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.quality import Metric, Quality, Source, check_metric, measure_quality, quality_on_noise
from dsa_hw.pipeline.quantised import Calibration, calibration_inputs, certified_quality, int8_meters, quantise_all
from dsa_hw.pipeline.recovering import check_level, recover_network
from dsa_hw.pipeline.refinement import Candidate, best_candidate, candidates_table, find_network
from dsa_hw.pipeline.result import Allocation
from dsa_hw.pipeline.stages import (
    GUIDE,
    MEASURING_STAGES,
    PASSING_STAGES,
    STAGES,
    expected_measurement,
    expected_seconds,
)
from dsa_hw.pipeline.unlabelled import UnlabelledSet, unlabelled_set
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.fingerprints import check_loader
from dsa_hw.training.loaders import equal_batches
from dsa_hw.training.losses import Step, chosen_loss
from dsa_hw.utils.files import only_process
from dsa_hw.utils.inputs import as_path, check_model
from dsa_hw.utils.modules import check_finite_inputs, check_finite_outputs, check_finite_weights, weights_digest
from dsa_hw.utils.numbers import check_seed
from dsa_hw.utils.progress import Bar
from dsa_hw.utils.records import Log, recorder
from dsa_hw.zoo.constructors import constructor_of
from profilers.networks.quantised import QuantisedNetwork
from profilers.profiling.events import Event

if TYPE_CHECKING:
    from profilers.targets import Target

__all__ = ["allocate", "as_problem", "check_budgets"]


def allocate(
    model: nn.Module,
    budget: BudgetLike | Sequence[BudgetLike],
    *,
    example_inputs: Any = None,
    train: Batches | None = None,
    val: Batches | None = None,
    loss: Loss | None = None,
    step: Step | None = None,
    metric: Metric | None = None,
    images: str | os.PathLike[str] | Iterable[Any] | None = None,
    recovery: str = "auto",
    target: str | Target | None = None,
    method: str | Proposal = "dsa",
    options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
    profiling: ProfileOptions | None = None,
    refinement: RefinementOptions | None = None,
    log: Log | None = None,
) -> Allocation:
    """Return a smaller network within every budget, measured on the target, with a certificate.

    Args:
        model: Any network that ``torch.export`` traces; not changed.
        budget: One budget or several: ``LatencyBudget("5ms")`` or, as on the command line, ``"latency=5ms"``.
        example_inputs: A tensor or a tuple of tensors; None takes them from the first batch of ``train``, ``val`` or
            ``images``, or infers them from the first layer.
        train: Loader of (inputs, targets). With ``val``, weights and keep ratios are learned together.
        val: Loader of (inputs, targets). Alone, only the keep ratios are learned.
        loss: ``loss(outputs, targets)``, a scalar; None is the cross entropy, or for a loader of dicts, which are the
            arguments of the network, the loss that it returns.
        step: ``step(model, batch)`` instead of ``loss``, for networks that compute their own loss and for batches of
            any form. Steps of the keep ratios call it with the network in evaluation mode; if it needs training mode,
            it calls ``model.train()`` first.
        metric: ``metric(outputs, targets)``, a score for each input or one for the batch, more is better: what the
            certificate says of ``val``. None is the accuracy; with ``step``, the negative loss.
        images: Inputs without labels, a few hundred in all: batches of inputs, or a folder of image files. Without
            loaders they guide the keep ratios, with the answers of the dense network as targets, and an eighth is held
            out to compare the networks. The recovery uses them; None takes those of ``train`` or ``val``. Without
            loaders too, inputs are synthesised that match the network's own batch-norm statistics.
        recovery: "refit" refits the weights that remain to the outputs of the dense network, in closed form; "distil"
            also trains them on these outputs; "none" leaves them as they were cut, and synthesises nothing. "auto" is
            "distil" without loaders, else "refit". Weights that a method has trained are left as they are.
        target: Where measured budgets hold that name no target, for example ``"onnxruntime/cpu"``. None is ONNX Runtime
            on the CPU, or the best runtime of the CUDA device that the model is on. With ``"onnxruntime/cpu int8"`` the
            budget and the quality in the certificate are those of the quantised network.
        method: Name of the method, or a proposal of an earlier allocation of this network (``result.proposal``), whose
            keep ratios are projected to the new budgets.
        options: Settings of the method by name. Every method knows ``epochs``, a bound on its training.
        out: Folder for the result and everything that was measured and trained, so that the same call continues after
            an interruption. A path ending in ``.sqlite`` keeps the measurements only.
        seed: Seed of everything random.
        progress: Whether to show a progress bar on a terminal.
        profiling: How cost models are obtained.
        refinement: How keep ratios become a network.
        log: Called with a dict when a stage begins, for each step of the keep ratios, for each measured network and for
            the result. `dsa_hw.integrations.loggers` has some for TensorBoard, MLflow and Weights & Biases.

    Returns:
        The network, its plan and its certificate. Where the measurement of the result cannot tell whether a budget is
        met, the verdict is INCONCLUSIVE, and no error is raised.

    Raises:
        InfeasibleBudgetError: No configuration meets a budget; raised before anything is trained.
        MeasurementError: Too few configurations could be measured.

    Example:
        >>> import dsa_hw, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
        >>> result = dsa_hw.allocate(
        ...     model, dsa_hw.FlopsBudget("50%"), example_inputs=torch.zeros(1, 3, 8, 8), method="uniform"
        ... )
        >>> result.widths.to_dict()
        {'0': 8}
        >>> str(result.certificate.verdict)
        'MET'
    """
    budgets = check_budgets(budget)
    check_model(model)
    check_seed(seed)
    check_level(recovery)
    chosen = chosen_loss(loss, step)
    if isinstance(method, str):
        check_method(method)
    elif not isinstance(method, Proposal):
        raise DsaError(f"`method` must be the name of a method or a Proposal; got {method!r}.")
    refinement = refinement or RefinementOptions()
    profiling = profiling or ProfileOptions()
    check_finite_weights(model, "the network")
    inputs = example_for(model, example_inputs, {"train": train, "val": val, "images": images})
    check_finite_inputs(inputs)
    folder, store = _places(out)
    record = recorder(log)
    with Bar(progress, STAGES, MEASURING_STAGES, record) as bar, only_process(folder):
        bar.enter("channels")
        groups = find_groups(model, inputs)
        if not len(groups):
            raise ModelError("The network has no channel group that can be pruned. dsa-hw inspect shows the reasons.")
        check_finite_outputs(model, inputs)
        check_metric(model, val, metric)
        check_loader(model, images, "images", labelled=False)

        def on_profile(event: Event) -> None:
            if event.stage == FITTING:
                bar.expect(expected_measurement(bar.enter("cost model")))
            else:
                bar.enter("profile")
            bar(event)

        task = Task(model, groups, inputs, profiling, refinement.minimum, seed, store, on_profile)
        if bar.shown:
            epochs = options.get("epochs") if isinstance(options, Mapping) else None
            bar.expect(
                expected_seconds(task, budgets, train=train, val=val, images=images, recovery=recovery, epochs=epochs),
                PASSING_STAGES,
            )
        constraints = resolve_budgets(budgets, task, target or _default_target(model))
        unlabelled: UnlabelledSet | None = None
        guide = val
        if train is None and val is None and (images is not None or recovery != "none"):
            bar.enter("inputs")
            unlabelled = unlabelled_set(model, inputs, images, seed=seed, listener=bar.say)
            if unlabelled is not None:
                guide, chosen = own_targets(model, unlabelled.used, synthetic_batch_size(inputs, GUIDE))
        problem = as_problem(
            task, constraints, refinement, train=train, val=guide, loss=chosen, options=options, progress=progress,
            log=record,
        )  # fmt: skip
        if isinstance(method, str):
            bar.enter("allocation")
            bar.say(method)
            proposal = solve_or_resume(problem, method, folder)
        else:
            proposal = method
        check_finite_weights(proposal.model, "the network that the method returned")

        def say(what: str, _: float) -> None:  # the most networks that may be measured are seldom needed
            bar.say("measuring and correcting", None, what)

        bar.enter("measurement")
        candidates, found = find_network(
            problem, proposal, constraints, refinement, reading_limit=profiling.reading_limit, listener=say
        )
        data = train if train is not None else val
        done = ""
        bar.enter("recovery")

        def on_recovery(text: str, share: float) -> None:
            what, _, layer = text.partition(" ")
            bar.enter("distillation" if what == "distilling" else "recovery")
            bar.say(what, share, layer)

        if weights_digest(proposal.model) == weights_digest(model):
            if unlabelled is None and (images is not None or data is not None):
                given = images if images is not None or data is None else loader_inputs(data, model, inputs)
                if given is not None or recovery != "none":
                    unlabelled = unlabelled_set(model, inputs, given, seed=seed, listener=bar.say)
                elif data is not None:
                    recalibrate(found.model, data, loss=chosen)
            done = recover_network(problem, found, unlabelled, recovery, on_recovery, labelled=data is not None)
        elif data is not None:
            recalibrate(found.model, data, loss=chosen)
        bar.enter("certificate")
        check_finite_weights(found.model, "the pruned network")
        check_finite_outputs(found.model, inputs, "the pruned network")

        def compare(network: nn.Module) -> Quality:
            return _quality(model, network, val, train, unlabelled, metric, step, inputs, seed, bar)

        networks: dict[str, QuantisedNetwork] = {}
        calibrations: tuple[Calibration, ...] = ()
        meters = int8_meters(c.meter for c in constraints)
        if meters:
            bar.say("quantising, and measuring fp32 and int8 side by side")
            sources: list[tuple[Source, Batches | None]] = [("training data", train), ("validation data", val)]
            if unlabelled is not None and (images is not None or (train is None and val is None)):
                used = unlabelled.used
                sources.insert(0, (unlabelled.source, [used if len(used) > 1 else used[0]]))
            calibration = calibration_inputs(model, inputs, sources, seed)
            networks, calibrations = quantise_all(
                model, found.model, inputs, meters, calibration, compare, profiling.reading_limit
            )
        quality = certified_quality(calibrations) or compare(found.model)
    best = best_candidate(candidates)
    rounds = candidates_table(constraints, candidates)
    for number, candidate in enumerate(candidates, 1):
        record({"stage": "measuring", "step": number, **_measured(candidate)})
    certificate = _certificate(constraints, best, len(candidates), quality, refinement.confidence)
    certificate = replace(certificate, int8=calibrations)
    names = list(groups.names)
    plan = Plan.of(groups, found.kept, certificate.to_dict(), PrunedNetwork.of(found.model, inputs))
    result = Allocation(
        model=found.model,
        plan=replace(plan, types=input_types(inputs), constructor=constructor_of(model, inputs)),
        certificate=certificate,
        widths=pd.Series(best.widths, index=names, name="width"),
        keep_ratios=pd.Series(best.widths / groups.sizes, index=names, name="keep_ratio"),
        history=proposal.history,
        rounds=rounds,
        inputs=inputs,
        constraints=tuple(constraints),
        proposal=proposal,
        recovery=done,
        quantised=networks,
    )
    record({"stage": "result", "step": 0, **_summary(result)})
    if folder is not None:
        result.save(folder)
    return result


def check_budgets(budget: Any) -> list[Budget]:
    """Return one budget or several as a list.

    Raises:
        BudgetError: There is none, or something is not a budget.
    """
    return as_budgets(budget)


def as_problem(
    task: Task,
    constraints: Sequence[Constraint],
    refinement: RefinementOptions,
    *,
    train: Batches | None = None,
    val: Batches | None = None,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
    folder: Path | None = None,
    log: Log | None = None,
) -> Problem:
    """Return the problem that a method solves.

    Args:
        task: The network.
        constraints: One for each budget.
        refinement: Smallest keep ratio and ranking of channels.
        train: Loader for the weights.
        val: Loader for the keep ratios.
        loss: ``loss(outputs, targets)``; None is the cross entropy.
        options: Settings of the method, ``epochs`` among them.
        progress: Whether methods show progress bars.
        folder: Where a method that trains keeps its unfinished work.
        log: Called with a dict for each step.

    Returns:
        The problem, on the grid that suits every target.
    """
    if options is not None and not isinstance(options, Mapping):
        raise DsaError(f"`options` must map names of options to values; got {options!r}.")
    for name, loader in (("train", train), ("val", val)):
        check_loader(task.model, loader, name, loss)
    settings = dict(options or {})
    epochs = settings.pop("epochs", None)
    return Problem(
        task.model,
        task.groups,
        cost_set(constraints, task.groups.sizes),
        example_inputs=task.inputs,
        grid=common_grid(constraints, len(task.groups)),
        train=train,
        val=val,
        loss=loss or nn.functional.cross_entropy,
        importance=refinement.importance,
        minimum=refinement.minimum,
        epochs=epochs,
        seed=task.seed,
        progress=progress,
        folder=folder,
        options=settings,
        log=log,
    )


def _default_target(model: nn.Module) -> str:
    """Return ONNX Runtime on the CPU, or the best runtime of the CUDA device that the model is on."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        return "onnxruntime/cpu"
    return f"auto/{parameter.device}"


def _places(out: str | Path | None) -> tuple[Path | None, Path | None]:
    """Return the folder of results and the store of measurements."""
    if out is None:
        return None, None
    path = as_path(out, "out")
    if path.suffix == ".sqlite":
        return None, path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DsaError(f"Cannot make the folder {path}: {error.strerror}. Choose another out.") from error
    return path, path / "profile.sqlite"


def _certificate(
    constraints: Sequence[Constraint], best: Candidate, measurements: int, quality: Quality, confidence: float
) -> Certificate:
    entries = tuple(
        entry_of(c.budget, c.meter, float(best.predicted[j]), best.readings[j], best.dense[j], confidence)
        for j, c in enumerate(constraints)
    )
    versions = {package: importlib.metadata.version(package) for package in ("torch", "numpy", "scikit-learn")}
    versions = {"dsa_hw": dsa_hw.__version__, **versions}
    return Certificate(entries, time.strftime("%Y-%m-%d"), measurements, quality, versions)


def _measured(candidate: Candidate) -> dict[str, Any]:
    """Return what a log says of a measured network: of budget j, ``predicted_j``, ``measured_j`` and ``used_j``."""
    found: dict[str, Any] = {"verdict": str(candidate.verdict)}
    for j, (reading, judgement) in enumerate(zip(candidate.readings, candidate.judgements, strict=True)):
        found[f"predicted_{j}"], found[f"measured_{j}"] = float(candidate.predicted[j]), float(reading.value)
        found[f"used_{j}"] = float(judgement.used)
    return found


def _summary(result: Allocation) -> dict[str, Any]:
    """Return what a log says of a result."""
    found: dict[str, Any] = {"verdict": str(result.certificate.verdict), "utilisation": result.certificate.utilisation}
    for name, interval in (("quality", result.quality.value), ("dense quality", result.quality.dense)):
        if interval is not None:
            found[name] = interval.value
    kept = {f"keep ratio {name}": float(ratio) for name, ratio in result.keep_ratios.items()}
    return {**found, "measure": result.quality.measure, **kept}


def _quality(
    dense: nn.Module,
    pruned: nn.Module,
    val: Batches | None,
    train: Batches | None,
    unlabelled: UnlabelledSet | None,
    metric: Metric | None,
    step: Step | None,
    inputs: tuple[Any, ...],
    seed: int,
    bar: Bar,
) -> Quality:
    """Compare the two networks on the best data there are."""
    sources: list[tuple[Source, Batches | None]] = [("validation data", val), ("training data", train)]
    if unlabelled is not None:
        sources.append((unlabelled.source, [(part, None) for part in equal_batches(unlabelled.held_out)]))
    for source, data in sources:
        if data is not None:
            return measure_quality(dense, pruned, data, source=source, metric=metric, step=step, listener=bar.say)
    return quality_on_noise(dense, pruned, inputs, seed)
