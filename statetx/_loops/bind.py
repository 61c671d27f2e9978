"""Binding of loops, or branches, whose bodies are jaxprs.

`jax.lax.scan`, `while_loop` and `cond` trace the Python functions of their bodies. A function that only evaluates a
jaxpr would be traced a second time, for the same equation. So the functions of this module bind the primitives to the
jaxprs. `jax.lax` does more for bodies that return an input unchanged (it becomes a constant, or never enters the loop)
or have effects, and it runs loops in Python under `jax.disable_jit`: these go through it.

Each function takes bodies and returns a function of arrays, which the table of structures keeps: the parameters of the
primitives are then the same objects at every call, so that JAX finds them in its caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import cond_p, while_p

from .. import _jax
from .._equations.structure import Body


def varying_as_it_enters(body: Body, num_constants: int, num_carry: int) -> Body:
    """A body whose carry leaves it varying between the devices of a `jax.shard_map` where it does when it enters."""
    pairs = zip(body.jaxpr.invars[num_constants:], body.jaxpr.outvars[:num_carry], strict=False)
    axes = [sorted(_jax.varying_axes(a.aval) - _jax.varying_axes(b.aval)) for a, b in pairs]
    if not any(axes):
        return body

    def run(*args: Any) -> list[Any]:
        outs = _jax.evaluate(body.jaxpr, (), args)
        return [*map(_jax.as_varying, outs, axes), *outs[num_carry:]]

    return Body(jax.make_jaxpr(run)(*(v.aval for v in body.jaxpr.invars)).jaxpr, body.operands)


def scan(body: Body, num_constants: int, num_carry: int, *, length: int, reverse: bool, unroll: int | bool) -> Callable:
    """``(constants, carry, xs) -> (carry, ys)``, all lists."""

    @compiled
    def through_lax(constants: list, carry: list, xs: list) -> tuple[list, list]:
        def step(c: list, x: list) -> tuple[list, list]:
            outs = body(constants, *c, *x)
            return outs[:num_carry], outs[num_carry:]

        return jax.lax.scan(step, carry, xs, length, reverse, unroll)

    # True == 1 in Python, so True is asked for by identity: for `jax.lax.scan` it means the whole length.
    if unroll is True or unroll != 1 or not _is_plain(body, num_constants, num_carry):
        return through_lax

    # Closed here, once: JAX's caches go by the identity of the closed jaxpr.
    jaxpr = _jax.close(body.jaxpr, ())

    def scan(constants: list, carry: list, xs: list) -> tuple[list, list]:
        # The primitive would compile the loop under `jax.disable_jit`, too; `jax.lax` runs it step by step.
        if _jax.is_jit_disabled():
            return through_lax(constants, carry, xs)
        outs = _jax.bind_scan(jaxpr, constants, carry, xs, length=length, reverse=reverse)
        return outs[:num_carry], outs[num_carry:]

    return scan


def while_loop(test: Body, body: Body, num_constants: int) -> Callable:
    """``(constants of the test, constants of the body, carry) -> (carry)``, all lists; the body has `num_constants`."""

    @compiled
    def through_lax(test_constants: list, body_constants: list, carry: list) -> list:
        step = _jax.name_as_staged(lambda c: body(body_constants, *c), body.jaxpr)
        return jax.lax.while_loop(lambda c: test(test_constants, *c)[0], step, carry)

    # `jax.lax.while_loop` makes a forwarded carry a constant only if the condition does not read it. Such a loop goes
    # through it in either case: the check is JAX's affair.
    if test.jaxpr.effects or not _is_plain(body, num_constants, len(body.jaxpr.outvars)):
        return through_lax
    test_jaxpr, body_jaxpr = _jax.close(test.jaxpr, ()), _jax.close(body.jaxpr, ())

    def while_loop(test_constants: list, body_constants: list, carry: list) -> list:
        if _jax.is_jit_disabled():
            return through_lax(test_constants, body_constants, carry)
        counts = {"cond_nconsts": len(test_constants), "body_nconsts": len(body_constants)}
        operands = (*test_constants, *body_constants, *carry)
        return while_p.bind(*operands, cond_jaxpr=test_jaxpr, body_jaxpr=body_jaxpr, **counts)

    return while_loop


def branch(bodies: Sequence[Body], dtypes: Sequence[Any]) -> Callable:
    """``(index, *operands) -> outputs``, of these dtypes where they are not None; a bool picks the second of two
    bodies. In a `jax.shard_map` an output may vary between devices if it does in any body.
    """
    varying = [
        [_jax.varying_axes(v.aval) for v in outs] for outs in zip(*(b.jaxpr.outvars for b in bodies), strict=True)
    ]
    axes = [sorted(frozenset().union(*each)) for each in varying]

    def through_body(body: Body, *operands: Any) -> list:
        outs = zip(body((), *operands), dtypes, axes, strict=True)
        convert = lambda x, dtype: x if dtype is None else jax.lax.convert_element_type(x, dtype)
        return [_jax.as_varying(convert(x, dtype), names) for x, dtype, names in outs]

    @compiled
    def through_lax(index: Any, *operands: Any) -> list:
        branches = [functools.partial(through_body, body) for body in bodies]
        if index.dtype == bool:
            return jax.lax.cond(index, branches[1], branches[0], *operands)
        return jax.lax.switch(index, branches, *operands)

    # `jax.lax` calls the only branch directly, and takes an output that is the same input in every branch out of the
    # `cond`.
    handed_on = zip(*(_handed_on(b.jaxpr) for b in bodies), strict=True)
    is_plain = all(_is_pure(b.jaxpr) for b in bodies) and all(dtype is None for dtype in dtypes)
    is_plain = is_plain and all(len(set(each)) == 1 for each in varying)
    if len(bodies) == 1 or not is_plain or any(i[0] is not None and len(set(i)) == 1 for i in handed_on):
        return through_lax
    jaxprs = tuple([_jax.close(b.jaxpr, ()) for b in bodies])

    def branch(index: Any, *operands: Any) -> list:
        if _jax.is_jit_disabled():
            return through_lax(index, *operands)
        # The branches of `cond_p` are numbered, and `jax.lax.cond` puts the one for False first. `jax.lax.switch`
        # clamps its index before it binds the primitive.
        which = jax.lax.convert_element_type(index, jnp.int32)
        if index.dtype != bool:
            which = jax.lax.clamp(jnp.int32(0), which, jnp.int32(len(jaxprs) - 1))
        return cond_p.bind(which, *operands, branches=jaxprs)

    return branch


def _is_plain(body: Body, num_constants: int, num_carry: int) -> bool:
    """Whether `jax.lax` would make a loop of the unchanged body: ``(constants, carry, xs) -> (carry, ys)``."""
    # `jax.lax.scan` makes a carry a constant if the body returns it in its own place, and keeps ys that are elements
    # of xs out of the loop. All other forwarded inputs it leaves in the body.
    handed_on = _handed_on(body.jaxpr)
    return (
        _is_pure(body.jaxpr)
        and all(i != num_constants + n for n, i in enumerate(handed_on[:num_carry]))
        and all(i is None or i < num_constants + num_carry for i in handed_on[num_carry:])
    )


def _is_pure(jaxpr: Any) -> bool:
    return not (jaxpr.effects or jaxpr.is_high)


def _handed_on(jaxpr: Any) -> list[int | None]:
    """Number of the input that each output is; None if it is computed."""
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    return [places.get(v) if isinstance(v, _jax.Var) else None for v in jaxpr.outvars]


def compiled(fun: Callable) -> Callable:
    """Compiled once for each structure where nothing is traced, inlined where something is; made when first called."""

    @functools.cache
    def jitted() -> Callable:
        return jax.jit(fun, inline=_jax.INLINE)

    return lambda *args: jitted()(*args)


class OfLeaves:
    """A function of trees as a function of their leaves, which returns the leaves of its output.

    Args:
        treedef: of the arguments.

    Attributes:
        out_tree: the structure of the last output.
    """

    out_tree: Any

    def __init__(self, fun: Callable, treedef: Any):
        self._fun, self._treedef = fun, treedef

    def __call__(self, *leaves: Any) -> list[Any]:
        outs, self.out_tree = jax.tree.flatten(self._fun(*self._treedef.unflatten(leaves)))
        return outs
