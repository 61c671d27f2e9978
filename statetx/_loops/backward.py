"""A step in two parts: forward, which returns the residuals; backward, which reads them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .. import _jax
from .._cached import cached_property
from .._equations.dataflow import needed_equations
from .._equations.inline import inline
from .._equations.primitives import FUSED, INLINED, JIT, REMAT, count, flops, inner_jaxprs, row_of
from .._equations.release.loops import has_loop
from .._lift.stage import close_derivative
from .._positions import replaced
from .._tree import is_float, num_bytes
from .rows import row_bytes
from .step import LoopStep

_MANY_CARRIES = 4  # measured: a loop that runs once saves memory at 16 and more, and takes some at 1.3 and 2.6


class BackwardStep:
    """The forward and the backward part of a step, differentiated with respect to some inputs.

    Args:
        diff_constants, diff_carry, diff_xs: the differentiated inputs.

    Attributes:
        residual_avals: the types of the residuals in slots. Not among them are constants, the element of xs, values
            computed from constants alone, and values that cheap operations compute from the residuals (see
            `smallest_residuals`).
        plain_avals: the types of all values that a plain loop stores for a step.
    """

    def __init__(
        self, step: LoopStep, diff_constants: Sequence[int], diff_carry: Sequence[int], diff_xs: Sequence[int]
    ):
        self._step = step
        self._diff = diff_constants, diff_carry, diff_xs
        self.diff_xs = diff_xs
        self._float_ys = [i for i, a in enumerate(step.y_avals) if is_float(a)]
        name = f"{step.name}, forward"
        jaxpr, consts = _jax.stage(self._differentiated, step.in_avals, traced_for="scan", name=name)
        self._body = body = close_derivative(jaxpr, consts)

        # The leaves of the pullback come from values that are known without the step, and from the stored ones.
        invars, outvars = body.jaxpr.invars, body.jaxpr.outvars
        constants, carry, xs = step.sort(invars[body.num_operands :])
        constants = [*invars[: body.num_operands], *constants]
        self._leaves = outvars[step.num_carry :]
        leaves = list(dict.fromkeys(v for v in self._leaves if isinstance(v, _jax.Var)))
        self._inputs = [*constants, *xs]
        at_hand = {*self._inputs, *_computed_from(body.jaxpr, constants)}
        self.plain_avals = [v.aval for v in leaves if v not in at_hand]

        # A leaf of the carry among the residuals is stored as slots store it.
        carry_avals = [row.stored for row in step.rows]
        carries = {v: i for i, v in enumerate(carry) if step.rows[i].format is not None}
        stored_type = lambda v: carry_avals[carries[v]] if v in carries else v.aval
        cost = lambda v: row_bytes(stored_type(v), carry_avals)
        self._stored = smallest_residuals(body.jaxpr, [v for v in leaves if v not in at_hand], at_hand, cost)
        self._carries = {n: carries[v] for n, v in enumerate(self._stored) if v in carries}
        self.residual_avals = list(map(stored_type, self._stored))
        self._forward = _part(body.jaxpr, [*outvars[: step.num_carry], *self._stored])

        self._computed = [v for v in leaves if v not in {*self._inputs, *self._stored}]
        available = {*self._inputs, *self._stored}
        self._again = _jax.rebuild(
            body.jaxpr,
            invars=[*self._inputs, *self._stored],
            outvars=self._computed,
            eqns=needed_equations(body.jaxpr.eqns, self._computed, available),
        )

    def _differentiated(self, *values: Any) -> list:
        diff_constants, diff_carry, diff_xs = self._diff
        constants, carry, x = self._step.sort(values)

        def run(constant_values: list, carry_values: list, x_values: list) -> tuple[tuple[list, list], list]:
            last, y = self._step.saving(
                replaced(constants, diff_constants, constant_values),
                replaced(carry, diff_carry, carry_values),
                replaced(x, diff_xs, x_values),
            )
            return ([last[i] for i in diff_carry], [y[i] for i in self._float_ys]), last

        _, pull, last = jax.vjp(
            run,
            [constants[i] for i in diff_constants],
            [carry[i] for i in diff_carry],
            [x[i] for i in diff_xs],
            has_aux=True,
        )
        leaves, self._treedef = jax.tree.flatten(pull)
        return [*last, *leaves]

    @cached_property
    def flops(self) -> int:
        """Operations of the backward part."""
        step, carry = self._step, self._diff[1]
        types = [step.constant_avals, step.x_avals, [v.aval for v in self._stored]]
        types += [[step.avals[i] for i in carry], [step.y_avals[i] for i in self._float_ys]]
        leaves, treedef = jax.tree.flatten(types)
        run = lambda *values: jax.tree.leaves(self.backward(*treedef.unflatten(values)))
        return count(_jax.stage(run, leaves, traced_for="scan", name=f"{step.name}, backward")[0])

    @cached_property
    def rerun(self) -> float:
        """Share of the step, by operations, that the backward part runs again because of the step's policy."""
        step = self._step
        if step.policy is None:
            return 0.0
        unchanged = BackwardStep(step.with_length(step.length, None), *self._diff)
        return max(0, self.flops - unchanged.flops) / max(1, count(step.body.jaxpr))

    def forward(self, constants: list, carry: list, x: list) -> tuple[list, list]:
        """The next carry, and the residuals."""
        outs = _jax.evaluate(self._forward, (), (*self._body.operands, *constants, *carry, *x))
        return outs[: self._step.num_carry], outs[self._step.num_carry :]

    def encoded(self, residuals: list) -> list:
        """The residuals of a step of the loop as slots hold them, of the types `residual_avals`."""
        rows = self._step.rows
        return replaced(residuals, self._carries, [rows[i].encode(residuals[n]) for n, i in self._carries.items()])

    def decoded(self, residuals: list, step: Any, first: list) -> list:
        """The inverse of `encoded`, given the carry before the loop's first step."""
        rows = self._step.rows
        values = [rows[i].decode(residuals[n], step, first[i]) for n, i in self._carries.items()]
        return replaced(residuals, list(self._carries), values)

    def backward(self, constants: list, x: list, residuals: list, ct_carry: list, ct_ys: list) -> tuple:
        """The cotangents of the differentiated constants, carries and elements, for cotangents of the next carry and
        the float ys.
        """
        inputs = [*self._body.operands, *constants, *x, *residuals]
        values = dict(zip([*self._inputs, *self._stored], inputs, strict=True))
        if self._computed:
            values.update(zip(self._computed, _jax.evaluate(self._again, (), inputs), strict=True))
        leaves = [values[v] if isinstance(v, _jax.Var) else v.val for v in self._leaves]
        return self._treedef.unflatten(leaves)((ct_carry, ct_ys))


