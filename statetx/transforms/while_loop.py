"""`while_loop` and `fori_loop`: loops without outputs for each step, whose bodies read and write states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from .._errors import StateAccessError
from .._jaxpr import Body, table
from .._lift import name_of
from .._paths import Paths
from .._staged import Staged, as_types, check_carry, flatten_carry, kept_types, promote, publish, union
from .._tree import Partition, type_str
from .._typing import PyTree


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], PyTree], init_val: PyTree) -> PyTree:
    """Run ``val = body_fun(val)`` while ``cond_fun(val)``; both may read states and the body may write them.

    As ``jax.lax.while_loop``: not differentiable in reverse mode. The Python of each function runs once.

    Args:
        cond_fun: returns a scalar bool. It sees the states as the last step left them.
        body_fun: returns a value of the type of `init_val`.
        init_val: a pytree of arrays and Python numbers.

    Returns:
        The last value.

    Raises:
        StateAccessError: `cond_fun` wrote a state (a random draw is a write).
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
    """
    carry, part = flatten_carry("while_loop", init_val)
    body, carry = _stage_body("while_loop", body_fun, lambda *xs: (body_fun(part.combine(xs)),), carry, part, [])
    test = Staged("while_loop", cond_fun, lambda *xs: (cond_fun(part.combine(xs)),), body.avals, kind="while_cond")
    _check_test(test)
    loop = _Loop("while_loop", body, test)

    def build(test: Body, body: Body) -> Callable:
        def run(test_constants: list, body_constants: list, carry: list) -> list:
            return jax.lax.while_loop(
                lambda c: test(test_constants, *c)[0],
                lambda c: as_types(body(body_constants, *c), loop.carry_avals),
                carry,
            )

        run.__name__ = "while_loop"
        return jax.jit(run, inline=True)

    kept = table.get(loop.bodies, ("while_loop", tuple(loop.carry_avals)), build)
    return part.combine(loop.publish(kept(*loop.constants, [*carry, *loop.state_values])))


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], PyTree],
    init_val: PyTree,
    *,
    unroll: int | bool | None = None,
) -> PyTree:
    """Run ``val = body_fun(i, val)`` for `i` from `lower` up to `upper`; the body may read and write states.

    As ``jax.lax.fori_loop``: differentiable in reverse mode if both bounds are Python integers. The Python of the body
    runs once.

    Args:
        lower, upper: integers or scalar integer arrays; `upper` itself is not reached.
        body_fun: ``(i, val) -> val``.
        init_val: a pytree of arrays and Python numbers.
        unroll: as in ``jax.lax.fori_loop``.

    Returns:
        The last value.

    Raises:
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
    for name, bound in (("lower", lower), ("upper", upper)):
        if jnp.ndim(bound) != 0 or not jnp.issubdtype(jnp.result_type(bound), jnp.integer):
            raise TypeError(f"fori_loop: {name} must be a scalar integer, got {type_str(bound)}: {bound!r}.")
    carry, part = flatten_carry("fori_loop", init_val)
    index = _compat.abstract(0 if isinstance(lower, int) and isinstance(upper, int) else jnp.asarray(lower + 0 * upper))
    body, carry = _stage_body(
        "fori_loop", body_fun, lambda *xs: (body_fun(xs[0], part.combine(xs[1:])),), carry, part, [index]
    )
    loop = _Loop("fori_loop", body, None)
    static = all(not isinstance(b, jax.Array) for b in (lower, upper))
    bounds = (int(lower), int(upper)) if static else None

    def build(body: Body) -> Callable:
        def run(constants: list, carry: list, *limits: Any) -> list:
            def step(i: Any, c: list) -> list:
                i = jnp.asarray(i)
                (i,) = as_types([i if i.dtype == index.dtype else i.astype(index.dtype)], [index])
                return as_types(body(constants, i, *c), loop.carry_avals)

            start, stop = bounds or limits
            return jax.lax.fori_loop(start, stop, step, carry, unroll=unroll)

        run.__name__ = "fori_loop"
        return jax.jit(run, inline=True)

    kept = table.get(loop.bodies, ("fori_loop", bounds, unroll, tuple(loop.carry_avals)), build)
    limits = () if static else (lower, upper)
    return part.combine(loop.publish(kept(*loop.constants, [*carry, *loop.state_values], *limits)))


