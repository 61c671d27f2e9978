"""Loops without stacked outputs, whose bodies use states: `while_loop`, `fori_loop`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from .. import _jax, _states
from .._equations.structure import Body, table
from .._errors import PolicyError, StateAccessError
from .._lift.carry import flatten_carry, settle
from .._lift.options import check_flags, check_whole
from .._lift.rules import Rules
from .._lift.staged import Staged, body_with_key_data, loop_with_key_data, needs_key_data, union
from .._lift.wrapper import check_callable, name_of
from .._loops import bind, eager, online
from .._loops.build import as_strategy, refuse_effects, resolve_strategy
from .._loops.step import LoopStep
from .._loops.strategy import Strategy
from .._text import type_str
from .._tree import as_value, is_array_or_number
from .scan import ScanLoop

T = TypeVar("T")


@_jax.api_boundary
def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    checkpoint: Strategy | int | None = None,
    max_steps: int | None = None,
) -> T:
    """Run ``val = body_fun(val)`` while ``cond_fun(val)``; both may read states and the body may write them.

    As ``jax.lax.while_loop``: differentiable in reverse mode only with `checkpoint`. The Python of each function runs
    once; the body's runs twice if a Python number in `init_val` or in a state is promoted (see `scan`).

    Args:
        cond_fun: returns a scalar bool. It sees the states' values after the last step.
        body_fun: returns a value of the type of `init_val`.
        init_val: a pytree of arrays and Python numbers.
        checkpoint: ``policies.Slots(n)``, or `n`: number of values to store at a time, for a gradient through any
            number of steps. The gradient can be differentiated in forward mode, but not again in reverse mode.
        max_steps: the loop ends after this many steps, whatever `cond_fun` returns.

    Returns:
        The last value.

    State:
        Reads the states that either function reads, and carries the states that the body writes.

    Memory:
        Under reverse-mode differentiation with `checkpoint`: `n` values, and the residuals of one step.

    Raises:
        PolicyError: `checkpoint` is neither a number of slots nor `Truncated`, has a block, or is offloaded.
        EffectError: the body calls a host callback with effects, and `checkpoint` would call it again.
        StateAccessError: `cond_fun` wrote a state (a random draw is a write); or, with `checkpoint`, a function with a
            derivative rule writes a `jax.Ref`.
        CarryTypeError: a step changes the type of the value or of a state.
        CreatedStateError: a body created a state that outlives the loop.

    Source:
        ``jax.lax.while_loop``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> n = statetx.State(jnp.zeros((), jnp.int32))
        >>> def halve(x):
        ...     n.value += 1
        ...     return x / 2
        >>> float(statetx.while_loop(lambda x: x > 1, halve, 16.0)), int(n.value)
        (1.0, 4)
        >>> root = lambda a: statetx.while_loop(
        ...     lambda x: abs(x * x - a) > 1e-5, lambda x: (x + a / x) / 2, a, checkpoint=8
        ... )
        >>> import jax
        >>> bool(abs(jax.grad(root)(2.0) - 0.5 / 2**0.5) < 1e-3)
        True
    """
    strategy = (
        checkpoint if checkpoint is None else as_strategy("while_loop", checkpoint).for_unknown_length("while_loop")
    )
    if max_steps is not None:
        check_whole("while_loop", "max_steps", max_steps)
    check_callable("while_loop", cond_fun, "a callable as the condition", "while_loop(cond_fun, body_fun, init_val)")
    check_callable("while_loop", body_fun, "a callable as the body", "while_loop(cond_fun, body_fun, init_val)")
    carry, part = flatten_carry("while_loop", init_val)
    if _jax.is_jit_disabled():
        # ConcretizationTypeError: under vmap the examples may end at different steps.
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            first = part.combine([as_value(x) for x in carry])
            return eager.while_loop(cond_fun, body_fun, first, max_steps)

    def stage(fun: Callable, traced_for: str, carry: list, enter: Callable) -> Staged:
        arguments = lambda xs: ((part.combine(xs),), {})
        avals = list(map(_jax.abstract, carry))
        return Staged("while_loop", fun, avals, arguments=arguments, traced_for=traced_for, enter=enter)

    body, carry, enter = settle(functools.partial(stage, body_fun, "while_body"), carry, part)
    test = stage(cond_fun, "while_cond", carry, enter)
    _check_test(test)
    return part.combine(_WhileLoop(body, test).run(carry, strategy, max_steps))


def _have_concrete_bounds(lower: Any, upper: Any) -> bool:
    for name, bound in (("lower", lower), ("upper", upper)):
        _states.refuse_states(f"fori_loop: {name}", bound)
        is_scalar = is_array_or_number(bound) and jnp.ndim(bound) == 0
        if not is_scalar or not any(jnp.issubdtype(jnp.result_type(bound), x) for x in (jnp.integer, jnp.floating)):
            raise TypeError(f"fori_loop: {name} must be a real scalar, got {type_str(bound)}: {bound!r}.")
    return not isinstance(lower, _jax.Tracer) and not isinstance(upper, _jax.Tracer)


def _check_options_of_traced_bounds(checkpoint: Any, unroll: Any, progress: bool) -> None:
    """Raise for an option that needs the number of steps."""
    if unroll not in (None, False, 1):
        raise ValueError("fori_loop: unroll= needs concrete bounds; lower or upper is traced.")
    if resolve_strategy("fori_loop", checkpoint, unroll) is not None:
        raise PolicyError(
            "fori_loop: checkpoint= needs concrete bounds; lower or upper is traced.\n"
            "Fix: give Python integers, or use while_loop(..., checkpoint=Slots(n)), which takes any number of steps."
        )
    if progress:
        raise ValueError(
            "fori_loop: progress=True needs concrete bounds; lower or upper is traced. Fix: give Python integers."
        )


@_jax.api_boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    checkpoint: Strategy | int | tuple[int, ...] | Literal["auto"] | None = None,
    progress: bool = False,
) -> T:
    """Run ``val = body_fun(i, val)`` for `i` from `lower` up to `upper`; the body may read and write states.

    As ``jax.lax.fori_loop``: differentiable in reverse mode if both bounds are Python integers. The Python of the body
    runs once, or twice if a Python number is promoted (see `scan`).

    Args:
        lower, upper: scalar integers; `upper` is excluded. Real numbers are treated as in JAX: concrete bounds are
            truncated, traced bounds are not.
        body_fun: ``(i, val) -> val``.
        init_val: a pytree of arrays and Python numbers.
        unroll: as in ``jax.lax.fori_loop``.
        checkpoint: how to store less for the gradient of the loop, as in `scan`; both bounds must be Python integers.
        progress: whether to show a progress bar, as in `scan`; both bounds must be Python integers.

    Returns:
        The last value.

    State:
        As in `scan`: written states are carried, the others are constants.

    Memory:
        As in `scan`.

    Raises:
        PolicyError: `checkpoint` cannot be met.
        CarryTypeError: a step changes the type of the value or of a state.
        CreatedStateError: the body created a state that outlives the loop.

    Source:
        ``jax.lax.fori_loop``.

    Example:
        >>> import jax.numpy as jnp, statetx
        >>> total = statetx.State(jnp.zeros(()))
        >>> def body(i, x):
        ...     total.value += x
        ...     return x * 2
        >>> float(statetx.fori_loop(0, 3, body, 1.0)), float(total.value)
        (8.0, 7.0)
    """
    check_callable("fori_loop", body_fun, "a callable as the body", "fori_loop(lower, upper, body_fun, init_val)")
    check_flags("fori_loop", progress=progress)
    is_static = _have_concrete_bounds(lower, upper)
    if not is_static:
        _check_options_of_traced_bounds(checkpoint, unroll, progress)
    strategy = resolve_strategy("fori_loop", checkpoint, unroll)

    carry, part = flatten_carry("fori_loop", init_val)
    length = 0
    if is_static:
        lower, upper = int(lower), int(upper)  # as JAX, which truncates concrete bounds
        largest = jnp.iinfo(jax.dtypes.canonicalize_dtype(int)).max
        if max(abs(lower), abs(upper)) > largest:
            raise ValueError(
                f"fori_loop: the bounds {lower} and {upper} must be at most {largest}, the largest counter of JAX."
            )
        length = max(upper - lower, 0)
        if _jax.is_jit_disabled():
            first = part.combine([as_value(x) for x in carry])
            return eager.fori_loop(range(lower, upper), body_fun, first, strategy and strategy.truncation)
    # A counter of traced bounds has their promoted dtype.
    start = lower if is_static else jnp.asarray(lower + 0 * upper)

    def step(i: Any, *xs: Any) -> tuple[Any, Any]:
        return jax.lax.add(i, jax.lax.full_like(i, 1)), body_fun(*arguments([i, *xs])[0])

    def arguments(leaves: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        return (leaves[0], part.combine(leaves[1:])), {}

    def stage(carry: list, enter: Callable) -> Staged:
        avals = list(map(_jax.abstract, [start, *carry]))
        return Staged("fori_loop", body_fun, avals, arguments=arguments, call=step, traced_for="fori_loop", enter=enter)

    body, carry, _ = settle(stage, carry, part, num_before=1)  # the counter comes first

    if is_static:
        loop = ScanLoop(body, 1 + len(carry), length, Rules("fori_loop", None, body_fun, ()))
        final_carry, _ = loop.run([start, *carry], [], unroll=unroll or 1, strategy=strategy, progress=progress)
    else:
        limit = jnp.asarray(upper, body.avals[0].dtype)
        is_below = {"call": lambda i, *xs: (i < limit,), "traced_for": "while_cond"}
        test = Staged("fori_loop", body_fun, body.avals, arguments=arguments, **is_below)
        final_carry = _WhileLoop(body, test).run([start, *carry])
    return part.combine(final_carry[1:])


def _check_test(test: Staged) -> None:
    eager.refuse_writes(test.fun, test.effects)
    if len(test.out_avals) != 1 or test.out_avals[0].shape != () or test.out_avals[0].dtype != bool:
        got = ", ".join(type_str(a) for a in test.out_avals) or "nothing"
        raise TypeError(f"while_loop: the condition {name_of(test.fun)} must return a scalar bool, got {got}.")


class _WhileLoop:
    """A staged condition and body, with the written states in the carry and the others as constants.

    Attributes:
        bodies: the condition and the body. Inputs, in order: constants, carry, carried states.
        constants: for each of `bodies`, the values of its constants.
    """

    def __init__(self, body: Staged, test: Staged):
        stages = [test, body]
        states = union([s.inputs for s in stages])
        written = {id(e.state) for e in body.effects}
        self._body = body
        self._carried = [i for i in states if id(i.state) in written]
        constant_states = [i for i in states if id(i.state) not in written]
        self.bodies: list[Body] = []
        self.constants: list[list] = []

        for s in stages:
            constant_inputs = [i for i in constant_states if id(i.state) in s.inputs]
            inputs = [*s.operand_vars, *constant_inputs, *s.arg_vars, *self._carried]
            self.bodies.append(s.arrange(inputs, [*s.out_vars, *(self._carried if s is body else ())]))
            self.constants.append([*s.operands, *(x for i in constant_inputs for x in i.values)])

    def run(self, carry: list, strategy: Any = None, max_steps: int | None = None) -> list:
        """Run the loop while the condition holds, and publish its writes; returns the leaves of the last carry."""
        refuse_effects(self._body, self.bodies[-1], strategy)

        def build(test: Body, body: Body) -> Callable:
            if uses_key_data:
                return loop_with_key_data(build_loop(*map(body_with_key_data, (test, body))), body)
            return build_loop(test, body)

        def build_loop(test: Body, body: Body) -> Callable:
            num_constants = len(self.constants[-1])
            body = bind.varying_as_it_enters(body, num_constants, len(body.jaxpr.outvars))
            if strategy is None and max_steps is None:
                return bind.while_loop(test, body, num_constants)

            name = f"while_loop({name_of(self._body.fun)})"
            options = {"length": 0, "reverse": False, "policy": strategy and strategy.policy, "name": name}
            step = LoopStep(body, num_constants, len(body.jaxpr.outvars), **options)
            if strategy is None:
                return online.while_loop(test, step, None, max_steps)
            if _jax.writes_refs(body.jaxpr):
                raise StateAccessError(
                    f"{name}: a function with a derivative rule writes a Ref, and with checkpoint= JAX cannot carry "
                    "the Ref.\n"
                    "Fix: let the function return the value, and write the Ref in the body of the loop."
                )
            return strategy.build_while(test, step, max_steps)

        values = [*carry, *(x for i in self._carried for x in i.values)]
        if strategy is not None:
            values = self._vary(values)
        # JAX's checker of key reuse would count a step that is run again as a second use, see `_lift.staged`.
        uses_key_data = strategy is not None and needs_key_data(*self.bodies)
        use = ("while_loop", uses_key_data, strategy, max_steps, *map(len, self.constants))
        loop = table.get(self.bodies, use, build)
        leaves = loop(*self.constants, values)
        state_leaves = iter(leaves[self._body.num_out :])
        self._body.publish({id(i.state): [next(state_leaves) for _ in i.values] for i in self._carried})
        return leaves[: self._body.num_out]

    def _vary(self, carry: list) -> list:
        """Make all values device-varying in a shard_map if the condition is; returns the carry.

        The devices may then do different numbers of steps, and each reverses its own. A sum of cotangents over the
        devices must therefore be outside the reversed loop. So the constants are made varying before the loop, and JAX
        sums their cotangents after it.
        """
        axes = sorted(_jax.varying_axes(self.bodies[0].jaxpr.outvars[0].aval))
        if not axes:
            return carry
        carry = [_jax.as_varying(x, axes) for x in carry]
        self.constants = [[_jax.as_varying(x, axes) for x in values] for values in self.constants]
        self.bodies = [
            _varying(body, [jax.typeof(x) for x in (*values, *carry)], axes)
            for body, values in zip(self.bodies, self.constants, strict=True)
        ]
        return carry


def _varying(body: Body, avals: Sequence[Any], axes: Sequence[str]) -> Body:
    """The body's equations, staged again for inputs whose types vary over these mesh axes."""

    def run(*args: Any) -> list[Any]:
        return [_jax.as_varying(x, axes) for x in _jax.with_varying_inputs(body.jaxpr, args)]

    return Body.close(*_jax.stage(run, avals, traced_for="while_body", name="while_loop"))
