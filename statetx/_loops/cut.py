"""The smallest set of values from which the backward part of a step can have its residuals again, by cheap operations
only.

The derivative of a nonlinear function is often another function of the same value: of a membrane potential v it wants
the spike and the surrogate derivative, of a gate ``sigmoid(a)`` and ``sigmoid(a) (1 - sigmoid(a))``. To keep v or a is
enough. In the graph of a step's values such a set separates the residuals from what is expensive (products, random
numbers) or gone (the carry before the step): a minimum vertex cut, found as a maximum flow (Ford and Fulkerson 1956;
augmenting paths of Edmonds and Karp 1972).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

from .. import _jax
from .._equations.flops import flops
from .._equations.primitives import FUSED, INLINED, inner_jaxprs

_MOST_VALUES = 2000  # of a graph: a larger one keeps its residuals unchanged
_MOST_COMPUTED_AGAIN = 0.25  # of the operations of a step


def smallest_residuals(jaxpr: Any, residuals: Iterable[Any], known: set, cost: Callable[[Any], int]) -> list[Any]:
    """The variables to keep so that `residuals` can be computed from them and from the `known` ones by cheap equations.

    Args:
        cost: of keeping the value of a variable.
    """
    residuals = list(residuals)
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    capacities: dict[Any, dict[Any, float]] = collections.defaultdict(dict)

    def connect(a: Any, b: Any, capacity: float) -> None:
        capacities[a][b] = capacity
        capacities[b].setdefault(a, 0)

    # Each value is a pair of nodes, and the edge between them is the cost of keeping it.
    pending, seen = list(residuals), dict.fromkeys(residuals)
    for v in residuals:
        connect((v, "out"), "sink", float("inf"))
    while pending:
        v = pending.pop()
        connect((v, "in"), (v, "out"), cost(v))
        eqn = producers.get(v)
        if eqn is None or not _is_cheap(eqn):
            connect("source", (v, "in"), float("inf"))
            continue
        for operand in dict.fromkeys(x for x in eqn.invars if isinstance(x, _jax.Var) and x not in known):
            connect((operand, "out"), (v, "in"), float("inf"))
            if operand not in seen:
                seen[operand] = None
                pending.append(operand)
        if len(seen) > _MOST_VALUES:
            return residuals

    _saturate(capacities)
    # Of all smallest cuts the one next to the residuals: the least is computed again.
    reaching, pending = {"sink"}, ["sink"]
    while pending:
        node = pending.pop()
        for other in capacities[node]:
            if other not in reaching and capacities[other][node] > 0:
                reaching.add(other)
                pending.append(other)
    cut = [v for v in seen if (v, "out") in reaching and (v, "in") not in reaching]
    # Where cheap operations are most of the step, to run them again is nearly a run of the step.
    again = sum(map(flops, needed_equations(jaxpr, residuals, {*known, *cut})))
    return cut if again <= _MOST_COMPUTED_AGAIN * sum(map(flops, jaxpr.eqns)) else residuals


# Not by SciPy, whose `maximum_flow` counts in int32: of an edge of 8 GiB it makes a flow of 0, without an error (1.17).
def _saturate(capacities: dict[Any, dict[Any, float]]) -> None:
    """Send a maximum flow from source to sink: what is left of the capacities stays."""
    while True:
        before, pending = {"source": "source"}, collections.deque(["source"])
        while pending and "sink" not in before:
            node = pending.popleft()
            for other, capacity in capacities[node].items():
                if capacity > 0 and other not in before:
                    before[other] = node
                    pending.append(other)
        if "sink" not in before:
            return
        path, node = [], "sink"
        while node != "source":
            path.append((before[node], node))
            node = before[node]
        amount = min(capacities[a][b] for a, b in path)
        for a, b in path:
            capacities[a][b] -= amount
            capacities[b][a] += amount


def needed_equations(jaxpr: Any, outvars: Iterable[Any], known: set) -> list[Any]:
    """The equations that compute some variables from the `known` ones, in order."""
    needed, eqns = {v for v in outvars if v not in known}, []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, _jax.Var) and v not in known)
    return eqns[::-1]


def _is_cheap(eqn: Any) -> bool:
    if eqn.effects:
        return False
    name = eqn.primitive.name
    if name in INLINED:
        return all(_is_cheap(e) for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns)
    return name in FUSED or name == "split"
