"""Load a saved result again: from a folder, or from the Hugging Face hub.

Everything in such a folder is data of somebody else (SECURITY.md). Files have fixed names, sizes have limits, hashes
are compared, and the network is made by a constructor of a fixed list or by the user's own code.
"""

from __future__ import annotations

import os
from typing import Any, Final

from torch import nn

from dsa_hw.channels.plan import Plan
from dsa_hw.channels.surgery import first_difference
from dsa_hw.errors import ModelError, PlanError
from dsa_hw.pipeline.result import WEIGHTS, check_files
from dsa_hw.pipeline.verification import plan_inputs, pruned_network, weights_beside
from dsa_hw.utils.documents import MAX_BYTES
from dsa_hw.utils.inputs import as_path, check_model
from dsa_hw.utils.modules import check_finite_weights
from dsa_hw.utils.text import one_line
from dsa_hw.zoo.pretrained import hub_snapshot

__all__ = ["dense_network", "from_hub", "load"]

_PLAN: Final = "plan.json"
_LIMITS: Final = {_PLAN: MAX_BYTES, WEIGHTS: 16 * 2**30}  # bytes of the files that are loaded


def load(folder: str | os.PathLike[str], model: nn.Module | None = None, *, example_inputs: Any = None) -> nn.Module:
    """Return the pruned network of a folder that `Allocation.save` wrote.

    Hashes of the files, weights and some outputs are compared with the plan.

    Args:
        folder: The folder, or its plan.json.
        model: The dense network, made by its own constructor; its weights do not matter, and it is not changed. None
            makes it from the record in the plan, which networks of torchvision, timm and transformers have.
        example_inputs: Needed only where the network takes something other than tensors by position.

    Returns:
        The network with its weights, in evaluation mode.

    Raises:
        PlanError: The folder has no plan or no weights, a file is damaged or of another result, the plan does not
            belong to the network, or ``model`` is needed.
        ModelError: The network cannot be made, or the weights cannot be read.
        MissingDependencyError: The library of the network is not installed.

    Example:
        >>> import dsa_hw, tempfile, torch
        >>> from dsa_hw.zoo.models import load_model
        >>> model, example = load_model("resnet20")
        >>> result = dsa_hw.allocate(model, "flops=50%", example_inputs=example, method="uniform", recovery="none")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     small = dsa_hw.load(result.save(folder))
        >>> torch.equal(small(*example), result.model(*example))
        True
    """
    path = as_path(folder, "folder")
    if path.name == _PLAN and not path.is_dir():
        path = path.parent
    if model is not None:
        check_model(model)
    if not (path / _PLAN).exists():
        raise PlanError(
            f"{one_line(path)} has no {_PLAN}. Give a folder that Allocation.save or dsa-hw allocate wrote."
        )
    plan = Plan.load(path / _PLAN)
    check_files(plan, path)
    weights = weights_beside(plan, path)
    if weights is None:
        raise PlanError(f"{one_line(path)} has no {WEIGHTS}, or its plan has no hash of it. Save the result again.")
    model = dense_network(plan) if model is None else model
    inputs = plan_inputs(plan, model, example_inputs)
    small = pruned_network(model, plan, inputs, weights)
    plan.check_network(small, inputs, str(weights))
    check_finite_weights(small, "the pruned network")
    return small.eval()


def from_hub(repository: str, model: nn.Module | None = None, *, example_inputs: Any = None) -> nn.Module:
    """Return the pruned network of a repository that `Allocation.push_to_hub` made.

    plan.json and model.safetensors of one commit are downloaded, after a look at their sizes, into the cache of
    huggingface_hub; without network access they are taken from there.

    Args:
        repository: ``org/name``, or ``org/name@revision`` for a branch, a tag or a commit.
        model: As for `load`.
        example_inputs: As for `load`.

    Raises:
        ModelError: There is no such repository, a file is missing or too large, or there is no network.
        PlanError: As for `load`.
        MissingDependencyError: huggingface_hub, or the library of the network, is not installed.
    """
    return load(hub_snapshot(repository, _LIMITS), model, example_inputs=example_inputs)


def dense_network(plan: Plan) -> nn.Module:
    """Make the dense network of a plan, with random weights, from the record of its constructor.

    Raises:
        PlanError: The plan has none, or it makes another network.
        ModelError: It is not permitted, or fails.
        MissingDependencyError: Its library is not installed.
    """
    if plan.constructor is None:
        raise PlanError(
            "The plan does not say how to make its network, because that is not one of torchvision, timm or "
            "transformers with its usual arguments. Make it with your own code: dsa_hw.load(folder, model=MyNet())."
        )
    try:
        described = plan.constructor.build("meta")  # without memory: the record may ask for more than there is
    except ModelError:  # some constructors compute with the values of tensors
        described = plan.constructor.build()
    if found := first_difference(described, plan.shapes):
        raise PlanError(f"{plan.constructor} makes another network than that of the plan: {found} in the plan.")
    return plan.constructor.build()
