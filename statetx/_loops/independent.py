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
import jax.numpy as jnp

from .. import _jax
from .._lift.stage import close_derivative
from .._lift.staged import as_types
from .._positions import replaced
from .._tree import is_float
from .step import LoopStep
from .tangents import PulledStep, PushedStep, with_equations


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
        is_kept: whether it can be used again. A derivative rule may close over another value next time.
    """

    def __init__(
        self,
        step: LoopStep,
        diff_indices: tuple[int, ...],
        sum_dtypes: Sequence[Any],
        make: Callable[[LoopStep], Callable],
    ):
        self._step, self._diff_indices, self._sum_dtypes, self._make = step, diff_indices, sum_dtypes, make
        self._pulled: dict[Any, tuple[PulledStep, Callable]] = {}
        self._pushed = PushedStep.of(step, diff_indices)
        self._push = make(self._pushed.step)
        num_floats = sum(map(is_float, [*step.avals, *step.y_avals]))
        pulled, _ = self._pulled_loop([True] * num_floats)
        self._recorded = pulled.recorded
        primal, self._operands = _primal(step, diff_indices, pulled.recorded)
        self._forward = make(primal)
        self.is_kept = not (self._operands or self._pushed.operands or pulled.operands)

    def _pulled_loop(self, has_ct: Sequence[bool]) -> tuple[PulledStep, Callable]:
        key = tuple(has_ct), _jax.trace_context()
        if key in self._pulled:
            return self._pulled[key]
        pulled = PulledStep(self._step, self._diff_indices, has_ct, self._sum_dtypes)
        loop = self._make(pulled.step)
        if not pulled.operands:
            self._pulled[key] = pulled, loop
        return pulled, loop

    def __call__(self, primals: tuple, tangents: Sequence[Any]) -> tuple[tuple[list, list], list]:
        """The outputs, and the tangents of the float ones."""
        constants, carry, xs = primals
        carry, ys = self._forward([*self._operands, *constants], carry, xs)
        ys, recorded = ys[: len(self._step.y_avals)], ys[len(self._step.y_avals) :]
        leaves, treedef = jax.tree.flatten((primals, recorded))
        num, operands = len(leaves), self._pushed.operands
        types = [_jax.abstract(x) for x in (*carry, *ys) if is_float(x)]

        def push(residuals: list, tangents: list) -> list[Any]:
            primals, _ = treedef.unflatten(residuals[:num])
            out_tangents = self._pushed.tangents(self._push, residuals[num:], primals, tangents)
            return [jnp.zeros(a.shape, a.dtype) if t is None else t for t, a in zip(out_tangents, types, strict=True)]

        def pull(residuals: list, cts: list) -> list[Any]:
            primals, recorded = treedef.unflatten(residuals[:num])
            pulled, loop = self._pulled_loop([ct is not None for ct in cts])
            positions = [self._recorded.index(i) for i in pulled.recorded]
            return pulled.cotangents(loop, primals, [recorded[n] for n in positions], cts)

        rules_of = self._step.name if _jax.has_users_rule(self._step.body.jaxpr) else None
        residuals = [*leaves, *operands]
        return (carry, ys), _jax.linear_call(push, pull, residuals, list(tangents), types, rules_of=rules_of)


def _primal(step: LoopStep, diff_indices: tuple[int, ...], recorded: Sequence[int]) -> tuple[LoopStep, list[Any]]:
    """The step where it is linearized, and the values of its first constants, which the original does not have.

    There the forward rule of a `jax.custom_vjp` function computes its result, and is differentiated itself. The values
    of the `recorded` carries before the step are further ys.
    """
    diff_constants, diff_carry, diff_xs = step.sorted_indices(diff_indices)
    first_carry, first_x = step.num_constants, step.num_constants + step.num_carry
    diff = [*diff_constants, *(first_carry + i for i in diff_carry), *(first_x + i for i in diff_xs)]
    floats = [i for i, aval in enumerate([*step.avals, *step.y_avals]) if is_float(aval)]

    def primal(*inputs: Any) -> list[Any]:
        def run(*values: Any) -> tuple[list, list]:
            outs = _jax.evaluate(step.marked[0], (), replaced(inputs, diff, values))
            return [outs[i] for i in floats], outs

        _, _, outs = jax.linearize(run, *(inputs[i] for i in diff), has_aux=True)
        carry = as_types(outs[: step.num_carry], step.avals)
        return [*carry, *outs[step.num_carry :], *(inputs[first_carry + i] for i in recorded)]

    avals = [*step.constant_avals, *step.avals, *step.x_avals]
    body = close_derivative(*_jax.stage(primal, avals, traced_for="scan", name=step.name))
    jaxpr = _jax.without_dead_code(body.jaxpr)
    num_constants = body.num_operands + step.num_constants
    return with_equations(step, jaxpr, num_constants, step.num_carry, step.carry_formats), body.operands
