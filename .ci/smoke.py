"""Use an installed dsa_hw as a new user does. Usage: smoke.py WHEEL TRACKED, the tracked files of the packages."""

import importlib.metadata
import sys
import zipfile
from pathlib import Path

wheel, tracked = Path(sys.argv[1]), Path(sys.argv[2]).read_text().split()

absent = set(tracked) - set(zipfile.ZipFile(wheel).namelist())
assert not absent, f"The wheel lacks {sorted(absent)}."

import budgets  # noqa: E402
import dsa_hw  # noqa: E402
import profilers  # noqa: E402

assert "torch" not in sys.modules, "import dsa_hw imports torch."
for package in (dsa_hw, budgets, profilers):
    folder = Path(package.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{package.__name__} comes from {folder}, not from the wheel."
    assert (folder / "py.typed").is_file()
version = importlib.metadata.version("dsa-hw")
assert version == dsa_hw.__version__ == wheel.name.split("-")[1], (version, dsa_hw.__version__, wheel.name)

import torch  # noqa: E402

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(32, 10),
)
inputs = torch.randn(1, 3, 16, 16)
result = dsa_hw.allocate(model, budget=dsa_hw.FlopsBudget("50%"), example_inputs=inputs)


def flops(network: torch.nn.Module) -> int:
    """FLOPs of one call, by torch's own counter."""
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter, torch.no_grad():
        network(inputs)
    return counter.get_total_flops()


share = flops(result.model) / flops(model)
assert 0.3 < share <= 0.5, share
assert result.certificate.verdict == "MET", result.certificate
print(f"dsa_hw {version}: {len(tracked)} files in the wheel, a small network at {share:.1%} of its FLOPs")
