"""The integer program of a region: which values to save, and which equations to run again.

It is Checkmate's (Jain et al., MLSys 2020), within one region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._jax import Var
from ._derivative import ForwardPass
from ._values import Address

# Limits of HiGHS for one integer program; `IntegerProgram.solve` says which way they err. In nodes of its search tree rather than
# seconds: a loaded machine would get another plan. Most programs take one node.
_MAX_NODES = 500
_GAP = 1e-4  # relative to the optimum; also the default of HiGHS


class Storage(NamedTuple):
    """A way to save a value.

    Attributes:
        num_bytes: between the passes.
        cost: operations of storing it so, and of reading it.
    """

    num_bytes: int
    cost: float


class Solution(NamedTuple):
    """The values to save, and which of them are offloaded or stored in fewer bits."""

    saved: frozenset[Address]
    offloaded: frozenset[Address]
    smaller: frozenset[Address]


class IntegerProgram:
    """Which values to save, and which equations to run again, at the least cost.

    Variables are binary: run[i] for each needed equation, keep[a] (and offload[a], and store[a] for saving in fewer bits) for each
    address. A value v is available if its equation runs or it is saved: available(v) = run[producer(v)] + keep[a] + store[a] + offload[a].
    Minimize the cost of what runs, and of saving, such that

        available(v) >= 1                    for each residual v,
        available(u) - run[i] >= 0           for each operand u of equation i that an equation computes,
        sum of bytes(a) keep[a] + bytes of the stored form store[a] <= limit     (the last row).

    Args:
        forward: the forward pass of the region.
        costs: of the equations that its residuals depend on, by number.
        address_of: the addresses of the variables that may be saved.
        kept: for each address, what saving the value unchanged takes.
        smaller: likewise in fewer bits, for the values worth it.
        offloaded: likewise in host memory; empty if nothing is offloaded.
    """

    def __init__(
        self,
        forward: ForwardPass,
        costs: Mapping[int, float],
        address_of: Mapping[Any, Address],
        *,
        kept: Mapping[Address, Storage],
        smaller: Mapping[Address, Storage],
        offloaded: Mapping[Address, Storage],
    ):
        from scipy.sparse import lil_array

        storages = {"keep": kept, "store": smaller, "offload": offloaded}
        column: dict[tuple[str, Any], int] = {("run", i): n for n, i in enumerate(costs)}
        for kind, addresses in storages.items():
            column |= {(kind, address): len(column) + n for n, address in enumerate(addresses)}
        self._storages, self._column = storages, column

        rows: list[list[tuple[int, float]]] = []
        lower: list[float] = []

        def available(v: Any) -> list[tuple[int, float]]:
            terms = [(column["run", forward.producer[v]], 1.0)]
            address = address_of.get(v)
            if address is not None:
                terms += [(column[kind, address], 1.0) for kind in storages if (kind, address) in column]
            return terms

        for v in forward.computed_residuals:
            rows.append(available(v))
            lower.append(1.0)
        for i in costs:
            for v in dict.fromkeys(u for u in forward.jaxpr.eqns[i].invars if isinstance(u, Var)):
                if v in forward.producer:
                    rows.append([*available(v), (column["run", i], -1.0)])
                    lower.append(0.0)

        matrix = lil_array((len(rows) + 1, len(column)))
        for r, entries in enumerate(rows):
            for c, x in entries:
                matrix[r, c] += x
        # Offloaded values take no bytes on the device. In units of the common divisor the row keeps its exact meaning: HiGHS lets a
        # binary variable be off by 1e-6, so that with large numbers it took a byte too much for allowed, and printed that it tries again.
        num_bytes = {
            column[kind, address]: storage.num_bytes
            for kind in ("keep", "store")
            for address, storage in storages[kind].items()
        }
        self._unit = math.gcd(*num_bytes.values()) or 1
        for c, size in num_bytes.items():
            matrix[len(rows), c] = size // self._unit
        self._matrix, self._lower = matrix.tocsr(), np.array([*lower, -np.inf])

        # The objective is scaled to the most expensive equation, so that small terms in proportion to it can break ties: of equal
        # costs, save fewer bytes, then fewer values; and where a fetch is free, save on the device rather than the host. They add
        # up to at most 2e-6, plus 2e-9 for each value. `_GAP` may be coarser: a solution that saves too much for its
        # cost is then dominated by a later one of the front.
        run_costs = np.array(list(costs.values()))
        scale = max(run_costs.max(initial=0.0), 1e-30)
        objective = np.zeros(len(column))
        objective[: len(costs)] = run_costs / scale
        total = max(float(sum(storage.num_bytes for storage in kept.values())), 1.0)
        for kind, weight in (("keep", 1.0), ("store", 1.0), ("offload", 2.0)):
            for address, (num_bytes, cost) in storages[kind].items():
                tie = weight * 1e-6 * (num_bytes / total)
                objective[column[kind, address]] = cost / scale + tie + weight * 1e-9
        self._objective = objective

    def solve(self, limit: float) -> Solution | None:
        """Return the values to save, at most `limit` bytes of them on the device; None if it is infeasible.

        After `_MAX_NODES` HiGHS returns its best solution so far, which may cost more than the optimum, or none, which
        counts as infeasible. `Plan.complete` does not tell: it is about the user's time limit. The
        constraints hold in any case: a plan may cost more, or a tight budget be refused, but none is exceeded.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        if limit < 0:
            return None
        upper = np.full(len(self._lower), np.inf)
        upper[-1] = np.floor(limit / self._unit)  # of infinity, infinity
        constraint = LinearConstraint(self._matrix, self._lower, upper)  # pyright: ignore[reportArgumentType]
        options = {"node_limit": _MAX_NODES, "mip_rel_gap": _GAP}
        result = milp(
            self._objective,
            constraints=constraint,
            bounds=Bounds(0, 1),
            integrality=np.ones(len(self._objective)),
            options=options,
        )
        if result.x is None:
            return None

        # Integers hold to within a tolerance, so a binary variable is near 0 or 1.
        is_chosen = {key: result.x[c] > 0.5 for key, c in self._column.items()}
        chosen = {
            kind: frozenset(a for a in storages if is_chosen[kind, a]) for kind, storages in self._storages.items()
        }
        kept, offloaded = chosen["keep"], chosen["offload"]
        smaller = chosen["store"] - offloaded
        return Solution(kept | offloaded | smaller, offloaded, smaller - kept)
