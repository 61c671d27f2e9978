"""The least memory, and the least operations, of any schedule of a loss with its gradient.

A schedule runs each equation of the forward and the backward pass at least once. Take an equation t of the backward
pass, and the moment when it has run for the first time: the turn. What depends on t runs after the turn. Each value
that it reads, and that does not depend on t, is then available in one of two ways: it is held at the turn, or an
equation computes it after the turn, whose operands are available likewise. This is an integer program (with its
constraints for every moment it would be Checkmate's: Jain et al., MLSys 2020):

    minimize    sum of bytes(v) hold[v], less what outputs hold
    such that   sum of cost(e) run[e] <= added operations        what has run before the turn, and runs again
                run[producer(v)] + hold[v] >= 1                  for each v that is read by an equation that depends on
                t run[producer(u)] + hold[u] >= run[e]             for each operand u of an equation e

Every schedule satisfies it, whatever its order and its regions. So the optimum is at most the memory of any of them,
for each t; the best of a few is taken. It is far below that of most, since it says nothing about the bytes in use
before and after the turn. Where XLA may do better than the equations say, the bound gives it away:

- Elementwise operations, moves of data and random bits run within the kernels that read them: they cost nothing. So do
  a `while`, a branch and a kernel that the program calls. A product, convolution or reduction writes its result to
  memory, or elementwise functions of it.
- XLA computes equal equations once, and what is equal in all steps of a loop: they cost nothing.
- Outputs have memory of their own. Until they are written, XLA holds in it what fits into the largest of them.
- A value counts in the smallest format that a plan may use, as a whole. One in host memory counts as held.
- In a loop `run` and `hold` are the fractions of the steps, between 0 and 1. A carry that a step reads is the new carry
  of the step before, averaged over the steps; the first one is available. The last one may be among the steps that ran
  or are held.

It does not hold on a TPU, whose compiler keeps values between the passes in the vector memory of a core (of a v5e 128
MiB), which is not among the temporary bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, vstack

from statetx import _jax
from statetx._equations.inline import inline
from statetx._equations.primitives import CALLS, INLINED, JIT, REMAT, count, flops, row_of
from statetx._equations.structure import Body
from statetx._lift.context import device_bytes
from statetx._positions import function_of
from statetx._remat.stored import are_bits, is_bits, of_steps
from statetx._tree import freeze, is_float
from statetx.planner._program.flat import flatten
from statetx.planner._program.values import read_formats, smallest
from statetx.planner._search.capture import capture

MAX_NODES = 100  # of HiGHS's search tree for one program; after these its dual bound counts, which is lower
TOLERANCE = 1e-6  # of the largest value and the most expensive equation; HiGHS meets its conditions to within 1e-7
# that are looked at; tried are those of them with the most bytes of values that cost operations, and some of the others
TURNS = 40
TRIED = 4

_RANDOM = ("random_", "threefry", "rng_")


class Loop(NamedTuple):
    """The loop in whose steps an equation differs: its depth, the number of its steps, and whether it is equal in all
    steps of one around it.
    """

    depth: int = 0
    times: int = 1
    is_moved: bool = False


PROGRAM = Loop()


@dataclasses.dataclass(eq=False)
class Node:
    """An equation, or a view of a value: as a carry, as an operand of a loop or its result.

    Attributes:
        cost: operations, in all steps together.
        gain, share: a view is available to ``gain * available(what it reads) + share`` of its steps.
    """

    reads: list[Value]
    loop: Loop
    cost: float = 0.0
    gain: float = 1.0
    share: float = 0.0


@dataclasses.dataclass(eq=False)
class Value:
    """What an equation reads. Inputs have no producer; they and outputs are `given`: available at any time."""

    producer: Node | None
    loop: Loop = PROGRAM
    num_bytes: float = 0.0  # in all steps together, in the smallest format; 0 for a view, which is not held
    is_bits: bool = False
    is_backward: bool = False
    given: bool = False


class Graph:
    """The equations of a loss and its gradient, in an order in which they can run."""

    def __init__(self, fun: Callable, args: Sequence[Any], argnums: Any, stored_as: Sequence[str] = ("bits",)):
        (recorded,) = capture(fun, tuple(args), {}, argnums).gradients
        self._formats, self.nodes = read_formats(stored_as), []
        self._known: dict[Any, list[Value]] = {}
        with recorded.context.bind_axes():
            gradient, num_inputs = _with_gradient(recorded)
            inputs = [Value(None, is_backward=i >= num_inputs, given=True) for i in range(len(gradient.invars))]
            for output in self._run(gradient, inputs, PROGRAM):
                output.given = True
        shared = recorded.context.num_sharing(())
        for value in self.values():
            value.num_bytes /= shared
        self.output_bytes = [device_bytes(v.aval) for v in gradient.outvars]
        self.operations = max(count(gradient), 1)

    def values(self) -> list[Value]:
        return list(dict.fromkeys(v for results in self._known.values() for v in results))

    def turns(self) -> list[Node]:
        """Equations of the backward pass to try as the turn: the first ones, and some of all others."""
        backward = [n for n in self.nodes if any(v.is_backward for v in n.reads)]
        spaced = sorted({round(x) for x in np.geomspace(1, len(backward), TURNS)}) if backward else []
        return [backward[i - 1] for i in spaced]

    def _run(self, jaxpr: Any, operands: list[Value], loop: Loop) -> list[Value]:
        given = [Value(None, given=True) for _ in jaxpr.constvars]
        rule = functools.partial(self._results, loop=loop)
        return _jax.interpret(jaxpr, [*given, *operands], rule, literal=self._literal)

    def _literal(self, atom: Any) -> Value:
        key = freeze(atom.val), atom.aval
        return self._known.setdefault(key, [Value(None, is_bits=is_bits(atom), given=True)])[0]

    def _results(self, eqn: Any, operands: list[Value], loop: Loop) -> Sequence[Value]:
        if eqn.primitive.name in CALLS:
            return self._run(_jax.open_jaxpr(eqn.params[row_of(eqn).jaxpr])[0], operands, loop)
        is_backward = any(v.is_backward for v in operands)
        if eqn.primitive.name == "scan" and not is_backward and not eqn.effects:
            return self._steps(eqn, operands, loop)

        key = eqn.primitive, freeze(eqn.params), tuple(operands), tuple([v.aval for v in eqn.outvars])
        home = _home(operands)
        is_new = key not in self._known
        if is_new:
            bits = are_bits(eqn, [v.is_bits for v in operands])
            node = self._node(operands, home)
            is_free = row_of(eqn).fuses or eqn.primitive.name.startswith(_RANDOM) or home.is_moved or eqn.effects
            if not is_free and not any(True for _ in _jax.inner_jaxprs(eqn)):
                node.cost = float(flops(eqn) * home.times)
            sizes = [home.times * self._bytes_of(v.aval, b) for v, b in zip(eqn.outvars, bits, strict=True)]
            results = [
                Value(node, home, n, b, is_backward, bool(eqn.effects)) for n, b in zip(sizes, bits, strict=True)
            ]
            self._known[key] = results
        results = self._known[key]
        if (not is_new or home is not loop) and results:
            results[0].producer.cost = 0.0  # type: ignore[union-attr]
        return results

    def _node(self, reads: list[Value], loop: Loop, **view: float) -> Node:
        self.nodes.append(Node(reads, loop, **view))
        return self.nodes[-1]

    def _view(self, v: Value, loop: Loop, **view: float) -> Value:
        return Value(self._node([v], loop, **view), loop, is_bits=v.is_bits, is_backward=v.is_backward)

    def _bytes_of(self, aval: Any, is_bits: bool) -> int:
        if not (hasattr(aval, "dtype") and hasattr(aval, "shape")):
            return 0  # a token, say
        way = smallest(aval, self._formats, is_bits=is_bits)
        return device_bytes(aval) if way is None else way.num_bytes(aval)

    def _steps(self, eqn: Any, operands: list[Value], loop: Loop) -> list[Value]:
        num_constants, num_carry = _jax.scan_counts(eqn)
        constants, initial, xs = np.split(np.array(operands, object), [num_constants, num_constants + num_carry])
        body, length = _jax.open_jaxpr(eqn.params["jaxpr"])[0], max(eqn.params["length"], 1)
        around = _home(operands)
        inside = Loop(around.depth + 1, around.times * length, around.is_moved or around is not loop)
        bits = of_steps(body, num_constants, num_carry, [v.is_bits for v in operands])[0][num_constants:]

        # A carry that each step returns unchanged stays the initial one.
        is_unchanged = [v is new for v, new in zip(body.invars[num_constants:], body.outvars[:num_carry], strict=False)]
        carries = [
            v if same else Value(self._node([], inside, share=1 / length), inside, is_bits=b)
            for v, same, b in zip(initial, is_unchanged, bits, strict=False)
        ]
        outs = self._run(body, [*constants, *carries, *(self._view(x, inside) for x in xs)], inside)
        for carry, new, same in zip(carries, outs, is_unchanged, strict=False):
            if not same:
                carry.producer.reads.append(new)  # type: ignore[union-attr]
        last = [
            v if same else self._view(new, around, gain=length)
            for v, new, same in zip(initial, outs, is_unchanged, strict=False)
        ]
        return [*last, *(self._view(y, around) for y in outs[num_carry:])]


def _home(operands: Sequence[Value]) -> Loop:
    return max((v.loop for v in operands), key=lambda loop: loop.depth, default=PROGRAM)


def _with_gradient(recorded: Any) -> tuple[Any, int]:
    """``(*inputs, *cotangents) -> (*outputs, *gradients)`` of the program without rematerialization; and the number of
    inputs.
    """
    program = inline(flatten(recorded.jaxpr), calls=JIT | REMAT | {_jax.CLOSED_CALL})
    num, indices = recorded.num_out, recorded.diff_indices
    cotangents = [v.aval for v in program.outvars[:num] if is_float(v.aval)]

    def outputs(*inputs: Any) -> tuple[list[Any], list[Any]]:
        outs = _jax.evaluate(program, (), inputs)
        floats = [jnp.asarray(x) for x in outs[:num] if is_float(x)]
        return floats, [*(x for x in outs[:num] if not is_float(x)), *outs[num:]]

    def run(*arrays: Any) -> list[Any]:
        inputs, cts = arrays[: len(program.invars)], arrays[len(program.invars) :]
        fun = function_of(outputs, inputs, indices)
        outs, pullback, aux = jax.vjp(fun, *[inputs[i] for i in indices], has_aux=True)
        return [*outs, *aux, *pullback(list(cts))]

    avals = [*(v.aval for v in program.invars), *cotangents]
    body = Body.close(*_jax.stage(run, avals, traced_for="lower_bound", name="gradient"))
    return inline(_jax.without_dead_code(body.jaxpr), calls=INLINED), len(program.invars)


class Turn:
    """The integer program of a turn: columns ``run`` of equations, ``hold`` of values, and the bytes that
    outputs hold.
    """

    def __init__(self, graph: Graph, turn: Node):
        after: set[Node] = set()
        for n in graph.nodes:
            if any(v.producer is turn or v.producer in after for v in n.reads):
                after.add(n)
        self.needed = needed = lambda n: [v for v in n.reads if not v.given and v.producer not in after]
        self.required = required = list(dict.fromkeys(v for n in graph.nodes if n in after for v in needed(n)))
        nodes = closure([v.producer for v in required], needed)
        self.values = values = [v for v in graph.values() if v.producer in nodes and v.num_bytes]
        columns = {x: i for i, x in enumerate([*nodes, *values])}
        self.before = {n for n in closure([turn], needed) if n is not turn}

        self.costly_bytes = sum(
            v.num_bytes for v in values if v.producer in self.before and v.producer.cost and not v.is_backward
        )
        # In units of the largest value and of all operations. A value of a loop fits into an output with that of one
        # step.
        sizes = np.array([v.num_bytes for v in values], float)
        of_step = sizes / [v.loop.times for v in values] if values else sizes
        outputs = np.array(graph.output_bytes, float)
        classes = [size for size in np.unique(of_step) if size <= outputs.max(initial=0.0)]
        self.byte_unit = max(1.0, sizes.max(initial=0.0))
        self.bytes = np.array([*np.zeros(len(nodes)), *(sizes / self.byte_unit), *np.full(len(classes), -1.0)])
        costs = [n.cost if n in self.before else 0.0 for n in nodes]
        self.operations = np.zeros_like(self.bytes)
        self.operations[: len(nodes)] = np.array(costs) / graph.operations
        self._upper = np.array([*np.ones(len(columns)), *np.full(len(classes), outputs.sum() / self.byte_unit)])
        self._is_integer = np.array([*(x.loop.times == 1 for x in columns), *np.zeros(len(classes))], int)

        # Each row says: the sum of its entries is at most its limit.
        entries: list[tuple[int, int, float]] = []
        limits: list[float] = []

        def add(limit: float, row: dict[int, float]) -> None:
            entries.extend((len(limits), column, x) for column, x in row.items())
            limits.append(limit)

        available = lambda v, gain=1.0: {columns[x]: -gain for x in (v.producer, v) if x in columns}
        for v in required:
            add(-1.0, available(v))
        for n in nodes:
            for v in needed(n):
                add(n.share, {columns[n]: 1.0} | available(v, n.gain))
        # Outputs hold no more of a size than there is of it, and from each size on no more than those have room for
        # that are as large.
        for i, size in enumerate(classes, len(columns)):
            held = {
                columns[v]: -v.num_bytes / self.byte_unit for v, n in zip(values, of_step, strict=True) if n == size
            }
            add(0.0, {i: 1.0} | held)
            add(outputs[outputs >= size].sum() / self.byte_unit, dict.fromkeys(range(i, len(self.bytes)), 1.0))
        rows, cols, data = zip(*entries, strict=True) if entries else ((), (), ())
        self._rows = coo_array((data, (rows, cols)), shape=(len(limits), len(self.bytes)))
        self._limits = limits

    def least(self, objective: np.ndarray, limited: np.ndarray, limit: float, *, is_relaxed: bool = False) -> float:
        """The least of one quantity under a limit of the other, or a lower bound of that."""
        rows = vstack([self._rows, coo_array(limited[None])])
        result = milp(
            objective,
            constraints=LinearConstraint(rows, -np.inf, [*self._limits, limit]),  # type: ignore[arg-type]
            bounds=Bounds(0, self._upper),  # type: ignore[arg-type]
            integrality=np.zeros_like(self._is_integer) if is_relaxed else self._is_integer,
            options={"node_limit": MAX_NODES, "mip_rel_gap": 0.0},
        )
        found = result.fun if result.status == 0 else result.mip_dual_bound
        return max(0.0, found) if found is not None and math.isfinite(found) else 0.0


def closure(nodes: Sequence[Any], needed: Callable[[Node], list[Value]]) -> dict[Node, None]:
    """These equations and all that they read from."""
    seen, stack = dict.fromkeys(nodes), list(nodes)
    while stack:
        new = {v.producer: None for v in needed(stack.pop()) if v.producer not in seen}
        seen |= new
        stack += new
    return seen


class LowerBound:
    """Bytes and operations that no schedule of a loss with its gradient can undercut; operations are relative to those
    without rematerialization.
    """

    def __init__(self, fun: Callable, *args: Any, argnums: Any = 0, stored_as: Sequence[str] = ("bits",)):
        graph = Graph(fun, args, argnums, stored_as)
        self.operations = graph.operations
        turns = [Turn(graph, turn) for turn in graph.turns()]
        turns = [t for t in turns if t.bytes.any()]
        self._turns = [*sorted(turns, key=lambda t: -t.costly_bytes)[:TRIED], *turns[::TRIED]]

    def bytes_at(self, extra_operations: float) -> int:
        """The least temporary bytes at that many added operations."""
        limit = max(extra_operations, 0.0)
        return math.floor(
            self._best(lambda t, **how: t.byte_unit * _lowered(t.least(t.bytes, t.operations, limit, **how))) + 0.5
        )

    def operations_at(self, num_bytes: float) -> float:
        """The least added operations at that many temporary bytes."""
        return self._best(lambda t, **how: _lowered(t.least(t.operations, t.bytes, num_bytes / t.byte_unit, **how)))

    def _best(self, bound: Callable[..., float]) -> float:
        """The bound of the turn whose linear relaxation is the best."""
        relaxed = {turn: bound(turn, is_relaxed=True) for turn in self._turns}
        best = max(relaxed, key=relaxed.__getitem__, default=None)
        return 0.0 if best is None else max(bound(best), relaxed[best])


def _lowered(least: float) -> float:
    return max(0.0, least - TOLERANCE)