def starts_early(step: LoopStep) -> bool:
    """Whether XLA:CPU would allocate much of a step's operands and results at the start of the program around it.

    It starts whatever is ready: the buffers that loops in the step fill, and values computed from constants alone, such
    as a layer's weights from the stacked ones.
    """
    if has_loop(step.body.jaxpr):
        return True
    jaxpr = inline(step.body.jaxpr, calls=JIT | REMAT, deep=False)
    computed = _computed_from(jaxpr, jaxpr.invars[: step.num_constants])
    # XLA fuses the reading of operands with elementwise operations and sums, but not with a product.
    readers = [eqn for eqn in jaxpr.eqns if not (row_of(eqn).fuses or row_of(eqn).reads_fused)]
    operands = {v for eqn in readers for v in eqn.invars if isinstance(v, _jax.Var)}
    num_early = sum(num_bytes(v.aval) for v in computed & operands)
    return num_early > _MANY_CARRIES * sum(map(num_bytes, step.avals))


def _computed_from(jaxpr: Any, inputs: Sequence[Any]) -> set:
    """The variables that equations compute from these inputs alone."""
    available, computed = set(inputs), set()
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(v in available for v in eqn.invars if isinstance(v, _jax.Var)):
            available.update(eqn.outvars)
            computed.update(eqn.outvars)
    return computed


def _part(jaxpr: Any, outvars: Sequence[Any]) -> Any:
    """The equations that these variables need."""
    return _jax.without_dead_code(_jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=outvars))


# -- a minimum cut ---------------------------------------------------------------------------------------------------

# The smallest set of values that determines the residuals of a step by cheap operations only.
#
# The derivative of a nonlinear function is often another function of the same value: of a membrane potential v it wants
# the spike and the surrogate derivative, of a gate ``sigmoid(a)`` and ``sigmoid(a) (1 - sigmoid(a))``. To keep v or a
# is enough. In the graph of a step's values such a set separates the residuals from expensive values (products, random
# numbers) and lost ones (the carry before the step): a minimum vertex cut, found as a maximum flow (Ford and Fulkerson
# 1956; augmenting paths of Edmonds and Karp 1972).


_MOST_VALUES = 2000  # of a graph: a larger one keeps its residuals unchanged
_MOST_COMPUTED_AGAIN = 0.25  # of the operations of a step


def smallest_residuals(jaxpr: Any, residuals: Iterable[Any], available: set, cost: Callable[[Any], int]) -> list[Any]:
    """The variables to keep so that cheap equations can compute `residuals` from them and from the `available` ones.

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
        for operand in dict.fromkeys(x for x in eqn.invars if isinstance(x, _jax.Var) and x not in available):
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
        for neighbor in capacities[node]:
            if neighbor not in reaching and capacities[neighbor][node] > 0:
                reaching.add(neighbor)
                pending.append(neighbor)
    cut = [v for v in seen if (v, "out") in reaching and (v, "in") not in reaching]
    # Where cheap operations are most of the step, to run them again is nearly a run of the step.
    num_flops = sum(map(flops, needed_equations(jaxpr.eqns, residuals, {*available, *cut})))
    return cut if num_flops <= _MOST_COMPUTED_AGAIN * sum(map(flops, jaxpr.eqns)) else residuals


# Not by SciPy, whose `maximum_flow` counts in int32: of an edge of 8 GiB it makes a flow of 0, without an error (1.17).
def _saturate(capacities: dict[Any, dict[Any, float]]) -> None:
    """Send a maximum flow from source to sink, and leave the residual capacities."""
    while True:
        predecessors, pending = {"source": "source"}, collections.deque(["source"])
        while pending and "sink" not in predecessors:
            node = pending.popleft()
            for neighbor, capacity in capacities[node].items():
                if capacity > 0 and neighbor not in predecessors:
                    predecessors[neighbor] = node
                    pending.append(neighbor)
        if "sink" not in predecessors:
            return
        path, node = [], "sink"
        while node != "source":
            path.append((predecessors[node], node))
            node = predecessors[node]
        amount = min(capacities[a][b] for a, b in path)
        for a, b in path:
            capacities[a][b] -= amount
            capacities[b][a] += amount


def _is_cheap(eqn: Any) -> bool:
    if eqn.effects:
        return False
    name = eqn.primitive.name
    if name in INLINED:
        return all(_is_cheap(e) for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns)
    return name in FUSED or name == "split"
