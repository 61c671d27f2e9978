"""A step of a loop together with its derivative: with tangents for forward mode, with cotangents for reverse mode.

Both are steps of loops again, from `jax.jvp` and `jax.vjp` of the step's equations. So they keep its derivative rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._lift.stage import close_derivative
from .._lift.staged import as_types
from .._positions import replaced
from .step import LoopStep


@dataclasses.dataclass(frozen=True)
class PushedLoop:
    """The loop of a step with tangents: each of constants, carry, xs and ys is followed by its nonzero tangents.

    Attributes:
        step: the step without tangents.
        operands: values of the first constants of `loop`, which the original one does not have.
    """

    step: LoopStep
    diff_indices: tuple[int, ...]
    loop: Callable
    operands: list[Any]

    @classmethod
    def of(cls, step: LoopStep, diff_indices: tuple[int, ...], make: Callable[[LoopStep], Callable]) -> PushedLoop:
        """`make`: makes the loop of a step."""
        diff_constants, diff_carry, _ = step.sorted_indices(diff_indices)
        body = _pushed(step, diff_indices)
        num_constants = body.num_operands + step.num_constants + len(diff_constants)
        formats = [*step.carry_formats, *[None] * len(diff_carry)]
        num_carry = step.num_carry + len(diff_carry)
        pushed = with_equations(step, body.jaxpr, num_constants, num_carry, formats)
        tangent_carry = (*step.tangent_carry, *range(step.num_carry, num_carry))
        pushed = dataclasses.replace(pushed, tangent_carry=tangent_carry)
        return cls(step, diff_indices, make(pushed), body.operands)

    def tangents(self, operands: list, primals: tuple, tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the original loop's float outputs, None for zero."""
        step, (constants, carry, xs) = self.step, primals
        tangent_of = dict(zip(self.diff_indices, tangents, strict=True))
        diff_constants, diff_carry, diff_xs = step.sorted_indices(self.diff_indices)
        of_carry = [tangent_of.get(step.num_constants + i, jnp.zeros_like(carry[i])) for i in diff_carry]
        carry, ys = self.loop(
            [*operands, *constants, *(tangent_of[i] for i in diff_constants)],
            [*carry, *of_carry],
            [*xs, *(tangent_of[step.first_x + i] for i in diff_xs)],
        )
        of_outs = iter([*carry[step.num_carry :], *ys[len(step.y_avals) :]])
        has_tangent = step.has_tangents(self.diff_indices)
        return [next(of_outs) if has_tangent[i] else None for i in step.float_outs]


def _pushed(step: LoopStep, diff_indices: tuple[int, ...]) -> Body:
    diff_constants, diff_carry, diff_xs = step.sorted_indices(diff_indices)
    diff, first_carry, jaxpr = step.diff_inputs(diff_indices), step.num_constants, step.marked[0]
    has_tangent = step.has_tangents(diff)
    diff_ys = [i - step.num_carry for i in step.float_outs if i >= step.num_carry and has_tangent[i]]

    def push(constants: list, carry: list, x: list) -> list[Any]:
        of_constants, of_carry, of_x = constants[first_carry:], carry[step.num_carry :], x[len(step.x_avals) :]
        inputs = [*constants[:first_carry], *carry[: step.num_carry], *x[: len(step.x_avals)]]

        def run(*values: Any) -> tuple[list, list]:
            outs = _jax.evaluate(jaxpr, (), replaced(inputs, diff, values))
            return [*(outs[i] for i in diff_carry), *(outs[step.num_carry + i] for i in diff_ys)], outs

        _, tangents, outs = jax.jvp(run, [inputs[i] for i in diff], [*of_constants, *of_carry, *of_x], has_aux=True)
        num = len(diff_carry)
        return [
            *as_types(outs[: step.num_carry], step.avals),
            *tangents[:num],
            *outs[step.num_carry :],
            *tangents[num:],
        ]

    with_tangents = lambda avals, indices: [*avals, *(avals[i].to_tangent_aval() for i in indices)]
    types = (
        with_tangents(step.constant_avals, diff_constants),
        with_tangents(step.avals, diff_carry),
        with_tangents(step.x_avals, diff_xs),
    )
    leaves, treedef = jax.tree.flatten(types)
    run = lambda *values: push(*treedef.unflatten(values))
    return close_derivative(*_jax.stage(run, leaves, traced_for="scan", name=step.name))


