"""The integer program of a region: which values to save, and which equations to run again.

It is Checkmate's (Jain et al., MLSys 2020), within one region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._jax import Var
from .._program.derivative import ForwardPass
from .._program.values import Address, Way

# Limits of HiGHS for one integer program; `IntegerProgram.solve` says which way they err. In nodes of its search tree
# rather than seconds: a loaded machine would get another plan. Most programs take one node.
_MAX_NODES = 500
_GAP = 1e-4  # relative to the optimum; also the default of HiGHS


class Storage(NamedTuple):
    """What it takes to hold a value in some way.

    Attributes:
        num_bytes: on the device between the passes.
        cost: operations of holding it so, and of reading it.
        moved_bytes: of equal costs the fewest of these are held.
    """

    num_bytes: int
    cost: float
    moved_bytes: int


class IntegerProgram:
    """Which values to save, and which equations to run again, at the least cost.

    Variables are binary: run[i] for each needed equation, hold[a, w] for each address and way to hold its value. A
    value v is available if its equation runs or it is held: available(v) = run[producer(v)] + sum of hold[a, w].
    Minimize the cost of what runs, and of holding, such that

        available(v) >= 1                    for each residual v,
        available(u) - run[i] >= 0           for each operand u of equation i that an equation computes,
        sum of bytes(a, w) hold[a, w] <= limit     (the last row).

    Args:
        forward: the forward pass of the region.
        costs: of the equations that its residuals depend on, by number.
        address_of: the addresses of the variables that may be saved.
        storages: for each address, and each way in which its value may be held, what that takes.
    """

    def __init__(
        self,
        forward: ForwardPass,
        costs: Mapping[int, float],
        address_of: Mapping[Any, Address],
        storages: Mapping[Address, Mapping[Way, Storage]],
    ):
        from scipy.sparse import lil_array

        pairs = {(a, way): storage for a, ways in storages.items() for way, storage in ways.items()}
        column: dict[Any, int] = {("run", i): n for n, i in enumerate(costs)}
        column |= {pair: len(column) + n for n, pair in enumerate(pairs)}
        self._column = {pair: column[pair] for pair in pairs}

        rows: list[list[tuple[int, float]]] = []
        lower: list[float] = []

        def available(v: Any) -> list[tuple[int, float]]:
            terms = [(column["run", forward.producer[v]], 1.0)]
            if (address := address_of.get(v)) is not None:
                terms += [(column[address, way], 1.0) for way in storages.get(address, ())]
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
        # In units of the common divisor the row keeps its exact meaning: HiGHS lets a binary variable be off by 1e-6,
        # so that with large numbers it took a byte too much for allowed, and printed that it tries again.
        self._unit = math.gcd(*(storage.num_bytes for storage in pairs.values())) or 1
        for pair, storage in pairs.items():
            matrix[len(rows), column[pair]] = storage.num_bytes // self._unit
        self._matrix, self._lower = matrix.tocsr(), np.array([*lower, -np.inf])

        # The objective is scaled to the most expensive equation, so that small terms in proportion to it can break
        # ties: of equal costs, save fewer bytes, then fewer values; and where a fetch is free, save on the device
        # rather than the host. They add up to at most 1e-6, plus 2e-9 for each value. `_GAP` may be coarser: a solution
        # that saves too much for its cost is then dominated by a later one of the front.
        run_costs = np.array(list(costs.values()))
        scale = max(run_costs.max(initial=0.0), 1e-30)
        objective = np.zeros(len(column))
        objective[: len(costs)] = run_costs / scale
        total = max(float(sum(max(s.moved_bytes for s in ways.values()) for ways in storages.values())), 1.0)
        for pair, storage in pairs.items():
            tie = 1e-6 * storage.moved_bytes / total + 1e-9 * (2 if pair[1].is_read_early else 1)
            objective[column[pair]] = storage.cost / scale + tie
        self._objective = objective

    def solve(self, limit: float) -> dict[Address, Way] | None:
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
        chosen: dict[Address, Way] = {}
        for (address, way), c in self._column.items():
            if result.x[c] > 0.5:
                chosen.setdefault(address, way)
        return chosen
