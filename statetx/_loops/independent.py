"""Derivatives of loops whose steps are independent: by the derivative rules, in every order or mode.

Where JAX linearizes a loop it drops derivative rules (see `linearized`), and later derivatives differ from the unrolled
loop's. A step of a plain loop may depend on the step before, so that nothing but JAX's `scan` defines the right ones.
Independent steps are parts of a whole, such as a batch, and have the derivatives of a function of the whole, without a
loop, where no rule is ever dropped.

So forward mode is a loop of the step with tangents, and reverse mode one of the step with cotangents (`tangents`), both
staged by `jax.jvp` and `jax.vjp`. They are independent again, or run through the cotangents of the carries, and have
derivatives of the same kind. No equation of a step is ever seen by partial evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _jax
from .._lift.stage import close_derivative
from .._lift.staged import as_types
from .._positions import replaced
from .._tree import is_float
from .derivative import kept, linear_in_tangents
from .step import LoopStep
from .tangents import PulledLoop, PushedLoop, with_equations


def is_independent(step: LoopStep) -> bool:
    """Whether a float carry of the loop influences nothing but itself: it is a sum, or a running mean."""
    jaxpr, num_constants = step.body.jaxpr, step.num_constants
    return all(
        _is_added(jaxpr, num_constants + i, i) or _is_alone(jaxpr, num_constants + i, i)
        for i, aval in enumerate(step.avals)
        if is_float(aval)
    )


def _is_added(jaxpr: _jax.Jaxpr, index: int, out: int) -> bool:
    """Whether one equation alone reads an input, and nothing but one output has the result."""
    v, result = jaxpr.invars[index], jaxpr.outvars[out]
    readers = [eqn for eqn in jaxpr.eqns if any(v is x for x in eqn.invars)]
    reads = [x for eqn in jaxpr.eqns for x in eqn.invars] + jaxpr.outvars
    return len(readers) == 1 and readers[0].outvars == [result] and sum(x is result for x in reads) == 1


def _is_alone(jaxpr: _jax.Jaxpr, index: int, out: int) -> bool:
    has_tangent = _jax.outputs_with_tangents(jaxpr, [i == index for i in range(len(jaxpr.invars))])
    return not any(flag for i, flag in enumerate(has_tangent) if i != out)


class IndependentDerivative:
    """The derivative of a loop with respect to some inputs.

    Args:
        step: of the loop.
        diff_indices: the inputs with tangents.
        sum_dtypes: for each differentiated constant, the dtype of the sum of its cotangents.
        make: makes the loop of a step, with derivatives of this kind.

    Attributes:
        operands: the values that its derivative rules close over.
    """

    def __init__(
        self,
        step: LoopStep,
        diff_indices: tuple[int, ...],
        sum_dtypes: Sequence[Any],
        make: Callable[[LoopStep], Callable],
    ):
        self._step, self._diff_indices, self._sum_dtypes, self._make = step, diff_indices, sum_dtypes, make
        self._pulled: dict[Any, PulledLoop] = {}
        self._pushed = PushedLoop.of(step, diff_indices, make)
        pulled = self._pulled_loop([True] * len(step.float_outs))
        self._recorded = pulled.recorded
        primal, self._primal_operands = _primal(step, diff_indices, pulled.recorded)
        self._forward = make(primal)
        self.operands = [*self._primal_operands, *self._pushed.operands, *pulled.operands]

    def _pulled_loop(self, has_ct: Sequence[bool]) -> PulledLoop:
        make = lambda: PulledLoop(self._step, self._diff_indices, has_ct, self._sum_dtypes, self._make)
        return kept(self._pulled, tuple(has_ct), make)

    def __call__(self, primals: tuple, tangents: dict[int, Any]) -> tuple[tuple[list, list], list]:
        """The outputs, and the tangents of the float ones."""
        constants, carry, xs = primals
        carry, ys = self._forward([*self._primal_operands, *constants], carry, xs)
        ys, recorded = ys[: len(self._step.y_avals)], ys[len(self._step.y_avals) :]

        def pull(primals: tuple, recorded: list, cts: list) -> list[Any]:
            pulled = self._pulled_loop([ct is not None for ct in cts])
            positions = [self._recorded.index(i) for i in pulled.recorded]
            return pulled.cotangents(primals, [recorded[n] for n in positions], cts)

        outs, pushed = (carry, ys), self._pushed
        options: dict[str, Any] = {"push": pushed.tangents, "pull": pull, "operands": pushed.operands}
        return outs, linear_in_tangents(self._step, primals, recorded, outs, tangents, **options)


def _primal(step: LoopStep, diff_indices: tuple[int, ...], recorded: Sequence[int]) -> tuple[LoopStep, list[Any]]:
    """The step where it is linearized, and the values of its first constants, which the original does not have.

    There the forward rule of a `jax.custom_vjp` function computes its result, and is differentiated itself. The values
    of the `recorded` carries before the step are further ys.
    """
    diff = step.diff_inputs(diff_indices)

    def primal(*inputs: Any) -> list[Any]:
        def run(*values: Any) -> tuple[list, list]:
            outs = _jax.evaluate(step.marked[0], (), replaced(inputs, diff, values))
            return [outs[i] for i in step.float_outs], outs

        _, _, outs = jax.linearize(run, *(inputs[i] for i in diff), has_aux=True)
        carry = as_types(outs[: step.num_carry], step.avals)
        return [*carry, *outs[step.num_carry :], *(inputs[step.num_constants + i] for i in recorded)]

    body = close_derivative(*_jax.stage(primal, step.in_avals, traced_for="scan", name=step.name))
    jaxpr = _jax.without_dead_code(body.jaxpr)
    num_constants = body.num_operands + step.num_constants
    return with_equations(step, jaxpr, num_constants, step.num_carry, step.carry_formats), body.operands