class PulledLoop:
    """The reversed loop, from cotangents of a loop's outputs to cotangents of its inputs.

    If every step only adds to a carry, its cotangent is the same before every step: a constant of the reversed loop.

    Args:
        step: of the loop.
        diff_indices: the inputs to differentiate.
        has_ct: for each float output of the loop, whether it has a cotangent; the others are zero.
        sum_dtypes: for each differentiated constant, the dtype of the sum of its cotangents.
        make: makes the loop of a step.

    Attributes:
        operands: values of its first constants, which the original one does not have.
        recorded: the carries of the original loop whose values before each step are read.
    """

    def __init__(
        self,
        step: LoopStep,
        diff_indices: tuple[int, ...],
        has_ct: Sequence[bool],
        sum_dtypes: Sequence[Any],
        make: Callable[[LoopStep], Callable],
    ):
        self._original, self._diff_indices, self._sum_dtypes = step, diff_indices, sum_dtypes
        self._diff_constants, diff_carry, self._diff_xs = step.sorted_indices(diff_indices)
        nonzero = [i for i, flag in zip(step.float_outs, has_ct, strict=True) if flag]
        self._ys = [i - step.num_carry for i in nonzero if i >= step.num_carry]

        body, self._fixed = self._staged(diff_carry)
        zero = [i for i in self._fixed if i not in nonzero]
        if zero:  # no other carry has a cotangent by one of these
            diff_carry = [i for i in diff_carry if i not in zero]
            body, self._fixed = self._staged(diff_carry)
        self._varying = [i for i in diff_carry if i not in self._fixed]
        self.operands = body.operands

        jaxpr, num, read = body.jaxpr, body.num_operands, _jax.read_variables(body.jaxpr)
        _, carry, _ = step.sort(jaxpr.invars[num : num + len(step.body.jaxpr.invars)])
        self.recorded = [i for i, v in enumerate(carry) if v in read]
        self._loop = make(self._arranged(jaxpr, num))

    def _staged(self, diff_carry: list[int]) -> tuple[Body, list[int]]:
        """``(*inputs, *cts of carries, *cts of ys) -> (*cts of carries, *cts of constants, *cts of xs)`` of one step,
        and the carries whose cotangent the step returns unchanged.
        """
        step = self._original
        num, num_diff = len(step.in_avals), len(diff_carry)
        diff = [step.num_constants + i for i in diff_carry]
        diff += [*self._diff_constants, *(step.first_x + i for i in self._diff_xs)]
        outs = [*diff_carry, *(step.num_carry + i for i in self._ys)]

        def pull(*args: Any) -> list[Any]:
            inputs, cts = args[:num], list(args[num:])

            def run(*values: Any) -> list[Any]:
                results = _jax.evaluate(step.marked[0], (), replaced(inputs, diff, values))
                return [results[i] for i in outs]

            return list(jax.vjp(run, *(inputs[i] for i in diff))[1](cts))

        ct_avals = [step.out_avals[i].to_ct_aval() for i in outs]
        body = close_derivative(*_jax.stage(pull, [*step.in_avals, *ct_avals], traced_for="scan", name=step.name))
        jaxpr = _jax.without_dead_code(body.jaxpr)
        out_cts, in_cts = jaxpr.outvars[:num_diff], jaxpr.invars[body.num_operands + num :][:num_diff]
        unchanged = [i for i, v, w in zip(diff_carry, out_cts, in_cts, strict=True) if v is w]
        return Body(jaxpr, body.operands), unchanged

    def _arranged(self, jaxpr: _jax.Jaxpr, num_operands: int) -> LoopStep:
        """The step of the loop: constants, then cotangents that do not change; cotangents of carries, then sums; xs,
        then recorded carries and cotangents of ys.
        """
        step = self._original
        inputs = jaxpr.invars[num_operands:]
        constants, carry, x = step.sort(inputs[: len(step.body.jaxpr.invars)])
        cts = inputs[len(step.body.jaxpr.invars) :]
        of_carry = dict(zip(sorted([*self._fixed, *self._varying]), cts, strict=False))
        fixed, varying = [of_carry[i] for i in self._fixed], [of_carry[i] for i in self._varying]
        constants = [*jaxpr.invars[:num_operands], *constants, *fixed]
        x = [*x, *(carry[i] for i in self.recorded), *cts[len(of_carry) :]]

        outvar_of = dict(zip(of_carry, jaxpr.outvars, strict=False))
        outvars = [*(outvar_of[i] for i in self._varying), *jaxpr.outvars[len(of_carry) :]]
        pull = _jax.rebuild(jaxpr, invars=[*constants, *varying, *x], outvars=outvars)
        first_sum, num_sums = len(constants) + len(varying), len(self._sum_dtypes)

        def turn(*args: Any) -> list[Any]:
            sums = args[first_sum : first_sum + num_sums]
            outs = _jax.evaluate(pull, (), [*args[:first_sum], *args[first_sum + num_sums :]])
            cts, terms, of_x = outs[: len(varying)], outs[len(varying) :][:num_sums], outs[len(varying) + num_sums :]
            return [*cts, *(s + t.astype(s.dtype) for s, t in zip(sums, terms, strict=True)), *of_x]

        types = lambda variables: [v.aval for v in variables]
        avals = [step.constant_avals[i].to_ct_aval() for i in self._diff_constants]
        sum_avals = [a.update(dtype=dtype) for a, dtype in zip(avals, self._sum_dtypes, strict=True)]
        avals = [*types(constants), *types(varying), *sum_avals, *types(x)]
        turn_jaxpr, consts = _jax.stage(turn, avals, traced_for="scan", name=step.name)
        assert not consts, "equations without constants were staged"
        num_carry = len(varying) + num_sums
        pulled = with_equations(step, turn_jaxpr, len(constants), num_carry, [None] * num_carry)
        return dataclasses.replace(pulled, reverse=not step.reverse, tangent_carry=())

    def cotangents(self, primals: tuple, recorded: list, cts: Sequence[Any]) -> list[Any]:
        """The cotangents of the differentiated inputs.

        Args:
            recorded: the values of the carries `recorded` before each step.
            cts: of the float outputs; None for the others.
        """
        step, (constants, carry, xs) = self._original, primals
        ct_of = {i: ct for i, ct in zip(step.float_outs, cts, strict=True) if ct is not None}
        zeros = [
            jnp.zeros_like(constants[i], dtype) for i, dtype in zip(self._diff_constants, self._sum_dtypes, strict=True)
        ]
        of_carry = {i: ct_of[i] if i in ct_of else jnp.zeros_like(carry[i]) for i in (*self._fixed, *self._varying)}
        of_ys = [ct_of[step.num_carry + i] for i in self._ys]
        last, of_xs = self._loop(
            [*self.operands, *constants, *(of_carry[i] for i in self._fixed)],
            [*(of_carry[i] for i in self._varying), *zeros],
            [*xs, *recorded, *of_ys],
        )

        of_carry |= dict(zip(self._varying, last, strict=False))
        sums = zip(self._diff_constants, last[len(self._varying) :], strict=True)
        input_cts = {i: x.astype(step.constant_avals[i].dtype) for i, x in sums}
        input_cts |= {step.num_constants + i: x for i, x in of_carry.items()}
        input_cts |= {step.first_x + i: x for i, x in zip(self._diff_xs, of_xs, strict=True)}
        values = [*constants, *carry, *xs]
        return [input_cts[i] if i in input_cts else jnp.zeros_like(values[i]) for i in self._diff_indices]


def with_equations(step: LoopStep, jaxpr: _jax.Jaxpr, num_constants: int, num_carry: int, formats: list) -> LoopStep:
    """A step with these equations and counts, whose values are marked as the step's are."""
    return dataclasses.replace(
        step,
        body=Body(jaxpr, []),
        num_constants=num_constants,
        num_carry=num_carry,
        marks=(jaxpr, step.marked[1]),
        formats=formats,
    )
