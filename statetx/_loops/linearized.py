"""A step as JAX's `scan` linearizes it, for derivatives of a loop's derivative.

The linearization of a scan is two scans: of the primals with the residuals, and of the tangents. Where partial
evaluation does not know an operand, here a carry or an element of xs, JAX takes the function of a `jax.custom_jvp` call
for linear and drops its rule. So the primal scan has no such rule any more, except for calls that read constants alone,
which JAX moves out of the loop: the first derivative of a scan is by the rules, and later ones are the true derivatives
of both scans. Where a rule is not the derivative of its function, they differ from the unrolled loop's.

A loop that runs its steps again, in loops and regions of its own, would have rules dropped in some runs and not in
others. It takes the two halves from JAX instead, which divides a scan of one step in the same way, and has them
differentiated where the plain loop has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._lift.stage import close_derivative
from .._positions import replaced
from .derivative import (
    DifferentiableLoop,
    floats_of,
    jvp_of,
    kept,
    linear_in_tangents,
    until_linearized,
    with_derivative,
)
from .step import LoopStep
from .tangents import PushedLoop, with_equations


class ComposedLoop(DifferentiableLoop):
    """A loop that is made of loops and regions of JAX, with the derivatives of the plain loop.

    Args:
        build: makes the loop ``(constants, carry, xs) -> (carry, ys)`` of a step.

    Attributes:
        unchanged: the loop; one equation, with `derivative`, if the step has derivative rules.
    """

    def __init__(self, step: LoopStep, build: Callable[[LoopStep], Callable]):
        super().__init__(step)
        self._build, self._plain = build, build(step)
        self._has_rules = _jax.has_rules(self.body)
        self._halves: dict[Any, Halves] = {}
        self._pushed: dict[Any, PushedLoop] = {}
        self.unchanged: Callable = self if self._has_rules else self._plain

    def with_step(self, step: LoopStep) -> DifferentiableLoop:
        return ComposedLoop(step, self._build)

    def linearized(self, diff_indices: Sequence[int], *, is_primal: bool = False) -> Callable:
        """The loop whose first derivative with respect to these inputs is the one of JAX's linearization.

        Args:
            is_primal: the loop of the primal half alone: its first derivative is the second one of the plain loop.
        """
        if not self._has_rules:
            return self._plain
        halves = kept(self._halves, tuple(diff_indices), lambda: Halves.of(self.step, diff_indices))
        if is_primal not in halves.loops:
            halves.loops[is_primal] = self._build(halves.primal if is_primal else halves.step)
        run = halves.loops[is_primal]
        return lambda constants, carry, xs: run([*halves.operands, *constants], carry, xs)

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        if is_linearized or not self._has_rules:
            return jvp_of(self.linearized(tuple(tangents)), primals, tangents)
        # The outputs lose their rules if the derivative, staged by now, is linearized later. So they are computed apart
        # from the tangents.
        diff_indices = tuple(tangents)
        linearized = self.linearized(diff_indices, is_primal=True)
        outs = until_linearized(self, linearized, primals, self.step.name)
        # Forward mode keeps the rules.
        make = lambda step: composed(step, self._build)
        pushed = kept(self._pushed, diff_indices, lambda: PushedLoop.of(self.step, diff_indices, make))
        pull = lambda primals, _, cts: self.pullback(primals, diff_indices, cts)
        options: dict[str, Any] = {"push": pushed.tangents, "pull": pull, "operands": pushed.operands}
        return outs, linear_in_tangents(self.step, primals, (), outs, tangents, **options)

    def pullback(self, primals: tuple, diff_indices: tuple[int, ...], cts: Sequence[Any]) -> list[Any]:
        """The cotangents of these inputs by JAX's linearization, for cotangents of the float outputs; None for a zero
        one.
        """
        leaves, loop = jax.tree.leaves(primals), self.linearized(diff_indices)
        run = lambda *xs: floats_of(loop, primals, dict(zip(diff_indices, xs, strict=True)))
        outs, pull = jax.vjp(run, *(leaves[i] for i in diff_indices))
        return list(pull([jnp.zeros_like(x) if ct is None else ct for ct, x in zip(cts, outs, strict=True)]))


def composed(step: LoopStep, build: Callable[[LoopStep], Callable]) -> Callable:
    """The loop that `build` makes of a step, from loops and regions of JAX, with the derivatives of the plain loop."""
    return ComposedLoop(step, build).unchanged


@dataclasses.dataclass(frozen=True)
class Halves:
    """A step, linearized with respect to some inputs.

    Attributes:
        step: the step, with the tangents of the second half as its first derivative.
        primal: the first half.
        operands: values of the first constants of both steps, which the original one does not have.
        loops: of `primal` and of `step`, by whether it is of the former.
    """

    step: LoopStep
    primal: LoopStep
    operands: list[Any]
    loops: dict[bool, Callable] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, step: LoopStep, diff_indices: Sequence[int]) -> Halves:
        diff, floats, avals = step.diff_inputs(diff_indices), step.float_outs, step.in_avals
        num_inputs, num_outs = len(avals), len(step.out_avals)
        stage = functools.partial(_jax.stage, traced_for="scan", name=step.name)

        # Two scans of one step: ``(*inputs, *tangents) -> (*outputs, *tangents of the float outputs)``.
        once = step.with_length(1, None).with_body(step.marked[0]).plain()

        def scans(*values: Any) -> list[Any]:
            inputs, tangents = values[:num_inputs], values[num_inputs:]

            def run(*diff_values: Any) -> tuple[list, list]:
                last, ys = once(*step.sort(replaced(inputs, diff, diff_values)))
                outs = [*last, *ys]
                return [outs[i] for i in floats], outs

            _, push, outs = jax.linearize(run, *[inputs[i] for i in diff], has_aux=True)
            return [*outs, *push(*tangents)]

        is_x = [i >= step.first_x for i in (*range(num_inputs), *diff)]
        is_y = [i >= step.num_carry for i in (*range(num_outs), *floats)]
        all_avals = [*avals, *(avals[i].to_tangent_aval() for i in diff)]
        stacked = [_jax.stacked_type(aval, 1) if flag else aval for aval, flag in zip(all_avals, is_x, strict=True)]
        body = close_derivative(*stage(scans, stacked))

        # In line, so that a policy finds the step's values, and no array is stacked.
        is_x = [*[False] * body.num_operands, *is_x]
        in_line = lambda *values: _jax.evaluate_single_turns(body.jaxpr, values, is_x, is_y)
        operand_avals = [v.aval for v in body.jaxpr.invars[: body.num_operands]]
        jvp_body = Body.close(*stage(in_line, [*operand_avals, *all_avals]))
        operands = [*jvp_body.operands, *body.operands]
        num = len(operands)

        primal = _jax.rebuild(jvp_body.jaxpr, invars=jvp_body.jaxpr.invars, outvars=jvp_body.jaxpr.outvars[:num_outs])
        primal = _jax.without_dead_code(primal)
        primal = _jax.rebuild(primal, invars=primal.invars[: num + num_inputs], outvars=primal.outvars)

        def derivative(args: tuple, tangents: dict[int, Any]) -> tuple[list, list]:
            of_diff = [tangents[i] if i in tangents else jnp.zeros_like(args[i]) for i in (num + i for i in diff)]
            outs = _jax.evaluate(jvp_body.jaxpr, (), [*args, *of_diff])
            return outs[:num_outs], step.without_zeros(diff_indices, outs[num_outs:])

        run = with_derivative(lambda *args: _jax.evaluate(primal, (), args), derivative, reads_nothing=True)
        jaxpr, consts = stage(run, [v.aval for v in primal.invars])
        assert not consts, "equations without constants were staged"
        counts = num + step.num_constants, step.num_carry, step.carry_formats
        return cls(with_equations(step, jaxpr, *counts), with_equations(step, primal, *counts), operands)
