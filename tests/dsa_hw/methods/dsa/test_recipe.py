"""Recipes of the paper."""

from __future__ import annotations

import numpy as np
import pytest

from dsa_hw.errors import TrainingError
from dsa_hw.methods.dsa.recipe import Recipe


def test_recipes_have_the_settings_of_the_paper() -> None:
    recipe = Recipe.paper()
    assert recipe.epochs == 300
    assert (recipe.weight_steps, recipe.momentum, recipe.weight_decay, recipe.lr) == (20, 0.9, 4e-5, 0.05)
    assert np.isclose((recipe.beta2[1] / recipe.beta2[0]) ** (1 / recipe.allocation), 1.1)
    assert Recipe.paper("imagenet").epochs == 120
    for masks in (recipe.allocator, Recipe.paper("imagenet").allocator):
        assert (masks["softness"], masks["masks"], masks["weight_masks"]) == (
            "importance",
            "straight_through",
            "sampled",
        )
    with pytest.raises(TrainingError, match="cifar10, imagenet"):
        Recipe.paper("mnist")
