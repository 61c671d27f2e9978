"""A loop that adds up a scalar: each turn is differentiated at once.

For a sum of turns ``s = sum_k g(constants, x_k)`` the gradient is the sum of the turns' gradients. The loop that
computes s can therefore add the gradients up as it goes: it needs the residuals of one turn at a time, and runs no turn
again. The derivative of the loop is then

    ds = <sum_k dg/dconstants, dconstants> + sum_k <dg/dx_k, dx_k>,

which is linear in the tangents, so JAX transposes it: reverse mode multiplies the gradients by the cotangent of s. It
is the derivative in forward mode, too, and may be differentiated again.

All other outputs, and sums whose turns depend on the results of former turns, have the derivative of a loop of
rematerialized turns. JAX removes its equations where nothing reads these tangents, as for auxiliary outputs.

Both kinds of derivative add up the gradients of constants in a wider type, if one is given.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._cached import cached_property
from .._equations.release.devices import ANYWHERE
from .._equations.release.rewriting import Release
from .._equations.structure import Body
from .._lift.stage import close_derivative
from .._lift.staged import as_types
from .._positions import replaced
from .._tree import is_float
from . import bind
from .derivative import DifferentiableLoop, jvp_of, kept
from .independent import IndependentDerivative, is_independent
from .linearized import ComposedLoop
from .nested import nested
from .step import LoopStep
from .strategy import Levels, Strategy


@dataclasses.dataclass(frozen=True, repr=False)
class Accumulated(Strategy):
    """A loop over the parts of a batch, one of whose carries may be a sum over its turns.

    Args:
        index: the position of the sum among the carries, None without one. A turn's summand does not depend on it.
        weight: of a turn, a factor of its summand; None if the first of xs is the weight.
        dtype: the type for sums of floats of fewer bits; None for their own.
    """

    index: int | None
    weight: float | None = 1.0
    dtype: Any = None

    def build(self, step: LoopStep) -> Callable:
        return TurnsAgain(step, self.dtype) if self.index is None else AccumulatedLoop(step, self, self.index)

    def for_refs(self) -> Strategy:
        return Levels(1)

    def num_runs(self, length: int) -> int:
        return length


class TurnsAgain(DifferentiableLoop):
    """A loop whose derivative rematerializes its turns.

    One equation, so that JAX does not take it apart when it separates known from unknown values of a derivative: it
    would drop the rematerialized regions of a turn's backward pass, which is known.

    Args:
        dtype: the type for sums of gradients of constants with fewer bits; None for their own.
        is_independent: whether the turns are independent, so that derivative rules are never dropped (`independent`);
            None if the step says it.
    """

    def __init__(self, step: LoopStep, dtype: Any, is_independent: bool | None = None):
        super().__init__(step)
        self._dtype = dtype
        self._is_independent = is_independent
        self._turns: dict[Any, ComposedLoop] = {}  # by the constants whose gradients are widened
        self._derivatives: dict[Any, IndependentDerivative] = {}
        self._eager: dict[Any, Callable] = {}

    def with_step(self, step: LoopStep) -> DifferentiableLoop:
        return TurnsAgain(step, self._dtype, self._is_independent)

    def run(self, args: list) -> list:
        if not _jax.is_eager():
            return super().run(args)
        jaxpr = self.jaxpr_for([jax.typeof(x) for x in args])
        if jaxpr not in self._eager:
            self._eager[jaxpr] = bind.compiled(functools.partial(_jax.evaluate, self.lowered(jaxpr).jaxpr, ()))
        return self._eager[jaxpr](args)

    def lowered(self, jaxpr: Any) -> Any:
        """The loop, whose turns add the gradients of each layer to the sums in the backward loop of the layers."""
        unknown, sums = [None] * self.step.num_constants, [ANYWHERE] * self.step.num_carry
        return Release((), (*unknown, *sums), splits_sums=True)(jaxpr)

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        avals = self.step.constant_avals
        dtypes = {i: sum_dtype(a, self._dtype) for i, a in enumerate(avals) if i in tangents}
        if self._is_by_rules:
            indices, turns = tuple(tangents), lambda step: TurnsAgain(step, self._dtype, True)
            make = lambda: IndependentDerivative(self.step, indices, list(dtypes.values()), turns)
            return kept(self._derivatives, indices, make)(primals, tangents)
        widened = [i for i, dtype in dtypes.items() if dtype != avals[i].dtype]
        # The tangents of these constants enter the loop in the wider type, and with them the sums of their cotangents.
        # So does each constant, to have a second derivative; its own value, which nothing reads, is dead code.
        constants, carry, xs = primals
        wide = [constants[i].astype(dtypes[i]) for i in widened]
        wide_tangents = {n: tangents[i].astype(dtypes[i]) for n, i in enumerate(widened)}
        narrow_tangents = {i + len(wide): t for i, t in tangents.items() if i not in widened}
        turns = lambda: ComposedLoop(self._with_wide(widened, wide), lambda step: nested(step, (self.length,)))
        tangents, composed = wide_tangents | narrow_tangents, kept(self._turns, tuple(widened), turns)
        loop = composed.linearized(tuple(tangents)) if is_linearized else composed.unchanged
        return jvp_of(loop, ([*wide, *constants], carry, xs), tangents)

    @cached_property
    def _is_by_rules(self) -> bool:
        if not _jax.has_rules(self.body):
            return False
        return is_independent(self.step) if self._is_independent is None else self._is_independent

    def _with_wide(self, indices: Sequence[int], wide: Sequence[Any]) -> LoopStep:
        """The step with further constants, `wide`, which give the constants at `indices` their tangents."""
        step, num = self.step, len(indices)
        if not indices:
            return step

        def run(*args: Any) -> list[Any]:
            inputs = list(args[num:])
            constants = [
                _jax.with_tangent_of(x.astype(inputs[i].dtype), inputs[i]) for i, x in zip(indices, args, strict=False)
            ]
            return _jax.evaluate(self.body, (), replaced(inputs, indices, constants))

        avals = [*map(_jax.abstract, wide), *(v.aval for v in self.body.invars)]
        body = Body.close(*_jax.stage(run, avals, traced_for="statetx.microbatch", name=step.name))
        num_constants = body.num_operands + num + step.num_constants
        assert not body.operands
        return dataclasses.replace(step, body=body, num_constants=num_constants, marks=None)


class AccumulatedLoop(TurnsAgain):
    """A loop with a sum: see the module's docstring."""

    def __init__(self, step: LoopStep, strategy: Accumulated, index: int):
        super().__init__(step, strategy.dtype)
        self._strategy, self._index = strategy, index
        self._gradients: dict[Any, _SumWithGradients] = {}

    def with_step(self, step: LoopStep) -> DifferentiableLoop:
        return AccumulatedLoop(step, self._strategy, self._index)

    def derivative(
        self, primals: tuple, tangents: dict[int, Any], *, is_linearized: bool
    ) -> tuple[tuple[list, list], list]:
        diff_indices, index = tuple(tangents), self._index
        diff_carry = self.step.diff_carry(diff_indices)
        if not self._is_sum(diff_carry):
            return super().derivative(primals, tangents, is_linearized=is_linearized)

        make = lambda: _SumWithGradients(self.step, self._strategy, index, diff_indices, primals)
        turns = kept(self._gradients, diff_indices, make)
        carry, ys, gradients = turns(primals)
        outs = [*carry, *ys]

        # The sum's tangent: its own first value's, and the products of gradients and tangents.
        tangent = tangents.get(self.num_constants + index, jnp.zeros_like(outs[index]))
        for i, gradient in gradients.items():
            # The gradient of a real function of a complex variable is conjugated, as JAX has it: hence no `vdot`.
            product = jnp.real(jnp.sum(gradient * tangents[i].astype(gradient.dtype))).astype(tangent.dtype)
            # In a shard_map, a sum that all devices share depends on each device's part of the input.
            tangent += _jax.psum_like(product, tangent)

        floats = [i for i, x in enumerate(outs) if is_float(x)]
        if set(diff_carry) == {index} and not any(map(is_float, ys)):
            out_tangents = [jnp.zeros_like(outs[i]) for i in floats]
        else:
            out_tangents = super().derivative(primals, tangents, is_linearized=is_linearized)[1]
        return (carry, ys), replaced(out_tangents, [floats.index(index)], [tangent])

    def _is_sum(self, diff_carry: Sequence[int]) -> bool:
        """Whether a turn adds a scalar that no carry influences which has a tangent."""
        index, num_constants = self._index, self.num_constants
        total = self.step.avals[index]
        if total.shape:  # mapped over examples: each has gradients of its own
            return False
        if _has_rule_of_shared(self.body, _jax.varying_axes(total)):
            return False
        has_tangent = [False] * len(self.body.invars)
        for i in diff_carry:
            has_tangent[num_constants + i] = i != index
        return not _jax.outputs_with_tangents(self.body, has_tangent)[index]


