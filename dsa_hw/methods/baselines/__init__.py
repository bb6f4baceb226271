"""Baselines: other methods under the same channel groups, costs and limits. Importing this package registers them.

docs/development/baselines.md says what each one is and how it differs from its paper.
"""

from dsa_hw.methods.baselines.annealing import annealing
from dsa_hw.methods.baselines.cem import cem
from dsa_hw.methods.baselines.dmcp import dmcp
from dsa_hw.methods.baselines.global_gamma import global_gamma
from dsa_hw.methods.baselines.knapsack import knapsack
from dsa_hw.methods.baselines.legr import legr
from dsa_hw.methods.baselines.morphnet import allocate_morphnet, morphnet, train_morphnet
from dsa_hw.methods.baselines.netadapt import netadapt
from dsa_hw.methods.baselines.ssl import allocate_ssl, ssl, train_ssl
from dsa_hw.methods.baselines.uniform import uniform

__all__ = [
    "allocate_morphnet",
    "allocate_ssl",
    "annealing",
    "cem",
    "dmcp",
    "global_gamma",
    "knapsack",
    "legr",
    "morphnet",
    "netadapt",
    "ssl",
    "train_morphnet",
    "train_ssl",
    "uniform",
]
