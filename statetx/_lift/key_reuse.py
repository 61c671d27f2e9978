"""Loops that run steps again, under JAX's checker of key reuse.

``jax_debug_key_reuse`` counts the uses of a key in the equations, and cannot know that a step which is run again draws the
same numbers again. While it is on, such a loop takes its keys as the words they are made of, which are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._equations.structure import Body


def is_needed(*bodies: Body) -> bool:
    """Whether the checker is on, and a key goes into one of the bodies or comes out."""
    ends = (v.aval for body in bodies for v in (*body.jaxpr.invars, *body.jaxpr.outvars))
    return _jax.checks_keys() and any(map(_is_key, ends))


def body_with_key_data(body: Body) -> Body:
    """The body with words in the places of keys."""
    invars, outvars = body.jaxpr.invars, body.jaxpr.outvars

    def run(*args: Any) -> list[Any]:
        return to_key_data(_jax.evaluate(body.jaxpr, (), to_keys(args, [v.aval for v in invars])))

    avals = [_jax.abstract(jax.eval_shape(_words, v.aval)) if _is_key(v.aval) else v.aval for v in invars]
    jaxpr, consts = _jax.stage(run, avals, traced_for="scan", name="step")
    assert not consts and len(jaxpr.outvars) == len(outvars)
    return Body(jaxpr, to_key_data(body.operands))


def loop_with_key_data(loop: Callable, body: Body) -> Callable:
    """A loop of lists of keys, by one of words that returns what the body returns: a list, or parts of it."""
    outs = [v.aval for v in body.jaxpr.outvars]

    def run(*parts: list) -> Any:
        leaves, treedef = jax.tree.flatten(loop(*map(to_key_data, parts)))
        return treedef.unflatten(to_keys(leaves, outs))

    return run


def to_key_data(values: Sequence[Any]) -> list[Any]:
    return [_words(x) if _is_key(_jax.abstract(x)) else x for x in values]


def to_keys(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Words as the keys that these types, or those of their elements, are."""
    return [
        jax.random.wrap_key_data(x, impl=_impl(aval)) if _is_key(aval) else x
        for x, aval in zip(values, avals, strict=True)
    ]


def _words(key: Any) -> Any:
    return jax.random.key_data(key)


def _impl(aval: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return found[0]


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", jnp.float32), jax.dtypes.prng_key)
