"""A program with its gradient as one graph of equations and values: what `_turn` reasons about.

An equation in the body of a loop stands for its runs in all steps, and a value for what its variable holds in all steps. What an
equation reads is therefore available to a fraction, between 0 and 1:

    available(operand) = share + sum of factor * (runs(producer of value) + holds(value)),   over the values in `Operand.resolve`,

where ``runs`` and ``holds`` are the fractions of the steps in which an equation runs and a value is held; outside loops they are 0 or 1.
The carry that a step reads is the new carry of the step before, and the initial carry in the first step: averaged over the steps,
factor 1 for the new carry and 1 / length for the initial one. After the loop the carry is that of the last step, which may be among the
steps that ran or were held: factor ``length``. So each of these fractions is at least the true one, which errs towards more available.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _frames, _jax
from .._equations.flops import flops
from .._equations.inline import inline
from .._equations.primitives import CALLS, INLINED, JIT, REMAT, row_of
from .._equations.structure import Body
from .._jax import Jaxpr
from .._lift.context import device_bytes
from .._positions import function_of
from .._remat.bits import are_bits, is_bits, of_steps
from .._tree import freeze, is_float
from ._parts import flatten
from ._stored import Formats, format_of, stored_bytes


class Loop(NamedTuple):
    """The loop in whose body an equation is.

    Attributes:
        depth: number of loops around the body, this one included.
        times: number of runs of the body, those of the loops around it included.
        is_moved: whether the whole loop is the same in all steps of a loop around it.
    """

    depth: int = 0
    times: int = 1
    is_moved: bool = False


PROGRAM = Loop()


class Operand:
    """What an equation reads.

    Attributes:
        home: the innermost loop in whose steps it differs.
        share: the fraction that is available in any case; 1 for inputs, outputs and constants of the program.
        parts: other operands that it comes from, each with its factor.
        is_backward: whether it depends on the cotangents of the program.
        is_bits: whether it is proved to be 0 or 1.
    """

    def __init__(self, home: Loop = PROGRAM, share: float = 0.0, is_backward: bool = False, is_bits: bool = False):
        self.home = home
        self.share = share
        self.is_bits = is_bits
        self.parts: list[tuple[Operand, float]] = []
        self.is_backward = is_backward

    def resolve(self) -> dict[Value, float] | None:
        """The values that it comes from, with their factors, and the share under None; None if it is available in any case."""
        factors: dict[Any, float] = {}
        self._add_to(factors, 1.0, ())
        return None if factors.get(None, 0.0) >= 1 else factors

    def _add_to(self, factors: dict[Any, float], scale: float, readers: tuple[Operand, ...]) -> None:
        # A carry that comes from nothing but itself, as two do that are exchanged in each step, counts as available: it errs low.
        share = 1.0 if self in readers else self.share
        if share:
            factors[None] = factors.get(None, 0.0) + scale * share
        elif isinstance(self, Value):
            factors[self] = factors.get(self, 0.0) + scale
        else:
            for part, factor in self.parts:
                part._add_to(factors, scale * factor, (*readers, self))


class Node:
    """An equation.

    Attributes:
        cost: operations of its runs in all steps. 0 if a schedule may repeat it without more counted operations: see `Dataflow`.
        fuses: whether XLA may compute it within the kernels that read it.
    """

    def __init__(self, operands: Sequence[Operand], cost: float, fuses: bool):
        self.operands = operands
        self.cost = cost
        self.fuses = fuses
        self.is_backward = any(operand.is_backward for operand in operands)
        self.results: list[Value] = []


class Value(Operand):
    """A result of an equation.

    Attributes:
        num_bytes: on one device, of all steps together, in the smallest format.
    """

    def __init__(self, producer: Node, home: Loop, num_bytes: int, is_bits: bool):
        super().__init__(home, is_backward=producer.is_backward, is_bits=is_bits)
        self.producer = producer
        self.num_bytes = num_bytes


class Dataflow:
    """The graph of a program and its gradient.

    The cost of an equation is 0 where a schedule may run it more than once at no counted operations:

    - XLA computes elementwise operations, moves of data and random bits within the kernels that read them, more than once;
    - equal equations are one node, and so are the steps of an equation that reads the same in each: they may run at several times;
    - of a branch, a ``while`` loop or another equation with equations inside, some results may be computed without the others.

    Args:
        jaxpr: the program, without constants.
        diff_indices: the inputs to differentiate with respect to.
        num_out: number of differentiated outputs; they come first.
        formats: in which values may be held.

    Attributes:
        nodes: the equations of forward and backward pass, in an order in which they can run.
        output_bytes: sizes of the outputs: those of the program, and the gradients.
    """

    def __init__(self, jaxpr: Jaxpr, diff_indices: Sequence[int], num_out: int, formats: Formats = ()):
        self._formats = formats
        self.nodes: list[Node] = []
        self._nodes_by_key: dict[Hashable, Node] = {}
        self._literals: dict[Hashable, Operand] = {}

        gradient, num_cotangents = _with_gradient(jaxpr, diff_indices, num_out)
        num_inputs = len(gradient.invars) - num_cotangents
        inputs = [Operand(share=1.0, is_backward=i >= num_inputs) for i in range(len(gradient.invars))]
        for output in self._run(gradient, inputs, PROGRAM):
            output.share = 1.0  # outputs have memory of their own
        self.output_bytes = [device_bytes(v.aval) for v in gradient.outvars]

    def _run(self, jaxpr: Jaxpr, operands: Sequence[Operand], loop: Loop) -> list[Operand]:
        constants = [Operand(share=1.0) for _ in jaxpr.constvars]
        rule = lambda eqn, operands: self._results(eqn, operands, loop)  # noqa: E731
        return _jax.interpret(jaxpr, [*constants, *operands], rule, literal=self._literal)

    def _literal(self, atom: Any) -> Operand:
        return self._literals.setdefault((freeze(atom.val), atom.aval), Operand(share=1.0, is_bits=is_bits(atom)))

    def _results(self, eqn: Any, operands: list[Operand], loop: Loop) -> Sequence[Operand]:
        if eqn.primitive.name in CALLS:
            return self._run(_jax.open_jaxpr(eqn.params[row_of(eqn).jaxpr])[0], operands, loop)
        is_backward = any(operand.is_backward for operand in operands)
        if eqn.primitive.name == "scan" and not is_backward and not eqn.effects:
            return self._steps(eqn, operands, loop)

        home = _home(operands)
        key = eqn.primitive, freeze(eqn.params), tuple(operands), tuple([v.aval for v in eqn.outvars])
        node = self._nodes_by_key.get(key)
        if node is None:
            node = self._nodes_by_key[key] = self._node(eqn, operands, home)
        else:
            node.cost = 0.0
        if home is not loop:
            node.cost = 0.0
        return node.results

    def _node(self, eqn: Any, operands: Sequence[Operand], home: Loop) -> Node:
        fuses = row_of(eqn).fuses or eqn.primitive.name.startswith(_RANDOM)
        is_free = fuses or home.is_moved or eqn.effects or any(True for _ in _jax.inner_jaxprs(eqn))
        node = Node(operands, 0.0 if is_free else float(flops(eqn) * home.times), fuses)
        bits = are_bits(eqn, [operand.is_bits for operand in operands])
        sizes = [self._bytes_of(v.aval, b) for v, b in zip(eqn.outvars, bits, strict=True)]
        node.results = [Value(node, home, n * home.times, b) for n, b in zip(sizes, bits, strict=True)]
        if eqn.effects:
            for value in node.results:
                value.share = 1.0
        self.nodes.append(node)
        return node

    def _bytes_of(self, aval: Any, is_bits: bool) -> int:
        if not (hasattr(aval, "dtype") and hasattr(aval, "shape")):
            return 0  # a token, say
        format = format_of(aval, self._formats, is_bits)
        return device_bytes(aval) if format is None else stored_bytes(aval, format)

    def _steps(self, eqn: Any, operands: list[Operand], loop: Loop) -> list[Operand]:
        """A loop: see the module."""
        num_constants, num_carry = _jax.scan_counts(eqn)
        initial, stacked = operands[num_constants:][:num_carry], operands[num_constants + num_carry :]
        body, length = _jax.open_jaxpr(eqn.params["jaxpr"])[0], max(eqn.params["length"], 1)
        around = _home(operands)
        inside = Loop(around.depth + 1, around.times * length, around.is_moved or around is not loop)

        # A carry that each step returns unchanged stays the initial one.
        pairs = zip(body.invars[num_constants:], body.outvars[:num_carry], strict=False)
        is_unchanged = [v is new for v, new in pairs]
        bits, _ = of_steps(body, num_constants, num_carry, [x.is_bits for x in operands])
        carries = [
            x if same else Operand(inside, is_bits=b)
            for x, same, b in zip(initial, is_unchanged, bits[num_constants:], strict=False)
        ]
        slices = [_part_of(x, 1.0, inside) for x in stacked]
        outs = self._run(body, [*operands[:num_constants], *carries, *slices], inside)

        results = list(initial)
        for i, same in enumerate(is_unchanged):
            if not same:
                carries[i].parts += [(initial[i], 1 / length), (outs[i], 1.0)]
                results[i] = _part_of(outs[i], length, around)
                results[i].is_bits = outs[i].is_bits and initial[i].is_bits
        return [*results, *(_part_of(y, 1.0, around) for y in outs[num_carry:])]


# Random bits are a function of their key; XLA may compute them by elementwise operations.
_RANDOM = ("random_", "threefry", "rng_")


def _home(operands: Sequence[Operand]) -> Loop:
    return max((x.home for x in operands), key=lambda loop: loop.depth, default=PROGRAM)


def _part_of(operand: Operand, factor: float, home: Loop) -> Operand:
    part = Operand(home, is_backward=operand.is_backward, is_bits=operand.is_bits)
    part.parts.append((operand, factor))
    return part


def _with_gradient(jaxpr: Jaxpr, diff_indices: Sequence[int], num_out: int) -> tuple[Jaxpr, int]:
    """``(*inputs, *cotangents) -> (*outputs, *gradients)`` of the program without rematerialization; and the number of cotangents."""
    program = inline(flatten(jaxpr), calls=JIT | REMAT | {_jax.CLOSED_CALL})
    cotangents = [v.aval for v in program.outvars[:num_out] if is_float(v.aval)]

    def outputs(*inputs: Any) -> tuple[list[Any], list[Any]]:
        outs = _jax.evaluate(program, (), inputs)
        diff_outs = [jnp.asarray(x) for x in outs[:num_out] if is_float(x)]
        return diff_outs, [*(x for x in outs[:num_out] if not is_float(x)), *outs[num_out:]]

    @_frames.undone
    def run(*arrays: Any) -> list[Any]:
        inputs, cts = arrays[: len(program.invars)], arrays[len(program.invars) :]
        diff_inputs = [inputs[i] for i in diff_indices]
        outs, pullback, aux = jax.vjp(function_of(outputs, inputs, diff_indices), *diff_inputs, has_aux=True)
        return [*outs, *aux, *pullback(list(cts))]

    avals = [*(v.aval for v in program.invars), *cotangents]
    body = Body.close(*_jax.stage(run, avals, traced_for="statetx.plan", name="gradient"))
    return inline(_jax.without_dead_code(body.jaxpr), calls=INLINED), len(cotangents)
