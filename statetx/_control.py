"""Loops and branches of which the bodies are there already, as equations.

`jax.lax.scan` and its like trace the Python function that they are given, which costs as much again where the function
only evaluates a jaxpr. What is made here binds their primitives to the jaxpr itself, which gives the same equation.
`jax.lax` does more for bodies that hand an input on as it is (it becomes a constant, or never enters the loop), have
effects, or change the type of a carry, and it runs loops in Python under `jax.disable_jit`: these go through it.

Each function here is given bodies and returns a function of arrays, to be kept in the table of structures: the
primitives' parameters then are the same objects at every call, and JAX's caches, keyed by them, are hit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import cond_p, while_p

from . import _compat
from ._jaxpr import Body
from ._staged import as_types


def scan(
    body: Body, num_constants: int, avals: Sequence[Any], *, length: int, reverse: bool, unroll: int | bool
) -> Callable:
    """``(constants, carry, xs) -> (carry, ys)``, all lists; `avals` are the types that the carry must keep."""
    num_carry = len(avals)

    @compiled
    def through_lax(constants: list, carry: list, xs: list) -> tuple[list, list]:
        def step(c: list, x: list) -> tuple[list, list]:
            outs = body(constants, *c, *x)
            return as_types(outs[:num_carry], avals), outs[num_carry:]

        return jax.lax.scan(step, carry, xs, length, reverse, unroll)

    if unroll is True or unroll != 1 or not _is_plain(body, num_constants, avals):
        return through_lax
    jaxpr = _compat.close(body.jaxpr, ())

    def scan(constants: list, carry: list, xs: list) -> tuple[list, list]:
        if _compat.is_jit_disabled():
            return through_lax(constants, carry, xs)
        outs = _compat.bind_scan(jaxpr, constants, carry, xs, length=length, reverse=reverse)
        return outs[:num_carry], outs[num_carry:]

    return scan


def while_loop(test: Body, body: Body, avals: Sequence[Any]) -> Callable:
    """``(constants of the test, constants of the body, carry) -> (carry)``, all lists; for `avals` see `scan`."""
    num_constants = len(body.jaxpr.invars) - len(avals)

    @compiled
    def through_lax(test_constants: list, body_constants: list, carry: list) -> list:
        return jax.lax.while_loop(
            lambda c: test(test_constants, *c)[0], lambda c: as_types(body(body_constants, *c), avals), carry
        )

    if test.jaxpr.effects or not _is_plain(body, num_constants, avals):
        return through_lax
    test_jaxpr, body_jaxpr = _compat.close(test.jaxpr, ()), _compat.close(body.jaxpr, ())

    def while_loop(test_constants: list, body_constants: list, carry: list) -> list:
        if _compat.is_jit_disabled():
            return through_lax(test_constants, body_constants, carry)
        counts = {"cond_nconsts": len(test_constants), "body_nconsts": len(body_constants)}
        operands = (*test_constants, *body_constants, *carry)
        return while_p.bind(*operands, cond_jaxpr=test_jaxpr, body_jaxpr=body_jaxpr, **counts)

    return while_loop


def branch(bodies: Sequence[Body], avals: Sequence[Any]) -> Callable:
    """``(index, *operands) -> outputs``; `avals` are the types of the outputs, and a bool picks the second of two."""

    @compiled
    def through_lax(index: Any, *operands: Any) -> list:
        branches = [lambda *xs, b=b: as_types(b((), *xs), avals) for b in bodies]
        if index.dtype == bool:
            return jax.lax.cond(index, branches[1], branches[0], *operands)
        return jax.lax.switch(index, branches, *operands)

    handed_on = zip(*(_handed_on(b.jaxpr) for b in bodies), strict=True)
    is_plain = all(_keeps_types(b.jaxpr, avals) for b in bodies)
    if len(bodies) == 1 or not is_plain or any(i[0] is not None and len(set(i)) == 1 for i in handed_on):
        return through_lax
    jaxprs = tuple([_compat.close(b.jaxpr, ()) for b in bodies])

    def branch(index: Any, *operands: Any) -> list:
        if _compat.is_jit_disabled():
            return through_lax(index, *operands)
        which = jax.lax.convert_element_type(index, jnp.int32)
        if index.dtype != bool:
            which = jax.lax.clamp(jnp.int32(0), which, jnp.int32(len(jaxprs) - 1))
        return cond_p.bind(which, *operands, branches=jaxprs)

    return branch


def _is_plain(body: Body, num_constants: int, avals: Sequence[Any]) -> bool:
    """Whether `jax.lax` would make a loop of a body as it is: ``(constants, carry, xs) -> (carry, ys)``."""
    handed_on = _handed_on(body.jaxpr)
    num_carry = len(avals)
    return (
        _keeps_types(body.jaxpr, avals)
        and all(i != num_constants + n for n, i in enumerate(handed_on[:num_carry]))
        and all(i is None or i < num_constants + num_carry for i in handed_on[num_carry:])
    )


def _keeps_types(jaxpr: Any, avals: Sequence[Any]) -> bool:
    """Whether the first outputs have these types, and the jaxpr no effects."""
    return not (jaxpr.effects or jaxpr.is_high) and all(
        v.aval == aval for v, aval in zip(jaxpr.outvars, avals, strict=False)
    )


def _handed_on(jaxpr: Any) -> list[int | None]:
    """For each output, which input it is; None if it is computed."""
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    return [places.get(v) if isinstance(v, _compat.Var) else None for v in jaxpr.outvars]


def compiled(fun: Callable) -> Callable:
    """Compiled once for each structure where nothing is traced, inlined where something is; made when first called."""

    @functools.cache
    def jitted() -> Callable:
        return jax.jit(fun, inline=True)

    return lambda *args: jitted()(*args)
