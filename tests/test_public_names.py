"""What ``import dsa_hw``, ``import budgets`` and ``import profilers`` offer, loaded when first used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

PACKAGES = ("dsa_hw", "budgets", "profilers")

# In a process of its own: here, other tests have imported the submodules already, in some order.
_TWICE = """
import importlib, pkgutil, types
package = importlib.import_module({package!r})
lazy = [name for name in package.__all__ if name not in vars(package)]
assert lazy, "everything is loaded already"
first = {{name: getattr(package, name) for name in package.__all__}}
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module(package.__name__ + "." + module.name)
for name, found in first.items():
    assert getattr(package, name) is found, name
    assert vars(package)[name] is found, f"{{name}} is looked up again on every access"
    assert callable(found) and not isinstance(found, types.ModuleType), f"{{name}} is {{found!r}}"
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_the_same_object_twice_and_no_module(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TWICE.format(package=package)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_no_submodule_has_the_name_of_a_public_name(package: str) -> None:
    """Importing such a submodule, from anywhere, puts the module in the place of the function."""
    found = importlib.import_module(package)
    assert {module.name for module in pkgutil.iter_modules(found.__path__)} & set(found.__all__) == set()
    assert set(found.__all__) == set(found._HOMES)


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nonsense'"):
        _ = importlib.import_module(package).nonsense
