"""Example inputs are accepted in three forms, and rejected with a typed error otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_hw.errors import ModelError
from dsa_hw.utils.inputs import as_inputs, as_tensors

X = torch.zeros(1, 2)


def test_tensor_sequence_and_mapping_become_arguments_of_forward() -> None:
    assert as_inputs(X) == ((X,), {})
    assert as_inputs([X, 3]) == ((X, 3), {})
    assert as_inputs({"x": X}) == ((), {"x": X})


@pytest.mark.parametrize("wrong", [3, "text", None])
def test_other_types_are_rejected_with_their_name(wrong: Any) -> None:
    for function in (as_inputs, as_tensors):
        with pytest.raises(ModelError, match=f"got {type(wrong).__name__}"):
            function(wrong)


@pytest.mark.parametrize(("wrong", "named"), [([], r"\(\)"), ([X, 3], "Tensor, int"), ({"x": X}, "x=")])
def test_runtimes_take_positional_tensors_only(wrong: Any, named: str) -> None:
    assert as_tensors([X, X]) == (X, X)
    with pytest.raises(ModelError, match=rf"tuple of tensors; got .*{named}"):
        as_tensors(wrong)
