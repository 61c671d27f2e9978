"""The turn of a program with its gradient, and the integer program of what must be held at it.

A schedule runs each equation of the forward and the backward pass at least once. Take an equation t of the backward pass, and the
moment when it has run for the first time: the turn. Everything that t depends on has run before the turn; what depends on t runs
after it. Each value that is read after the turn, and does not depend on t, is then available in one of two ways: it is held at the turn, or
an equation computes it after the turn, whose operands are available likewise:

    minimize    sum of bytes(v) hold[v]        over the values v
    such that   sum of cost(e) run[e] <= added operations, where the cost of an equation that t does not depend on is 0
                run[producer(v)] + hold[v] >= 1         for each v that is read by an equation that depends on t,
                run[producer(u)] + hold[u] >= run[e]    for each operand u of an equation e.

Every schedule satisfies this, whatever its order and its regions: the optimum is at most the memory of any of them. It is far below that
of most, since it says nothing about the bytes in use before and after the turn. (Checkmate, Jain et al., MLSys 2020, has these constraints for
every moment: a square of the variables.) Any t gives a bound. `turn_of` looks for one that depends on most of the forward pass, and on
which most of the backward pass depends: in a chain of layers the first of the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._dataflow import Dataflow, Node, Value

# Limits of HiGHS for one integer program, in nodes of its search tree, so that the same program has the same bound on every machine. After
# these its dual bound counts, which is the bound of a relaxation: it errs low.
_MAX_NODES = 100
_MAX_SECONDS = 20.0

# Of turns whose counted operations are at least this part of the most, the one with the most bytes read after it is taken.
_NEAR_BEST = 0.98

# HiGHS meets its conditions to within 1e-7, in units of the largest value or the most expensive equation: bounds are lowered by more.
_TOLERANCE = 1e-6

Reads = dict[Any, float]
"""The values that an operand comes from, with factors; under None the share that is available in any case. See `_dataflow`."""


class Turn(NamedTuple):
    """The constraints of one turn.

    Attributes:
        required: operands that are read after the turn and do not depend on it.
        reads: for each equation that may compute them, in order, its operands that are not available in any case.
        ran_before: the equations that have run before the turn.
    """

    required: list[Reads]
    reads: dict[Node, list[Reads]]
    ran_before: set[Node]


def turn_of(flow: Dataflow) -> Turn | None:
    """The constraints of the turn that gives the best bound; None if none gives one."""
    reads = {
        node: [r for r in (x.resolve() for x in dict.fromkeys(node.operands)) if r is not None] for node in flow.nodes
    }
    producers = {node: {v.producer for r in reads[node] for v in r if v is not None} for node in flow.nodes}
    turn = _best_turn(flow.nodes, reads, producers)
    if turn is None:
        return None

    after: set[Node] = set()
    for node in flow.nodes:
        if turn in producers[node] or not after.isdisjoint(producers[node]):
            after.add(node)
    required = [r for node in after for r in reads[node] if after.isdisjoint(v.producer for v in r if v is not None)]
    sources = {v.producer for r in required for v in r if v is not None}
    needed = _closure(sources, producers)
    return Turn(required, {n: reads[n] for n in flow.nodes if n in needed}, _closure({turn}, producers) - {turn})


def _closure(nodes: set[Node], producers: dict[Node, set[Node]]) -> set[Node]:
    """These equations and all that they depend on."""
    stack, seen = list(nodes), set(nodes)
    while stack:
        new = producers[stack.pop()] - seen
        seen |= new
        stack += new
    return seen


def _best_turn(nodes: Sequence[Node], reads: dict[Node, list[Reads]], producers: dict[Node, set[Node]]) -> Node | None:
    """The equation that gives the best bound, by a rule of thumb: any of them gives a valid one."""
    forward = [n for n in nodes if not n.is_backward]
    backward = [n for n in nodes if n.is_backward]

    # Sets are integers, one bit for each equation or value: a program has thousands of each.
    costly = [n for n in forward if n.cost]
    values = [v for n in forward for v in n.results]
    value_bits = {v: 1 << i for i, v in enumerate(values)}
    ancestors = dict.fromkeys(nodes, 0) | {n: 1 << i for i, n in enumerate(costly)}
    is_changed = True
    while is_changed:  # more than once for carries of loops only, which come from equations after their readers
        is_changed = False
        for n in forward:
            union = functools.reduce(int.__or__, (ancestors[p] for p in producers[n]), ancestors[n])
            is_changed |= union != ancestors[n]
            ancestors[n] = union

    # For each equation of the backward pass: what it depends on, what later equations that depend on it read, and what runs again
    # if nothing is held.
    rerun, read = dict.fromkeys(backward, 0), dict.fromkeys(backward, 0)
    for n in backward:
        ancestors[n] = functools.reduce(int.__or__, (ancestors[p] for p in producers[n]), 0)
    for n in reversed(backward):
        own = [v for r in reads[n] for v in r if v is not None and not v.is_backward]
        rerun[n] = functools.reduce(int.__or__, (ancestors[v.producer] for v in own), rerun[n])
        all_read = functools.reduce(int.__or__, (value_bits[v] for v in own), read[n])
        for p in producers[n]:
            if p.is_backward:
                read[p] |= all_read
                rerun[p] |= rerun[n]
    costs = {n: _sum(rerun[n] & ancestors[n], [m.cost for m in costly]) for n in backward}
    best = max(costs.values(), default=0.0)
    near_best = [n for n in backward if best and costs[n] >= _NEAR_BEST * best]
    sizes = [v.num_bytes for v in values]
    return max(near_best, key=lambda n: _sum(read[n], sizes), default=None)


def _sum(bits: int, numbers: Sequence[float]) -> float:
    return sum(number for i, number in enumerate(numbers) if bits >> i & 1)


class Problem:
    """The integer program of a turn, in units of the largest value and of the most expensive equation.

    Columns: for each equation the number of steps in which it runs, and for each value the number of steps in which it is held: 0 or 1
    outside loops. At last, for each size of values, the bytes of them that are held in the buffers of outputs.

    Args:
        baseline_operations: what added operations are relative to.
        output_bytes: sizes of the outputs.
        num_devices: the largest number of devices that may share a value.
    """

    def __init__(self, turn: Turn, baseline_operations: float, output_bytes: Sequence[int], num_devices: int = 1):
        values = [
            v for n, reads in turn.reads.items() for v in n.results if v.num_bytes and not _is_dominated(v, reads)
        ]
        columns: dict[Any, int] = {x: i for i, x in enumerate([*turn.reads, *values])}
        homes = [*(_times(n) for n in turn.reads), *(v.home.times for v in values)]
        self.has_loops = any(times > 1 for times in homes)
        operations = [float(n.cost) / _times(n) if n in turn.ran_before else 0.0 for n in turn.reads]
        sizes = np.array([v.num_bytes / v.home.times / num_devices for v in values])

        self._byte_unit = max(1.0, sizes.max(initial=0.0))
        self._operation_unit = max([1.0, *operations])
        self._baseline = baseline_operations / self._operation_unit
        sizes /= self._byte_unit
        outputs = np.array(output_bytes, float) / self._byte_unit
        classes = [size for size in np.unique(sizes) if size <= outputs.max(initial=0.0)]

        # `_upper` is the number of steps for runs and held values, and the bytes of all outputs for a size.
        none = np.zeros(len(classes))
        self._upper = np.array([*homes, *(none + outputs.sum())], float)
        self._operations = np.array([*operations, *np.zeros(len(sizes)), *none]) / self._operation_unit
        self._bytes = np.array([*np.zeros(len(operations)), *sizes, *(none - 1)])
        self._set_rows(turn, columns, classes, outputs)
        self.most_operations = float(self._operations @ self._upper / self._baseline)

    def _set_rows(self, turn: Turn, columns: dict[Any, int], classes: Sequence[float], outputs: np.ndarray) -> None:
        """The constraints ``rows @ x <= limits``, without the one on bytes or operations."""
        from scipy.sparse import coo_array, csr_array, vstack

        entries: list[tuple[int, int, float]] = []
        limits: list[float] = []
        for reader, operand in [
            *((None, r) for r in turn.required),
            *((n, r) for n, rs in turn.reads.items() for r in rs),
        ]:
            row = len(limits)
            for v, factor in operand.items():
                if v is not None:
                    sources = (v.producer, v) if v in columns else (v.producer,)
                    entries += [(row, columns[x], -factor / self._upper[columns[x]]) for x in sources]
            if reader is not None:
                entries.append((row, columns[reader], 1.0 / self._upper[columns[reader]]))
            limits.append(operand.get(None, 0.0) - (reader is None))
        rows, cols, data = zip(*entries, strict=True) if entries else ((), (), ())
        matrices = [coo_array((data, (rows, cols)), shape=(len(limits), len(self._upper)))]

        # Bytes in outputs: for each size, at most those of the held values; from each size on, at most the outputs that have room for it.
        self._rooms = [float(outputs[outputs >= size].sum()) for size in classes]
        for i, (size, room) in enumerate(zip(classes, self._rooms, strict=True)):
            own, larger = np.zeros_like(self._upper), np.zeros_like(self._upper)
            own[self._bytes == size] = -size
            own[len(columns) + i] = 1.0
            larger[len(columns) + i :] = 1.0
            matrices += [csr_array(own[None]), csr_array(larger[None])]
            limits += [0.0, room]
        self._classes = [self._bytes == size for size in classes]
        self._rows: Any = vstack(matrices).tocsr()
        self._limits = limits

    def least_bytes(self, extra_operations: float) -> tuple[float, bool]:
        """The least bytes, or a lower bound of them, and whether it is the least."""
        least, is_optimal = self._solve(self._bytes, self._operations, extra_operations * self._baseline)
        num_bytes = least * self._byte_unit
        return (float(round(num_bytes)) if is_optimal and not self.has_loops else num_bytes), is_optimal

    def least_operations(self, num_bytes: float) -> tuple[float, bool]:
        """The least added operations, or a lower bound of them, and whether it is the least."""
        least, is_optimal = self._solve(self._operations, self._bytes, num_bytes / self._byte_unit)
        return least / self._baseline, is_optimal

    def _solve(self, objective: np.ndarray, limited: np.ndarray, limit: float) -> tuple[float, bool]:
        """Minimize one quantity under a limit of the other."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        if not len(objective):  # nothing has to be held; newer SciPy refuses a program without variables
            return 0.0, True

        # For given held values the runs are integers in any case. Yet HiGHS is faster if it knows that.
        is_integer = np.ones_like(objective)
        is_integer[len(objective) - len(self._rooms) :] = 0
        constraint = LinearConstraint(self._with_row(limited), -np.inf, [*self._limits, limit])  # pyright: ignore[reportArgumentType]
        bounds = Bounds(0, self._upper)  # pyright: ignore[reportArgumentType]
        options = {"node_limit": _MAX_NODES, "time_limit": _MAX_SECONDS, "mip_rel_gap": 0.0}
        result = milp(objective, constraints=constraint, bounds=bounds, integrality=is_integer, options=options)
        if result.status == 0:
            x = self._without_rounding(result.x)
            return max(0.0, float(objective @ x)), True
        bound = result.mip_dual_bound
        return (0.0 if bound is None or not math.isfinite(bound) else max(0.0, bound - _TOLERANCE)), False

    def _without_rounding(self, x: np.ndarray) -> np.ndarray:
        """A solution in whole steps, and with the most bytes in outputs, which are those of the largest values first."""
        first = len(x) - len(self._rooms)
        x, used = np.array([*x[:first].round(), *self._rooms]), 0.0
        for i in reversed(range(len(self._rooms))):
            held = float(self._bytes[self._classes[i]] @ x[self._classes[i]])
            x[first + i] = min(held, self._rooms[i] - used)
            used += x[first + i]
        return x

    def lines(self, extra_operations: Iterable[float]) -> set[tuple[float, float]]:
        """Lines under the least bytes, as pairs (b, s): with x added operations no schedule takes less than ``b - s * x``.

        For each of these numbers the line that touches the optimum of the linear relaxation there.
        """
        from scipy.optimize import linprog

        if not len(self._bytes):
            return {(0.0, 0.0)}

        # The multiplier of the limit is feasible for the dual problem of any other limit: there, too, it gives a bound.
        lines = set()
        for x in extra_operations:
            limit = x * self._baseline
            result = linprog(
                self._bytes,
                A_ub=self._with_row(self._operations),
                b_ub=[*self._limits, limit],
                bounds=np.stack([np.zeros_like(self._upper), self._upper], 1),
                method="highs",
            )
            if result.status == 0:
                slope = max(0.0, -float(result.ineqlin.marginals[-1]))
                least = float(result.fun) + slope * limit
                lines.add(
                    ((least - _TOLERANCE * (1 + least)) * self._byte_unit, slope * self._baseline * self._byte_unit)
                )
        return lines

    def _with_row(self, row: np.ndarray) -> Any:
        from scipy.sparse import csr_array, vstack

        return vstack([self._rows, csr_array(row[None])]).tocsr()


def _times(node: Node) -> int:
    """The number of runs of an equation."""
    return max((x.home.times for x in node.operands), default=1)


def _is_dominated(value: Value, reads: Sequence[Reads]) -> bool:
    """Whether holding the operands of its equation instead takes no more bytes, and computing it costs nothing."""
    if value.producer.cost or not reads:
        return False
    operands = {v for r in reads for v in r}
    are_plain = all(len(r) == 1 for r in reads) and all(v is not None and v.home is value.home for v in operands)
    return are_plain and sum(v.num_bytes for v in operands) <= value.num_bytes