def _stage_body(
    name: str, fun: Callable, call: Callable[..., tuple], carry: list, part: Partition, before: list
) -> tuple[Staged, list]:
    """Stage a body ``(*before, *carry) -> carry``; gives the carry too, with the types that the body keeps."""
    kind = {"while_loop": "while_body"}.get(name, name)
    for _ in range(2):
        avals = [_compat.abstract(x) for x in carry]
        body = Staged(name, fun, call, [*before, *avals], kind=kind)
        promoted = promote(carry, avals, body.out_avals)
        if promoted is None:
            break
        carry = promoted
    check_carry(name, fun, part, avals, body.outs[0], body.out_avals)
    return body, carry


def _check_test(test: Staged) -> None:
    if test.effects:
        effect = test.effects[0]
        raise StateAccessError(
            f"while_loop: the condition {name_of(test.fun)} wrote {type(effect.state).__name__} "
            f"{Paths(test.fun)(effect.state)!r} at {effect.site}. A random draw is a write too.\n"
            f"Fix: write it in the body and let the condition read it."
        )
    if len(test.out_avals) != 1 or test.out_avals[0].shape != () or test.out_avals[0].dtype != bool:
        got = ", ".join(type_str(a) for a in test.out_avals) or "nothing"
        raise TypeError(f"while_loop: the condition {name_of(test.fun)} must return a scalar bool, got {got}.")


class _Loop:
    """A staged body, and perhaps a condition, with written states in the carry and the others as constants.

    Attributes:
        bodies: the condition, if there is one, and the body, with inputs ordered: constants, what comes before the
            carry, carry, carried states.
        constants: for each of them, the values of its constants.
        carry_avals: types of the carry and the carried states.
        state_values: first values of the carried states.
    """

    def __init__(self, name: str, body: Staged, test: Staged | None):
        stages = [body] if test is None else [test, body]
        states = union([s.inputs for s in stages])
        written = {id(e.state) for e in body.effects}
        self._body = body
        self._carried = [i for i in states if id(i.state) in written]
        constant = [i for i in states if id(i.state) not in written]
        paths = Paths(body.fun)
        for effect in body.effects:
            body.check_written(effect, paths)
        num_carry = body.num_out
        self.state_values = [x for i in self._carried for x in i.values]
        before = len(body.avals) - num_carry
        self.carry_avals = [
            *kept_types(body.avals[before:], body.out_avals),
            *(a for i in self._carried for a in i.avals),
        ]
        self.bodies: list[Body] = []
        self.constants: list[list] = []
        for s in stages:
            mine = [i for i in constant if id(i.state) in s.inputs]
            states_in = [v for i in self._carried for v in s.state_vars(i)]
            invars = [*s.operand_vars, *(v for i in mine for v in s.state_vars(i)), *s.arg_vars, *states_in]
            states_out = [v for i in self._carried for v in s.written_vars.get(id(i.state), ())]
            self.bodies.append(s.arrange(invars, [*s.out_vars, *states_out]))
            self.constants.append([*s.operands, *(x for i in mine for x in i.values)])

    def publish(self, carry: list) -> list:
        """Store the carried states' last values; returns the leaves of the carry."""
        left, rest = {}, iter(carry[self._body.num_out :])
        for i in self._carried:
            left[id(i.state)] = [next(rest) for _ in i.values]
        leaves = [x for e in self._body.effects for x in left[id(e.state)]]
        publish(self._body.effects, self._body.values, leaves)
        return carry[: self._body.num_out]