def _has_rule_of_shared(jaxpr: _jax.Jaxpr, axes: frozenset[str]) -> bool:
    """Whether a derivative rule is called on a value that devices share, inside of a `jax.shard_map`.

    Such a rule cannot be called again on a value that varies along these axes: it has been staged.
    """
    if not axes:
        return False
    is_shared = lambda v: isinstance(v, _jax.Var) and is_float(v.aval) and not _jax.varying_axes(v.aval) >= axes
    return any(_jax.has_rule(eqn) and any(map(is_shared, eqn.invars)) for eqn in _jax.equations_in(jaxpr))


class _SumWithGradients:
    """The loop, with the gradients of its sum with respect to some constants and xs.

    Args:
        diff_indices: of the inputs; carries among them are left out, since the sum does not depend on them.
        primals: of the types of the inputs.
    """

    def __init__(self, step: LoopStep, strategy: Accumulated, index: int, diff_indices: Sequence[int], primals: tuple):
        self._step, self._index = step, index
        self._weight, self._dtype = strategy.weight, strategy.dtype
        self._diff_constants = [i for i in diff_indices if i < step.num_constants]
        self._diff_xs = [i - step.first_x for i in diff_indices if i >= step.first_x]
        self._indices = [i for i in diff_indices if i < step.num_constants or i >= step.first_x]
        # In a shard_map, gradients of a device's own sum: the cotangent of what all devices share would be summed over
        # them in each turn.
        self._axes = tuple(_jax.varying_axes(step.avals[self._index]))

        constants, carry, xs = self._as_varying(primals)
        zeros = self._zeros(constants)
        # Gradients of half precision, which a small weight may push below the least number, are weighted after they are
        # widened.
        inputs = [*(constants[i] for i in self._diff_constants), *(xs[i] for i in self._diff_xs)]
        self._is_after = any(sum_dtype(x, self._dtype) != x.dtype for x in inputs)
        elements = [_jax.drop_axis(_jax.abstract(x), 0) for x in xs]
        avals = [*map(_jax.abstract, [*constants, *as_types(carry, step.avals), *zeros]), *elements]
        jaxpr, consts = _jax.stage(self._turn, avals, traced_for="statetx.microbatch", name=step.name)
        body = close_derivative(jaxpr, consts)
        self.operands = body.operands
        num_constants, num_carry = body.num_operands + step.num_constants, step.num_carry + len(zeros)
        counts: dict[str, Any] = {"num_constants": num_constants, "num_carry": num_carry}
        turns = dataclasses.replace(step, body=body, **counts, marks=None, formats=None)
        self._loop = TurnsAgain(turns, strategy.dtype)

    def __call__(self, primals: tuple) -> tuple[list, list, dict[int, Any]]:
        """The last carries, the ys, and the gradients by the position of the input."""
        constants, carry, xs = self._as_varying(primals)
        num_carry, num_ys = self._step.num_carry, len(self._step.y_avals)
        carry, ys = self._loop(
            [*self.operands, *constants], [*as_types(carry, self._step.avals), *self._zeros(constants)], xs
        )
        of_constants, of_xs = carry[num_carry:], ys[num_ys:]
        if self._is_after:
            of_xs = [self._weighted(g, xs[0] if self._weight is None else self._weight) for g in of_xs]
        if self._is_after and self._weight is not None:
            of_constants = [self._weighted(g, self._weight) for g in of_constants]
        gradients = [*of_constants, *of_xs]
        return carry[:num_carry], ys[:num_ys], dict(zip(self._indices, gradients, strict=True))

    def _weighted(self, gradient: Any, weight: Any) -> Any:
        """The gradient of a turn, or of all turns along the first axis, times their weight."""
        gradient = gradient.astype(sum_dtype(gradient, self._dtype))
        weight = jnp.asarray(weight, gradient.dtype)
        return gradient * weight.reshape(weight.shape + (1,) * (gradient.ndim - weight.ndim))

    def _as_varying(self, primals: tuple) -> tuple[list, list, list]:
        constants, carry, xs = primals
        varying = lambda values, positions: replaced(
            values, positions, [_jax.as_varying(values[i], self._axes) for i in positions]
        )
        return varying(constants, self._diff_constants), carry, varying(xs, self._diff_xs)

    def _zeros(self, constants: list) -> list:
        zeros = [jnp.zeros_like(constants[i]) for i in self._diff_constants]
        zeros = [x.astype(sum_dtype(x, self._dtype)) for x in zeros]
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
        weight = x[0] if self._weight is None else self._weight
        ct = jnp.where(weight == 0, 0, 1 / weight).astype(value.dtype) if self._is_after else jnp.ones_like(value)
        of_constants, of_x = pull(_jax.varying_like(ct, value))
        if self._weight is None:
            # A mean over nothing, 0/0, has a gradient of NaN, which a factor of 0 would not remove; nor does
            # `with_left_out` from a part with callbacks.
            without_nan = lambda g: jnp.where(weight == 0, jnp.zeros_like(g), g)
            of_constants, of_x = jax.tree.map(without_nan, (of_constants, of_x))
            if self._is_after:
                of_constants = [self._weighted(g, weight) for g in of_constants]
        sums = [s + g.astype(s.dtype) for s, g in zip(sums, of_constants, strict=True)]
        return [*as_types(outs[: step.num_carry], step.avals), *sums, *outs[step.num_carry :], *of_x]


