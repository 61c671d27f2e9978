"""A loop that adds up a scalar, and differentiates each turn at once.

For a sum of turns ``s = sum_k g(constants, x_k)`` the gradient is the sum of the turns' gradients. The loop that computes s can therefore add
the gradients up as it goes: it needs the residuals of one turn at a time, and runs no turn again. The derivative of the loop is then

    ds = <sum_k dg/dconstants, dconstants> + sum_k <dg/dx_k, dx_k>,

which is linear in the tangents, so JAX transposes it: reverse mode multiplies the gradients by the cotangent of s. It is the derivative in forward
mode, too, and may be differentiated again.

All other outputs, and sums whose turns depend on what former turns have computed, have the derivative of a loop of rematerialized turns. JAX
removes its equations where nothing reads these tangents, such as those of auxiliary outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body
from .._lift.staged import as_types
from .._positions import replaced
from .._tree import is_float
from .derivative import Loop, jvp_of
from .nested import nested
from .step import Step
from .strategy import Strategy


@dataclasses.dataclass(frozen=True, repr=False)
class Accumulated(Strategy):
    """A loop one of whose carries is a sum over its turns.

    Args:
        index: the position of the sum among the carries. A turn adds to it what does not depend on it.
        is_weighted: whether the first of xs is the weight of the turn, a factor of what it adds.
    """

    index: int
    is_weighted: bool = False

    def build(self, step: Step) -> Callable:
        return AccumulatedLoop(step, self)

    def num_runs(self, length: int) -> int:
        return length


class AccumulatedLoop(Loop):
    """See the module's docstring."""

    def __init__(self, step: Step, strategy: Accumulated):
        super().__init__(step)
        self._strategy = strategy
        self._rematerialized = nested(step, (step.length,))
        self._gradients: dict[Any, _Gradients] = {}

    def with_step(self, step: Step) -> AccumulatedLoop:
        return AccumulatedLoop(step, self._strategy)

    def derivative(self, primals: tuple, tangents: dict[int, Any]) -> tuple[tuple[list, list], list]:
        diff_indices, index = tuple(tangents), self._strategy.index
        diff_carry = self.step.diff_carry(diff_indices)
        if not self._is_sum(diff_carry):
            return jvp_of(self._rematerialized, primals, tangents)

        # A loop that was traced under other settings, such as x64 or a mesh, is another one.
        key = diff_indices, _jax.trace_context()
        if key not in self._gradients:
            self._gradients[key] = _Gradients(self.step, self._strategy, diff_indices, primals)
        carry, ys, gradients = self._gradients[key](primals)
        outs = [*carry, *ys]

        # The sum's tangent: its own first value's, and the products of gradients and tangents.
        tangent = tangents.get(self.num_constants + index, jnp.zeros_like(outs[index]))
        for i, gradient in gradients.items():
            # The gradient of a real function of a complex variable is conjugated, as JAX has it: hence no `vdot`.
            product = jnp.real(jnp.sum(gradient * tangents[i])).astype(tangent.dtype)
            # In a shard_map, a sum that all devices share depends on each device's part of the input.
            tangent += _jax.psum_like(product, tangent)

        floats = [i for i, x in enumerate(outs) if is_float(x)]
        if set(diff_carry) == {index} and not any(map(is_float, ys)):
            out_tangents = [jnp.zeros_like(outs[i]) for i in floats]
        else:
            out_tangents = jvp_of(self._rematerialized, primals, tangents)[1]
        return (carry, ys), replaced(out_tangents, [floats.index(index)], [tangent])

    def _is_sum(self, diff_carry: Sequence[int]) -> bool:
        """Whether a turn adds a scalar that no carry influences which has a tangent."""
        index, num_constants = self._strategy.index, self.num_constants
        if self.step.avals[index].shape:  # mapped over examples, each of which has gradients of its own
            return False
        has_tangent = [False] * len(self.body.invars)
        for i in diff_carry:
            has_tangent[num_constants + i] = i != index
        return not _jax.outputs_with_tangents(self.body, has_tangent)[index]


