"""Recurrent layers: LSTM, GRU and plain RNN."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from torch import fx

from dsa_hw.channels.trace import TracedOperation
from dsa_hw.channels.walk import Flops, Value, Walk, rule, unknown

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule(*_GATES)
def recurrent(walk: Walk, operation: TracedOperation) -> Any:
    """Make hidden unit j of all layers and directions one unit: torch stores a single hidden size for them.

    Each layer and direction has weights (gates * H, inputs) and (gates * H, H), and two biases. FLOPs are those of the
    two matrix products of each step.
    """
    arguments = operation.arguments
    gates, directions = _GATES[operation.kind], 2 if arguments["bidirectional"] else 1
    names = [walk.tensor_name(p) for p in arguments["params"]]
    each = 4 if arguments["has_biases"] else 2
    value = walk.value(arguments["input"])
    sizes = [tuple(int(n) for n in p.meta["val"].shape) for p in arguments["params"]]
    if None in names or len(names) != each * directions * arguments["num_layers"] or len(value.shape) != 3:
        return unknown(walk, operation)  # also projections, which have a fifth weight
    hidden = sizes[1][1]
    units = walk.ledger.fresh(hidden)
    for state in arguments["hx"] if isinstance(arguments["hx"], (list, tuple)) else [arguments["hx"]]:
        if _is_zeros(state):
            walk.values[state.name] = Value(units.reshape(1, 1, -1), walk.value(state).shape)
        else:
            walk.ledger.join(walk.vector(walk.value(state), -1), units, walk.reason)
    rows = np.tile(units, gates)
    incoming = walk.vector(value, -1)
    steps = 2.0 * prod(value.shape[:-1])
    for start in range(0, len(names), each):
        weights = [str(name) for name in names[start : start + each]]
        walk.ledger.slot(weights[0], 0, rows, "out", walk.name)
        walk.ledger.slot(weights[0], 1, incoming, "in", walk.name)
        walk.ledger.slot(weights[1], 0, rows, "per", walk.name)
        walk.ledger.slot(weights[1], 1, units, "in", walk.name)
        for bias in arguments["params"][start + 2 : start + each]:
            walk.per_channel(bias, rows)
        walk.flops.append(Flops(walk.name, steps, (rows, incoming)))
        walk.flops.append(Flops(walk.name, steps, (rows, units)))
        if start // each % directions == directions - 1:
            incoming = np.tile(units, directions)
    states = len(operation.node.meta["val"]) - 1
    return (incoming.reshape(1, 1, -1), *[units.reshape(1, 1, -1)] * states)


def _is_zeros(state: Any) -> bool:
    """Return whether torch created an initial state (from ``hidden_size``, which `shrink` updates)."""
    return isinstance(state, fx.Node) and str(state.target).startswith("aten.zeros")
