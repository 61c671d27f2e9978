"""Loops on CPUs whose steps have large products that do not depend on each other: XLA must be made to run these concurrently."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Literal
from .._tree import has_known_sizes


def concurrent_fori_loop(first: Any, last: Any, body_fun: Callable, carry: list, runs: Fraction) -> list:
    """`_jax.counted_fori_loop`, with small writes beside each step.

    XLA:CPU runs the kernels of a loop's body one after the other if there are no more than eight of them. Independent products then wait
    for each other, each of them split over all threads. With more kernels it runs independent ones concurrently. The condition
    reads the written buffers, or XLA would remove the writes.
    """

    def body(loop: tuple) -> tuple:
        i, carry, buffers = loop
        buffers = [jax.lax.dynamic_update_index_in_dim(b, i, i % len(b), 0) for b in buffers]
        return i + 1, body_fun(i, carry), buffers

    def condition(loop: tuple) -> Any:
        i, _, buffers = loop
        # Always true, since only step numbers are written, but XLA does not know that.
        return _jax.counted(functools.reduce(jnp.logical_and, [b[0] >= 0 for b in buffers], i < last), runs)

    # Of different lengths: XLA would write buffers of one length in one kernel.
    buffers = [_jax.replicated(jnp.zeros(n, jnp.int32)) for n in (5, 6, 7, 8)]
    return jax.lax.while_loop(condition, body, (first, carry, buffers))[1]


_LARGE = 2**22  # multiplications, from which on XLA splits a product over threads


def has_independent_products(jaxpr: Any) -> bool:
    """Whether there are two large products that do not depend on each other."""
    # A wrong answer loses time and changes no value. An inner jaxpr with large products counts as one product, so
    # products that are independent across two calls are seen only if the calls are.
    dependencies: dict[Any, frozenset] = {}  # for each variable, the large products that it is computed from
    large: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if any(map(has_independent_products, _jax.inner_jaxprs(eqn))):
            return True
        needed = frozenset().union(*(dependencies.get(v, ()) for v in eqn.invars if not isinstance(v, Literal)))
        if _is_large_product(eqn):
            # `large` holds the products before this one, which cannot depend on it. One that is not among `needed` is
            # independent.
            if not needed.issuperset(large):
                return True
            large.append(i)
            needed |= {i}
        dependencies.update(dict.fromkeys(eqn.outvars, needed))
    return False


def _is_large_product(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return any(_is_large_product(e) for jaxpr in _jax.inner_jaxprs(eqn) for e in jaxpr.eqns)
    left, ((contracted, _), _) = eqn.invars[0].aval, eqn.params["dimension_numbers"]
    if not all(has_known_sizes(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return False
    return eqn.outvars[0].aval.size * math.prod(left.shape[i] for i in contracted) >= _LARGE