class _Gradients:
    """The loop, with the gradients of its sum with respect to some constants and xs.

    Args:
        diff_indices: of the inputs; carries among them are left out, since the sum does not depend on them.
        primals: of the types of the inputs.
    """

    def __init__(self, step: Step, strategy: Accumulated, diff_indices: Sequence[int], primals: tuple):
        self._step = step
        self._index, self._is_weighted = strategy.index, strategy.is_weighted
        first_x = step.num_constants + step.num_carry
        self._diff_constants = [i for i in diff_indices if i < step.num_constants]
        self._diff_xs = [i - first_x for i in diff_indices if i >= first_x]
        self._indices = [i for i in diff_indices if i < step.num_constants or i >= first_x]
        # In a shard_map, gradients of a device's own sum: the cotangent of what all devices share would be summed over them in each turn.
        self._axes = tuple(_jax.varying_axes(step.avals[self._index]))

        constants, carry, xs = self._as_varying(primals)
        zeros = self._zeros(constants)
        elements = [_jax.drop_axis(_jax.abstract(x), 0) for x in xs]
        avals = [*map(_jax.abstract, [*constants, *as_types(carry, step.avals), *zeros]), *elements]
        jaxpr, consts = _jax.stage(self._turn, avals, traced_for="statetx.microbatch", name=step.name)
        body = Body.close(jaxpr, consts)
        assert not body.operands
        self._loop = _GradientLoop(
            Step(
                body,
                step.num_constants,
                step.num_carry + len(zeros),
                length=step.length,
                reverse=step.reverse,
                policy=None,
                name=step.name,
            )
        )

    def __call__(self, primals: tuple) -> tuple[list, list, dict[int, Any]]:
        """The last carries, the ys, and the gradients by the position of the input."""
        constants, carry, xs = self._as_varying(primals)
        num_carry, num_ys = self._step.num_carry, len(self._step.y_avals)
        carry, ys = self._loop(constants, [*as_types(carry, self._step.avals), *self._zeros(constants)], xs)
        gradients = [*carry[num_carry:], *ys[num_ys:]]
        return carry[:num_carry], ys[:num_ys], dict(zip(self._indices, gradients, strict=True))

    def _as_varying(self, primals: tuple) -> tuple[list, list, list]:
        constants, carry, xs = primals
        varying = lambda values, positions: replaced(  # noqa: E731
            values, positions, [_jax.as_varying(values[i], self._axes) for i in positions]
        )
        return varying(constants, self._diff_constants), carry, varying(xs, self._diff_xs)

    def _zeros(self, constants: list) -> list:
        zeros = [jnp.zeros_like(constants[i]) for i in self._diff_constants]
        return [_jax.with_weak_type(x, False) if _jax.abstract(x).weak_type else x for x in zeros]

    def _turn(self, *args: Any) -> list[Any]:
        """``(*constants, *carry, *sums, *x) -> (*carry, *sums, *y, *gradients of x)``."""
        step = self._step
        num_before, num_sums = step.num_constants + step.num_carry, len(self._diff_constants)
        constants, carry = list(args[: step.num_constants]), list(args[step.num_constants : num_before])
        sums, x = args[num_before : num_before + num_sums], list(args[num_before + num_sums :])

        def run(turn_constants: list, turn_x: list) -> tuple[Any, list]:
            turn_constants = replaced(constants, self._diff_constants, turn_constants)
            inputs = [*turn_constants, *carry, *replaced(x, self._diff_xs, turn_x)]
            outs = _jax.with_varying_inputs(step.body.jaxpr, inputs) if self._axes else step.body((), *inputs)
            return outs[self._index], outs

        primals = [constants[i] for i in self._diff_constants], [x[i] for i in self._diff_xs]
        value, pull, outs = jax.vjp(run, *primals, has_aux=True)
        of_constants, of_x = pull(_jax.varying_like(jnp.ones_like(value), value))
        if self._is_weighted:
            # A mean over nothing, 0/0, has a gradient of NaN, which a factor of 0 would not remove; nor does `left_out` from a part with callbacks.
            without_nan = lambda g: jnp.where(x[0] == 0, jnp.zeros_like(g), g)  # noqa: E731
            of_constants, of_x = jax.tree.map(without_nan, (of_constants, of_x))
        sums = [s + g for s, g in zip(sums, of_constants, strict=True)]
        return [*as_types(outs[: step.num_carry], step.avals), *sums, *outs[step.num_carry :], *of_x]


class _GradientLoop(Loop):
    """The loop of `_Gradients`.

    One equation, so that JAX does not take it apart when it separates what a derivative knows from what it does not: it would drop the
    rematerialized regions of a turn's backward pass, which is known.
    """

    def derivative(self, primals: tuple, tangents: dict[int, Any]) -> tuple[tuple[list, list], list]:
        return jvp_of(nested(self.step, (self.length,)), primals, tangents)

    def with_step(self, step: Step) -> _GradientLoop:
        return _GradientLoop(step)
