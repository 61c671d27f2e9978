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
from .._tree import is_float
from .derivative import DifferentiableLoop, floats_of, jvp_of, until_linearized, with_derivative
from .step import LoopStep
from .tangents import PushedStep, with_equations


class ComposedLoop(DifferentiableLoop):
    """A loop that is made of loops and regions of JAX, with the derivatives of the plain loop.

    Args:
        build: makes the loop ``(constants, carry, xs) -> (carry, ys)`` of a step.

    Attributes:
        unchanged: the loop; one equation, with `derivative`, if the step has derivative rules.
    """

    def __init__(self, step: LoopStep, build: Callable[[LoopStep], Callable]):
        super().__init__(step)
        self._build, self._composed = build, build(step)
        self._has_rules = _jax.has_rules(self.body)
        self._halves: dict[Any, tuple[Halves, dict[bool, Callable]]] = {}
        self._pushed: dict[Any, tuple[PushedStep, Callable]] = {}
        self.unchanged: Callable = self if self._has_rules else self._composed

    def with_step(self, step: LoopStep) -> DifferentiableLoop:
        return ComposedLoop(step, self._build)

    def run(self, args: list) -> list:
        carry, ys = self._composed(*self.step.sort(args))
        return [*carry, *ys]

    def linearized(self, diff_indices: Sequence[int], *, is_primal: bool = False) -> Callable:
        """The loop whose first derivative with respect to these inputs is the one of JAX's linearization.

        Args:
            is_primal: the loop of the primal half alone: its first derivative is the second one of the plain loop.
        """
        if not self._has_rules:
            return self._composed
        key = tuple(diff_indices), _jax.trace_context()
        halves, loops = self._halves.get(key) or (Halves.of(self.step, diff_indices), {})
        if not halves.operands:  # a derivative rule may close over another value next time
            self._halves[key] = halves, loops
        if is_primal not in loops:
            loops[is_primal] = self._build(halves.primal if is_primal else halves.step)
        run = loops[is_primal]
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
        leaves, treedef = jax.tree.flatten(primals)
        pushed, loop = self._pushed_loop(diff_indices)
        types = [_jax.abstract(x) for x in jax.tree.leaves(outs) if is_float(x)]

        def push(residuals: list, tangents: list) -> list[Any]:
            out_tangents = pushed.tangents(loop, residuals[num:], treedef.unflatten(residuals[:num]), tangents)
            return [jnp.zeros(a.shape, a.dtype) if t is None else t for t, a in zip(out_tangents, types, strict=True)]

        def pull(residuals: list, cts: list) -> list[Any]:
            primals = treedef.unflatten(residuals[:num])
            run = lambda *xs: floats_of(
                self.linearized(diff_indices), primals, dict(zip(diff_indices, xs, strict=True))
            )
            _, pullback = jax.vjp(run, *(residuals[i] for i in diff_indices))
            return list(pullback([_jax.zeros(a) if ct is None else ct for ct, a in zip(cts, types, strict=True)]))

        num = len(leaves)
        rules_of = self.step.name if _jax.has_users_rule(self.body) else None
        residuals, diff = [*leaves, *pushed.operands], list(tangents.values())
        return outs, _jax.linear_call(push, pull, residuals, diff, types, rules_of=rules_of)

    def _pushed_loop(self, diff_indices: tuple[int, ...]) -> tuple[PushedStep, Callable]:
        """The step with tangents, and its loop: forward mode keeps the rules."""
        key = diff_indices, _jax.trace_context()
        if key in self._pushed:
            return self._pushed[key]
        pushed = PushedStep.of(self.step, diff_indices)
        loop = ComposedLoop(pushed.step, self._build).unchanged
        if not pushed.operands:
            self._pushed[key] = pushed, loop
        return pushed, loop


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
    """

    step: LoopStep
    primal: LoopStep
    operands: list[Any]

    @classmethod
    def of(cls, step: LoopStep, diff_indices: Sequence[int]) -> Halves:
        diff_constants, diff_carry, diff_xs = step.sorted_indices(diff_indices)
        first_carry, first_x = step.num_constants, step.num_constants + step.num_carry
        diff = [*diff_constants, *(first_carry + i for i in diff_carry), *(first_x + i for i in diff_xs)]
        avals, out_avals = [*step.constant_avals, *step.avals, *step.x_avals], [*step.avals, *step.y_avals]
        num_inputs, num_outs = len(avals), len(out_avals)
        floats = [i for i, aval in enumerate(out_avals) if is_float(aval)]
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

        is_x = [i >= first_x for i in (*range(num_inputs), *diff)]
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
