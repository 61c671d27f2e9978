"""Loops whose steps have large products that do not need each other, which XLA on CPUs runs side by side only if asked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._jax import Literal


def with_company(first: Any, last: Any, one: Callable, carry: list) -> list:
    """`jax.lax.fori_loop`, with small writes beside each step.

    On the CPU XLA runs a loop's body one kernel after the other if there are no more than eight of them, so that
    products that do not need each other wait for each other, each of them split over all threads. With more kernels it
    runs side by side what can be. The condition reads what is written, or XLA would drop it.
    """

    def body(loop: tuple) -> tuple:
        i, carry, marks = loop
        return i + 1, one(i, carry), [jax.lax.dynamic_update_index_in_dim(m, i, i % len(m), 0) for m in marks]

    def goes_on(loop: tuple) -> Any:
        i, _, marks = loop
        return functools.reduce(jnp.logical_and, [m[0] >= 0 for m in marks], i < last)

    # Of different lengths, or they were written by one kernel.
    marks = [_jax.replicated(jnp.zeros(n, jnp.int32)) for n in (5, 6, 7, 8)]
    return jax.lax.while_loop(goes_on, body, (first, carry, marks))[1]


_LARGE = 2**22  # multiplications, from which on XLA splits a product over threads


def overlaps(jaxpr: Any) -> bool:
    """Whether there are two large products of which neither needs the other."""
    needed: dict[Any, frozenset] = {}  # for each variable the large products that it is computed from
    large: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if any(map(overlaps, _jax.inner_jaxprs(eqn))):
            return True
        before = frozenset().union(*(needed.get(v, ()) for v in eqn.invars if not isinstance(v, Literal)))
        if _is_large(eqn):
            if not before.issuperset(large):
                return True
            large.append(i)
            before |= {i}
        needed.update(dict.fromkeys(eqn.outvars, before))
    return False


def _is_large(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return any(_is_large(e) for jaxpr in _jax.inner_jaxprs(eqn) for e in jaxpr.eqns)
    left, ((contracted, _), _) = eqn.invars[0].aval, eqn.params["dimension_numbers"]
    return eqn.outvars[0].aval.size * math.prod(left.shape[i] for i in contracted) >= _LARGE