def sum_dtype(x: Any, dtype: Any) -> Any:
    """The dtype for sums of arrays of the type of `x`: `dtype` for real floats of fewer bits, else their own."""
    is_narrow = dtype is not None and jnp.issubdtype(x.dtype, jnp.floating)
    return dtype if is_narrow and jnp.finfo(x.dtype).bits < jnp.finfo(dtype).bits else x.dtype


# -- parts that are left out of an output ----------------------------------------------------------------------------

# A part of weight 0 adds nothing to a mean, and its cotangent is 0. JAX multiplies this 0 with the derivatives of the
# part. Where they are NaN or infinite, as for a mean over nothing, 0/0, the products are NaN. So the tangents of the
# part's inputs, and with them its cotangents, are replaced by 0, too.


def with_left_out(
    body: Body, inputs: Sequence[Any], groups: Sequence[str | None], is_left_out: Callable[[str], Any]
) -> list[Any]:
    """The outputs of a part, without derivatives where it is left out of them.

    Args:
        body: the part; it has no operands.
        groups: for each output, its group; None for an output that the part is always in.
        is_left_out: called with a group, whether the part is left out of its outputs.
    """
    outvars = body.jaxpr.outvars
    members: dict[str | None, list[int]] = {}
    for n, (group, v) in enumerate(zip(groups, outvars, strict=True)):
        if is_float(v.aval):
            members.setdefault(group, []).append(n)
    if len(members) == 1:
        (group,) = members
        return body((), *inputs) if group is None else _masked(body.jaxpr, inputs, is_left_out(group))

    # Outputs of other groups need the tangents of the inputs. So each group has its own from a copy of the equations,
    # which is dead code where nothing is differentiated. Callbacks in it would run twice.
    outs = body((), *inputs)
    for group, positions in members.items():
        if group is None or body.jaxpr.effects:
            continue
        copy = _jax.rebuild(body.jaxpr, invars=body.jaxpr.invars, outvars=[outvars[n] for n in positions])
        of_copy = _masked(_jax.without_dead_code(copy), inputs, is_left_out(group))
        # Under `jax.vmap` both values must be mapped if one is.
        values = [jnp.where(is_left_out(group), outs[n], outs[n]) for n in positions]
        outs = replaced(outs, positions, list(map(_jax.with_tangent_of, of_copy, values)))
    return outs


def _masked(jaxpr: _jax.Jaxpr, inputs: Sequence[Any], is_left_out: Any) -> list[Any]:
    """The outputs of a jaxpr, without derivatives if `is_left_out`."""
    # In a shard_map, whether a part is left out may differ between devices.
    inputs = [_masked_tangent(is_left_out, _jax.varying_like(x, is_left_out)) if is_float(x) else x for x in inputs]
    if _jax.varying_axes(jax.typeof(is_left_out)):
        return _jax.with_varying_inputs(jaxpr, inputs)
    return _jax.evaluate(jaxpr, (), inputs)


def _masked_tangent(is_zero: Any, x: Any) -> Any:
    """`x`, with a tangent of 0 if `is_zero`."""
    return jnp.where(is_zero, jax.lax.stop_gradient(x), x)  # for XLA, `x`
